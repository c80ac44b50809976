package spmd_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/spmd"
)

// exact bounds, relative to the largest, what two orders of summation in float64 differ by.
const exact = 1e-10

// shapes are models whose sizes are awkward: fewer key heads than devices, a vocabulary that
// nothing divides, an odd number of layers.
func shapes() map[string]*model.Config {
	llama := model.Config{Arch: "llama", Vocab: 13, Hidden: 8, Layers: 3, Heads: 4, KVHeads: 2,
		HeadDim: 4, MLP: 8, Context: 64, Norm: model.Norm{Eps: 1e-5}, Activation: model.SiLU, Gated: true,
		Rope: ir.Rope{Theta: 100}, Rotary: 4, AttnScale: 0.5, BOS: -1}
	qwen := llama
	qwen.Arch, qwen.QKNorm, qwen.Tied, qwen.Layers, qwen.Vocab = "qwen3", true, true, 2, 11
	gpt := llama
	gpt.Arch, gpt.Learned, gpt.KVHeads, gpt.Layers, gpt.Gated, gpt.Tied = "gpt2", true, 4, 1, false, true
	gpt.Norm, gpt.Activation, gpt.Context = model.Norm{Layer: true, Eps: 1e-5}, model.GELU, 8
	gpt.QKVBias, gpt.OutBias, gpt.MLPBias = true, true, true
	gemma := llama
	gemma.Arch, gemma.PostNorms, gemma.ScaledEmbed, gemma.Tied = "gemma2", true, true, true
	gemma.LogitCap, gemma.AttnCap, gemma.Window = 3, 5, 3
	gemma.Windowed, gemma.Layers, gemma.LocalRope = []bool{true, false}, 2, ir.Rope{Theta: 100}
	gemma.Activation, gemma.Norm.Shift, gemma.Sinks = model.GELU, 1, true
	latent := llama
	latent.Arch, latent.Layers, latent.KVHeads, latent.HeadDim, latent.Rotary = "deepseek_v3", 2, 4, 6, 4
	latent.Rope = ir.Rope{Theta: 100, Factor: 4, Original: 16, Fast: 4, Slow: 1, Magnitude: 1.2}
	latent.MLA = &model.MLA{QRank: 6, KVRank: 5, NoPE: 2, Rope: 4, Value: 3, Interleaved: true}
	latent.QKVBias, latent.OutBias = true, true
	return map[string]*model.Config{"llama": &llama, "qwen3": &qwen, "gpt2": &gpt, "gemma2": &gemma,
		"deepseek_v3": &latent}
}

// fills gives the inputs of a whole batch.
func fills(g *ir.Graph, c *model.Config, seed uint64) map[string]*eval.Array {
	r := rand.New(rand.NewPCG(seed, 7))
	in := map[string]*eval.Array{}
	for _, v := range g.Inputs {
		a := eval.New(v.Type)
		seq := int(v.Type.Size(ir.Seq))
		for i := range a.Data {
			switch v.Name {
			case model.InputIDs:
				a.Data[i] = float64(r.Int64N(c.Vocab))
			case model.InputLabels:
				a.Data[i] = float64(r.Int64N(c.Vocab+1) - 1)
			case model.InputPositions:
				a.Data[i] = float64(i % seq % (seq/2 + 1))
			case model.InputSegments:
				a.Data[i] = float64(i % seq / (seq/2 + 1))
			case model.InputShare:
				a.Data[i] = 1.0 / 30
			default:
				a.Data[i] = 0.4 * r.NormFloat64()
			}
		}
		in[v.Name] = a
	}
	return in
}

// dealt shards the inputs of a whole batch for the devices of a mesh. A parameter's dimensions may be
// in another order, and longer.
func dealt(g *ir.Graph, whole map[string]*eval.Array, name func(string) string) map[string][]*eval.Array {
	in := map[string][]*eval.Array{}
	for _, v := range g.Inputs {
		w := whole[name(v.Name)]
		for d := range devices(g.Mesh) {
			data := spmd.TakeShard(g.Mesh, w.Type.Dims, w.Data, v.Type, d)
			in[v.Name] = append(in[v.Name], &eval.Array{Type: v.Type, Data: data})
		}
	}
	return in
}

