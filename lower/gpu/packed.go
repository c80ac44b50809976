package gpu

import (
	"cmp"
	"math"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower/stablehlo"
)

// Documents that are packed into sequences are segments to cuDNN: a list of lengths and offsets
// into one flat array of tokens, which need not cover it. The gradient's workspace is 4 bytes for
// each segment, head, element of a head and token of the longest segment that the call allows, so
// one call for 256 documents of a sequence of 8192 tokens would have room for 256 of 8192 tokens.
// Therefore long and short documents have calls of their own: a sequence has less than 4 documents
// that are longer than a quarter of it. The others are segments of the same tokens, seen as four
// times as many sequences of a quarter of the length, and so on ([kernels.PackedLevels]).

// Dimensions of the tables below.
const (
	tokenDim    = "tokens"
	documentDim = "document"
	segmentDim  = "segment"
	beforeDim   = "before" // what comes before, of the same kind
)

// A packing is where documents are: tables of documents, and for each token of a device.
type packing struct {
	w      writer
	tokens int64
	levels []kernels.PackedLevel
	// lengths and starts of documents in tokens, s32[document], in the order of tokens. Behind the
	// last document lengths are 0.
	lengths, starts val
	document        val // of each token, s32[tokens]
	calls           []segments
}

// segments are the documents that one call computes.
type segments struct {
	rows            int64 // sequences of the call's operands
	length          int64 // of these sequences: the longest segment
	lengths, starts val   // s32[segment], in tokens
	has             val   // which tokens belong to one, pred[tokens]; without a name all do
	at              val   // of each token in the statistics, segment · length + place, s32[tokens]
}

// s32 is a type of indices.
func s32(dims ...ir.Dim) ir.Type { return ir.Type{Elem: dtype.S32, Dims: dims} }

// renamed gives a vector's dimension another name.
func renamed(v val, dim string) val {
	t := v.Type
	t.Dims = []ir.Dim{{Name: dim, Size: t.Dims[0].Size}}
	return &stablehlo.Value{Name: v.Name, Type: t}
}

// pack makes the tables from the document numbers s32[batch, seq], which count from 0 in each
// sequence and never fall.
func (w writer) pack(op *ir.Op, numbers val) *packing {
	rows, seq := numbers.Type.Dims[0].Size, numbers.Type.Dims[1].Size
	p := &packing{w: w, tokens: rows * seq,
		levels: kernels.PackedLevels(seq, cmp.Or(op.Attrs.Int("documents"), seq))}
	p.document = w.Reshape(w.numbered(numbers), s32(ir.Dim{Name: tokenDim, Size: p.tokens}))
	last := p.levels[len(p.levels)-1]
	documents := ir.Dim{Name: documentDim, Size: rows * last.Parts * last.Segments}
	table := s32(documents, p.document.Type.Dims[0])
	here := w.Compare("EQ", w.BroadcastTo(p.document, table), w.Iota(table, documentDim))
	p.lengths = w.Reduce(w.Convert(here, dtype.S32), "add", 0, tokenDim)
	p.starts = w.sumBefore(p.lengths)
	for i := range p.levels {
		p.calls = append(p.calls, p.level(i, rows))
	}
	return p
}

// numbered makes the document numbers count through all sequences of a device.
func (w writer) numbered(numbers val) val {
	row := numbers.Type.Dims[0]
	if row.Size == 1 {
		return numbers
	}
	most := w.Reduce(numbers, "maximum", 0, numbers.Type.Dims[1].Name)
	counts := w.Elementwise("add", most, w.Constant(most.Type, 1))
	before := w.sumBefore(renamed(counts, segmentDim))
	return w.Elementwise("add", numbers, w.BroadcastTo(renamed(before, row.Name), numbers.Type))
}

// sumBefore gives for each element of a vector the sum of those before it.
func (w writer) sumBefore(v val) val {
	dim := v.Type.Dims[0]
	table := s32(dim, ir.Dim{Name: beforeDim, Size: dim.Size})
	before := w.Compare("LT", w.Iota(table, beforeDim), w.Iota(table, dim.Name))
	terms := w.Select(before, w.BroadcastTo(renamed(v, beforeDim), table), w.Constant(table, 0))
	return w.Reduce(terms, "add", 0, beforeDim)
}

