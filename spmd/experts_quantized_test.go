package spmd_test

import (
	"math"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/spmd"
)

// quantizedExpertMeshes shard the experts of quantized GEMMs, alone and with what shards their
// weights.
func quantizedExpertMeshes() []mesh {
	return []mesh{
		{Name: "ep", Apply: func(p *plan.Plan) { p.EP = 2 }},
		{Name: "ep zero3", Apply: func(p *plan.Plan) {
			p.EP, p.FSDP = 2, plan.FSDP{Size: 2, Zero: 3, Gather: "layer"}
		}},
		{Name: "zero2", Apply: func(p *plan.Plan) { p.FSDP = plan.FSDP{Size: 2, Zero: 2, Gather: "step"} }},
		{Name: "ep tp", Apply: func(p *plan.Plan) { p.EP, p.TP.Size = 2, 2 }},
	}
}

// Experts in a format round alike under every plan, but for what depends on who is whose neighbour
// in the slots of an expert: the blocks of wgrad, which lie along slots, and the numbers that
// NVFP4's gradients are rounded with. wgrad stays within what two roundings differ by.
func TestQuantizedExpertsAgreeWithOneDevice(t *testing.T) {
	c, size := blocky(64, 1), plantest.Size{Batch: 4, Micros: 1, Seq: 32}
	c.Arch = "mixtral"
	c.MoE = &model.MoE{Experts: 4, TopK: 2, MLP: 64, Shared: 64, Score: "softmax", Normalize: true,
		Scale: 1}
	for format, apart := range map[string]float64{"mxfp8": 0.1, "nvfp4": 0.6} {
		shape := model.Shape{Batch: size.Batch, Seq: size.Seq, Elem: dtype.F32,
			Experts: model.ExpertShape{Blocks: true}}
		g, err := c.Graph(shape)
		if err != nil {
			t.Fatal(err)
		}
		policy := &precision.Policy{Layers: 1, Rules: []precision.Rule{{
			Linears: []string{"experts", "mlp"}, To: 1, Format: dtype.Format(format)}}}
		if err := policy.Mark(g, c.Params()); err != nil {
			t.Fatal(err)
		}
		whole := quantizedBatch(g, c)
		whole[ir.InputSlotNoise] = &eval.Array{Type: whole[ir.InputNoise].Type, Data: []float64{7, 11}}
		first, err := quantizedGradients(g, nil, whole)
		if err != nil {
			t.Fatal(err)
		}
		rows := quantizedExpertMeshes()
		if !slowtest.Enabled { // the interpreter is slow
			rows = rows[1:2]
		}
		for _, m := range rows {
			got, err := quantizedGradients(g, quantizedPlan(m, format, size), whole)
			if err != nil {
				t.Errorf("%s %s: %v", format, m.Name, err)
				continue
			}
			same, worst := map[string][]float64{}, 0.0
			for name, want := range first {
				expert := strings.Contains(name, ".expert_")
				if name == spmd.Loss || format == "mxfp8" && !expert {
					same[name] = want
					continue
				}
				d := distance(got[name], want)
				if worst = math.Max(worst, d); !(d <= apart) {
					t.Errorf("%s %s: %s is off by %g", format, m.Name, name, d)
				}
			}
			t.Logf("%s %s: gradients are off by at most %.2g", format, m.Name, worst)
			if d, where := differ(got, same); !(d <= exact) {
				t.Errorf("%s %s: %s is off by %g", format, m.Name, where, d)
			}
		}
	}
}

// distance is the difference of two lists by Frobenius norm, relative to the second.
func distance(got, want []float64) float64 {
	off, all := 0.0, 0.0
	for i, w := range want {
		off += (got[i] - w) * (got[i] - w)
		all += w * w
	}
	return math.Sqrt(off / all)
}
