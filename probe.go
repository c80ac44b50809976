package deepwell

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/selftest"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/plugin"
	"github.com/deepwell/deepwell/program"
)

// Probe examines the host; measure also times it through the CPU engine.
func (e *Env) Probe(ctx context.Context, o machine.Options, measure bool) (*machine.Machine,
	error) {
	v := e.begin(ctx, "probe")
	o.Engines = get(v, "list engines", e.engines)
	if measure {
		o.Meter = e.meter
	}
	m := get(v, "examine the host", func() (*machine.Machine, error) { return machine.Probe(ctx, o) })
	return m, v.err
}

func (e *Env) engines() ([]machine.Engine, error) {
	all, err := plugin.List(e.Engines)
	if err != nil {
		return nil, err
	}
	return lists.Map(all, func(s plugin.Status) machine.Engine {
		return machine.Engine{Name: s.Name, Version: s.Version, Installed: s.Installed}
	}), nil
}

// meter times the host through the CPU engine: it is the facade that connects an engine to
// package machine, which knows none.
func (e *Env) meter(ctx context.Context) (machine.Measured, error) {
	devices := max(2, runtime.NumCPU())
	eng, err := engine.Open(ctx, "cpu", engine.Options{Dir: e.Engines,
		Environ: e.Environ, Devices: devices})
	if err != nil {
		return machine.Measured{}, err
	}
	defer eng.Close()
	major, minor := eng.PJRTVersion()
	m := machine.Measured{Devices: devices,
		Engine: fmt.Sprintf("%s (PJRT %d.%d)", eng.Name(), major, minor)}
	const (
		mat    = 1024     // a product of 1024 cubed is 2.1 GFLOP: 10 ms at 200 GFLOP/s
		vector = 16 << 20 // 64 MiB of f32, far beyond every cache
	)
	square := func(t dtype.DType) dtype.Shape { return dtype.Shape{Type: t, Dims: []int64{mat, mat}} }
	long := dtype.Shape{Type: dtype.F32, Dims: []int64{vector}}
	one := func(text string) *program.Module {
		return &program.FromText("measure", text, 1).Modules[0]
	}
	sum, err := selftest.Sum(long, program.Range(0, devices))
	if err != nil {
		return m, err
	}
	for _, row := range []struct {
		into   *int64
		stage  *program.Module
		shape  dtype.Shape
		amount int64
	}{
		{&m.MatmulF32, one(dotText(square(dtype.F32))), square(dtype.F32), 2 * mat * mat * mat},
		{&m.MatmulBF16, one(dotText(square(dtype.BF16))), square(dtype.BF16), 2 * mat * mat * mat},
		{&m.DeviceCopy, one(negateText(long)), long, 2 * long.Bytes()},
		{&m.AllReduce, sum, long, long.Bytes()},
	} {
		took, err := timeProgram(ctx, eng, row.stage, row.shape)
		if err != nil {
			return m, err
		}
		*row.into = perSecond(row.amount, took)
	}
	m.HostToDevice, m.DeviceToHost, err = timeCopies(ctx, eng, long)
	return m, err
}

func perSecond(amount int64, took time.Duration) int64 {
	return int64(float64(amount) / took.Seconds())
}

func dotText(s dtype.Shape) string {
	out := dtype.Shape{Type: dtype.F32, Dims: s.Dims}.MLIR()
	return fmt.Sprintf("module @dot {\nfunc.func @main(%%x: %[1]s) -> %[2]s {\n"+
		"%%r = stablehlo.dot_general %%x, %%x, contracting_dims = [1] x [1] : (%[1]s, %[1]s) -> %[2]s\n"+
		"return %%r : %[2]s\n}\n}\n", s.MLIR(), out)
}

func negateText(s dtype.Shape) string {
	return fmt.Sprintf("module @copy {\nfunc.func @main(%%x: %[1]s) -> %[1]s {\n"+
		"%%r = stablehlo.negate %%x : %[1]s\nreturn %%r : %[1]s\n}\n}\n", s.MLIR())
}

// timeProgram gives the best of some runs: noise only ever adds.
func timeProgram(ctx context.Context, eng *engine.Engine, stage *program.Module,
	shape dtype.Shape) (time.Duration, error) {
	x, err := eng.Compile(ctx, stage)
	if err != nil {
		return 0, err
	}
	defer x.Free()
	data := engine.Aligned(int(shape.Bytes()))
	arg, err := eng.Place(x.Module(), x.Module().Args[0], engine.Lent,
		func(int) ([]byte, error) { return data, nil })
	if err != nil {
		return 0, err
	}
	defer arg.Free()
	best := time.Hour
	for range 7 {
		start := time.Now()
		run, err := x.Run(ctx, arg)
		if err != nil {
			return 0, err
		}
		if err := run.Wait(ctx); err != nil {
			return 0, err
		}
		best = min(best, time.Since(start))
		run.Free()
	}
	return best, nil
}

func timeCopies(ctx context.Context, eng *engine.Engine, shape dtype.Shape) (to, from int64,
	err error) {
	stage := &program.Module{Name: "copy", Devices: program.Range(0, 1), Text: "-"}
	spec := program.Array{Name: "x", Global: shape}
	data, back := engine.Aligned(int(shape.Bytes())), engine.Aligned(int(shape.Bytes()))
	bestTo, bestFrom := time.Hour, time.Hour
	for range 5 {
		start := time.Now()
		a, err := eng.Place(stage, spec, engine.Copied, func(int) ([]byte, error) { return data, nil })
		if err != nil {
			return 0, 0, err
		}
		if err := a.Await(ctx); err != nil {
			return 0, 0, err
		}
		bestTo = min(bestTo, time.Since(start))
		start = time.Now()
		if err := a.ReadInto(ctx, 0, back); err != nil {
			return 0, 0, err
		}
		bestFrom = min(bestFrom, time.Since(start))
		a.Free()
	}
	return perSecond(shape.Bytes(), bestTo), perSecond(shape.Bytes(), bestFrom), nil
}
