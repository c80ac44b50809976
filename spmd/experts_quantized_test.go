package spmd_test

import (
	"math"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
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
		{Name: "ep gather sp", Apply: func(p *plan.Plan) {
			p.EP, p.EPKind, p.TP = 2, "gather", plan.TP{Size: 2, Sequence: true}
		}},
		{Name: "ep saved rows", Apply: func(p *plan.Plan) {
			p.EP, p.EPSave, p.Recompute = 2, true, ir.BlockTags
		}},
	}
}

// Experts in a format round alike under every plan, but for what depends on who is whose neighbour
// in the slots of an expert: the blocks of wgrad, which lie along slots, and the numbers that
// NVFP4's gradients are rounded with. Two roundings of the same numbers by other blocks and draws,
// each as far from what is not rounded as one device's, are √2 times that apart.
func TestQuantizedExpertsAgreeWithOneDevice(t *testing.T) {
	c, size := blocky(64, 1), plantest.Size{Batch: 4, Micros: 1, Seq: 32}
	c.Arch = "mixtral"
	c.MoE = &model.MoE{Experts: 4, TopK: 2, MLP: 64, Shared: 64, Score: "softmax", Normalize: true,
		Scale: 1}
	for _, format := range quantizedFormats {
		shape := model.Shape{Batch: size.Batch, Seq: size.Seq, Elem: dtype.F32,
			Experts: model.ExpertShape{Blocks: true}}
		g, err := c.Graph(shape)
		if err != nil {
			t.Fatal(err)
		}
		unrounded, err := lossAndGradients(g, quantizedBatch(g, c), ir.GradPlan{})
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
				d, rounding := distance(got[name], want), distance(want, unrounded[name])
				if worst = math.Max(worst, d/rounding); !(d <= math.Sqrt2*rounding) {
					t.Errorf("%s %s: %s is off by %g, and rounded by %g", format, m.Name, name, d, rounding)
				}
			}
			t.Logf("%s %s: gradients are apart by at most %.2g of what they are rounded by", format, m.Name,
				worst)
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

// On Blackwell the GEMMs of quantized experts are cuDNN's block-scaled ones, with plans: at least
// 95 % of their FLOPs. Rows go to experts as the graph says, codes and scales, also where the
// backward pass begins with saved ones.
func TestQuantizedExpertsOnBlackwell(t *testing.T) {
	slowtest.Only(t)
	compiler := enginetest.GPUCompiler(t, false)
	t.Run("all saved", func(t *testing.T) { quantizedExpertsOnBlackwell(t, compiler, false) })
	t.Run("rows saved", func(t *testing.T) { quantizedExpertsOnBlackwell(t, compiler, true) })
}

func quantizedExpertsOnBlackwell(t *testing.T, compiler *engine.Compiler, again bool) {
	c := blocky(256, 2)
	c.Arch = "mixtral"
	c.MoE = &model.MoE{Experts: 8, TopK: 2, MLP: 256, Score: "softmax", Normalize: true, Scale: 1}
	p := plan.Default()
	p.Seq, p.Batch, p.Cluster, p.EP, p.Precision = 256, 8, "8xb200", 2, "mxfp8"
	p.FSDP = plan.FSDP{Size: 4, Zero: 3, Gather: "layer"}
	p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
	if again {
		p.EPSave, p.Recompute = true, ir.BlockTags
	}
	g, err := c.Graph(model.Shape{Batch: p.MicrobatchSequences(), Seq: p.Seq, Elem: dtype.BF16,
		Experts: model.ExpertShape{Slots: 1.5, Blocks: true}})
	if err != nil {
		t.Fatal(err)
	}
	policy, err := precision.Default(c, p.Precision)
	if err != nil {
		t.Fatal(err)
	}
	if err := policy.Mark(g, c.Params()); err != nil {
		t.Fatal(err)
	}
	sh, err := spmd.Shard(g, p)
	if err != nil {
		t.Fatal(err)
	}
	s, err := build(sh.Graph, spmd.Options{Optimizer: optim.SGD{}, Sharding: sh,
		Recompute: p.Recompute})
	if err != nil {
		t.Fatal(err)
	}
	quantized, all := expertFLOPs(s.Gradient)
	if !(quantized >= 0.95*all && all > 0) {
		t.Errorf("%.3g of %.3g FLOPs of experts are block-scaled", quantized, all)
	}
	cluster, err := machine.ParseCluster(p.Cluster)
	if err != nil {
		t.Fatal(err)
	}
	stage, err := lower.Module(s.Gradient.Name, s.Gradient,
		lower.Options{Kernels: kernels.For(cluster.GPU.Arch)})
	if err != nil {
		t.Fatal(err)
	}
	r, err := compiler.Compile(t.Context(), stage, cluster)
	if err != nil {
		t.Fatal(err)
	}
	if off := spmd.CensusOf(s.Gradient).Diff(r.Collectives, false, p.Types.Collectives); off != nil {
		t.Error(off)
	}
	n, bytes := exchanges(s.Gradient)
	t.Logf("%d all-to-alls of %d bytes, temp %d", n, bytes, r.Memory.Temp)
	calls := int64(0)
	for _, call := range r.CustomCalls {
		if call.Target == "__cudnn$blockScaledDot" && call.Plan == hlo.PlanCompiled {
			calls += call.Count
		}
	}
	if want := s.Gradient.Count("block_dot"); calls != want || want != 2*7*3 && !again {
		t.Errorf("%d of cuDNN's block-scaled GEMMs, and %d in the graph", calls, want)
	}
	t.Logf("%d block-scaled GEMMs, %.1f %% of the FLOPs of experts", calls, 100*quantized/all)
}

// expertFLOPs counts the FLOPs of the GEMMs of experts, and of the quantized ones among them.
func expertFLOPs(g *ir.Graph) (quantized, all float64) {
	for _, op := range g.Ops {
		if op.Body != nil {
			n, a := expertFLOPs(op.Body)
			quantized, all = quantized+float64(op.Loop().N)*n, all+float64(op.Loop().N)*a
			continue
		}
		w := g.Work(op)
		if op.Tag != ir.Experts || w.Class != ir.Matmul {
			continue
		}
		n := 2 * float64(w.Batch*w.M) * float64(w.K*w.N)
		if all += n; op.Kind == "block_dot" {
			quantized += n
		}
	}
	return quantized, all
}

// Experts whose shards are not whole blocks are refused by the graph, too, with a code.
func TestSplitBlocksOfExpertsAreRefused(t *testing.T) {
	c, size := blocky(64, 1), plantest.Size{Batch: 4, Micros: 1, Seq: 32}
	c.Arch = "mixtral"
	c.MoE = &model.MoE{Experts: 4, TopK: 2, MLP: 64, Score: "softmax", Normalize: true, Scale: 1}
	g, err := c.Graph(model.Shape{Batch: size.Batch, Seq: size.Seq, Elem: dtype.F32,
		Experts: model.ExpertShape{Blocks: true}})
	if err != nil {
		t.Fatal(err)
	}
	policy := &precision.Policy{Layers: 1, Rules: []precision.Rule{{
		Linears: []string{"experts"}, To: 1, Format: dtype.MXFP8}}}
	if err := policy.Mark(g, c.Params()); err != nil {
		t.Fatal(err)
	}
	p := quantizedPlan(mesh{Apply: func(p *plan.Plan) { p.TP.Size = 4 }}, string(dtype.MXFP8), size)
	_, err = quantizedGradients(g, p, quantizedBatch(g, c))
	if e := diag.From(err); err == nil || e.Code != diag.GraphInvalid {
		t.Errorf("tp 4 leaves an expert 16 of blocks of 32: %v", err)
	}
}
