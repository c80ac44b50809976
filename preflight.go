package deepwell

import (
	"context"
	"fmt"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/preflight"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/step"
)

// A PreflightJob is a look at the GPUs of one or several hosts before a run.
type PreflightJob struct {
	Size int64 // rows and columns of the matrices; 0 means 4096
	// Slow is the speed, relative to the others' or to the plan's, below which a GPU is slow; 0 means
	// 0.8.
	Slow float64
	// Plan is the file of the plan that rates are measured against; "" means no plan.
	Plan string
	// Peers, Self and KeyFile are as in [TrainJob]; they need a plan.
	Peers   []string
	Self    int
	KeyFile string
}

// Preflight examines GPUs: what the driver tells, a GEMM on each, a sum over all, and with a plan
// the speed of GEMMs and of sums along each axis against what the plan assumes. What is wrong with
// one is in the result, and ends in an error that counts the problems.
func (e *Env) Preflight(ctx context.Context, job PreflightJob) (*preflight.Result, error) {
	v := e.begin(ctx, "preflight")
	r := &runner{env: e, job: TrainJob{Plan: job.Plan, Peers: job.Peers, Self: job.Self,
		KeyFile: job.KeyFile}, recipe: &recipe.Recipe{}, program: &step.Programs{}}
	host := get(v, "examine the host", func() (*machine.Machine, error) { return hostWithGPUs(ctx) })
	v.pass("read the plan", func() (err error) {
		if job.Plan == "" && len(job.Peers) > 0 {
			return diag.New(diag.BadUsage, "--peers needs a plan").
				Try("deepwell preflight plan.json --peers ...")
		}
		if job.Plan == "" {
			return nil
		}
		if r.plan, err = readPlan(job.Plan); err != nil {
			return err
		}
		cluster, err := machine.ParseCluster(r.plan.Cluster)
		if err != nil {
			return at(err, job.Plan)
		}
		if cluster.CPU() {
			return diag.New(diag.PlanMisfit, "the plan is for CPU devices").At("%s", job.Plan).
				Try("deepwell plan ... --cluster 8xb200")
		}
		if err := r.takeGPUs(host, &cluster); err != nil {
			return err
		}
		host.GPUs = r.devices.gpus
		return nil
	})
	v.pass("open the engine", func() (err error) { return r.openForPreflight(ctx) })
	done := get(v, "multiply and sum on the GPUs", func() (*preflight.Result, error) {
		o := preflight.Options{Engine: r.engine, Machine: host, Size: job.Size, Slow: job.Slow,
			Now: time.Now, Plan: r.plan, Process: job.Self, Processes: len(job.Peers),
			Reread: hostWithGPUs}
		if r.store != nil {
			o.Store = r.store
		}
		return preflight.Run(ctx, o)
	})
	if v.err == nil && len(done.Problems) > 0 { // nothing is freed: a GPU may have failed
		r.failed = true
		v.err = diag.New(diag.PreflightFailed, "preflight finds %s",
			human.Count(len(done.Problems), "problem")).
			Try("mend it, or leave this host out, before a run starts")
	}
	r.close()
	return done, v.err
}

// openForPreflight opens all GPUs of the host, or a plan's, in one client with other processes if
// there are some.
func (r *runner) openForPreflight(ctx context.Context) (err error) {
	if r.plan != nil {
		return r.openEngine(ctx)
	}
	r.engine, err = engine.Open(ctx, gpuEngine, engine.Options{Dir: r.env.Engines,
		Cache: r.env.Cache, Environ: r.env.Environ, Events: r.env.Events, MemoryFraction: gpuPool})
	return err
}

// hostWithGPUs examines a host that must have GPUs that CUDA shows.
func hostWithGPUs(ctx context.Context) (*machine.Machine, error) {
	m, err := probeGPUs(ctx)
	if err != nil {
		return nil, err
	}
	if len(m.GPUs) == 0 {
		return nil, noGPU(m).Try("install NVIDIA's driver, or start the container with its GPUs")
	}
	return m, nil
}

// inspect warns of what the driver tells of a run's GPUs, before it starts. It uses none of them;
// preflight does.
func (r *runner) inspect(host *machine.Machine, gpus []machine.GPU) {
	m := *host
	m.GPUs = gpus
	var found preflight.Result
	preflight.Inspect(&found, preflight.Options{Machine: &m, Process: r.job.Self})
	for _, p := range found.Problems {
		where := "this host"
		if p.GPU >= 0 {
			where = fmt.Sprintf("GPU %d", p.GPU)
		}
		r.env.Events.Emit(event.Warning{Code: string(diag.PreflightFailed), Text: where + ": " + p.Text,
			Fix: p.Fix})
	}
}
