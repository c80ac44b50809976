package lower

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

func blockRules() map[string]rule {
	return map[string]rule{
		"rms_norm": func(w *writer, op *ir.Op, in []val) []val {
			x, dim := w.wide(in[0]), op.Attrs.Text("dim")
			r := w.rsqrtMean(w.elementwise("multiply", x, x), dim, op.Attrs.Float("eps"))
			scale := w.wide(in[1])
			if s := op.Attrs.Float("shift"); s != 0 {
				scale = w.elementwise("add", scale, w.constant(scale.t, s))
			}
			h := w.elementwise("multiply", x, w.as(r, x.t))
			return []val{w.convert(w.elementwise("multiply", h, w.as(scale, x.t)), in[0].t.Elem)}
		},
		"layer_norm": func(w *writer, op *ir.Op, in []val) []val {
			x, dim := w.wide(in[0]), op.Attrs.Text("dim")
			c := w.elementwise("subtract", x, w.as(w.mean(x, dim), x.t))
			r := w.rsqrtMean(w.elementwise("multiply", c, c), dim, op.Attrs.Float("eps"))
			h := w.elementwise("multiply", c, w.as(r, x.t))
			h = w.elementwise("multiply", h, w.as(w.wide(in[1]), x.t))
			h = w.elementwise("add", h, w.as(w.wide(in[2]), x.t))
			return []val{w.convert(h, in[0].t.Elem)}
		},
		"softmax": func(w *writer, op *ir.Op, in []val) []val {
			p, _ := w.softmax(in[0], op.Attrs.Text("dim"))
			return []val{p}
		},
		"rope":               rope,
		"attention":          attention,
		"attention_grad":     attentionGrad,
		"cross_entropy":      crossEntropy,
		"cross_entropy_grad": crossEntropyGrad,
		"embedding":          embedding,
		"embedding_dw":       embeddingDW,
		"gather": func(w *writer, op *ir.Op, in []val) []val {
			return []val{w.onehot(op, in[0], in[1], true)}
		},
		"scatter": func(w *writer, op *ir.Op, in []val) []val {
			return []val{w.onehot(op, in[0], in[1], false)}
		},
		"top_k": topK,
	}
}

// wide gives a value in f32 if its type is narrower: norms and sums are computed so and rounded
// once, as PyTorch's are.
func (w *writer) wide(x val) val {
	if x.t.Elem == dtype.F64 || x.t.Elem.Kind() != dtype.Float {
		return x
	}
	return w.convert(x, dtype.F32)
}

func (w *writer) mean(x val, dim string) val {
	total := w.reduce(x, "add", 0, dim)
	return w.elementwise("multiply", total, w.constant(total.t, 1/float64(x.t.Size(dim))))
}

// rsqrtMean gives one over the root of the mean of squares and a little more.
func (w *writer) rsqrtMean(squares val, dim string, eps float64) val {
	m := w.mean(squares, dim)
	return w.elementwise("rsqrt", w.elementwise("add", m, w.constant(m.t, eps)))
}

// softmax gives the probabilities along a dimension and the logarithm of their sum.
func (w *writer) softmax(x val, dim string) (p, lse val) {
	top := w.reduce(x, "maximum", lowest, dim)
	e := w.elementwise("exponential", w.elementwise("subtract", x, w.as(top, x.t)))
	total := w.reduce(e, "add", 0, dim)
	p = w.elementwise("divide", e, w.as(total, x.t))
	return p, w.elementwise("add", top, w.elementwise("log", total))
}

// rope turns the halves of the last dimension by the angle of their position.
func rope(w *writer, op *ir.Op, in []val) []val {
	x := in[0]
	last := x.t.Dims[len(x.t.Dims)-1]
	half := last.Size / 2
	f := ir.Type{Elem: dtype.F32, Dims: []ir.Dim{{Name: last.Name, Size: half}}}
	digits := make([]string, half)
	for i, v := range ir.RopeFrequencies(op) {
		digits[i] = number(dtype.F32, v)
	}
	freq := w.emit(f, "stablehlo.constant dense<[%s]> : %s", strings.Join(digits, ", "), tensor(f))
	pos := w.convert(in[1], dtype.F32)
	at := ir.Type{Elem: dtype.F32, Dims: append(slices.Clone(pos.t.Dims), f.Dims...)}
	angle := w.elementwise("multiply", w.as(pos, at), w.as(freq, at))
	halves := ir.Type{Elem: x.t.Elem, Dims: slices.Concat(x.t.Dims[:len(x.t.Dims)-1], f.Dims)}
	cos := w.as(w.convert(w.elementwise("cosine", angle), x.t.Elem), halves)
	sin := w.as(w.convert(w.elementwise("sine", angle), x.t.Elem), halves)
	if op.Attrs.Bool("back") {
		sin = w.elementwise("negate", sin)
	}
	a, b := w.slice(x, last.Name, 0, half), w.slice(x, last.Name, half, last.Size)
	times := func(x, y val) val { return w.elementwise("multiply", x, y) }
	low := w.elementwise("subtract", times(a, cos), times(b, sin))
	high := w.elementwise("add", times(b, cos), times(a, sin))
	return []val{w.concat(last.Name, x.t, low, high)}
}

