package lower_test

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/internal/softgpu"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
)

// magnitudes are sources of numbers to quantize: each is given an array of standard normal ones.
var magnitudes = []struct {
	name string
	fill func(r *rand.Rand, a *eval.Array)
}{
	{"random", func(*rand.Rand, *eval.Array) {}},
	{"zero", func(_ *rand.Rand, a *eval.Array) { clear(a.Data) }},
	{"huge", func(_ *rand.Rand, a *eval.Array) { scaleBy(a, 1e36) }},
	{"tiny", func(_ *rand.Rand, a *eval.Array) { scaleBy(a, 1e-30) }},
	{"mixed", func(r *rand.Rand, a *eval.Array) {
		numbers(r, a)
		for i, v := range a.Data { // as in the layers of a model that trains
			if !(math.Abs(v) >= 0x1p-100 && math.Abs(v) <= 0x1p100) {
				a.Data[i] = 0
			}
		}
	}},
}

func scaleBy(a *eval.Array, f float64) {
	for i := range a.Data {
		a.Data[i] *= f
	}
}

// ofMagnitude gives inputs of which x is filled, and its largest magnitudes are true.
func (q quantizing) ofMagnitude(r *rand.Rand, g *ir.Graph, fill func(*rand.Rand, *eval.Array),
) map[string][]*eval.Array {
	in := q.inputs(r, g, true)
	x := in["x"][0]
	fill(r, x)
	for i, v := range x.Data {
		x.Data[i] = float64(float32(v))
		if q.elem == dtype.BF16 {
			x.Data[i] = float64(dtype.F32FromBF16(dtype.BF16FromF32(float32(v))))
		}
	}
	if in["amax"] != nil {
		amax := in["amax"][0].Data
		clear(amax)
		per := len(x.Data) / len(amax)
		for i, v := range x.Data {
			amax[i/per] = max(amax[i/per], math.Abs(v))
		}
	}
	return in
}

// What XLA:GPU makes of quantization for sm_100 writes, on the software GPU, the bytes of package
// block: codes and scales of both formats.
func TestQuantizeOnTheSoftwareGPU(t *testing.T) {
	if !softgpu.Child(t, softgpu.Options{Memory: 64 << 20, Delay: 2, DelayMicroseconds: 50}) {
		return
	}
	r := &enginetest.Rig{Engine: softGPU(t).Engine, Flags: kernels.For("sm_100").Exact(nil)}
	for i, q := range quantizings() {
		if !q.quick && !slowtest.Enabled {
			continue
		}
		t.Run(q.name, func(t *testing.T) {
			g := q.graph(t)
			// The transform of our own kernel is a product of tensor cores, which the software GPU lacks.
			set := kernels.For("sm_100").With(kernels.Options{Without: q.how.Hadamard})
			p := r.Compile(t, g, lower.Options{Kernels: set})
			random := rand.New(rand.NewPCG(uint64(i), 7))
			for _, m := range magnitudes {
				in := q.ofMagnitude(random, g, m.fill)
				want, err := eval.Run(g, in)
				if err != nil {
					t.Fatal(err)
				}
				t.Logf("%s: %d blocks", m.name, same(t, in, want, ran(t, r, p, g, in)))
			}
		})
	}
}
