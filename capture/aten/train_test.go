package aten

import (
	"cmp"
	"context"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/train"
)

// chance is a dataset of the same random sequences in every step.
type chance struct{ seq int } // of 8 tokens, if it does not say

func (c chance) Take(_ context.Context, at data.Position, sequences, _, _ int) (*data.Batch,
	data.Position, error) {
	r := rand.New(rand.NewPCG(1, 2))
	list := make([][]int32, sequences)
	for i := range list {
		for range cmp.Or(c.seq, 8) + 1 { // the inputs, and the label of the last
			list[i] = append(list[i], r.Int32N(40))
		}
	}
	b, err := data.NewBatch(list)
	return b, at, err
}

// Captured models are trained like any other: they learn a batch by heart on the CPU engine, in f32
// and in bf16.
func TestCapturedModelsAreTrained(t *testing.T) {
	e, err := engine.Open(t.Context(), "cpu", engine.Options{Cache: enginetest.Cache()})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	for _, name := range []string{"nanogpt", "llama", "mixtral"} {
		for _, elem := range []dtype.DType{dtype.F32, dtype.BF16} {
			t.Run(name+"_"+elem.String(), func(t *testing.T) {
				m, _ := load(t, name)
				r := recipe.Default()
				r.Out, r.Steps, r.Batch, r.Seq, r.Precision = t.TempDir(), 20, 4, 8, elem
				r.Optimizer.LR, r.Optimizer.Warmup = 1e-2, 1
				tr, err := train.New(t.Context(), train.Options{Engine: e, Model: m, Recipe: r,
					Data: chance{}})
				if err != nil {
					t.Fatal(err)
				}
				defer tr.Close()
				first, last := math.NaN(), math.NaN()
				for {
					s, err := tr.Step(t.Context())
					if errors.Is(err, io.EOF) {
						break
					} else if err != nil {
						t.Fatal(err)
					}
					if last = s.Loss; s.Step == 1 {
						first = s.Loss
					}
				}
				t.Logf("%-8s %s loss %.3f to %.3f", name, elem, first, last)
				if !(last < first/2) {
					t.Errorf("the loss went from %.3f to %.3f", first, last)
				}
			})
		}
	}
}

// A captured Llama has the names that plans shard: every way to use two devices gives the same loss
// after three steps.
func TestCapturedModelsAreSharded(t *testing.T) {
	e, err := engine.Open(t.Context(), "cpu", engine.Options{Devices: 2, Cache: enginetest.Cache()})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	want := math.NaN()
	for _, row := range plantest.Meshes() {
		if !slices.Contains([]string{"dp", "zero3", "tp", "sp", "cp", "ring"}, row.Name) {
			continue
		}
		m, _ := load(t, "llama")
		r := recipe.Default()
		r.Out, r.Steps, r.Batch, r.Seq, r.Precision = t.TempDir(), 3, 4, 8, dtype.F32
		r.Optimizer.LR, r.Optimizer.Warmup = 1e-2, 1
		p := plan.Default()
		p.Cluster, p.Seq, p.Batch = "2xcpu", 8, 4
		row.Apply(p)
		tr, err := train.New(t.Context(), train.Options{Engine: e, Model: m, Recipe: r, Data: chance{},
			Plan: p})
		if err != nil {
			t.Fatalf("%s: %v", row.Name, err)
		}
		last := math.NaN()
		for {
			s, err := tr.Step(t.Context())
			if errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", row.Name, err)
			}
			last = s.Loss
		}
		tr.Close()
		t.Logf("%-6s %.6f", row.Name, last)
		if math.IsNaN(want) {
			want = last
		}
		if !(math.Abs(last-want) < 1e-5*want) {
			t.Errorf("under %s the loss is %v, and %v under dp", row.Name, last, want)
		}
	}
}
