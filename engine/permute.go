package engine

import (
	"context"
	"fmt"
	"strings"
	"sync"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/link"
	"github.com/deepwell/deepwell/program"
)

// PermuteModule returns the program that sends a shard from each device of one stage to a device of
// another, with a collective permute: from[i] sends to to[i]. Senders and receivers both run it.
// The receivers' arguments and the senders' results are ignored.
//
// Floats are sent as unsigned integers of their size: every backend then copies the bytes and
// changes no NaN.
func PermuteModule(shard dtype.Shape, from, to program.Devices) (*program.Module, error) {
	if len(from) != len(to) || len(from) == 0 {
		return nil, diag.New(diag.ProgramInvalid, "%d devices cannot send shards to %d", len(from),
			len(to)).Try("give both stages as many devices")
	}
	bits := shard.Type.Bits()
	if bits < 8 || bits > 64 {
		return nil, diag.New(diag.NotSupported, "elements of %d bits cannot be permuted", bits).
			Try("send them as bytes")
	}
	n := len(from)
	pairs := make([]string, n)
	for i := range n {
		pairs[i] = fmt.Sprintf("[%d, %d]", i, n+i)
	}
	outer, inner := shard.MLIR(), shard.MLIR()
	into, back := "", ""
	arg, result := "%x", "%y"
	if shard.Type.Kind() == dtype.Float {
		inner = dtype.Shape{Type: unsigned[bits], Dims: shard.Dims}.MLIR()
		into = fmt.Sprintf("    %%b = stablehlo.bitcast_convert %%x : (%s) -> %s\n", outer, inner)
		back = fmt.Sprintf("    %%r = stablehlo.bitcast_convert %%y : (%s) -> %s\n", inner, outer)
		arg, result = "%b", "%r"
	}
	text := fmt.Sprintf(`module @permute attributes {mhlo.num_replicas = %d : i32} {
  func.func @main(%%x: %[2]s) -> %[2]s {
%[3]s    %%y = "stablehlo.collective_permute"(%[4]s) {
      source_target_pairs = dense<[%[5]s]> : tensor<%[6]dx2xi64>
    } : (%[7]s) -> %[7]s
%[8]s    return %[9]s : %[2]s
  }
}
`, 2*n, outer, into, arg, strings.Join(pairs, ", "), n, inner, back, result)
	m := &program.Module{Name: "permute", Text: text,
		Devices: append(append(program.Devices{}, from...), to...),
		Args:    []program.Array{{Name: "sent", Global: shard}},
		Results: []program.Array{{Name: "received", Global: shard}}}
	return m, m.Validate()
}

// unsigned is the integer type of each float size, by bits.
var unsigned = map[int]dtype.DType{8: dtype.U8, 16: dtype.U16, 32: dtype.U32, 64: dtype.U64}

// Permute makes both ends of a link that runs [PermuteModule] on the devices of both stages. It is
// for clients of several processes, where each process uses the end of its own stage; if all
// devices belong to this process, both ends meet here.
//
// It was run on CPU devices of one client. For Blackwell it was compiled, and run neither on a GPU
// nor on a software GPU.
func (e *Engine) Permute(left, right program.Devices) (atLeft, atRight Link, err error) {
	if _, err := PermuteModule(dtype.Shape{Type: dtype.U8}, left, right); err != nil {
		return nil, nil, err
	}
	local := true
	for _, list := range []program.Devices{left, right} {
		for _, id := range list {
			if _, err := e.device(id); err != nil {
				local = false
			}
		}
	}
	p := &permuter{engine: e, local: local, programs: map[string]*permutation{}}
	p.shut = make(chan struct{})
	there := &meeting{p, left, right, make(chan parcel), make(chan error)}
	back := &meeting{p, right, left, make(chan parcel), make(chan error)}
	return &permuteLink{p, there, back}, &permuteLink{p, back, there}, nil
}

// A permuter is what both ends of a link share: its programs, by direction and shape.
type permuter struct {
	engine *Engine
	local  bool // all devices are of this process
	shut   chan struct{}
	once   sync.Once

	mu       sync.Mutex
	programs map[string]*permutation
	closed   bool
}

// A permutation is a compiled program and the argument of its receivers.
type permutation struct {
	x     *Executable
	blank *Array // zeros on the receivers; nil if they belong to another process
}

// A meeting is one direction of a link. If one process has both ends, the receiver runs the program
// for both, and the sender waits until it is started.
type meeting struct {
	*permuter
	from, to program.Devices
	parcels  chan parcel
	started  chan error
}

