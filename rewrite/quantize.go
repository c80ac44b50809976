package rewrite

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// keepBlockLayout lets products and statistics read quantized values in the layout of their source
// where both are in one graph. XLA:CPU multiplies either orientation, so that putting codes in
// order and packing them is work that only what leaves the graph needs.
func keepBlockLayout(hasKernel func(*ir.Op) bool) func(*ir.Graph) error {
	return func(g *ir.Graph) error {
		blocks := map[*ir.Value][]*ir.Value{} // codes and scales as stored, by the codes in order
		stored := func(in []*ir.Value, at ...int) []*ir.Value {
			in = slices.Clone(in)
			for _, i := range at {
				if list := blocks[in[i]]; list != nil {
					in[i], in[i+1] = list[0], list[1]
				}
			}
			return in
		}
		return rows().Edit(g, func(r *ir.Rewriter, op *ir.Op) []*ir.Value {
			switch {
			case op.Kind == "quantize" && !hasKernel(op):
				list := r.ReplaceWith(op, QuantizeBlocks, op.Attrs, op.In...)
				out := r.ReplaceWith(op, OrderBlocks, op.Attrs, list...)
				blocks[out[0]] = list
				return out
			case op.Kind == "block_dot":
				return r.ReplaceWith(op, op.Kind, op.Attrs, stored(op.In, 0, len(op.In)/2)...)
			case op.Kind == "quantize_stats":
				return r.ReplaceWith(op, op.Kind, op.Attrs, stored(op.In, 1)...)
			}
			return nil
		})
	}
}

// inferQuantizeBlocks gives [..., n/block, in_block, ...] and [..., n/block, ...], in bytes.
func inferQuantizeBlocks(g *ir.Graph, op *ir.Op) ([]ir.Type, error) {
	if _, err := inferAs("quantize", g, op, op.In...); err != nil {
		return nil, err
	}
	x, dims := op.In[0].Type, along(op)
	at, size := x.Index(dims[len(dims)-1]), ir.Format(op.Attrs.Text("format")).Block()
	scales := ir.Type{Elem: dtype.U8, Dims: slices.Clone(x.Dims), Place: x.Place}
	scales.Dims[at].Size /= size
	codes := ir.Type{Elem: dtype.U8, Place: x.Place,
		Dims: slices.Insert(slices.Clone(scales.Dims), at+1, ir.Dim{Name: InBlock, Size: size})}
	return []ir.Type{codes, scales}, nil
}

// inferOrderBlocks gives the types that quantize promises: codes in the format's element type with
// the summed dimensions last, scales likewise.
func inferOrderBlocks(_ *ir.Graph, op *ir.Op) ([]ir.Type, error) {
	if len(op.In) != 2 {
		return nil, fmt.Errorf("takes codes and scales, got %d arguments", len(op.In))
	}
	return ordered(op, op.In[0].Type, op.In[1].Type)
}

// shareBlockScales splits quantizations into the two kernels that XLA:GPU makes of them, one for
// scales and one for codes, with a barrier between, so that nothing wide stays in memory. All
// quantizations of one source share the barrier, and so do the source if one of them transforms it
// (else XLA keeps the sums that it made for the scales, to make the codes of them) and the block
// maxima that the tensor's own maximum is found among: the source is read twice for any number of
// orientations.
func shareBlockScales(hasKernel func(*ir.Op) bool) func(*ir.Graph) error {
	return func(g *ir.Graph) error {
		s := &scaleSharing{readers: readers(g), amax: map[string]*ir.Value{},
			scaled: map[*ir.Op]scaled{}, done: map[*ir.Value]bool{}}
		s.splits = func(op *ir.Op) bool { return op.Kind == "quantize" && !hasKernel(op) }
		return rows().Edit(g, func(r *ir.Rewriter, op *ir.Op) (out []*ir.Value) {
			switch {
			case op.Kind == "amax":
				out = s.tensorAmax(r, op)
			case s.splits(op):
				if _, ok := s.scaled[op]; !ok {
					s.scaleAll(r, op)
				}
				in := append([]*ir.Value{s.scaled[op].source, s.scaled[op].scale}, op.In[1:]...)
				out = r.ReplaceWith(op, QuantizeWith, op.Attrs, in...)
			}
			for _, v := range op.Out {
				s.done[v] = true
			}
			return out
		})
	}
}

// A scaleSharing goes through a graph and its bodies; values of the old graph are its keys.
type scaleSharing struct {
	splits  func(*ir.Op) bool // a quantize that becomes two kernels
	readers map[*ir.Value][]*ir.Op
	done    map[*ir.Value]bool   // results of operations that were visited
	amax    map[string]*ir.Value // block maxima behind a barrier, by source and manner
	scaled  map[*ir.Op]scaled    // by quantize
}

// scaled is the source of a quantize and its scales, behind a barrier.
type scaled struct{ source, scale *ir.Value }

