package replay

import (
	"fmt"
	"math/bits"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/deepwell/deepwell/internal/wire"
)

// Field numbers come from xla/service/hlo.proto and xla/xla_data.proto at openxla/xla e5d008b.

// An hloModule is an HloModuleProto as far as it is rewritten. The schedule is not read: the
// rewritten program has other instructions.
type hloModule struct {
	name         string
	entry        int64
	computations map[int64]*computation
	aliases      []byte // input_output_alias and buffer_donor, as they were
	payloads     [][]byte
}

// A computation is an HloComputationProto; operands stand before their users.
type computation struct {
	name   string
	id     int64
	rootID int64
	list   []*instruction
}

// An instruction is an HloInstructionProto. Fields that a rule reads or writes are decoded; kept
// has the others, as they were.
type instruction struct {
	name, opcode string
	target       string // of a custom call
	fusion       string // the kind of a fusion, such as kLoop
	shape        *shape
	id           int64
	param, index int64 // of a parameter and of get-tuple-element
	dims         []int64
	operands     []int64
	called       []int64
	literal      []byte // LiteralProto
	config       []byte // backend_config, JSON
	sliceSizes   []int64
	algorithm    int64 // of rng-bit-generator; 0 is the backend's own
	groups       deviceGroups
	channel      int64  // of a collective; 0 without one
	dot          []byte // DotDimensionNumbers
	order        string // of a comparison: PARTIAL or TOTAL
	kept         wire.Msg
}

// sourceTargetPairs is the field of a collective-permute's devices.
const sourceTargetPairs protowire.Number = 52

// fieldsKept are the attributes of an instruction that mean the same on every backend.
var fieldsKept = []protowire.Number{
	15, // window
	17, // slice_dimensions
	18, // exponent_bits
	19, // mantissa_bits
	21, // padding_config
	33, // gather_dimension_numbers
	34, // gather_slice_sizes
	48, // scatter_dimension_numbers
	sourceTargetPairs,
	60, // is_stable
	63, // comparison_direction
	67, // indices_are_sorted
	69, // unique_indices
	71, // use_global_device_ids
	72, // comparison_type
}

// fieldsDropped are attributes that say how or where the GPU computes, or nothing at all.
var fieldsDropped = []protowire.Number{
	7,  // metadata
	37, // control_predecessor_ids
	40, // sharding, of a program that is partitioned already
	47, // is_host_transfer
	50, // feature_group_count, of convolutions, which have no rule
	56, // constrain_layout
	57, // operand_shapes_with_layout
	58, // batch_group_count, of convolutions
	65, // custom_call_has_side_effect
	51, // precision_config: how fast an f32 product may be computed
	68, // frontend_attributes
	73, // is_cross_program_prefetch
	74, // output_operand_aliasing
	76, // custom_call_schedule
	77, // custom_call_api_version
	79, // async_execution_thread
	80, // cross_program_prefetch_index
	82, // statistics_viz
	88, // original_value
}

// decodeProgram reads an optimized program in one of PJRT's formats.
func decodeProgram(format string, code []byte) (*hloModule, error) {
	switch format {
	case "hlo":
		return decodeModule(code)
	case "hlo_with_config":
		var module []byte
		if err := (wire.Into{1: &module}).Read(code); err != nil {
			return nil, err
		}
		return decodeModule(module)
	}
	return nil, fmt.Errorf("unknown format %q", format)
}

func decodeModule(msg []byte) (m *hloModule, err error) {
	m = &hloModule{computations: map[int64]*computation{}}
	err = wire.Into{22: func(b []byte) error { // payloads, which stand behind their users
		m.payloads = append(m.payloads, b)
		return nil
	}}.Read(msg)
	if err != nil {
		return nil, err
	}
	for f := range wire.Fields(msg, &err) {
		switch f.Num {
		case 1: // name
			m.name = f.Text()
		case 3: // computations
			err = m.decodeComputation(f.B)
		case 6: // entry_computation_id
			m.entry = f.Int()
		case 8, 18: // input_output_alias, buffer_donor
			m.aliases = append(m.aliases, f.Raw...)
		}
	}
	if err == nil && m.computations[m.entry] == nil {
		err = fmt.Errorf("there is no entry computation")
	}
	return m, err
}

