package replay

import (
	"context"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/firstuse"
	"github.com/deepwell/deepwell/internal/selftest"
	"github.com/deepwell/deepwell/program"
)

// A liveOrder asks a child for what only a host with GPUs can do; one of its fields is set.
type liveOrder struct {
	Run         *program.Module // on the inputs of the order beside it
	Time        *program.Module
	Vocab       int64  // of the tokens of Time
	Collectives string // the name of one, over all GPUs
	Kernel      string // of our own, by its specification
	Describe    bool
	Seed        uint64  // of the numbers that Kernel reads
	Fraction    float32 // of a GPU's memory
}

// A liveAnswer is what came of it.
type liveAnswer struct {
	Calls   []string // custom calls of the program that ran
	Seconds float64  // of a run
	Right   int      // programs of collectives that were right
	Apart   float64  // of a kernel from its plain form
	Facts   map[string]string
	Flags   map[string]string
}

// Live runs a pair's program on the GPUs of this host and its reference on CPU devices, with the
// same inputs, and compares all results at a bound.
func (r *Runner) Live(ctx context.Context, p Pair, b Bound) (*Outcome, error) {
	start := time.Now()
	a, err := r.ask(ctx, p.GPU, &request{Live: &liveOrder{Run: p.GPU}, Run: &order{Kind: p.Kind,
		Reference: p.Reference, Before: p.Before, Vocab: p.Vocab, Order: p.Order,
		Seed: r.o.Seed}})
	if err != nil {
		return nil, err
	}
	a.Results[0].weigh(p.GPU.Results, p.noise(false))
	out := &Outcome{Kind: p.Kind, Program: p.GPU.Name, Devices: len(p.GPU.Devices),
		Calls: a.Live.Calls, Replay: time.Since(start).Seconds(), Conventions: []string{}}
	out.judge(p, b, a.Results[0])
	return out, nil
}

// Time is the best of several times, in seconds, that a program takes on the GPUs of this host.
// Tokens are drawn from a vocabulary.
func (r *Runner) Time(ctx context.Context, m *program.Module, vocab int64) (float64, error) {
	a, err := r.ask(ctx, m, &request{Live: &liveOrder{Time: m, Vocab: vocab}})
	if err != nil {
		return 0, err
	}
	return a.Live.Seconds, nil
}

// Kernel runs a kernel of our own on a GPU of this host, on a small random matrix, and gives how
// far it is from its plain form ([firstuse.Compare]).
func (r *Runner) Kernel(ctx context.Context, spec string) (apart float64, err error) {
	a, err := r.ask(ctx, &program.Module{Name: "kernel"}, &request{
		Live: &liveOrder{Kernel: spec, Seed: r.o.Seed}})
	if err != nil {
		return 0, err
	}
	return a.Live.Apart, nil
}

// Collective runs one kind of collective over all GPUs of this host and over halves of them, on
// every type that it carries, and compares each element. It gives the number of programs.
func (r *Runner) Collective(ctx context.Context, name string) (int, error) {
	a, err := r.ask(ctx, &program.Module{Name: name}, &request{Live: &liveOrder{Collectives: name}})
	if err != nil {
		return 0, err
	}
	return a.Live.Right, nil
}

// Describe opens the GPUs of this host, and gives the versions of what runs on them and programs'
// flags ([engine.Engine.Versions], [engine.Engine.Flags]). The version "without_cudnn" is why
// cuDNN does not open, if it does not.
func (r *Runner) Describe(ctx context.Context) (versions, flags map[string]string, err error) {
	a, err := r.ask(ctx, &program.Module{Name: "none"}, &request{Live: &liveOrder{Describe: true}})
	if err != nil {
		return nil, nil, err
	}
	return a.Live.Facts, a.Live.Flags, nil
}