// program returns the permutation of a shape; the first call compiles it.
func (m *meeting) program(ctx context.Context, shard dtype.Shape) (*permutation, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, diag.New(diag.LinkLost, "the link was closed")
	}
	key := shard.String() + m.from.String() + ">" + m.to.String()
	if known := m.programs[key]; known != nil {
		return known, nil
	}
	module, err := PermuteModule(shard, m.from, m.to)
	if err != nil {
		return nil, err
	}
	x, err := m.engine.Compile(ctx, module)
	if err != nil {
		return nil, err
	}
	p := &permutation{x: x}
	if _, err := m.engine.device(m.to[0]); err == nil {
		receivers := &program.Module{Name: "blank", Devices: m.to}
		zero := make([]byte, shard.Bytes())
		p.blank, err = m.engine.Place(receivers, module.Args[0], Copied,
			func(int) ([]byte, error) { return zero, nil })
		if err != nil {
			x.Free()
			return nil, err
		}
	}
	m.programs[key] = p
	return p, nil
}

// run starts the program. sent has the shards of this process's senders; nil if it has none.
func (m *meeting) run(ctx context.Context, shard dtype.Shape, sent *Array) (*Array, error) {
	p, err := m.program(ctx, shard)
	if err != nil {
		return nil, err
	}
	arg := &Array{spec: p.x.module.Args[0], local: shard}
	if sent != nil {
		arg.parts = append(arg.parts, sent.parts...)
	}
	if p.blank != nil {
		arg.parts = append(arg.parts, p.blank.parts...)
	}
	r, err := p.x.Run(ctx, arg)
	if err != nil {
		return nil, err
	}
	defer r.run.Forget()
	got := r.Results[0]
	n := len(got.parts) // senders come first
	if p.blank != nil {
		n -= len(m.to)
	}
	senders := &Array{spec: got.spec, local: got.local, parts: got.parts[:n]} // zeros
	senders.Free()
	return &Array{spec: got.spec, local: got.local, parts: got.parts[n:]}, nil
}

type permuteLink struct {
	*permuter
	out, in *meeting
}

func (l *permuteLink) Rendezvous() bool { return true }

func (l *permuteLink) Send(ctx context.Context, tag string, a *Array) error {
	if !l.local {
		_, err := l.out.run(ctx, a.local, a)
		return err
	}
	select {
	case l.out.parcels <- parcel{tag, a}:
	case <-l.shut:
		return diag.New(diag.LinkLost, "the link was closed").At("%s", tag)
	case <-ctx.Done():
		return link.Stopped(ctx, "sending", tag)
	}
	return <-l.out.started // the receiver has the array and answers without waiting for anybody
}

func (l *permuteLink) Recv(ctx context.Context, tag string, m *program.Module,
	spec program.Array) (*Array, error) {
	local, err := m.Local(spec)
	if err != nil {
		return nil, err
	}
	if !l.local {
		return l.take(ctx, parcel{tag, nil}, tag, local, m, spec)
	}
	var p parcel
	select {
	case p = <-l.in.parcels:
	case <-l.shut:
		return nil, diag.New(diag.LinkLost, "the link was closed").At("%s", tag)
	case <-ctx.Done():
		return nil, link.Stopped(ctx, "receiving", tag)
	}
	// Check before running: the program of another shape would give the receivers an array that
	// they did not ask for.
	if p.tag != tag {
		err = diag.New(diag.LinkTag, "the other end sends %q; %q is expected", p.tag, tag)
	} else if !p.array.local.Equal(local) {
		err = diag.New(diag.LinkShape, "the other end sends shards of %s; %s is expected",
			p.array.local, local).At("%s", tag)
	}
	if err != nil {
		l.in.started <- err
		return nil, err
	}
	a, err := l.take(ctx, p, tag, local, m, spec)
	l.in.started <- err
	return a, err
}

// take runs the program for the receivers and checks the result.
func (l *permuteLink) take(ctx context.Context, p parcel, tag string, local dtype.Shape,
	m *program.Module, spec program.Array) (*Array, error) {
	got, err := l.in.run(ctx, local, p.array)
	if err != nil {
		return nil, err
	}
	if err := arrived(parcel{p.tag, got}, tag, m, spec); err != nil {
		got.Free()
		return nil, err
	}
	return got, nil
}

func (l *permuteLink) Close() error {
	l.once.Do(func() { close(l.shut) })
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for _, p := range l.programs {
		p.x.Free()
		if p.blank != nil {
			p.blank.Free()
		}
	}
	clear(l.programs)
	return nil
}
