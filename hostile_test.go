package deepwell_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/tokenizer"
)

// Devices that never end and pipes that never begin are refused by every command that reads a file,
// at once. They used to fill the memory, or to wait for ever.
func TestDevicesAndPipesAreRefused(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe.json")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Skip(err)
	}
	zero := filepath.Join(t.TempDir(), "zero.json")
	if err := os.Symlink("/dev/zero", zero); err != nil {
		t.Fatal(err)
	}
	env := &deepwell.Env{Events: event.Tee()}
	ctx := context.Background()
	for _, path := range []string{pipe, zero} {
		for name, read := range map[string]func() error{
			"train":     func() error { _, err := env.Train(ctx, deepwell.TrainJob{Path: path}); return err },
			"dryrun":    func() error { _, err := env.DryRun(ctx, deepwell.DryRunJob{Plan: path}); return err },
			"tokenizer": func() error { _, err := tokenizer.Load(path); return err },
			"compile": func() error {
				_, err := env.Compile(ctx, deepwell.CompileJob{Source: path, Cluster: "8xb200"})
				return err
			},
			"from": func() error {
				_, err := env.Plan(ctx, deepwell.PlanJob{Source: "llama3.1-8b", Cluster: "8xb200",
					FromStack: "megatron", FromFile: path})
				return err
			},
		} {
			done := make(chan error, 1)
			go func() { done <- read() }()
			select {
			case err := <-done:
				if err == nil || diag.From(err).Code == diag.Internal {
					t.Errorf("%s of %s: %v", name, filepath.Base(path), err)
				}
			case <-time.After(time.Minute):
				t.Fatalf("%s of %s hangs", name, filepath.Base(path))
			}
		}
	}
}

// Small files that made the parsers take gigabytes, or half a minute.
func TestSmallFilesTakeLittleMemory(t *testing.T) {
	doubling := make([]string, 40)
	for i := range doubling {
		doubling[i] = `{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}`
	}
	model := `"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}`
	env, ctx := &deepwell.Env{Events: event.Tee()}, t.Context()
	dryrun := func(pp string) func() error {
		path := filepath.Join(t.TempDir(), "plan.json")
		text := `{"model": "llama3.1-8b", "cluster": "8xb200", "seq": 8192, "batch": 64,
			"microbatches": 4, "types": {"params": "bf16"}, ` + pp + `}`
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return func() error { _, err := env.DryRun(ctx, deepwell.DryRunJob{Plan: path}); return err }
	}
	stages := `"pp": {"size": 8, "virtual": %d, "schedule": "interleaved"}`
	for name, read := range map[string]func() error{
		"a plan of 2^27 stages":             dryrun(fmt.Sprintf(stages, 1<<24)),
		"a plan of 800,000 stages":          dryrun(fmt.Sprintf(stages, 100_000)),
		"a plan of 64 stages for 32 layers": dryrun(fmt.Sprintf(stages, 8)),
		"experts in parallel without any":   dryrun(`"ep": 8`),
		"40 replacements that double": func() error {
			_, err := tokenizer.Parse([]byte(`{"version": "1.0", "normalizer": {"type": "Sequence", "normalizers": [` +
				strings.Join(doubling, ",") + `]}, ` + model + `}`))
			return err
		},
		"a template of a million tokens": func() error {
			_, err := tokenizer.Parse([]byte(`{"version": "1.0", ` + model + `, "post_processor": {"type": "TemplateProcessing",
				"single": [` + strings.Repeat(`{"SpecialToken": {"id": "s"}},`, 1000) + `{"Sequence": {"id": "A"}}],
				"special_tokens": {"s": {"ids": [0` + strings.Repeat(",0", 999) + `]}}}}`))
			return err
		},
		"a table of 200,000 parts": func() error {
			_, err := recipe.Parse([]byte("[a"+strings.Repeat(".a", 200_000)+"]\n"), "run.toml", nil, os.Getenv)
			return err
		},
		"a key of a megabyte": func() error {
			_, err := recipe.Parse([]byte(strings.Repeat("k", 1<<20)+" = 1\n"), "run.toml", nil, os.Getenv)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			start := time.Now()
			if err := read(); err == nil {
				t.Error("taken")
			}
			runtime.ReadMemStats(&after)
			took := fmt.Sprintf("%d MiB in %s", (after.TotalAlloc-before.TotalAlloc)>>20, time.Since(start).Round(time.Millisecond))
			if after.TotalAlloc-before.TotalAlloc > 512<<20 {
				t.Errorf("it takes %s", took)
			}
			t.Log(took)
		})
	}
}