func (m *hloModule) decodeComputation(msg []byte) error {
	c := &computation{}
	err := wire.Into{1: &c.name, 5: &c.id, 6: &c.rootID, 2: func(b []byte) error { // instructions
		i, err := m.decodeInstruction(b)
		c.list = append(c.list, i)
		return err
	}}.Read(msg)
	if err == nil && m.computations[c.id] != nil {
		err = fmt.Errorf("two computations have number %d", c.id)
	}
	m.computations[c.id] = c
	return err
}

func (m *hloModule) decodeInstruction(msg []byte) (i *instruction, err error) {
	i = &instruction{}
	for f := range wire.Fields(msg, &err) {
		known, failed := i.decodeField(f)
		if failed == nil && !known {
			known, failed = i.decodeReference(f, m.payloads)
		}
		switch {
		case failed != nil:
			err = failed
		case known || slices.Contains(fieldsDropped, f.Num):
		case slices.Contains(fieldsKept, f.Num):
			i.kept = append(i.kept, f.Raw...)
		default:
			err = fmt.Errorf("instruction %q has the unknown field %d", i.name, f.Num)
		}
	}
	if err == nil && (i.opcode == "" || i.shape == nil) {
		err = fmt.Errorf("instruction %q has no opcode or no shape", i.name)
	}
	return i, err
}

// decodeField reads a field that rules read or write, and says whether f is one.
func (i *instruction) decodeField(f wire.Field) (known bool, err error) {
	switch f.Num {
	case 1: // name
		i.name = f.Text()
	case 2: // opcode
		i.opcode = f.Text()
	case 3: // shape
		i.shape, err = decodeShape(f.B, 0)
	case 8: // literal
		i.literal = f.B
	case 9: // parameter_number
		i.param = f.Int()
	case 11: // fusion_kind
		i.fusion = f.Text()
	case 13: // tuple_index
		i.index = f.Int()
	case 14: // dimensions
		f.AddTo(&i.dims, &err)
	case 20: // dynamic_slice_sizes
		f.AddTo(&i.sliceSizes, &err)
	case 26: // channel_id
		i.channel = f.Int()
	case 28: // custom_call_target
		i.target = f.Text()
	case 30: // dot_dimension_numbers
		i.dot = f.B
	case 70: // rng_algorithm
		i.algorithm = f.Int()
	case 102: // comparison_order
		i.order = f.Text()
	default:
		return false, nil
	}
	return true, err
}

// decodeReference reads a field that names computations, instructions, devices or a configuration.
func (i *instruction) decodeReference(f wire.Field, payloads [][]byte) (known bool, err error) {
	switch f.Num {
	case 35: // id
		i.id = f.Int()
	case 36: // operand_ids
		f.AddTo(&i.operands, &err)
	case 38: // called_computation_ids
		f.AddTo(&i.called, &err)
	case 43: // backend_config
		i.config = f.B
	case 49, 87, 92, 93:
		err = i.groups.decode(f)
	case 99: // backend_config_payload: the bytes, or their number in the module's list
		at := int64(-1)
		err = wire.Into{1: &i.config, 2: &at}.Read(f.B)
		if at >= 0 && at < int64(len(payloads)) {
			i.config = payloads[at]
		}
	default:
		return false, nil
	}
	return true, err
}

// A shape is a ShapeProto: an array with its layout, a tuple, or a token.
type shape struct {
	typ    elemType
	dims   []int64
	layout []int64 // dimensions from minor to major
	elems  []*shape
	space  int64  // 5 is host memory
	odd    string // what replay does not understand of the shape
}

// Bounds on a shape, far above what compilers write.
const (
	maxDepth    = 32
	maxRank     = 64
	maxElements = 1 << 50
)

