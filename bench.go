package deepwell

import (
	"cmp"
	"context"
	"io"

	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/gpubench"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/price"
	"github.com/deepwell/deepwell/replay"
)

// A BenchJob asks for times of a layer's operations on this host's GPU.
type BenchJob struct {
	Kind      string // gemm, attention, layer or moe
	Source    string // a model
	Precision string // of GEMMs: bf16, mxfp8 or nvfp4; "" is bf16
	Seq       int64  // tokens; 0 is 2,048, or the model's context
	Torch     string // a Python with torch; "" measures without
}

// Bench measures the operations of a model's layer on the first GPU of this host.
func (e *Env) Bench(ctx context.Context, job BenchJob) (*gpubench.Report, error) {
	v := e.begin(ctx, "bench")
	o := gpubench.Options{Kind: job.Kind, Torch: job.Torch, Progress: e.benched}
	v.pass("read the model", func() error { return benchModel(job, &o) })
	host := get(v, "examine the host", func() (*machine.Machine, error) { return hostWithGPUs(ctx) })
	if v.err != nil {
		return nil, v.err
	}
	gpu := host.GPUs[0]
	o.Arch, o.Peak = gpu.Arch, devices{host.GPUs}.peak(1)
	if c, err := machine.ParseCluster("1x" + gpu.Model); err == nil {
		if profile, err := price.Find(price.Own); err == nil {
			o.Prices = price.New(c, profile)
		}
	}
	runner := replay.NewRunner(replay.RunOptions{Child: e.Child, Environ: e.Environ,
		Engines: e.Engines, Cache: e.Cache, Seed: usualSeed, Log: io.Discard, MemoryFraction: gpuPool})
	defer runner.Close()
	o.Timer = runner.Time
	v.pass("open the GPU", func() error {
		versions, _, err := runner.Describe(ctx)
		o.WithoutCuDNN = versions["without_cudnn"]
		return err
	})
	return get(v, "measure", func() (*gpubench.Report, error) {
		r, err := gpubench.Run(ctx, o)
		if r != nil {
			r.Model, r.GPU = job.Source, gpu.Model
		}
		return r, err
	}), v.err
}

// benched says how many operations are measured.
func (e *Env) benched(done, total int) {
	e.Events.Emit(event.Progress{Task: "measure", Done: int64(done), Total: int64(total),
		Unit: "operations"})
}

// benchModel reads the model, and what of it is measured.
func benchModel(job BenchJob, o *gpubench.Options) error {
	m, err := capture.Open(job.Source, capture.Options{})
	if err != nil {
		return err
	}
	defer func() { _ = m.Close() }()
	if m.Config == nil || m.Program != nil {
		return diag.New(diag.NotSupported, "bench measures models that have a configuration").
			At("%s", job.Source).Try("deepwell models lists them; or a folder with config.json")
	}
	if job.Kind == gpubench.MoE && m.Config.MoE == nil {
		return diag.New(diag.BadUsage, "%s has no experts", job.Source).
			Try("deepwell bench layer; or bench moe mixtral-8x7b")
	}
	o.Model, o.Seq = m.Config, cmp.Or(job.Seq, min(usualBenchSeq, m.Config.Context))
	switch f := dtype.Format(job.Precision); f {
	case "", dtype.FormatBF16:
	case dtype.MXFP8, dtype.NVFP4:
		o.Format = f
	default:
		return diag.New(diag.BadUsage, "bench knows no precision %q", job.Precision).At("--precision").
			Try("--precision bf16, mxfp8 or nvfp4")
	}
	return nil
}

// usualBenchSeq is how many tokens are measured if nobody says.
const usualBenchSeq = 2048
