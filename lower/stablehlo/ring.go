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
	// whole tells that a shard of another device, or half of it, is seen all or not at all: a causal
	// mask, no window, no documents. Then no shard needs a mask of its own but the device's own,
	// which is causal.
	whole  bool
	zigzag bool // devices have a chunk from the front of the sequence and one from the back
}

func newRing(w *Writer, op *ir.Op) *ring {
	r := &ring{split: newSplit(w, op, op.Attrs.Text("ring"))}
	segments, _ := op.MaskArgs()
	r.whole = op.Attrs.Bool("causal") && len(segments) == 0 && op.Attrs.Int("window") == 0
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
	if as, ok := carriers[elem.Bits()]; ok {
		x = w.Bitcast(x, as)
	}
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
	if r.whole {
		return r.call(r.wholeOp(moves), here, plain)
	}
	return plain(r.w, r.op, r.shardArgs(in, here[1], here[2], r.keyOwner(moves)))
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
	r := newRing(w, op)
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
	r := newRing(w, op)
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
