// Command pluginupdate rehearses an update of the CUDA plugin: it compiles and runs the tests'
// programs with another version of it, beside the pinned one, and tells by name what changed. The
// other version is never installed as an engine of the user's.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/deepwell/deepwell/plugin"
)

func main() {
	version := flag.String("version", "", "the other version of the package, as pip names it")
	dir := flag.String("dir", "", "where the other engine and the logs are kept; else in the cache")
	only := flag.String("replay.only", "", "replay programs whose names match, not the selection")
	flag.BoolVar(&resume, "resume", false, "take the logs of a run that was stopped")
	flag.Parse()
	if err := run(context.Background(), *version, *dir, *only); err != nil {
		fmt.Fprintln(os.Stderr, "pluginupdate:", err)
		os.Exit(1)
	}
}

// resume says that tests whose logs are there are not run again.
var resume bool

// A side is one of the two plugins, and what is known of it.
type side struct {
	version string
	dir     string   // for logs
	env     []string // more variables
	flags   []string // of the go command
	library string   // the plugin's file
}

// softTests are the tests that open the plugin on software GPUs.
const softTests = "GPUsOpen|OutOfMemory|FailedGPU|ComputeWhat|CollectivesOf|CollectivesInGraphs|" +
	"TrainingGives|SoftwareGPU"

func run(ctx context.Context, version, dir, only string) error {
	if version == "" {
		return errors.New("which version? See pip index versions " + packageName + ", and give -version")
	}
	if dir == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return err
		}
		dir = filepath.Join(cache, "deepwell-ci", "pluginupdate", version)
	}
	before, after, err := sides(ctx, version, dir)
	if err != nil {
		return err
	}
	fmt.Printf("%s %s beside %s, which is pinned\n", packageName, version, before.version)
	if err := compareNames(before, after); err != nil {
		return err
	}
	fmt.Printf("\ndoctor, with %s\n", version)
	said, _ := after.command(ctx, "run", "./cmd/deepwell", "doctor") // its lines say what failed
	list("  ", regexp.MustCompile(`(?m)^FAIL.*`).FindAllString(said, -1))

	if err := runPart(ctx, before, after); err != nil {
		return err
	}
	return replayPart(ctx, before, after, only)
}

// runPart runs the tests that need software GPUs, with both plugins.
func runPart(ctx context.Context, before, after *side) error {
	fmt.Printf("\nsoftware GPU: functions that are looked up, and instructions of PTX\n")
	var said string
	used := func(s *side) (path string, err error) {
		path = filepath.Join(s.dir, "softgpu.txt")
		if _, done := s.logged("softgpu"); !done {
			if err := os.WriteFile(path, nil, 0o644); err != nil {
				return "", err
			}
		}
		s.env = append(s.env, "SOFTGPU_LOG="+path)
		said, err = s.test(ctx, "softgpu", "./internal/softgpu", "./lower", "-run", softTests)
		return path, err
	}
	if err := compareUses(before, after, used); err != nil {
		return err
	}
	if strings.Contains(said, "--- FAIL") {
		fmt.Printf("  Tests ended early with %s: what only %s has may not have been reached.\n",
			after.version, before.version)
	}
	fmt.Printf("\nsoftware GPU: tests with %s\n", after.version)
	verdict(said) // of the last side
	return nil
}

// replayPart compares what optimized programs are made of, and replays the other plugin's programs.
func replayPart(ctx context.Context, before, after *side, only string) error {
	fmt.Printf("\nreplay: what programs are made of\n")
	which := []string{"-tags", "long", "./replay"}
	if only != "" {
		which = append(which, "-replay.only", only)
	}
	var said string
	census := func(s *side) (path string, err error) {
		path = filepath.Join(s.dir, "census.txt")
		said, err = s.test(ctx, "census", append(which, "-run", "CensusOfSelection", "-replay.census",
			path)...)
		return path, err
	}
	if err := compareCensuses(before, after, census); err != nil {
		return err
	}
	fmt.Printf("\nreplay: compiles with %s\n", after.version)
	verdict(said) // programs that are not compiled are named
	fmt.Printf("\nreplay: results beside the references, with %s\n", after.version)
	said, err := after.test(ctx, "replay", append(which, "-run", "TestReplay$")...)
	if err != nil {
		return err
	}
	fmt.Printf("  %d comparisons\n", strings.Count(said, "; bound "))
	verdict(said)
	return nil
}

// sides gives the pinned plugin and the other one, which is brought to disk if it is not there.
func sides(ctx context.Context, version, dir string) (before, after *side, err error) {
	engines, err := plugin.DefaultDir(os.Getenv)
	if err != nil {
		return nil, nil, err
	}
	b, err := plugin.Open(ctx, engines, engineName)
	if err != nil {
		return nil, nil, err
	}
	before = &side{version: b.Version, dir: filepath.Join(dir, "pinned"), library: b.Plugin}
	after = &side{version: version, dir: filepath.Join(dir, "other")}
	for _, s := range []*side{before, after} {
		if err := os.MkdirAll(s.dir, 0o755); err != nil {
			return nil, nil, err
		}
	}
	if version == b.Version {
		return nil, nil, fmt.Errorf("%s is the pinned version", version)
	}
	o, err := prepare(ctx, engines, b, version, after.dir)
	if err != nil {
		return nil, nil, err
	}
	after.env, after.flags = []string{"DEEPWELL_HOME=" + o.home}, []string{"-overlay", o.overlay}
	after.library = o.library
	return before, after, nil
}

// command runs the go command and gives what it says.
func (s *side) command(ctx context.Context, verb string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", append(append([]string{verb}, s.flags...), args...)...)
	cmd.Env = append(append(os.Environ(), "CGO_ENABLED=0"), s.env...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

func (s *side) log(name string) string { return filepath.Join(s.dir, name+".log") }

// logged gives what tests said in a run that is resumed, if they came to their end.
func (s *side) logged(name string) (string, bool) {
	text, err := os.ReadFile(s.log(name))
	return string(text), resume && err == nil
}

// test runs tests and keeps their output in a log. That tests fail is no error: their output says
// what changed. That none was run is one.
func (s *side) test(ctx context.Context, name string, args ...string) (string, error) {
	if said, done := s.logged(name); done {
		return said, nil
	}
	start := time.Now()
	said, err := s.command(ctx, "test", append([]string{"-count=1", "-v", "-timeout", "120m"},
		args...)...)
	log := s.log(name)
	if err := os.WriteFile(log, []byte(said), 0o644); err != nil {
		return "", err
	}
	fmt.Fprintf(os.Stderr, "%s, %s: %.0f s, %s\n", s.version, name, time.Since(start).Seconds(), log)
	if !strings.Contains(said, "--- ") {
		return "", fmt.Errorf("no test was run: %w; see %s", err, log)
	}
	return said, nil
}
