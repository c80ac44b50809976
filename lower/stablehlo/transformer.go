package stablehlo

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// blockRules print the operations of Transformer blocks by their mathematics.
func blockRules() map[string]Rule {
	return map[string]Rule{
		// x / sqrt(mean(x²) + eps) · (scale + shift), over dim; Gemma's shift is 1.
		"rms_norm": func(w *Writer, op *ir.Op, in []Val) []Val {
			x, dim := w.Widen(in[0]), op.Attrs.Text("dim")
			r := w.rsqrtMean(w.Elementwise("multiply", x, x), dim, op.Attrs.Float("eps"))
			scale := w.Widen(in[1])
			if s := op.Attrs.Float("shift"); s != 0 {
				scale = w.Elementwise("add", scale, w.Constant(scale.Type, s))
			}
			h := w.Elementwise("multiply", x, w.BroadcastTo(r, x.Type))
			return []Val{w.Convert(w.Elementwise("multiply", h, w.BroadcastTo(scale, x.Type)),
				in[0].Type.Elem)}
		},
		// (x - mean) / sqrt(var + eps) · scale + bias, over dim.
		"layer_norm": func(w *Writer, op *ir.Op, in []Val) []Val {
			x, dim := w.Widen(in[0]), op.Attrs.Text("dim")
			c := w.Elementwise("subtract", x, w.BroadcastTo(w.mean(x, dim), x.Type))
			r := w.rsqrtMean(w.Elementwise("multiply", c, c), dim, op.Attrs.Float("eps"))
			h := w.Elementwise("multiply", c, w.BroadcastTo(r, x.Type))
			h = w.Elementwise("multiply", h, w.BroadcastTo(w.Widen(in[1]), x.Type))
			h = w.Elementwise("add", h, w.BroadcastTo(w.Widen(in[2]), x.Type))
			return []Val{w.Convert(h, in[0].Type.Elem)}
		},
		"softmax": func(w *Writer, op *ir.Op, in []Val) []Val {
			p, _ := w.softmax(in[0], op.Attrs.Text("dim"))
			return []Val{p}
		},
		"rope":               rope,
		"attention":          attention,
		"attention_grad":     attentionGrad,
		"cross_entropy":      crossEntropy,
		"cross_entropy_grad": crossEntropyGrad,
		"embedding":          embedding,
		"embedding_dw":       embeddingDW,
		// x[..., n] at idx[..., k] gives [..., k]; scatter is its transpose.
		"gather": func(w *Writer, op *ir.Op, in []Val) []Val {
			return []Val{w.onehot(op, in[0], in[1], true)}
		},
		"scatter": func(w *Writer, op *ir.Op, in []Val) []Val {
			return []Val{w.onehot(op, in[0], in[1], false)}
		},
		"top_k": topK,
	}
}

// Widen converts bf16 and f16 to f32: norms and sums are computed in f32 and rounded once, as
// PyTorch does.
func (w *Writer) Widen(x Val) Val {
	if x.Type.Elem == dtype.F64 || x.Type.Elem.Kind() != dtype.Float {
		return x
	}
	return w.Convert(x, dtype.F32)
}

// mean averages over a dimension.
func (w *Writer) mean(x Val, dim string) Val {
	total := w.Reduce(x, "add", 0, dim)
	return w.Elementwise("multiply", total, w.Constant(total.Type, 1/float64(x.Type.Size(dim))))
}

// rsqrtMean gives 1/sqrt(mean(squares) + eps).
func (w *Writer) rsqrtMean(squares Val, dim string, eps float64) Val {
	m := w.mean(squares, dim)
	return w.Elementwise("rsqrt", w.Elementwise("add", m, w.Constant(m.Type, eps)))
}

// softmax gives probabilities along a dimension and the log-sum-exp.
func (w *Writer) softmax(x Val, dim string) (p, lse Val) {
	top := w.Reduce(x, "maximum", NegInf, dim)
	e := w.Elementwise("exponential", w.Elementwise("subtract", x, w.BroadcastTo(top, x.Type)))
	total := w.Reduce(e, "add", 0, dim)
	p = w.Elementwise("divide", e, w.BroadcastTo(total, x.Type))
	return p, w.Elementwise("add", top, w.Elementwise("log", total))
}

