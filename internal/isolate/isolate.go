package isolate

import (
	"cmp"
	"context"
	"io"
	"os"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/program"
)

// Self is the path of the running binary, whatever became of its file.
const Self = "/proc/self/exe"

// Options say what is compiled for, and where.
type Options struct {
	// Child is the deepwell binary that compiles, or Self in a program whose main begins with Main;
	// "" compiles in this process, which a crash of the compiler then ends.
	Child string
	// Engines is the folder of installed engines.
	Engines string
	// Cluster is compiled for; devices of the CPU are made here.
	Cluster machine.Cluster
	// Cache is the folder of caches; "" compiles everything.
	Cache string
	// WithoutCuDNN makes no cuDNN plans.
	WithoutCuDNN bool
	// Ahead keeps executables in the cache, for runs on such GPUs.
	Ahead bool
	// Environ is the environment as the compiler reads it; nil means this process's.
	Environ []string
	// Events hears of every module that was compiled; nil is nobody.
	Events event.Sink
	// Log takes what the compiler logs in a child; nil is os.Stderr, where it logs in this process.
	Log io.Writer
}

// A Compiler compiles modules for a cluster, one after the other.
type Compiler struct {
	compile func(context.Context, *program.Module) (*engine.Report, error)
	done    func()
}

// Open loads the compiler for the cluster.
func Open(ctx context.Context, o Options) (*Compiler, error) {
	o.Events, o.Log = cmp.Or(o.Events, event.Discard), cmp.Or[io.Writer](o.Log, os.Stderr)
	if o.Child != "" {
		return openChild(ctx, o)
	}
	return openHere(ctx, o)
}

// Compile compiles one module and says what came of it.
func (c *Compiler) Compile(ctx context.Context, m *program.Module) (*engine.Report, error) {
	return c.compile(ctx, m)
}

// Close ends the compiler.
func (c *Compiler) Close() { c.done() }

// openHere loads the compiler into this process: XLA for the described target, or the CPU engine
// if the cluster is made of the local processor.
func openHere(ctx context.Context, o Options) (*Compiler, error) {
	t := o.Cluster
	open := engine.Options{Dir: o.Engines, Cache: o.Cache, Environ: o.Environ, Events: o.Events,
		WithoutCuDNN: o.WithoutCuDNN, Ahead: o.Ahead}
	if !t.CPU() {
		gpu, err := engine.OpenCompiler(ctx, open)
		if err != nil {
			return nil, err
		}
		compile := func(ctx context.Context, m *program.Module) (*engine.Report, error) {
			return gpu.Compile(ctx, m, t)
		}
		return &Compiler{compile, gpu.Close}, nil
	}
	open.Devices = o.Cluster.Count
	cpu, err := engine.Open(ctx, "cpu", open)
	if err != nil {
		return nil, err
	}
	compile := func(ctx context.Context, m *program.Module) (*engine.Report, error) {
		x, err := cpu.Compile(ctx, m)
		if err != nil {
			return nil, err
		}
		defer x.Free()
		return x.Report()
	}
	return &Compiler{compile, cpu.Close}, nil
}
