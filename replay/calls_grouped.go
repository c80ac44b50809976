package replay

import (
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/kernels/fused"
)

// A groupedCall is the call of a grouped GEMM: arguments are x and w, or dy and x, each a matrix or
// codes and swizzled scales; then what tells tiles with tokens, and in NVFP4 the scales of both
// tensors.
type groupedCall struct {
	*writer
	*site
	fused.Group
	per int // arguments of a side
}

// grouped rewrites the call of a grouped GEMM by a product for each expert. Rows of tiles that the
// kernel skips are zeros.
func (w *writer) grouped(s *site, spec string) []*value {
	g, err := fused.ParseGroup(spec)
	operands := map[dtype.Format]int{"": 3, dtype.MXFP8: 5, dtype.NVFP4: 7}
	if err != nil || len(s.values) != operands[g.Format] {
		w.refuse(diag.ReplayCall, "replay has no rule for the kernel %s: %v", spec, err)
	}
	for i, v := range s.from {
		if !v.shape.rowMajor() {
			w.refuse(diag.ReplayCall, "operand %d of a kernel is not row-major", i)
		}
	}
	k := &groupedCall{w, s, g, 1}
	if g.Format != "" {
		k.per = 2
	}
	var y *value
	if g.Grad {
		y = k.gradient()
	} else {
		y = k.product()
	}
	for _, by := range s.values[2*k.per+1:] {
		y = w.elementwise("multiply", y, w.broadcast(w.reshape(by), y.shape.dims))
	}
	to := s.shape.results()[0]
	return []*value{w.reshape(w.convert(y, to.typ), to.dims...)}
}

// side gives an operand that lies in an order of its dimensions, e, o and k, as [e, o, k]. What is
// summed over may be in shards, each with all experts.
func (k *groupedCall) side(n int, order string, shards, experts, kept, summed int64) *value {
	size := map[byte]int64{'e': experts, 'o': kept, 'k': summed / shards}
	dims, at := []int64{shards}, map[byte]int64{}
	for i := range 3 {
		dims, at[order[i]] = append(dims, size[order[i]]), int64(i+1)
	}
	inOrder := func(x *value) *value {
		x = k.transpose(k.reshape(x, dims...), at['e'], at['o'], 0, at['k'])
		return k.reshape(x, experts, kept, summed)
	}
	x := k.values[n*k.per]
	if k.Format == "" {
		return inOrder(x)
	}
	codes, block := typeE4M3, int64(32)
	decode := func(scales *value) *value { return k.fromE8M0(scales) }
	if k.Format == dtype.NVFP4 { // bytes hold two numbers along k, which is last
		codes, block = typeE2M1, 16
		decode = func(scales *value) *value {
			return k.convert(k.bitcastConvert(scales, typeE4M3), typeF32)
		}
	}
	x = inOrder(k.fromCodes(k.viewAs(x, typeU8, codes), codes))
	blocks := summed / block
	scales := k.untiled(k.site, k.reshape(k.values[n*k.per+1], experts*kept, blocks))
	scales = k.reshape(decode(scales), experts, kept, blocks)
	wide := k.broadcast(scales, []int64{experts, kept, blocks, block}, 0, 1, 2)
	y := k.elementwise("multiply", x, k.reshape(wide, experts, kept, summed))
	return k.convert(y, typeBF16) // exact: a code has fewer digits
}

// groupTile is the rows of a tile.
const groupTile = 128

// product multiplies the rows of each expert's slots by its weight. Tiles name their expert, which
// must be the one whose slots they are.
func (k *groupedCall) product() *value {
	e, slots := int64(k.Experts), int64(k.Rows/k.Experts)
	x := k.side(0, "eok", 1, e, slots, int64(k.In))
	w := k.side(1, k.Weights, max(int64(k.Shards), 1), e, int64(k.Out), int64(k.In))
	y := k.dot(x, w, dotDims{contracting: [2][]int64{{2}, {2}}, batch: [2][]int64{{0}, {0}}})
	dims := []int64{e, slots / groupTile, groupTile, int64(k.Out)}
	named := k.reshape(k.values[2*k.per], dims[:2]...)
	own := k.iota(typeS32, dims[:2], 0)
	has := k.broadcast(k.compare("EQ", named, own), dims, 0, 1)
	y = k.reshape(y, dims...)
	return k.choose(has, y, k.full(y.shape.typ, dims, 0))
}

// gradient sums over the rows of each expert that are filled.
func (k *groupedCall) gradient() *value {
	e, slots, order := int64(k.Experts), int64(k.Rows/k.Experts), "eko"
	if k.Format != "" {
		order = "eok"
	}
	dy := k.side(0, order, 1, e, int64(k.Out), slots)
	x := k.side(1, order, 1, e, int64(k.In), slots)
	dims := []int64{e, int64(k.Out), slots}
	rows := k.broadcast(k.reshape(k.values[2*k.per], e), dims, 0)
	has := k.compare("LT", k.iota(typeS32, dims, 2), rows)
	dy = k.choose(has, dy, k.full(dy.shape.typ, dims, 0))
	y := k.dot(dy, x, dotDims{contracting: [2][]int64{{2}, {2}}, batch: [2][]int64{{0}, {0}}})
	if k.Weights == "oek" {
		y = k.transpose(y, 1, 0, 2)
	}
	return y
}
