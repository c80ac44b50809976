package deepwell_test

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
)

// oldLoss bounds how far a resumed run's losses may be from the losses of the binary that began it,
// relative: both sum the same f32 numbers, in an order that a later builder of programs may change.
// Measured on one machine: 0.
const oldLoss = 1e-5

// Runs that commit 3c16e73 began go on with its losses: on one device in f32, in MXFP8, and over
// two pipeline stages. testdata/runs/3c16e73/make.sh wrote them, and what that binary went on to
// say.
func TestRunsOfAnOldBinaryGoOn(t *testing.T) {
	fixture := os.DirFS(filepath.Join("testdata", "runs", "3c16e73"))
	for _, c := range []struct {
		name string
		job  deepwell.TrainJob
	}{
		{"one", deepwell.TrainJob{Set: []string{"precision=f32"}}},
		{"few", deepwell.TrainJob{Set: []string{"precision=mxfp8"}}},
		{"two", deepwell.TrainJob{Set: []string{"precision=f32", "microbatch=1"}, Plan: "stages.json"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.name != "one" {
				slowtest.Only(t)
			}
			f := folder{t, t.TempDir()}
			if err := os.CopyFS(f.dir, fixture); err != nil {
				t.Fatal(err)
			}
			// run.toml is the user's, who has to rename its keys; the stored recipe keeps the old ones.
			toml := filepath.Join(f.dir, "run.toml")
			text := strings.Replace(f.read("run.toml"), "rate = ", "lr = ", 1)
			if err := os.WriteFile(toml, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
			var want []event.Step
			if err := json.Unmarshal([]byte(f.read(c.name+".json")), &want); err != nil {
				t.Fatal(err)
			}
			c.job.Set = append(c.job.Set, "out="+c.name)
			c.job.Until = 6
			h, err := f.train(enginetest.Caches(t), c.job)
			if err != nil || !h.resumed {
				t.Fatalf("resumed %v: %v", h.resumed, err)
			}
			if len(h.steps) != len(want) {
				t.Fatalf("%d steps, the old binary made %d", len(h.steps), len(want))
			}
			for i, w := range want {
				if got := h.steps[i]; got.Step != w.Step ||
					!(math.Abs(float64(got.Loss-w.Loss)) <= oldLoss*math.Abs(float64(w.Loss))) {
					t.Errorf("step %d has loss %v, the old binary's step %d has %v",
						got.Step, got.Loss, w.Step, w.Loss)
				}
			}
			t.Logf("warnings: %q", h.warnings)
		})
	}
}

// Plans and policies that commit 3c16e73 wrote load: a plan prints the same bytes again, and a
// policy gives every GEMM the format that today's default gives it.
func TestArtifactsOfAnOldBinaryLoad(t *testing.T) {
	dir := filepath.Join("testdata", "runs", "3c16e73")
	read := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for _, name := range []string{"plan.json", "moe.json"} {
		p, err := plan.Parse(read(name), name)
		if err != nil {
			t.Fatal(err)
		}
		if got := p.String(); got != string(read(name)) {
			t.Errorf("%s is printed as\n%s", name, got)
		}
		if _, err := model.Find(p.Model); err != nil {
			t.Error(err)
		}
	}
	old, err := precision.Parse(read("policy.json"), "policy.json")
	if err != nil {
		t.Fatal(err)
	}
	preset, err := model.Find("llama3.1-8b")
	if err != nil {
		t.Fatal(err)
	}
	now, err := precision.Default(preset.Config, "nvfp4")
	if err != nil {
		t.Fatal(err)
	}
	if err := old.Check(preset.Config); err != nil {
		t.Error(err)
	}
	for layer := range old.Layers {
		for _, linear := range []string{"q", "k", "v", "o", "gate", "up", "down"} {
			for _, gemm := range []string{precision.Fprop, precision.Dgrad, precision.Wgrad} {
				if a, b := old.Of(layer, linear, gemm), now.Of(layer, linear, gemm); a != b {
					t.Errorf("layer %d, %s of %s: %s, the default is %s", layer, gemm, linear, a, b)
				}
			}
		}
	}
}
