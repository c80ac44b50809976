package hlo

import (
	"fmt"
	"math"
	"math/bits"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/wire"
)

// Bounds on a shape, far above what compilers write: the deepest tuples are the results of
// asynchronous operations, three levels, and scale swizzles have the largest rank, 6.
const (
	maxShapeDepth = 32
	maxRank       = 128
)

// A primitive is an element type as XLA numbers it.
type primitive struct {
	name string
	bits int64 // 0 for what holds no elements
	typ  dtype.DType
}

// primitives is the enum PrimitiveType of xla/xla_data.proto. Types that Deepwell does not
// compute with have no dtype but keep their name and size.
var primitives = map[int64]primitive{
	1: {"pred", 8, dtype.Pred}, 2: {"s8", 8, dtype.S8}, 3: {"s16", 16, dtype.S16},
	4: {"s32", 32, dtype.S32}, 5: {"s64", 64, dtype.S64}, 6: {"u8", 8, dtype.U8},
	7: {"u16", 16, dtype.U16}, 8: {"u32", 32, dtype.U32}, 9: {"u64", 64, dtype.U64},
	10: {"f16", 16, dtype.F16}, 11: {"f32", 32, dtype.F32}, 12: {"f64", 64, dtype.F64},
	13: {"tuple", 0, dtype.Invalid}, 14: {"opaque", 0, dtype.Invalid},
	15: {"c64", 64, dtype.C64}, 16: {"bf16", 16, dtype.BF16}, 17: {"token", 0, dtype.Invalid},
	18: {"c128", 128, dtype.C128}, 19: {"f8e5m2", 8, dtype.F8E5M2},
	20: {"f8e4m3fn", 8, dtype.F8E4M3FN}, 21: {"s4", 4, dtype.S4}, 22: {"u4", 4, dtype.U4},
	23: {"f8e4m3b11fnuz", 8, dtype.Invalid}, 24: {"f8e5m2fnuz", 8, dtype.Invalid},
	25: {"f8e4m3fnuz", 8, dtype.Invalid}, 26: {"s2", 2, dtype.Invalid},
	27: {"u2", 2, dtype.Invalid}, 28: {"f8e4m3", 8, dtype.Invalid},
	29: {"f8e3m4", 8, dtype.Invalid}, 30: {"s1", 1, dtype.Invalid},
	31: {"u1", 1, dtype.Invalid}, 32: {"f4e2m1fn", 4, dtype.F4E2M1FN},
	33: {"f8e8m0fnu", 8, dtype.F8E8M0FNU}, 34: {"buffer", 0, dtype.Invalid},
	35: {"f6e3m2fn", 6, dtype.Invalid}, 36: {"f6e2m3fn", 6, dtype.Invalid},
}

// A shape is a ShapeProto: an array, a tuple, a buffer (which wraps one array) or a token.
type shape struct {
	typ      int64
	dims     []int64
	elems    []shape // of a tuple or a buffer
	layout   []int64 // dimensions from minor to major
	elemBits int64   // size of one element in memory, where the layout gives one
	space    int64

	bytes  int64  // in memory, see measure
	first  int    // index of the first leaf in the enclosing tuple
	leaves int    // arrays in the tuple, 1 for an array
	label  string // see short
}

func (s *shape) isTuple() bool { return s.typ == 13 }

func decodeShape(msg []byte, depth int) (s shape, err error) {
	if depth > maxShapeDepth {
		return s, fmt.Errorf("a shape is nested deeper than %d tuples", maxShapeDepth)
	}
	for f := range wire.Fields(msg, &err) {
		switch f.Num {
		case 2: // element_type
			s.typ = f.Int()
		case 3: // dimensions
			f.AddTo(&s.dims, &err)
		case 4: // tuple_shapes
			var elem shape
			elem, err = decodeShape(f.B, depth+1)
			s.elems = append(s.elems, elem)
		case 5: // layout
			// minor_to_major, element_size_in_bits, memory_space
			err = wire.Into{1: &s.layout, 7: &s.elemBits, 8: &s.space}.Read(f.B)
		}
	}
	if err != nil {
		return s, err
	}
	if max(len(s.dims), len(s.layout)) > maxRank {
		return s, fmt.Errorf("a shape has %d dimensions", max(len(s.dims), len(s.layout)))
	}
	s.measure()
	return s, nil
}

// measure sets the sizes of a shape whose elements are measured already.
//
// Bytes are counted as XLA's ShapeUtil does: elements smaller than a byte share bytes only if the
// layout says so, and a token takes nothing.
func (s *shape) measure() {
	if !s.isTuple() {
		s.leaves = 1
	}
	for i := range s.elems {
		e := &s.elems[i]
		s.bytes = satAdd(s.bytes, e.bytes)
		if s.isTuple() {
			e.first = s.leaves
			s.leaves += e.leaves
		}
	}
	each := primitives[s.typ].bits
	if each == 0 {
		return
	}
	n := elements(s.dims)
	if s.elemBits > 0 {
		total := satMul(n, s.elemBits)
		s.bytes = total/8 + min(total%8, 1)
		return
	}
	s.bytes = satMul(n, (each+7)/8)
}

// flatten lists the arrays of a tuple in the order in which PJRT counts results.
func (s *shape) flatten() []*shape {
	if !s.isTuple() {
		return []*shape{s}
	}
	all := make([]*shape, 0, s.leaves)
	for i := range s.elems {
		all = append(all, s.elems[i].flatten()...)
	}
	return all
}

// leafAt turns a path into a tuple into the place among its leaves.
func (s *shape) leafAt(path []int64) (place int, ok bool) {
	for _, n := range path {
		if !s.isTuple() || n < 0 || n >= int64(len(s.elems)) {
			return 0, false
		}
		s = &s.elems[n]
		place += s.first
	}
	return place, !s.isTuple()
}

// String writes the shape as HLO text does: bf16[8,128]{1,0}.
func (s *shape) String() string {
	if s.isTuple() {
		parts := make([]string, len(s.elems))
		for i := range s.elems {
			parts[i] = s.elems[i].String()
		}
		return "(" + strings.Join(parts, ", ") + ")"
	}
	text := s.short()
	var tail string
	if s.elemBits > 0 {
		tail += fmt.Sprintf("E(%d)", s.elemBits)
	}
	if s.space != 0 {
		tail += fmt.Sprintf("S(%d)", s.space)
	}
	if tail != "" {
		tail = ":" + tail
	}
	if len(s.layout) > 0 || tail != "" {
		text += "{" + joinInts(s.layout) + tail + "}"
	}
	return text
}

// short writes an array without its layout. The text is kept, so that the rows of a combined
// collective share it.
func (s *shape) short() string {
	if s.label != "" {
		return s.label
	}
	name := primitives[s.typ].name
	if name == "" {
		name = fmt.Sprintf("type%d", s.typ)
	}
	if len(s.elems) > 0 { // a buffer
		s.label = name + "(" + s.elems[0].short() + ")"
	} else {
		s.label = name + "[" + joinInts(s.dims) + "]"
	}
	return s.label
}

func joinInts(list []int64) string {
	return strings.ReplaceAll(strings.Trim(fmt.Sprint(list), "[]"), " ", ",")
}

// satAdd and satMul keep to the largest int64 instead of wrapping round: a program that claims
// more must look absurd, not small. Their arguments are never negative.
func satAdd(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

func satMul(a, b int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	if hi != 0 || lo > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(lo)
}
