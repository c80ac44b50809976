package replay

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/wire"
)

// A site is an instruction while it is rewritten.
type site struct {
	*instruction
	values []*value       // its operands, rewritten
	from   []*instruction // its operands, as they were
	scope  *scope
}

// A scope is what is known of the computation that is being rewritten, by instruction numbers.
type scope struct {
	src     map[int64]*instruction
	values  map[int64]*value
	started map[int64]*started
}

// A started operation is one half of an asynchronous pair: its result is there for the other half
// only.
type started struct{ done func() *value }

// A rule rewrites instructions of one opcode.
type rule func(*writer, *site) *value

// moving are opcodes that move elements and compute nothing: they take codes too.
const moving = `parameter get-tuple-element tuple broadcast slice dynamic-slice
dynamic-update-slice concatenate transpose reshape copy reverse pad select while conditional`

// computing are opcodes that mean the same on every backend.
const computing = `add subtract multiply divide maximum minimum remainder power atan2 negate abs
sign exponential exponential-minus-one log log-plus-one logistic tanh sqrt rsqrt cbrt cosine sine
tan erf floor ceil round-nearest-even round-nearest-afz is-finite clamp and or xor not popcnt
count-leading-zeros shift-left shift-right-logical shift-right-arithmetic reduce reduce-window
reduce-precision iota gather scatter sort map select-and-scatter replica-id partition-id
after-all optimization-barrier`

// rules has a row for each opcode that replay knows.
func rules() map[string]rule {
	table := map[string]rule{
		"bitcast":           (*writer).bitcast,
		"bitcast-convert":   (*writer).bitcastConverted,
		"convert":           (*writer).converted,
		"dot":               (*writer).matmul,
		"compare":           (*writer).compared,
		"constant":          (*writer).literal,
		"fusion":            (*writer).called,
		"call":              (*writer).called,
		"custom-call":       (*writer).customCall,
		"rng-bit-generator": (*writer).randomBits,

		"async-start": (*writer).asyncStart, "async-done": (*writer).done,
		"copy-start": (*writer).copyStart, "copy-done": (*writer).done,

		"all-gather": (*writer).splitCollective, "reduce-scatter": (*writer).splitCollective,
		"all-reduce": (*writer).eachCollective, "collective-permute": (*writer).eachCollective,
		"collective-broadcast": (*writer).eachCollective, "all-to-all": (*writer).allToAll,
		"all-gather-start": (*writer).collectiveStart, "all-gather-done": (*writer).done,
		"all-reduce-start": (*writer).collectiveStart, "all-reduce-done": (*writer).done,
		"collective-permute-start": (*writer).collectiveStart,
		"collective-permute-done":  (*writer).done,
	}
	for opcode := range strings.FieldsSeq(moving) {
		table[opcode] = (*writer).copied
	}
	for opcode := range strings.FieldsSeq(computing) {
		table[opcode] = (*writer).computed
	}
	return table
}

// leastOperands are the operands that rules read without looking.
var leastOperands = map[string]int{"bitcast": 1, "bitcast-convert": 1, "convert": 1, "compare": 2,
	"copy-start": 1, "dot": 2}

// instruction rewrites one instruction. The result is nil for the first half of an asynchronous
// pair.
func (w *writer) instruction(in *scope, i *instruction) *value {
	w.at = i.name
	s := &site{instruction: i, scope: in}
	done := strings.HasSuffix(i.opcode, "-done")
	for _, id := range i.operands {
		v := in.values[id]
		if v == nil && !done {
			w.refuseProgram("an operand of %s is not there or not done", i.name)
		}
		s.values = append(s.values, v)
		s.from = append(s.from, in.src[id])
	}
	rewrite := w.rules[i.opcode]
	if rewrite == nil {
		w.refuse(diag.ReplayOpcode, "replay has no rule for the opcode %s", i.opcode)
	}
	if n := leastOperands[i.opcode]; len(i.operands) < n {
		w.refuseProgram("%s has %d operands, fewer than %d", i.name, len(i.operands), n)
	}
	if w.edit != nil {
		edited := *i
		s.instruction = &edited
		if v := w.edit(w, s); v != nil {
			return v
		}
	}
	w.used[i.opcode]++
	v := rewrite(w, s)
	w.at = i.name
	return v
}

// param is a parameter's number.
func (v *value) param() (n int64) {
	_ = wire.Into{9: &n}.Read(v.attrs)
	return n
}

// copied keeps an instruction, without its layout.
func (w *writer) copied(s *site) *value {
	attrs := slices.Clone(s.kept)
	switch s.opcode {
	case "parameter":
		attrs = attrs.Int(9, s.param)
	case "get-tuple-element":
		attrs = attrs.Int(13, s.index)
	}
	if len(s.dims) > 0 {
		attrs = attrs.Packed(14, s.dims...)
	}
	if len(s.sliceSizes) > 0 {
		attrs = attrs.Packed(20, s.sliceSizes...)
	}
	if s.algorithm != 0 {
		attrs = attrs.Int(70, s.algorithm)
	}
	v := w.add(s.opcode, w.held(s.shape), attrs, s.values...)
	v.called = w.callees(s)
	return v
}

// callees rewrites the computations that an instruction calls.
func (w *writer) callees(s *site) (list []int64) {
	at := w.at
	for _, id := range s.called {
		list = append(list, w.computation(id).id)
	}
	w.at = at
	return list
}

