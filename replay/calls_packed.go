package replay

import (
	"math"
	"slices"

	"github.com/deepwell/deepwell/diag"
)

// A packing is the segments of a packed attention. All tokens of the call are one flat list, in
// which a segment begins at its offset and has its length. What belongs to no segment is not
// computed: the results are NaN there, as memory may be.
type packing struct {
	w               *writer
	g               attentionConfig
	rows, segments  int64     // sequences of the operands, segments of the list
	length, tokens  [2]int64  // of a sequence, and of all, of queries and of keys
	lengths, starts [2]*value // likewise, s32[segments], in tokens
}

// packing reads the last four operands: lengths of queries and of keys in tokens, and offsets in
// elements, one more than segments.
//
// V has the offsets of K, and the output has Q's, so that their tokens must have the same size.
func (w *writer) packing(s *site, g attentionConfig, q, k, v *value) *packing {
	d, keys := q.shape.dims, k.shape.dims[2]
	p := &packing{w: w, g: g, rows: d[0], segments: d[0] * int64(g.Segments),
		length: [2]int64{d[2], keys}, tokens: [2]int64{d[0] * d[2], d[0] * keys}}
	if !slices.Equal(ints(g.Scores.Dims), []int64{d[0], d[1], d[2], keys}) ||
		g.Mask == "PADDING_CAUSAL" && d[2] != keys {
		w.refuse(diag.ReplayConfig, "%s has queries %v and keys %v; its configuration says %v",
			s.target, d, k.shape.dims, ints(g.Scores.Dims))
	}
	if v.shape.dims[3] != d[3] {
		w.refuse(diag.ReplayCall, "%s has segments of keys %v and values %v by the same offsets",
			s.target, k.shape.dims, v.shape.dims)
	}
	rest := s.values[len(s.values)-4:]
	for i, x := range []*value{q, k} {
		each := x.shape.dims[1] * x.shape.dims[3] // elements of a token
		if !slices.Equal(rest[i].shape.dims, []int64{p.segments}) ||
			!slices.Equal(rest[2+i].shape.dims, []int64{p.segments + 1}) {
			w.refuse(diag.ReplayCall, "%s has lengths %v and offsets %v of %d segments", s.target,
				rest[i].shape.dims, rest[2+i].shape.dims, p.segments)
		}
		starts := w.slice(rest[2+i], p.segments)
		p.lengths[i] = rest[i]
		p.starts[i] = w.elementwise("divide", starts, w.fullInt(typeS32, starts.shape.dims, each))
	}
	return p
}

// flat makes [batch, heads, seq, head] one sequence [1, heads, tokens, head].
func (p *packing) flat(x *value) *value {
	d := x.shape.dims
	return p.w.reshape(p.w.transpose(x, 1, 0, 2, 3), 1, d[1], d[0]*d[2], d[3])
}

// unflat is the inverse, with NaN where no segment of queries (0) or keys (1) is.
func (p *packing) unflat(x *value, side int) *value {
	w, d := p.w, x.shape.dims
	segment, _ := p.places(side)
	has := w.compare("GE", segment, w.fullInt(typeS32, []int64{p.tokens[side]}, 0))
	x = w.choose(w.broadcast(has, d, 2), x, w.full(typeF32, d, math.NaN()))
	return w.transpose(w.reshape(x, d[1], p.rows, p.length[side], d[3]), 1, 0, 2, 3)
}

// within tells, for each segment and token [segments, tokens], whether the token is in it, and its
// place there.
func (p *packing) within(side int) (in, place *value) {
	w, dims := p.w, []int64{p.segments, p.tokens[side]}
	place = w.elementwise("subtract", w.iota(typeS32, dims, 1), w.broadcast(p.starts[side], dims, 0))
	in = w.elementwise("and", w.compare("GE", place, w.fullInt(typeS32, dims, 0)),
		w.compare("LT", place, w.broadcast(p.lengths[side], dims, 0)))
	return in, place
}

