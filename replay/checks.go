package replay

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/wire"
)

// The GPU's runtime takes some numbers from configurations beside the HLO: how often a loop runs,
// where a slice begins in each iteration, how far the matrices of a batch are apart. A replay
// follows the HLO, so these numbers are compared with it here.

// checkStrides compares the strides of a GEMM's operands with their shapes: the elements of one
// matrix of a batch whose dimensions come first. XLA writes the product of the same dimensions
// where they do not, and then nobody reads it: how far matrices are apart follows from the layout
// (gemm_rewriter.cc, HandleDot; matmul_utils.cc, MatrixLayout::For).
func (w *writer) checkStrides(s *site, g gemmConfig) {
	d := g.Dims.dims()
	for k, stride := range []int64{int64(g.LHSStride), int64(g.RHSStride)} {
		dims := s.from[k].shape.dims
		n := elements(dims[min(len(d.batch[k]), len(dims)):])
		if stride != n {
			w.refuse(diag.ReplayConfig, "%s has a stride of %d for operand %d, whose matrices have %d "+
				"elements", s.target, stride, k, n)
		}
	}
	w.used["check of GEMM strides"]++
}

// A known is what a simulation knows of a value: the number of an integer scalar, or the elements
// of a tuple. The zero value is known to be nothing.
type known struct {
	is    bool
	n     int64
	elems []known
}

func is(n int64) known { return known{is: true, n: n} }

func truth(b bool) known {
	if b {
		return is(1)
	}
	return is(0)
}

// A simulation runs the integer scalars of a program: loop counters and the indices that follow
// from them.
type simulation struct {
	*rewriter
	loops []int64 // the iteration of each loop around the computation, the outermost first
	steps int
}

// Bounds of a simulation: iterations of one loop, and instructions of all. Loops over layers are
// far below them. A program beyond them is refused: the rest of it would not be checked.
const (
	maxTrips = 1 << 12
	maxSteps = 1 << 24
)

// checkLoops simulates the program.
func (r *rewriter) checkLoops() {
	s := &simulation{rewriter: r}
	s.run(r.src.entry, nil)
	r.at = ""
}

// run runs a computation on what is known of its arguments.
func (s *simulation) run(id int64, args []known) known {
	c := s.src.computations[id]
	if c == nil {
		s.refuseProgram("there is no computation %d", id)
	}
	have := make(map[int64]known, len(c.list))
	for _, i := range c.list {
		if s.steps++; s.steps > maxSteps {
			s.refuse(diag.ReplayConfig, "its loops take more than %d steps, and cannot be checked",
				maxSteps)
		}
		s.at = i.name
		operands := make([]known, len(i.operands))
		for k, id := range i.operands {
			operands[k] = have[id]
		}
		have[i.id] = s.value(i, operands, args)
		if i.opcode == "dynamic-slice" || i.opcode == "dynamic-update-slice" {
			s.checkSlice(c, i, operands)
		}
	}
	return have[c.rootID]
}

// value is what is known of an instruction's result.
func (s *simulation) value(i *instruction, operands, args []known) known {
	switch i.opcode {
	case "parameter":
		if i.param >= 0 && i.param < int64(len(args)) {
			return args[i.param]
		}
	case "constant":
		return knownLiteral(i)
	case "tuple":
		return known{elems: operands}
	case "get-tuple-element":
		if len(operands) == 1 && i.index >= 0 && i.index < int64(len(operands[0].elems)) {
			return operands[0].elems[i.index]
		}
	case "fusion", "call", "async-start":
		if len(i.called) == 1 {
			return s.run(i.called[0], operands)
		}
	case "while":
		return s.loop(i, operands)
	case "conditional":
		for k, id := range i.called {
			if k+1 < len(operands) {
				s.run(id, operands[k+1:k+2])
			}
		}
	case "async-done", "copy", "bitcast", "reshape", "convert":
		if len(operands) == 1 && (operands[0].is || operands[0].elems != nil) && i.isCount() {
			return operands[0]
		}
	default:
		if i.shape.typ == typeS32 || i.shape.typ == typePred {
			return arithmetic(i, operands)
		}
	}
	return known{}
}

