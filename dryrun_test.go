package deepwell_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/dryrun"
	"github.com/deepwell/deepwell/event"
)

// Slow links stretch every collective that is not hidden, along whichever axis, and what was hidden
// comes out. Once only sends between stages and the last reduction were scaled, so that a plan of
// FSDP 32 and TP 2 took the same with links a hundred times as slow.
func TestWhatIfLinksScaleEveryCollective(t *testing.T) {
	const types = `"types": {"params": "bf16", "collectives": "bf16"}`
	for name, text := range map[string]string{
		"fsdp": `{"model": "llama3.1-8b", "cluster": "8xb200", "seq": 8192, "batch": 64,
			"microbatches": 8, "fsdp": 8, ` + types + `}`,
		"fsdp and tp": `{"model": "llama3.1-70b", "cluster": "64xgb200", "seq": 8192, "batch": 512,
			"microbatches": 16, "fsdp": 32, "tp": {"size": 2, "sequence": true}, ` + types + `}`,
		"cp": `{"model": "llama3.1-8b", "cluster": "16xb200", "seq": 32768, "batch": 16,
			"microbatches": 8, "fsdp": 2, "cp": {"size": 8}, ` + types + `}`,
		"pp": `{"model": "llama3.1-70b", "cluster": "64xgb200", "seq": 8192, "batch": 512,
			"microbatches": 32, "fsdp": 16, "pp": {"size": 4, "schedule": "1f1b"}, ` + types + `}`,
		"ep": `{"model": "deepseek-v3", "cluster": "256xgb200", "seq": 4096, "batch": 2048,
			"microbatches": 8, "fsdp": 4, "ep": 64, ` + types + `}`,
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "plan.json")
			if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
				t.Fatal(err)
			}
			env := &deepwell.Env{Events: event.Tee()}
			sent := func(whatIf dryrun.WhatIf) (step, exposed float64) {
				ran, err := env.DryRun(context.Background(), deepwell.DryRunJob{Plan: path, Price: 3,
					Tokens: 1e12, WhatIf: whatIf})
				if ran.Timeline == nil {
					t.Fatal(err)
				}
				for _, p := range ran.Parts {
					if slices.Contains([]string{"tensor-parallel communication", "context-parallel communication", "expert-parallel communication",
						"FSDP communication"}, p.Name) {
						exposed += p.Seconds
					}
				}
				return ran.Step, exposed
			}
			step, exposed := sent(dryrun.WhatIf{})
			slow, stretched := sent(dryrun.WhatIf{Links: 4})
			if exposed == 0 || stretched < 4*exposed*0.999 {
				t.Errorf("%.3g s of communication become %.3g s with links=4", exposed, stretched)
			}
			if slow-step < 3*exposed*0.999 {
				t.Errorf("a step of %.4g s becomes %.4g s; %.3g s of communication are exposed", step, slow,
					exposed)
			}
		})
	}
}

// What lower precision would save is among the advice where the GPU has it, and only there:
// stranger A12.
func TestLowerPrecisionIsAdvised(t *testing.T) {
	for cluster, want := range map[string][]string{
		"8xb200": {"--precision mxfp8; ", "--precision nvfp4; "}, "8xh100": nil} {
		path := filepath.Join(t.TempDir(), "plan.json")
		text := `{"model": "llama3.1-8b", "cluster": "` + cluster + `", "seq": 8192, "batch": 64,
			"microbatches": 8, "fsdp": 8, "types": {"params": "bf16", "collectives": "bf16"}}`
		if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
		ran, err := (&deepwell.Env{Events: event.Tee()}).DryRun(t.Context(),
			deepwell.DryRunJob{Plan: path, Price: 3, Tokens: 1e12})
		if ran.Timeline == nil {
			t.Fatal(err)
		}
		var advised []string
		for _, h := range ran.Helps {
			if at := strings.Index(h.Change, "compare the losses"); at > 0 {
				advised = append(advised, h.Change[:at])
			}
			if h.Step >= ran.Step {
				t.Errorf("%s: %s takes %v s, the plan %v", cluster, h.Change, h.Step, ran.Step)
			}
		}
		slices.Sort(advised)
		if !slices.Equal(advised, want) {
			t.Errorf("%s: advised %q, want %q", cluster, advised, want)
		}
	}
}