// share is the dimension of the query heads that one key head serves.
const share = "share"

// An attendant writes the parts that attention and its gradient have in common.
type attendant struct {
	w       *writer
	op      *ir.Op
	q, k, v val // q with heads cut into key heads and their share

	segments []val // of queries and of keys, or none
	places   []val // likewise
	alone    bool  // a share of one head is no dimension
	ahead    int64 // by how much the first query stands after the first key

	// times is how products are written.
	times func(x, y val, to dtype.DType, over ...string) val
	// mask is how the scores of keys that a query does not see are taken out.
	mask func(score val) val
}

func newAttendant(w *writer, op *ir.Op, in []val, alone bool) *attendant {
	a := &attendant{w: w, op: op, k: w.narrow(op, in[1]), v: w.narrow(op, in[2]),
		times: w.dot, alone: alone}
	a.mask = a.masked
	a.q = a.grouped(w.narrow(op, in[0]))
	segments, places := op.Extras()
	rest := in[len(in)-len(segments)-len(places):]
	a.segments, a.places = rest[:len(segments)], rest[len(segments):]
	return a
}

// grouped cuts heads into key heads and their share.
func (a *attendant) grouped(x val) val {
	kv := a.k.t.Size(ir.KVHeads)
	t := ir.Type{Elem: x.t.Elem}
	for _, d := range x.t.Dims {
		if d.Name == ir.Heads {
			t.Dims = append(t.Dims, ir.Dim{Name: ir.KVHeads, Size: kv})
			if d = (ir.Dim{Name: share, Size: d.Size / kv}); a.alone && d.Size == 1 {
				continue
			}
		}
		t.Dims = append(t.Dims, d)
	}
	return a.w.reshape(x, t)
}

// ungrouped puts dimensions into a graph value's order and joins the heads again.
func (a *attendant) ungrouped(x val, like ir.Type) val {
	return a.w.reshape(a.w.transpose(x, a.split(like)), like)
}

// split lists a graph value's dimensions with the heads cut, which is how a product gives it.
func (a *attendant) split(like ir.Type) []string {
	var order []string
	for _, d := range like.Dims {
		if d.Name != ir.Heads {
			order = append(order, d.Name)
		} else if order = append(order, ir.KVHeads); !a.alone || d.Size > a.k.t.Size(ir.KVHeads) {
			order = append(order, share)
		}
	}
	return order
}

// scores gives q·k in f32, capped and masked, and before the cap.
func (a *attendant) scores() (score, raw val) {
	w := a.w
	raw = a.times(a.q, a.k, dtype.F32, ir.HeadDim)
	raw = w.elementwise("multiply", raw, w.constant(raw.t, a.op.Attrs.Float("scale")))
	score = raw
	if soft := a.op.Attrs.Float("softcap"); soft > 0 {
		t := w.elementwise("tanh", w.elementwise("multiply", raw, w.constant(raw.t, 1/soft)))
		score = w.elementwise("multiply", t, w.constant(raw.t, soft))
	}
	return a.mask(score), raw
}

// unseen stands for the score of a key that a query does not see. It is far below every score: the
// exponential of the difference is zero, and no NaN arises.
const unseen = -1e30

// masked leaves the scores of keys that a query sees.
func (a *attendant) masked(score val) val {
	sees := a.sees(score.t)
	if sees.name == "" {
		return score
	}
	return a.w.choose(sees, score, a.w.constant(score.t, unseen))
}

// sees gives, for each score, whether the query sees the key; nothing if all see all.
func (a *attendant) sees(scores ir.Type) (all val) {
	w, window := a.w, a.op.Attrs.Int("window")
	also := func(one val) {
		if all.name != "" {
			one = w.elementwise("and", all, one)
		}
		all = one
	}
	t := ir.Type{Elem: indexType, Dims: []ir.Dim{
		{Name: ir.Seq, Size: a.q.t.Size(ir.Seq)}, {Name: ir.Keys, Size: a.k.t.Size(ir.Keys)}}}
	var i, j val
	if len(a.places) > 0 {
		i, j = w.as(a.places[0], t), w.as(a.places[1], t)
	} else {
		i, j = w.iota(t, ir.Seq), w.iota(t, ir.Keys)
	}
	if a.ahead > 0 {
		i = w.elementwise("add", i, w.constant(t, float64(a.ahead)))
	}
	if a.op.Attrs.Bool("causal") {
		also(w.compare("LE", j, i))
	}
	if window > 0 {
		also(w.compare("GT", j, w.elementwise("subtract", i, w.constant(t, float64(window)))))
	}
	if all.name != "" {
		all = w.as(all, scores)
	}
	if len(a.segments) > 0 {
		wide := ir.Type{Elem: dtype.S32, Dims: scores.Dims}
		also(w.compare("EQ", w.as(a.segments[0], wide), w.as(a.segments[1], wide)))
	}
	return all
}