// isCount says that an instruction's result is an integer scalar or a tuple.
func (i *instruction) isCount() bool {
	t := i.shape.typ
	return i.shape.isTuple() || elements(i.shape.dims) == 1 && (t == typeS32 || t == typeS64 ||
		t == typeU32 || t == typePred)
}

// arithmetic computes with s32 scalars.
func arithmetic(i *instruction, x []known) known {
	if slices.ContainsFunc(x, func(k known) bool { return !k.is }) || !i.isCount() {
		return known{}
	}
	wrap := func(n int64) known { return is(int64(int32(n))) }
	switch {
	case i.opcode == "select" && len(x) == 3:
		if x[0].n == 0 {
			return x[2]
		}
		return x[1]
	case i.opcode == "clamp" && len(x) == 3:
		return is(min(max(x[1].n, x[0].n), x[2].n))
	case i.opcode == "negate" && len(x) == 1:
		return wrap(-x[0].n)
	case len(x) != 2:
		return known{}
	}
	a, b := x[0].n, x[1].n
	switch i.opcode {
	case "add":
		return wrap(a + b)
	case "subtract":
		return wrap(a - b)
	case "multiply":
		return wrap(a * b)
	case "maximum":
		return is(max(a, b))
	case "minimum":
		return is(min(a, b))
	case "and":
		return is(a & b)
	case "or":
		return is(a | b)
	case "compare":
		return compareNumbers(i.direction(), a, b)
	}
	return known{}
}

// direction is the direction of a comparison: LT, EQ, ….
func (i *instruction) direction() (text string) {
	_ = wire.Into{63: &text}.Read(i.kept)
	return text
}

func compareNumbers(direction string, a, b int64) known {
	switch direction {
	case "LT":
		return truth(a < b)
	case "LE":
		return truth(a <= b)
	case "GT":
		return truth(a > b)
	case "GE":
		return truth(a >= b)
	case "EQ":
		return truth(a == b)
	case "NE":
		return truth(a != b)
	}
	return known{}
}

// knownLiteral reads an integer constant.
func knownLiteral(i *instruction) known {
	if i.shape.isTuple() || len(i.shape.dims) > 0 || !i.isCount() {
		return known{}
	}
	var n []int64
	// preds, s32s, s64s, u32s
	if (wire.Into{2: &n, 4: &n, 5: &n, 6: &n}).Read(i.literal) != nil || len(n) != 1 {
		return known{}
	}
	return is(n[0])
}

// A loopConfig is what XLA:GPU writes beside a loop. The runtime runs the body this number of times
// and does not ask the condition.
type loopConfig struct {
	Trips *struct {
		N number `json:"n"`
	} `json:"known_trip_count"`
	Variables []struct {
		Index number `json:"tuple_index"`
		Init  number `json:"init"`
		Step  number `json:"step"`
	} `json:"dynamic_variables"`
}

// loop runs a while loop until its condition is false, and compares what its configuration says.
func (s *simulation) loop(i *instruction, operands []known) known {
	if len(i.called) != 2 || len(operands) != 1 {
		return known{}
	}
	var config loopConfig
	if len(i.config) > 0 && json.Unmarshal(i.config, &config) != nil {
		s.refuse(diag.ReplayConfig, "the configuration of %s is not understood", i.name)
	}
	body, condition, state, trip := i.called[0], i.called[1], operands[0], int64(0)
	s.loops = append(s.loops, 0)
	defer func() { s.loops = s.loops[:len(s.loops)-1] }()
	for ; trip < maxTrips; trip++ {
		s.loops[len(s.loops)-1] = trip
		more := s.run(condition, []known{state})
		s.at = i.name
		if !more.is { // of a loop that runs until its data say so, nothing is known in its body
			if config.Trips != nil {
				s.refuse(diag.ReplayConfig, "%s runs %d times, which its condition does not show", i.name,
					config.Trips.N)
			}
			s.run(body, []known{{}})
			return known{}
		}
		if more.n == 0 {
			break
		}
		for _, v := range config.Variables {
			at := int(v.Index)
			if at < 0 || at >= len(state.elems) || !state.elems[at].is ||
				state.elems[at].n != int64(v.Init)+trip*int64(v.Step) {
				s.refuse(diag.ReplayConfig, "%s counts element %d from %d by %d; in iteration %d it is %s",
					i.name, at, v.Init, v.Step, trip, state.at(at))
			}
		}
		state = s.run(body, []known{state})
		s.at = i.name
	}
	if trip == maxTrips {
		s.refuse(diag.ReplayConfig, "%s runs more than %d times, and cannot be checked", i.name,
			maxTrips-1)
	}
	if config.Trips != nil && int64(config.Trips.N) != trip {
		s.refuse(diag.ReplayConfig, "%s runs %d times; its condition says %d", i.name, config.Trips.N,
			trip)
	}
	s.used["check of a trip count"]++
	return state
}

