package flash

import (
	"math"

	tt "github.com/deepwell/deepwell/kernels/triton"
)

// A writer prints one kernel.
type writer struct {
	Attention
	t                 tiles
	b                 *tt.Builder
	in                map[string]tt.Value
	block, head, kv   tt.Value // the program's
	batch             tt.Value
	headParts, valued []chunk
}

// newWriter begins the kernel. Programs with most work begin first: under a causal mask the last
// queries see the most keys, and the first keys are seen by the most queries.
func (a Attention) newWriter() *writer {
	w := &writer{Attention: a, t: a.tiles(), in: map[string]tt.Value{}, headParts: a.chunks(a.Head),
		valued: a.chunks(a.Value)}
	args := append(a.operands(), a.results()...)
	name := map[Part]string{Forward: "attention", DQ: "attention_dq", DKV: "attention_dkv"}[a.Part]
	b, v := tt.New(name, args...)
	for i, arg := range args {
		w.in[arg.Name] = v[i]
	}
	w.b = b
	w.block, w.head, w.batch = b.Program(0), b.Program(1), b.Program(2)
	if a.Part == DKV {
		w.kv = w.head
		return w
	}
	if a.Causal {
		w.block = w.block.Const(ceil(a.Seq, w.t.queries) - 1).Sub(w.block)
	}
	w.kv = w.head.Div(a.Heads / a.KVHeads)
	return w
}

// A chunk is a part of a head's elements whose size is a power of two, as blocks have it: a head
// of 192 is one of 128 and one of 64. The last may lie partly outside.
type chunk struct {
	from, wide int
	masked     bool
}

// leastChunk is the smallest dimension of a product on tensor cores, leastSmall the smallest of a
// second one where sums are in registers: with less, they spill.
const leastChunk, leastSmall = 16, 32

// chunks takes a head apart: into its largest power of two and what holds the rest, unless that is
// as large. Where sums are in registers, odd heads and heads beyond 192 are whole: as two they
// spill.
func (a Attention) chunks(size int) []chunk {
	power := func(n, least int) int {
		p := least
		for p < n {
			p *= 2
		}
		return p
	}
	all, least := power(size, leastChunk), leastChunk
	if a.Small {
		least = leastSmall
		if beyond := max(a.Head, a.Value); a.odd() || beyond > 192 {
			if beyond > 128 {
				all = max(all, 2*leastSmall)
			}
			return []chunk{{0, all, all > size}}
		}
	}
	if first := all / 2; first >= leastChunk && first < size {
		if rest := power(size-first, least); rest < first {
			return []chunk{{0, first, false}, {first, rest, rest > size-first}}
		}
	}
	return []chunk{{0, all, all > size}}
}

// wide is the elements of a head's chunks.
func wide(list []chunk) (n int) {
	for _, p := range list {
		n += p.wide
	}
	return n
}

// A side is queries or keys: the length of a sequence and the head of an array [Batch, length,
// heads, size].
type side struct {
	length, heads int
	head          tt.Value
}

func (w *writer) queries(head tt.Value) side { return side{w.Seq, w.Heads, head} }
func (w *writer) keys() side                 { return side{w.Keys, w.KVHeads, w.kv} }

// at gives the pointers to elements of rows of a head, [rows, chunk], and which of them there are;
// nil if all are.
func (w *writer) at(p tt.Value, s side, row tt.Value, size int, part chunk) (ptr, mask tt.Value) {
	first := w.batch.To(tt.I64).Mul(s.length * s.heads * size).Add(s.head.Mul(size).To(tt.I64))
	col := w.b.Range(part.wide).Add(part.from)
	r, c := wideEnough(row, s.length*s.heads*size), col
	if r.Elem() == tt.I64 {
		c = col.To(tt.I64)
	}
	ptr = p.At(first).At(r.Expand(1).Mul(s.heads * size).Add(c.Expand(0)))
	if s.length%row.Shape()[0] != 0 {
		mask = row.Is("lt", s.length).Expand(1)
	}
	if part.masked {
		if inside := col.Is("lt", size).Expand(0); mask == nil {
			mask = inside
		} else {
			mask = mask.And(inside)
		}
	}
	return ptr, mask
}

