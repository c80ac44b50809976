package stablehlo

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// meshRules are the collectives. The gradient of a model's text moves exactly what the graph says.
func meshRules() map[string]Rule {
	return map[string]Rule{
		"all_reduce": func(w *Writer, op *ir.Op, in []Val) []Val {
			return []Val{w.AllReduce(in[0], "add", op.Axes()...)}
		},
		"reduce_scatter": func(w *Writer, op *ir.Op, in []Val) []Val {
			out := op.Out[0].Type
			return []Val{w.Apply(out, `"stablehlo.reduce_scatter"(`, fmt.Sprintf(
				`) (%s) {scatter_dimension = %d : i64, %s}`, Reducer("add", out.Elem),
				out.Index(op.Attrs.Text("dim")), w.replicas(op.Axes()...)), in[0])}
		},
		"all_gather": allGather,
		"own_piece":  shardSlice,
		"to_host": func(w *Writer, _ *ir.Op, in []Val) []Val {
			return []Val{w.move(in[0], w.Target.HostMemory())}
		},
		"to_device": func(w *Writer, _ *ir.Op, in []Val) []Val {
			if w.Target.HostMemory() != "" && len(in) == 2 { // not before the second is there
				in[0] = w.after(in[0], in[1])
			}
			return []Val{w.move(in[0], "device")}
		},
	}
}

// move writes what XLA takes for a move to a memory; where there is only one, nothing.
func (w *Writer) move(v Val, to string) Val {
	if w.Target.HostMemory() == "" {
		return v
	}
	return w.Apply(v.Type, "stablehlo.custom_call @annotate_device_placement(",
		`) {has_side_effect = `+
			`true, mhlo.frontend_attributes = {_xla_buffer_placement = "`+to+`"}}`, v)
}

// after gives a value that is not there before another is.
func (w *Writer) after(v, other Val) Val {
	pair := w.Fresh()
	w.Line("%s:2 = stablehlo.optimization_barrier %s, %s : %s, %s", pair, v.Name, other.Name,
		Tensor(v.Type), Tensor(other.Type))
	return Val{pair + "#0", v.Type}
}

// folder is the region of a collective that joins values.
func Reducer(how string, d dtype.DType) string {
	return fmt.Sprintf("{\n^bb0(%%a: tensor<%[1]s>, %%b: tensor<%[1]s>):\n"+
		"  %%c = stablehlo.%[2]s %%a, %%b : tensor<%[1]s>\n"+
		"  stablehlo.return %%c : tensor<%[1]s>\n}", d.MLIR(), how)
}

func (w *Writer) AllReduce(x Val, how string, axes ...string) Val {
	return w.Apply(x.Type, `"stablehlo.all_reduce"(`, fmt.Sprintf(") (%s) {%s}", Reducer(how,
		x.Type.Elem),
		w.replicas(axes...)), x)
}

// carriers are the whole numbers that carry types which XLA:CPU would widen on their way. A gather
// moves bits and does not look at them.
var carriers = map[int]dtype.DType{8: dtype.U8, 16: dtype.U16}

func allGather(w *Writer, op *ir.Op, in []Val) []Val {
	x, out := in[0], op.Out[0].Type
	as, carried := carriers[x.Type.Elem.Bits()]
	if carried {
		x = w.Bitcast(x, as)
	} else {
		as = out.Elem
	}
	ahead := ""
	if op.Attrs.Bool("prefetch") {
		// XLA:GPU fetches only what is marked a round ahead (reference/overlap.md, 4a).
		ahead = `, mhlo.frontend_attributes = {is_pipelineable = "true"}`
	}
	t := ir.Type{Elem: as, Dims: out.Dims}
	y := w.Apply(t, `"stablehlo.all_gather"(`, fmt.Sprintf(") {all_gather_dim = %d : i64, %s%s}",
		out.Index(op.Attrs.Text("dim")), w.replicas(op.Axes()...), ahead), x)
	return []Val{w.Bitcast(y, out.Elem)}
}

// bits sees a value as another type of the same width.
func (w *Writer) Bitcast(x Val, as dtype.DType) Val {
	if x.Type.Elem == as {
		return x
	}
	t := ir.Type{Elem: as, Dims: x.Type.Dims}
	return w.Apply(t, "stablehlo.bitcast_convert ", "", x)
}

// replicas names the groups of devices that meet along some axes. A group list is as long as the
// mesh is large, so each is written once, before the module.
func (w *Writer) replicas(axes ...string) string {
	first, each := []int64{0}, []int64{0}
	stride := int64(1)
	for _, a := range slices.Backward(w.mesh) {
		list := &first
		if slices.Contains(axes, a.Name) {
			list = &each
		}
		var wider []int64
		for k := range a.Size {
			wider = append(wider, lists.Map(*list, func(d int64) int64 { return d + k*stride })...)
		}
		*list = wider
		stride *= a.Size
	}
	groups := make([]string, len(first))
	for i, f := range first {
		group := lists.Map(each, func(e int64) int64 { return f + e })
		groups[i] = "[" + List(group) + "]"
	}
	text := fmt.Sprintf("dense<[%s]> : tensor<%dx%dxi64>", List(groups), len(first), len(each))
	return "replica_groups = " + w.alias(text)
}

// alias gives the name of a list of devices.
func (w *Writer) alias(text string) string {
	at := slices.Index(w.groups, text)
	if at < 0 {
		at = len(w.groups)
		w.groups = append(w.groups, text)
	}
	return fmt.Sprintf("#group%d", at)
}

