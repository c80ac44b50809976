package replay

import (
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/kernels/fused"
)

// A groupedCall is the call of a grouped GEMM: arguments are x and w, or dy and x, each a matrix or
// codes and swizzled scales; then what tells tiles with tokens.
type groupedCall struct {
	*writer
	*site
	fused.Group
}

// grouped rewrites the call of a grouped GEMM by a product for each expert. Rows of tiles that the
// kernel skips are zeros.
func (w *writer) grouped(s *site, spec string) []*value {
	g, err := fused.ParseGroup(spec)
	operands := 3
	if g.Format != "" {
		operands = 5
	}
	if err != nil || g.Format == dtype.NVFP4 || len(s.values) != operands {
		w.refuse(diag.ReplayCall, "replay has no rule for the kernel %s: %v", spec, err)
	}
	for i, v := range s.from {
		if !v.shape.rowMajor() {
			w.refuse(diag.ReplayCall, "operand %d of a kernel is not row-major", i)
		}
	}
	k := &groupedCall{w, s, g}
	var y *value
	if g.Grad {
		y = k.gradient()
	} else {
		y = k.product()
	}
	to := s.shape.results()[0]
	return []*value{w.reshape(w.convert(y, to.typ), to.dims...)}
}

// side gives an operand that lies in an order of its dimensions, e, o and k, as [e, o, k].
func (k *groupedCall) side(n int, order string, experts, kept, summed int64) *value {
	size := map[byte]int64{'e': experts, 'o': kept, 'k': summed}
	at := map[byte]int64{}
	dims := make([]int64, 3)
	for i := range 3 {
		dims[i], at[order[i]] = size[order[i]], int64(i)
	}
	per := len(k.values) / 2 // arguments of a side
	x := k.values[n*per]
	if k.Format == "" {
		return k.transpose(k.reshape(x, dims...), at['e'], at['o'], at['k'])
	}
	const block = 32
	codes := k.convert(k.bitcastConvert(x, typeE4M3), typeF32)
	codes = k.transpose(k.reshape(codes, dims...), at['e'], at['o'], at['k'])
	blocks := summed / block
	scales := k.untiled(k.site, k.reshape(k.values[n*per+1], experts*kept, blocks))
	scales = k.reshape(k.fromE8M0(scales), experts, kept, blocks)
	wide := k.broadcast(scales, []int64{experts, kept, blocks, block}, 0, 1, 2)
	y := k.elementwise("multiply", codes, k.reshape(wide, experts, kept, summed))
	return k.convert(y, typeBF16) // exact: a code has fewer digits
}

// groupTile is the rows of a tile.
const groupTile = 128

// product multiplies the rows of each expert's slots by its weight. Tiles name their expert, which
// must be the one whose slots they are.
func (k *groupedCall) product() *value {
	e, slots := int64(k.Experts), int64(k.Rows/k.Experts)
	x := k.side(0, "eok", e, slots, int64(k.In))
	w := k.side(1, k.Weights, e, int64(k.Out), int64(k.In))
	y := k.dot(x, w, dotDims{contracting: [2][]int64{{2}, {2}}, batch: [2][]int64{{0}, {0}}})
	dims := []int64{e, slots / groupTile, groupTile, int64(k.Out)}
	named := k.reshape(k.values[len(k.values)-1], dims[:2]...)
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
	dy := k.side(0, order, e, int64(k.Out), slots)
	x := k.side(1, order, e, int64(k.In), slots)
	dims := []int64{e, int64(k.Out), slots}
	rows := k.broadcast(k.reshape(k.values[len(k.values)-1], e), dims, 0)
	has := k.compare("LT", k.iota(typeS32, dims, 2), rows)
	dy = k.choose(has, dy, k.full(dy.shape.typ, dims, 0))
	y := k.dot(dy, x, dotDims{contracting: [2][]int64{{2}, {2}}, batch: [2][]int64{{0}, {0}}})
	if k.Weights == "oek" {
		y = k.transpose(y, 1, 0, 2)
	}
	return y
}
