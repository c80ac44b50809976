package replay

import (
	"context"
	"slices"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/isolate"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

// verb is the one argument of a child. It stands in no help: people have nothing to say to it.
const verb = "__replay"

// Main must come first in the main function, or in TestMain, of a program that makes a [Runner]. It
// returns unless the process was started as a child.
func Main() {
	isolate.Work(verb, newChild().answer)
}

// A request asks a child for one of its two duties.
type request struct {
	Engines, Cache, Cluster string
	WithoutCuDNN            bool
	Compile                 *program.Module // for the cluster, or
	Run                     *order
	Live                    *liveOrder // on the GPUs of this host, beside Run if it compares
}

// An order is a request to run programs and to compare their results.
type order struct {
	Kind      step.Kind
	Reference *program.Module
	Before    []Producer
	Vocab     int64
	Order     []int64
	Seed      uint64
	Wide      bool
	Codes     [][]byte // serialized HLO
}

// An answer has the optimized program, or a result for each code.
type answer struct {
	Report  *engine.Report
	Format  string
	Code    []byte
	Results []*Result
	Live    *liveAnswer
}

// A child has the engines that it needed so far.
type child struct {
	gpu  *engine.Compiler
	gpus *engine.Engine         // of this host
	cpu  map[int]*engine.Engine // by the number of devices
}

func newChild() *child { return &child{cpu: map[int]*engine.Engine{}} }

func (c *child) answer(q *request) (*answer, error) {
	ctx := context.Background()
	switch {
	case q.Compile != nil:
		return c.compile(ctx, q)
	case q.Live != nil:
		return c.live(ctx, q)
	}
	e, err := c.cpuEngine(ctx, q)
	if err != nil {
		return nil, err
	}
	results, err := (&job{order: q.Run, engine: e}).run(ctx)
	return &answer{Results: results}, err
}

// cpuEngine is the CPU engine with the devices of the order's reference.
func (c *child) cpuEngine(ctx context.Context, q *request) (e *engine.Engine, err error) {
	n := slices.Max(q.Run.Reference.Devices) + 1
	if c.cpu[n] == nil {
		c.cpu[n], err = engine.Open(ctx, "cpu", engine.Options{Dir: q.Engines, Cache: q.Cache,
			Devices: n})
	}
	return c.cpu[n], err
}

// compile compiles for the cluster.
func (c *child) compile(ctx context.Context, q *request) (*answer, error) {
	t, err := machine.ParseCluster(q.Cluster)
	if err != nil {
		return nil, err
	}
	if c.gpu == nil {
		if c.gpu, err = engine.OpenCompiler(ctx, engine.Options{Dir: q.Engines, Cache: q.Cache,
			WithoutCuDNN: q.WithoutCuDNN}); err != nil {
			return nil, err
		}
	}
	report, format, code, err := c.gpu.Optimized(ctx, q.Compile, t)
	return &answer{Report: report, Format: format, Code: code}, err
}

// A job is an order on its way.
type job struct {
	*order
	engine *engine.Engine
	inputs map[string][][]byte // of each argument, by device, in the programs' own types
	skips  []skip
	// compiled, if there is one, sees each program that was compiled.
	compiled func(*engine.Executable) error
}

// run compiles and runs the reference, and then each code on the same inputs.
func (j *job) run(ctx context.Context) ([]*Result, error) {
	want, r, err := j.reference(ctx)
	if err != nil {
		return nil, err
	}
	m := described(j.Reference, j.Wide)
	var list []*Result
	for _, code := range j.Codes {
		one := *r
		one.Module, one.Wide = m.Name, j.Wide
		got, err := j.outcomes(ctx, m, code, &one.Seconds.CompileReplay, &one.Seconds.RunReplay)
		if err != nil {
			return nil, err
		}
		j.compareAll(&one, m, got, want)
		list = append(list, &one)
	}
	return list, nil
}

// reference draws all inputs and gives what the reference makes of them.
func (j *job) reference(ctx context.Context) (want [][][][]byte, r *Result, err error) {
	j.inputs = map[string][][]byte{}
	for _, p := range j.Before {
		if err := j.produce(ctx, p); err != nil {
			return nil, nil, err
		}
	}
	if err := j.fill(j.Reference, j.Kind); err != nil {
		return nil, nil, err
	}
	if err := j.fillSkips(); err != nil {
		return nil, nil, err
	}
	r = &Result{}
	want, err = j.outcomes(ctx, described(j.Reference, j.Wide), nil, &r.Seconds.CompileReference,
		&r.Seconds.RunReference)
	return want, r, err
}

// compareAll compares the results of all runs.
func (j *job) compareAll(r *Result, m *program.Module, got, want [][][][]byte) {
	for i, a := range m.Results {
		d := compare(a.Name, a.Global.Type, got[0][i], want[0][i])
		d.Shape = j.Reference.Results[i].Global
		r.Arrays = append(r.Arrays, d)
	}
	r.Arrays = append(r.Arrays, j.compareSkips(m, got[1:], want[1:])...)
}

// produce runs a program that makes inputs, and keeps its results.
func (j *job) produce(ctx context.Context, p Producer) error {
	if err := j.fill(p.Module, p.Kind); err != nil {
		return err
	}
	m := described(p.Module, false)
	var seconds float64
	results, err := j.outcomes(ctx, m, nil, &seconds, &seconds)
	if err != nil {
		return err
	}
	for i, a := range m.Results {
		j.inputs[a.Name] = results[0][i]
	}
	return nil
}

// fill draws the arguments of a module that nothing before it made.
func (j *job) fill(m *program.Module, kind step.Kind) error {
	f := filler{module: m, kind: kind, seed: j.Seed, vocab: j.Vocab, order: j.Order,
		peaked: j.Kind == step.Evaluate}
	for _, a := range m.Args {
		if j.inputs[a.Name] != nil {
			continue
		}
		shards, err := f.shards(a)
		if err != nil {
			return err
		}
		j.inputs[a.Name] = shards
	}
	return nil
}

// outcomes compiles a module, from its text or else from HLO, runs it on the job's inputs, and then
// with each skip, and reads all results: by run, by result, by device.
func (j *job) outcomes(ctx context.Context, m *program.Module, code []byte, compiling,
	running *float64) ([][][][]byte, error) {
	start := time.Now()
	compile := func() (*engine.Executable, error) { return j.engine.Compile(ctx, m) }
	if code != nil {
		compile = func() (*engine.Executable, error) { return j.engine.CompileHLO(ctx, m, code) }
	}
	x, err := compile()
	if err != nil {
		return nil, err
	}
	defer x.Free()
	*compiling = time.Since(start).Seconds()
	if j.compiled != nil {
		if err := j.compiled(x); err != nil {
			return nil, err
		}
	}
	var all [][][][]byte
	for _, s := range append([]skip{{}}, j.skips...) {
		start = time.Now()
		results, err := j.execute(ctx, x, m, s)
		if err != nil {
			return nil, err
		}
		if all = append(all, results); len(all) == 1 {
			*running = time.Since(start).Seconds()
		}
	}
	return all, nil
}

// execute runs a module once.
func (j *job) execute(ctx context.Context, x *engine.Executable, m *program.Module, s skip) (
	[][][]byte, error) {
	args := make([]*engine.Array, len(m.Args))
	defer func() {
		for _, a := range args {
			if a != nil {
				a.Free()
			}
		}
	}()
	for i, a := range m.Args {
		shards := j.inputs[a.Name]
		if other := s.inputs[a.Name]; other != nil {
			shards = other
		}
		var err error
		if args[i], err = j.place(m, a, shards); err != nil {
			return nil, err
		}
	}
	run, err := x.Run(ctx, args...)
	if err != nil {
		return nil, err
	}
	defer run.Free()
	if err := run.Wait(ctx); err != nil {
		return nil, err
	}
	return read(ctx, run.Results)
}

// place puts an argument on the devices. In a wide program what was bf16 is f32.
func (j *job) place(m *program.Module, a program.Array, shards [][]byte) (*engine.Array, error) {
	local, err := m.Local(a)
	if err != nil {
		return nil, err
	}
	return j.engine.Place(m, a, engine.Copied, func(i int) ([]byte, error) {
		b := shards[i]
		if int64(len(b)) != local.Bytes() {
			b = widenBytes(b)
		}
		if int64(len(b)) != local.Bytes() {
			return nil, diag.New(diag.BufferMismatch, "%s has %d bytes on a device; %s takes %s", a.Name,
				len(b), m.Name, local)
		}
		return b, nil
	})
}

func read(ctx context.Context, results []*engine.Array) ([][][]byte, error) {
	var all [][][]byte
	for _, a := range results {
		var parts [][]byte
		for i := range a.Parts() {
			b, err := a.Read(ctx, i)
			if err != nil {
				return nil, err
			}
			parts = append(parts, b)
		}
		all = append(all, parts)
	}
	return all, nil
}