func attention(w *writer, op *ir.Op, in []val) []val {
	a := newAttendant(w, op, in, false)
	score, _ := a.scores()
	p, lse := w.softmax(score, ir.Keys)
	o := w.dot(w.convert(p, a.v.t.Elem), a.v, in[2].t.Elem, ir.Keys)
	return []val{a.ungrouped(o, op.Out[0].Type), a.ungrouped(lse, op.Out[1].Type)}
}

func attentionGrad(w *writer, op *ir.Op, in []val) []val {
	a := newAttendant(w, op, in, false)
	o, stat, do := a.grouped(in[3]), a.grouped(in[4]), a.grouped(in[5])
	elem, short := in[0].t.Elem, w.narrow(op, do)
	score, raw := a.scores()
	p := w.elementwise("exponential", w.elementwise("subtract", score, w.as(stat, score.t)))
	dv := w.dot(w.convert(p, short.t.Elem), short, elem, ir.Seq, share)
	dp := w.dot(short, a.v, dtype.F32, ir.HeadDim)
	dp = w.transpose(dp, ir.Names(p.t.Dims))
	inner := w.reduce(w.convert(w.elementwise("multiply", do, o), dtype.F32), "add", 0, ir.HeadDim)
	ds := w.elementwise("multiply", p, w.elementwise("subtract", dp, w.as(inner, p.t)))
	ds = a.slope(ds, raw)
	narrow := w.convert(ds, short.t.Elem)
	dq := w.dot(narrow, a.k, elem, ir.Keys)
	dk := w.dot(narrow, a.q, elem, ir.Seq, share)
	return []val{a.ungrouped(dq, op.Out[0].Type), a.ungrouped(dk, op.Out[1].Type),
		a.ungrouped(dv, op.Out[2].Type)}
}

// slope takes the gradient of the scores through their cap and their scale.
func (a *attendant) slope(ds, raw val) val {
	w := a.w
	ds = w.elementwise("multiply", ds, w.constant(ds.t, a.op.Attrs.Float("scale")))
	if soft := a.op.Attrs.Float("softcap"); soft > 0 {
		t := w.elementwise("tanh", w.elementwise("multiply", raw, w.constant(raw.t, 1/soft)))
		slope := w.elementwise("subtract", w.constant(t.t, 1), w.elementwise("multiply", t, t))
		ds = w.elementwise("multiply", ds, slope)
	}
	return ds
}

// picked gives a mask of the labels' places in the logits.
func (w *writer) picked(logits, labels val, dim string) val {
	t := ir.Type{Elem: labels.t.Elem, Dims: logits.t.Dims}
	return w.compare("EQ", w.iota(t, dim), w.as(labels, t))
}

func crossEntropy(w *writer, op *ir.Op, in []val) []val {
	dim := op.Attrs.Text("dim")
	x := w.convert(in[0], dtype.F32)
	top := w.reduce(x, "maximum", lowest, dim)
	e := w.elementwise("exponential", w.elementwise("subtract", x, w.as(top, x.t)))
	at := w.choose(w.picked(x, in[1], dim), x, w.constant(x.t, 0))
	return w.lossOf(in[1], top, w.reduce(e, "add", 0, dim), w.reduce(at, "add", 0, dim))
}

// lossOf gives the loss of rows and the logarithm of their sums, from the labels, the largest
// score, the sum of exponentials less the largest, and the label's score of each row.
func (w *writer) lossOf(labels, top, total, at val) []val {
	lse := w.elementwise("add", top, w.elementwise("log", total))
	real := w.compare("GE", labels, w.constant(labels.t, 0))
	loss := w.choose(real, w.elementwise("subtract", lse, at), w.constant(lse.t, 0))
	return []val{loss, lse}
}

func crossEntropyGrad(w *writer, op *ir.Op, in []val) []val {
	x := w.convert(in[0], dtype.F32)
	label := func() val { return w.picked(x, in[1], op.Attrs.Text("dim")) }
	return []val{w.scoreGrad(x, label, in, in[0].t.Elem)}
}