func devices(mesh []ir.Axis) int {
	n := 1
	for _, a := range mesh {
		n *= int(a.Size)
	}
	return n
}

// assemble puts the shards of a result together and adds up terms. Copies must agree.
func assemble(mesh []ir.Axis, whole []ir.Dim, t ir.Type, parts []*eval.Array) ([]float64, error) {
	n := int64(1)
	for _, d := range whole {
		n *= d.Size
	}
	total := make([]float64, n)
	for d, part := range parts {
		first := d // the device that holds the copy that counts
		stride := 1
		for _, a := range slices.Backward(mesh) {
			if t.Place.On(a.Name) == "" {
				first -= d / stride % int(a.Size) * stride
			}
			stride *= int(a.Size)
		}
		if first != d {
			for k, x := range part.Data {
				if y := parts[first].Data[k]; math.Abs(x-y) > exact*(1+math.Abs(y)) {
					return nil, fmt.Errorf("devices %d and %d hold copies that differ: %v, %v", d, first, x, y)
				}
			}
			continue
		}
		one := make([]float64, n)
		spmd.PutShard(mesh, whole, one, t, d, part.Data)
		for k, x := range one {
			total[k] += x
		}
	}
	return total, nil
}

// lossAndGradients runs a graph of a loss and its gradient, and puts the results together.
func lossAndGradients(g *ir.Graph, whole map[string]*eval.Array, o ir.GradPlan) (map[string][]float64, error) {
	return lossAndGradientsBy(evalRunner, g, whole, o)
}

func lossAndGradientsBy(run runner, g *ir.Graph, whole map[string]*eval.Array, o ir.GradPlan) (
	map[string][]float64, error) {
	gr, err := ir.Grad(g, o)
	if err != nil {
		return nil, err
	}
	joint, err := gr.Joint()
	if err != nil {
		return nil, err
	}
	same := func(name string) string { return name }
	out, err := run(joint, dealt(joint, whole, same))
	if err != nil {
		return nil, err
	}
	got := map[string][]float64{}
	if got["loss"], err = assemble(g.Mesh, nil, joint.Results[0].Type, out[0]); err != nil {
		return nil, err
	}
	for i, v := range joint.Results[1:len(g.Results)] { // statistics, of all devices
		if got[v.Name], err = assemble(g.Mesh, v.Type.Dims, v.Type, out[1+i]); err != nil {
			return nil, fmt.Errorf("%s: %w", v.Name, err)
		}
	}
	for i, v := range gr.Wrt {
		k := len(g.Results) + i
		got[v.Name], err = assemble(g.Mesh, whole[v.Name].Type.Dims, joint.Results[k].Type, out[k])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", v.Name, err)
		}
	}
	return got, nil
}

// differ gives the largest difference of one of the results, relative to the largest of its
// elements. The gradient of a bias of keys is zero but for rounding, so what is far smaller than
// everything else is held to everything else.
func differ(got, want map[string][]float64) (worst float64, where string) {
	most := 0.0
	for _, w := range want {
		for _, x := range w {
			most = math.Max(most, math.Abs(x))
		}
	}
	for name, w := range want {
		top, d := 0.0, 0.0
		for k, x := range w {
			top = math.Max(top, math.Abs(x))
			d = math.Max(d, math.Abs(got[name][k]-x))
		}
		if d /= math.Max(top, 1e-5*most); d > worst || math.IsNaN(d) {
			worst, where = d, name
		}
	}
	return worst, where
}

// ordered puts the tokens of every row into the order in which the devices of a plan hold them.
func ordered(whole map[string]*eval.Array, p *plan.Plan) map[string]*eval.Array {
	order, seq := spmd.Order(p), int(p.Seq)
	out := map[string]*eval.Array{}
	for name, a := range whole {
		out[name] = a
		if a.Type.Index(ir.Seq) != 1 || a.Type.Index("batch") != 0 {
			continue
		}
		out[name] = eval.New(a.Type)
		for i := range a.Data {
			out[name].Data[i] = a.Data[i/seq*seq+int(order[i%seq])]
		}
	}
	return out
}

// A mesh is one row of the generator.
type mesh = plantest.Row

// combine gives all ways to use up to n axes at once, and larger ones.
func combine(n int) []mesh {
	return append(plantest.Combine(n, plantest.Meshes()...), plantest.Larger()...)
}

