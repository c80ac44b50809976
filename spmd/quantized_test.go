package spmd_test

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/spmd"
)

// blocky is a model whose sizes blocks divide. Its hidden size is as large as a plan's shards need.
func blocky(hidden, layers int64) *model.Config {
	c := *shapes()["llama"]
	c.Hidden, c.HeadDim, c.Rotary, c.MLP, c.Layers = hidden, 32, 32, 2*hidden, layers
	c.Heads, c.KVHeads, c.AttnScale, c.Context = 4, 2, 0.18, 256
	return &c
}

// marked gives the loss of a model with quantized GEMMs in all of its layers, which are a loop
// or one by one.
func marked(c *model.Config, p *plan.Plan, elem dtype.DType, unrolled bool) (*ir.Graph, error) {
	g, err := c.Graph(model.Shape{Batch: p.MicrobatchSequences(), Seq: p.Seq, Elem: elem, Documents: 8})
	if err != nil {
		return nil, err
	}
	params := c.Params()
	if unrolled {
		if g, err = ir.Unroll(g); err != nil {
			return nil, err
		}
		var list []model.Param
		for _, one := range params {
			list = append(list, one.Layers()...)
		}
		params = list
	}
	policy := &precision.Policy{Layers: int(c.Layers), Rules: []precision.Rule{{
		Linears: []string{"attn", "mlp"}, To: int(c.Layers), Format: dtype.Format(p.Precision)}}}
	if p.Precision == "" {
		return g, nil
	}
	return g, policy.Mark(g, params)
}

// quantizedPlan is the plan of a row in a format; "" quantizes nothing.
func quantizedPlan(m mesh, format string, s plantest.Size) *plan.Plan {
	p := m.Plan(s)
	p.Precision, p.Types.Params = format, dtype.BF16
	return p
}

func quantizedStep(c *model.Config, p *plan.Plan, unrolled bool) (*graphs, *spmd.Sharding, error) {
	g, err := marked(c, p, dtype.BF16, unrolled)
	if err != nil {
		return nil, nil, err
	}
	sh, err := spmd.Shard(g, p)
	if err != nil {
		return nil, nil, err
	}
	s, err := build(sh.Graph, spmd.Options{Optimizer: optim.SGD{}, Sharding: sh, Microbatches: 2,
		Recompute: p.Recompute, Params: map[string]optim.Param{}})
	return s, sh, err
}

// opsOf lists the operations of a graph and of the bodies in it.
func opsOf(g *ir.Graph) (list []*ir.Op) {
	for _, op := range g.Ops {
		list = append(list, op)
		if op.Body != nil {
			list = append(list, opsOf(op.Body)...)
		}
	}
	return list
}

// gathered is what gathers along an axis give, in bytes; loops are multiplied out.
func gathered(g *ir.Graph, axis string) (bytes int64) {
	for _, row := range spmd.CensusOf(g) {
		if row.Kind == hlo.AllGather && slices.Equal(row.Axes, []string{axis}) {
			bytes += row.Bytes
		}
	}
	return bytes
}

var quantizedFormats = []string{"mxfp8", "nvfp4"}

// A plan's graphs take block-scaled copies of the weights of quantized GEMMs, and
// never the weight; and these are made by what updates, and at the beginning.
func TestQuantizedWeightsAreCopies(t *testing.T) {
	c := blocky(64, 3)
	size := plantest.Size{Batch: 8, Micros: 2, Seq: 128}
	rows := append(combine(2), plantest.Recomputations()...)
	if !slowtest.Enabled {
		rows = append(combine(1), plantest.Recomputations()[6:]...)
	}
	for _, format := range quantizedFormats {
		for _, m := range rows {
			for _, unrolled := range []bool{false, true} {
				p := quantizedPlan(m, format, size)
				whole := p.Size(plan.FSDPAxis) > 2 && format == "mxfp8" // shards are smaller than blocks
				if p.Check(c) != nil || p.PP.Size > 1 || whole || unrolled && (p.TP.Overlap || len(p.Recompute) > 0) {
					continue
				}
				s, _, err := quantizedStep(c, p, unrolled)
				if err != nil {
					t.Errorf("%s %s: %v", format, m.Name, err)
					continue
				}
				name := fmt.Sprintf("%s %s, unrolled %v", format, m.Name, unrolled)
				copiesOnly(t, name, s)
				shards := p.Size(plan.ContextAxis) * p.Size(plan.TensorAxis)
				if !unrolled && len(p.Recompute) == 0 && p.Seq/shards >= p.Block() {
					oneSided(t, name, s)
				}
			}
		}
	}
}