// rope rotates pairs (i, i + head/2) of the last dimension by position times frequency.
func rope(w *Writer, op *ir.Op, in []Val) []Val {
	x := in[0]
	last := x.Type.Dims[len(x.Type.Dims)-1]
	half := last.Size / 2
	// Frequencies are a constant f32[head/2]; angles are f32[..., seq, head/2].
	f := ir.Type{Elem: dtype.F32, Dims: []ir.Dim{{Name: last.Name, Size: half}}}
	digits := make([]string, half)
	for i, v := range ir.RopeFrequencies(op) {
		digits[i] = w.Number(dtype.F32, v)
	}
	freq := w.Emit(f, "stablehlo.constant dense<[%s]> : %s", strings.Join(digits, ", "), Tensor(f))
	pos := w.Convert(in[1], dtype.F32)
	at := ir.Type{Elem: dtype.F32, Dims: append(slices.Clone(pos.Type.Dims), f.Dims...)}
	angle := w.Elementwise("multiply", w.BroadcastTo(pos, at), w.BroadcastTo(freq, at))
	halves := ir.Type{Elem: x.Type.Elem, Dims: slices.Concat(x.Type.Dims[:len(x.Type.Dims)-1], f.Dims)}
	wave := func(of string) Val {
		v := w.Elementwise(of, angle)
		if m := ir.RopeMagnitude(op); m != 1 {
			v = w.Elementwise("multiply", v, w.Constant(v.Type, m))
		}
		return w.BroadcastTo(w.Convert(v, x.Type.Elem), halves)
	}
	cos, sin := wave("cosine"), wave("sine")
	if op.Attrs.Bool("back") {
		sin = w.Elementwise("negate", sin)
	}
	a, b := w.Slice(x, last.Name, 0, half), w.Slice(x, last.Name, half, last.Size)
	times := func(x, y Val) Val { return w.Elementwise("multiply", x, y) }
	low := w.Elementwise("subtract", times(a, cos), times(b, sin))
	high := w.Elementwise("add", times(b, cos), times(a, sin))
	return []Val{w.Concat(last.Name, x.Type, low, high)}
}

// QueryGroup is the dimension of the query heads that share one key head (grouped-query attention).
const QueryGroup = "share"

// An Attention prints what attention and its gradient have in common. Q is [..., seq, kv, group,
// head], K and V are [..., keys, kv, head].
type Attention struct {
	W  *Writer
	Op *ir.Op
	// Q has heads split into key heads and their group.
	Q, K, V Val

	// Segments are the document numbers [batch, seq] and [batch, keys], Positions the places in the
	// sequence [seq] and [keys]; two of each or none.
	Segments, Positions []Val
	// Lengths is how many keys are seen, by row; its name is empty if all are.
	Lengths Val
	// squeeze leaves a group of one head out of the dimensions.
	squeeze bool
	// QueryOffset is the position of the first query minus the first key's.
	QueryOffset int64

	// Matmul is how products are printed.
	Matmul func(x, y Val, to dtype.DType, over ...string) Val
	// Mask removes the scores of keys that a query does not see.
	Mask func(score Val) Val
}

// NewAttention rounds the operands to the type of the products and groups the query heads.
func NewAttention(w *Writer, op *ir.Op, in []Val, squeeze bool) *Attention {
	a := &Attention{W: w, Op: op, K: w.CastOperand(op, in[1]), V: w.CastOperand(op, in[2]),
		Matmul: w.Dot, squeeze: squeeze}
	a.Mask = a.selectMask
	a.Q = a.GroupHeads(w.CastOperand(op, in[0]))
	if at := op.KeyLengths(); at > 0 {
		a.Lengths = in[at]
	}
	segments, places := op.MaskArgs()
	rest := in[len(in)-len(segments)-len(places):]
	a.Segments, a.Positions = rest[:len(segments)], rest[len(segments):]
	return a
}

