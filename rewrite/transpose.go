package rewrite

import (
	"slices"

	"github.com/deepwell/deepwell/ir"
)

// foldInto folds a transpose that alone reads a product into the product: a GEMM can write its
// result in either order, and a transpose of its own is one more pass through memory.
func foldInto(kinds ...string) func(*ir.Graph) error {
	return func(g *ir.Graph) error {
		by := readers(g)
		return rows().Edit(g, func(r *ir.Rewriter, op *ir.Op) []*ir.Value {
			if !slices.Contains(kinds, op.Kind) {
				return nil
			}
			list := by[op.Out[0]]
			if len(list) != 1 || list[0].Kind != "transpose" {
				return nil
			}
			transpose := list[0]
			a := op.Attrs.With(attrOrder, ir.Names(transpose.Out[0].Type.Dims))
			r.Substitute(transpose.Out[0], r.ReplaceWith(op, op.Kind, a, op.In...)[0])
			return []*ir.Value{}
		})
	}
}
