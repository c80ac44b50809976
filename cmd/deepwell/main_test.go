package main

import (
	"compress/gzip"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/golden"
	"github.com/deepwell/deepwell/internal/isolate"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/plugin"
	"github.com/deepwell/deepwell/replay"
)

func TestMain(m *testing.M) {
	isolate.Main()
	replay.Main()
	testscript.Main(m, map[string]func(){"deepwell": main})
}

// The scripts run the command as a user does, on the engines that are installed on this machine.
func TestScripts(t *testing.T) {
	engines, err := plugin.DefaultDir(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	examples, err := filepath.Abs(filepath.Join("..", "..", "examples"))
	if err != nil {
		t.Fatal(err)
	}
	stub := nvmlStub(t)
	testscript.Run(t, testscript.Params{
		Dir:           filepath.Join("testdata", "script"),
		UpdateScripts: golden.Update(),
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"poison": poison, "onejson": oneJSON, "unpack": unpack},
		Condition: func(cond string) (bool, error) {
			return cond == "nvmlstub" && stub != "" || cond == "long" && slowtest.Enabled, nil
		},
		Setup: func(env *testscript.Env) error {
			env.Setenv("DEEPWELL_HOME", filepath.Dir(engines))
			env.Setenv("DEEPWELL_CACHE", filepath.Join(env.WorkDir, "cache"))
			if err := enginetest.Share(filepath.Join(env.WorkDir, "cache")); err != nil {
				return err
			}
			env.Setenv("EXAMPLES", examples)
			env.Setenv("PROGRAMS", filepath.Join(examples, "..", "capture", "pt2", "testdata"))
			env.Setenv("NVMLSTUBDIR", stub)
			return nil
		},
	})
}

// oneJSON holds the last command's output to one JSON object that has the named members, and with
// a negation to one that has none of them.
func oneJSON(ts *testscript.TestScript, neg bool, args []string) {
	text := json.NewDecoder(strings.NewReader(ts.ReadFile("stdout")))
	var object map[string]any
	ts.Check(text.Decode(&object))
	if text.Decode(&object) != io.EOF {
		ts.Fatalf("more than one JSON object")
	}
	for _, name := range args {
		if _, ok := object[name]; ok == neg {
			ts.Fatalf("member %q: %v", name, ok)
		}
	}
}

// poison makes the last element of a file of weights, in bf16 or f32, NaN.
func poison(ts *testscript.TestScript, _ bool, args []string) {
	path := ts.MkAbs(args[0])
	text, err := os.ReadFile(path)
	ts.Check(err)
	copy(text[len(text)-2:], []byte{0xff, 0x7f})
	ts.Check(os.WriteFile(path, text, 0o644))
}

// unpack writes an archive of capture/pt2/testdata to a file.
func unpack(ts *testscript.TestScript, _ bool, args []string) {
	f, err := os.Open(filepath.Join(ts.Getenv("PROGRAMS"), args[0]+".pt2.gz"))
	ts.Check(err)
	defer f.Close()
	z, err := gzip.NewReader(f)
	ts.Check(err)
	data, err := io.ReadAll(z)
	ts.Check(err)
	ts.Check(os.WriteFile(ts.MkAbs(args[1]), data, 0o644))
}

// nvmlStub compiles the library that plays NVIDIA's driver: 8 B200 and others. No machine here
// has a GPU.
func nvmlStub(t *testing.T) string {
	t.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Log("no C compiler: probe is not tried against the driver's stand-in")
		return ""
	}
	dir := t.TempDir()
	source := filepath.Join("..", "..", "internal", "nvml", "testdata", "nvmlstub.c")
	out, err := exec.Command(cc, "-shared", "-fPIC", "-o", filepath.Join(dir, "libnvidia-ml.so.1"), source).CombinedOutput()
	if err != nil {
		t.Fatalf("cc: %v\n%s", err, out)
	}
	return dir
}

// Every command has two examples and a short help, and no more than 12 flags.
func TestHelpIsComplete(t *testing.T) {
	var walk func(h commandHelp)
	walk = func(h commandHelp) {
		if len(h.Examples) < 2 || h.Short == "" {
			t.Errorf("%s: %d examples, short %q", h.Use, len(h.Examples), h.Short)
		}
		if len(h.Flags) > 12 {
			t.Errorf("%s has %d flags", h.Use, len(h.Flags))
		}
		for _, c := range h.Commands {
			if c.Name != "completion" && c.Name != "help" {
				walk(c)
			}
		}
	}
	a := &app{}
	walk(describe(a.root()))
}

// What users install, as python/backend.py builds it, has at most 21 MB; symbols and debugging
// add 8.4 MB (docs/decisions/0010-sizes.md).
func TestBinaryIsSmall(t *testing.T) {
	slowtest.Only(t) // builds the binary
	out := filepath.Join(t.TempDir(), "deepwell")
	flags := "-ldflags=-s -w -buildid="
	if script, err := os.ReadFile("../../python/backend.py"); err != nil ||
		!strings.Contains(string(script), `"-trimpath", "`+flags+`"`) {
		t.Errorf("python/backend.py builds with other flags: %v", err)
	}
	cmd := exec.Command("go", "build", "-trimpath", flags, "-o", out, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "CC=/nonexistent/cc")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, text)
	}
	info, err := os.Stat(out)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("the binary has %d bytes", info.Size())
	if info.Size() > 21_000_000 {
		t.Errorf("the binary has %d bytes, more than 21 MB", info.Size())
	}
}

func TestParseValue(t *testing.T) {
	for text, want := range map[string]any{
		"true": true, "False": false, "12": int64(12), "-3": int64(-3), "0.5": 0.5,
		"COLLECTIVE_PIPELINING_MODE_ON": "COLLECTIVE_PIPELINING_MODE_ON", "": "",
	} {
		if got := parseValue(text); got != want {
			t.Errorf("%q is %v (%T), want %v", text, got, got, want)
		}
	}
}
