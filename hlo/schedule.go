package hlo

import (
	"errors"
	"strconv"
	"strings"
	"sync"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/kernels/flash"
	"github.com/deepwell/deepwell/kernels/fused"
)

// A Computation is a list of instructions in the order in which the compiler scheduled them. One
// that is part of a fusion has no schedule and is in the order in which it is written.
type Computation struct {
	Name string
	Body []Instruction
	Root int // index into Body of the instruction whose result is the computation's
}

// An Instruction is one step of a scheduled program.
type Instruction struct {
	Name   string
	Opcode string
	OpName string // what the author of the program called it
	Target string // of a custom call
	Spec   string // of a kernel of our own: what it computes (package kernels/fused)

	// Operands are indices into the Body that the instruction is in.
	Operands []int
	Results  []Value // the arrays of the result; one unless it is a tuple
	Index    int     // of get-tuple-element: the element; of a parameter: its number

	// Calls are the computations that the instruction runs: the fused one, the body and the condition
	// of a loop, the branches of a conditional, what an async-start wraps. A loop runs its body Trips
	// times, or -1 if the compiler does not know.
	Calls []*Computation
	Trips int64

	// FLOPs counts the multiplications and additions of a matrix product or of attention, and of the
	// GEMMs inside a fusion. Attention with a causal mask counts the half that is not masked.
	FLOPs int64

	// Collectives are the tensors that the instruction sends, if it is a collective itself. Domain is
	// the stream that XLA:GPU assigned to it, "" for the common one.
	Collectives []Collective
	Domain      string
}

// A lazySchedule is made of the decoded program when it is asked for: few callers do.
type lazySchedule struct {
	once    sync.Once
	program *program
	entry   *Computation
	err     error
}

// Schedule gives the program as the compiler scheduled it, from its entry. Any error is a
// [*diag.Error] of code ProgramRead. The result is shared: do not change it.
func (m *Module) Schedule() (*Computation, error) {
	l := m.schedule
	if l == nil {
		return nil, diag.New(diag.ProgramRead, "the executable has no optimized program")
	}
	l.once.Do(func() {
		b := scheduler{program: l.program, made: map[*computation]*Computation{}}
		l.entry, l.err = b.computation(l.program.byID[l.program.entryID])
		l.program = nil
	})
	if l.err != nil {
		if e, ok := errors.AsType[*diag.Error](l.err); ok {
			return nil, e
		}
		return nil, diag.New(diag.ProgramRead, "optimized program: %s", l.err)
	}
	return l.entry, nil
}

// A scheduler makes each computation once, however many instructions call it. Read has found that
// they do not call themselves.
type scheduler struct {
	*program
	made map[*computation]*Computation
}

func (b *scheduler) computation(c *computation) (*Computation, error) {
	if b.made[c] != nil {
		return b.made[c], nil
	}
	out := &Computation{Name: c.name, Body: make([]Instruction, len(c.list)), Root: -1}
	b.made[c] = out
	at := make(map[*instruction]int, len(c.list))
	for n, i := range c.list {
		at[i] = n
	}
	for n, i := range c.list {
		if err := b.instruction(&out.Body[n], step{c, i}, at); err != nil {
			return nil, err
		}
		if key(i.id) == key(c.rootID) {
			out.Root = n
		}
	}
	return out, nil
}

func (b *scheduler) instruction(out *Instruction, s step, at map[*instruction]int) error {
	config := b.backendConfig(s.instruction)
	*out = Instruction{Name: s.name, Opcode: s.opcode, OpName: s.opName, Target: s.target,
		Index: int(s.index), Trips: 1, Domain: config.Collective.domain(), Spec: b.spec(s.instruction)}
	if s.opcode == "parameter" {
		out.Index = int(s.param)
	}
	operands, result, err := s.shapes()
	if err != nil {
		return err
	}
	for _, leaf := range result.flatten() {
		out.Results = append(out.Results, leaf.value())
	}
	for _, id := range s.operands {
		out.Operands = append(out.Operands, at[s.in.find(id)])
	}
	if s.opcode == "while" {
		n, known := b.tripCount(s.instruction)
		if out.Trips = n; !known {
			out.Trips = -1
		}
	}
	edges, err := b.calls(s.in, s.instruction)
	if err != nil {
		return err
	}
	out.FLOPs = flops(s.instruction, config, operands, result)
	for _, e := range edges {
		c, err := b.computation(e.to)
		if err != nil {
			return err
		}
		out.Calls = append(out.Calls, c)
		if s.opcode == "fusion" {
			for i := range c.Body {
				out.FLOPs = satAdd(out.FLOPs, c.Body[i].FLOPs)
			}
		}
	}
	out.Collectives, err = b.collectives(s)
	return err
}