// aliases spells the groups.
func (w *Writer) aliases() string {
	var b strings.Builder
	for i, text := range w.groups {
		fmt.Fprintf(&b, "#group%d = %s\n", i, text)
	}
	return b.String()
}

// first is where the device's own piece of a dimension begins, if an axis cuts it in pieces of
// that size.
func (w *Writer) shardStart(axis string, size int64, as dtype.DType) Val {
	n, stride := ir.Along(w.mesh, axis)
	id := ir.Type{Elem: dtype.U32}
	place := w.Emit(id, "stablehlo.replica_id : tensor<ui32>")
	place = w.Elementwise("divide", place, w.Constant(id, float64(stride)))
	place = w.Elementwise("remainder", place, w.Constant(id, float64(n)))
	return w.Convert(w.Elementwise("multiply", place, w.Constant(id, float64(size))), as)
}

// ownPiece takes the slice that belongs to the device, by its number.
func shardSlice(w *Writer, op *ir.Op, in []Val) []Val {
	out, dim := op.Out[0].Type, op.Attrs.Text("dim")
	start := w.shardStart(op.Attrs.Text("axis"), out.Size(dim), indexType)
	return []Val{w.dynamicSlice(in[0], dim, start, out.Size(dim))}
}

// localIDs counts rows from the device's first; has says which rows are the device's.
func (w *Writer) localIDs(ids Val, table ir.Type) (local, has Val) {
	axis := table.Place.Axes(table.Dims[0].Name)[0]
	n := table.Dims[0].Size
	start := w.BroadcastTo(w.shardStart(axis, n, ids.Type.Elem), ids.Type)
	local = w.Elementwise("subtract", ids, start)
	has = w.Elementwise("and", w.Compare("GE", local, w.Constant(ids.Type, 0)),
		w.Compare("LT", local, w.Constant(ids.Type, float64(n))))
	return local, has
}

// sharedEmbedding gives zeros for rows that another device has.
func sharedEmbedding(w *Writer, op *ir.Op, in []Val) []Val {
	local, has := w.localIDs(in[0], op.In[1].Type)
	local = w.Select(has, local, w.Constant(local.Type, 0))
	rows := embedding(w, op, []Val{local, in[1]})[0]
	return []Val{w.Select(w.BroadcastTo(has, rows.Type), rows, w.Constant(rows.Type, 0))}
}

// sharedEmbeddingDW adds up the gradients of the device's own rows: a scatter leaves out what is
// outside.
func sharedEmbeddingDW(w *Writer, op *ir.Op, in []Val) []Val {
	out := op.Out[0].Type
	local, has := w.localIDs(in[0], out)
	outside := w.Constant(local.Type, float64(out.Dims[0].Size))
	return embeddingDW(w, op, []Val{w.Select(has, local, outside), in[1]})
}

// shares gives the scores that the device has, in f32, without those that do not count, and where
// the labels' scores are among them.
func (w *Writer) vocabShard(op *ir.Op, in []Val) (x, label Val) {
	dim := op.Attrs.Text("dim")
	x = w.Convert(in[0], dtype.F32)
	t := ir.Type{Elem: in[1].Type.Elem, Dims: x.Type.Dims}
	start := w.shardStart(op.Axes()[0], x.Type.Size(dim), t.Elem)
	at := w.Elementwise("add", w.Iota(t, dim), w.BroadcastTo(start, t))
	if valid := op.Attrs.Int("valid"); valid > 0 {
		counts := w.Compare("LT", at, w.Constant(t, float64(valid)))
		x = w.Select(counts, x, w.Constant(x.Type, NegInf))
	}
	return x, w.Compare("EQ", at, w.BroadcastTo(in[1], t))
}

// sharedCrossEntropy lets the devices agree on the largest score of a row, then on the sum of its
// exponentials and the score of its label together.
func sharedCrossEntropy(w *Writer, op *ir.Op, in []Val) []Val {
	dim := op.Attrs.Text("dim")
	x, label := w.vocabShard(op, in)
	top := w.AllReduce(w.Reduce(x, "maximum", NegInf, dim), "maximum", op.Axes()...)
	e := w.Elementwise("exponential", w.Elementwise("subtract", x, w.BroadcastTo(top, x.Type)))
	one := ir.Type{Elem: dtype.F32, Dims: append([]ir.Dim{{Name: "pair", Size: 1}}, top.Type.Dims...)}
	two := ir.Type{Elem: dtype.F32, Dims: append([]ir.Dim{{Name: "pair", Size: 2}}, top.Type.Dims...)}
	total := w.Reshape(w.Reduce(e, "add", 0, dim), one)
	score := w.Reshape(w.Reduce(w.Select(label, x, w.Constant(x.Type, 0)), "add", 0, dim), one)
	sums := w.AllReduce(w.Concat("pair", two, total, score), "add", op.Axes()...)
	total = w.Reshape(w.Slice(sums, "pair", 0, 1), top.Type)
	score = w.Reshape(w.Slice(sums, "pair", 1, 2), top.Type)
	return w.RowLoss(in[1], top, total, score)
}

func sharedCrossEntropyGrad(w *Writer, op *ir.Op, in []Val) []Val {
	x, label := w.vocabShard(op, in)
	return []Val{w.LogitsGrad(x, func() Val { return label }, in, in[0].Type.Elem)}
}