// places gives the segment of each token, -1 for none, and its place there, s32[tokens].
func (p *packing) places(side int) (segment, place *value) {
	w, dims := p.w, []int64{p.segments, p.tokens[side]}
	in, at := p.within(side)
	none := w.fullInt(typeS32, dims, -1)
	segment = w.reduce(w.choose(in, w.iota(typeS32, dims, 0), none), "maximum", -1, 0)
	return segment, w.reduce(w.choose(in, at, none), "maximum", -1, 0)
}

// scores are scale · Q · Kᵀ [1, heads, tokens, tokens], masked: a query sees the keys of its own
// segment, under a causal mask up to its place there, and of these a window's last.
func (p *packing) scores(s *site, q, k *value) *value {
	w := p.w
	x := w.perHead(q, w.repeated(s, k, q.shape.dims[1]), 3, 3)
	dims := x.shape.dims
	x = w.elementwise("multiply", x, w.full(typeF32, dims, p.g.Scale))
	querySegment, query := p.places(0)
	keySegment, key := p.places(1)
	side := func(v *value, at int64) *value { return w.broadcast(v, dims, at) }
	seen := w.compare("EQ", side(querySegment, 2), side(keySegment, 3))
	if p.g.Mask == "PADDING_CAUSAL" {
		seen = w.elementwise("and", seen, w.compare("LE", side(key, 3), side(query, 2)))
	}
	if p.g.Window > 0 {
		first := w.elementwise("subtract", side(query, 2),
			w.fullInt(typeS32, dims, int64(p.g.Window)))
		seen = w.elementwise("and", seen, w.compare("GT", side(key, 3), first))
	}
	return w.choose(seen, x, w.full(typeF32, dims, masked))
}

// spread is 1 where a place of the statistics [segments, length] is a token's, [segments · length,
// tokens] in float32.
func (p *packing) spread() *value {
	w, dims := p.w, []int64{p.segments, p.length[0], p.tokens[0]}
	in, at := p.within(0)
	here := w.elementwise("and", w.broadcast(in, dims, 0, 2),
		w.compare("EQ", w.broadcast(at, dims, 0, 2), w.iota(typeS32, dims, 1)))
	return w.reshape(w.convert(here, typeF32), p.segments*p.length[0], p.tokens[0])
}

// filled tells which places of the statistics [segments, heads, length] a segment fills.
func (p *packing) filled(heads int64) *value {
	w, dims := p.w, []int64{p.segments, heads, p.length[0]}
	return w.compare("LT", w.iota(typeS32, dims, 2), w.broadcast(p.lengths[0], dims, 0))
}

// statistics puts the log-sum-exp [1, heads, tokens] where cuDNN has it, [segments, heads, length].
func (p *packing) statistics(lse *value) *value {
	w, heads := p.w, lse.shape.dims[1]
	list := w.dot(p.spread(), w.reshape(lse, heads, p.tokens[0]),
		dotDims{contracting: [2][]int64{{1}, {1}}}) // [segments · length, heads]
	x := w.transpose(w.reshape(list, p.segments, p.length[0], heads), 0, 2, 1)
	return w.choose(p.filled(heads), x, w.full(typeF32, x.shape.dims, math.NaN()))
}

// perToken is the inverse. What is behind the end of a segment is not read.
func (p *packing) perToken(s *site, stats *value) *value {
	w := p.w
	d := stats.shape.dims
	if len(d) != 3 || d[0] != p.segments || d[2] != p.length[0] {
		w.refuse(diag.ReplayCall, "%s has a log-sum-exp %v of %d segments", s.target, d, p.segments)
	}
	x := w.choose(p.filled(d[1]), stats, w.full(typeF32, d, 0))
	list := w.reshape(w.transpose(x, 0, 2, 1), p.segments*p.length[0], d[1])
	lse := w.dot(list, p.spread(), dotDims{contracting: [2][]int64{{0}, {0}}}) // [heads, tokens]
	return w.reshape(lse, 1, d[1], p.tokens[0])
}