// wideEnough gives numbers of rows 64 bits where a sequence has more elements than 32 bits count.
func wideEnough(row tt.Value, elements int) tt.Value {
	if elements >= 1<<31 {
		return row.To(tt.I64)
	}
	return row
}

// load reads rows of a head, zeros outside, in its chunks.
func (w *writer) load(name string, s side, row tt.Value, size int) (list []tt.Value) {
	for _, part := range w.chunks(size) {
		p, mask := w.at(w.in[name], s, row, size, part)
		if mask == nil {
			list = append(list, w.b.Load(p))
		} else {
			list = append(list, w.b.LoadIf(mask, p, 0))
		}
	}
	return list
}

// store writes rows of a head.
func (w *writer) store(name string, s side, row tt.Value, size int, list []tt.Value) {
	for i, part := range w.chunks(size) {
		p, mask := w.at(w.in[name], s, row, size, part)
		if v := list[i].To(tt.BF16); mask == nil {
			w.b.Store(p, v)
		} else {
			w.b.StoreIf(mask, p, v)
		}
	}
}

// perRow gives the pointers to a number for each query of a head, [Batch, Seq, Heads], and which
// there are; nil if all are.
func (w *writer) perRow(name string, head, row tt.Value) (ptr, mask tt.Value) {
	first := w.batch.To(tt.I64).Mul(w.Seq * w.Heads).Add(head.To(tt.I64))
	if w.Seq%row.Shape()[0] != 0 {
		mask = row.Is("lt", w.Seq)
	}
	return w.in[name].At(first).At(wideEnough(row, w.Seq*w.Heads).Mul(w.Heads)), mask
}

// loadRow reads a number for each query, zeros outside.
func (w *writer) loadRow(name string, head, row tt.Value) tt.Value {
	p, mask := w.perRow(name, head, row)
	if mask == nil {
		return w.b.Load(p)
	}
	return w.b.LoadIf(mask, p, 0.0)
}

// document reads the numbers of documents of a block of queries or keys, -1 outside.
func (w *writer) document(name string, length int, row tt.Value) tt.Value {
	p := w.in[name].At(w.batch.To(tt.I64).Mul(length)).At(row)
	if length%row.Shape()[0] == 0 {
		return w.b.Load(p)
	}
	return w.b.LoadIf(row.Is("lt", length), p, -1)
}

// dot is the sum over all chunks of x·yᵀ.
func (w *writer) dot(x, y []tt.Value) tt.Value {
	sum := w.b.Full(0.0, tt.F32, x[0].Shape()[0], y[0].Shape()[0])
	for i := range x {
		sum = x[i].Dot(y[i].Trans(1, 0), sum)
	}
	return sum
}

// zeros are sums of chunks, [rows, chunk] in float32.
func (w *writer) zeros(rows int, parts []chunk) (list []tt.Value) {
	for _, p := range parts {
		list = append(list, w.b.Full(0.0, tt.F32, rows, p.wide))
	}
	return list
}

// farCap is the largest cap whose 2^-21 does not count beside a score's rounding: 1e-4.
const farCap = 256

// scores gives the scores of queries times keys in units of log₂ e, so that 2 to their
// power is the exponential, and the tanh of the cap; nil without one.
//
// The cap is taken after the scale: SoftCap · tanh(Scale · x / SoftCap), with tanh(y) = 1 − 2 / (1
// + exp(2y)), which is right at both infinities. Its error is 2^-21 of SoftCap: beyond a cap of
// farCap, near 0, it is y − y³/3, whose error at 0.06 is 2e-6 of it.
func (w *writer) scores(x tt.Value) (score, tanh tt.Value) {
	if w.SoftCap == 0 {
		return x.Mul(w.Scale * math.Log2E), nil
	}
	e := x.Mul(2 * math.Log2E * w.Scale / w.SoftCap).FastExp2()
	tanh = e.Const(1.0).Sub(e.Add(1.0).FastReciprocal().Mul(2.0))
	if w.SoftCap > farCap {
		y := x.Mul(w.Scale / w.SoftCap)
		near := y.Sub(y.Mul(y).Mul(y).Mul(1.0 / 3))
		tanh = near.Select(y.Abs().Is("lt", 0.06), tanh)
	}
	return tanh.Mul(w.SoftCap * math.Log2E), tanh
}

