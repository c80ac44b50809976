package gpu

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/lower/stablehlo"
	"github.com/deepwell/deepwell/rewrite"
)

// groupedKernels are GEMMs of experts that skip tiles without a token.
func groupedKernels() []stablehlo.Kernel {
	return []stablehlo.Kernel{{
		Name: kernels.Triton, Kinds: rewrite.GroupedKinds(), Print: on(groupedDot),
		Applies: func(_ *kernels.Selector, op *ir.Op) (string, bool) {
			e, _, ok := rewrite.GroupedOf(op)
			return e.Why, ok
		},
	}}
}

// groupedDot prints a grouped GEMM. Rows are as dispatch gives them, [experts, slots, ...]: tokens
// first, then empty slots. Weights are read, and their gradients written, with the dimension first
// that FSDP gathers or reduces along, so that no copy puts the experts first.
func groupedDot(w writer, op *ir.Op, in []val) []val {
	e, filled, ok := rewrite.GroupedOf(op)
	if !ok {
		w.Fail("%s is no GEMM of experts", op.Kind)
		return in
	}
	live := w.liveTiles(in[len(in)-1])
	g := fused.Group{Rows: int(e.Experts * e.Slots), Experts: int(e.Experts), Out: int(e.Out),
		In: int(e.In), Format: e.Format, Grad: e.Grad, Wide: e.Wide, Filled: int(filled),
		Small: w.Target.Arch() == "sm_120", Shards: int(e.Shards)}
	if e.Grad {
		return w.groupedGrad(op, e, g, in, live)
	}
	n := len(in) / 2
	sides := w.side(in[:n], ir.ExpertDim, ir.Slots, e.Summed)
	order := ir.Names(in[n].Type.Dims)
	if e.First != "" {
		order = append([]string{e.First}, ir.Names(ir.Without(in[n].Type.Dims, e.First))...)
	}
	if order[2] == ir.ExpertDim {
		order = []string{ir.ExpertDim, e.Kept, e.Summed}
	}
	letters := map[string]string{ir.ExpertDim: "e", e.Kept: "o", e.Summed: "k"}
	for _, name := range order {
		g.Weights += letters[name]
	}
	weights := w.side(in[n:len(in)-1], ir.ExpertDim, e.Kept, e.Summed)
	if weights[0] = w.Transpose(in[n], order); e.Shards > 0 {
		weights[0] = w.apart(weights[0], e.Shards)
	}
	args := append(append(sides, weights...), w.expertsOfTiles(live))
	out := w.groupedCall(g, append(args, w.tensorScales(e.Format, in)...)...)
	return []val{w.placed(op, out, ir.ExpertDim, ir.Slots, e.Kept)}
}

// groupedGrad prints the gradient of weights. The dimension that FSDP reduces along is the first
// argument's.
func (w writer) groupedGrad(op *ir.Op, e rewrite.Experts, g fused.Group, in []val, live val) []val {
	n := len(in) / 2
	a, b, kept, other := in[:n], in[n:len(in)-1], e.Kept, e.Summed
	if e.First == other {
		a, b, kept, other = b, a, other, kept
		g.Out, g.In = g.In, g.Out
	}
	order := []string{ir.ExpertDim, kept, other}
	if g.Weights = "eok"; e.First != "" {
		g.Weights, order = "oek", []string{kept, ir.ExpertDim, other}
	}
	side := func(v []val, name string) []val {
		if e.Format == "" {
			return w.side(v, ir.ExpertDim, ir.Slots, name)
		}
		return w.side(v, ir.ExpertDim, name, ir.Slots)
	}
	args := append(append(side(a, kept), side(b, other)...), w.filledRows(live))
	args = append(args, w.tensorScales(e.Format, in)...)
	return []val{w.placed(op, w.groupedCall(g, args...), order...)}
}

