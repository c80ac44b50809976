package replay

import (
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/kernels/flash"
)

// A flashCall is the call of flash attention of our own: Q, K and V [batch, tokens, heads, head],
// for gradients also the log-sum-exp and delta [batch, seq, heads] and dO; then numbers of
// documents.
type flashCall struct {
	*writer
	*site
	flash.Attention
}

// flash rewrites the call by attention that writes its scores.
func (w *writer) flash(s *site, spec string) []*value {
	a, err := flash.Parse(spec)
	operands := 3
	if a.Part != flash.Forward {
		operands = 6
	}
	if a.Documents {
		operands += 2
	}
	if err != nil || len(s.values) != operands {
		w.refuse(diag.ReplayCall, "replay has no rule for the kernel %s: %v", spec, err)
	}
	for i, v := range s.from {
		if !v.shape.rowMajor() {
			w.refuse(diag.ReplayCall, "operand %d of a kernel is not row-major", i)
		}
	}
	k := &flashCall{w, s, a}
	out := k.results()
	for i, to := range s.shape.results() {
		order := []int64{0, 2, 1, 3} // tokens before heads
		out[i] = w.reshape(w.convert(w.transpose(out[i], order[:len(out[i].shape.dims)]...), to.typ),
			to.dims...)
	}
	return out
}

// operand gives an operand as [batch, heads, tokens, head].
func (k *flashCall) operand(n int) *value { return k.headFirst(k.values[n], place{0, 2, 1, 3}) }

// perQuery gives an operand [batch, seq, heads] as [batch, heads, seq].
func (k *flashCall) perQuery(n int) *value { return k.transpose(k.values[n], 0, 2, 1) }

// results are what the part writes, heads before tokens.
func (k *flashCall) results() []*value {
	q, v := k.operand(0), k.operand(2)
	heads, typ := q.shape.dims[1], q.shape.typ
	kAll, vAll := k.repeated(k.site, k.operand(1), heads), k.repeated(k.site, v, heads)
	x, slope := k.capped(q, kAll)
	dims := x.shape.dims
	if k.Part == flash.Forward {
		o, lse := k.softmaxed(k.site, q, v, x)
		return []*value{o, lse}
	}
	rows := func(n int) *value { return k.broadcast(k.perQuery(n), dims, 0, 1, 2) }
	do := k.operand(5)
	p := k.elementwise("exponential", k.elementwise("subtract", x, rows(3)))
	ds := k.elementwise("subtract", k.perHead(do, vAll, 3, 3), rows(4))
	ds = k.elementwise("multiply", k.elementwise("multiply", p, ds), slope)
	ds = k.convert(ds, typ)
	if k.Part == flash.DQ {
		return []*value{k.perHead(ds, kAll, 3, 2)}
	}
	return []*value{k.folded(k.perHead(ds, q, 2, 2), int64(k.KVHeads)),
		k.folded(k.perHead(k.convert(p, typ), do, 2, 2), int64(k.KVHeads))}
}

// capped are the scores, masked, and their slope: what a change of the product of a query and a key
// is multiplied by.
func (k *flashCall) capped(q, keys *value) (x, slope *value) {
	x = k.perHead(q, keys, 3, 3)
	dims := x.shape.dims
	full := func(f float64) *value { return k.full(typeF32, dims, f) }
	x = k.elementwise("multiply", x, full(k.Scale))
	slope = full(k.Scale)
	if k.SoftCap > 0 {
		tanh := k.elementwise("tanh", k.elementwise("multiply", x, full(1/k.SoftCap)))
		x = k.elementwise("multiply", tanh, full(k.SoftCap))
		slope = k.elementwise("multiply", slope,
			k.elementwise("subtract", full(1), k.elementwise("multiply", tanh, tanh)))
	}
	var seen *value
	also := func(one *value) {
		if seen != nil {
			one = k.elementwise("and", seen, one)
		}
		seen = one
	}
	query, key := k.iota(typeS32, dims, 2), k.iota(typeS32, dims, 3)
	if k.Causal {
		also(k.compare("LE", key, query))
	}
	if k.Window > 0 {
		first := k.elementwise("subtract", query, k.fullInt(typeS32, dims, int64(k.Window)))
		also(k.compare("GT", key, first))
	}
	if n := len(k.values); k.Documents {
		also(k.compare("EQ", k.broadcast(k.values[n-2], dims, 0, 2),
			k.broadcast(k.values[n-1], dims, 0, 3)))
	}
	if seen != nil {
		x = k.choose(seen, x, full(masked))
	}
	return x, slope
}