// at describes an element of a tuple.
func (k known) at(i int) string {
	if i < 0 || i >= len(k.elems) || !k.elems[i].is {
		return "not known"
	}
	return fmt.Sprint(k.elems[i].n)
}

// A sliceConfig is DynamicSliceConfig of XLA's backend_configs.proto: in iteration n of a loop, a
// slice begins at byte_offset + n · byte_stride. Loop 0 is the innermost.
type sliceConfig struct {
	Slice *struct {
		Loop   *number `json:"loop_index"`
		Offset number  `json:"byte_offset"`
		Stride number  `json:"byte_stride"`
		Linear *struct {
			Offset number `json:"byte_offset"`
			Stride number `json:"byte_stride"`
		} `json:"linear"`
	} `json:"dynamic_slice_config"`
}

// bytes are the first iteration's offset, and what each further one adds.
func (c *sliceConfig) bytes() (offset, stride int64) {
	if l := c.Slice.Linear; l != nil {
		return int64(l.Offset), int64(l.Stride)
	}
	return int64(c.Slice.Offset), int64(c.Slice.Stride)
}

// checkSlice compares the bytes at which the runtime reads or writes a slice with its indices.
func (s *simulation) checkSlice(c *computation, i *instruction, operands []known) {
	var config sliceConfig
	if len(i.config) == 0 {
		return
	}
	if json.Unmarshal(i.config, &config) != nil {
		s.refuse(diag.ReplayConfig, "the configuration of %s is not understood", i.name)
	}
	if config.Slice == nil {
		return
	}
	says, stride := config.bytes()
	if config.Slice.Loop != nil {
		at := len(s.loops) - 1 - int(*config.Slice.Loop)
		if at < 0 || at >= len(s.loops) {
			s.refuse(diag.ReplayConfig, "%s is in no loop %d", i.name, *config.Slice.Loop)
		}
		says += s.loops[at] * stride
	}
	begins, ok := s.sliceOffset(c, i, operands)
	if !ok {
		s.refuse(diag.ReplayConfig, "the indices of %s are not known, and its offset cannot be checked",
			i.name)
	}
	if begins != says {
		s.refuse(diag.ReplayConfig, "%s begins at byte %d in iteration %v; its configuration says %d",
			i.name, begins, s.loops, says)
	}
	s.used["check of a slice offset"]++
}

// sliceOffset is the byte at which a slice begins, by its indices.
func (s *simulation) sliceOffset(c *computation, i *instruction, operands []known) (int64, bool) {
	first := 1 // of the indices
	if i.opcode == "dynamic-update-slice" {
		first = 2
	}
	if len(operands) < first || len(i.operands) == 0 {
		return 0, false
	}
	source := c.find(i.operands[0])
	if source == nil || len(operands)-first != len(source.shape.dims) {
		return 0, false
	}
	offset, stride := int64(0), int64(1)
	for _, d := range source.shape.layout {
		index := operands[first+int(d)]
		if !index.is {
			return 0, false
		}
		offset += index.n * stride
		stride *= source.shape.dims[d]
	}
	return offset * source.shape.typ.bits() / 8, true
}