// every takes every n-th.
func every(list []mesh, n int) (some []mesh) {
	for i := 0; i < len(list); i += n {
		some = append(some, list[i])
	}
	return some
}

const batch, seq = 4, 8

func newPlan(m mesh) *plan.Plan {
	return m.Plan(plantest.Size{Batch: batch, Micros: 1, Seq: seq})
}

// The loss and every gradient of every plan equal one device's, to the last digits of
// float64.
func TestPlansAgreeWithOneDevice(t *testing.T) {
	axes := 2
	switch {
	case testing.Short():
		axes = 1
	case slowtest.Enabled || *all:
		axes = 3
	}
	packed := map[string]int64{"llama": 8, "gpt2": 8, "gemma3": 8} // qwen3 has one in each sequence
	for name, c := range shapes() {
		t.Run(name, func(t *testing.T) {
			g, err := c.Graph(model.Shape{Batch: batch, Seq: seq, Elem: dtype.F32, Documents: packed[name]})
			if err != nil {
				t.Fatal(err)
			}
			whole := fills(g, c, 3)
			want, err := lossAndGradients(g, whole, ir.GradPlan{})
			if err != nil {
				t.Fatal(err)
			}
			n := axes
			if name != "llama" {
				n = min(n, 2)
			}
			rows := combine(n)
			if !*all && n > 2 { // all pairs, some triples
				rows = append(combine(2), every(combine(3), 5)...)
			}
			if axes == 2 && name != "llama" { // -tags long has all pairs
				rows = every(rows, 3)
			} else if axes == 2 { // every pair of axes, in half of its kinds
				kinds := map[string]int{}
				rows = slices.DeleteFunc(rows, func(m mesh) bool {
					pair := fmt.Sprint(m.Axes)
					kinds[pair]++
					return len(m.Axes) == 2 && kinds[pair]%2 == 0
				})
			}
			t.Logf("%d plans", len(rows))
			plansAgree(t, c, g, whole, want, rows)
		})
	}
}

// plansAgree holds loss, gradients and statistics under plans to one device's, with and without
// recomputation and sums of terms.
func plansAgree(t *testing.T, c *model.Config, g *ir.Graph, whole map[string]*eval.Array,
	want map[string][]float64, rows []mesh) {
	t.Helper()
	for i, m := range rows {
		p := newPlan(m)
		if err := p.Check(c); err != nil {
			t.Errorf("%s: %v", m.Name, err)
			continue
		}
		sh, err := spmd.Shard(g, p)
		if err != nil {
			t.Errorf("%s: %v", m.Name, err)
			continue
		}
		o := ir.GradPlan{Recompute: []ir.Tag{ir.Gather}, Terms: i%2 == 0}
		if i%3 == 0 {
			o.Recompute = append(o.Recompute, ir.Attn, ir.MLP, ir.Norm, ir.Router, ir.Experts)
		}
		got, err := lossAndGradients(sh.Graph, ordered(whole, p), o)
		if err != nil {
			t.Errorf("%s: %v", m.Name, err)
			continue
		}
		if d, where := differ(got, want); !(d <= exact) {
			t.Errorf("%s: %s is off by %g", m.Name, where, d)
		}
	}
}

// What no axis divides is copied: with three devices nothing of these parameters can be sharded.
func TestIndivisibleSizesAreCopied(t *testing.T) {
	c := shapes()["llama"]
	g, err := c.Graph(model.Shape{Batch: 3, Seq: seq, Elem: dtype.F32})
	if err != nil {
		t.Fatal(err)
	}
	whole := fills(g, c, 3)
	want, err := lossAndGradients(g, whole, ir.GradPlan{})
	if err != nil {
		t.Fatal(err)
	}
	for zero := 1; zero <= 3; zero++ {
		p := newPlan(mesh{Apply: func(p *plan.Plan) { p.Batch, p.FSDP = 3, plan.FSDP{Size: 3, Zero: zero, Gather: "layer"} }})
		if err := p.Check(c); err != nil {
			t.Fatal(err)
		}
		sh, err := spmd.Shard(g, p)
		if err != nil {
			t.Fatal(err)
		}
		got, err := lossAndGradients(sh.Graph, whole, ir.GradPlan{Terms: true})
		if err != nil {
			t.Fatal(err)
		}
		if d, where := differ(got, want); !(d <= exact) {
			t.Errorf("%s is off by %g", where, d)
		}
	}
}

