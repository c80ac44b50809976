package stablehlo

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// meshRules print collectives and copies between device and host. A program sends exactly what the
// graph says: tests compare both to the byte.
func meshRules() map[string]Rule {
	return map[string]Rule{
		// Partial sums, added over the devices of the axes; types have the sum's shape already.
		"all_reduce": func(w *Writer, op *ir.Op, in []Val) []Val {
			return []Val{w.AllReduce(in[0], "add", op.Axes()...)}
		},
		// The same, but each device gets its own shard of the sum along dim.
		"reduce_scatter": func(w *Writer, op *ir.Op, in []Val) []Val {
			out := op.Out[0].Type
			return []Val{w.Apply(out, `"stablehlo.reduce_scatter"(`, fmt.Sprintf(
				`) (%s) {scatter_dimension = %d : i64, %s}`, Reducer("add", out.Elem),
				out.Index(op.Attrs.Text("dim")), w.replicas(op.Axes()...)), in[0])}
		},
		"all_gather":  allGather,
		"all_to_all":  allToAll,
		"shard_slice": shardSlice,
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

// move prints the annotation that XLA takes for a copy to another memory; nothing where there is
// one memory.
func (w *Writer) move(v Val, to string) Val {
	if w.Target.HostMemory() == "" {
		return v
	}
	return w.Apply(v.Type, "stablehlo.custom_call @annotate_device_placement(",
		`) {has_side_effect = `+
			`true, mhlo.frontend_attributes = {_xla_buffer_placement = "`+to+`"}}`, v)
}

// after gives a value that is available only once another is, which orders copies from the host.
func (w *Writer) after(v, other Val) Val {
	pair := w.Fresh()
	w.Line("%s:2 = stablehlo.optimization_barrier %s, %s : %s, %s", pair, v.Name, other.Name,
		Tensor(v.Type), Tensor(other.Type))
	return &Value{pair + "#0", v.Type}
}

// Reducer is the region of a reduction: one instruction on two scalars.
func Reducer(how string, d dtype.DType) string {
	return fmt.Sprintf("{\n^bb0(%%a: tensor<%[1]s>, %%b: tensor<%[1]s>):\n"+
		"  %%c = stablehlo.%[2]s %%a, %%b : tensor<%[1]s>\n"+
		"  stablehlo.return %%c : tensor<%[1]s>\n}", d.MLIR(), how)
}

// AllReduce reduces over the devices along some axes; how is add or maximum.
func (w *Writer) AllReduce(x Val, how string, axes ...string) Val {
	return w.Apply(x.Type, `"stablehlo.all_reduce"(`, fmt.Sprintf(") (%s) {%s}", Reducer(how,
		x.Type.Elem),
		w.replicas(axes...)), x)
}

// carriers are the integer types that carry elements which XLA:CPU would widen to f32 on their way:
// a gather moves bits and does not look at them.
var carriers = map[int]dtype.DType{8: dtype.U8, 16: dtype.U16}

// carried views elements as the integers that carry them, if there are such.
func (w *Writer) carried(x Val) Val {
	if as, ok := carriers[x.Type.Elem.Bits()]; ok {
		return w.Bitcast(x, as)
	}
	return x
}

// Shards is the dimension of gathered shards that are apart.
const Shards = "shards"

// allGather prints an all-gather along a dimension, of integers where XLA:CPU would widen the type.
// Shards that are apart lie one behind the other in memory, each whole: XLA:GPU would put the
// dimension first instead, and then each shard is transposed.
func allGather(w *Writer, op *ir.Op, in []Val) []Val {
	x, out := w.carried(in[0]), op.Out[0].Type
	ahead := ""
	if op.Attrs.Bool("prefetch") {
		// XLA:GPU fetches only what is marked a round ahead (its collective pipeliner in the mode
		// EXPLICIT).
		ahead = `, mhlo.frontend_attributes = {is_pipelineable = "true"}`
	}
	dim := out.Index(op.Attrs.Text("dim"))
	gather := func(x Val, dims []ir.Dim, dim int) Val {
		return w.Apply(ir.Type{Elem: x.Type.Elem, Dims: dims}, `"stablehlo.all_gather"(`, fmt.Sprintf(
			") {all_gather_dim = %d : i64, %s%s}", dim, w.replicas(op.Axes()...), ahead), x)
	}
	var y Val
	if op.Attrs.Bool("apart") {
		each := x.Type.Dims
		shards := ir.Dim{Name: Shards, Size: out.Dims[dim].Size / each[dim].Size}
		one := w.Reshape(x, ir.Type{Dims: slices.Insert(slices.Clone(each), 0, ir.Dim{Name: Shards,
			Size: 1})})
		y = gather(one, slices.Insert(slices.Clone(each), 0, shards), 0)
		y = w.Transpose(y, slices.Insert(ir.Names(each), dim, Shards))
		y = w.Reshape(y, ir.Type{Dims: out.Dims})
	} else {
		y = gather(x, out.Dims, dim)
	}
	return []Val{w.Bitcast(y, out.Elem)}
}

// allToAll prints an exchange of slices along one dimension for slices along another. It moves bits
// as a gather does.
func allToAll(w *Writer, op *ir.Op, in []Val) []Val {
	x, out := w.carried(in[0]), op.Out[0].Type
	n, _ := ir.Along(w.mesh, op.Attrs.Text("axis"))
	y := w.Apply(ir.Type{Elem: x.Type.Elem, Dims: out.Dims}, `"stablehlo.all_to_all"(`, fmt.Sprintf(
		") {split_dimension = %d : i64, concat_dimension = %d : i64, split_count = %d : i64, %s}",
		out.Index(op.Attrs.Text("to")), out.Index(op.Attrs.Text("from")), n,
		w.replicas(op.Axes()...)), x)
	return []Val{w.Bitcast(y, out.Elem)}
}

// Bitcast views a value as another type of the same width.
func (w *Writer) Bitcast(x Val, as dtype.DType) Val {
	if x.Type.Elem == as {
		return x
	}
	t := ir.Type{Elem: as, Dims: x.Type.Dims}
	return w.Apply(t, "stablehlo.bitcast_convert ", "", x)
}

// replicas names the replica groups along some axes of the mesh. A list is as long as the mesh is
// large, so each is written once, as an alias before the module.
func (w *Writer) replicas(axes ...string) string {
	// first lists the least device of each group, each the offsets of a group's members.
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

// aliases spells the lists, before the module.
func (w *Writer) aliases() string {
	var b strings.Builder
	for i, text := range w.groups {
		fmt.Fprintf(&b, "#group%d = %s\n", i, text)
	}
	return b.String()
}

// shardStart is the index at which the device's own shard of a dimension begins, from its replica
// id; size is the size of a shard.
func (w *Writer) shardStart(axis string, size int64, as dtype.DType) Val {
	// A device's position along an axis is replica_id / stride mod n.
	n, stride := ir.Along(w.mesh, axis)
	id := ir.Type{Elem: dtype.U32}
	place := w.Emit(id, "stablehlo.replica_id : tensor<ui32>")
	place = w.Elementwise("divide", place, w.Constant(id, float64(stride)))
	place = w.Elementwise("remainder", place, w.Constant(id, float64(n)))
	return w.Convert(w.Elementwise("multiply", place, w.Constant(id, float64(size))), as)
}

// shardSlice takes the device's own shard of a value that all devices of an axis have.
func shardSlice(w *Writer, op *ir.Op, in []Val) []Val {
	out, dim := op.Out[0].Type, op.Attrs.Text("dim")
	start := w.shardStart(op.Attrs.Text("axis"), out.Size(dim), indexType)
	return []Val{w.dynamicSlice(in[0], dim, start, out.Size(dim))}
}

// localIDs counts ids from the device's first row of a sharded table; has tells which rows the
// device holds.
func (w *Writer) localIDs(ids Val, table ir.Type) (local, has Val) {
	axis := table.Place.Axes(table.Dims[0].Name)[0]
	n := table.Dims[0].Size
	start := w.BroadcastTo(w.shardStart(axis, n, ids.Type.Elem), ids.Type)
	local = w.Elementwise("subtract", ids, start)
	has = w.Elementwise("and", w.Compare("GE", local, w.Constant(ids.Type, 0)),
		w.Compare("LT", local, w.Constant(ids.Type, float64(n))))
	return local, has
}

// shardedEmbedding gives zeros for rows that another device holds; the graph adds up all devices.
func shardedEmbedding(w *Writer, op *ir.Op, in []Val) []Val {
	local, has := w.localIDs(in[0], op.In[1].Type)
	local = w.Select(has, local, w.Constant(local.Type, 0))
	rows := embedding(w, op, []Val{local, in[1]})[0]
	return []Val{w.Select(w.BroadcastTo(has, rows.Type), rows, w.Constant(rows.Type, 0))}
}

// shardedEmbeddingDW adds up the gradients of the device's own rows: a scatter drops indices out of
// bounds.
func shardedEmbeddingDW(w *Writer, op *ir.Op, in []Val) []Val {
	out := op.Out[0].Type
	local, has := w.localIDs(in[0], out)
	outside := w.Constant(local.Type, float64(out.Dims[0].Size))
	return embeddingDW(w, op, []Val{w.Select(has, local, outside), in[1]})
}

// vocabShard gives the logits of the device's shard in f32, minus infinity for padding of the
// vocabulary, and the mask of the labels among them.
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

// shardedCrossEntropy never exchanges logits: devices all-reduce the largest logit of each row,
// then the sum of exponentials and the label's logit together, [2, rows].
func shardedCrossEntropy(w *Writer, op *ir.Op, in []Val) []Val {
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

// shardedCrossEntropyGrad needs no collective: the log-sum-exp is known.
func shardedCrossEntropyGrad(w *Writer, op *ir.Op, in []Val) []Val {
	x, label := w.vocabShard(op, in)
	return []Val{w.LogitsGrad(x, func() Val { return label }, in, in[0].Type.Elem)}
}