// copiesOnly holds the graphs of a step to copies.
func copiesOnly(t *testing.T, name string, s *graphs) {
	t.Helper()
	copies := s.Copies()
	if want := 14 * 3; len(copies) != want && len(copies) != want/3 { // 7 weights, 2 orientations
		t.Errorf("%s: %d copies", name, len(copies))
	}
	for _, g := range []*ir.Graph{s.Gradient, s.Evaluate} {
		for _, c := range copies {
			if g.Find(c.Param) != nil || g.Find(program.Copy.Of(c.Param)) != nil {
				t.Errorf("%s: %s takes %s itself", name, g.Name, c.Param)
			}
		}
		for _, op := range opsOf(g) {
			if op.Kind == "quantize" && source(op.In[0]).Role == ir.Param {
				t.Errorf("%s: %s quantizes %s", name, g.Name, op.In[0])
			}
		}
	}
	for _, g := range []*ir.Graph{s.Update, s.Quantize} {
		for _, c := range copies {
			for _, made := range c.Names {
				if !slices.ContainsFunc(g.Results, func(v *ir.Value) bool { return v.Name == made }) {
					t.Errorf("%s: %s does not make %s", name, g.Name, made)
				}
			}
			if slices.ContainsFunc(g.Results, func(v *ir.Value) bool {
				return v.Name == program.Copy.Of(c.Param)
			}) {
				t.Errorf("%s: %s makes a copy of %s that nobody takes", name, g.Name, c.Param)
			}
		}
		n := 0
		for _, op := range g.Ops {
			if op.Kind == "quantize" {
				n++
			}
			from := op.In
			if op.Kind != "all_gather" || from[0].Type.Elem.Bits() <= 8 {
				continue
			}
			if slices.ContainsFunc(copies, func(c ir.QuantizedParam) bool { return c.Param == master(from[0]) }) {
				t.Errorf("%s: %s joins %s before it is quantized", name, g.Name, from[0])
			}
		}
		if n != len(copies) {
			t.Errorf("%s: %s quantizes %d times for %d copies", name, g.Name, n, len(copies))
		}
	}
}

// master is the name of the parameter that a value was rounded from.
func master(v *ir.Value) string {
	for v.Def() != nil && v.Def().Kind == "convert" {
		v = v.Def().In[0]
	}
	return cmp.Or(v.Means.Replaces, v.Name)
}

// source goes back over what only moves a value.
func source(v *ir.Value) *ir.Value {
	for v.Def() != nil && slices.Contains([]string{"all_gather", "shard_slice", "merge", "broadcast"}, v.Def().Kind) {
		v = v.Def().In[0]
	}
	return v
}

// oneSided holds the loops of a step to what each pass reads: the forward pass copies that lie
// along what it sums over, the backward pass the others, and of what layers kept nothing is
// quantized that was kept as it was.
func oneSided(t *testing.T, name string, s *graphs) {
	t.Helper()
	forward := map[string]string{"q": "embed", "k": "embed", "v": "embed", "o": "heads_head",
		"gate": "embed", "up": "embed", "down": "mlp"}
	for _, g := range []*ir.Graph{s.Gradient, s.Evaluate} {
		for _, op := range g.Ops {
			if op.Kind != "repeat" {
				continue
			}
			back := op.Loop().Reverse
			for _, v := range op.In {
				words := strings.Split(v.Name, ".") // c.block.q.mxfp8.embed
				if len(words) < 5 || words[0] != "c" {
					continue
				}
				if (words[4] == forward[words[2]]) == back {
					t.Errorf("%s: a loop of %s, backward %v, takes %s", name, g.Name, back, v.Name)
				}
			}
			l := op.Loop()
			for _, inner := range op.Body.Ops {
				if inner.Kind != "quantize" || !back {
					continue
				}
				if i := slices.Index(op.Body.Inputs, source(inner.In[0])); i >= 0 && !l.IsCarry(i) {
					t.Errorf("%s: the backward pass quantizes %s, which was kept", name, inner.In[0])
				}
			}
		}
	}
}

