package replay

import (
	"errors"
	"maps"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/wire"
)

// A Fill is what uninitialized memory holds in a replay. A program that reads none of it computes
// the same with every fill.
type Fill uint8

// The fills.
const (
	Zeros      Fill = iota
	NaNs            // integers are all ones
	RandomBits      // the same in every run
)

// Options of [Rewrite].
type Options struct {
	// Wide holds bf16 numbers as f32, and rounds them only where their bits are read. Parameters and
	// results change their type.
	Wide bool
	Fill Fill // of buffers that AllocateBuffer returns
}

// A Module is a program that the CPU engine runs.
type Module struct {
	Code []byte // a serialized HloModuleProto, PJRT's format "hlo"

	// Rules counts how many times each rule was used, by opcode or custom call target.
	Rules map[string]int
	// Conventions are the names of the rows of [Conventions] that these rules trust, sorted.
	Conventions []string
}

// Rewrite turns an optimized program, in one of the formats that [hlo.Read] reads, into plain HLO.
// Every error is a [*diag.Error]; what replay has no rule for is refused by name.
func Rewrite(format string, code []byte, o Options) (*Module, error) {
	return rewrite(format, code, o, nil)
}

// An edit changes an instruction before its rule is applied, or replaces it if it returns a value.
// Tests plant faults with it.
type edit func(*writer, *site) *value

func rewrite(format string, code []byte, o Options, e edit) (m *Module, err error) {
	src, err := decodeProgram(format, code)
	if err != nil {
		if _, ok := errors.AsType[*diag.Error](err); ok {
			return nil, err
		}
		return nil, diag.New(diag.ProgramRead, "optimized program: %s", err)
	}
	r := &rewriter{src: src, options: o, edit: e, rules: rules(), calls: calls(),
		written: map[int64]*written{}, reducers: map[reducer]int64{}, used: map[string]int{},
		trusted: map[string]bool{}}
	defer func() {
		switch fault := recover().(type) {
		case nil:
		case refusal:
			m, err = nil, fault.err
		default:
			panic(fault)
		}
	}()
	out := r.module()
	return &Module{Code: out, Rules: r.used,
		Conventions: slices.Sorted(maps.Keys(r.trusted))}, nil
}

// A rewriter is a program on its way to plain HLO.
type rewriter struct {
	src     *hloModule
	options Options
	edit    edit
	rules   map[string]rule
	calls   map[string]callRule

	next     int64 // the last instruction's number
	channels int64 // of collectives
	list     []wire.Msg
	written  map[int64]*written // by their numbers in src; nil while one is being written
	reducers map[reducer]int64
	used     map[string]int
	trusted  map[string]bool
	at       string // the instruction that is being rewritten, for errors
}

// A written computation is one of the rewritten program.
type written struct {
	id     int64
	name   string
	face   wire.Msg // ProgramShapeProto
	result *shape
}

// A reducer is a computation that combines two numbers.
type reducer struct {
	opcode string
	typ    elemType
}

// module rewrites all computations that the entry reaches.
func (r *rewriter) module() []byte {
	for _, i := range r.src.computations[r.src.entry].list {
		if i.opcode == "parameter" {
			r.checkFace(i.shape)
		}
	}
	entry := r.computation(r.src.entry)
	r.checkFace(r.src.computations[r.src.entry].root().shape)
	r.checkLoops()
	m := wire.Msg(nil).Text(1, r.src.name).Text(2, entry.name).Int(5, 1).Int(6, entry.id)
	for _, c := range r.list {
		m = m.Bytes(3, c)
	}
	return append(m.Bytes(4, entry.face), r.src.aliases...)
}

// checkFace refuses parameters and results whose bytes would differ from the GPU program's.
func (r *rewriter) checkFace(s *shape) {
	for _, e := range s.results() {
		if e.typ == typeE2M1 {
			r.refuseLayout("a parameter or result has elements of %s", e.typ)
		}
	}
}

func (c *computation) root() *instruction { return c.find(c.rootID) }

func (c *computation) find(id int64) *instruction {
	for _, i := range c.list {
		if i.id == id {
			return i
		}
	}
	return nil
}

// computation rewrites a computation, once.
func (r *rewriter) computation(id int64) *written {
	if done, ok := r.written[id]; ok {
		if done == nil {
			r.refuseProgram("computation %d calls itself", id)
		}
		return done
	}
	c := r.src.computations[id]
	if c == nil || c.root() == nil {
		r.refuseProgram("there is no computation %d, or it has no result", id)
	}
	r.written[id] = nil
	scope := &scope{src: map[int64]*instruction{}, values: map[int64]*value{},
		started: map[int64]*started{}}
	w := &writer{rewriter: r}
	var params []*value
	for _, i := range c.list {
		if scope.src[i.id] != nil {
			r.refuseProgram("two instructions of %s have number %d", c.name, i.id)
		}
		scope.src[i.id] = i
		v := w.instruction(scope, i)
		if scope.values[i.id] = v; v != nil && i.opcode == "parameter" {
			params = append(params, v)
		}
	}
	root := scope.values[c.rootID]
	if root == nil {
		r.refuseProgram("the result of %s is an operation that is not done", c.name)
	}
	lists.Sort(params, func(a, b *value) int { return int(a.param() - b.param()) })
	for i, p := range params {
		if p.param() != int64(i) {
			r.refuseProgram("%s has no parameter %d", c.name, i)
		}
	}
	r.written[id] = w.finish(c.name, params, root)
	return r.written[id]
}

// reducer gives the computation of a reduction that replay adds.
func (r *rewriter) reducer(opcode string, t elemType) int64 {
	key := reducer{opcode, t}
	if id, ok := r.reducers[key]; ok {
		return id
	}
	w := &writer{rewriter: r}
	a := w.add("parameter", exact(t), wire.Msg(nil).Int(9, 0))
	b := w.add("parameter", exact(t), wire.Msg(nil).Int(9, 1))
	done := w.finish(opcode, []*value{a, b}, w.elementwise(opcode, a, b))
	r.reducers[key] = done.id
	return done.id
}

// finish writes a computation. Instructions that the result does not need stay: a collective may be
// one of them.
func (w *writer) finish(name string, params []*value, root *value) *written {
	id := int64(len(w.rewriter.list) + 1)
	done := &written{id: id, name: name + suffix(id), result: root.shape}
	m := wire.Msg(nil).Text(1, done.name).Int(5, id).Int(6, root.id)
	for _, v := range w.list {
		m = m.Bytes(2, v.encode())
	}
	var face wire.Msg
	for i, p := range params {
		face = face.Bytes(1, p.shape.encode()).Text(3, "p"+suffix(int64(i)))
	}
	done.face = face.Bytes(2, root.shape.encode())
	w.rewriter.list = append(w.rewriter.list, m.Bytes(4, done.face))
	return done
}

// A refusal ends a rewrite; Rewrite recovers it.
type refusal struct{ err *diag.Error }

// refuse says what replay has no rule for.
func (r *rewriter) refuse(code diag.Code, format string, args ...any) {
	err := diag.New(code, format, args...)
	if r.at != "" {
		err = err.At("instruction %s of module %s", r.at, r.src.name)
	}
	panic(refusal{err})
}

func (r *rewriter) refuseProgram(format string, args ...any) {
	r.refuse(diag.ProgramRead, format, args...)
}

func (r *rewriter) refuseLayout(format string, args ...any) {
	r.refuse(diag.ReplayLayout, format, args...)
}
