package stablehlo

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
)

// A ring is attention whose keys go from device to device (Liu et al., 2023): after j moves a
// device has those of the device j places before it. What its queries see of each piece is joined
// by the logarithms of the sums of exponentials. The gradient sees each piece with the statistics
// of the whole, so its terms just add up; those of keys go round with the keys and once more, to
// where they came from.
type ring struct {
	w          *Writer
	op         *ir.Op
	size, each int64 // devices, and keys of one
	axis       string
	// plain says that pieces are seen all or not at all, but for the device's own: a causal mask, the
	// devices in the order of the sequence, and nothing else. Then no piece needs a mask of its own.
	plain bool
	cudnn bool
}

func newRing(w *Writer, op *ir.Op) *ring {
	r := &ring{w: w, op: op, axis: op.Attrs.Text("ring"), each: op.In[1].Type.Size(ir.Keys)}
	r.size, _ = ir.Along(w.mesh, r.axis)
	segments, _ := op.Extras()
	r.plain = op.Attrs.Bool("causal") && !op.Attrs.Bool("balanced") && len(segments) == 0 &&
		op.Attrs.Int("window") == 0
	if w.Target != nil {
		kernel, why := w.Target.Attends(op)
		w.Target.Note(kernels.Choice{Kind: op.Kind, Kernel: kernel, Why: why})
		r.cudnn = kernel == kernels.CuDNN && r.plain
	}
	return r
}

// pass hands a value on to the next device.
func (r *ring) pass(x Val) Val {
	w, elem := r.w, x.Type.Elem
	_, stride := ir.Along(w.mesh, r.axis)
	total := ir.Devices(w.mesh)
	pairs := make([]string, total)
	for d := range total {
		place := d / stride % r.size
		pairs[d] = fmt.Sprintf("[%d, %d]", d, d+((place+1)%r.size-place)*stride)
	}
	to := w.alias(fmt.Sprintf("dense<[%s]> : tensor<%dx2xi64>", strings.Join(pairs, ", "), total))
	if as, ok := carriers[elem.Bits()]; ok {
		x = w.Bitcast(x, as)
	}
	x = w.Apply(x.Type, `"stablehlo.collective_permute"(`, ") {source_target_pairs = "+to+"}", x)
	return w.Bitcast(x, elem)
}

// passOnce is pass of something that attention and its gradient hand on alike, where both stand in
// one loop or function: it is sent once.
func (r *ring) passOnce(x Val) Val {
	return r.w.Once("pass "+x.Name+" "+r.axis, func() Val { return r.pass(x) })
}

// owner is the place of the device whose keys are here after so many moves.
func (r *ring) owner(moves int64) Val {
	w := r.w
	place := w.shardStart(r.axis, 1, indexType)
	place = w.Elementwise("add", place, w.Constant(place.Type, float64(r.size-moves)))
	return w.Elementwise("remainder", place, w.Constant(place.Type, float64(r.size)))
}

// known takes from something about all keys what is about the keys that are here.
func (r *ring) known(x Val, owner Val) Val {
	w := r.w
	start := w.Elementwise("multiply", owner, w.Constant(owner.Type, float64(r.each)))
	return w.dynamicSlice(x, ir.Keys, start, r.each)
}

// piece gives the arguments of one piece: those of the operation with the keys that are here, and
// what is known of them.
func (r *ring) piece(in []Val, k, v, owner Val) []Val {
	in = slices.Clone(in)
	in[1], in[2] = k, v
	segments, places := r.op.Extras()
	first := len(in) - len(segments) - len(places)
	for i := first + 1; i < len(in); i += 2 {
		in[i] = r.known(in[i], owner)
	}
	return in
}

// whole is the operation after some moves where pieces are plain: at home the mask is causal, and
// from elsewhere all keys are seen or none.
func (r *ring) whole(moves int64) *ir.Op {
	op := *r.op
	segments, places := op.Extras()
	op.In = op.In[:len(op.In)-len(segments)-len(places)]
	op.Attrs = op.Attrs.With("placed", false)
	if moves > 0 {
		op.Attrs = op.Attrs.With("causal", false)
	}
	return &op
}

// part computes with the keys and values that are here after some moves. A kernel that needs no
// extras takes what is here; else all of in is taken, cut to the keys of their owner.
func (r *ring) part(moves int64, in, here []Val, plain Rule) []Val {
	switch {
	case r.cudnn:
		return r.w.table.named(kernels.CuDNN, r.op.Kind)(r.w, r.whole(moves), here)
	case r.plain:
		return plain(r.w, r.whole(moves), here)
	}
	return plain(r.w, r.op, r.piece(in, here[1], here[2], r.owner(moves)))
}

// behind tells, after some moves, whether the keys that are here stand before the queries, as big
// as a type: a device's queries follow those of the devices before it.
func (r *ring) behind(moves int64, like ir.Type) Val {
	w := r.w
	place := w.shardStart(r.axis, 1, indexType)
	return w.BroadcastTo(w.Compare("GE", place, w.Constant(place.Type, float64(moves))), like)
}

func ringAttention(w *Writer, op *ir.Op, in []Val) []Val {
	r := newRing(w, op)
	k, v := in[1], in[2]
	var o, lse Val
	for moves := range r.size {
		if moves > 0 {
			k, v = r.passOnce(k), r.passOnce(v)
		}
		part := r.part(moves, in, []Val{in[0], k, v}, attention)
		if r.plain && moves > 0 {
			seen := r.behind(moves, part[1].Type)
			part[1] = w.Select(seen, part[1], w.Constant(part[1].Type, MaskedScore))
		}
		wide := w.Convert(part[0], dtype.F32)
		if moves == 0 {
			o, lse = wide, part[1]
			continue
		}
		top := w.Elementwise("maximum", lse, part[1])
		a := w.Elementwise("exponential", w.Elementwise("subtract", lse, top))
		b := w.Elementwise("exponential", w.Elementwise("subtract", part[1], top))
		total := w.Elementwise("add", a, b)
		a, b = w.Elementwise("divide", a, total), w.Elementwise("divide", b, total)
		o = w.Elementwise("add", w.Elementwise("multiply", o, w.BroadcastTo(a, o.Type)),
			w.Elementwise("multiply", wide, w.BroadcastTo(b, o.Type)))
		lse = w.Elementwise("add", top, w.Elementwise("log", total))
	}
	return []Val{w.Convert(o, op.Out[0].Type.Elem), lse}
}

func ringAttentionGrad(w *Writer, op *ir.Op, in []Val) []Val {
	r := newRing(w, op)
	k, v := in[1], in[2]
	var sums [3]Val // of queries, here; of keys and values, on their way
	for moves := range r.size {
		if moves > 0 {
			k, v = r.passOnce(k), r.passOnce(v)
			sums[1], sums[2] = r.pass(sums[1]), r.pass(sums[2])
		}
		here := append([]Val{in[0], k, v}, in[3:6]...)
		part := r.part(moves, in, here, attentionGrad)
		for i, g := range part {
			if moves > 0 { // the first term is sent as it is; sums have more digits
				if g = w.Convert(g, dtype.F32); r.plain {
					g = w.Select(r.behind(moves, g.Type), g, w.Constant(g.Type, 0))
				}
				g = w.Elementwise("add", w.Convert(sums[i], dtype.F32), g)
			}
			sums[i] = g
		}
	}
	out := make([]Val, 3)
	for i := range out {
		if out[i] = w.Convert(sums[i], op.Out[i].Type.Elem); i > 0 {
			out[i] = r.pass(out[i]) // home, rounded already
		}
	}
	return out
}
