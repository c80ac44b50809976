package rewrite

import (
	"slices"

	"github.com/deepwell/deepwell/ir"
)

// isMove tells an operation that copies a value between the memories of device and host.
func isMove(op *ir.Op) bool { return op.Kind == "to_host" || op.Kind == "to_device" }

// dropMoves removes the copies between device and host, for a target whose devices compute in the
// host's memory. An update then shows which result is selected from which argument, and XLA:CPU
// writes it in place: with copies between, an offloaded optimizer had a second copy of its state.
//
// Where the argument cannot take the move's name, since inputs and other results have one, the move
// becomes an identity (stop_gradient, which prints nothing): a copy that stayed would put a value
// on the host that nobody brings back.
func dropMoves(g *ir.Graph) error {
	dropMovesOf(g, false)
	return nil
}

// dropMovesOf is dropMoves for a graph or the body of a loop, whose results have no names of their
// own: there every move goes, or the loop would return a value in another memory than its readers
// expect.
func dropMovesOf(g *ir.Graph, body bool) {
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
			dropMovesOf(op.Body, true)
		}
		if !isMove(op) {
			return false
		}
		x, v := op.In[0], op.Out[0]
		if slices.Contains(g.Results, v) && !body {
			if x.Def() == nil || slices.Contains(g.Results, x) {
				op.Kind, op.In = "stop_gradient", op.In[:1]
				return false
			}
			x.Name, x.Means = v.Name, v.Means
		}
		at[v] = x
		swap(g.Results)
		return true
	})
}