func decodeShape(msg []byte, depth int) (s *shape, err error) {
	if depth > maxDepth {
		return nil, fmt.Errorf("a shape is nested deeper than %d tuples", maxDepth)
	}
	s = &shape{}
	for f := range wire.Fields(msg, &err) {
		switch f.Num {
		case 2: // element_type
			s.typ = elemType(f.Int())
		case 3: // dimensions
			f.AddTo(&s.dims, &err)
		case 4: // tuple_shapes
			var elem *shape
			elem, err = decodeShape(f.B, depth+1)
			s.elems = append(s.elems, elem)
		case 5: // layout
			err = s.decodeLayout(f.B)
		case 6: // is_dynamic_dimension
			for v := range f.Ints(&err) {
				if v != 0 {
					s.odd = "a dynamic dimension"
				}
			}
		}
	}
	if err != nil {
		return nil, err
	}
	return s, s.check()
}

// decodeLayout reads a LayoutProto. Tiles, sparse dimensions and split buffers are not understood.
func (s *shape) decodeLayout(msg []byte) (err error) {
	for f := range wire.Fields(msg, &err) {
		switch f.Num {
		case 1: // minor_to_major
			f.AddTo(&s.layout, &err)
		case 8: // memory_space
			s.space = f.Int()
		case 7, 11, 12, 16: // element_size_in_bits, index and pointer types, tail padding
		default:
			s.odd = fmt.Sprintf("field %d of a layout", f.Num)
		}
	}
	return err
}

// check refuses sizes that overflow and layouts that are no permutation.
func (s *shape) check() error {
	if len(s.dims) > maxRank {
		return fmt.Errorf("a shape has %d dimensions", len(s.dims))
	}
	n := uint64(1)
	for _, d := range s.dims {
		hi, lo := bits.Mul64(n, uint64(max(d, 0)))
		if d < 0 || hi != 0 || lo > maxElements {
			return fmt.Errorf("a shape has dimensions %v", s.dims)
		}
		n = lo
	}
	if len(s.layout) == 0 {
		for d := range s.dims {
			s.layout = append(s.layout, int64(len(s.dims)-1-d))
		}
	}
	if !isPermutation(s.layout, len(s.dims)) {
		return fmt.Errorf("a shape of %d dimensions has the layout %v", len(s.dims), s.layout)
	}
	return nil
}

func isPermutation(list []int64, n int) bool {
	seen := make([]bool, n)
	for _, d := range list {
		if d < 0 || d >= int64(n) || seen[d] {
			return false
		}
		seen[d] = true
	}
	return len(list) == n
}

func (s *shape) isTuple() bool { return s.typ == typeTuple }

// results are the elements of a tuple, or the array itself.
func (s *shape) results() []*shape {
	if s.isTuple() {
		return s.elems
	}
	return []*shape{s}
}

// physical are the dimensions from major to minor.
func (s *shape) physical() []int64 {
	order := slices.Clone(s.layout)
	slices.Reverse(order)
	return order
}

// rowMajor says that elements are in the order of the dimensions.
func (s *shape) rowMajor() bool { return slices.IsSorted(s.physical()) }

// encode writes a ShapeProto in row-major layout.
func (s *shape) encode() wire.Msg {
	m := wire.Msg(nil).Int(2, int64(s.typ))
	if s.isTuple() {
		for _, e := range s.elems {
			m = m.Bytes(4, e.encode())
		}
		return m
	}
	layout := make([]int64, len(s.dims))
	for i := range layout {
		layout[i] = int64(len(layout) - 1 - i)
	}
	dynamic := make([]int64, len(s.dims))
	return m.Packed(3, s.dims...).Packed(6, dynamic...).
		Bytes(5, wire.Msg(nil).Packed(1, layout...).Int(16, 1))
}

func elements(dims []int64) int64 {
	n := int64(1)
	for _, d := range dims {
		n *= d
	}
	return n
}
