package preflight

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/nvml"
	"github.com/deepwell/deepwell/internal/selftest"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
)

// Options say what is examined.
type Options struct {
	Engine  *engine.Engine // on the host's GPUs
	Machine *machine.Machine
	// Size is the number of rows and columns of the matrices that are multiplied, and of the matrix
	// that is summed; 0 means 4096, which takes a B200 0.1 ms.
	Size int64
	// Slow is the speed below which a GPU holds up all others; 0 means 0.8: clocks of healthy GPUs of
	// one host differ by a few per cent.
	Slow float64
	Now  event.Clock
	// Plan, if there is one, is what rates are measured against, on its cluster's GPUs.
	Plan *plan.Plan
	// Processes is the number of processes that share the engine's client, each on one host, Process
	// the number of this one, and Store is how they exchange what they found; a single process needs
	// none of them.
	Process, Processes int
	Store              engine.Store
	// Wait is how long another process may take for its part; 0 means 2 minutes.
	Wait time.Duration
	// Reread examines the GPUs once more, under load; nil is not at all.
	Reread func(context.Context) (*machine.Machine, error)
}

// A Result is what was found.
type Result struct {
	Driver   string            `json:"driver"`
	CUDA     string            `json:"cuda_of_driver"`
	Versions map[string]string `json:"versions"` // of plugin and libraries
	GPUs     []GPU             `json:"gpus"`     // of all processes
	// SumSeconds is the time of an all-reduce of a matrix over all GPUs, and SumBytes its size.
	SumSeconds float64 `json:"sum_seconds,omitempty"`
	SumBytes   int64   `json:"sum_bytes,omitempty"`
	// GEMM and Axes are measured against a plan.
	GEMM *Rate  `json:"gemm,omitempty"`
	Axes []Rate `json:"axes,omitempty"`
	// Xid says whether the driver reported errors.
	Xid      string    `json:"xid"`
	Problems []Problem `json:"problems"`
}

// A GPU is one device, with the best time of its GEMM.
type GPU struct {
	Process        int      `json:"process"`
	Number         int      `json:"number"` // in its process
	Name           string   `json:"name"`
	FreeBytes      int64    `json:"free_bytes"`
	TotalBytes     int64    `json:"total_bytes"`
	ECC            string   `json:"ecc,omitempty"`
	ECCUncorrected int64    `json:"ecc_uncorrected,omitempty"`
	Links          int      `json:"nvlinks,omitempty"`   // that are up
	ClockMHz       int      `json:"clock_mhz,omitempty"` // under load, where it could be read
	ClockMaxMHz    int      `json:"clock_max_mhz,omitempty"`
	TemperatureC   int      `json:"temperature_c,omitempty"`
	Throttled      []string `json:"throttled,omitempty"`
	GEMMSeconds    float64  `json:"gemm_seconds,omitempty"`
	// RateSeconds is the time of one bf16 GEMM as the plan's price has it; 0 without a plan.
	RateSeconds float64 `json:"rate_seconds,omitempty"`
	// Speed is the time of the fastest GPU over this one's.
	Speed float64 `json:"speed,omitempty"`
}

// A Rate is something measured against what a plan assumes.
type Rate struct {
	Name      string  `json:"name"` // bf16 GEMM, or the axis
	Size      int64   `json:"size"` // rows and columns, or GPUs of a group
	Bytes     int64   `json:"bytes,omitempty"`
	Predicted float64 `json:"predicted_seconds"`
	Measured  float64 `json:"measured_seconds"`
}

// Share is the share of the assumed speed that was measured.
func (r Rate) Share() float64 { return r.Predicted / r.Measured }

// A Problem is a reason not to start a run, or to look first.
type Problem struct {
	Process int    `json:"process"`
	GPU     int    `json:"gpu"` // -1 for the host, or for all GPUs
	Text    string `json:"text"`
	Fix     string `json:"fix,omitempty"`
}

const (
	defaultSize = 4096
	defaultSlow = 0.8
	defaultWait = 2 * time.Minute
	// free is the share of a GPU's memory that a run expects to find.
	free = 0.95
	// runs of each program are timed, after one that is not.
	runs = 9
)

