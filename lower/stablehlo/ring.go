package stablehlo

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// A ring is attention whose keys and values go from device to device (Liu et al., 2023): after j
// moves a device has the shard of the device j places before it. Partial results are combined by
// their log-sum-exp. The gradient sees each shard with the statistics of the whole, so its terms
// just add up; gradients of keys travel with the keys, and one more move brings them home.
type ring struct {
	split
	// whole tells that a shard of another device, or half of it, is seen all or not at all, or a range
	// of it by its documents: a causal mask, no window. Then no shard needs a mask of its own but the
	// device's own, which is causal.
	whole  bool
	zigzag bool // devices have a chunk from the front of the sequence and one from the back
}

func newRing(w *Writer, op *ir.Op, in []Val) *ring {
	r := &ring{split: newSplit(w, op, op.Attrs.Text("ring"), in)}
	segments, _ := op.MaskArgs()
	r.whole = op.Attrs.Bool("causal") && op.Attrs.Int("window") == 0 &&
		(len(segments) == 0 || r.documents != nil)
	r.zigzag = r.whole && r.chunks == 2
	return r
}

// permute sends a value to the next device of the ring.
func (r *ring) permute(x Val) Val { return r.send(x, 1) }

// send sends a value to the device by places on in the ring; back if by is negative.
func (r *ring) send(x Val, by int64) Val {
	w, elem := r.w, x.Type.Elem
	_, stride := ir.Along(w.mesh, r.axis)
	total := ir.Devices(w.mesh)
	pairs := make([]string, total)
	for d := range total {
		place := d / stride % r.size
		to := (place + by + r.size) % r.size
		pairs[d] = fmt.Sprintf("[%d, %d]", d, d+(to-place)*stride)
	}
	to := w.alias(fmt.Sprintf("dense<[%s]> : tensor<%dx2xi64>", strings.Join(pairs, ", "), total))
	x = w.carried(x)
	x = w.Apply(x.Type, `"stablehlo.collective_permute"(`, ") {source_target_pairs = "+to+"}", x)
	return w.Bitcast(x, elem)
}

// permuteOnce is permute of keys and values, which attention and its gradient send alike: where
// both are in one function they are sent once.
func (r *ring) permuteOnce(x Val) Val {
	return r.w.Once("pass "+x.Name+" "+r.axis, func() Val { return r.permute(x) })
}

// keyOwner is the position along the ring of the device whose keys are here after some moves.
func (r *ring) keyOwner(moves int64) Val {
	w := r.w
	place := r.place()
	place = w.Elementwise("add", place, w.Constant(place.Type, float64(r.size-moves)))
	return w.Elementwise("remainder", place, w.Constant(place.Type, float64(r.size)))
}

// keySlice takes, of something that is known about all keys, the part about the keys that are here.
func (r *ring) keySlice(x Val, owner Val) Val {
	w := r.w
	shard := r.chunks * r.each
	start := w.Elementwise("multiply", owner, w.Constant(owner.Type, float64(shard)))
	return w.dynamicSlice(x, ir.Keys, start, shard)
}

// shardArgs gives the arguments of attention to one shard: keys and values that are here, and the
// documents and positions of these keys.
func (r *ring) shardArgs(in []Val, k, v, owner Val) []Val {
	in = slices.Clone(in)
	in[1], in[2] = k, v
	segments, places := r.op.MaskArgs()
	first := len(in) - len(segments) - len(places)
	for i := first + 1; i < len(in); i += 2 {
		in[i] = r.keySlice(in[i], owner)
	}
	return in
}

// wholeOp is the operation after some moves where shards are whole: at home the mask is causal,
// elsewhere all keys are visible.
func (r *ring) wholeOp(moves int64) *ir.Op {
	op := r.unmasked()
	op.Attrs = op.Attrs.With("causal", moves == 0)
	return op
}

// attend computes with the keys and values that are here after some moves.
func (r *ring) attend(moves int64, in, here []Val, plain Rule) []Val {
	op := r.wholeOp(moves)
	switch {
	case r.whole && r.documents != nil && moves == 0:
		op, args := r.segmented(op, here, r.counted(r.documents[0], r.chunks))
		return r.call(op, args, plain)
	case r.whole && r.documents != nil:
		return r.ranged(op, here, r.suffix(r.documents[0], r.keyNumbers(moves)), plain)
	case r.whole:
		return r.call(op, here, plain)
	}
	return plain(r.w, r.op, r.shardArgs(in, here[1], here[2], r.keyOwner(moves)))
}

// keyNumbers are the document numbers of the keys that are here after some moves.
func (r *ring) keyNumbers(moves int64) Val {
	return r.keySlice(r.documents[1], r.keyOwner(moves))
}

// keysBefore tells whether the keys that are here come before the device's queries, broadcast to a
// type.
func (r *ring) keysBefore(moves int64, like ir.Type) Val {
	w := r.w
	place := r.place()
	return w.BroadcastTo(w.Compare("GE", place, w.Constant(place.Type, float64(moves))), like)
}

