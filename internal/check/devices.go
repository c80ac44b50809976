package check

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/program"
)

// vector is one piece of 64 floats a device, which the checks below work on.
const vectorLen = 64

func vectorStage(name, text string, devices program.Devices) *program.Stage {
	return &program.Stage{Name: name, Devices: devices, Text: text}
}

func filled(value float32) []byte {
	b := make([]byte, 0, 4*vectorLen)
	for range vectorLen {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(value))
	}
	return b
}

func floats(b []byte) []float32 {
	var v []float32
	for ; len(b) > 0; b = b[4:] {
		v = append(v, math.Float32frombits(binary.LittleEndian.Uint32(b)))
	}
	return v
}

// Halves runs two executables at the same time, each a sum over its own half of the devices, and
// sees that neither disturbs the other.
func Halves(ctx context.Context, e *engine.Engine, devices, rounds int) error {
	half := devices / 2
	errs := make([]error, 2)
	var wg sync.WaitGroup
	for h := range 2 {
		wg.Go(func() { errs[h] = sumOn(ctx, e, program.Range(h*half, half), float32(h+1), rounds) })
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func sumOn(ctx context.Context, e *engine.Engine, devices program.Devices, value float32,
	rounds int) error {
	n := len(devices)
	shape := dtype.Shape{Type: dtype.F32, Dims: []int64{vectorLen}}.MLIR()
	text := fmt.Sprintf("module @sum attributes {mhlo.num_replicas = %d : i32} {\n"+
		"func.func @main(%%x: %[2]s) -> %[2]s {\n"+
		"%%r = \"stablehlo.all_reduce\"(%%x) (%[3]s) {%[4]s} : (%[2]s) -> %[2]s\n"+
		"return %%r : %[2]s\n}\n}\n", n, shape, adder("f32"), groups(n, n))
	x, err := e.Compile(ctx, vectorStage("sum", text, devices))
	if err != nil {
		return err
	}
	defer x.Free()
	arg, err := e.Place(x.Stage(), x.Stage().Args[0], engine.Copied,
		func(int) ([]byte, error) { return filled(value), nil })
	if err != nil {
		return err
	}
	defer arg.Free()
	want := floats(filled(value * float32(n)))
	for range rounds {
		run, err := x.Run(arg)
		if err != nil {
			return err
		}
		if err := run.Wait(ctx); err != nil {
			return err
		}
		got, err := run.Results[0].Read(ctx, n-1)
		run.Free()
		if err != nil {
			return err
		}
		if v := floats(got); !slices.Equal(v, want) {
			return diag.New(diag.RuntimeFailed, "devices %s got %v, want %v", devices, v[0], want[0])
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
	in, out := c.Args[0].Data, c.Results[0].Data
	for i := 0; i < len(in); i += 4 {
		v := math.Float32frombits(binary.LittleEndian.Uint32(in[i:]))
		binary.LittleEndian.PutUint32(out[i:], math.Float32bits(v*factor))
	}
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
	x, err := e.Compile(ctx, vectorStage("handler", text, program.Range(0, devices)))
	if err != nil {
		return 0, err
	}
	defer x.Free()
	arg, err := e.Place(x.Stage(), x.Stage().Args[0], engine.Copied,
		func(d int) ([]byte, error) { return filled(float32(d)), nil })
	if err != nil {
		return 0, err
	}
	defer arg.Free()
	before := handled.calls.Load()
	for handled.calls.Load()-before < int64(calls) {
		run, err := x.Run(arg)
		if err != nil {
			return 0, err
		}
		if err := run.Wait(ctx); err != nil {
			return 0, err
		}
		for d := range devices {
			got, err := run.Results[0].Read(ctx, d)
			if err != nil {
				return 0, err
			}
			if v := floats(got); v[0] != 3*float32(d) || v[vectorLen-1] != 3*float32(d) {
				return 0, diag.New(diag.RuntimeFailed, "device %d got %v, want %v", d, v[0], 3*float32(d))
			}
		}
		run.Free()
	}
	return handled.calls.Load() - before, nil
}
