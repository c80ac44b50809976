// Command deepwell takes a model to a trained checkpoint on NVIDIA Blackwell, and says what fits
// and how fast before a GPU is rented.
package main

import (
	"context"
	"os"

	"github.com/deepwell/deepwell"
	passes "github.com/deepwell/deepwell/call"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/isolate"
	"github.com/deepwell/deepwell/internal/malloc"
	"github.com/deepwell/deepwell/replay"
)

func main() {
	isolate.Main() // the same binary is the child that compiles
	replay.Main()  // and the one that replays
	if len(os.Args) == 2 && os.Args[1] == passes.Verb {
		_ = malloc.Exec() // as for train
		os.Exit(passes.Main(openCPU))
	}
	if len(os.Args) == 3 && os.Args[1] == passes.Verb && os.Args[2] == passes.GPU {
		os.Exit(passes.Main(openGPU))
	}
	endWithParent()
	if len(os.Args) > 1 && os.Args[1] == "train" {
		// Memory that stays made steps 1.4 to 1.6 times as fast (docs/decisions/0014-cpu-lowering.md);
		// without it a run only takes longer.
		_ = malloc.Exec()
	}
	ctx := untilSignal(context.Background(), os.Exit)
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr, os.Getenv))
}

// openCPU opens the engine that serves calls from Python.
func openCPU(ctx context.Context) (*engine.Engine, error) { return serving(ctx, "cpu") }

// openGPU is openCPU for modules on a GPU, most of whose memory is the caller's.
func openGPU(ctx context.Context) (*engine.Engine, error) { return serving(ctx, "cuda13") }

func serving(ctx context.Context, name string) (*engine.Engine, error) {
	env, err := deepwell.NewEnv(os.Getenv, event.Discard)
	if err != nil {
		return nil, err
	}
	return engine.Open(ctx, name, engine.Options{Dir: env.Engines, Cache: env.Cache,
		OnDemand: true})
}