// A model whose layers were unrolled is sharded like one with a loop.
func TestUnrolledPlansAgreeWithOneDevice(t *testing.T) {
	c := shapes()["qwen3"]
	g, err := c.Graph(model.Shape{Batch: batch, Seq: seq, Elem: dtype.F32, Documents: 8})
	if err != nil {
		t.Fatal(err)
	}
	if g, err = ir.Unroll(g); err != nil {
		t.Fatal(err)
	}
	whole := fills(g, c, 3)
	want, err := lossAndGradients(g, whole, ir.GradPlan{})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range combine(1) {
		p := newPlan(m)
		sh, err := spmd.Shard(g, p)
		if err != nil {
			t.Errorf("%s: %v", m.Name, err)
			continue
		}
		got, err := lossAndGradients(sh.Graph, ordered(whole, p),
			ir.GradPlan{Recompute: []ir.Tag{ir.Gather}, Terms: true})
		if err != nil {
			t.Errorf("%s: %v", m.Name, err)
			continue
		}
		if d, where := differ(got, want); !(d <= exact) {
			t.Errorf("%s: %s is off by %g", m.Name, where, d)
		}
	}
}

// Three steps of every optimizer, in parts, end where one device ends.
func TestTrainingAgreesWithOneDevice(t *testing.T) {
	adam := optim.AdamW{Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, ClipNorm: 0.5}
	optimizers := map[string]optim.Optimizer{"sgd": optim.SGD{ClipNorm: 0.5}, "adamw": adam,
		"muon": optim.Muon{AdamW: adam, Momentum: 0.95}}
	c := shapes()["llama"]
	for _, name := range names(optimizers) {
		o := optimizers[name]
		for parts := 1; parts <= 2; parts++ {
			if !slowtest.Enabled && (name != "adamw" || parts == 1) {
				continue
			}
			step := map[string]int{"adamw": 7, "sgd": 11, "muon": 17}[name]
			rows := every(combine(2)[parts:], step) // all were held to all gradients
			trainingAgrees(t, c, o, name, parts, rows)
		}
	}
}

// Learned positions are sharded by fsdp alone, so that with tp the squares of gradients are terms along
// different axes.
func TestTrainingAgreesWithLearnedPositions(t *testing.T) {
	o := optim.AdamW{Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, ClipNorm: 0.5}
	var rows []mesh
	for _, m := range combine(2) {
		if m.Name == "zero3 tp" || m.Name == "zero1 sp" {
			rows = append(rows, m)
		}
	}
	trainingAgrees(t, shapes()["gpt2"], o, "adamw", 1, rows)
}

// trainingAgrees holds three steps of plans to one device's.
func trainingAgrees(t *testing.T, c *model.Config, o optim.Optimizer, name string, parts int,
	rows []mesh) {
	t.Helper()
	g, err := c.Graph(model.Shape{Batch: batch, Seq: seq, Elem: dtype.F32})
	if err != nil {
		t.Fatal(err)
	}
	whole, steps := fills(g, c, 3), batches(g, c, 3, parts)
	one, err := newRig(g, nil, o, parts, whole, evalRunner)
	if err != nil {
		t.Fatal(err)
	}
	want, err := one.train(3, 0.02, steps)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range rows {
		r, err := newRig(g, newPlan(m), o, parts, whole, evalRunner)
		if err != nil {
			t.Errorf("%s, %s: %v", name, m.Name, err)
			continue
		}
		got, err := r.train(3, 0.02, steps)
		if err != nil {
			t.Errorf("%s, %s: %v", name, m.Name, err)
			continue
		}
		for k := range want.losses {
			if math.Abs(got.losses[k]-want.losses[k]) > 1e-9 || math.Abs(got.norms[k]-want.norms[k]) > 1e-9 {
				t.Errorf("%s, %s: step %d has loss %v and norm %v, want %v and %v", name, m.Name, k,
					got.losses[k], got.norms[k], want.losses[k], want.norms[k])
			}
		}
		if d, where := differ(got.params, want.params); !(d <= 1e-8) {
			t.Errorf("%s, %s: parameter %s is off by %g", name, m.Name, where, d)
		}
	}
}