// GroupHeads splits [heads] into [kv, group].
func (a *Attention) GroupHeads(x Val) Val {
	kv := a.K.Type.Size(ir.KVHeads)
	t := ir.Type{Elem: x.Type.Elem}
	for _, d := range x.Type.Dims {
		if d.Name == ir.Heads {
			t.Dims = append(t.Dims, ir.Dim{Name: ir.KVHeads, Size: kv})
			if d = (ir.Dim{Name: QueryGroup, Size: d.Size / kv}); a.squeeze && d.Size == 1 {
				continue
			}
		}
		t.Dims = append(t.Dims, d)
	}
	return a.W.Reshape(x, t)
}

// UngroupHeads transposes to a graph value's order and merges [kv, group] again.
func (a *Attention) UngroupHeads(x Val, like ir.Type) Val {
	return a.W.Reshape(a.W.Transpose(x, a.GroupedDims(like)), like)
}

// GroupedDims lists a graph value's dimensions with the heads split.
func (a *Attention) GroupedDims(like ir.Type) []string {
	var order []string
	for _, d := range like.Dims {
		if d.Name != ir.Heads {
			order = append(order, d.Name)
		} else if order = append(order, ir.KVHeads); !a.squeeze || d.Size > a.K.Type.Size(ir.KVHeads) {
			order = append(order, QueryGroup)
		}
	}
	return order
}

// Scores gives scale · QKᵀ in f32, [..., kv, group, seq, keys] in the order of the product:
// soft-capped and masked, and raw, before the cap.
func (a *Attention) Scores() (score, raw Val) {
	w := a.W
	raw = a.Matmul(a.Q, a.K, dtype.F32, ir.HeadDim)
	raw = w.Elementwise("multiply", raw, w.Constant(raw.Type, a.Op.Attrs.Float("scale")))
	score = raw
	if soft := a.Op.Attrs.Float("softcap"); soft > 0 {
		t := w.Elementwise("tanh", w.Elementwise("multiply", raw, w.Constant(raw.Type, 1/soft)))
		score = w.Elementwise("multiply", t, w.Constant(raw.Type, soft))
	}
	return a.Mask(score), raw
}

// MaskedScore is the score of a key that a query does not see. It is far below every real score:
// the exponential of the difference is zero, and no NaN arises as with minus infinity.
const MaskedScore = -1e30

// selectMask replaces the scores of unseen keys.
func (a *Attention) selectMask(score Val) Val {
	sees := a.Visible(score.Type)
	if sees == nil {
		return score
	}
	return a.W.Select(sees, score, a.W.Constant(score.Type, MaskedScore))
}

// Visible tells for each score whether the query sees the key: causal, window, length, documents.
// Its name is empty if all see all.
func (a *Attention) Visible(scores ir.Type) (all Val) {
	w, window := a.W, a.Op.Attrs.Int("window")
	also := func(one Val) {
		if all != nil {
			one = w.Elementwise("and", all, one)
		}
		all = one
	}
	t := ir.Type{Elem: indexType, Dims: []ir.Dim{
		{Name: ir.Seq, Size: a.Q.Type.Size(ir.Seq)}, {Name: ir.Keys, Size: a.K.Type.Size(ir.Keys)}}}
	var i, j Val
	if len(a.Positions) > 0 {
		i, j = w.BroadcastTo(a.Positions[0], t), w.BroadcastTo(a.Positions[1], t)
	} else {
		i, j = w.Iota(t, ir.Seq), w.Iota(t, ir.Keys)
	}
	if a.QueryOffset > 0 {
		i = w.Elementwise("add", i, w.Constant(t, float64(a.QueryOffset)))
	}
	if a.Op.Attrs.Bool("causal") {
		also(w.Compare("LE", j, i))
	}
	// A window that is as long as the sequence hides nothing; of a single query XLA:CPU would make
	// that it hides all.
	last := t.Size(ir.Seq) + a.QueryOffset
	if window > 0 && (window < last || len(a.Positions) > 0) {
		also(w.Compare("GT", j, w.Elementwise("subtract", i, w.Constant(t, float64(window)))))
	}
	if all != nil {
		all = w.BroadcastTo(all, scores)
	}
	if a.Lengths != nil {
		wide := ir.Type{Elem: dtype.S32, Dims: scores.Dims}
		also(w.Compare("LT", w.Iota(wide, ir.Keys), w.BroadcastTo(a.Lengths, wide)))
	}
	if len(a.Segments) > 0 {
		wide := ir.Type{Elem: dtype.S32, Dims: scores.Dims}
		also(w.Compare("EQ", w.BroadcastTo(a.Segments[0], wide), w.BroadcastTo(a.Segments[1], wide)))
	}
	return all
}

