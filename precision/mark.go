package precision

import (
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
)

// slots numbers the linear layers of a block for the random streams of stochastic rounding: a
// layer's index must never change, or runs are not reproducible.
var slots = []string{"q", "k", "v", "o", "gate", "up", "down",
	"expert_gate", "expert_up", "expert_down", "shared_gate", "shared_up", "shared_down",
	"q_down", "q_up", "kv_down", "kv_up"}

// Slots lists the linear layers of a block; statistics of a run are indexed by it.
func Slots() []string { return slices.Clone(slots) }

// Slot is the index of a weight in the list, -1 if it is not a linear layer of a block.
func Slot(weight string) int { return slices.Index(slots, model.LinearName(weight)) }

// LoopSplits returns the loop iterations before which loops over layers must be split, so that
// each loop has one format per GEMM. params are the graph's parameters, as stacks.
func (p *Policy) LoopSplits(params []model.Param) []int64 {
	var list []int64
	for _, one := range params {
		if !one.Stacked() {
			continue
		}
		for i := int64(1); i < one.Dims[0].Size; i++ {
			layer := one.First + i*one.Step
			if !p.alike(int(layer-one.Step), int(layer)) && !slices.Contains(list, i) {
				list = append(list, i)
			}
		}
	}
	slices.Sort(list)
	return list
}

// Mark sets the formats of the GEMMs of a graph's linear layers. g is a loss graph before
// differentiation; its weights are named as the parameters are.
func (p *Policy) Mark(g *ir.Graph, params []model.Param) error {
	m := marker{policy: p, params: map[string]*model.Param{}}
	for i := range params {
		m.params[params[i].Name] = &params[i]
	}
	return m.graph(g, nil)
}

type marker struct {
	policy *Policy
	params map[string]*model.Param
}

// graph marks the operations of a graph; outer maps a loop body's inputs to values outside of it.
func (m *marker) graph(g *ir.Graph, outer map[*ir.Value]*ir.Value) error {
	for _, op := range g.Ops {
		switch op.Kind {
		case "repeat":
			at := map[*ir.Value]*ir.Value{}
			for i, v := range op.Body.Inputs {
				at[v] = op.In[i]
			}
			if err := m.graph(op.Body, at); err != nil {
				return err
			}
		case "linear":
			w := op.In[1]
			if outer[w] != nil {
				w = outer[w]
			}
			if param := m.params[w.Name]; param != nil {
				if err := m.linear(op, param); err != nil {
					return err
				}
			}
		}
	}
	if m.policy.Payload != dtype.FormatBF16 {
		markPayload(g)
	}
	return nil
}

// markPayload lets rows go to experts in MXFP8 where both GEMMs that read them round them to it
// anyway: fprop and wgrad of what a dispatch gives, dgrad and wgrad of what a combine takes.
func markPayload(g *ir.Graph) {
	readers := map[*ir.Value][]*ir.Op{}
	for _, op := range g.Ops {
		for _, v := range op.In {
			readers[v] = append(readers[v], op)
		}
	}
	for _, op := range g.Ops {
		var linears []*ir.Op
		first := Fprop
		switch op.Kind {
		case "dispatch":
			linears = readers[op.Out[0]]
		case "combine":
			first, linears = Dgrad, lastLinears(op.In[0])
		}
		other := func(l *ir.Op) bool {
			return l.Kind != "linear" || l.Attrs.Text(first) != string(dtype.MXFP8) ||
				l.Attrs.Text(Wgrad) != string(dtype.MXFP8)
		}
		if len(linears) > 0 && !slices.ContainsFunc(linears, other) {
			op.Attrs = op.Attrs.With(ir.Payload, string(dtype.MXFP8))
		}
	}
}

// lastLinears gives the linear layer that ends the experts' MLPs, from what is combined: its
// result, or the sum with a bias.
func lastLinears(v *ir.Value) []*ir.Op {
	op := v.Def()
	if op != nil && op.Kind == "add" {
		op = op.In[0].Def()
	}
	if op == nil {
		return nil
	}
	return []*ir.Op{op}
}

// linear marks one operation with the formats that its weight's layers share.
func (m *marker) linear(op *ir.Op, w *model.Param) error {
	name, slot := model.LinearName(w.Stem()), Slot(w.Stem())
	if slot < 0 {
		return nil // not a linear layer of a block
	}
	layers := int64(1)
	if w.Stacked() {
		layers = w.Dims[0].Size
	}
	marked := false
	for _, product := range gemms {
		f := m.policy.Of(int(w.First), name, product)
		for i := range layers {
			if other := m.policy.Of(int(w.First+i*w.Step), name, product); other != f {
				return diag.New(diag.GraphInvalid, "layers of %s have %s and %s in one loop", w.Name, f,
					other)
			}
		}
		if f != dtype.FormatBF16 {
			op.Attrs, marked = op.Attrs.With(product, string(f)), true
		}
	}
	if marked {
		op.Attrs = op.Attrs.With("slot", int64(slot))
		if !w.Stacked() {
			op.Attrs = op.Attrs.With("layer", w.First)
		}
	}
	return nil
}

// Apply splits loops over layers with different formats, and marks the linear layers. It returns
// the new graph and its parameters.
func (p *Policy) Apply(g *ir.Graph, params []model.Param) (*ir.Graph, []model.Param, error) {
	if splits := p.LoopSplits(params); len(splits) > 0 {
		var err error
		if g, err = ir.Segment(g, splits); err != nil {
			return nil, nil, err
		}
		var parts []model.Param
		for _, one := range params {
			parts = append(parts, one.Segments(splits)...)
		}
		params = parts
	}
	return g, params, p.Mark(g, params)
}
