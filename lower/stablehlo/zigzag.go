package stablehlo

import (
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// In a zigzag ring (Megatron's context parallelism) device i of n has chunks i and 2n-1-i of the
// sequence's 2n, here called front and back. Of keys that come from another device,
//
//   - the front ones are seen by all back queries,
//   - and either the front ones by all front queries, if their device is before this one,
//     or the back ones by all back queries, if it is behind;
//
// nothing else. So each move is two attentions of a chunk to a chunk without a mask, on every
// device, and the programs are the same: what the second one reads is selected.

// halves splits values at the middle of their sequence, of queries or of keys.
func (r *ring) halves(list []Val) (front, back []Val) {
	return r.sliced(list, 0, r.each), r.sliced(list, r.each, 2*r.each)
}

// selected takes each value from a where the keys that are here after some moves come from a device
// before this one, and from b elsewhere.
func (r *ring) selected(moves int64, a, b []Val) []Val {
	list := make([]Val, len(a))
	for i := range a {
		list[i] = r.w.Select(r.keysBefore(moves, a[i].Type), a[i], b[i])
	}
	return list
}

// chunkOp is the operation on one chunk of queries and one of keys, all of which are seen.
func (r *ring) chunkOp() *ir.Op { return sized(r.wholeOp(1), 1, r.each, r.each) }

// chunkArgs are the arguments of the two attentions of a move: back queries with front keys, and
// the pair that depends on the device. queries are all arguments that go with queries: q, and of a
// gradient o, the log-sum-exp and do.
func (r *ring) chunkArgs(moves int64, queries, keys []Val) (first, second []Val) {
	qFront, qBack := r.halves(queries)
	kFront, kBack := r.halves(keys)
	q2, k2 := r.selected(moves, qFront, qBack), r.selected(moves, kFront, kBack)
	return r.args(qBack, kFront), r.args(q2, k2)
}

// zigzagAttention is ringAttention of a zigzag ring.
func (r *ring) zigzagAttention(in []Val) []Val {
	w, k, v := r.w, in[1], in[2]
	home := r.attend(0, in, []Val{in[0], k, v}, attention)
	home[0] = w.Convert(home[0], dtype.F32)
	front, back := r.halves(home) // output and log-sum-exp so far
	for moves := int64(1); moves < r.size; moves++ {
		k, v = r.permuteOnce(k), r.permuteOnce(v)
		first, second := r.chunkArgs(moves, in[:1], []Val{k, v})
		a, b := r.call(r.chunkOp(), first, attention), r.call(r.chunkOp(), second, attention)
		back[0], back[1] = w.combine(back[0], back[1], w.Convert(a[0], dtype.F32), a[1])
		part := r.selected(moves, front, back)
		part[0], part[1] = w.combine(part[0], part[1], w.Convert(b[0], dtype.F32), b[1])
		front, back = r.selected(moves, part, front), r.selected(moves, back, part)
	}
	o := r.joined(front[0], back[0])
	return []Val{w.Convert(o, r.op.Out[0].Type.Elem), r.joined(front[1], back[1])}
}

// zigzagAttentionGrad is ringAttentionGrad of a zigzag ring.
func (r *ring) zigzagAttentionGrad(in []Val) []Val {
	w, k, v := r.w, in[1], in[2]
	sums := [3]Val(r.attend(0, in, append([]Val{in[0], k, v}, in[3:6]...), attentionGrad))
	for moves := int64(1); moves < r.size; moves++ {
		k, v = r.permuteOnce(k), r.permuteOnce(v)
		sums[1], sums[2] = r.permute(sums[1]), r.permute(sums[2])
		first, second := r.chunkArgs(moves, r.queries(in), []Val{k, v})
		a := r.call(r.chunkOp(), first, attentionGrad)
		b := r.call(r.chunkOp(), second, attentionGrad)
		for i := range sums {
			one, two := w.Convert(a[i], dtype.F32), w.Convert(b[i], dtype.F32)
			zero := w.Constant(one.Type, 0)
			f := r.selected(moves, []Val{two}, []Val{zero})[0]
			l := r.selected(moves, []Val{zero}, []Val{two})[0]
			if i == 0 { // back queries
				l = w.Elementwise("add", one, l)
			} else { // front keys
				f = w.Elementwise("add", one, f)
			}
			sum := w.Convert(sums[i], dtype.F32)
			sums[i] = w.Elementwise("add", sum, r.joined(f, l))
		}
	}
	return r.sendHome(sums)
}