// attention computes softmax(scale · QKᵀ) V in f32, and the log-sum-exp for the gradient.
func attention(w *Writer, op *ir.Op, in []Val) []Val {
	a := NewAttention(w, op, in, false)
	score, _ := a.Scores() // [..., kv, group, seq, keys]
	p, lse := w.softmax(score, ir.Keys)
	o := w.Dot(w.Convert(p, a.V.Type.Elem), a.V, in[2].Type.Elem, ir.Keys)
	return []Val{a.UngroupHeads(o, op.Out[0].Type), a.UngroupHeads(lse, op.Out[1].Type)}
}

// attentionWithSinks rescales what the rule of an attention without sinks gives, whichever it is:
// with lse' = log(exp(lse) + exp(sink)), the output becomes o·exp(lse − lse').
func attentionWithSinks(w *Writer, op *ir.Op, in []Val) []Val {
	_, plain := op.Sinks()
	n := len(in) - 1
	out := w.rule(plain)(w, plain, in[:n])
	o, lse := out[0], out[1]
	sinks := w.BroadcastTo(w.Convert(in[n], dtype.F32), lse.Type)
	top := w.Elementwise("maximum", lse, sinks)
	less := func(x Val) Val { return w.Elementwise("exponential", w.Elementwise("subtract", x, top)) }
	total := w.Elementwise("add", less(lse), less(sinks))
	share := w.Elementwise("divide", less(lse), total)
	wide := w.Convert(o, dtype.F32)
	o = w.Convert(w.Elementwise("multiply", wide, w.BroadcastTo(share, wide.Type)), o.Type.Elem)
	return []Val{o, w.Elementwise("add", top, w.Elementwise("log", total))}
}

// attentionGrad recomputes the probabilities P from the log-sum-exp: dV = Pᵀ dO, dP = dO Vᵀ, dS = P
// ∘ (dP − rowsum(dO ∘ O)), dQ = dS K, dK = dSᵀ Q; gradients of keys sum over the group.
func attentionGrad(w *Writer, op *ir.Op, in []Val) []Val {
	a := NewAttention(w, op, in, false)
	o, stat, do := a.GroupHeads(in[3]), a.GroupHeads(in[4]), a.GroupHeads(in[5])
	elem, short := in[0].Type.Elem, w.CastOperand(op, do)
	score, raw := a.Scores()
	p := w.Elementwise("exponential", w.Elementwise("subtract", score, w.BroadcastTo(stat,
		score.Type)))
	dv := w.Dot(w.Convert(p, short.Type.Elem), short, elem, ir.Seq, QueryGroup)
	dp := w.Dot(short, a.V, dtype.F32, ir.HeadDim)
	dp = w.Transpose(dp, ir.Names(p.Type.Dims))
	inner := w.Reduce(w.Convert(w.Elementwise("multiply", do, o), dtype.F32), "add", 0, ir.HeadDim)
	ds := w.Elementwise("multiply", p, w.Elementwise("subtract", dp, w.BroadcastTo(inner, p.Type)))
	ds = a.ScoreGrad(ds, raw)
	rounded := w.Convert(ds, short.Type.Elem)
	dq := w.Dot(rounded, a.K, elem, ir.Keys)
	dk := w.Dot(rounded, a.Q, elem, ir.Seq, QueryGroup)
	return []Val{a.UngroupHeads(dq, op.Out[0].Type), a.UngroupHeads(dk, op.Out[1].Type),
		a.UngroupHeads(dv, op.Out[2].Type)}
}

// ScoreGrad takes the gradient of the scores through their cap and their scale.
func (a *Attention) ScoreGrad(ds, raw Val) Val {
	w := a.W
	ds = w.Elementwise("multiply", ds, w.Constant(ds.Type, a.Op.Attrs.Float("scale")))
	if soft := a.Op.Attrs.Float("softcap"); soft > 0 {
		t := w.Elementwise("tanh", w.Elementwise("multiply", raw, w.Constant(raw.Type, 1/soft)))
		slope := w.Elementwise("subtract", w.Constant(t.Type, 1), w.Elementwise("multiply", t, t))
		ds = w.Elementwise("multiply", ds, slope)
	}
	return ds
}

