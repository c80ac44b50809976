package gpu

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
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
	_, results := stablehlo.Spell(out)
	w.Line("%s:%d = stablehlo.custom_call @__gpu$xla.gpu.triton(%s) {api_version = 4 : i32, "+
		"backend_config = %s, operand_layouts = [%s], result_layouts = [%s]%s} : (%s) -> (%s)", name,
		len(out), names, k.Config(), stablehlo.List(layouts[0]), stablehlo.List(layouts[1]), k.Aliases(),
		types, results)
	return out
}

// quantizeOnce prints the kernel that computes sources and quantizes them in one read. In a loop it
// reads what earlier loops saved from their stacks, and writes what is saved into its own.
func quantizeOnce(w writer, op *ir.Op, in []val) []val {
	m, err := rewrite.MatricesOf(op)
	if err != nil {
		w.Fail("%s", err)
		return in
	}
	e, err := rewrite.ExprOf(op)
	if err != nil {
		w.Fail("%s", err)
		return in
	}
	s := newStacks(w, op, e, in)
	k, err := fused.MXFP8(fused.Matrix{Batch: int(m.Batch), Rows: int(m.Rows), Cols: int(m.Cols)},
		fused.Of(e), fused.Form{Along: m.Along, Across: m.Across, Keep: m.Keep, Stacks: s.Stacks})
	if err != nil {
		w.Fail("%s", err)
		return in
	}
	return s.results(w, op, w.tritonCall(k, s.operands...))
}

// stacks are the stacks of a loop that a kernel reads and writes.
type stacks struct {
	fused.Stacks
	operands []val
	// slots are of results, nil where one is not written into a stack, and then of saved operands.
	slots []*stablehlo.Slot
}

// newStacks finds the stacks of a kernel's operands and results. All have as many rounds as the
// loop that the kernel is in.
func newStacks(w writer, op *ir.Op, e *expr.Expr, in []val) *stacks {
	s := &stacks{operands: in}
	var round val
	use := func(part stablehlo.Slice) bool {
		n := int(part.Stack.Type.Dims[0].Size)
		if s.Rounds != 0 && s.Rounds != n || round != nil && round.Name != part.At.Name {
			return false
		}
		s.Rounds, round = n, part.At
		return true
	}
	s.operands = slices.Clone(in)
	for i, o := range e.In {
		if o.Over != expr.Matrix {
			continue
		}
		if part, ok := w.SliceOf(in[i]); ok && use(part) {
			s.From, s.operands[i] = append(s.From, i), part.Stack
		}
	}
	var before []val
	for i, v := range op.Out {
		slot := w.SlotOf(v)
		if slot == nil || !slot.Alone || !use(slot.Slice) {
			s.slots = append(s.slots, nil)
			continue
		}
		s.Into, s.slots, before = append(s.Into, i), append(s.slots, slot), append(before, slot.Stack)
	}
	for i, o := range e.In {
		slot := w.SlotOf(op.In[i])
		if o.Over != expr.Matrix || slot == nil || slot.After != nil || !use(slot.Slice) {
			continue
		}
		s.Saved, s.slots, before = append(s.Saved, i), append(s.slots, slot), append(before, slot.Stack)
	}
	if s.Rounds > 0 {
		s.operands = append(append(s.operands, round), before...)
	}
	return s
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
		if list[i] = (&stablehlo.Value{Type: v.Type}); s.slots[i] == nil { // else nobody reads it
			list[i] = w.Reshape(out[i], ir.Type{Dims: v.Type.Dims})
		}
	}
	return list
}