// What FSDP gathers of a weight is what one pass reads: codes and scales, of four or eight bits, in
// the place of two bytes an element in both passes.
func TestQuantizedGathersMoveFewerBytes(t *testing.T) {
	c, size := blocky(64, 3), plantest.Size{Batch: 8, Micros: 2, Seq: 128}
	elements := int64(0) // of weights whose GEMMs are quantized
	for _, one := range c.Params() {
		if one.Stacked() && len(one.Shape) == 2 {
			elements += one.Size()
		}
	}
	for _, format := range quantizedFormats {
		for _, m := range combine(1) {
			if m.Axes == nil || m.Axes[0] != "fsdp" {
				continue
			}
			wide, _, err := quantizedStep(c, quantizedPlan(m, "", size), false)
			if err != nil {
				t.Fatal(err)
			}
			quantized, _, err := quantizedStep(c, quantizedPlan(m, format, size), false)
			if err != nil {
				t.Fatal(err)
			}
			once := elements/2 + elements/16
			if format == "mxfp8" {
				once = elements + elements/32
			}
			plain := 2 * elements
			for _, graphs := range [][2]*ir.Graph{{wide.Gradient, quantized.Gradient},
				{wide.Evaluate, quantized.Evaluate}, {wide.Update, quantized.Update}} {
				was, is := gathered(graphs[0], plan.FSDPAxis), gathered(graphs[1], plan.FSDPAxis)
				times := (was - is) / (plain - once) // that a weight is gathered
				want := was - times*plain + times*once
				switch {
				case was == 0:
				case graphs[0] == wide.Update: // one copy of what SGD keeps, two quantized
					want = was - 4*elements + 2*once
				case m.Name == "zero3micro" && graphs[0] == wide.Gradient: // one copy for both passes
					want = was - plain + 2*once
				}
				if is != want || was > 0 && is == was {
					t.Errorf("%s %s: %s gathers %d bytes, %d in bf16, want %d", format, m.Name, graphs[1].Name,
						is, was, want)
				}
			}
		}
	}
}

// copies makes the quantized copies of the masters.
func (r *rig) copies() error {
	out, err := r.run(r.step.Quantize, r.feed(r.step.Quantize, nil))
	if err != nil {
		return err
	}
	for i, v := range r.step.Quantize.Results {
		r.state[v.Name] = out[i]
	}
	return nil
}

// quantizedGradients runs the loss and the gradients of a plan, nil for one device, with copies that
// were made of the masters, and puts what it gives together.
func quantizedGradients(g *ir.Graph, p *plan.Plan, whole map[string]*eval.Array) (
	map[string][]float64, error) {
	r, err := newRig(g, p, optim.SGD{}, 1, whole, evalRunner)
	if err != nil {
		return nil, err
	}
	if err := r.copies(); err != nil {
		return nil, err
	}
	loss, err := r.gradients([]map[string]*eval.Array{whole})
	if err != nil {
		return nil, err
	}
	all, err := r.wholes(true)
	if err != nil {
		return nil, err
	}
	all[spmd.Loss] = []float64{loss}
	return all, nil
}

// quantizedBatch fills the inputs of a graph, and the bits of stochastic rounding.
func quantizedBatch(g *ir.Graph, c *model.Config) map[string]*eval.Array {
	whole := fills(g, c, 3)
	whole[ir.InputNoise] = &eval.Array{Type: ir.Type{Dims: []ir.Dim{{Name: ir.InputNoise, Size: 2}}},
		Data: []float64{7, 9}}
	rows := eval.New(ir.Type{Dims: g.Find(model.InputIDs).Type.Dims})
	for i := range rows.Data {
		rows.Data[i] = float64(1000 + i)
	}
	whole[ir.InputRows] = rows
	return whole
}

// The loss and every gradient of a plan equal one device's, to the last digits of float64:
// operands are rounded alike however they are sharded, and whether shards are joined before or after.
//
// Where devices have copies of key heads, each rounds the gradient of its own copy, not the gradient of
// their sum: only the loss is the same.
func TestQuantizedPlansAgreeWithOneDevice(t *testing.T) {
	c, size, rows := blocky(32, 2), plantest.Size{Batch: 4, Micros: 1, Seq: 64}, combine(2)
	switch {
	case *all:
	case slowtest.Enabled:
		rows = append(combine(1), every(combine(2), 18)...)
	default: // the interpreter is slow
		c, size.Batch = blocky(32, 1), 2
		rows = slices.DeleteFunc(rows, func(m mesh) bool { return m.Name != "zero3 sp" })
	}
	for _, format := range quantizedFormats {
		one := quantizedPlan(mesh{Apply: func(*plan.Plan) {}}, format, size)
		g, err := marked(c, one, dtype.F32, false)
		if err != nil {
			t.Fatal(err)
		}
		whole := quantizedBatch(g, c)
		first, err := quantizedGradients(g, nil, whole)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range rows {
			p := quantizedPlan(m, format, size)
			if p.Check(c) != nil {
				continue
			}
			got, err := quantizedGradients(g, p, whole)
			if err != nil {
				t.Errorf("%s %s: %v", format, m.Name, err)
				continue
			}
			want := first
			if c.KVHeads%p.Size(plan.TensorAxis) != 0 {
				want = map[string][]float64{spmd.Loss: want[spmd.Loss]}
			}
			if d, where := differ(got, want); !(d <= exact) {
				t.Errorf("%s %s: %s is off by %g", format, m.Name, where, d)
			}
		}
	}
}
