package hlo

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
)

// A Module is an optimized program, as far as Deepwell looks into it. It does not change after
// Read and may be used by many goroutines.
type Module struct {
	Name string

	// Params are the parameters of the program in their order, Results its results in the order
	// in which PJRT returns them.
	Params  []Value
	Results []Value
	Aliases []Alias

	// NumReplicas and NumPartitions are 0 if the program does not say.
	NumReplicas   int64
	NumPartitions int64

	collectives []Collective
	calls       []CustomCall
	remat       []string
	schedule    *lazySchedule
}

// A Value is a parameter or a result.
type Value struct {
	// Shape has the type Invalid if Deepwell has no such element type; a token is such a value.
	Shape dtype.Shape
	Text  string // as HLO writes it, with its layout: bf16[8,128]{1,0}
	Bytes int64  // in memory; 0 for a token
	// Donor says of a parameter that its memory may be taken for any result, without an Alias.
	Donor bool
}

// An Alias says that a result takes over the memory of a parameter.
type Alias struct {
	Result int  // index into Results
	Param  int  // index into Params
	Must   bool // the caller has to donate the parameter; otherwise it may
}

// Read decodes an optimized program in one of PJRT's formats: "hlo_with_config", which today's
// plugins write, or "hlo". Any error is a [*diag.Error] of code ProgramRead.
func Read(format string, code []byte) (*Module, error) {
	m, err := read(format, code)
	if err == nil {
		return m, nil
	}
	if e, ok := errors.AsType[*diag.Error](err); ok {
		return nil, e
	}
	return nil, diag.New(diag.ProgramRead, "optimized program: %s", err).
		Try("check that the engine is one of `deepwell engine list`; if it is, please report this")
}

func read(format string, code []byte) (*Module, error) {
	var p *program
	var err error
	switch format {
	case "hlo":
		p, err = decodeModule(code)
	case "hlo_with_config":
		p, err = decodeWithConfig(code)
	default:
		return nil, diag.New(diag.ProgramRead, "optimized program: unknown format %q", format).
			Try("use an engine that returns hlo or hlo_with_config")
	}
	if err != nil {
		return nil, err
	}
	entry := p.byID[p.entryID]
	if entry == nil {
		return nil, fmt.Errorf("there is no entry computation")
	}
	m := &Module{Name: p.name, NumReplicas: p.replicas, NumPartitions: p.partitions}
	if err := m.setFace(p, entry); err != nil {
		return nil, err
	}
	steps, err := p.walk(entry)
	if err != nil {
		return nil, err
	}
	m.schedule = &lazySchedule{program: p}
	return m, m.setAccount(p, steps)
}

// setFace fills in what a caller of the program sees: parameters, results, donation.
func (m *Module) setFace(p *program, entry *computation) error {
	params, err := entry.params()
	if err != nil {
		return err
	}
	for _, i := range params {
		s, err := i.result()
		if err != nil {
			return err
		}
		m.Params = append(m.Params, s.value())
	}
	for _, n := range p.donors {
		if n < 0 || n >= int64(len(m.Params)) {
			return fmt.Errorf("parameter %d is donated, but there are %d", n, len(m.Params))
		}
		m.Params[n].Donor = true
	}
	root := entry.find(entry.rootID)
	if root == nil {
		return fmt.Errorf("the entry computation has no result")
	}
	result, err := root.result()
	if err != nil {
		return err
	}
	for _, s := range result.flatten() {
		m.Results = append(m.Results, s.value())
	}
	for _, a := range p.aliases {
		n, ok := result.leafAt(a.result)
		if !ok || a.param < 0 || a.param >= int64(len(m.Params)) {
			return fmt.Errorf("result %v is an alias of parameter %d; one of them is not there",
				a.result, a.param)
		}
		m.Aliases = append(m.Aliases, Alias{Result: n, Param: int(a.param), Must: a.must})
	}
	return nil
}

func (s *shape) value() Value {
	return Value{
		Shape: dtype.Shape{Type: primitives[s.typ].typ, Dims: s.dims},
		Text:  s.String(), Bytes: s.bytes,
	}
}

// setAccount fills in what the methods give out.
func (m *Module) setAccount(p *program, steps []step) error {
	for _, s := range steps {
		if strings.Contains(s.name, ".remat") {
			m.remat = append(m.remat, s.name)
		}
		rows, err := p.collectives(s)
		if err != nil {
			return err
		}
		m.collectives = append(m.collectives, rows...)
		if s.opcode == "custom-call" && s.target != AllocateBuffer {
			c, err := p.customCall(s)
			if err != nil {
				return err
			}
			m.calls = append(m.calls, c)
		}
	}
	settlePlans(m.calls)
	return nil
}

// Collectives lists every tensor that the program sends among devices, in the order of
// execution; what is in a loop stands once, with its count.
func (m *Module) Collectives() []Collective { return slices.Clone(m.collectives) }

// CustomCalls lists the calls of library kernels in the order of execution.
func (m *Module) CustomCalls() []CustomCall { return slices.Clone(m.calls) }

// Remat lists the instructions that XLA added to compute something a second time because it
// thought that memory would not suffice. Deepwell's plans decide on recomputation themselves, so
// any is an error of the plan or of the memory limit that the compiler was given.
func (m *Module) Remat() []string { return slices.Clone(m.remat) }
