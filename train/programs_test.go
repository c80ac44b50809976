package train_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/train"
)

// The gradients of a layer go as one, the two halves of a batch do not: at 64 cards the limit lies
// between 99.6 and 134 MB; at 1,024 a layer's gradients are within what XLA joins by itself.
func TestGradientsOfALayerAreJoined(t *testing.T) {
	for _, row := range []struct {
		plan     string
		from, to int64
	}{
		{"llama3.1-405b-64xb200.json", 99_600_000, 134_217_728}, {"llama3.1-405b-1024xb200.json", 0, 0},
	} {
		path := filepath.Join("..", "examples", "plans", row.plan)
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		p, err := plan.Parse(text, path)
		if err != nil {
			t.Fatal(err)
		}
		preset, err := model.Find(p.Model)
		if err != nil {
			t.Fatal(err)
		}
		w, err := train.Write(preset.Config, train.RecipeOf(p), "sm_100", p)
		if err != nil {
			t.Fatal(err)
		}
		limit, _ := w.Gradient.Flags["xla_gpu_reduce_scatter_combine_threshold_bytes"].(int64)
		if limit < row.from || limit > row.to {
			t.Errorf("%s: joined up to %d bytes, not from %d to %d", row.plan, limit, row.from, row.to)
		}
	}
}
