package replay

import "github.com/deepwell/deepwell/diag"

// checkStrides holds the strides of a GEMM's operands, which only the runtime reads, to their
// shapes: the elements of one matrix of the batch.
func (w *writer) checkStrides(s *site, g gemmConfig) {
	d := g.Dims.dims()
	for k, stride := range []int64{int64(g.LHSStride), int64(g.RHSStride)} {
		n := elements(s.values[k].shape.dims)
		for _, b := range d.batch[k] {
			if b >= 0 && b < int64(len(s.values[k].shape.dims)) {
				n /= max(s.values[k].shape.dims[b], 1)
			}
		}
		if stride != n {
			w.refuse(diag.ReplayConfig, "%s has a stride of %d for operand %d, whose matrices have %d "+
				"elements", s.target, stride, k, n)
		}
	}
}
