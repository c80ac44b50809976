package replay

import (
	"fmt"
	"math"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/deepwell/deepwell/internal/wire"
)

// A value is an instruction of the rewritten program. Its layout is row-major, and its type is the
// one in which elements are held.
type value struct {
	id       int64
	name     string
	opcode   string
	shape    *shape
	operands []*value
	called   []int64 // numbers of rewritten computations
	attrs    wire.Msg
}

func (v *value) encode() wire.Msg {
	m := wire.Msg(nil).Text(1, v.name).Text(2, v.opcode).Bytes(3, v.shape.encode()).Int(35, v.id)
	ids := make([]int64, len(v.operands))
	for i, o := range v.operands {
		ids[i] = o.id
	}
	if len(ids) > 0 {
		m = m.Packed(36, ids...)
	}
	if len(v.called) > 0 {
		m = m.Packed(38, v.called...)
	}
	return append(m, v.attrs...)
}

// A writer builds one computation of the rewritten program.
type writer struct {
	*rewriter
	list []*value
}

// add appends an instruction.
func (w *writer) add(opcode string, s *shape, attrs wire.Msg, operands ...*value) *value {
	w.next++
	v := &value{id: w.next, opcode: opcode, shape: s, operands: operands, attrs: attrs,
		name: fmt.Sprintf("%s.%d", opcode, w.next)}
	w.list = append(w.list, v)
	return v
}

// elementwise applies an operation to arrays of one shape.
func (w *writer) elementwise(opcode string, operands ...*value) *value {
	return w.add(opcode, operands[0].shape, nil, operands...)
}

func (w *writer) compare(direction string, a, b *value) *value {
	return w.add("compare", exact(typePred, a.shape.dims...), wire.Msg(nil).Text(63, direction), a, b)
}

// choose takes elements of a where p is true, else of b.
func (w *writer) choose(p, a, b *value) *value { return w.add("select", a.shape, nil, p, a, b) }

// convert converts to the type in which t is held.
func (w *writer) convert(x *value, t elemType) *value { return w.convertExactly(x, w.hold(t)) }

func (w *writer) convertExactly(x *value, t elemType) *value {
	if x.shape.typ == t {
		return x
	}
	return w.add("convert", exact(t, x.shape.dims...), nil, x)
}

// bitcastConvert views elements as another type of the same size.
func (w *writer) bitcastConvert(x *value, t elemType) *value {
	if x.shape.typ == t {
		return x
	}
	return w.add("bitcast-convert", exact(t, x.shape.dims...), nil, x)
}

func (w *writer) reshape(x *value, dims ...int64) *value {
	if slices.Equal(x.shape.dims, dims) {
		return x
	}
	if elements(dims) != elements(x.shape.dims) {
		w.refuseLayout("%v does not reshape to %v", x.shape.dims, dims)
	}
	return w.add("reshape", exact(x.shape.typ, dims...), nil, x)
}

// transpose makes dimension perm[i] the i-th.
func (w *writer) transpose(x *value, perm ...int64) *value {
	if !isPermutation(perm, len(x.shape.dims)) {
		w.refuseLayout("%v is no order of the dimensions %v", perm, x.shape.dims)
	}
	if slices.IsSorted(perm) {
		return x
	}
	dims := make([]int64, len(perm))
	for i, p := range perm {
		dims[i] = x.shape.dims[p]
	}
	return w.add("transpose", exact(x.shape.typ, dims...), dimensions(perm...), x)
}

// inverse undoes a permutation.
func inverse(perm []int64) []int64 {
	inv := make([]int64, len(perm))
	for i, p := range perm {
		inv[p] = int64(i)
	}
	return inv
}

func dimensions(dims ...int64) wire.Msg { return wire.Msg(nil).Packed(14, dims...) }

// broadcast puts dimension i of x at place at[i] of dims.
func (w *writer) broadcast(x *value, dims []int64, at ...int64) *value {
	return w.add("broadcast", exact(x.shape.typ, dims...), dimensions(at...), x)
}

// literalFields are the fields of a LiteralProto that hold constants of a type.
var literalFields = map[elemType]protowire.Number{typePred: 2, typeU8: 3, typeS32: 4, typeS64: 5,
	typeU32: 6, typeU64: 7, typeF32: 8}

// scalar is a number of type t as it is held.
func (w *writer) scalar(t elemType, v float64) *value {
	if w.hold(t) == typeF32 {
		return w.constant(typeF32, wire.Msg(nil).Bytes(8, protowire.AppendFixed32(nil,
			math.Float32bits(float32(v)))))
	}
	if elemRows[w.hold(t)].float {
		return w.convert(w.scalar(typeF32, v), t)
	}
	return w.scalarInt(w.hold(t), int64(v))
}

