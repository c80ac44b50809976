package preflight

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/selftest"
	"github.com/deepwell/deepwell/machine"
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
}

// A Result is what was found.
type Result struct {
	GPUs []GPU `json:"gpus"`
	// SumSeconds is the time of an all-reduce of a matrix over all GPUs, and SumBytes its size.
	SumSeconds float64   `json:"sum_seconds,omitempty"`
	SumBytes   int64     `json:"sum_bytes,omitempty"`
	Problems   []Problem `json:"problems"`
}

// A GPU is one device, with the best time of its GEMM.
type GPU struct {
	Number      int     `json:"number"`
	Name        string  `json:"name"`
	FreeBytes   int64   `json:"free_bytes"`
	TotalBytes  int64   `json:"total_bytes"`
	ECC         string  `json:"ecc,omitempty"`
	GEMMSeconds float64 `json:"gemm_seconds,omitempty"`
	// Speed is the time of the host's fastest GPU over this one's.
	Speed float64 `json:"speed,omitempty"`
}

// A Problem is a reason not to start a run, or to look first.
type Problem struct {
	GPU  int    `json:"gpu"` // -1 for the host
	Text string `json:"text"`
	Fix  string `json:"fix,omitempty"`
}

const (
	defaultSize = 4096
	defaultSlow = 0.8
	// free is the share of a GPU's memory that a run expects to find.
	free = 0.95
	// runs of each program are timed, after one that is not.
	runs = 9
)

// Run examines the GPUs. Only a context that ends, or a host whose engine does not work at all, is
// an error; what is wrong with a GPU is a problem.
func Run(ctx context.Context, o Options) (*Result, error) {
	o.Size, o.Slow = cmp.Or(o.Size, defaultSize), cmp.Or(o.Slow, defaultSlow)
	r := &Result{Problems: []Problem{}}
	r.describe(o.Machine, o.Engine)
	for i := range r.GPUs {
		if err := r.multiply(ctx, o, i); err != nil {
			return r, err
		}
	}
	r.compare(o.Slow)
	if len(r.GPUs) > 1 && len(r.Problems) == 0 { // a sum waits for the GPU that is broken
		if err := r.sum(ctx, o); err != nil {
			return r, err
		}
	}
	return r, ctx.Err()
}

// problem notes what is wrong with a GPU.
func (r *Result) problem(gpu int, fix, format string, args ...any) {
	r.Problems = append(r.Problems, Problem{GPU: gpu, Text: fmt.Sprintf(format, args...), Fix: fix})
}

// describe notes what the driver tells.
func (r *Result) describe(m *machine.Machine, e *engine.Engine) {
	if err := machine.CheckDriver(e.Name(), m.Driver); err != nil {
		bad := diag.From(err)
		r.problem(-1, bad.Fix, "%s", bad.What)
	}
	for i, g := range m.GPUs {
		r.GPUs = append(r.GPUs, GPU{Number: i, Name: g.Name, FreeBytes: g.FreeBytes,
			TotalBytes: g.MemoryBytes, ECC: g.ECC})
		if g.ECC == "off" {
			r.problem(i, "nvidia-smi -e 1, and a reboot", "ECC is off: flipped bits go unnoticed")
		}
		if g.MIG == "on" {
			r.problem(i, "nvidia-smi -mig 0", "it is split by MIG")
		}
		if float64(g.FreeBytes) < free*float64(g.MemoryBytes) {
			r.problem(i, "nvidia-smi shows which", "%s of %s are free: another process uses it",
				event.Size(g.FreeBytes), event.Size(g.MemoryBytes))
		}
		for _, l := range g.Links {
			if l.To == "down" {
				r.problem(i, "nvidia-smi nvlink -s", "%d of its NVLinks are down", l.Count)
			}
		}
		if g.Name != m.GPUs[0].Name {
			r.problem(i, "CUDA_VISIBLE_DEVICES with GPUs of one kind", "it is %s, and GPU 0 %s", g.Name,
				m.GPUs[0].Name)
		}
	}
}

// multiply times a GEMM of ones, and a kernel that squares its result, on one GPU and checks the
// numbers: each is the square of the matrix's size, which f32 has exactly up to 4096.
func (r *Result) multiply(ctx context.Context, o Options, gpu int) error {
	shape := dtype.Shape{Type: dtype.F32, Dims: []int64{o.Size, o.Size}}
	m := &program.Module{Name: "gemm", Devices: program.Devices{gpu}, Text: fmt.Sprintf(
		"module @gemm {\nfunc.func @main(%%x: %[1]s) -> %[1]s {\n%%r = stablehlo.dot_general %%x, %%x,"+
			" contracting_dims = [1] x [0] : (%[1]s, %[1]s) -> %[1]s\n"+
			"%%s = stablehlo.multiply %%r, %%r : %[1]s\nreturn %%s : %[1]s\n}\n}\n",
		shape.MLIR())}
	seconds, got, err := timed(ctx, o, m, shape)
	if err != nil {
		return r.failed(ctx, gpu, err)
	}
	want := float64(float32(o.Size) * float32(o.Size))
	if wrong := slices.IndexFunc(got, func(x float64) bool { return x != want }); wrong >= 0 {
		r.problem(gpu, "take it out of the cluster, and run its diagnostics (dcgmi diag -r 3)",
			"its GEMM gives %v where %v is right", got[wrong], want)
	}
	r.GPUs[gpu].GEMMSeconds = seconds
	return nil
}

// failed makes a problem of a GPU's error; only an ended context stays an error.
func (r *Result) failed(ctx context.Context, gpu int, err error) error {
	if ctx.Err() != nil {
		return err
	}
	e := diag.From(err)
	r.problem(gpu, cmp.Or(e.Fix, "look for Xid in the kernel's log, and at nvidia-smi -q"), "%s %s",
		e.Code, e.What)
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

// compare finds GPUs that are slower than the others of the host.
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
			r.problem(i, "look at its clocks, power and temperature: nvidia-smi -q -d"+
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
		return r.failed(ctx, -1, err)
	}
	if wrong := slices.IndexFunc(got, func(x float64) bool { return x != float64(n) }); wrong >= 0 {
		r.problem(-1, "NCCL_DEBUG=INFO deepwell preflight", "a sum over %d GPUs gives %v", n, got[wrong])
	}
	r.SumSeconds, r.SumBytes = seconds, shape.Bytes()
	return nil
}
