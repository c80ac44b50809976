package gpubench

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/program"
)

func config(t *testing.T, name string) *model.Config {
	t.Helper()
	m, err := capture.Open(name, capture.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	return m.Config
}

// Rows are of the model's own sizes, in every format; a layer is half of what three take longer
// than one.
func TestRows(t *testing.T) {
	for _, row := range []struct {
		kind, model, format, says string
		rows                      int
	}{
		{GEMM, "llama3.1-8b", "", "linear, self_attn.q_proj 2048×4096×4096", 5},
		{GEMM, "llama3.1-8b", "mxfp8", "linear, mlp.down_proj 2048×4096×14336", 5},
		{GEMM, "llama3.1-8b", "nvfp4", "linear, mlp.up_proj 2048×14336×4096", 5},
		{Attention, "llama3.1-8b", "", "2048 tokens, 32 heads of 128, 8 of keys", 1},
		{Layer, "llama3.1-8b", "mxfp8", "2048 tokens of width 4096", 1},
		{MoE, "mixtral-8x7b", "", "2048 tokens of width 4096", 1},
		{GEMM, "deepseek-v3", "", "linear, mlp.down_proj 2048×7168×18432", 11}, // three layers are dense
		{Attention, "deepseek-v3", "", "2048 tokens, 128 heads of 192, 128 of keys", 1},
		{Attention, "gemma2-2b", "", "2048 tokens, 8 heads of 256, 4 of keys, window 4096", 2},
	} {
		calls := 0
		r, err := Run(t.Context(), Options{Kind: row.kind, Model: config(t, row.model),
			Format: dtype.Format(row.format), Seq: 2048, Arch: "sm_100", Peak: 1e15,
			Timer: func(context.Context, *program.Module, int64) (float64, error) {
				calls++
				return float64(calls) * 1e-3, nil // the second program takes longer
			}})
		if err != nil {
			t.Fatal(err)
		}
		var all []string
		for _, one := range r.Rows {
			all = append(all, one.Operation+" "+one.Shape)
			if one.Own <= 0 || one.Plain <= 0 || one.Roofline <= 0 {
				t.Errorf("%+v", one)
			}
		}
		if text := strings.Join(all, "\n"); len(all) != row.rows || !strings.Contains(text, row.says) {
			t.Errorf("%s %s: %s", row.kind, row.format, text)
		}
	}
}

// What cannot be measured is refused.
func TestRefused(t *testing.T) {
	for kind, name := range map[string]string{"gem": "llama3.1-8b", Layer: "deepseek-v3"} {
		if _, err := Run(t.Context(), Options{Kind: kind, Model: config(t, name), Seq: 64}); err == nil {
			t.Errorf("%s of %s is measured", kind, name)
		}
	}
}

// maxautotune.py runs each kind, here on the CPU; DEEPWELL_TORCH names a Python with torch.
func TestTorch(t *testing.T) {
	if _, why := torchTimes(t.Context(), "", "cuda", nil); !strings.Contains(why, "--torch") {
		t.Error(why)
	}
	if _, why := torchTimes(t.Context(), "/nonexistent/python", "cuda", nil); why == "" {
		t.Error("a Python that is not there has run")
	}
	python := os.Getenv("DEEPWELL_TORCH")
	if python == "" {
		t.Skip("DEEPWELL_TORCH names no Python")
	}
	block := torchCase{Seq: 64, Hidden: 64, Heads: 4, KVHeads: 2, Head: 16, MLP: 96, Experts: 4, Top: 2}
	list := []torchCase{{Kind: "gemm", M: 64, N: 32, K: 48}, {}, block, block, block}
	list[2].Kind, list[3].Kind, list[4].Kind = "attention", "layer", "moe"
	seconds, said := torchTimes(t.Context(), python, "cpu", list)
	if len(seconds) != len(list) {
		t.Fatal(said)
	}
	for i, s := range seconds {
		if (s > 0) != (list[i].Kind != "") {
			t.Errorf("%s: %v s", list[i].Kind, s)
		}
	}
	t.Log(said, seconds)
	if _, why := torchTimes(t.Context(), python, "cuda", list); !strings.Contains(why, "sees no GPU") {
		t.Log(why)
	}
}