// Run examines the GPUs. Only a context that ends, another process that does not answer, or a host
// whose engine does not work at all, is an error; what is wrong with a GPU is a problem.
func Run(ctx context.Context, o Options) (*Result, error) {
	o.Size, o.Slow = cmp.Or(o.Size, defaultSize), cmp.Or(o.Slow, defaultSlow)
	r := &Result{Problems: []Problem{}, Versions: o.Engine.Versions()}
	watch, err := nvml.WatchXid("")
	r.Xid = "none while it ran"
	if err != nil {
		r.Xid = "not available: the driver tells of no events; look into the kernel's log"
	} else {
		defer watch.Close()
	}
	Inspect(r, o)
	for i := range r.GPUs {
		if err := r.multiply(ctx, o, i); err != nil {
			return r, err
		}
		if err := r.rate(ctx, o, i); err != nil {
			return r, err
		}
	}
	r.reread(ctx, o)
	if watch != nil {
		r.xids(o, watch.Read())
	}
	if err := r.exchange(o); err != nil {
		return r, err
	}
	r.compare(o.Slow)
	broken := func(g GPU) bool { return g.GEMMSeconds == 0 } // a sum would wait for it
	if len(r.GPUs) > 1 && !slices.ContainsFunc(r.GPUs, broken) {
		if err := r.sum(ctx, o); err != nil {
			return r, err
		}
		if err := r.axes(ctx, o); err != nil {
			return r, err
		}
	}
	return r, ctx.Err()
}

// xids makes problems of the driver's errors.
func (r *Result) xids(o Options, list []nvml.Xid) {
	for _, x := range list {
		r.Xid = "some"
		r.problem(o.Process, x.GPU, "look at Xid in the kernel's log, and into NVIDIA's catalogue of Xid"+
			" errors", "the driver reported Xid %d", x.Number)
	}
}

// part is what one process found.
type part struct {
	GPUs     []GPU
	Problems []Problem
}

// exchange collects the GPUs and problems of all processes.
func (r *Result) exchange(o Options) error {
	if o.Processes < 2 {
		return nil
	}
	key := func(n int) string { return fmt.Sprintf("preflight/%d", n) }
	mine, err := json.Marshal(part{r.GPUs, r.Problems})
	if err != nil {
		return err
	}
	if err := o.Store.Put(key(o.Process), mine); err != nil {
		return err
	}
	r.GPUs, r.Problems = nil, []Problem{}
	for n := range o.Processes {
		text, err := o.Store.Get(key(n), cmp.Or(o.Wait, defaultWait))
		if err != nil {
			return diag.New(diag.LinkLost, "process %d does not tell what it found", n).Wrap(err)
		}
		var p part
		if err := json.Unmarshal(text, &p); err != nil {
			return diag.New(diag.PeersDiffer, "process %d tells what cannot be read", n).Wrap(err)
		}
		r.GPUs, r.Problems = append(r.GPUs, p.GPUs...), append(r.Problems, p.Problems...)
	}
	return nil
}

// problem notes what is wrong with a GPU.
func (r *Result) problem(process, gpu int, fix, format string, args ...any) {
	r.Problems = append(r.Problems, Problem{process, gpu, fmt.Sprintf(format, args...), fix})
}

// multiply times a GEMM of ones, and a kernel that squares its result, on one GPU and checks the
// numbers: each is the square of the matrix's size, which f32 has exactly up to 4096.
func (r *Result) multiply(ctx context.Context, o Options, gpu int) error {
	shape := dtype.Shape{Type: dtype.F32, Dims: []int64{o.Size, o.Size}}
	m := &program.Module{Name: "gemm", Devices: program.Devices{o.device(gpu)}, Text: fmt.Sprintf(
		"module @gemm {\nfunc.func @main(%%x: %[1]s) -> %[1]s {\n%%r = stablehlo.dot_general %%x, %%x,"+
			" contracting_dims = [1] x [0] : (%[1]s, %[1]s) -> %[1]s\n"+
			"%%s = stablehlo.multiply %%r, %%r : %[1]s\nreturn %%s : %[1]s\n}\n}\n",
		shape.MLIR())}
	seconds, got, err := timed(ctx, o, m, shape)
	if err != nil {
		return r.failed(ctx, o, gpu, err)
	}
	want := float64(float32(o.Size) * float32(o.Size))
	if wrong := slices.IndexFunc(got, func(x float64) bool { return x != want }); wrong >= 0 {
		r.problem(o.Process, gpu, "take it out of the cluster, and run its diagnostics (dcgmi diag -r 3)",
			"its GEMM gives %v where %v is right", got[wrong], want)
	}
	r.GPUs[gpu].GEMMSeconds = seconds
	return nil
}