// live answers an order for GPUs.
func (c *child) live(ctx context.Context, q *request) (*answer, error) {
	if c.gpus == nil {
		var err error
		if c.gpus, err = engine.Open(ctx, "cuda13", engine.Options{Dir: q.Engines, Cache: q.Cache,
			MemoryFraction: q.Live.Fraction}); err != nil {
			return nil, err
		}
	}
	a := &answer{Live: &liveAnswer{}}
	var err error
	switch l := q.Live; {
	case l.Run != nil:
		a.Results, err = c.compareLive(ctx, q, a.Live)
	case l.Time != nil:
		a.Live.Seconds, err = timed(ctx, c.gpus, l.Time, l.Vocab)
	case l.Kernel != "":
		a.Live.Apart, err = firstuse.Compare(ctx, c.gpus, l.Kernel, l.Seed)
	case l.Collectives != "":
		a.Live.Right, err = selftest.Collectives(ctx, c.gpus, len(c.gpus.Devices()), l.Collectives)
	default:
		a.Live.Facts, a.Live.Flags = c.gpus.Versions(), c.gpus.Flags()
		if err := c.gpus.CheckCuDNN(); err != nil {
			e := diag.From(err)
			a.Live.Facts["without_cudnn"] = e.What + ": " + e.Cause
		}
	}
	return a, err
}

// compareLive runs the reference on CPU devices and the program on GPUs.
func (c *child) compareLive(ctx context.Context, q *request, a *liveAnswer) ([]*Result, error) {
	e, err := c.cpuEngine(ctx, q)
	if err != nil {
		return nil, err
	}
	j := &job{order: q.Run, engine: e}
	want, r, err := j.reference(ctx)
	if err != nil {
		return nil, err
	}
	calls := map[string]bool{}
	j.engine, j.compiled = c.gpus, func(x *engine.Executable) error {
		m, err := x.Optimized()
		if err != nil {
			return err
		}
		for _, one := range m.CustomCalls() {
			calls[one.Target] = true
		}
		return nil
	}
	got, err := j.outcomes(ctx, q.Live.Run, nil, &r.Seconds.CompileReplay, &r.Seconds.RunReplay)
	if err != nil {
		return nil, err
	}
	a.Calls = slices.Sorted(maps.Keys(calls))
	r.Module = q.Live.Run.Name
	j.compareAll(r, described(j.Reference, false), got, want)
	return []*Result{r}, nil
}

// timedRuns of a program are timed, after one that is not.
const timedRuns = 3

// timed is the best time of a program; noise only adds.
func timed(ctx context.Context, e *engine.Engine, m *program.Module, vocab int64) (best float64,
	err error) {
	x, err := e.Compile(ctx, m)
	if err != nil {
		return 0, err
	}
	defer x.Free()
	args := make([]*engine.Array, len(m.Args))
	defer func() {
		for _, a := range args {
			if a != nil {
				a.Free()
			}
		}
	}()
	for n := range timedRuns + 1 {
		for i, a := range m.Args {
			if args[i] != nil && args[i].Live() {
				continue
			}
			if args[i], err = e.Place(m, a, engine.Copied, func(device int) ([]byte, error) {
				return repeatedShard(m, a, device, vocab)
			}); err != nil {
				return 0, err
			}
		}
		for _, a := range args {
			if err := a.Await(ctx); err != nil {
				return 0, err
			}
		}
		start := time.Now()
		run, err := x.Run(ctx, args...)
		if err != nil {
			return 0, err
		}
		err = run.Wait(ctx)
		seconds := time.Since(start).Seconds()
		run.Free()
		if err != nil {
			return 0, err
		}
		if n == 1 || n > 1 && seconds < best {
			best = seconds
		}
	}
	return best, nil
}

// repeatedShard draws the first elements of an argument and repeats them: to draw billions takes
// minutes, and time does not depend on them.
func repeatedShard(m *program.Module, a program.Array, device int, vocab int64) ([]byte, error) {
	const drawn = 1 << 16
	f := filler{module: m, seed: 1, vocab: vocab}
	local, err := m.Local(a)
	if err != nil {
		return nil, err
	}
	if local.Elements() <= drawn || a.Role == program.Batch {
		return f.shard(a, device)
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(a.Name))
	number := f.numbers(a, rand.New(rand.NewPCG(f.seed, h.Sum64())))
	if number == nil {
		return nil, diag.New(diag.NotSupported, "no %s %s of role %q is drawn", local, a.Name, a.Role)
	}
	values := make([]float64, drawn)
	for i := range values {
		values[i] = number(int64(i))
	}
	part := encode(local.Type, values)
	out := make([]byte, local.Bytes())
	for at := 0; at < len(out); at += len(part) {
		copy(out[at:], part)
	}
	return out, nil
}
