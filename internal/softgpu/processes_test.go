package softgpu_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/softgpu"
	"github.com/deepwell/deepwell/program"
)

// repeat runs a program that gives back its argument on some GPUs, again and again.
func repeat(t *testing.T, e *engine.Engine, gpus, times int) {
	t.Helper()
	x := program.Array{Name: "x", Split: [][]string{{"dp"}},
		Global: dtype.Shape{Type: dtype.F32, Dims: []int64{int64(gpus)}}}
	y := x
	y.Name = "y"
	m := &program.Module{Name: "same", Devices: program.Range(0, gpus),
		Mesh: []program.Axis{{Name: "dp", Size: gpus}}, Args: []program.Array{x},
		Results: []program.Array{y},
		Text: fmt.Sprintf(`module @same attributes {mhlo.num_replicas = %d : i32} {
  func.func @main(%%x: tensor<1xf32>) -> tensor<1xf32> {
    return %%x : tensor<1xf32>
  }
}`, gpus)}
	same, err := e.Compile(t.Context(), m)
	if err != nil {
		t.Fatal(err)
	}
	defer same.Free()
	arg, err := e.Place(m, x, engine.Copied, func(int) ([]byte, error) { return make([]byte, 4), nil })
	if err != nil {
		t.Fatal(err)
	}
	defer arg.Free()
	for range times {
		r, err := same.Run(t.Context(), arg)
		if err == nil {
			err = r.Wait(t.Context())
			r.Free()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// XLA has one map of the processes' incarnations for all devices of a client. Every run that passes
// incarnations replaces it without a lock, on a thread for each of its devices: when all runs did,
// glibc ended five of six processes here by a double free. So one run on one device does.
func TestRunsLeaveIncarnationsAlone(t *testing.T) {
	if !softgpu.Child(t, softgpu.Options{GPUs: 8, Memory: 64 << 20}) {
		return
	}
	e := open(t, engine.Options{})
	all := []engine.Process{{Incarnation: 7, Connected: true}}
	for range 2 { // the second call is an update
		if err := e.UpdateProcesses(all); err != nil {
			t.Fatal(err)
		}
	}
	repeat(t, e, 8, 4000)
}

// A run that is under way may read the map, so it is too late for the processes of a client.
func TestProcessesAreNamedBeforeTheFirstRun(t *testing.T) {
	if !softgpu.Child(t, softgpu.Options{Memory: 64 << 20}) {
		return
	}
	e := open(t, engine.Options{})
	repeat(t, e, 1, 1)
	err := e.UpdateProcesses([]engine.Process{{Incarnation: 7, Connected: true}})
	if !errors.Is(err, diag.BadUsage) {
		t.Errorf("named after a run: %v", err)
	}
}
