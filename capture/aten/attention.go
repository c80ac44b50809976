package aten

import (
	"math"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// attentionRules are attention as one operator.
var attentionRules = map[string]rule{
	"aten.scaled_dot_product_attention.default": sole(func(m *maker, n *node) *tensor {
		if n.float("dropout_p", 0) != 0 {
			panic(refusal("dropout inside attention"))
		}
		q := n.value("query")
		how := ir.Attention{Causal: n.bool("is_causal", false),
			Scale: n.float("scale", 1/math.Sqrt(float64(q.axes[len(q.axes)-1].size)))}
		if n.has("attn_mask") {
			if l := n.line("attn_mask"); l != nil {
				if how, ok := l.sees(how); ok {
					return m.attention(q, n.value("key"), n.value("value"), how)
				}
			}
			s := &scores{q: q, k: n.value("key"), how: how}
			s = s.masked(m, n.tensor("attn_mask"))
			if s == nil {
				panic(refusal("a mask other than causal or a window"))
			}
			return m.attended(s, n.value("value"))
		}
		return m.attention(q, n.value("key"), n.value("value"), how)
	}),
	"dw.attention.default": sole(func(m *maker, n *node) *tensor {
		how := ir.Attention{Causal: n.bool("causal", false), Scale: n.float("scale", 1),
			Window: n.int("window", 0), SoftCap: n.float("softcap", 0)}
		switch {
		case n.has("mask"):
			panic(refusal("a mask of padding"))
		case n.float("dropout", 0) != 0:
			panic(refusal("dropout inside attention"))
		case how.Window > 0 && !how.Causal:
			panic(refusal("a window without causality"))
		}
		if n.has("sinks") {
			sinks := m.whole(n.value("sinks"), 0)
			m.wishes(sinks, ir.Heads)
			how.Sinks = m.called(sinks, []int{0}, []string{ir.Heads})
		}
		return m.attention(n.value("q"), n.value("k"), n.value("v"), how)
	}),
}

// attention takes queries [batch, heads, seq, head], keys and values [batch, kv, keys, head].
func (m *maker) attention(q, k, v *tensor, how ir.Attention) *tensor {
	if len(q.axes) != 4 || len(k.axes) != 4 || len(v.axes) != 4 {
		panic(refusal("attention of other than four axes"))
	}
	if k.grouped != nil && v.grouped != nil { // heads of keys that were repeated
		k, v = k.grouped, v.grouped
	}
	q, k, v = m.repeated(q, k, v)
	for i := range 4 {
		q, k, v = m.whole(q, i), m.whole(k, i), m.whole(v, i)
	}
	q, k = m.match(q, k, 0, 0)
	k, v = m.match(k, v, 0, 0)
	k, v = m.match(k, v, 1, 1)
	k, v = m.match(k, v, 2, 2)
	q, k = m.match(q, k, 3, 3)
	m.wishes(q, "", ir.Heads, ir.Seq, ir.HeadDim)
	m.wishes(k, "", ir.KVHeads, "", ir.HeadDim)
	m.wishes(v, "", "", "", ir.HeadDim)
	how.OperandType, how.Plain = m.matmulType, m.shape.PlainAttention
	if m.segments != nil {
		for i, want := range map[int]string{0: ir.Batch, 2: ir.Seq} {
			if m.dims.wanted(q.axes[i].dims[0]) != want || m.dims.wanted(k.axes[i].dims[0]) != want {
				panic(refusal("documents in attention of other rows than the tokens"))
			}
		}
		how.Segments, how.Documents = m.segments, m.shape.Documents
		if own := m.segments.Type.Dims[1].Name; own != ir.Seq {
			how.Segments = m.b.Rename(m.segments, own, ir.Seq)
		}
		how.KeySegments = m.b.Rename(m.segments, m.segments.Type.Dims[1].Name, ir.Keys)
	}
	order := []int{0, 2, 1, 3}
	keys := []string{"", ir.Keys, ir.KVHeads, ir.HeadDim}
	out := m.b.Attend(m.called(q, order, []string{"", ir.Seq, ir.Heads, ir.HeadDim}),
		m.called(k, order, keys), m.called(v, order, keys), how)
	axes := slices.Clone(q.axes)
	axes[3] = v.axes[3]
	for _, p := range []struct {
		at   int
		name string
	}{{1, ir.Heads}, {2, ir.Seq}, {3, ir.HeadDim}} {
		if to := m.name(axes[p.at].dims[0]); to != p.name {
			out = m.b.Rename(out, p.name, to)
		}
	}
	return m.tensor(out, nil, axes...)
}

// repeated broadcasts the batch of queries, keys and values, and their heads but for keys that
// several heads share.
func (m *maker) repeated(q, k, v *tensor) (*tensor, *tensor, *tensor) {
	wide := func(t *tensor, i int, n int64) *tensor {
		if sizes := t.sizes(); sizes[i] == 1 && n > 1 {
			sizes[i] = n
			return m.expanded(t, sizes)
		}
		return t
	}
	batch := max(q.axes[0].size, k.axes[0].size, v.axes[0].size)
	q, k, v = wide(q, 0, batch), wide(k, 0, batch), wide(v, 0, batch)
	heads := max(k.axes[1].size, v.axes[1].size)
	return wide(q, 1, heads), wide(k, 1, heads), wide(v, 1, heads)
}

// scores are how far attention has come that a program writes out, as the softmax of queries times
// keys, times values. It becomes one operation, for which there are kernels, and which
// knows documents.
type scores struct {
	q, k   *tensor // [batch, heads, seq, head], [batch, heads, keys, head]
	how    ir.Attention
	slopes []float64 // of ALiBi, by head
	stage  int
}

const (
	multiplied = iota // by Scale
	capped            // tanh: SoftCap is not known yet
	weighed           // softmax
)

// product notes that a tensor [b, h, q, k] is queries times keys, whose axes are letters.
func (m *maker) product(t *tensor, a, b, out string, x, y *tensor) {
	if len(a) != 4 || len(b) != 4 || len(out) != 4 {
		return
	}
	order := func(letters string) (list []int) {
		for _, c := range letters {
			list = append(list, letterOf(a, c))
		}
		return list
	}
	var summed rune
	for _, c := range a {
		if letterOf(out, c) < 0 {
			summed = c
		}
	}
	first := order(out[:3] + string(summed))
	a = b
	second := order(out[:2] + out[3:] + string(summed))
	if slices.Contains(first, -1) || slices.Contains(second, -1) {
		return
	}
	t.scores = &scores{q: m.permuted(x, first), k: m.permuted(y, second), how: ir.Attention{Scale: 1}}
}

func letterOf(s string, c rune) int {
	return slices.Index([]rune(s), c)
}

// step gives a tensor the scores that another had, one step on; what f refuses is no attention.
func (t *tensor) step(from *tensor, f func(s *scores) bool) *tensor {
	if from.scores == nil {
		return t
	}
	next := *from.scores
	if !f(&next) {
		return t
	}
	out := *t
	out.scores = &next
	return &out
}

// scaledBy is a step of scores that are multiplied.
func scaledBy(by float64) func(s *scores) bool {
	return func(s *scores) bool {
		switch {
		case s.stage == capped && by <= 0:
			return false
		case s.stage == capped:
			s.how.SoftCap, s.stage = by, multiplied
			s.how.Scale *= by // ir divides by the bound before it bounds
			return true
		case s.stage != multiplied || s.how.SoftCap != 0 || s.how.Causal || s.slopes != nil:
			return false
		}
		s.how.Scale *= by
		return true
	}
}

// masked gives scores to which a mask [..., queries, keys] is applied, true or 0 where a query sees
// a key; nil if it is another mask than causal, a window of keys, or distances times slopes.
func (s *scores) masked(m *maker, mask *tensor) *scores {
	if mask.twin != nil {
		mask = mask.twin()
	}
	sizes := mask.sizes()
	rank := len(sizes)
	if s.stage != multiplied || mask.known == nil || rank < 2 || sizes[rank-1] < 2 ||
		sizes[rank-1] != sizes[rank-2] || s.q.axes[2].size != sizes[rank-2] {
		return nil
	}
	n := sizes[rank-1]
	heads := int64(len(mask.known)) / (n * n)
	if heads != 1 && (rank < 3 || sizes[rank-3] != heads || s.q.axes[1].size != heads) {
		return nil
	}
	first, ok := readMask(mask, 0, n)
	slopes, sloped := []float64{first.slope}, first.slope != 0
	for h := int64(1); ok && h < heads; h++ {
		var each maskOf
		each, ok = readMask(mask, h, n)
		ok = ok && each.causal == first.causal && each.window == first.window
		slopes, sloped = append(slopes, each.slope), sloped || each.slope != 0
	}
	if !ok || sloped && (s.slopes != nil || s.how.SoftCap != 0) { // a bound does not cover slopes
		return nil
	}
	next := *s
	next.how.Causal = s.how.Causal || first.causal
	if w := first.window; w < n && (s.how.Window == 0 || w < s.how.Window) {
		next.how.Window = w
	}
	if sloped {
		next.slopes = slopes
		for heads == 1 && int64(len(next.slopes)) < s.q.axes[1].size {
			next.slopes = append(next.slopes, first.slope)
		}
	}
	return &next
}

// A maskOf is the mask of one head: causal or not, how many keys a query sees, and a bias for each
// key that it is farther on.
type maskOf struct {
	causal bool
	window int64
	slope  float64
}

// readMask decodes the mask [n, n] of one head, in which every query sees a key.
func readMask(mask *tensor, head, n int64) (m maskOf, ok bool) {
	at := func(q, k int64) (sees bool, bias float64) {
		v := mask.known[(head*n+q)*n+k]
		if mask.elem == dtype.Pred {
			return v != 0, 0
		}
		return !(v <= -1e9), v // NaN is seen, and near nothing
	}
	m = maskOf{causal: true, window: n}
	if sees, _ := at(0, n-1); sees {
		m.causal = false
	}
	for m.window > 1 && m.causal { // of the last row
		if sees, _ := at(n-1, n-m.window); sees {
			break
		}
		m.window--
	}
	_, first := at(n-1, n-1)
	_, next := at(n-1, n-2)
	if m.window > 1 {
		m.slope = first - next
	}
	for q := range n {
		_, own := at(q, q)
		for k := range n {
			sees, bias := at(q, k)
			if want := !m.causal || k <= q && q-k < m.window; sees != want ||
				sees && !near(bias-own+1, m.slope*float64(k-q)+1) {
				return m, false
			}
		}
	}
	return m, true
}

// attended computes attention with values [batch, heads, keys, head].
func (m *maker) attended(s *scores, v *tensor) *tensor {
	q, k := s.q, s.k
	if s.slopes != nil {
		q, k = m.sloped(s)
	}
	return m.attention(q, k, v, s.how)
}

// sloped adds to queries the slopes of their heads, and to keys their positions: their products are
// distances times slopes, but for a number that all keys of a query share. Positions are two
// numbers, so that bf16 has both exactly, and zeros fill up what kernels want whole.
func (m *maker) sloped(s *scores) (q, k *tensor) {
	const low, width = 128, 8
	outer, elem := m.key, s.q.v.Type.Elem
	defer func() { m.key = outer }()
	// wide has room for more elements, and adds two vectors, each in a place of its own.
	wide := func(t *tensor, key string, first, second *tensor) *tensor {
		m.key = outer + key
		t = m.whole(t, 3)
		n := t.axes[3].size
		t = m.resized(t, m.b.Pad(t.v, m.name(t.axes[3].dims[0]), 0, width), 3, n+width, "wide")
		d := t.axes[3].dims[0]
		along := ir.Type{Elem: dtype.S32, Dims: []ir.Dim{{Name: m.name(d), Size: n + width}}}
		for i, x := range []*tensor{first, second} {
			place := m.b.Fill(ir.Type{Elem: dtype.S32}, float64(n+int64(i)))
			unit := m.b.Compare("eq", m.b.Iota(along, m.name(d)), place)
			y := m.tensor(m.b.Convert(unit, elem), nil, t.axes[3])
			x = x.with(m.b.Convert(x.v, elem))
			t = m.binary(t, m.binary(x, y, m.b.Mul), m.b.Add)
		}
		return t
	}
	slopes := func(key string, by float64) *tensor {
		d := m.fresh(key, int64(len(s.slopes)), -1)
		list := make([]float64, len(s.slopes))
		for i, slope := range s.slopes {
			list[i] = slope * by / s.how.Scale
		}
		one := axis{size: 1}
		if len(list) == 1 {
			return m.tensor(m.b.Fill(ir.Type{Elem: dtype.F32}, list[0]), nil, one, one, one)
		}
		return m.tensor(m.vector(list, d, dtype.F32), nil, axis{[]dim{d}, m.size(d)}, one, one)
	}
	at := m.positions
	if at == nil {
		d := m.fresh("places", s.k.axes[2].size, -1)
		t := ir.Type{Elem: dtype.F32, Dims: []ir.Dim{{Name: m.name(d), Size: m.size(d)}}}
		at = m.tensor(m.b.Iota(t, m.name(d)), nil, axis{[]dim{d}, m.size(d)})
	}
	places := m.b.Convert(at.v, dtype.F32)
	high := m.b.Convert(m.b.Convert(m.b.Scale(places, 1.0/low), dtype.S32), dtype.F32)
	high = m.b.StopGradient(high)
	column := func(v *ir.Value) *tensor {
		return m.tensor(v, at.hidden, at.axes[0], axis{size: 1})
	}
	q = wide(s.q, "q:", slopes("high", low), slopes("low", 1))
	k = wide(s.k, "k:", column(high), column(m.b.Sub(places, m.b.Scale(high, low))))
	return q, k
}

// weighted computes weights [b, h, q, k] times values, whose axes are letters, as attention; nil if
// that is not what they are.
func (m *maker) weighted(a, b, out string, x, y *tensor) *tensor {
	if x.scores == nil || x.scores.stage != weighed || len(a) != 4 || len(b) != 4 || len(out) != 4 {
		return nil
	}
	last := rune(-1) // the axis of values that weights do not have
	for _, c := range b {
		if letterOf(a, c) < 0 {
			last = c
		}
	}
	have := a[:3] + string(last) // the axes of what attention gives
	var values, back []int
	for _, c := range a[:2] + a[3:] + string(last) {
		values = append(values, letterOf(b, c))
	}
	for _, c := range out {
		back = append(back, letterOf(have, c))
	}
	if slices.Contains(values, -1) || slices.Contains(back, -1) {
		return nil
	}
	return m.permuted(m.attended(x.scores, m.permuted(y, values)), back)
}
