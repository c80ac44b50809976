package flash

import (
	"math"

	tt "github.com/deepwell/deepwell/kernels/triton"
)

// scoreGrad is the gradient of queries times keys: dS = P ∘ (dP − delta), through the
// cap, whose slope is 1 − tanh², and the scale.
func (w *writer) scoreGrad(p, dp, delta, tanh tt.Value) tt.Value {
	ds := p.Mul(dp.Sub(delta)).Mul(w.Scale)
	if tanh != nil {
		ds = ds.Mul(tanh.Const(1.0).Sub(tanh.Mul(tanh)))
	}
	return ds.To(tt.BF16)
}

// queryGrad is dQ = dS K for a block of queries.
func (w *writer) queryGrad() {
	b, t := w.b, w.t
	row := w.block.Mul(t.queries).Add(b.Range(t.queries))
	s := w.queries(w.head)
	q, do := w.load("q", s, row, w.Head), w.load("do", s, row, w.Value)
	lse := w.loadRow("lse", w.head, row).Mul(math.Log2E).Expand(1)
	delta := w.loadRow("delta", w.head, row).Expand(1)
	var document, keyDocument tt.Value
	if w.Documents {
		document = w.document("documents", w.Seq, row).Expand(1)
	}
	from, to := w.keyRange()
	out := b.For(from, to, from.Const(t.keys), w.zeros(t.queries, w.headParts),
		func(n tt.Value, sum []tt.Value) []tt.Value {
			key := n.Add(b.Range(t.keys))
			k := w.load("k", w.keys(), key, w.Head)
			score, tanh := w.scores(w.dot(q, k))
			if w.Documents {
				keyDocument = w.document("key_documents", w.Keys, key).Expand(0)
			}
			score = w.mask(score, row.Expand(1), key.Expand(0), document, keyDocument)
			p := score.Sub(lse).FastExp2()
			dp := w.dot(do, w.load("v", w.keys(), key, w.Value))
			ds := w.scoreGrad(p, dp, delta, tanh)
			next := make([]tt.Value, len(sum))
			for i := range sum {
				next[i] = ds.Dot(k[i], sum[i])
			}
			return next
		})
	w.store("dq", s, row, w.Head, out)
}

// queryRange is which queries see a block of keys: the first, a multiple of the queries' block, and
// how many blocks.
func (w *writer) queryRange() (from, blocks tt.Value) {
	first := w.block.Mul(w.t.keys)
	from, to := first.Const(0), first.Const(w.Seq)
	if w.Causal {
		from = first.Div(w.t.queries).Mul(w.t.queries)
	}
	if w.Window > 0 {
		to = first.Add(w.t.keys + w.Window - 1).Min(w.Seq)
	}
	return from, to.Sub(from).Add(w.t.queries - 1).Div(w.t.queries)
}

// keyGrad is dK = dSᵀ Q and dV = Pᵀ dO for a block of keys, summed over the heads of queries that
// read them. Scores are transposed, [keys, queries], so that no product's first operand is. Heads
// and blocks of queries are one loop: between two loops, sums would leave tensor memory.
func (w *writer) keyGrad() {
	b, t := w.b, w.t
	key := w.block.Mul(t.keys).Add(b.Range(t.keys))
	k, v := w.load("k", w.keys(), key, w.Head), w.load("v", w.keys(), key, w.Value)
	var document, keyDocument tt.Value
	if w.Documents {
		keyDocument = w.document("key_documents", w.Keys, key).Expand(1)
	}
	from, blocks := w.queryRange()
	group, parts := w.Heads/w.KVHeads, len(w.headParts)
	sums := append(w.zeros(t.keys, w.headParts), w.zeros(t.keys, w.valued)...)
	sums = b.For(from.Const(0), blocks.Mul(group), from.Const(1), sums,
		func(n tt.Value, sum []tt.Value) []tt.Value {
			head, at := w.kv, n
			if group > 1 {
				head, at = w.kv.Mul(group).Add(n.Div(blocks)), n.Rem(blocks)
			}
			row := from.Add(at.Mul(t.queries)).Add(b.Range(t.queries))
			q := w.load("q", w.queries(head), row, w.Head)
			do := w.load("do", w.queries(head), row, w.Value)
			score, tanh := w.scores(w.dot(k, q))
			if w.Documents {
				document = w.document("documents", w.Seq, row).Expand(0)
			}
			score = w.mask(score, row.Expand(0), key.Expand(1), document, keyDocument)
			p := score.Sub(w.loadRow("lse", head, row).Mul(math.Log2E).Expand(0)).FastExp2()
			ds := w.scoreGrad(p, w.dot(v, do), w.loadRow("delta", head, row).Expand(0), tanh)
			next := make([]tt.Value, len(sum))
			for i := range sum {
				if i < parts {
					next[i] = ds.Dot(q[i], sum[i])
				} else {
					next[i] = p.To(tt.BF16).Dot(do[i-parts], sum[i])
				}
			}
			return next
		})
	w.store("dk", w.keys(), key, w.Head, sums[:parts])
	w.store("dv", w.keys(), key, w.Value, sums[parts:])
}