// LabelMask is true at the labels' positions in the logits.
func (w *Writer) LabelMask(logits, labels Val, dim string) Val {
	t := ir.Type{Elem: labels.Type.Elem, Dims: logits.Type.Dims}
	return w.Compare("EQ", w.Iota(t, dim), w.BroadcastTo(labels, t))
}

// crossEntropy gives, per row, log-sum-exp minus the label's logit, and the log-sum-exp for the
// gradient.
func crossEntropy(w *Writer, op *ir.Op, in []Val) []Val {
	dim := op.Attrs.Text("dim")
	x := w.Convert(in[0], dtype.F32)
	top := w.Reduce(x, "maximum", NegInf, dim)
	e := w.Elementwise("exponential", w.Elementwise("subtract", x, w.BroadcastTo(top, x.Type)))
	at := w.Select(w.LabelMask(x, in[1], dim), x, w.Constant(x.Type, 0))
	return w.RowLoss(in[1], top, w.Reduce(e, "add", 0, dim), w.Reduce(at, "add", 0, dim))
}

// RowLoss gives the loss of rows and their log-sum-exp, from the largest logit of a row, the sum of
// exponentials less the largest, and the label's logit. A negative label has no loss.
func (w *Writer) RowLoss(labels, top, total, at Val) []Val {
	lse := w.Elementwise("add", top, w.Elementwise("log", total))
	real := w.Compare("GE", labels, w.Constant(labels.Type, 0))
	loss := w.Select(real, w.Elementwise("subtract", lse, at), w.Constant(lse.Type, 0))
	return []Val{loss, lse}
}

// crossEntropyGrad is (softmax − onehot(label)) · d.
func crossEntropyGrad(w *Writer, op *ir.Op, in []Val) []Val {
	x := w.Convert(in[0], dtype.F32)
	label := func() Val { return w.LabelMask(x, in[1], op.Attrs.Text("dim")) }
	return []Val{w.LogitsGrad(x, label, in, in[0].Type.Elem)}
}

// LogitsGrad is the gradient of logits x in f32, from a mask of the labels, and the operation's
// labels, log-sum-exps and row gradients.
func (w *Writer) LogitsGrad(x Val, label func() Val, in []Val, to dtype.DType) Val {
	labels, lse, d := in[1], in[2], in[3]
	p := w.Elementwise("exponential", w.Elementwise("subtract", x, w.BroadcastTo(lse, x.Type)))
	one := w.Select(label(), w.Constant(x.Type, 1), w.Constant(x.Type, 0))
	real := w.Compare("GE", labels, w.Constant(labels.Type, 0))
	d = w.Select(real, d, w.Constant(d.Type, 0))
	g := w.Elementwise("multiply", w.Elementwise("subtract", p, one), w.BroadcastTo(d, x.Type))
	return w.Convert(g, to)
}

// columnOfIDs gives ids as [n, 1], as gathers and scatters want them.
func (w *Writer) columnOfIDs(ids Val) Val {
	return w.Reshape(ids, ir.Type{Elem: ids.Type.Elem, Dims: []ir.Dim{
		{Name: "ids", Size: ids.Type.Shape().Elements()}, {Name: "one", Size: 1}}})
}

// embedding gathers rows of a table [vocab, embed].
func embedding(w *Writer, op *ir.Op, in []Val) []Val {
	return []Val{w.Reshape(w.Rows(in[1], in[0]), op.Out[0].Type)}
}

// Rows gathers rows of a table [n, width] or elements of a table [n] by their indices: [ids, width]
// or [ids], where ids has all dimensions of the indices.
func (w *Writer) Rows(table, indices Val) Val {
	ids := w.columnOfIDs(indices)
	t := ir.Type{Elem: table.Type.Elem, Dims: append(slices.Clone(ids.Type.Dims[:1]),
		table.Type.Dims[1:]...)}
	sizes, offsets := "1", ""
	if len(table.Type.Dims) > 1 {
		sizes, offsets = fmt.Sprintf("1, %d", table.Type.Dims[1].Size), "offset_dims = [1], "
	}
	return w.Apply(t, `"stablehlo.gather"(`, fmt.Sprintf(`) {dimension_numbers = #stablehlo.gather<`+
		`%scollapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, `+
		`slice_sizes = array<i64: %s>}`, offsets, sizes), table, ids)
}