// apart gives weights [experts, kept, summed] in the order in which their shards were gathered,
// each with all experts.
func (w writer) apart(v val, shards int64) val {
	dims := slices.Clone(v.Type.Dims)
	last := len(dims) - 1
	dims[last].Size /= shards
	dims = slices.Insert(dims, last, ir.Dim{Name: stablehlo.Shards, Size: shards})
	order := append([]string{stablehlo.Shards}, ir.Names(v.Type.Dims)...)
	return w.Transpose(w.Reshape(v, ir.Type{Dims: dims}), order)
}

// tensorScales gives the decode scales of both operands' tensors, if the format has them.
func (w writer) tensorScales(f dtype.Format, in []val) []val {
	if !f.TensorScale() {
		return nil
	}
	return []val{w.tensorScale(in[2]).Decode, w.tensorScale(in[5]).Decode}
}

// side gives an operand of a grouped GEMM in an order of its dimensions: a value in bfloat16, or
// codes and swizzled scales.
func (w writer) side(v []val, order ...string) []val {
	list := []val{w.Transpose(v[0], order)}
	if len(v) == 1 {
		return list
	}
	s := w.Transpose(v[1], order)
	matrix := ir.Type{Dims: []ir.Dim{s.Type.Dims[0], {Name: "rows", Size: s.Type.Dims[1].Size},
		{Name: "cols", Size: s.Type.Dims[2].Size}}}
	return append(list, w.swizzled(w.Reshape(s, matrix)))
}

func (w writer) groupedCall(g fused.Group, in ...val) val {
	k, err := g.Kernel()
	if err != nil {
		w.Fail("%s", err)
		return in[0]
	}
	return w.tritonCall(k, in...)[0]
}

// placed gives a result in an order of its dimensions the order of the operation.
func (w writer) placed(op *ir.Op, v val, order ...string) val {
	t := op.Out[0].Type
	dims := make([]ir.Dim, len(order))
	for i, name := range order {
		dims[i] = ir.Dim{Name: name, Size: t.Size(name)}
	}
	return w.Transpose(w.Reshape(v, ir.Type{Dims: dims}), ir.Names(t.Dims))
}

// liveTiles tells for each tile of 128 slots [experts, tile] whether one holds a token: whether its
// rows, or the scales of its blocks, are not all zero. E8M0 scales are zero in a block below
// 448 · 2^-127, which counts as empty; a block whose E4M3 scale is zero is zero.
func (w writer) liveTiles(rows val) val {
	others := ir.Names(ir.Without(rows.Type.Dims, ir.ExpertDim, ir.Slots))
	v := w.Transpose(rows, append([]string{ir.ExpertDim, ir.Slots}, others...))
	if v.Type.Elem == dtype.BF16 {
		v = w.Bitcast(v, dtype.U16)
		v = w.Elementwise("and", v, w.Constant(v.Type, 0x7fff)) // both zeros
	}
	experts, slots := v.Type.Dims[0], v.Type.Dims[1].Size
	v = w.Reshape(v, ir.Type{Dims: []ir.Dim{experts, {Name: "tile", Size: slots / tileRows},
		{Name: "in_tile", Size: tileRows * elements(v.Type.Dims[2:])}}})
	most := w.Reduce(v, "maximum", 0, "in_tile")
	return w.Compare("NE", most, w.Constant(most.Type, 0))
}

// expertsOfTiles numbers the expert of each tile, -1 where the tile is empty.
func (w writer) expertsOfTiles(live val) val {
	t := ir.Type{Elem: dtype.S32, Dims: live.Type.Dims}
	v := w.Select(live, w.Iota(t, ir.ExpertDim), w.Constant(t, -1))
	return w.Reshape(v, ir.Type{Dims: []ir.Dim{{Name: "tile", Size: elements(t.Dims)}}})
}

// filledRows counts the rows of each expert up to its last tile with a token.
func (w writer) filledRows(live val) val {
	t := ir.Type{Elem: dtype.S32, Dims: live.Type.Dims}
	end := w.Elementwise("add", w.Iota(t, "tile"), w.Constant(t, 1))
	end = w.Reduce(w.Select(live, end, w.Constant(t, 0)), "maximum", 0, "tile")
	return w.Elementwise("multiply", end, w.Constant(end.Type, tileRows))
}
