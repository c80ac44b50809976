package stablehlo

import (
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
)

// With gathered keys, every chunk of queries on a device sees the keys of its own chunk under the
// causal mask, which is a square, and all keys before it. How many these are depends on the device,
// while the programs are the same: it is a number that attention takes, the length of its keys,
// beyond which a kernel computes nothing. Gathered keys come in the order of the devices; in a
// balanced plan they are put into the order of the sequence first.

// keysGathered tells attention of a device's queries to gathered keys, which has such a form on
// targets whose kernels take lengths; elsewhere a mask by positions does.
func keysGathered(s *kernels.Selector, op *ir.Op) (string, bool) {
	segments, places := op.MaskArgs()
	if len(places) == 0 || !op.Attrs.Bool("causal") ||
		op.Attrs.Int("window") > 0 || op.Attrs.Text("ring") != "" || queriesAxis(op) == "" {
		return "", false
	}
	if s == nil {
		return "", !op.Attrs.Bool("plain") && len(segments) == 0
	}
	kernel, _ := s.Attends(op)
	return "", kernel == kernels.CuDNN
}

// queriesAxis is the axis along which devices share a sequence's queries; "" without one.
func queriesAxis(op *ir.Op) string {
	for _, p := range op.In[0].Type.Place {
		if p.Dim == ir.Seq {
			return p.Axis
		}
	}
	return ""
}

// A gathered is attention to gathered keys, with the keys that each of a device's chunks may see
// before itself.
type gathered struct {
	split
	start Val // of the device's own keys among the gathered
}

func newGathered(w *Writer, op *ir.Op, in []Val) *gathered {
	g := &gathered{split: newSplit(w, op, queriesAxis(op), in)}
	g.start = w.shardStart(g.axis, g.chunks*g.each, indexType)
	return g
}

// own takes the device's own keys out of the gathered.
func (g *gathered) own(keys []Val) []Val {
	return lists.Map(keys, func(x Val) Val {
		return g.w.dynamicSlice(x, ir.Keys, g.start, g.chunks*g.each)
	})
}

// before is how many chunks of keys the nth chunk of a device has before itself at most: more are
// not read.
func (g *gathered) before(n int64) int64 {
	if g.chunks == 1 {
		return g.size // as they were gathered, without a copy
	}
	return g.size - 1 + n*g.size
}

// ordered are the first chunks of gathered keys in the order of the sequence.
func (g *gathered) ordered(x Val, chunks int64) Val {
	if g.chunks == 1 {
		return x
	}
	list := make([]Val, chunks)
	for i := range list {
		at := g.gatheredAt(int64(i)) * g.each
		list[i] = g.w.Slice(x, ir.Keys, at, at+g.each)
	}
	return g.joined(list...)
}

// gatheredAt is where a chunk of the sequence is among the gathered keys.
func (g *gathered) gatheredAt(chunk int64) int64 {
	if chunk < g.size {
		return chunk * 2
	}
	return (2*g.size-1-chunk)*2 + 1
}

// length is how many keys come before the nth chunk of a device, for each row [batch].
func (g *gathered) length(n int64) Val {
	w, place := g.w, g.place()
	if n == 1 { // chunk 2·size-1-place
		place = w.Elementwise("subtract", w.Constant(place.Type, float64(2*g.size-1)), place)
	}
	keys := w.Elementwise("multiply", place, w.Constant(place.Type, float64(g.each)))
	rows := ir.Type{Dims: g.op.In[0].Type.Dims[:1]}
	return w.BroadcastTo(w.Convert(keys, dtype.S32), rows)
}

// earlier computes the nth chunk of a device with all keys before it.
func (g *gathered) earlier(n int64, queries, keys []Val, plain Rule) []Val {
	op := sized(g.unmasked(), 1, g.each, g.before(n)*g.each)
	op.Attrs = op.Attrs.With("causal", false)
	args := g.args(g.sliced(queries, n*g.each, (n+1)*g.each),
		lists.Map(keys, func(x Val) Val { return g.ordered(x, g.before(n)) }))
	length := g.length(n)
	if g.documents != nil {
		return g.ranged(op, args, g.sameDocument(n, length), plain)
	}
	op.Attrs = op.Attrs.With("lengths", true)
	op.In = append(op.In, &ir.Value{Name: "lengths", Type: length.Type})
	return g.call(op, append(args, length), plain)
}

