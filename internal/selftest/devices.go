package selftest

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/program"
)

// vectorLen is the length of the vectors of f32 that the checks below work on.
const vectorLen = 64

// filled gives each device of a module a vector of a number of its own.
func filled(e *engine.Engine, m *program.Module, value func(device int) float64) (*engine.Array,
	error) {
	return e.Place(m, m.Args[0], engine.Copied, func(d int) ([]byte, error) {
		return dtype.F32.Append(nil, slices.Repeat([]float64{value(d)}, vectorLen)...), nil
	})
}

// expect runs a program and sees that every element of a device's result is the number wanted.
func expect(ctx context.Context, x *engine.Executable, arg *engine.Array, devices []int,
	want func(device int) float64) error {
	run, err := x.Run(ctx, arg)
	if err != nil {
		return err
	}
	defer run.Free()
	if err := run.Wait(ctx); err != nil {
		return err
	}
	for _, d := range devices {
		b, err := run.Results[0].Read(ctx, d)
		if err != nil {
			return err
		}
		for _, got := range dtype.F32.Values(b) {
			if got != want(d) {
				return diag.New(diag.RuntimeFailed, "device %d of %s got %v, want %v", d,
					x.Module().Devices, got, want(d))
			}
		}
	}
	return nil
}

// Sum is a program that adds up what each of the devices has.
func Sum(shape dtype.Shape, devices program.Devices) (*program.Module, error) {
	t := ir.Type{Elem: shape.Type, Place: ir.Placement{{Axis: "all", Dim: ir.Partial}}}
	for i, n := range shape.Dims {
		t.Dims = append(t.Dims, ir.Dim{Name: fmt.Sprintf("d%d", i), Size: n})
	}
	b := ir.NewBuilder("sum", ir.Axis{Name: "all", Size: int64(len(devices))})
	g, err := b.Graph(b.AllReduce(b.Input("x", ir.Data, t, ""), "all"))
	if err != nil {
		return nil, err
	}
	m, err := lower.Module("sum", g, lower.Options{})
	if err == nil {
		m.Devices = devices
	}
	return m, err
}

// Halves runs two executables at the same time, each a sum over its own half of the devices, and
// sees that neither disturbs the other.
func Halves(ctx context.Context, e *engine.Engine, devices, rounds int) error {
	half := devices / 2
	errs := make([]error, 2)
	var wg sync.WaitGroup
	for h := range 2 {
		wg.Go(func() { errs[h] = sumOn(ctx, e, program.Range(h*half, half), float64(h+1), rounds) })
	}
	wg.Wait()
	return cmp.Or(errs...) // the first
}

func sumOn(ctx context.Context, e *engine.Engine, devices program.Devices, value float64,
	rounds int) error {
	module, err := Sum(dtype.Shape{Type: dtype.F32, Dims: []int64{vectorLen}}, devices)
	if err != nil {
		return err
	}
	x, err := e.Compile(ctx, module)
	if err != nil {
		return err
	}
	defer x.Free()
	arg, err := filled(e, x.Module(), func(int) float64 { return value })
	if err != nil {
		return err
	}
	defer arg.Free()
	n := len(devices)
	for range rounds {
		err := expect(ctx, x, arg, []int{n - 1}, func(int) float64 { return value * float64(n) })
		if err != nil {
			return err
		}
	}
	return nil
}

// handlerName is the custom call that Handler registers; a name can be registered once.
const handlerName = "deepwell.check.scale"

// handled counts the calls that the registered function has had in this process.
var handled struct {
	once  sync.Once
	err   error
	calls atomic.Int64
}

// scale multiplies by the factor that the program gives as an attribute.
func scale(c *engine.Call) error {
	handled.calls.Add(1)
	factor, ok := c.Attrs["factor"].(float32)
	if len(c.Args) != 1 || len(c.Results) != 1 || !ok {
		return diag.New(diag.HandlerFailed, "want one argument, one result and a factor")
	}
	var v [vectorLen]float32
	dtype.F32.Decode(v[:], c.Args[0].Data)
	for i := range v {
		v[i] *= factor
	}
	dtype.F32.Encode(c.Results[0].Data, v[:])
	return nil
}

// Handler runs a program on all devices that calls a Go function, until the function has been
// called at least the given number of times. It returns how often it was.
func Handler(ctx context.Context, e *engine.Engine, devices, calls int) (int64, error) {
	handled.once.Do(func() { handled.err = e.Register(handlerName, scale) })
	if handled.err != nil {
		return 0, handled.err
	}
	shape := dtype.Shape{Type: dtype.F32, Dims: []int64{vectorLen}}.MLIR()
	text := fmt.Sprintf("module @handler attributes {mhlo.num_replicas = %d : i32} {\n"+
		"func.func @main(%%x: %[2]s) -> %[2]s {\n"+
		"%%r = stablehlo.custom_call @%[3]s(%%x) {api_version = 4 : i32, "+
		"backend_config = {factor = 3.0 : f32}} : (%[2]s) -> %[2]s\n"+
		"return %%r : %[2]s\n}\n}\n", devices, shape, handlerName)
	all := program.Range(0, devices)
	x, err := e.Compile(ctx, &program.Module{Name: "handler", Devices: all, Text: text})
	if err != nil {
		return 0, err
	}
	defer x.Free()
	arg, err := filled(e, x.Module(), func(d int) float64 { return float64(d) })
	if err != nil {
		return 0, err
	}
	defer arg.Free()
	before := handled.calls.Load()
	for handled.calls.Load()-before < int64(calls) {
		err := expect(ctx, x, arg, all, func(d int) float64 { return 3 * float64(d) })
		if err != nil {
			return 0, err
		}
	}
	return handled.calls.Load() - before, nil
}
