package stablehlo

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// A window of w keys that is no longer than a chunk sees of the chunk before it the last h = w-1
// keys, its halo: query r of the first h sees key j of them if j ≥ r. From the last to the first,
// queries and keys are a square under the causal mask, as kernels have it. Everything else is the
// chunk's own square, with the window. So nothing but the halo is sent, to the device that has the
// next chunk: the one behind in the ring, and with balancing the one before it for the back chunk,
// whose neighbours are on the other side. The last device has both chunks in the middle of the
// sequence, and takes the halo of its back from its own front.

// last tells whether this is the last device, broadcast to a type.
func (r *ring) last(like ir.Type) Val {
	w, place := r.w, r.place()
	end := w.Constant(place.Type, float64(r.size-1))
	return w.BroadcastTo(w.Compare("EQ", place, end), like)
}

// halos are the keys before each chunk of the device, [batch, chunks·h, ...].
func (r *ring) halos(keys []Val) []Val {
	w, h := r.w, r.op.Halo()
	once := func(x Val, by int64, tail Val) Val {
		return w.Once("halo "+x.Name+" "+r.axis+map[int64]string{1: "", -1: " back"}[by],
			func() Val { return r.send(tail, by) })
	}
	return lists.Map(keys, func(x Val) Val {
		front := w.Slice(x, ir.Keys, r.each-h, r.each)
		list := []Val{once(x, 1, front)}
		if r.chunks == 2 {
			back := once(x, -1, w.Slice(x, ir.Keys, 2*r.each-h, 2*r.each))
			list = append(list, w.Select(r.last(front.Type), front, back))
		}
		return r.joined(list...)
	})
}

// reversed turns the order of tokens round.
func (r *ring) reversed(list []Val) []Val {
	return lists.Map(list, func(x Val) Val {
		at := List([]int{x.Type.Index(tokens(x.Type))})
		return r.w.Apply(x.Type, "stablehlo.reverse ", ", dims = ["+at+"]", x)
	})
}

// beside computes the first queries of each chunk with its halo. Arguments and results are folded
// rows.
func (r *ring) beside(queries, halos []Val, plain Rule) []Val {
	h := r.op.Halo()
	op := sized(r.unmasked(), r.chunks, h, h)
	op.Attrs = op.Attrs.With("window", int64(0))
	first := r.sliced(queries, 0, h)
	return r.reversed(r.call(op, r.args(r.reversed(first), r.reversed(halos)), plain))
}

// hasHalo tells of folded rows whether there is a chunk before theirs, broadcast to a type: the
// first chunk of the sequence has none.
func (r *ring) hasHalo(like ir.Type) Val {
	w, batch := r.w, like.Dims[0]
	rows := ir.Type{Elem: indexType, Dims: []ir.Dim{{Name: batch.Name, Size: batch.Size / r.chunks},
		{Name: "chunk", Size: r.chunks}}}
	at := w.Elementwise("add", w.Iota(rows, "chunk"), w.BroadcastTo(r.place(), rows))
	has := w.Compare("GT", at, w.Constant(rows, 0)) // the back is never the first
	return w.BroadcastTo(w.Reshape(has, ir.Type{Dims: []ir.Dim{batch}}), like)
}

// haloAttention is ringAttention with a window that a halo serves.
func (r *ring) haloAttention(in []Val) []Val {
	w, h := r.w, r.op.Halo()
	home := r.home(in[:1], in[1:3], attention)
	home[0] = w.Convert(home[0], dtype.F32)
	part := r.beside(r.folded(in[0]), r.folded(r.halos(in[1:3])...), attention)
	none := w.Constant(part[1].Type, MaskedScore)
	part[1] = w.Select(r.hasHalo(part[1].Type), part[1], none)
	first := r.sliced(home, 0, h)
	first[0], first[1] = w.combine(first[0], first[1], w.Convert(part[0], dtype.F32), part[1])
	out := r.unfolded(r.replaced(home, 0, first)...)
	return []Val{w.Convert(out[0], r.op.Out[0].Type.Elem), out[1]}
}

// replaced puts other values in the place of the tokens of folded rows from an index on.
func (r *ring) replaced(rows []Val, at int64, by []Val) []Val {
	list := slices.Clone(rows)
	for i, x := range rows {
		n := by[i].Type.Size(tokens(x.Type))
		parts := []Val{by[i]}
		if at > 0 {
			parts = slices.Insert(parts, 0, r.sliced(rows[i:i+1], 0, at)...)
		}
		if at+n < r.each {
			parts = append(parts, r.sliced(rows[i:i+1], at+n, r.each)...)
		}
		list[i] = r.joined(parts...)
	}
	return list
}

// haloAttentionGrad is ringAttentionGrad with a window that a halo serves: what it adds to the
// gradients of keys goes back, rounded, to the device that sent the halo.
func (r *ring) haloAttentionGrad(in []Val) []Val {
	w, h := r.w, r.op.Halo()
	wide := func(x Val) Val { return w.Convert(x, dtype.F32) }
	queries := r.queries(in)
	sums := lists.Map(r.home(queries, in[1:3], attentionGrad), wide)
	part := r.beside(r.folded(queries...), r.folded(r.halos(in[1:3])...), attentionGrad)
	for i, x := range part {
		part[i] = w.Select(r.hasHalo(x.Type), x, w.Constant(x.Type, 0))
	}
	for i := range sums {
		at, more := int64(0), part[i]
		if i > 0 {
			at, more = r.each-h, r.folded(r.sentBack(r.unfolded(part[i])[0]))[0]
		}
		there := r.sliced(sums[i:i+1], at, at+h)[0]
		more = w.Elementwise("add", there, wide(more))
		sums[i] = r.replaced(sums[i:i+1], at, []Val{more})[0]
	}
	return lists.Map(r.unfolded(sums...), func(x Val) Val {
		return w.Convert(x, r.op.Out[0].Type.Elem)
	})
}

// sentBack exchanges gradients of halos for gradients of the device's own tails, [batch, chunks·h,
// ...].
func (r *ring) sentBack(x Val) Val {
	w, h := r.w, r.op.Halo()
	front := w.Slice(x, ir.Keys, 0, h)
	if r.chunks == 1 {
		return r.send(front, -1)
	}
	back := w.Slice(x, ir.Keys, h, 2*h)
	zero, last := w.Constant(back.Type, 0), r.last(back.Type)
	front = w.Elementwise("add", r.send(front, -1), w.Select(last, back, zero))
	return r.joined(front, r.send(w.Select(last, zero, back), 1))
}
