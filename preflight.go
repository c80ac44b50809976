package deepwell

import (
	"context"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/preflight"
)

// A PreflightJob is a look at the host's GPUs before a run.
type PreflightJob struct {
	Size int64   // rows and columns of the matrices; 0 means 4096
	Slow float64 // speed, relative to the others', below which a GPU is slow; 0 means 0.8
}

// Preflight examines the host's GPUs: what the driver tells, a GEMM on each, a sum over all. What
// is wrong with one is in the result, and ends in an error that counts the problems.
func (e *Env) Preflight(ctx context.Context, job PreflightJob) (*preflight.Result, error) {
	v := e.begin(ctx, "preflight")
	host := get(v, "examine the host", func() (*machine.Machine, error) {
		m, err := machine.Probe(ctx, machine.Options{})
		if err == nil && len(m.GPUs) == 0 {
			err = diag.New(diag.GPUsMissing, "this host has no GPU").Because("%s", firstNote(m)).
				Try("deepwell doctor")
		}
		return m, err
	})
	eng := get(v, "open the engine", func() (*engine.Engine, error) {
		return engine.Open(ctx, gpuEngine, engine.Options{Dir: e.Engines, Cache: e.Cache,
			Environ: e.Environ, Events: e.Events, MemoryFraction: gpuPool})
	})
	r := get(v, "multiply and sum on the GPUs", func() (*preflight.Result, error) {
		return preflight.Run(ctx, preflight.Options{Engine: eng, Machine: host, Size: job.Size,
			Slow: job.Slow, Now: time.Now})
	})
	if v.err != nil {
		return r, v.err
	}
	if n := len(r.Problems); n > 0 { // the engine stays as it is: a GPU may have failed
		return r, diag.New(diag.PreflightFailed, "preflight finds %d of what a run should not meet", n).
			Try("mend it, or leave this host out, before a run starts")
	}
	eng.Close()
	return r, nil
}
