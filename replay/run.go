package replay

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/isolate"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/program"
)

// RunOptions say where programs are compiled and replayed.
type RunOptions struct {
	// Child is the binary of the processes that compile and run; its main function begins with
	// [Main]. XLA ends its process where it cannot go on. "" compiles and runs in this process.
	Child string
	// Children is the number of processes; 0 means 1.
	Children int
	Environ  []string // of the children; nil is this process's
	Engines  string   // the folder of installed engines; "" is the user's
	Cache    string   // the folder of caches; "" compiles everything
	// WithoutCuDNN makes no cuDNN plans. They are no part of what is replayed.
	WithoutCuDNN bool
	Seed         uint64 // of the inputs
	// MemoryFraction is the share of a GPU's memory that programs on this host's GPUs get.
	MemoryFraction float32
	Log            io.Writer
}

// A Runner compiles programs for GPUs and replays them on CPU devices, in child processes.
// Several goroutines may use it; as many are served at the same time as it has children.
type Runner struct {
	o    RunOptions
	here *child               // without children
	idle chan *isolate.Worker // nil is one that was not started, or has crashed
}

// NewRunner makes a runner. Its children are started when they are needed.
func NewRunner(o RunOptions) *Runner {
	r := &Runner{o: o, idle: make(chan *isolate.Worker, max(1, o.Children))}
	if o.Child == "" {
		r = &Runner{o: o, here: newChild(), idle: make(chan *isolate.Worker, 1)}
	}
	for range cap(r.idle) {
		r.idle <- nil
	}
	return r
}

// Close ends the children. Everything that was asked for must be done.
func (r *Runner) Close() {
	for range cap(r.idle) {
		if w := <-r.idle; w != nil {
			w.Close()
		}
	}
}

// Optimized compiles a module for a cluster and gives the compiler's report, and the optimized
// program, for [Rewrite].
func (r *Runner) Optimized(ctx context.Context, m *program.Module, t machine.Cluster) (
	report *engine.Report, format string, code []byte, err error) {
	a, err := r.ask(ctx, m, &request{Compile: m,
		Cluster: fmt.Sprintf("%dx%s", t.Count, t.GPU.Name)})
	if err != nil {
		return nil, "", nil, err
	}
	return a.Report, a.Format, a.Code, nil
}

// Run runs the reference of a pair and rewritten programs of it on the same inputs, and compares
// all results, for each program. Wide says how the programs were rewritten.
func (r *Runner) Run(ctx context.Context, p Pair, wide bool, programs ...*Module) ([]*Result,
	error) {
	codes := make([][]byte, len(programs))
	for i, m := range programs {
		codes[i] = m.Code
	}
	a, err := r.ask(ctx, p.GPU, &request{Run: &order{Kind: p.Kind, Reference: p.Reference,
		Before: p.Before, Vocab: p.Vocab, Order: p.Order, Seed: r.o.Seed, Wide: wide, Codes: codes}})
	if err != nil {
		return nil, err
	}
	for _, one := range a.Results {
		one.weigh(p.GPU.Results, p.noise(wide))
	}
	return a.Results, nil
}

// ask waits for a child, starts it if need be, and lets it answer.
func (r *Runner) ask(ctx context.Context, m *program.Module, q *request) (a *answer, err error) {
	w := <-r.idle
	defer func() {
		// CUDA gives the error of a GPU to every later call of the process.
		failed := errors.Is(err, diag.DeviceFailed) || errors.Is(err, diag.CollectiveFailed)
		if w != nil && (failed || !w.Alive()) { // the next request gets a new one
			w.Close()
			w = nil
		}
		r.idle <- w
	}()
	q.Engines, q.Cache, q.WithoutCuDNN = r.o.Engines, r.o.Cache, r.o.WithoutCuDNN
	if q.Live != nil {
		q.Live.Fraction = r.o.MemoryFraction
	}
	if r.here != nil {
		return r.here.answer(q)
	}
	if w == nil {
		if w, err = isolate.OpenWorker(ctx, verb, isolate.Options{Child: r.o.Child,
			Environ: r.o.Environ, Log: r.o.Log}); err != nil {
			return nil, err
		}
	}
	a = &answer{}
	if err := w.Ask(ctx, "on module "+m.Name, q, a); err != nil {
		return nil, err
	}
	return a, nil
}