// embeddingDW scatter-adds gradients of equal ids into a table of zeros.
func embeddingDW(w *Writer, op *ir.Op, in []Val) []Val {
	out := op.Out[0].Type
	ids := w.columnOfIDs(in[0])
	dy := w.Reshape(in[1], ir.Type{Elem: out.Elem, Dims: []ir.Dim{ids.Type.Dims[0], out.Dims[1]}})
	zero := w.Constant(out, 0)
	return []Val{w.Apply(out, `"stablehlo.scatter"(`, `) (`+Reducer("add", out.Elem)+
		`) {scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1], `+
		`inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}`,
		zero, ids, dy)}
}

// onehot gathers from, or scatter-adds into, the last dimension by comparing indices with all
// positions: routers have few experts.
func (w *Writer) onehot(op *ir.Op, x, idx Val, gather bool) Val {
	dim := op.Attrs.Text("dim")
	k := idx.Type.Dims[len(idx.Type.Dims)-1].Size
	n := x.Type.Size(dim)
	if !gather {
		n = op.Attrs.Int("size")
	}
	rows := slices.Clone(idx.Type.Dims[:len(idx.Type.Dims)-1])
	picks, places := ir.Dim{Name: "picks", Size: k}, ir.Dim{Name: dim, Size: n}
	wide := ir.Type{Elem: idx.Type.Elem, Dims: append(slices.Clone(rows), picks, places)}
	column := w.Reshape(idx, ir.Type{Elem: idx.Type.Elem, Dims: append(slices.Clone(rows), picks)})
	hit := w.Compare("EQ", w.BroadcastTo(column, wide), w.Iota(wide, dim))
	over := "picks"
	if gather {
		over = dim
	} else {
		x = w.Reshape(x, ir.Type{Elem: x.Type.Elem, Dims: append(slices.Clone(rows), picks)})
	}
	full := ir.Type{Elem: x.Type.Elem, Dims: wide.Dims}
	chosen := w.Select(hit, w.BroadcastTo(x, full), w.Constant(full, 0))
	return w.Reshape(w.Reduce(chosen, "add", 0, over), op.Out[0].Type)
}

// topK sorts values with their indices, the largest first; equal values keep their order.
func topK(w *Writer, op *ir.Op, in []Val) []Val {
	x, dim, k := in[0], op.Attrs.Text("dim"), op.Attrs.Int("k")
	at := w.Iota(ir.Type{Elem: dtype.S32, Dims: x.Type.Dims}, dim)
	values, places := w.sortPairs(x, at, dim, "GT")
	return []Val{w.Slice(values, dim, 0, k), w.Slice(places, dim, 0, k)}
}

// sortPairs sorts values along a dimension by GT or LT, and with them the indices that they had;
// equal values keep their order.
func (w *Writer) sortPairs(x, at Val, dim, how string) (values, places Val) {
	sorted := w.Fresh()
	e := x.Type.Elem.MLIR()
	_, types := Spell([]Val{x, at})
	w.Line(`%s:2 = "stablehlo.sort"(%s, %s) ({`, sorted, x.Name, at.Name)
	w.Line("^bb0(%%a: tensor<%[1]s>, %%b: tensor<%[1]s>, %%i: tensor<i32>, %%j: tensor<i32>):", e)
	w.Line("  %%c = stablehlo.compare %[2]s, %%a, %%b : (tensor<%[1]s>, tensor<%[1]s>) -> tensor<i1>",
		e, how)
	w.Line("  stablehlo.return %%c : tensor<i1>")
	w.Line("}) {dimension = %d : i64, is_stable = true} : (%[2]s) -> (%[2]s)", x.Type.Index(dim),
		types)
	return &Value{fmt.Sprintf("%s#0", sorted), x.Type}, &Value{fmt.Sprintf("%s#1", sorted), at.Type}
}