// level lists the documents of one level as segments.
func (p *packing) level(i int, rows int64) segments {
	w, l := p.w, p.levels[i]
	s := segments{rows: rows * l.Parts, length: l.Length, lengths: renamed(p.lengths, segmentDim),
		starts: renamed(p.starts, segmentDim)}
	place := w.Iota(p.document.Type, tokenDim)
	if len(p.levels) == 1 {
		place = w.Elementwise("subtract", place, w.Rows(p.starts, p.document))
		s.at = p.statistic(p.document, place, l.Length)
		return s
	}
	zero := w.Constant(p.lengths.Type, 0)
	has := w.Compare("LE", p.lengths, w.Constant(p.lengths.Type, float64(l.Length)))
	shortest := int64(0)
	if i+1 < len(p.levels) {
		shortest = p.levels[i+1].Length
	}
	has = w.Elementwise("and", has,
		w.Compare("GT", p.lengths, w.Constant(p.lengths.Type, float64(shortest))))
	segment := w.sumBefore(w.Convert(has, dtype.S32)) // of each document in the list of this level
	list := s32(ir.Dim{Name: segmentDim, Size: s.rows * l.Segments}, p.lengths.Type.Dims[0])
	// A document of another level is no segment: its number is -1.
	number := w.Select(has, segment, w.Constant(segment.Type, -1))
	here := w.Compare("EQ", w.BroadcastTo(number, list), w.Iota(list, segmentDim))
	pick := func(v val) val {
		return w.Reduce(w.Select(here, w.BroadcastTo(v, list), w.Constant(list, 0)), "add", 0,
			documentDim)
	}
	s.lengths, s.starts = pick(p.lengths), pick(p.starts)
	// Segments behind the last one are empty, at the end of the tokens.
	none := w.Compare("EQ", s.lengths, w.Constant(s.lengths.Type, 0))
	s.starts = w.Select(none, w.Constant(s.starts.Type, float64(p.tokens)), s.starts)
	s.has = w.Compare("GE", w.Rows(number, p.document), w.Constant(p.document.Type, 0))
	place = w.Elementwise("subtract", place, w.Rows(p.starts, p.document))
	s.at = p.statistic(w.Rows(w.Select(has, segment, zero), p.document), place, l.Length)
	return s
}

// statistic is the place of a token's log-sum-exp in the statistics [segment, length] of a call.
func (p *packing) statistic(segment, place val, length int64) val {
	w := p.w
	return w.Elementwise("add", w.Elementwise("multiply", segment,
		w.Constant(segment.Type, float64(length))), place)
}

// operands are the lengths and offsets of a call: of queries and of keys, lengths in tokens and
// offsets in elements of [heads, head].
func (p *packing) operands(s segments, q, k ir.Type) []val {
	w := p.w
	starts := w.Concat(segmentDim, s32(ir.Dim{Name: segmentDim, Size: s.starts.Type.Dims[0].Size + 1}),
		s.starts, w.Constant(s32(ir.Dim{Name: segmentDim, Size: 1}), float64(p.tokens)))
	return []val{s.lengths, s.lengths, w.offsets(starts, p.tokens, q), w.offsets(starts, p.tokens, k)}
}

// offsets makes places among some number of tokens offsets in elements; a token of t has [heads,
// head].
func (w writer) offsets(places val, tokens int64, t ir.Type) val {
	each := t.Size(ir.HeadDim) * max(t.Size(ir.Heads), t.Size(ir.KVHeads))
	if tokens > math.MaxInt32/each {
		w.Fail("%d tokens of %d elements have no offsets of 32 bits, which documents need; "+
			"fix: a plan with more cp or tp, or with \"documents\": 1", tokens, each)
	}
	return w.Elementwise("multiply", places, w.Constant(places.Type, float64(each)))
}

