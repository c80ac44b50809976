package ir

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
)

// lowered expands op by its row's Lower. What a row of another package gives is checked here, where
// the operation can still be named: one value for each result, of its type.
func (r *Rewriter) lowered(op *Op) (out []*Value) {
	r.Tagged(op.Tag, func() { out = op.spec().Lower(r.Builder, op) })
	if r.err != nil {
		return out
	}
	bad := func(format string, args ...any) {
		r.err = diag.New(diag.GraphInvalid, "Lower of %s "+format, append([]any{op.Kind}, args...)...).
			At("graph %s", r.g.Name)
	}
	if len(out) != len(op.Out) {
		bad("returns %d values for %d results", len(out), len(op.Out))
		return r.dead(len(op.Out))
	}
	for i, v := range out {
		switch want := op.Out[i].Type; {
		case v == nil:
			bad("returns nil for result %d", i)
		case !v.Type.Equal(want):
			bad("returns %s for result %d, which Infer says is %s", v.Type, i, want)
		case slices.Contains(op.Out, v):
			bad("returns the operation's own result")
		}
		if r.err != nil {
			return r.dead(len(op.Out))
		}
	}
	return out
}

// checkGradients holds the VJP of another package's row to its contract: for each argument nil, or
// a value of the argument's shape, of its element type or in f32. Placement is not compared: a
// partial sum is reduced when it is read.
func checkGradients(op *Op, list []*Value) error {
	if op.spec() == builtin()[op.Kind] {
		return nil // tested; some return gradients of their first arguments only
	}
	if len(list) != len(op.In) {
		return fmt.Errorf("the gradient of %s returns %d values for %d arguments", op.Kind, len(list),
			len(op.In))
	}
	for i, g := range list {
		if g == nil {
			continue
		}
		want := op.In[i].Type
		if g.Type.Elem != want.Elem && g.Type.Elem != dtype.F32 || !slices.Equal(g.Type.Dims, want.Dims) {
			return fmt.Errorf("the gradient of %s is %s for argument %d, which is %s", op.Kind, g.Type, i,
				want)
		}
	}
	return nil
}