// ready tells whether all arguments of an operation are there.
func (s *scaleSharing) ready(op *ir.Op) bool {
	return !slices.ContainsFunc(op.In, func(v *ir.Value) bool { return v.Def() != nil && !s.done[v] })
}

// blockAmax gives the block maxima of a quantize's source, once for what has the same blocks: tiles
// are the same in both orientations.
func (s *scaleSharing) blockAmax(r *ir.Rewriter, op *ir.Op) *ir.Value {
	x := op.In[0]
	key := fmt.Sprintf("%p %v %v", x, window(op, x.Type), op.Attrs.Bool("hadamard"))
	if s.amax[key] == nil {
		top := r.ReplaceWith(op, BlockAmax, op.Attrs, x)
		s.amax[key] = r.ReplaceWith(op, Barrier, nil, top...)[0]
	}
	return s.amax[key]
}

// tensorAmax takes the largest of block maxima where the same value is quantized in this graph.
func (s *scaleSharing) tensorAmax(r *ir.Rewriter, op *ir.Op) []*ir.Value {
	for _, q := range s.readers[op.Out[0]] {
		if s.splits(q) && q.In[0] == op.In[0] &&
			q.Attrs.Bool("hadamard") == op.Attrs.Bool("hadamard") {
			return r.ReplaceWith(op, AmaxOfBlocks, op.Attrs, s.blockAmax(r, q))
		}
	}
	return nil
}

// scaleAll adds the scales of all quantizations of a source that can be made now.
func (s *scaleSharing) scaleAll(r *ir.Rewriter, op *ir.Op) {
	x := op.In[0]
	var ops []*ir.Op
	var scales []*ir.Value
	for _, q := range s.readers[x] {
		if !s.splits(q) || q != op && !s.ready(q) {
			continue
		}
		in := []*ir.Value{}
		if ir.Format(q.Attrs.Text("format")).TensorScale() {
			amax := q.In[1]
			if now := r.Replacement[amax]; now != nil {
				amax = now
			}
			in = append(in, s.blockAmax(r, q), amax)
		} else {
			in = append(in, r.ReplaceWith(q, BlockAmax, q.Attrs, x)...)
		}
		ops, scales = append(ops, q), append(scales, r.ReplaceWith(q, BlockScale, q.Attrs, in...)...)
	}
	transformed := slices.ContainsFunc(ops, func(op *ir.Op) bool { return op.Attrs.Bool("hadamard") })
	if transformed {
		scales = append(scales, x)
	}
	out := r.ReplaceWith(op, Barrier, nil, scales...)
	source := x
	if transformed {
		source = out[len(ops)]
	}
	for i, q := range ops {
		s.scaled[q] = scaled{source, out[i]}
	}
}

// window gives the sizes of what shares a scale, by dimension: a block, or a square tile.
func window(op *ir.Op, x ir.Type) map[string]int64 {
	dims, block := along(op), ir.Format(op.Attrs.Text("format")).Block()
	size := map[string]int64{dims[len(dims)-1]: block}
	if op.Attrs.Bool("tile") {
		size[x.TileDim(dims).Name] = block
	}
	return size
}

// inferBlockAmax gives bits in 16 bits for sources of bf16, in 32 for others.
func inferBlockAmax(_ *ir.Graph, op *ir.Op) ([]ir.Type, error) {
	if len(op.In) != 1 {
		return nil, fmt.Errorf("takes one argument, got %d", len(op.In))
	}
	x := op.In[0].Type
	t := ir.Type{Elem: dtype.U32, Dims: slices.Clone(x.Dims), Place: x.Place}
	if x.Elem == dtype.BF16 || op.Attrs.Bool("hadamard") {
		t.Elem = dtype.U16
	}
	for name, size := range window(op, x) {
		t.Dims[t.Index(name)].Size /= size
	}
	return []ir.Type{t}, nil
}

// inferBlockScale gives a byte per block: [..., n/block, ...] in the layout of the source.
func inferBlockScale(_ *ir.Graph, op *ir.Op) ([]ir.Type, error) {
	if len(op.In) != 1 && len(op.In) != 2 {
		return nil, fmt.Errorf("takes block maxima and the tensor's, got %d arguments", len(op.In))
	}
	t := op.In[0].Type
	t.Elem = dtype.U8
	return []ir.Type{t}, nil
}

// inferAmaxOfBlocks keeps the layers of a stack apart, as amax does.
func inferAmaxOfBlocks(g *ir.Graph, op *ir.Op) ([]ir.Type, error) {
	return inferAs("amax", g, op, op.In...)
}

// inferQuantizeWith is quantize with the scales after the source.
func inferQuantizeWith(g *ir.Graph, op *ir.Op) ([]ir.Type, error) {
	if len(op.In) < 2 {
		return nil, fmt.Errorf("takes a source and scales, got %d arguments", len(op.In))
	}
	return inferAs("quantize", g, op, append([]*ir.Value{op.In[0]}, op.In[2:]...)...)
}
