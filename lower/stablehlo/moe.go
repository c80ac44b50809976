package stablehlo

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// expertRules print the operations of a mixture of experts: routing, and rows to slots and back.
func expertRules() map[string]Rule {
	return map[string]Rule{
		"expert_positions": sortedPositions,
		"expert_counts": func(w *Writer, op *ir.Op, in []Val) []Val {
			out := op.Out[0].Type
			hit := w.OneHot(in[0], op.Attrs.Int("experts"), out.Elem)
			return []Val{w.Reduce(hit, "add", 0, op.Attrs.List("over")...)}
		},
		"expert_overflow": func(w *Writer, op *ir.Op, in []Val) []Val {
			room := w.Constant(in[0].Type, float64(op.Attrs.Int("capacity")))
			over := w.Convert(w.Compare("GE", in[0], room), dtype.F32)
			return []Val{w.Reduce(over, "add", 0, ir.Names(over.Type.Dims)...)}
		},
		"expert_load": func(_ *Writer, _ *ir.Op, in []Val) []Val { return in[:1] },
		"attach_loss": func(_ *Writer, _ *ir.Op, in []Val) []Val { return in[:1] },
		"dispatch":    dispatch,
		"combine":     combine,
	}
}

// OneHot gives [..., router] of choices [...]: 1 at the chosen expert.
func (w *Writer) OneHot(idx Val, experts int64, elem dtype.DType) Val {
	t := ir.Type{Elem: idx.Type.Elem, Dims: append(slices.Clone(idx.Type.Dims),
		ir.Dim{Name: ir.RouterDim, Size: experts})}
	hit := w.Compare("EQ", w.BroadcastTo(idx, t), w.Iota(t, ir.RouterDim))
	return w.Convert(hit, elem)
}

// flat views a value as [n, ...], with the first dims dimensions merged.
func (w *Writer) flat(v Val, dims int) Val {
	n := lists.Product(v.Type.Dims[:dims], func(d ir.Dim) int64 { return d.Size })
	return w.Reshape(v, ir.Type{Elem: v.Type.Elem, Dims: append([]ir.Dim{{Name: "flat", Size: n}},
		v.Type.Dims[dims:]...)})
}

// within gives where 0 <= x < n.
func (w *Writer) within(x Val, n int64) Val {
	return w.Elementwise("and", w.Compare("GE", x, w.Constant(x.Type, 0)),
		w.Compare("LT", x, w.Constant(x.Type, float64(n))))
}

// sortedPositions sorts choices by their expert, counts within the runs of equal ones, and brings
// the counts back. On CPU that is ten times faster than adding up one-hot rows, which GPUs like
// better (reference/moe_lowering.md, section 3: 35 and 320 ms for 65,536 choices of 256).
func sortedPositions(w *Writer, op *ir.Op, in []Val) []Val {
	t, n := in[0].Type, op.Attrs.Int("experts")
	groups := len(t.Dims) - len(op.Attrs.List("over"))
	// A key is a group and an expert; what is dropped has a key of its own.
	has := w.within(in[0], n)
	key := w.Select(has, in[0], w.Constant(t, float64(n)))
	if groups > 0 {
		first := w.flat(key, groups)
		group := w.Elementwise("multiply", w.Iota(first.Type, "flat"),
			w.Constant(first.Type, float64(n+1)))
		key = w.Elementwise("add", first, group)
	}
	key = w.flat(key, len(key.Type.Dims))
	at := w.Iota(key.Type, "flat")
	key, from := w.sortPairs(key, at, "flat", "LT")
	// A run begins where the key differs from the one before.
	size := key.Type.Dims[0].Size
	first := ir.Type{Elem: predType, Dims: []ir.Dim{{Name: "flat", Size: 1}}}
	starts := w.Constant(first, 1)
	if size > 1 {
		starts = w.Concat("flat", ir.Type{Dims: key.Type.Dims}, starts,
			w.Compare("NE", w.Slice(key, "flat", 1, size), w.Slice(key, "flat", 0, size-1)))
	}
	start := w.Select(starts, at, w.Constant(at.Type, 0))
	pos := w.Elementwise("subtract", at, w.Running(start, "maximum", "flat"))
	pos = w.scatterTo(w.Constant(at.Type, 0), from, pos)
	return []Val{w.Select(has, w.Reshape(pos, t), w.Constant(t, -1))}
}

// Running folds each element of a dimension with all before it: add gives sums so far.
func (w *Writer) Running(v Val, how, dim string) Val {
	k := v.Type.Index(dim)
	ones, window := slices.Repeat([]int64{1}, len(v.Type.Dims)), []int64{}
	var padding []string
	for i, d := range v.Type.Dims {
		size, low := int64(1), int64(0)
		if i == k {
			size, low = d.Size, d.Size-1
		}
		window, padding = append(window, size), append(padding, fmt.Sprintf("[%d, 0]", low))
	}
	start := 0.0
	if how == "maximum" && v.Type.Elem.Kind() == dtype.Float {
		start = NegInf
	}
	return w.Apply(v.Type, `"stablehlo.reduce_window"(`, fmt.Sprintf(`) (%s) {window_dimensions = `+
		`array<i64: %s>, window_strides = array<i64: %s>, padding = dense<[%s]> : tensor<%dx2xi64>}`,
		Reducer(how, v.Type.Elem), List(window), List(ones), List(padding), len(window)), v,
		w.Constant(ir.Type{Elem: v.Type.Elem}, start))
}