// mask replaces the scores of keys that a query does not see. Rows and columns have shapes that
// match the scores': [n, 1] and [1, m].
func (w *writer) mask(score, query, key, document, keyDocument tt.Value) tt.Value {
	var sees tt.Value
	also := func(one tt.Value) {
		if sees == nil {
			sees = one
		} else {
			sees = sees.And(one)
		}
	}
	if w.Causal {
		also(key.Is("le", query))
	} else if w.Keys%w.t.keys != 0 { // under a causal mask a query does not see what is behind the end
		also(key.Is("lt", w.Keys))
	}
	if w.Window > 0 {
		also(query.Sub(key).Is("lt", w.Window))
	}
	if w.Documents {
		also(document.Is("eq", keyDocument))
	}
	if sees == nil {
		return score
	}
	return score.Select(sees.Broadcast(score.Shape()...), masked)
}

// keyRange is which keys a block of queries sees, from a multiple of the keys' block on.
func (w *writer) keyRange() (from, to tt.Value) {
	first := w.block.Mul(w.t.queries)
	from, to = first.Const(0), first.Const(w.Keys)
	if w.Window > 0 {
		from = first.Sub(w.Window - 1).Max(0).Div(w.t.keys).Mul(w.t.keys)
	}
	if w.Causal {
		to = first.Add(w.t.queries).Min(w.Keys)
	}
	return from, to
}

// forward keeps, for each query, the largest score, the sum of exponentials less that, and the sum
// of values weighted by them; when a larger score comes, both sums are scaled.
func (w *writer) forward() {
	b, t := w.b, w.t
	row := w.block.Mul(t.queries).Add(b.Range(t.queries))
	s := w.queries(w.head)
	q := w.load("q", s, row, w.Head)
	var document, keyDocument tt.Value
	if w.Documents {
		document = w.document("documents", w.Seq, row).Expand(1)
	}
	from, to := w.keyRange()
	carried := append([]tt.Value{b.Full(masked, tt.F32, t.queries), b.Full(0.0, tt.F32, t.queries)},
		w.zeros(t.queries, w.valued)...)
	out := b.For(from, to, from.Const(t.keys), carried,
		func(n tt.Value, c []tt.Value) []tt.Value {
			key := n.Add(b.Range(t.keys))
			score, _ := w.scores(w.dot(q, w.load("k", w.keys(), key, w.Head)))
			if w.Documents {
				keyDocument = w.document("key_documents", w.Keys, key).Expand(0)
			}
			score = w.mask(score, row.Expand(1), key.Expand(0), document, keyDocument)
			top := c[0].Max(score.Largest(1))
			p := score.Sub(top.Expand(1)).FastExp2()
			shrunk := c[0].Sub(top).FastExp2()
			next := []tt.Value{top, c[1].Mul(shrunk).Add(p.Sum(1))}
			for i, v := range w.load("v", w.keys(), key, w.Value) {
				next = append(next, p.To(tt.BF16).Dot(v, c[2+i].Mul(shrunk.Expand(1))))
			}
			return next
		})
	for i := range w.valued {
		out[2+i] = out[2+i].Div(out[1].Expand(1))
	}
	w.store("o", s, row, w.Value, out[2:])
	lse := out[0].Add(out[1].Log2()).Mul(math.Ln2)
	if p, mask := w.perRow("out_lse", w.head, row); mask == nil {
		b.Store(p, lse)
	} else {
		b.StoreIf(mask, p, lse)
	}
}
