package gpu

import (
	"errors"
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/kernels/expr"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/kernels/triton"
	"github.com/deepwell/deepwell/lower/stablehlo"
	"github.com/deepwell/deepwell/rewrite"
)

// tritonCall prints the call of a kernel of our own. Arrays are row-major matrices of the kernel's
// shapes; codes and scales are bytes.
func (w writer) tritonCall(k *triton.Kernel, in ...val) (out []val) {
	name := w.Fresh()
	var operands []val
	var layouts [2][]string
	for i, a := range k.Args {
		t := ir.Type{Elem: map[triton.Elem]dtype.DType{triton.BF16: dtype.BF16, triton.F32: dtype.F32,
			triton.I32: dtype.S32}[a.Elem]}
		if t.Elem == dtype.Invalid {
			t.Elem = dtype.U8
		}
		for d, n := range a.Shape {
			t.Dims = append(t.Dims, ir.Dim{Name: fmt.Sprintf("d%d", d), Size: int64(n)})
		}
		side := 0
		if a.Result {
			side = 1
			out = append(out, &stablehlo.Value{Name: fmt.Sprintf("%s#%d", name, len(out)), Type: t})
		} else {
			operands = append(operands, w.Reshape(in[i], ir.Type{Dims: t.Dims}))
		}
		layouts[side] = append(layouts[side], rowMajorLayout(len(a.Shape)))
	}
	names, types := stablehlo.Spell(operands)
	visible := len(out)
	if n := k.Scratch(); n > 0 { // memory for descriptors is a result of the call
		t := ir.Type{Elem: dtype.U8, Dims: []ir.Dim{{Name: "scratch", Size: int64(n)}}}
		out = append(out, &stablehlo.Value{Name: fmt.Sprintf("%s#%d", name, visible), Type: t})
		layouts[1] = append(layouts[1], rowMajorLayout(1))
	}
	_, results := stablehlo.Spell(out)
	w.Line("%s:%d = stablehlo.custom_call @__gpu$xla.gpu.triton(%s) {api_version = 4 : i32, "+
		"backend_config = %s, operand_layouts = [%s], result_layouts = [%s]%s} : (%s) -> (%s)", name,
		len(out), names, k.Config(), stablehlo.List(layouts[0]), stablehlo.List(layouts[1]), k.Aliases(),
		types, results)
	return out[:visible]
}

// quantizeOnce prints the kernel that computes sources and quantizes them in one read. In a loop it
// reads what earlier loops saved from their stacks, and writes what is saved into its own.
func quantizeOnce(w writer, op *ir.Op, in []val) []val {
	s, out := ownKernel(w, op, in, func(m fused.Matrix, of fused.Source,
		f fused.NVFP4Form) (*triton.Kernel, error) {
		if ir.Format(op.Attrs.Text("format")) == ir.MXFP8 {
			return fused.MXFP8(m, of, f.Form)
		}
		f.Added = w.Target.Arch() == "sm_120"
		return fused.NVFP4(m, of, f)
	})
	if s == nil {
		return in
	}
	return s.results(w, op, out)
}

// amaxOnce prints the kernel that computes sources and finds their largest magnitudes, as they are
// and transformed, tile by tile; of tiles and devices XLA finds the largest.
func amaxOnce(w writer, op *ir.Op, in []val) []val {
	s, out := ownKernel(w, op, in, func(m fused.Matrix, of fused.Source,
		f fused.NVFP4Form) (*triton.Kernel, error) {
		return fused.Amax(m, of, f.Form)
	})
	if s == nil {
		return in
	}
	for i, v := range op.Out {
		if v.Type.Elem != dtype.F32 { // a source
			continue
		}
		t := ir.Type{Elem: dtype.U32, Dims: slices.Clone(v.Type.Dims)}
		depth := lists.Product(t.Dims, func(d ir.Dim) int64 { return d.Size })
		t.Dims = append(t.Dims, ir.Dim{Name: "tile", Size: out[i].Type.Shape().Elements() / depth})
		top := w.Reshape(w.Bitcast(out[i], dtype.U32), t)
		out[i] = w.AmaxOf(op, v.Type, top)
	}
	return s.results(w, op, out)
}

