package deepwell

import (
	"cmp"
	"context"
	"io"
	"slices"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/gpucheck"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/replay"
)

// A VerifyGPUJob is a check of what this host's GPUs compute.
type VerifyGPUJob struct {
	Seed    uint64        // of the inputs; 0 is 1
	Timeout time.Duration // what is left then is skipped; 0 means 5 minutes
	Out     string        // where the report goes; "" is nowhere
	// Progress, if there is one, hears of each check that is done.
	Progress func(gpucheck.Check)
}

const (
	usualVerifyTime = 5 * time.Minute
	// verifyPool is the most memory, in bytes, that a check takes of a GPU: XLA fills a table on the
	// host for the pool, 8 bytes for each 256.
	verifyPool = 32 << 30
)

// VerifyGPU compares what this host's GPUs compute with plain forms on CPU devices, and predicted
// times with measured ones. If something was refuted, there is a report beside the error.
func (e *Env) VerifyGPU(ctx context.Context, job VerifyGPUJob) (*gpucheck.Report, error) {
	v := e.begin(ctx, "verify")
	host := get(v, "examine the host", func() (*machine.Machine, error) { return hostWithGPUs(ctx) })
	if v.err != nil {
		return nil, v.err
	}
	seed := cmp.Or(job.Seed, usualSeed)
	least := host.GPUs[0].MemoryBytes
	for _, g := range host.GPUs {
		least = max(1, min(least, g.MemoryBytes))
	}
	runner := replay.NewRunner(replay.RunOptions{Child: e.Child, Environ: e.Environ,
		Engines: e.Engines, Cache: e.Cache, Seed: seed, Log: io.Discard, // of XLA; crashes have its end
		MemoryFraction: min(gpuPool, float32(verifyPool)/float32(least))})
	defer runner.Close()
	r := get(v, "run programs on the GPUs and on CPU devices", func() (*gpucheck.Report, error) {
		ctx, cancel := context.WithTimeout(ctx, cmp.Or(job.Timeout, usualVerifyTime))
		defer cancel()
		return gpucheck.Run(ctx, gpucheck.Options{Runner: runner, Machine: host, Seed: seed,
			Progress: job.Progress})
	})
	v.pass("write the report", func() error {
		if err := ctx.Err(); err != nil || job.Out == "" {
			return err
		}
		text, err := r.JSON()
		if err != nil {
			return err
		}
		return unwritten(atomicfile.Write(job.Out, text, 0o644), "the report", job.Out)
	})
	v.pass("judge", func() error {
		wrong := r.Wrong()
		ran := slices.ContainsFunc(r.Checks, func(c gpucheck.Check) bool {
			return c.Status == gpucheck.OK
		})
		if !ran && len(wrong) == 0 {
			return diag.New(diag.GPUDiffers, "none of %d checks ran to its end", len(r.Checks)).
				Because("%s", r.Checks[0].Note).Try("--timeout with more time")
		}
		if len(wrong) == 0 {
			return nil
		}
		return diag.New(diag.GPUDiffers, "%d of %d checks on %d × %s are wrong: %s, the first",
			len(wrong), len(r.Checks), r.Count, r.GPU, wrong[0].Name).Because("%s", cmp.Or(wrong[0].Note,
			"a GPU, a library or a convention that Deepwell trusts is not as it should be")).
			Try("--seed %d draws other inputs; if it stays, do not train on this host, and open an"+
				" issue with the report", seed+1)
	})
	return r, v.err
}
