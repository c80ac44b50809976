package gpu

import (
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower/stablehlo"
	"github.com/deepwell/deepwell/rewrite"
)

// normKernels are norms of rows and their gradients.
func normKernels() []stablehlo.Kernel {
	return []stablehlo.Kernel{{
		Name: kernels.Triton, Kinds: []string{rewrite.NormRows, rewrite.NormGrad}, Print: on(rowNorm),
		Applies: func(_ *kernels.Selector, op *ir.Op) (string, bool) {
			_, why := rewrite.NormOf(op)
			return why, true
		},
	}}
}

// rowNorm prints a norm of rows or its gradient. In a loop it reads what earlier loops saved from
// their stacks, and writes what is saved into its own, also where others read it.
func rowNorm(w writer, op *ir.Op, in []val) []val {
	n, _ := rewrite.NormOf(op)
	is := map[int]bool{}
	for _, i := range n.Matrices() {
		is[i] = true
	}
	x := op.In[0].Type
	s := newStacks(w, op, in, func(i int) bool { return is[i] },
		func(v *ir.Value) bool { return v.Type.Equal(x) })
	for i, v := range op.Out {
		slot := w.SlotOf(v)
		if n.Grads > 0 || slot == nil || s.slots[i] != nil || !v.Type.Equal(x) || !s.use(slot.Slice) {
			continue
		}
		n.Kept, s.slots = append(n.Kept, i), append(s.slots, slot)
		s.before = append(s.before, slot.Stack)
	}
	n.Stacks = s.Stacks
	k, err := n.Kernel()
	if err != nil {
		w.Fail("%s", err)
		return in
	}
	out := w.tritonCall(k, s.arguments()...)
	if n.Grads > 0 {
		out[1] = w.Reduce(out[1], "add", 0, out[1].Type.Dims[0].Name)
	}
	return s.results(w, op, out)
}