// resized is a type of [batch, seq or keys, ...] with other sizes of the two.
func resized(t ir.Type, rows, length int64) ir.Type {
	dims := append([]ir.Dim{{Name: t.Dims[0].Name, Size: rows}, {Name: t.Dims[1].Name, Size: length}},
		t.Dims[2:]...)
	return ir.Type{Elem: t.Elem, Dims: dims}
}

// view is an operation on the sequences of a call, without documents, and its arguments.
func (p *packing) view(op *ir.Op, s segments, in []val) (*ir.Op, []val) {
	one := *op
	resize := func(v *ir.Value) *ir.Value {
		c := *v
		c.Type = resized(v.Type, s.rows, s.length)
		return &c
	}
	one.In, one.Out = lists.Map(op.In[:len(in)], resize), lists.Map(op.Out, resize)
	return &one, lists.Map(in, func(v val) val {
		return p.w.Reshape(v, resized(v.Type, s.rows, s.length))
	})
}

// joined takes, for each token, the result of the call that has its document. Other calls leave
// there what was in memory.
func (p *packing) joined(so, one val, s segments, like ir.Type) val {
	w := p.w
	one = w.Reshape(one, like)
	if so == nil || s.has == nil {
		return one
	}
	has := w.Reshape(s.has, ir.Type{Elem: dtype.Pred, Dims: like.Dims[:2]})
	return w.Select(w.BroadcastTo(has, like), one, so)
}

// tokenRows is the type of statistics with a row for each token: [tokens, heads].
func tokenRows(t ir.Type, tokens int64) ir.Type {
	return ir.Type{Elem: t.Elem, Dims: []ir.Dim{{Name: tokenDim, Size: tokens}, t.Dims[2]}}
}

// attention calls cuDNN once for each level: O [batch, seq, heads, head] and the log-sum-exp
// [batch, seq, heads].
func (p *packing) attention(op *ir.Op, in []val) []val {
	w, out := p.w, make([]val, 2)
	for i, s := range p.calls {
		one, args := p.view(op, s, in)
		args = append(args, p.operands(s, op.In[0].Type, op.In[1].Type)...)
		o := w.attend(one, args, p.levels[i].Segments)
		out[0] = p.joined(out[0], o[0], s, op.Out[0].Type)
		out[1] = p.joined(out[1], p.perToken(o[1], s), s, op.Out[1].Type)
	}
	return out
}

// perToken is the log-sum-exp [tokens, heads] from a call's statistics [segment, heads, length].
func (p *packing) perToken(stat val, s segments) val {
	w, d := p.w, stat.Type.Dims
	stat = w.Transpose(stat, []string{d[0].Name, d[2].Name, ir.Heads})
	rows := w.Reshape(stat, tokenRows(stat.Type, stat.Type.Dims[0].Size*s.length))
	return w.Rows(rows, s.at)
}

// statistics are a call's [segment, heads, length] from the log-sum-exp, by the tokens of each
// segment.
func (p *packing) statistics(lse val, s segments, tokens val) val {
	w := p.w
	lse = w.Reshape(lse, tokenRows(lse.Type, p.tokens))
	stat := w.Reshape(w.Rows(lse, tokens), ir.Type{Elem: dtype.F32, Dims: []ir.Dim{
		s.starts.Type.Dims[0], {Name: tokenDim, Size: s.length}, lse.Type.Dims[1]}})
	return w.Transpose(stat, []string{segmentDim, ir.Heads, tokenDim})
}

// attentionGrad is dQ, dK and dV from Q, K, V, O, the log-sum-exp and dO.
func (p *packing) attentionGrad(op *ir.Op, in []val) []val {
	w, out := p.w, make([]val, 3)
	for i, s := range p.calls {
		one, args := p.view(op, s, []val{in[0], in[1], in[2], in[3], in[5]})
		one.In = append(one.In[:0:0], one.In[:3]...)
		stat := p.statistics(in[4], s, p.rowTokens(s))
		args = []val{args[0], args[1], args[2], stat, args[4], args[3]}
		args = append(args, p.operands(s, op.In[0].Type, op.In[1].Type)...)
		for j, g := range w.attendGrad(one, args, p.levels[i].Segments) {
			out[j] = p.joined(out[j], g, s, op.Out[j].Type)
		}
	}
	return out
}
