package lower

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// meshRules are the collectives. The gradient of a model's text moves exactly what the graph says.
func meshRules() map[string]rule {
	return map[string]rule{
		"all_reduce": func(w *writer, op *ir.Op, in []val) []val {
			return []val{w.allReduce(in[0], "add", op.Axes()...)}
		},
		"reduce_scatter": func(w *writer, op *ir.Op, in []val) []val {
			out := op.Out[0].Type
			return []val{w.apply(out, `"stablehlo.reduce_scatter"(`, fmt.Sprintf(
				`) (%s) {scatter_dimension = %d : i64, %s}`, folder("add", out.Elem),
				out.Index(op.Attrs.Text("dim")), w.replicas(op.Axes()...)), in[0])}
		},
		"all_gather": allGather,
		"own_piece":  ownPiece,
		"to_host": func(w *writer, _ *ir.Op, in []val) []val {
			return []val{w.move(in[0], w.kernels.HostMemory())}
		},
		"to_device": func(w *writer, _ *ir.Op, in []val) []val {
			if w.kernels.HostMemory() != "" && len(in) == 2 { // not before the second is there
				in[0] = w.after(in[0], in[1])
			}
			return []val{w.move(in[0], "device")}
		},
	}
}

// move writes what XLA takes for a move to a memory; where there is only one, nothing.
func (w *writer) move(v val, to string) val {
	if w.kernels.HostMemory() == "" {
		return v
	}
	return w.apply(v.t, "stablehlo.custom_call @annotate_device_placement(", `) {has_side_effect = `+
		`true, mhlo.frontend_attributes = {_xla_buffer_placement = "`+to+`"}}`, v)
}

// after gives a value that is not there before another is.
func (w *writer) after(v, other val) val {
	pair := w.fresh()
	w.line("%s:2 = stablehlo.optimization_barrier %s, %s : %s, %s", pair, v.name, other.name,
		tensor(v.t), tensor(other.t))
	return val{pair + "#0", v.t}
}

// folder is the region of a collective that joins values.
func folder(how string, d dtype.DType) string {
	return fmt.Sprintf("{\n^bb0(%%a: tensor<%[1]s>, %%b: tensor<%[1]s>):\n"+
		"  %%c = stablehlo.%[2]s %%a, %%b : tensor<%[1]s>\n"+
		"  stablehlo.return %%c : tensor<%[1]s>\n}", d.MLIR(), how)
}

func (w *writer) allReduce(x val, how string, axes ...string) val {
	return w.apply(x.t, `"stablehlo.all_reduce"(`, fmt.Sprintf(") (%s) {%s}", folder(how, x.t.Elem),
		w.replicas(axes...)), x)
}

// carriers are the whole numbers that carry types which XLA:CPU would widen on their way. A gather
// moves bits and does not look at them.
var carriers = map[int]dtype.DType{8: dtype.U8, 16: dtype.U16}

func allGather(w *writer, op *ir.Op, in []val) []val {
	x, out := in[0], op.Out[0].Type
	as, carried := carriers[x.t.Elem.Bits()]
	if carried {
		x = w.bits(x, as)
	} else {
		as = out.Elem
	}
	ahead := ""
	if op.Attrs.Bool("prefetch") {
		// XLA:GPU fetches only what is marked a round ahead (reference/overlap.md, 4a).
		ahead = `, mhlo.frontend_attributes = {is_pipelineable = "true"}`
	}
	t := ir.Type{Elem: as, Dims: out.Dims}
	y := w.apply(t, `"stablehlo.all_gather"(`, fmt.Sprintf(") {all_gather_dim = %d : i64, %s%s}",
		out.Index(op.Attrs.Text("dim")), w.replicas(op.Axes()...), ahead), x)
	return []val{w.bits(y, out.Elem)}
}

// bits sees a value as another type of the same width.
func (w *writer) bits(x val, as dtype.DType) val {
	if x.t.Elem == as {
		return x
	}
	t := ir.Type{Elem: as, Dims: x.t.Dims}
	return w.apply(t, "stablehlo.bitcast_convert ", "", x)
}

// replicas names the groups of devices that meet along some axes. A group list is as long as the
// mesh is large, so each is written once, before the module.
func (w *writer) replicas(axes ...string) string {
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
		groups[i] = "[" + list(group) + "]"
	}
	text := fmt.Sprintf("dense<[%s]> : tensor<%dx%dxi64>", list(groups), len(first), len(each))
	return "replica_groups = " + w.alias(text)
}

// alias gives the name of a list of devices.
func (w *writer) alias(text string) string {
	at := slices.Index(w.groups, text)
	if at < 0 {
		at = len(w.groups)
		w.groups = append(w.groups, text)
	}
	return fmt.Sprintf("#group%d", at)
}

