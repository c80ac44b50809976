package footprint_test

import (
	"math"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/estimate/footprint"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
)

// under is a predictor of a precision's policy for b200.
func under(t *testing.T, c *model.Config, name string) *footprint.Predictor {
	t.Helper()
	p, err := precision.Default(c, name)
	if err != nil {
		t.Fatal(err)
	}
	f, err := footprint.New(c, "sm_100")
	if err != nil {
		t.Fatal(err)
	}
	f.In(p)
	return f
}

// What a gradient takes are the copies of its weights, but for tokens and places: the arguments of
// the compiled programs of llama3.1-8b over 8 B200 (docs/precision.md).
func TestCopiesAreTheCompilers(t *testing.T) {
	c := config(t, "llama3.1-8b")
	p := plan.Default()
	p.Seq, p.Batch, p.FSDP = 8192, 8, plan.FSDP{Size: 8, Zero: 3, Gather: "layer"}
	p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
	for name, arguments := range map[string]int64{"bf16": 2008129540, "mxfp8": 2062655492,
		"nvfp4": 1364076020} {
		got, err := under(t, c, name).Predict(p)
		if err != nil {
			t.Fatal(err)
		}
		if r := got.Ranks[0]; math.Abs(float64(arguments-r.Params)) > 1<<18 {
			t.Errorf("%s: copies of %d bytes, the program takes %d", name, r.Params, arguments)
		}
	}
}

// Where rounds have several layers a pipeline may have stages without any, and stages whose layers
// differ.
func TestStagesOfAPolicy(t *testing.T) {
	c := config(t, "gemma2-9b")
	p := example()
	p.TP, p.Recompute = plan.TP{}, nil
	p.PP = plan.PP{Size: 8, Schedule: "interleaved", Virtual: 4}
	for _, name := range []string{"mxfp8", "nvfp4"} {
		quantized, err := under(t, c, name).Predict(p)
		if err != nil {
			t.Fatal(err)
		}
		all := under(t, c, "bf16")
		wide, err := all.Predict(p)
		if err != nil {
			t.Fatal(err)
		}
		for i := range quantized.Loads {
			if quantized.Loads[i].Residuals > wide.Loads[i].Residuals {
				t.Errorf("%s, stage %d: %+v, in bf16 %+v", name, i, quantized.Loads[i], wide.Loads[i])
			}
		}
		for i := range quantized.Ranks {
			if quantized.Ranks[i].Grads != wide.Ranks[i].Grads {
				t.Errorf("%s, rank %d: %+v, in bf16 %+v", name, i, quantized.Ranks[i], wide.Ranks[i])
			}
		}
		if quantized.Loads[0].Residuals >= wide.Loads[0].Residuals {
			t.Errorf("%s keeps no less", name)
		}
	}
	p.PP.Schedule, p.PP.Virtual = "zb-v", 2
	if _, err := under(t, c, "nvfp4").Predict(p); err != nil {
		t.Fatal(err)
	}
}

// A shard of 2560/32 elements is not whole blocks of 32: it is gathered in bf16, quantized along
// the other dimension only, and its master may be on the host. The sizes are those the compiled
// programs of this plan have.
func TestCopiesOfRaggedShards(t *testing.T) {
	c := config(t, "qwen3-4b")
	p := plan.Default()
	p.Seq, p.Batch, p.FSDP = 2048, 32, plan.FSDP{Size: 32, Zero: 3, Gather: "microbatch"}
	p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
	p.Precision, p.Offload = "mxfp8", []string{plan.Activations, plan.OptimizerState}
	got, err := under(t, c, "mxfp8").Predict(p)
	if err != nil {
		t.Fatal(err)
	}
	if r := got.Ranks[0]; r.Params != 357445632 || r.Optimizer != 47185920 {
		t.Errorf("parameters %d, optimizer %d", r.Params, r.Optimizer)
	}
}
