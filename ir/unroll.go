package ir

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/diag"
)

// Unroll writes the rounds of every repeat one after another, and makes of each stack that goes
// into one an input for each round: stack w becomes w.0, w.1 and so on. On a CPU the gradient of a
// slice of a stack costs more than the stack saves; short stacks are faster without.
//
// It is for graphs before their gradient is taken: a repeat must take its stacks from inputs, and
// must not stack anything up.
func Unroll(g *Graph) (*Graph, error) {
	u := &unroller{from: g, to: &Graph{Name: g.Name, Mesh: g.Mesh}, at: map[*Value]*Value{},
		layers: map[*Value][]*Value{}}
	u.inputs()
	u.names = newFresh(u.to)
	for _, op := range g.Ops {
		if op.Kind != "repeat" {
			u.copy(op, u.at)
			continue
		}
		if err := u.rounds(op); err != nil {
			return nil, diag.New(diag.GraphInvalid, "cannot unroll: %v", err).At("graph %s", g.Name)
		}
	}
	for _, v := range g.Results {
		u.to.Results = append(u.to.Results, u.at[v])
	}
	if slices.Contains(u.to.Results, nil) {
		return nil, diag.New(diag.GraphInvalid, "cannot unroll: a stack is a result").
			At("graph %s", g.Name)
	}
	return u.to, u.to.Verify()
}

// LayerName is the name of one layer of a stack that was unrolled.
func LayerName(stack string, layer int) string { return fmt.Sprintf("%s.%d", stack, layer) }

type unroller struct {
	from, to *Graph
	names    *fresh
	at       map[*Value]*Value   // values of the old graph in the new one
	layers   map[*Value][]*Value // stacks of the old graph, layer by layer
}

// inputs copies the inputs, those that are stacks of a repeat layer by layer.
func (u *unroller) inputs() {
	stacks := map[*Value]int64{}
	for _, op := range u.from.Ops {
		if op.Kind == "repeat" {
			first := int(op.Attrs.Int("carries"))
			for _, v := range op.In[first : first+int(op.Attrs.Int("stacked"))] {
				stacks[v] = op.Attrs.Int("n")
			}
		}
	}
	for _, v := range u.from.Inputs {
		if stacks[v] == 0 {
			u.at[v] = &Value{Name: v.Name, Type: v.Type, Role: v.Role, Source: v.Source}
			u.to.Inputs = append(u.to.Inputs, u.at[v])
			continue
		}
		t := Type{v.Type.Elem, v.Type.Dims[1:], v.Type.Place}
		for i := range int(stacks[v]) {
			one := &Value{Name: LayerName(v.Name, i), Type: t, Role: v.Role, Source: v.Source}
			u.layers[v] = append(u.layers[v], one)
			u.to.Inputs = append(u.to.Inputs, one)
		}
	}
}

// rounds writes the body of a repeat once for each round.
func (u *unroller) rounds(op *Op) error {
	n, carries := int(op.Attrs.Int("n")), int(op.Attrs.Int("carries"))
	stacked := int(op.Attrs.Int("stacked"))
	if len(op.Out) > carries {
		return fmt.Errorf("a repeat stacks up %s", op.Out[carries])
	}
	carried := make([]*Value, carries)
	for i, v := range op.In[:carries] {
		carried[i] = u.at[v]
	}
	for round := range n {
		layer := round
		if op.Attrs.Bool("reverse") {
			layer = n - 1 - round
		}
		at := map[*Value]*Value{}
		for i, v := range op.Body.Inputs {
			switch {
			case i < carries:
				at[v] = carried[i]
			case i < carries+stacked:
				one := u.layers[op.In[i]]
				if one == nil {
					return fmt.Errorf("stack %s is not an input", op.In[i])
				}
				at[v] = one[layer]
			default:
				at[v] = u.at[op.In[i]]
			}
			if at[v] == nil {
				return fmt.Errorf("%s is a stack and is used as a whole", op.In[i])
			}
		}
		for _, inner := range op.Body.Ops {
			if inner.Kind == "repeat" {
				return fmt.Errorf("a repeat stands in a repeat")
			}
			u.copy(inner, at)
		}
		for i, v := range op.Body.Results[:carries] {
			carried[i] = at[v]
		}
	}
	for i, v := range op.Out {
		u.at[v] = carried[i]
	}
	return nil
}

// copy writes one operation, with its arguments and results as at has them.
func (u *unroller) copy(op *Op, at map[*Value]*Value) {
	twin := &Op{Kind: op.Kind, Attrs: op.Attrs, Tag: op.Tag, Body: op.Body}
	for _, v := range op.In {
		twin.In = append(twin.In, at[v])
	}
	for _, v := range op.Out {
		w := &Value{Name: u.names.name(v.Name), Type: v.Type, Source: v.Source, def: twin}
		at[v] = w
		twin.Out = append(twin.Out, w)
	}
	u.to.Ops = append(u.to.Ops, twin)
}