// domain gives the stream of a collective: XLA:GPU names only those that are not common.
func (c collectiveConfig) domain() string {
	name := strings.TrimPrefix(string(c.Domain), "COLLECTIVE_COMMUNICATION_DOMAIN_")
	if name == "DEFAULT" || name == "INVALID" || name == "UNSPECIFIED" {
		return ""
	}
	return strings.ToLower(name)
}

// flops counts what a product or attention computes; 0 for any other instruction.
func flops(i *instruction, config backendConfig, operands []*shape, result *shape) int64 {
	if len(operands) < 2 {
		return 0
	}
	for result.isTuple() {
		if len(result.elems) == 0 {
			return 0
		}
		result = &result.elems[0] // the others are statistics and workspace
	}
	lhs := operands[0]
	switch {
	case i.opcode == "dot":
		return product(result, lhs, i.contracting)
	case i.opcode != "custom-call":
		return 0
	case config.Product != nil:
		return product(result, lhs, config.Product.Dims.Contracting.ints())
	case i.target == "__cudnn$blockScaledDot":
		return product(result, lhs, []int64{int64(len(lhs.dims)) - 1}) // [batch, rows, contracted]
	case config.Attention != nil:
		return config.Attention.flops(i.target, lhs)
	}
	return 0
}

// product counts a multiplication and an addition for each term of each element.
func product(result, lhs *shape, contracting []int64) int64 {
	n := satMul(2, elements(result.dims))
	for _, d := range contracting {
		if d >= 0 && d < int64(len(lhs.dims)) {
			n = satMul(n, max(lhs.dims[d], 0))
		}
	}
	return n
}

func elements(dims []int64) int64 {
	n := int64(1)
	for _, d := range dims {
		n = satMul(n, max(d, 0)) // an unbounded dimension is the least int64
	}
	return n
}

// flops counts the GEMMs of flash attention: QK^T and PV forward; backward QK^T again and the
// gradients dV, dP, dQ and dK. Each takes 2 × head dimension FLOPs for every score.
func (a *attentionConfig) flops(target string, query *shape) int64 {
	if len(query.dims) == 0 {
		return 0
	}
	head := query.dims[len(query.dims)-1]
	n := satMul(satMul(2, elements(a.Scores.Dims.ints())), max(head, 0))
	gemms := int64(2)
	if strings.Contains(target, "Backward") {
		gemms = 5
	}
	return a.seen(satMul(n, gemms))
}

// seen leaves out what a causal mask hides, as planners count it: half, and what is before a
// window. Documents, whose lengths the program does not say, hide nothing.
func (a *attentionConfig) seen(n int64) int64 {
	if !strings.HasSuffix(string(a.Mask), "CAUSAL") { // PADDING_CAUSAL is of packed documents
		return n
	}
	dims := a.Scores.Dims.ints()
	window, err := strconv.ParseInt(string(a.Window), 10, 64)
	if err != nil || window <= 0 || len(dims) == 0 || window >= dims[len(dims)-1] {
		return n / 2
	}
	keys := float64(dims[len(dims)-1])
	return int64(float64(n) * flash.MeanKeys(keys, float64(window)) / keys)
}

// A word is a name or a number in JSON, with or without quotes: proto3 quotes an int64, and writes
// an enum that it does not know as a number. It never makes a configuration unreadable.
type word string

// UnmarshalJSON takes anything.
func (w *word) UnmarshalJSON(text []byte) error {
	*w = word(strings.Trim(string(text), `"`))
	return nil
}

// A numbers is a list of whole numbers.
type numbers []word

func (n numbers) ints() []int64 {
	list := make([]int64, 0, len(n))
	for _, text := range n {
		if v, err := strconv.ParseInt(string(text), 10, 64); err == nil {
			list = append(list, v)
		}
	}
	return list
}

// spec is what a kernel of our own computes, by the configuration of its call.
func (p *program) spec(i *instruction) string {
	if i.target != Triton {
		return ""
	}
	config := i.config
	if n := i.payload - 1; n >= 0 && n < int64(len(p.payloads)) {
		config = p.payloads[n]
	}
	if found := fused.SpecsIn(string(config)); len(found) > 0 {
		return found[0]
	}
	return ""
}

// Triton is the target of calls whose kernel is Triton's text.
const Triton = "__gpu$xla.gpu.triton"
