package replay

import (
	"github.com/deepwell/deepwell/diag"
)

// bitcast gives the same bytes another shape, layout and type. The elements are put in the order in
// which they are in memory, viewed as the other type, and put in the order of the new dimensions.
func (w *writer) bitcast(s *site) *value {
	from, to := s.from[0].shape, s.shape
	if from.isTuple() || to.isTuple() {
		w.refuseLayout("a bitcast of a tuple")
	}
	w.held(to)
	if elements(from.dims)*from.typ.bits() != elements(to.dims)*to.typ.bits() {
		w.refuseLayout("a bitcast from %v of %s to %v of %s", from.dims, from.typ, to.dims, to.typ)
	}
	x := w.viewAs(w.transpose(s.values[0], from.physical()...), from.typ, to.typ)
	order := to.physical()
	dims := make([]int64, len(order))
	for i, d := range order {
		dims[i] = to.dims[d]
	}
	return w.transpose(w.reshape(x, dims...), inverse(order)...)
}

// bitcastConverted is the same with elements in the order of their dimensions.
func (w *writer) bitcastConverted(s *site) *value {
	from, to := s.from[0].shape, s.shape
	w.held(to)
	if elements(from.dims)*from.typ.bits() != elements(to.dims)*to.typ.bits() {
		w.refuseLayout("a bitcast-convert from %v of %s to %v of %s", from.dims, from.typ, to.dims,
			to.typ)
	}
	return w.reshape(w.viewAs(s.values[0], from.typ, to.typ), to.dims...)
}

// viewAs views elements as another type, by way of the bytes where sizes differ. Its result has the
// right elements in the right order, in any shape. Little-endian: the first byte, or half byte, is
// the low one.
func (w *writer) viewAs(x *value, from, to elemType) *value {
	if from == to {
		return x
	}
	if from == typePred || to == typePred {
		w.refuse(diag.ReplayOpcode, "a bitcast from %s to %s", from, to)
	}
	if w.hold(from) != from && from == typeBF16 { // held as f32: its bits are those after rounding
		x = w.convertExactly(x, typeBF16)
	}
	raw := to
	if elemRows[to].codes {
		raw = typeU8
	}
	switch {
	case from.bits() == to.bits():
		x = w.bitcastConvert(x, raw)
	case from.bits() == 4:
		x = w.resized(w.packed(x), raw)
	case to.bits() == 4:
		x = w.unpacked(w.resized(x, typeU8))
	default:
		x = w.resized(x, raw)
	}
	return w.convert(x, to)
}

// resized views elements of 8 bits and more as a type of another size.
func (w *writer) resized(x *value, t elemType) *value {
	n, from, to := elements(x.shape.dims), x.shape.typ.bits(), t.bits()
	switch {
	case from == to:
		return w.bitcastConvert(x, t)
	case from > to:
		return w.add("bitcast-convert", exact(t, n, from/to), nil, w.reshape(x, n))
	}
	per := to / from
	return w.add("bitcast-convert", exact(t, n/per), nil, w.reshape(x, n/per, per))
}

// unpacked splits bytes into two codes of four bits, the low one first.
func (w *writer) unpacked(x *value) *value {
	n := elements(x.shape.dims)
	dims := []int64{n, 2}
	shift := w.elementwise("multiply", w.iota(typeU8, dims, 1), w.fullInt(typeU8, dims, 4))
	both := w.broadcast(w.reshape(x, n), dims, 0)
	return w.elementwise("and", w.elementwise("shift-right-logical", both, shift),
		w.fullInt(typeU8, dims, 15))
}

// packed joins codes of four bits to bytes, the low one first.
func (w *writer) packed(x *value) *value {
	dims := []int64{elements(x.shape.dims) / 2, 2}
	shift := w.elementwise("multiply", w.iota(typeU8, dims, 1), w.fullInt(typeU8, dims, 4))
	x = w.elementwise("and", w.reshape(x, dims...), w.fullInt(typeU8, dims, 15))
	return w.reduce(w.elementwise("shift-left", x, shift), "or", 0, 1)
}