// scatterTo writes rows into a table at indices that differ; those out of bounds are left out.
func (w *Writer) scatterTo(table, indices, rows Val) Val {
	ids := w.columnOfIDs(indices)
	windows := ""
	if len(table.Type.Dims) > 1 {
		windows = "update_window_dims = [1], "
	}
	e := table.Type.Elem.MLIR()
	return w.Apply(table.Type, `"stablehlo.scatter"(`, fmt.Sprintf(`) ({
^bb0(%%old: tensor<%[1]s>, %%new: tensor<%[1]s>):
  stablehlo.return %%new : tensor<%[1]s>
}) {scatter_dimension_numbers = #stablehlo.scatter<%[2]sinserted_window_dims = [0], `+
		`scatter_dims_to_operand_dims = [0], index_vector_dim = 1>, unique_indices = true}`, e, windows),
		table, ids, rows)
}

// slots gives the slot of each choice, expert·capacity + position, as a list; outside the table
// where a choice has none. Along an axis the device has n experts of its own.
func (w *Writer) slots(op *ir.Op, idx, pos Val, experts, capacity int64) (slot, has Val) {
	if axis := op.Attrs.Text("axis"); axis != "" {
		start := w.BroadcastTo(w.shardStart(axis, experts, idx.Type.Elem), idx.Type)
		idx = w.Elementwise("subtract", idx, start)
	}
	has = w.Elementwise("and", w.within(idx, experts), w.within(pos, capacity))
	slot = w.Elementwise("add", w.Elementwise("multiply", idx, w.Constant(idx.Type,
		float64(capacity))), pos)
	slot = w.Select(has, slot, w.Constant(slot.Type, float64(experts*capacity)))
	n := len(slot.Type.Dims)
	return w.flat(slot, n), w.flat(has, n)
}

// dispatch writes the number of each choice's row into its slot, and gathers rows by it: no row is
// written twice, so the result does not depend on an order.
func dispatch(w *Writer, op *ir.Op, in []Val) []Val {
	out, idx := op.Out[0].Type, in[1].Type
	experts, capacity := out.Dims[0].Size, out.Dims[1].Size
	slot, _ := w.slots(op, in[1], in[2], experts, capacity)
	tokens := len(idx.Dims)
	at := w.Iota(slot.Type, "flat")
	if in[0].Type.Index(ir.Choice) < 0 {
		tokens--
		at = w.Elementwise("divide", at, w.Constant(at.Type, float64(idx.Dims[tokens].Size)))
	}
	rows := w.flat(in[0], tokens)
	n := rows.Type.Dims[0].Size
	source := w.scatterTo(w.Constant(ir.Type{Elem: at.Type.Elem, Dims: []ir.Dim{
		{Name: "flat", Size: experts * capacity}}}, float64(n)), slot, at)
	full := w.Compare("LT", source, w.Constant(source.Type, float64(n)))
	source = w.Select(full, source, w.Constant(source.Type, 0))
	got := w.Rows(w.matrix(rows), source)
	got = w.Reshape(got, ir.Type{Elem: got.Type.Elem, Dims: append([]ir.Dim{source.Type.Dims[0]},
		rows.Type.Dims[1:]...)})
	got = w.Select(w.BroadcastTo(full, got.Type), got, w.Constant(got.Type, 0))
	return []Val{w.Reshape(got, out)}
}

// matrix views rows [n, ...] as a matrix, or as the list that they are.
func (w *Writer) matrix(rows Val) Val {
	if len(rows.Type.Dims) <= 2 {
		return rows
	}
	width := lists.Product(rows.Type.Dims[1:], func(d ir.Dim) int64 { return d.Size })
	return w.Reshape(rows, ir.Type{Elem: rows.Type.Elem, Dims: []ir.Dim{rows.Type.Dims[0],
		{Name: "width", Size: width}}})
}

// combine gathers the rows of a token's slots and adds them up in f32.
func combine(w *Writer, op *ir.Op, in []Val) []Val {
	y, idx, out := in[0], in[1].Type, op.Out[0].Type
	slot, has := w.slots(op, in[1], in[2], y.Type.Dims[0].Size, y.Type.Dims[1].Size)
	slot = w.Select(has, slot, w.Constant(slot.Type, 0))
	got := w.Rows(w.matrix(w.flat(y, 2)), slot)
	got = w.Select(w.BroadcastTo(w.Reshape(has, ir.Type{Elem: predType,
		Dims: got.Type.Dims[:1]}), got.Type), got, w.Constant(got.Type, 0))
	if op.Attrs.Bool("apart") {
		return []Val{w.Reshape(got, out)}
	}
	k := idx.Dims[len(idx.Dims)-1]
	tokens := ir.Dim{Name: "tokens", Size: got.Type.Dims[0].Size / k.Size}
	got = w.Reshape(got, ir.Type{Elem: got.Type.Elem, Dims: append([]ir.Dim{tokens, k},
		got.Type.Dims[1:]...)})
	sum := w.Reduce(w.Widen(got), "add", 0, ir.Choice)
	return []Val{w.Reshape(w.Convert(sum, out.Elem), out)}
}