// ringAttention computes with the shard that is here while the next could travel, n times for n
// devices, and combines the outputs by their log-sum-exp. It accumulates in f32 and rounds once.
// Keys after the queries of a causal mask count as masked scores.
func ringAttention(w *Writer, op *ir.Op, in []Val) []Val {
	r := newRing(w, op, in)
	switch {
	case op.Halo() > 0:
		return r.haloAttention(in)
	case r.zigzag:
		return r.zigzagAttention(in)
	}
	k, v := in[1], in[2]
	var o, lse Val // f32 [..., seq, heads, head] and [..., seq, heads], so far
	for moves := range r.size {
		if moves > 0 {
			k, v = r.permuteOnce(k), r.permuteOnce(v)
		}
		part := r.attend(moves, in, []Val{in[0], k, v}, attention)
		if r.whole && moves > 0 {
			seen := r.keysBefore(moves, part[1].Type)
			part[1] = w.Select(seen, part[1], w.Constant(part[1].Type, MaskedScore))
		}
		part[0] = w.Convert(part[0], dtype.F32)
		if moves == 0 {
			o, lse = part[0], part[1]
			continue
		}
		o, lse = w.combine(o, lse, part[0], part[1])
	}
	return []Val{w.Convert(o, op.Out[0].Type.Elem), lse}
}

// combine joins the softmaxes of two disjoint sets of keys, f32 outputs [..., head] with their
// log-sum-exps: weights are exp(lse - top), normalized.
func (w *Writer) combine(o1, lse1, o2, lse2 Val) (o, lse Val) {
	top := w.Elementwise("maximum", lse1, lse2)
	a := w.Elementwise("exponential", w.Elementwise("subtract", lse1, top))
	b := w.Elementwise("exponential", w.Elementwise("subtract", lse2, top))
	total := w.Elementwise("add", a, b)
	a, b = w.Elementwise("divide", a, total), w.Elementwise("divide", b, total)
	o = w.Elementwise("add", w.Elementwise("multiply", o1, w.BroadcastTo(a, o1.Type)),
		w.Elementwise("multiply", o2, w.BroadcastTo(b, o1.Type)))
	return o, w.Elementwise("add", top, w.Elementwise("log", total))
}

// ringAttentionGrad accumulates dQ here, and dK and dV as they travel with their keys, in f32; the
// last move, in the type of the keys, brings them home.
func ringAttentionGrad(w *Writer, op *ir.Op, in []Val) []Val {
	r := newRing(w, op, in)
	switch {
	case op.Halo() > 0:
		return r.haloAttentionGrad(in)
	case r.zigzag:
		return r.zigzagAttentionGrad(in)
	}
	k, v := in[1], in[2]
	var sums [3]Val // of queries, here; of keys and values, on their way
	for moves := range r.size {
		if moves > 0 {
			k, v = r.permuteOnce(k), r.permuteOnce(v)
			sums[1], sums[2] = r.permute(sums[1]), r.permute(sums[2])
		}
		here := append([]Val{in[0], k, v}, in[3:6]...)
		part := r.attend(moves, in, here, attentionGrad)
		for i, g := range part {
			if moves > 0 { // the first term is sent as it is; sums have more digits
				if g = w.Convert(g, dtype.F32); r.whole {
					g = w.Select(r.keysBefore(moves, g.Type), g, w.Constant(g.Type, 0))
				}
				g = w.Elementwise("add", w.Convert(sums[i], dtype.F32), g)
			}
			sums[i] = g
		}
	}
	return r.sendHome(sums)
}

// sendHome rounds the gradients and sends the keys' and the values' to the device that has them.
func (r *ring) sendHome(sums [3]Val) []Val {
	out := make([]Val, 3)
	for i := range out {
		if out[i] = r.w.Convert(sums[i], r.op.Out[i].Type.Elem); i > 0 {
			out[i] = r.permute(out[i]) // home, rounded already
		}
	}
	return out
}

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

// chunkPairs are the two attentions of a move: of back queries to front keys, and of the pair that
// depends on the device. queries are all arguments that go with queries: q, and of a gradient o,
// the log-sum-exp and do.
func (r *ring) chunkPairs(moves int64, queries, keys []Val, plain Rule) (first, second []Val) {
	if r.documents != nil { // the last of each
		queries = append(slices.Clip(queries), r.documents[0])
		keys = append(slices.Clip(keys), r.keyNumbers(moves))
	}
	qFront, qBack := r.halves(queries)
	kFront, kBack := r.halves(keys)
	q2, k2 := r.selected(moves, qFront, qBack), r.selected(moves, kFront, kBack)
	return r.chunkPair(qBack, kFront, plain), r.chunkPair(q2, k2, plain)
}

// chunkPair is attention of a chunk of queries to one of keys before them.
func (r *ring) chunkPair(queries, keys []Val, plain Rule) []Val {
	op := sized(r.wholeOp(1), 1, r.each, r.each)
	if r.documents == nil {
		return r.call(op, r.args(queries, keys), plain)
	}
	q, k := len(queries)-1, len(keys)-1
	return r.ranged(op, r.args(queries[:q], keys[:k]), r.suffix(queries[q], keys[k]), plain)
}

// zigzagAttention is ringAttention of a zigzag ring.
func (r *ring) zigzagAttention(in []Val) []Val {
	w, k, v := r.w, in[1], in[2]
	home := r.attend(0, in, []Val{in[0], k, v}, attention)
	home[0] = w.Convert(home[0], dtype.F32)
	front, back := r.halves(home) // output and log-sum-exp so far
	for moves := int64(1); moves < r.size; moves++ {
		k, v = r.permuteOnce(k), r.permuteOnce(v)
		a, b := r.chunkPairs(moves, in[:1], []Val{k, v}, attention)
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
		a, b := r.chunkPairs(moves, r.queries(in), []Val{k, v}, attentionGrad)
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
