package softgpu_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/softgpu"
	"github.com/deepwell/deepwell/program"
)

// open opens the CUDA engine on the software GPUs that this process sees.
func open(t *testing.T, o engine.Options) *engine.Engine {
	t.Helper()
	e, err := engine.Open(t.Context(), "cuda13", o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

// The real CUDA plugin sees the GPUs as what they play, and copies to them and back are exact.
func TestGPUsOpenAndCopiesAreExact(t *testing.T) {
	for _, row := range []struct {
		gpus        int
		model, kind string
	}{
		{1, "b200", "NVIDIA B200"},
		{2, "gb300", "NVIDIA GB300"},
		{8, "b200", "NVIDIA B200"},
		{1, "rtx6000pro", "NVIDIA RTX PRO 6000 Blackwell Server Edition"},
	} {
		t.Run(fmt.Sprintf("%dx%s", row.gpus, row.model), func(t *testing.T) {
			if !softgpu.Child(t, softgpu.Options{GPUs: row.gpus, Model: row.model,
				Memory: 256 << 20, Delay: 1}) {
				return
			}
			e := open(t, engine.Options{})
			devices := e.Devices()
			if len(devices) != row.gpus {
				t.Fatalf("%d devices", len(devices))
			}
			for _, d := range devices {
				if d.Kind != row.kind || !d.Local {
					t.Errorf("device %+v", d)
				}
			}
			for _, from := range []engine.Source{engine.Copied, engine.Lent, engine.Given} {
				roundTrip(t, e, row.gpus, from)
			}
		})
	}
}

// roundTrip places a different shard on every GPU and reads it back.
func roundTrip(t *testing.T, e *engine.Engine, gpus int, from engine.Source) {
	t.Helper()
	m := &program.Module{Name: "shards", Devices: program.Range(0, gpus),
		Mesh: []program.Axis{{Name: "dp", Size: gpus}}}
	spec := program.Array{Name: "x", Split: [][]string{{"dp"}, nil},
		Global: dtype.Shape{Type: dtype.F32, Dims: []int64{int64(gpus) * 64, 513}}}
	shard := func(i int) []byte {
		p := engine.Aligned(64 * 513 * 4)
		for k := range p {
			p[k] = byte(k*7 + k>>8 + i)
		}
		return p
	}
	a, err := e.Place(m, spec, from, func(i int) ([]byte, error) { return shard(i), nil })
	if err != nil {
		t.Fatal(err)
	}
	defer a.Free()
	for i := range gpus {
		got, err := a.Read(t.Context(), i)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, shard(i)) {
			t.Errorf("source %v: GPU %d gives back other bytes", from, i)
		}
	}
}

// An array that is larger than a GPU is an error that says so, and the engine goes on.
func TestOutOfMemoryIsAnError(t *testing.T) {
	if !softgpu.Child(t, softgpu.Options{Memory: 64 << 20}) {
		return
	}
	e := open(t, engine.Options{})
	m := &program.Module{Name: "large", Devices: program.Range(0, 1)}
	spec := program.Array{Name: "x",
		Global: dtype.Shape{Type: dtype.F32, Dims: []int64{32 << 20}}}
	a, err := e.Place(m, spec, engine.Copied, func(int) ([]byte, error) {
		return engine.Aligned(128 << 20), nil
	})
	if err == nil {
		err = a.Await(t.Context())
	}
	if err == nil || !strings.Contains(strings.ToLower(err.Error()), "out of memory") {
		t.Errorf("128 MiB on a GPU of 64 MiB: %v", err)
	}
	roundTrip(t, e, 1, engine.Copied)
}

// A kernel that fails is an error of the run that had it, or of a later one, and of all after that:
// the GPU stays failed until the process ends.
func TestFailedGPUIsAnError(t *testing.T) {
	if softgpu.InChild(t) {
		e := open(t, engine.Options{})
		_, texts := smallPrograms(t)
		failures := 0
		for range 6 {
			if _, err := tryProgram(t, e, texts["exponential"]); err != nil {
				fmt.Println("failed:", err)
				failures++
			} else if failures > 0 {
				t.Error("a failed GPU goes on")
			}
		}
		return
	}
	out, status := softgpu.Run(t, softgpu.Options{Memory: 64 << 20,
		Fail: softgpu.Failure{Launch: 3, Result: 719}})
	if status != 0 || strings.Count(out, "failed: ") < 2 ||
		!strings.Contains(out, "CUDA_ERROR_LAUNCH_FAILED") {
		t.Errorf("status %d\n%s", status, out)
	}
}