// ownKernel prints the call of a kernel for the matrices of an operation; it gives nil after an
// error.
func ownKernel(w writer, op *ir.Op, in []val, kernel func(fused.Matrix, fused.Source,
	fused.NVFP4Form) (*triton.Kernel, error)) (*stacks, []val) {
	m, err := rewrite.MatricesOf(op)
	e, exprErr := rewrite.ExprOf(op)
	f, formErr := rewrite.NVFP4Of(op)
	if err := errors.Join(err, exprErr, formErr); err != nil {
		w.Fail("%s", err)
		return nil, nil
	}
	s := newStacks(w, op, in, func(i int) bool { return i < len(e.In) && e.In[i].Over == expr.Matrix },
		func(v *ir.Value) bool { // the largest magnitudes are of tiles
			return op.Kind != rewrite.AmaxOnce || v.Type.Elem != dtype.F32
		})
	f.Stacks = s.Stacks
	shape := fused.Matrix{Batch: int(m.Batch), Rows: int(m.Rows), Cols: int(m.Cols)}
	k, err := kernel(shape, fused.Of(e), f)
	if err != nil {
		w.Fail("%s", err)
		return nil, nil
	}
	return s, w.tritonCall(k, s.arguments()...)
}

// stacks are the stacks of a loop that a kernel reads and writes.
type stacks struct {
	fused.Stacks
	operands []val
	// slots are of results, nil where one is not written into a stack, and then of saved operands.
	slots  []*stablehlo.Slot
	before []val // the stacks that are written to
	round  val
}

// newStacks finds the stacks of a kernel's operands and results. All have as many rounds as the
// loop that the kernel is in. Matrix tells the operands, and whole the results, that a kernel can
// have in stacks.
func newStacks(w writer, op *ir.Op, in []val, matrix func(i int) bool,
	whole func(*ir.Value) bool) *stacks {
	s := &stacks{operands: in}
	s.operands = slices.Clone(in)
	for i := range in {
		if !matrix(i) {
			continue
		}
		if part, ok := w.SliceOf(in[i]); ok && s.use(part) {
			s.From, s.operands[i] = append(s.From, i), part.Stack
		}
	}
	for i, v := range op.Out {
		slot := w.SlotOf(v)
		fused := slot != nil && slot.Fused && op.Attrs.Bool(rewrite.Codes)
		if slot == nil || !whole(v) || !slot.Alone && !fused || !s.use(slot.Slice) {
			s.slots = append(s.slots, nil)
			continue
		}
		s.Into, s.slots = append(s.Into, i), append(s.slots, slot)
		s.before = append(s.before, slot.Stack)
	}
	for i := range in {
		slot := w.SlotOf(op.In[i])
		if !matrix(i) || slot == nil || slot.After != nil || !s.use(slot.Slice) {
			continue
		}
		s.Saved, s.slots = append(s.Saved, i), append(s.slots, slot)
		s.before = append(s.before, slot.Stack)
	}
	return s
}

// use takes a stack, if it is of the rounds that the others are of.
func (s *stacks) use(part stablehlo.Slice) bool {
	n := int(part.Stack.Type.Dims[0].Size)
	if s.Rounds != 0 && s.Rounds != n || s.round != nil && s.round.Name != part.At.Name {
		return false
	}
	s.Rounds, s.round = n, part.At
	return true
}

// arguments are the kernel's: operands, the round, and stacks that are written to.
func (s *stacks) arguments() []val {
	if s.Rounds == 0 {
		return s.operands
	}
	return append(append(slices.Clip(s.operands), s.round), s.before...)
}

// results gives the results of the operation their types, and hands stacks back to the loop.
func (s *stacks) results(w writer, op *ir.Op, out []val) []val {
	for i, slot := range s.slots {
		if slot != nil {
			slot.After = w.Reshape(out[i], ir.Type{Dims: slot.Stack.Type.Dims})
		}
	}
	list := make([]val, len(op.Out))
	for i, v := range op.Out {
		switch list[i] = (&stablehlo.Value{Type: v.Type}); { // which nobody reads
		case s.slots[i] == nil:
			list[i] = w.Reshape(out[i], ir.Type{Dims: v.Type.Dims})
		case !s.slots[i].Alone:
			list[i] = w.Written(s.slots[i], v.Type)
		}
	}
	return list
}

// lossKernels are losses whose gradients take the place of logits.
func lossKernels() []stablehlo.Kernel {
	return []stablehlo.Kernel{{
		Name: kernels.Triton, Kinds: []string{rewrite.LossInPlace}, Print: on(lossInPlace),
		Applies: func(_ *kernels.Selector, op *ir.Op) (string, bool) { return rewrite.WhyOf(op), true },
	}}
}

// lossInPlace prints a loss and the gradient of its logits as one kernel.
func lossInPlace(w writer, op *ir.Op, in []val) []val {
	n := elements(in[1].Type.Dims)
	l := fused.Loss{Rows: int(n), Cols: int(elements(in[0].Type.Dims) / n)}
	k, err := l.Kernel()
	if err != nil {
		w.Fail("%s", err)
		return in
	}
	out := w.tritonCall(k, in...)
	for i, v := range op.Out {
		out[i] = w.Reshape(out[i], ir.Type{Dims: v.Type.Dims})
	}
	return out
}

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
