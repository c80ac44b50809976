package fused_test

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/internal/softgpu"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/kernels/rownorm"
	"github.com/deepwell/deepwell/kernels/triton"
	"github.com/deepwell/deepwell/kernels/triton/run"
	"github.com/deepwell/deepwell/program"
)

// The PTX that XLA makes of kernels, run on the software GPU, writes the bytes that the interpreter
// of their text writes.
func TestKernelsOnSoftwareGPU(t *testing.T) {
	slowtest.Only(t)
	if !softgpu.Child(t, softgpu.Options{GPUs: 1, Memory: 64 << 20}) {
		return
	}
	e, err := engine.Open(t.Context(), "cuda13", engine.Options{Cache: enginetest.Cache()})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	r := rand.New(rand.NewPCG(22, 6))
	x, _ := normal(r, 600*256, 1)
	y, _ := normal(r, 600*256, 2)
	weight, _ := normal(r, 256, 1)
	stats, _ := operands(r, source(t, "rms_norm"), 600, 256)
	norm := func(spec string) func() (*triton.Kernel, error) {
		return func() (*triton.Kernel, error) {
			n, err := rownorm.Parse(spec)
			if err != nil {
				return nil, err
			}
			return n.Kernel()
		}
	}
	for _, c := range []struct {
		kernel func() (*triton.Kernel, error)
		in     [][]byte
		bound  float64
	}{
		{norm("rms_norm 600x256 eps=1e-05 shift=0 added normed stats"), [][]byte{x, y, weight}, bf16Bound},
		{norm("rms_norm_grad 600x256 eps=1e-05 shift=0 grads=1"), [][]byte{x, weight, y}, bf16Bound},
		{norm("rms_norm_grad 600x250 eps=1e-05 shift=1 grads=2 residual"),
			[][]byte{x[:500*600], weight[:500], y[:500*600], x[:500*600], y[:500*600]}, bf16Bound},
		{fused.Loss{Rows: 15, Cols: 10240}.Kernel,
			[][]byte{x, ints(make([]int32, 15)...), stats[1][:4*15]}, bf16Bound},
	} {
		k, err := c.kernel()
		if err != nil {
			t.Fatal(err)
		}
		want := results(t, k, c.in...)
		for i, b := range onGPU(t, e, k, c.in) {
			a := k.Args[len(c.in)+i]
			near(t, k.Name+", "+a.Name, values(a, b), want[i], c.bound)
		}
	}
	rowsOnGPU(t, e)
	// Stacks of a loop: what other rounds put there stays.
	k, err := fused.MXFP8(fused.Matrix{Rows: 64, Cols: 256}, source(t, "swiglu"), fused.Form{Along: true,
		Across: true, Keep: true, Stacks: fused.Stacks{Rounds: 3, From: []int{1}, Into: []int{3, 4},
			Saved: []int{0}}})
	if err != nil {
		t.Fatal(err)
	}
	var in [][]byte
	for _, a := range k.Args {
		if a.Result {
			break
		}
		n := a.Elem.Bits() / 8
		for _, size := range a.Shape {
			n *= size
		}
		in = append(in, slices.Repeat([]byte{0x3f}, n))
	}
	copy(in[0], x)
	copy(in[1], x)
	in[2] = []byte{1, 0, 0, 0}
	want := arrays(k, in...)
	if err := run.Kernel(k, want); err != nil {
		t.Fatal(err)
	}
	for i, got := range onGPU(t, e, k, in) {
		if n, _ := differ(got, want[len(in)+i]); n > 0 {
			t.Errorf("%s: %s: %d of %d bytes differ", k.Spec, k.Args[len(in)+i].Name, n, len(got))
		}
	}
	for _, s := range fused.Sources() {
		for _, d := range [][2]int{{128, 256}, {32, 128}, {96, 384}} {
			k, err := fused.MXFP8(fused.Matrix{Rows: d[0], Cols: d[1]}, s, both)
			if err != nil {
				t.Fatal(err)
			}
			in, _ := operands(r, s, d[0], d[1])
			sameOnGPU(t, e, k, in)
		}
	}
}

// rowsOnGPU compares the bytes of NVFP4 kernels that multiply no matrices: blocks along rows, and
// weights both ways, and largest magnitudes.
func rowsOnGPU(t *testing.T, e *engine.Engine) {
	t.Helper()
	r := rand.New(rand.NewPCG(22, 15))
	rows := fused.Form{Along: true}
	for _, form := range []fused.NVFP4Form{{Form: rows}, {Form: both, Tile: true},
		{Form: rows, Stochastic: [2]bool{true}, Tensors: [][2]int{{3, 4}}, Added: true},
		{Form: rows, Stochastic: [2]bool{true}, Tensors: [][2]int{{3, 4}}}} {
		for _, m := range []fused.Matrix{{1, 128, 256}, {1, 48, 80}, {2, 32, 160}} {
			if form.Swizzled && m.Batch > 1 {
				continue
			}
			f := &placed{Matrix: m, NVFP4Form: form, x: mild(r, m.Batch*m.Rows*m.Cols, m.Rows == 48), seed: 8,
				step: 9, layer: 1, row: 512, col: 1024}
			k, err := fused.NVFP4(m, source(t, "quantize"), form)
			if err != nil {
				t.Fatal(err)
			}
			sameOnGPU(t, e, k, f.operands())
		}
	}
	k, err := fused.Amax(fused.Matrix{Rows: 96, Cols: 160}, source(t, "quantize"), rows)
	if err != nil {
		t.Fatal(err)
	}
	sameOnGPU(t, e, k, [][]byte{words(mild(r, 96*160, false))})
}

// sameOnGPU compares what the software GPU and the interpreter write.
func sameOnGPU(t *testing.T, e *engine.Engine, k *triton.Kernel, in [][]byte) {
	t.Helper()
	want := arrays(k, in...)
	if err := run.Kernel(k, want); err != nil {
		t.Fatal(err)
	}
	for i, got := range onGPU(t, e, k, in) {
		if n, first := differ(got, want[len(in)+i]); n > 0 {
			t.Errorf("%s: %s: %d of %d bytes differ, the first at %d: %#x, want %#x", k.Name,
				k.Args[len(in)+i].Name, n, len(got), first, got[first], want[len(in)+i][first])
		}
	}
}

// onGPU runs a kernel by the engine and gives its results.
func onGPU(t *testing.T, e *engine.Engine, k *triton.Kernel, in [][]byte) (out [][]byte) {
	t.Helper()
	x, err := e.Compile(t.Context(), &program.FromText(k.Name, k.Module(), 1).Modules[0])
	if err != nil {
		t.Fatalf("%v\n%s", err, k.Text)
	}
	defer x.Free()
	var args []*engine.Array
	for i, b := range in {
		a, err := e.Place(x.Module(), x.Module().Args[i], engine.Copied,
			func(int) ([]byte, error) { return bytes.Clone(b), nil })
		if err != nil {
			t.Fatal(err)
		}
		defer a.Free()
		args = append(args, a)
	}
	r, err := x.Run(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Free()
	if err := r.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, a := range r.Results {
		b, err := a.Read(t.Context(), 0)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, b)
	}
	return out
}