// sameDocument is the range of keys before the nth chunk of a device, length of them, that are of
// the chunk's first document.
func (g *gathered) sameDocument(n int64, length Val) keyRange {
	w := g.w
	queries := g.sliced(g.documents[:1], n*g.each, (n+1)*g.each)[0]
	first := w.Slice(queries, ir.Seq, 0, 1)
	keys := g.ordered(g.documents[1], g.before(n))
	earlier := w.Compare("LT", keys, g.along(first, keys.Type))
	start := w.Reduce(w.Convert(earlier, dtype.S32), "add", 0, ir.Keys)
	rest := w.Elementwise("subtract", length, start)
	return keyRange{start: start, length: w.Elementwise("maximum", rest, w.Constant(rest.Type, 0)),
		queries: w.Compare("EQ", queries, g.along(first, queries.Type))}
}

// gatheredAttention combines each chunk's own square with the keys before it, in f32.
func gatheredAttention(w *Writer, op *ir.Op, in []Val) []Val {
	g := newGathered(w, op, in)
	own := g.unfolded(g.home(in[:1], g.own(in[1:3]), attention)...)
	own[0] = w.Convert(own[0], dtype.F32)
	var o, lse []Val
	for n := range g.chunks {
		home := g.sliced(own, n*g.each, (n+1)*g.each)
		part := g.earlier(n, in[:1], in[1:3], attention)
		a, b := w.combine(home[0], home[1], w.Convert(part[0], dtype.F32), part[1])
		o, lse = append(o, a), append(lse, b)
	}
	return []Val{w.Convert(g.joined(o...), op.Out[0].Type.Elem), g.joined(lse...)}
}

// gatheredAttentionGrad adds up the gradients of the parts in f32. Gradients of keys are terms, in
// the order in which the keys were gathered.
func gatheredAttentionGrad(w *Writer, op *ir.Op, in []Val) []Val {
	g := newGathered(w, op, in)
	wide := func(x Val) Val { return w.Convert(x, dtype.F32) }
	queries, keys := g.queries(in), in[1:3]
	own := lists.Map(g.unfolded(g.home(queries, g.own(keys), attentionGrad)...), wide)
	var dq []Val
	parts := make([][]Val, g.chunks)
	for n := range g.chunks {
		parts[n] = lists.Map(g.earlier(n, queries, keys, attentionGrad), wide)
		home := g.sliced(own[:1], n*g.each, (n+1)*g.each)[0]
		dq = append(dq, w.Elementwise("add", home, parts[n][0]))
	}
	out := []Val{g.joined(dq...)}
	for i := 1; i < 3; i++ {
		out = append(out, g.keyGrad(own[i], lists.Map(parts, func(p []Val) Val { return p[i] })))
	}
	return lists.Map(out, func(x Val) Val { return w.Convert(x, op.Out[0].Type.Elem) })
}

// keyGrad adds the gradient of the device's own keys to the gradients of the keys before each
// chunk.
func (g *gathered) keyGrad(own Val, parts []Val) Val {
	w, all := g.w, parts[0]
	if g.chunks == 2 {
		list := make([]Val, 2*g.size)
		for i := range list {
			chunk := int64(i)
			x := g.w.Constant(w.Slice(own, ir.Keys, 0, g.each).Type, 0) // the last one is seen by none
			if chunk < g.before(1) {
				x = w.Slice(parts[1], ir.Keys, chunk*g.each, (chunk+1)*g.each)
			}
			if chunk < g.before(0) {
				x = w.Elementwise("add", x, w.Slice(parts[0], ir.Keys, chunk*g.each, (chunk+1)*g.each))
			}
			list[g.gatheredAt(chunk)] = x
		}
		all = g.joined(list...)
	}
	sum := w.Elementwise("add", own, w.dynamicSlice(all, ir.Keys, g.start, g.chunks*g.each))
	in := append([]Val{all, sum}, w.starts(all.Type, ir.Keys, g.start)...)
	return w.Apply(all.Type, "stablehlo.dynamic_update_slice ", "", in...)
}
