package deepwell

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/isolate"
	"github.com/deepwell/deepwell/internal/selftest"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/program"
)

// Doctor examines everything that the other verbs need, by using it.
func (e *Env) Doctor(ctx context.Context) (*DoctorResult, error) {
	v := e.begin(ctx, "doctor")
	d := &DoctorResult{}
	checks, done := e.checks()
	defer done()
	for _, c := range checks {
		v.pass(c.name, func() error { d.add(ctx, c, e.Events); return ctx.Err() })
	}
	return d, v.err
}

// A DoctorResult is what doctor found, check by check.
type DoctorResult struct {
	Checks []event.Checked `json:"checks"`
	// Fix is the one thing to change: what the first failed check asks for.
	Fix string `json:"fix,omitempty"`
}

// Err is nil for a healthy machine, and else the error that ends the command.
func (d *DoctorResult) Err() error {
	failed := 0
	for _, c := range d.Checks {
		if !c.OK {
			failed++
		}
	}
	if failed == 0 {
		return nil
	}
	return diag.New(diag.DoctorFailed, "%d of %d checks failed", failed, len(d.Checks)).
		Try("%s", d.Fix)
}

// A checkup is one check of doctor: a name, and what finds out. A later check that rests on an
// earlier one fails with the same advice.
type checkup struct {
	name string
	run  func(ctx context.Context) (detail string, err error)
}

func (d *DoctorResult) add(ctx context.Context, c checkup, events event.Sink) {
	start := time.Now()
	detail, err := c.run(ctx)
	result := event.Checked{Name: c.name, OK: err == nil, Detail: detail}
	if err != nil {
		e := diag.From(err)
		result.Detail, result.Fix = string(e.Code)+" "+e.What, e.Fix
		if result.Fix == "" {
			result.Fix = "deepwell engine install " + engineOf(c.name)
		}
		if d.Fix == "" {
			d.Fix = result.Fix
		}
	} else {
		result.Detail += fmt.Sprintf("  (%.1f s)", time.Since(start).Seconds())
	}
	d.Checks = append(d.Checks, result)
	events.Emit(result)
}

func engineOf(check string) string {
	if check == "blackwell" || check == "cuda13" || check == "cudnn" {
		return "cuda13"
	}
	return "cpu"
}

// checkDevices is how many CPU devices the checks use, as many as a host of Blackwell has.
const checkDevices = 8

// checks are doctor's, in the order in which a fault in one explains the next; done ends the
// engine that they share.
func (e *Env) checks() (list []checkup, done func()) {
	var cpu *engine.Engine
	type onEngine func(context.Context, *engine.Engine) (string, error)
	onCPU := func(run onEngine) func(context.Context) (string, error) {
		return func(ctx context.Context) (string, error) {
			var err error
			if cpu == nil {
				cpu, err = engine.Open(ctx, "cpu", engine.Options{Dir: e.Engines,
					Environ: e.Environ, Devices: checkDevices})
			}
			if err != nil {
				return "", err
			}
			return run(ctx, cpu)
		}
	}
	done = func() {
		if cpu != nil {
			cpu.Close()
		}
	}
	return []checkup{
		{"cpu", e.installed("cpu")},
		{"cuda13", e.installed("cuda13")},
		{"driver", e.driver},
		{"cudnn", e.cudnn},
		{"collectives", onCPU(func(ctx context.Context, eng *engine.Engine) (string, error) {
			n, err := selftest.Collectives(ctx, eng, checkDevices)
			return fmt.Sprintf("%d programs right on %d CPU devices: f32, bf16, FP8 and FP4 bytes",
				n, checkDevices), err
		})},
		{"concurrency", onCPU(func(ctx context.Context, eng *engine.Engine) (string, error) {
			return "two programs at once, each on half of the devices, 50 runs each",
				selftest.Halves(ctx, eng, checkDevices, 50)
		})},
		{"go functions", onCPU(func(ctx context.Context, eng *engine.Engine) (string, error) {
			n, err := selftest.Handler(ctx, eng, checkDevices, 1000)
			return fmt.Sprintf("called %d times from programs on %d devices", n, checkDevices), err
		})},
		{"blackwell", e.blackwell},
	}, done
}

func (e *Env) installed(name string) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		b, err := engine.Verify(ctx, e.Engines, name)
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("%s verified, sha256 %.12s", b.Version, b.Digest), nil
	}
}

// driver compares the NVIDIA driver with what the CUDA engine needs. None at all is no fault:
// compiling needs none.
func (e *Env) driver(ctx context.Context) (string, error) {
	m, err := machine.Probe(ctx, machine.Options{})
	if err != nil {
		return "", err
	}
	if m.Driver == "" {
		return "none here: programs can be compiled for GPUs, not run on them", nil
	}
	return "NVIDIA driver " + m.Driver, machine.CheckDriver("cuda13", m.Driver)
}

// cudnn tells which version plans are made with, and how. The version is the pinned one, which the
// digest has proved: the plugin asks for at least 9.23, and 9.27.0 failed on a key it did not know.
func (e *Env) cudnn(ctx context.Context) (string, error) {
	b, err := engine.Verify(ctx, e.Engines, "cuda13")
	if err != nil {
		return "", err
	}
	how := "plans are made with the driver's libcuda"
	if b.Stub != "" {
		how = "plans are made without a driver, through a stand-in for libcuda"
	}
	return fmt.Sprintf("%s; %s", b.CuDNN, how), nil
}

// blackwell compiles the block-scaled product and attention for a host of eight B200.
func (e *Env) blackwell(ctx context.Context) (string, error) {
	cluster, err := machine.ParseCluster("8xb200")
	if err != nil {
		return "", err
	}
	c, err := isolate.Open(ctx, isolate.Options{Child: e.Child, Engines: e.Engines,
		Environ: e.Environ, Cluster: cluster})
	if err != nil {
		return "", err
	}
	defer c.Close()
	for _, stage := range []func(int) *program.Module{selftest.MXFP8, selftest.Attention} {
		r, err := c.Compile(ctx, stage(cluster.Count))
		if err != nil {
			return "", err
		}
		if err := planned(r); err != nil {
			return "", err
		}
	}
	return "MXFP8 product and attention compiled for 8 B200 with cuDNN plans, no GPU used", nil
}

// planned sees that every call of cuDNN in a report has its plan.
func planned(r *engine.Report) error {
	if len(r.CustomCalls) == 0 {
		return errors.New("the compiler replaced the call of cuDNN")
	}
	for _, c := range r.CustomCalls {
		if c.Plan == hlo.PlanMissing {
			return diag.New(diag.CompileFailed, "%s was compiled without a cuDNN plan", c.Target).
				Try("deepwell engine install cuda13")
		}
	}
	return nil
}
