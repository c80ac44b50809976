package footprint_test

import (
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/estimate/footprint"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/spmd"
)

func config(t testing.TB, name string) *model.Config {
	p, err := model.Find(name)
	if err != nil {
		t.Fatal(err)
	}
	return p.Config
}

func example() *plan.Plan {
	p := plan.Default()
	p.Seq, p.Batch, p.Cluster = 8192, 128, "64xb200"
	p.FSDP = plan.FSDP{Size: 8, Zero: 3, Gather: "layer"}
	p.TP = plan.TP{Size: 8, Sequence: true}
	p.Recompute = []ir.Tag{ir.Norm, ir.Attn, ir.MLP}
	p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
	p.Microbatches = 8
	return p
}

func BenchmarkPredict(b *testing.B) {
	for _, row := range []struct {
		name  string
		apply func(*plan.Plan)
	}{
		{"mesh", func(*plan.Plan) {}},
		{"stages", func(p *plan.Plan) { p.PP = plan.PP{Size: 4, Schedule: "1f1b"} }},
	} {
		b.Run(row.name, func(b *testing.B) {
			f, err := footprint.New(config(b, "llama3.1-70b"), "sm_100")
			if err != nil {
				b.Fatal(err)
			}
			p := example()
			row.apply(p)
			b.ReportAllocs()
			for i := range b.N {
				p.Batch = 128 * int64(1+i%7)
				if _, err := f.Predict(p); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// shapes are models whose sizes are all different, one with fewer key heads than tp may have.
func shapes() map[string]*model.Config {
	llama := model.Config{Arch: "llama", Vocab: 1000, Hidden: 64, Layers: 3, Heads: 8, KVHeads: 2,
		HeadDim: 16, MLP: 96, Context: 512, Norm: model.Norm{Eps: 1e-5}, Activation: model.SiLU,
		Gated: true, Rope: ir.Rope{Theta: 100}, Rotary: 16, AttnScale: 0.2, BOS: -1}
	qwen := llama
	qwen.Arch, qwen.QKNorm, qwen.Tied, qwen.KVHeads = "qwen3", true, true, 4
	gpt := llama
	gpt.Arch, gpt.Learned, gpt.Gated, gpt.Tied, gpt.Activation = "gpt2", true, false, true, model.GELU
	gpt.QKVBias, gpt.OutBias, gpt.MLPBias, gpt.KVHeads, gpt.Vocab = true, true, true, 8, 1001
	gpt.Norm.Layer = true
	deepseek := llama // latent attention, a dense layer before others with experts
	deepseek.Arch, deepseek.KVHeads, deepseek.HeadDim, deepseek.Rotary = "deepseek_v3", 8, 24, 8
	deepseek.MLA = &model.MLA{QRank: 48, KVRank: 32, NoPE: 16, Rope: 8, Value: 16}
	deepseek.MoE = &model.MoE{Experts: 8, TopK: 2, MLP: 32, Shared: 32, Dense: 1, Groups: 4,
		TopGroups: 2, Score: "sigmoid", Normalize: true, Scale: 2.5}
	return map[string]*model.Config{"llama": &llama, "qwen3": &qwen, "gpt2": &gpt,
		"deepseek": &deepseek}
}

// What a plan keeps from step to step is what its graphs take, for every axis alone,
// and in CI every three together.
func TestGraphsAgree(t *testing.T) {
	axes := 1
	if slowtest.Enabled {
		axes = 3
	}
	rows := append(plantest.Combine(axes, plantest.Meshes()...), plantest.Larger()...)
	if testing.Short() {
		rows = rows[:len(rows)/4]
	}
	types := []plan.Types{{Params: dtype.F32, Grads: dtype.F32, Collectives: dtype.F32},
		{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}}
	tags := [][]ir.Tag{nil, {ir.Norm, ir.Attn, ir.MLP}}
	for name, c := range shapes() {
		f, err := footprint.New(c, "sm_100")
		if err != nil {
			t.Fatal(err)
		}
		for i, row := range rows {
			p := row.Plan(plantest.Size{Batch: 16, Micros: 1, Seq: 64})
			p.Types, p.Recompute = types[i%2], tags[i/2%2]
			if p.Check(c) != nil {
				continue
			}
			t.Run(name+" "+row.Name, func(t *testing.T) { agrees(t, f, c, p) })
		}
	}
}

func agrees(t *testing.T, f *footprint.Predictor, c *model.Config, p *plan.Plan) {
	g, err := c.Graph(model.Shape{Batch: p.MicrobatchSequences(), Seq: p.Seq, Elem: p.Types.Params})
	if err != nil {
		t.Fatal(err)
	}
	sh, err := spmd.Shard(g, p)
	if err != nil {
		t.Fatal(err)
	}
	step, err := spmd.NewStep(sh.Graph, spmd.Options{Sharding: sh, Recompute: p.Recompute, Microbatches: 1},
		&spmd.QuantizedCopies{})
	if err != nil {
		t.Fatal(err)
	}
	got, err := f.Predict(p)
	if err != nil {
		t.Fatal(err)
	}
	var state, grads int64
	for i, l := range sh.Params {
		state += 12 * l.Stored.Shape().Elements()
		grads += step.Params[i].Type.Shape().Bytes()
	}
	copies := int64(0)
	for _, v := range step.Gradient.Inputs {
		if v.Meaning().Role == program.Copy {
			copies += v.Type.Shape().Bytes()
		}
	}
	if r := got.Ranks[0]; r.Params+r.Optimizer != state+copies || r.Grads != grads {
		t.Errorf("%+v; the graphs have state %d, copies %d, gradients %d", r, state, copies, grads)
	}
}