// scoreGrad gives the gradient of scores x in f32, from a mask of the labels' places, and the
// operation's labels, logarithms of sums and gradients of rows.
func (w *writer) scoreGrad(x val, label func() val, in []val, to dtype.DType) val {
	labels, lse, d := in[1], in[2], in[3]
	p := w.elementwise("exponential", w.elementwise("subtract", x, w.as(lse, x.t)))
	one := w.choose(label(), w.constant(x.t, 1), w.constant(x.t, 0))
	real := w.compare("GE", labels, w.constant(labels.t, 0))
	d = w.choose(real, d, w.constant(d.t, 0))
	g := w.elementwise("multiply", w.elementwise("subtract", p, one), w.as(d, x.t))
	return w.convert(g, to)
}

// flat gives ids as a column, as gathers and scatters want them.
func (w *writer) flat(ids val) val {
	return w.reshape(ids, ir.Type{Elem: ids.t.Elem, Dims: []ir.Dim{
		{Name: "ids", Size: ids.t.Shape().Elements()}, {Name: "one", Size: 1}}})
}

func embedding(w *writer, op *ir.Op, in []val) []val {
	table, width := in[1], in[1].t.Dims[1]
	ids := w.flat(in[0])
	t := ir.Type{Elem: table.t.Elem, Dims: []ir.Dim{ids.t.Dims[0], width}}
	rows := w.apply(t, `"stablehlo.gather"(`, fmt.Sprintf(`) {dimension_numbers = #stablehlo.gather<`+
		`offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, `+
		`slice_sizes = array<i64: 1, %d>}`, width.Size), table, ids)
	return []val{w.reshape(rows, op.Out[0].Type)}
}

func embeddingDW(w *writer, op *ir.Op, in []val) []val {
	out := op.Out[0].Type
	ids := w.flat(in[0])
	dy := w.reshape(in[1], ir.Type{Elem: out.Elem, Dims: []ir.Dim{ids.t.Dims[0], out.Dims[1]}})
	zero := w.constant(out, 0)
	return []val{w.apply(out, `"stablehlo.scatter"(`, `) (`+folder("add", out.Elem)+
		`) {scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], `+
		`inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}`,
		zero, ids, dy)}
}

// onehot picks from, or adds into, the last dimension by comparing places: routers have few.
func (w *writer) onehot(op *ir.Op, x, idx val, gather bool) val {
	dim := op.Attrs.Text("dim")
	k := idx.t.Dims[len(idx.t.Dims)-1].Size
	n := x.t.Size(dim)
	if !gather {
		n = op.Attrs.Int("size")
	}
	rows := slices.Clone(idx.t.Dims[:len(idx.t.Dims)-1])
	picks, places := ir.Dim{Name: "picks", Size: k}, ir.Dim{Name: dim, Size: n}
	wide := ir.Type{Elem: idx.t.Elem, Dims: append(slices.Clone(rows), picks, places)}
	column := w.reshape(idx, ir.Type{Elem: idx.t.Elem, Dims: append(slices.Clone(rows), picks)})
	hit := w.compare("EQ", w.as(column, wide), w.iota(wide, dim))
	over := "picks"
	if gather {
		over = dim
	} else {
		x = w.reshape(x, ir.Type{Elem: x.t.Elem, Dims: append(slices.Clone(rows), picks)})
	}
	full := ir.Type{Elem: x.t.Elem, Dims: wide.Dims}
	chosen := w.choose(hit, w.as(x, full), w.constant(full, 0))
	return w.reshape(w.reduce(chosen, "add", 0, over), op.Out[0].Type)
}

// topK sorts values with their places, the largest first; equal values keep their order.
func topK(w *writer, op *ir.Op, in []val) []val {
	x, dim := in[0], op.Attrs.Text("dim")
	places := ir.Type{Elem: dtype.S32, Dims: x.t.Dims}
	at := w.iota(places, dim)
	sorted := w.fresh()
	e := x.t.Elem.MLIR()
	_, types := spelled([]val{x, at})
	w.line(`%s:2 = "stablehlo.sort"(%s, %s) ({`, sorted, x.name, at.name)
	w.line("^bb0(%%a: tensor<%[1]s>, %%b: tensor<%[1]s>, %%i: tensor<i32>, %%j: tensor<i32>):", e)
	w.line("  %%c = stablehlo.compare GT, %%a, %%b : (tensor<%[1]s>, tensor<%[1]s>) -> tensor<i1>", e)
	w.line("  stablehlo.return %%c : tensor<i1>")
	w.line("}) {dimension = %d : i64, is_stable = true} : (%[2]s) -> (%[2]s)", x.t.Index(dim), types)
	k := op.Attrs.Int("k")
	values := w.slice(val{fmt.Sprintf("%s#0", sorted), x.t}, dim, 0, k)
	return []val{values, w.slice(val{fmt.Sprintf("%s#1", sorted), places}, dim, 0, k)}
}