// scalarInt is a whole number.
func (w *writer) scalarInt(t elemType, v int64) *value {
	switch field := literalFields[t]; {
	case t == typeU8 || t == typePred && v <= 1:
		if t == typePred {
			return w.constant(t, wire.Msg(nil).Packed(field, v))
		}
		return w.constant(t, wire.Msg(nil).Bytes(field, []byte{byte(v)}))
	case field != 0:
		return w.constant(t, wire.Msg(nil).Packed(field, v))
	}
	return w.add("convert", exact(t), nil, w.scalarInt(typeS32, v))
}

func (w *writer) constant(t elemType, data wire.Msg, dims ...int64) *value {
	s := exact(t, dims...)
	literal := append(wire.Msg(nil).Bytes(1, s.encode()), data...)
	return w.add("constant", s, wire.Msg(nil).Bytes(8, literal))
}

// full is an array of equal numbers.
func (w *writer) full(t elemType, dims []int64, v float64) *value {
	return w.broadcast(w.scalar(t, v), dims)
}

func (w *writer) fullInt(t elemType, dims []int64, v int64) *value {
	return w.broadcast(w.scalarInt(t, v), dims)
}

// iota counts along a dimension.
func (w *writer) iota(t elemType, dims []int64, along int64) *value {
	return w.add("iota", exact(t, dims...), dimensions(along))
}

// slice takes elements 0 to limits[i] of each dimension.
func (w *writer) slice(x *value, limits ...int64) *value {
	if slices.Equal(x.shape.dims, limits) {
		return x
	}
	var attrs wire.Msg
	for i, n := range limits {
		if n > x.shape.dims[i] {
			w.refuseLayout("%v has no slice of %v", x.shape.dims, limits)
		}
		attrs = attrs.Bytes(17, wire.Msg(nil).Int(1, 0).Int(2, n).Int(3, 1))
	}
	return w.add("slice", exact(x.shape.typ, limits...), attrs, x)
}

// reduce combines the elements of some dimensions with an operation of two numbers.
func (w *writer) reduce(x *value, opcode string, start float64, over ...int64) *value {
	var dims []int64
	for i, d := range x.shape.dims {
		if !slices.Contains(over, int64(i)) {
			dims = append(dims, d)
		}
	}
	v := w.add("reduce", exact(x.shape.typ, dims...), dimensions(over...), x,
		w.scalar(x.shape.typ, start))
	v.called = []int64{w.reducer(opcode, x.shape.typ)}
	return v
}

// dotDims are the dimension numbers of a matrix product.
type dotDims struct{ contracting, batch [2][]int64 }

// dot is a matrix product in float32, whose dimensions are the batch's, a's and b's. XLA:CPU has no
// GEMM for all bf16 shapes, and in f32 the product of two bf16 numbers is exact.
func (w *writer) dot(a, b *value, d dotDims) *value {
	var dims []int64
	operands := [2]*value{w.convert(a, typeF32), w.convert(b, typeF32)}
	w.checkDot(operands, d)
	for _, i := range d.batch[0] {
		dims = append(dims, a.shape.dims[i])
	}
	for k, x := range operands {
		for i, n := range x.shape.dims {
			at := int64(i)
			if !slices.Contains(d.batch[k], at) && !slices.Contains(d.contracting[k], at) {
				dims = append(dims, n)
			}
		}
	}
	numbers := wire.Msg(nil).Packed(1, d.contracting[0]...).Packed(2, d.contracting[1]...).
		Packed(3, d.batch[0]...).Packed(4, d.batch[1]...)
	attrs := wire.Msg(nil).Bytes(30, numbers).Bytes(51, wire.Msg(nil).Packed(1, 0, 0))
	return w.add("dot", exact(typeF32, dims...), attrs, operands[0], operands[1])
}

// checkDot refuses dimension numbers that the operands do not have.
func (w *writer) checkDot(operands [2]*value, d dotDims) {
	var sizes [2][]int64
	for k, x := range operands {
		seen := map[int64]bool{}
		for _, i := range slices.Concat(d.batch[k], d.contracting[k]) {
			if i < 0 || i >= int64(len(x.shape.dims)) || seen[i] {
				w.refuseProgram("a matrix product over dimension %d of %v", i, x.shape.dims)
			}
			seen[i] = true
			sizes[k] = append(sizes[k], x.shape.dims[i])
		}
	}
	if !slices.Equal(sizes[0], sizes[1]) || len(d.batch[0]) != len(d.batch[1]) {
		w.refuseProgram("a matrix product of %v and %v", operands[0].shape.dims, operands[1].shape.dims)
	}
}

func (w *writer) tuple(elems ...*value) *value {
	s := &shape{typ: typeTuple}
	for _, e := range elems {
		s.elems = append(s.elems, e.shape)
	}
	return w.add("tuple", s, nil, elems...)
}