// aliases spells the groups.
func (w *writer) aliases() string {
	var b strings.Builder
	for i, text := range w.groups {
		fmt.Fprintf(&b, "#group%d = %s\n", i, text)
	}
	return b.String()
}

// first is where the device's own piece of a dimension begins, if an axis cuts it in pieces of
// that size.
func (w *writer) first(axis string, size int64, as dtype.DType) val {
	n, stride := ir.Along(w.mesh, axis)
	id := ir.Type{Elem: dtype.U32}
	place := w.emit(id, "stablehlo.replica_id : tensor<ui32>")
	place = w.elementwise("divide", place, w.constant(id, float64(stride)))
	place = w.elementwise("remainder", place, w.constant(id, float64(n)))
	return w.convert(w.elementwise("multiply", place, w.constant(id, float64(size))), as)
}

// ownPiece takes the slice that belongs to the device, by its number.
func ownPiece(w *writer, op *ir.Op, in []val) []val {
	out, dim := op.Out[0].Type, op.Attrs.Text("dim")
	start := w.first(op.Attrs.Text("axis"), out.Size(dim), indexType)
	return []val{w.dynamicSlice(in[0], dim, start, out.Size(dim))}
}

// localIDs counts rows from the device's first; has says which rows are the device's.
func (w *writer) localIDs(ids val, table ir.Type) (local, has val) {
	axis := table.Place.Axes(table.Dims[0].Name)[0]
	n := table.Dims[0].Size
	start := w.as(w.first(axis, n, ids.t.Elem), ids.t)
	local = w.elementwise("subtract", ids, start)
	has = w.elementwise("and", w.compare("GE", local, w.constant(ids.t, 0)),
		w.compare("LT", local, w.constant(ids.t, float64(n))))
	return local, has
}

// sharedEmbedding gives zeros for rows that another device has.
func sharedEmbedding(w *writer, op *ir.Op, in []val) []val {
	local, has := w.localIDs(in[0], op.In[1].Type)
	local = w.choose(has, local, w.constant(local.t, 0))
	rows := embedding(w, op, []val{local, in[1]})[0]
	return []val{w.choose(w.as(has, rows.t), rows, w.constant(rows.t, 0))}
}

// sharedEmbeddingDW adds up the gradients of the device's own rows: a scatter leaves out what is
// outside.
func sharedEmbeddingDW(w *writer, op *ir.Op, in []val) []val {
	out := op.Out[0].Type
	local, has := w.localIDs(in[0], out)
	outside := w.constant(local.t, float64(out.Dims[0].Size))
	return embeddingDW(w, op, []val{w.choose(has, local, outside), in[1]})
}

// shares gives the scores that the device has, in f32, without those that do not count, and where
// the labels' scores are among them.
func (w *writer) shares(op *ir.Op, in []val) (x, label val) {
	dim := op.Attrs.Text("dim")
	x = w.convert(in[0], dtype.F32)
	t := ir.Type{Elem: in[1].t.Elem, Dims: x.t.Dims}
	start := w.first(op.Axes()[0], x.t.Size(dim), t.Elem)
	at := w.elementwise("add", w.iota(t, dim), w.as(start, t))
	if valid := op.Attrs.Int("valid"); valid > 0 {
		counts := w.compare("LT", at, w.constant(t, float64(valid)))
		x = w.choose(counts, x, w.constant(x.t, lowest))
	}
	return x, w.compare("EQ", at, w.as(in[1], t))
}

// sharedCrossEntropy lets the devices agree on the largest score of a row, then on the sum of its
// exponentials and the score of its label together.
func sharedCrossEntropy(w *writer, op *ir.Op, in []val) []val {
	dim := op.Attrs.Text("dim")
	x, label := w.shares(op, in)
	top := w.allReduce(w.reduce(x, "maximum", lowest, dim), "maximum", op.Axes()...)
	e := w.elementwise("exponential", w.elementwise("subtract", x, w.as(top, x.t)))
	one := ir.Type{Elem: dtype.F32, Dims: append([]ir.Dim{{Name: "pair", Size: 1}}, top.t.Dims...)}
	two := ir.Type{Elem: dtype.F32, Dims: append([]ir.Dim{{Name: "pair", Size: 2}}, top.t.Dims...)}
	total := w.reshape(w.reduce(e, "add", 0, dim), one)
	score := w.reshape(w.reduce(w.choose(label, x, w.constant(x.t, 0)), "add", 0, dim), one)
	sums := w.allReduce(w.concat("pair", two, total, score), "add", op.Axes()...)
	total = w.reshape(w.slice(sums, "pair", 0, 1), top.t)
	score = w.reshape(w.slice(sums, "pair", 1, 2), top.t)
	return w.lossOf(in[1], top, total, score)
}

func sharedCrossEntropyGrad(w *writer, op *ir.Op, in []val) []val {
	x, label := w.shares(op, in)
	return []val{w.scoreGrad(x, func() val { return label }, in, in[0].t.Elem)}
}
