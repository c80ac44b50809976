package lower

import (
	"slices"

	"github.com/deepwell/deepwell/ir"
)

// isMove tells an operation that moves a value between the memories of device and host.
func isMove(op *ir.Op) bool { return op.Kind == "to_host" || op.Kind == "to_device" }

// unmoved gives a graph without moves, for a target whose devices compute in the host's memory. An
// update then shows again which result is selected from which argument, and XLA:CPU writes it in
// place: with moves between, the update of an offloaded optimizer had a copy of all of its state.
func unmoved(g *ir.Graph) *ir.Graph {
	if !slices.ContainsFunc(g.Ops, func(op *ir.Op) bool { return isMove(op) || op.Body != nil }) {
		return g
	}
	g = g.Clone()
	dropMoves(g)
	return g
}

// dropMoves lets what was moved stand for the result of each move, in the graph and in bodies. A
// move stays where its argument cannot take its name: inputs and other results have one.
func dropMoves(g *ir.Graph) {
	at := map[*ir.Value]*ir.Value{}
	swap := func(list []*ir.Value) {
		for i, v := range list {
			if x := at[v]; x != nil {
				list[i] = x
			}
		}
	}
	g.Ops = slices.DeleteFunc(g.Ops, func(op *ir.Op) bool {
		if swap(op.In); op.Body != nil {
			dropMoves(op.Body)
		}
		if !isMove(op) {
			return false
		}
		x, v := op.In[0], op.Out[0]
		if slices.Contains(g.Results, v) {
			if x.Def() == nil || slices.Contains(g.Results, x) {
				return false
			}
			x.Name, x.Means = v.Name, v.Means
		}
		at[v] = x
		swap(g.Results)
		return true
	})
}