// computed keeps an instruction that reads numbers, which codes are not.
func (w *writer) computed(s *site) *value {
	for _, i := range append(s.from, s.instruction) {
		for _, e := range i.shape.results() {
			if elemRows[e.typ].codes {
				w.refuse(diag.ReplayOpcode, "replay has no rule for the opcode %s of %s", s.opcode, e.typ)
			}
		}
	}
	return w.copied(s)
}

// converted decodes codes; nothing is encoded to them, since rounding would be XLA's own.
func (w *writer) converted(s *site) *value {
	from, to := s.from[0].shape.typ, s.shape.typ
	if elemRows[to].codes && from != to {
		w.refuse(diag.ReplayOpcode, "replay has no rule for the opcode convert to %s", to)
	}
	if elemRows[from].codes && from != to {
		return w.convert(w.fromCodes(s.values[0], from), to)
	}
	return w.convert(s.values[0], to)
}

// compared keeps a comparison. Newer compilers give its order in a field of its own, which older
// ones do not read: floats have a partial order and integers a total one, if nothing says
// otherwise.
func (w *writer) compared(s *site) *value {
	v := w.computed(s)
	float := elemRows[s.from[0].shape.typ].float
	switch {
	case s.order == "" || s.order == "PARTIAL" && float || s.order == "TOTAL" && !float:
	case s.order == "TOTAL":
		v.attrs = v.attrs.Text(72, "TOTALORDER") // comparison_type
	default:
		w.refuse(diag.ReplayOpcode, "a comparison of %s in the order %s", s.from[0].shape.typ, s.order)
	}
	return v
}

// matmul rewrites a matrix product that XLA kept as an instruction.
func (w *writer) matmul(s *site) *value {
	var d dotDims
	err := wire.Into{1: &d.contracting[0], 2: &d.contracting[1], 3: &d.batch[0],
		4: &d.batch[1]}.Read(s.dot)
	if err != nil {
		w.refuseProgram("%s", err)
	}
	for _, t := range []elemType{s.from[0].shape.typ, s.from[1].shape.typ, s.shape.typ} {
		if row := elemRows[t]; !row.float || row.codes || t == typeF64 {
			w.refuse(diag.ReplayOpcode, "replay has no rule for the opcode dot of %s", t)
		}
	}
	return w.convert(w.dot(s.values[0], s.values[1], d), s.shape.typ)
}

// called calls the computation of a fusion.
func (w *writer) called(s *site) *value {
	if len(s.called) != 1 {
		w.refuseProgram("%s calls %d computations", s.name, len(s.called))
	}
	return w.callOf(s, s.called[0], s.values)
}

func (w *writer) callOf(s *site, id int64, args []*value) *value {
	at := w.at
	c := w.computation(id)
	w.at = at
	v := w.add("call", c.result, nil, args...)
	v.called = []int64{c.id}
	return v
}

// randomBits keeps generators whose algorithm is named: the default is the backend's own choice.
func (w *writer) randomBits(s *site) *value {
	if s.algorithm == 0 {
		w.refuse(diag.ReplayOpcode, "rng-bit-generator with the backend's default algorithm")
	}
	return w.copied(s)
}

// asyncStart remembers a call that its async-done makes.
func (w *writer) asyncStart(s *site) *value {
	if len(s.called) != 1 {
		w.refuseProgram("%s calls %d computations", s.name, len(s.called))
	}
	s.scope.started[s.id] = &started{func() *value { return w.callOf(s, s.called[0], s.values) }}
	return nil
}

// copyStart copies between memories, of which the replay has one.
func (w *writer) copyStart(s *site) *value {
	v := s.values[0]
	s.scope.started[s.id] = &started{func() *value { return v }}
	return nil
}

// done is the second half of an asynchronous pair.
func (w *writer) done(s *site) *value {
	var start *started
	if len(s.operands) == 1 {
		start = s.scope.started[s.operands[0]]
	}
	if start == nil {
		w.refuseProgram("%s awaits an operation that did not start in the same computation", s.name)
	}
	return start.done()
}

// literal keeps a constant. Elements in another order than the dimensions' are transposed.
func (w *writer) literal(s *site) *value {
	if s.shape.isTuple() || elemRows[s.shape.typ].codes || s.shape.typ == typeToken {
		w.refuseLayout("a constant has elements of %s", s.shape.typ)
	}
	w.held(s.shape)
	order := s.shape.physical()
	dims := make([]int64, len(order))
	for i, d := range order {
		dims[i] = s.shape.dims[d]
	}
	data, typ := w.literalData(s)
	return w.transpose(w.constant(typ, data, dims...), inverse(order)...)
}

// literalData gives the elements of a literal, and the type that they are held in.
func (w *writer) literalData(s *site) (data wire.Msg, typ elemType) {
	var err error
	for f := range wire.Fields(s.literal, &err) {
		switch {
		case f.Num == 1: // shape
			var at *shape
			if at, err = decodeShape(f.B, 0); err == nil && (!slices.Equal(at.dims, s.shape.dims) ||
				!slices.Equal(at.layout, s.shape.layout) || at.typ != s.shape.typ) {
				err = fmt.Errorf("the literal of %s has another shape", s.name)
			}
		case f.Num == 13 && w.hold(typeBF16) == typeF32: // bf16s: the upper halves of f32
			wide := make([]byte, 0, 2*len(f.B))
			for i := 0; i+1 < len(f.B); i += 2 {
				wide = append(wide, 0, 0, f.B[i], f.B[i+1])
			}
			data = data.Bytes(8, wide)
		default:
			data = append(data, f.Raw...)
		}
	}
	if err != nil {
		w.refuseProgram("%s", err)
	}
	return data, w.hold(s.shape.typ)
}

func suffix(n int64) string { return fmt.Sprintf(".%d", n) }