// device is the number of one of this process's GPUs in the client.
func (o Options) device(gpu int) int {
	list := lists.Filter(o.Engine.Devices(), func(d engine.Device) bool { return d.Local })
	return list[gpu].ID
}

// failed makes a problem of a GPU's error; only an ended context stays an error.
func (r *Result) failed(ctx context.Context, o Options, gpu int, err error) error {
	if ctx.Err() != nil {
		return err
	}
	e := diag.From(err)
	const fix = "look for Xid in the kernel's log, and at nvidia-smi -q"
	r.problem(o.Process, gpu, cmp.Or(e.Fix, fix), "%s %s", e.Code, e.What)
	return nil
}

// timed runs a program on ones, and gives the best of its times, since noise only adds, and the
// numbers of its first result on its first device.
func timed(ctx context.Context, o Options, m *program.Module, shape dtype.Shape) (float64,
	[]float64, error) {
	x, err := o.Engine.Compile(ctx, m)
	if err != nil {
		return 0, nil, err
	}
	defer x.Free()
	m = x.Module()
	ones := shape.Type.Append(nil, slices.Repeat([]float64{1}, int(shape.Elements()))...)
	arg, err := o.Engine.Place(m, m.Args[0], engine.Copied,
		func(int) ([]byte, error) { return ones, nil })
	if err != nil {
		return 0, nil, err
	}
	defer arg.Free()
	var times []float64
	var bytes []byte
	for i := range runs + 1 {
		began := o.Now()
		run, err := x.Run(ctx, arg)
		if err != nil {
			return 0, nil, err
		}
		err = run.Wait(ctx)
		times = append(times, o.Now().Sub(began).Seconds())
		if err == nil && i == runs {
			bytes, err = run.Results[0].Read(ctx, 0)
		}
		run.Free()
		if err != nil {
			return 0, nil, err
		}
	}
	numbers := make([]float32, shape.Elements())
	shape.Type.Decode(numbers, bytes)
	wide := lists.Map(numbers, func(x float32) float64 { return float64(x) })
	return slices.Min(times[1:]), wide, nil
}

// compare finds GPUs that are slower than the others of all hosts.
func (r *Result) compare(slow float64) {
	var times []float64
	for _, g := range r.GPUs {
		if g.GEMMSeconds > 0 {
			times = append(times, g.GEMMSeconds)
		}
	}
	if len(times) == 0 {
		return
	}
	best := slices.Min(times)
	for i := range r.GPUs {
		g := &r.GPUs[i]
		if g.GEMMSeconds == 0 {
			continue
		}
		if g.Speed = best / g.GEMMSeconds; g.Speed < slow {
			r.problem(g.Process, g.Number, "look at its clocks, power and temperature: nvidia-smi -q -d"+
				" CLOCK,POWER,TEMPERATURE",
				"it is slow: its GEMM takes %.2f times as long as the fastest GPU's", 1/g.Speed)
		}
	}
}

// sum times an all-reduce over all GPUs and checks its numbers.
func (r *Result) sum(ctx context.Context, o Options) error {
	shape := dtype.Shape{Type: dtype.F32, Dims: []int64{o.Size, o.Size}}
	n := len(r.GPUs)
	m, err := selftest.Sum(shape, program.Range(0, n))
	if err != nil {
		return err
	}
	seconds, got, err := timed(ctx, o, m, shape)
	if err != nil {
		return r.failed(ctx, o, -1, err)
	}
	if wrong := slices.IndexFunc(got, func(x float64) bool { return x != float64(n) }); wrong >= 0 {
		r.problem(o.Process, -1, "NCCL_DEBUG=INFO deepwell preflight", "a sum over %d GPUs gives %v", n,
			got[wrong])
	}
	r.SumSeconds, r.SumBytes = seconds, shape.Bytes()
	return nil
}
