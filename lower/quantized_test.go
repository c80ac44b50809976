package lower_test

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
)

// quantizedRig runs quantized GEMMs as training does on a CPU.
func quantizedRig(t enginetest.T, devices int) *enginetest.Rig {
	t.Helper()
	r := enginetest.Open(t, engine.Options{Devices: devices})
	r.Flags = kernels.For("cpu").Exact(nil)
	return r
}

// packed are the bytes in memory of what the interpreter holds of a value.
func packed(a *eval.Array) []byte {
	switch d := a.Type.Elem; d {
	case dtype.F4E2M1FN:
		out := make([]byte, len(a.Data)/2)
		for i := range out {
			out[i] = byte(a.Data[2*i]) | byte(a.Data[2*i+1])<<4
		}
		return out
	case dtype.F8E4M3FN, dtype.F8E8M0FNU:
		return dtype.U8.Append(nil, a.Data...)
	default:
		return d.Append(nil, a.Data...)
	}
}

// ran runs a compiled graph and gives the bytes of its results, by device.
func ran(t *testing.T, r *enginetest.Rig, p *enginetest.Program, g *ir.Graph,
	inputs map[string][]*eval.Array) [][][]byte {
	t.Helper()
	var args []*engine.Array
	for i, v := range g.Inputs {
		list := inputs[v.Name]
		a, err := r.Engine.Place(p.Module(), p.Module().Args[i], engine.Copied,
			func(d int) ([]byte, error) { return packed(list[d%len(list)]), nil })
		if err != nil {
			t.Fatal(err)
		}
		defer a.Free()
		args = append(args, a)
	}
	run, err := p.Executable.Run(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	defer run.Free()
	out := make([][][]byte, len(run.Results))
	for i, a := range run.Results {
		for d := range p.Module().Devices {
			out[i] = append(out[i], enginetest.Bytes(t, a, d))
		}
	}
	return out
}

// A quantizing is one way to quantize a source.
type quantizing struct {
	name  string
	quick bool // not only with -tags long
	elem  dtype.DType
	dims  []ir.Dim
	how   ir.Quantize
	noisy bool
}

// gpu is a GPU whose program the CPU engine runs: Blackwell's has kernels of our own for bf16, which
// the software GPU runs (TestQuantizeOnTheSoftwareGPU) and package kernels/triton/run.
func (q quantizing) gpu() string {
	if q.elem == dtype.BF16 {
		return "sm_90"
	}
	return "sm_100"
}

// graph quantizes an input whose largest magnitude is an input, too.
func (q quantizing) graph(t testing.TB) *ir.Graph {
	t.Helper()
	b := ir.NewBuilder("quantize")
	x := b.Input("x", ir.Data, ir.Type{Elem: q.elem, Dims: q.dims}, "")
	how := q.how
	if how.Format == ir.NVFP4 {
		at := irtest.F32()
		if q.dims[0].Name == ir.Layer {
			at.Dims = q.dims[:1]
		}
		how.Amax = b.Input("amax", ir.Data, at, "")
	}
	if q.noisy {
		how.Noise = b.Input("noise", ir.Data, irtest.S32(irtest.D("word", 3)), "")
		how.Rows = b.Input("rows", ir.Data, irtest.S32(q.dims[0]), "")
		how.Cols = b.Input("cols", ir.Data, irtest.S32(q.dims[1:]...), "")
		how.Tensor = 5
	}
	codes, scales := b.Quantize(x, how)
	g, err := b.Graph(codes, scales)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// inputs are random, with blocks of every size and some that are special; tame ones are not.
func (q quantizing) inputs(r *rand.Rand, g *ir.Graph, tame bool) map[string][]*eval.Array {
	in := map[string][]*eval.Array{}
	for _, v := range g.Inputs {
		a := eval.New(v.Type)
		in[v.Name] = []*eval.Array{a}
		for i := range a.Data {
			switch {
			case v.Name == "amax" && tame:
				a.Data[i] = 3
			case v.Name == "amax":
				a.Data[i] = float64(amaxes[r.IntN(len(amaxes))])
			case v.Name != "x":
				a.Data[i] = float64(int32(r.Uint32()))
			case tame:
				a.Data[i] = r.NormFloat64()
			}
		}
	}
	x := in["x"][0]
	if !tame {
		numbers(r, x)
	}
	for i, v := range x.Data {
		if q.how.Hadamard && math.Abs(v) < 1e-30 { // XLA:CPU adds subnormal numbers as zeros
			v = 0
		}
		x.Data[i] = float64(float32(v))
		if q.elem == dtype.BF16 {
			x.Data[i] = float64(dtype.F32FromBF16(dtype.BF16FromF32(float32(v))))
		}
	}
	return in
}

// amaxes are largest magnitudes of a tensor at which something happens: its factor is infinite,
// zero or subnormal, or the scales of blocks are 0 or 448.
var amaxes = []float32{0, 1, 3, 2688, 2688, 5e-36, 1e-38, 1e-40, 7.9e-36, 3e-35, math.MaxFloat32,
	float32(math.Inf(1)), float32(math.NaN()), 1e-20, 0x1p100}

// numbers fills an array by runs of 16, each about its own size, and some with what is special:
// the corner cases of rounding to E4M3 and E2M1.
func numbers(r *rand.Rand, a *eval.Array) {
	special := []float32{0, float32(math.Copysign(0, -1)), 448, 464, 465, 1.75, 1.7500001, 1.7499999,
		1.9999999, 0x1p-9, 0x1p-10, 0x1p-126, 0x1p-127, 0x1p-149, -0x1p-140, math.MaxFloat32,
		-math.MaxFloat32, 6, 5, 3.5, 2.5, 1.25, 0.75, 0.25, -0.25}
	ties := []float64{6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0}
	for from := 0; from < len(a.Data); from += 16 {
		run := a.Data[from:min(from+16, len(a.Data))]
		size := math.Ldexp(1, r.IntN(12)-6)
		switch r.IntN(40) {
		case 0:
			size = math.Ldexp(1, r.IntN(250)-140)
		case 1:
			size = 0
		}
		for i := range run {
			run[i] = r.NormFloat64() * size
			if r.IntN(200) == 0 {
				run[i] = float64(special[r.IntN(len(special))])
			}
		}
		switch at := r.IntN(len(run)); r.IntN(300) {
		case 0:
			run[at] = math.NaN()
		case 1:
			run[at] = math.Inf(1 - 2*r.IntN(2))
		case 2:
			run[at] = float64(math.Float32frombits(r.Uint32()))
		case 3:
			copy(run, ties)
		}
		for i := range run { // numbers of few digits lie halfway between two others now and then
			if from%3 == 0 {
				run[i] = float64(dtype.F32FromBF16(dtype.BF16FromF32(float32(run[i]))))
			}
		}
	}
}

func quantizings() []quantizing {
	d := irtest.D
	rows, cols := d("rows", 96), d("cols", 160)
	mx, nv := ir.Quantize{Format: ir.MXFP8}, ir.Quantize{Format: ir.NVFP4}
	hadamard, tile := nv, nv
	hadamard.Hadamard, tile.Tile = true, true
	along := func(q ir.Quantize, names ...string) ir.Quantize { q.Along = names; return q }
	rules := []quantizing{
		{"along rows", true, 0, []ir.Dim{rows, cols}, along(mx, "cols"), false},
		{"along columns", true, 0, []ir.Dim{rows, cols}, along(mx, "rows"), false},
		{"two dimensions", false, 0, []ir.Dim{d("a", 3), d("b", 64), d("c", 10)}, along(mx, "a", "b"), false},
		{"two apart", false, 0, []ir.Dim{d("a", 3), d("b", 10), d("c", 64)}, along(mx, "a", "c"), false},
		{"along rows", false, 0, []ir.Dim{rows, cols}, along(nv, "cols"), false},
		{"along columns", false, 0, []ir.Dim{rows, cols}, along(nv, "rows"), false},
		{"tiles", false, 0, []ir.Dim{rows, cols}, along(tile, "cols"), false},
		{"tiles of columns", true, 0, []ir.Dim{rows, cols}, along(tile, "rows"), false},
		{"tiles of two apart", false, 0, []ir.Dim{d("a", 3), d("b", 48), d("c", 64)}, along(tile, "a", "c"), false},
		{"hadamard", false, 0, []ir.Dim{rows, cols}, along(hadamard, "rows"), false},
		{"hadamard of rows", false, 0, []ir.Dim{rows, cols}, along(hadamard, "cols"), false},
		{"stochastic", true, 0, []ir.Dim{rows, cols}, along(nv, "cols"), true},
		{"stochastic columns", false, 0, []ir.Dim{rows, cols}, along(nv, "rows"), true},
		{"stochastic hadamard", false, 0, []ir.Dim{rows, cols}, along(hadamard, "rows"), true},
		{"stochastic hadamard of a batch", false, 0, []ir.Dim{d("a", 3), d("rows", 64), d("cols", 48)},
			along(hadamard, "a", "rows"), true},
		{"a stack", false, 0, []ir.Dim{d(ir.Layer, 4), d("rows", 32), d("cols", 48)}, along(tile, "cols"), false},
		{"a stack", false, 0, []ir.Dim{d(ir.Layer, 4), d("rows", 32), d("cols", 48)}, along(mx, "rows"), false},
	}
	var list []quantizing
	for _, elem := range []dtype.DType{dtype.F32, dtype.BF16} {
		for _, q := range rules {
			q.quick = q.quick && elem == dtype.F32 || q.name == "hadamard" && elem == dtype.BF16
			q.elem, q.name = elem, fmt.Sprintf("%s %s %s", q.how.Format, elem, q.name)
			list = append(list, q)
		}
	}
	return list
}

// What the engine quantizes is, byte for byte, what package block writes. With -tags long
// it is ten million blocks.
func TestQuantizeGivesTheBytesOfGo(t *testing.T) {
	r := quantizedRig(t, 1)
	rounds := 8 // 20,000 blocks in all
	if slowtest.Enabled {
		rounds = 470
	}
	total := 0
	for i, q := range quantizings() {
		if !q.quick && !slowtest.Enabled {
			continue
		}
		t.Run(q.name, func(t *testing.T) {
			g := q.graph(t)
			p := r.Compile(t, g, lower.Options{Kernels: kernels.For("cpu")})
			random := rand.New(rand.NewPCG(uint64(i), 7))
			for range rounds {
				in := q.inputs(random, g, false)
				want, err := eval.Run(g, in)
				if err != nil {
					t.Fatal(err)
				}
				total += same(t, in, want, ran(t, r, p, g, in))
			}
		})
	}
	t.Logf("%d blocks", total)
}

// A GPU's program, run by the CPU, gives the same bytes, but for numbers that are
// subnormal, which it drops, and infinite, for which its conversion to E4M3 is another.
func TestQuantizeForGPUs(t *testing.T) {
	r := quantizedRig(t, 1)
	for i, q := range quantizings() {
		if !slowtest.Enabled && (q.elem != dtype.BF16 || i%5 > 0) {
			continue
		}
		t.Run(q.name, func(t *testing.T) {
			g := q.graph(t)
			p := r.Compile(t, g, lower.Options{Kernels: kernels.For(q.gpu())})
			// As they are, with one NaN, and with nothing but NaN.
			for _, spoil := range []func(in map[string][]*eval.Array){
				func(map[string][]*eval.Array) {},
				func(in map[string][]*eval.Array) { in["x"][0].Data[37] = math.NaN() },
				func(in map[string][]*eval.Array) {
					if in["amax"] != nil {
						in["amax"][0].Data[0] = math.NaN()
					}
				},
			} {
				in := q.inputs(rand.New(rand.NewPCG(uint64(i), 8)), g, true)
				spoil(in)
				want, err := eval.Run(g, in)
				if err != nil {
					t.Fatal(err)
				}
				same(t, in, want, ran(t, r, p, g, in))
			}
		})
	}
}

// same compares scales, then codes, and gives the number of blocks.
func same(t *testing.T, in map[string][]*eval.Array, want [][]*eval.Array, got [][][]byte) int {
	t.Helper()
	for _, i := range []int{1, 0} {
		w := packed(want[i][0])
		if bytes.Equal(got[i][0], w) {
			continue
		}
		n := 0
		for k := range w {
			if got[i][0][k] != w[k] {
				if n++; n < 5 {
					t.Errorf("result %d, byte %d is %#x, want %#x", i, k, got[i][0][k], w[k])
				}
			}
		}
		if in["amax"] != nil {
			t.Errorf("the largest magnitude is %v", in["amax"][0].Data)
		}
		t.Fatalf("%d of %d bytes of result %d differ", n, len(w), i)
	}
	return len(want[1][0].Data)
}

// quantizedGEMMs builds the three GEMMs of a quantized linear: x is rows by in, w is out by in,
// and dy is rows by out.
func quantizedGEMMs(t testing.TB, f ir.Format, elem dtype.DType, rows, in, out int64) *ir.Graph {
	t.Helper()
	d := irtest.D
	return threeGEMMs(t, f, elem, "rows", []ir.Dim{d("rows", rows), d("embed", in)},
		[]ir.Dim{d("mlp", out), d("embed", in)}, []ir.Dim{d("rows", rows), d("mlp", out)})
}

// expertGEMMs builds them for experts side by side, whose weights come first, or after the
// dimension along which fsdp gathers them.
func expertGEMMs(t testing.TB, f ir.Format, elem dtype.DType, first bool,
	experts, slots, in, out int64) *ir.Graph {
	t.Helper()
	d := irtest.D
	e, s := d(ir.ExpertDim, experts), d(ir.Slots, slots)
	w := []ir.Dim{d("embed", in), e, d("mlp", out)}
	if first {
		w[0], w[1] = w[1], w[0]
	}
	return threeGEMMs(t, f, elem, ir.Slots, []ir.Dim{e, s, d("embed", in)}, w,
		[]ir.Dim{e, s, d("mlp", out)})
}

// threeGEMMs builds fprop, dgrad and wgrad, which sums over rows.
func threeGEMMs(t testing.TB, f ir.Format, elem dtype.DType, rows string,
	xs, ws, dys []ir.Dim) *ir.Graph {
	t.Helper()
	b := ir.NewBuilder("linear")
	input := func(name string, dims []ir.Dim) *ir.Value {
		return b.Input(name, ir.Data, ir.Type{Elem: elem, Dims: dims}, "")
	}
	x, w, dy := input("x", xs), input("w", ws), input("dy", dys)
	how := func(along string, tile, hadamard bool) ir.Quantize {
		return ir.Quantize{Format: f, Along: []string{along}, Tile: tile && f == ir.NVFP4,
			Hadamard: hadamard && f == ir.NVFP4}
	}
	y := b.BlockDot(f, b.QuantizeAll(x, how("embed", false, false)), b.QuantizeAll(w, how("embed", true, false)),
		[]string{"embed"}, elem)
	dx := b.BlockDot(f, b.QuantizeAll(dy, how("mlp", false, false)), b.QuantizeAll(w, how("mlp", true, false)),
		[]string{"mlp"}, elem)
	dw := b.BlockDot(f, b.QuantizeAll(dy, how(rows, false, true)), b.QuantizeAll(x, how(rows, false, true)),
		[]string{rows}, elem)
	g, err := b.Graph(y, dx, dw)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// The three GEMMs of a linear agree with the interpreter, but for the order of sums, and NaN and
// infinity reach every product that they are in.
func TestBlockDotAgreesWithTheInterpreter(t *testing.T) {
	r := quantizedRig(t, 1)
	for _, f := range []ir.Format{ir.MXFP8, ir.NVFP4} {
		g := quantizedGEMMs(t, f, dtype.F32, 96, 64, 160)
		in := randomInputs(rand.New(rand.NewPCG(1, 9)), g)
		want, err := eval.Run(g, in)
		if err != nil {
			t.Fatal(err)
		}
		near := func(p *enginetest.Program) {
			t.Helper()
			for i, list := range p.Run(t, in) {
				if d := enginetest.Distance(list[0].Data, want[i][0].Data); d > bound {
					t.Errorf("%s: result %d is off by %g", f, i, d)
				}
			}
		}
		if slowtest.Enabled {
			near(r.Compile(t, g, lower.Options{}))
		}
		p := r.Compile(t, g, lower.Options{Kernels: kernels.For("cpu")})
		near(p)
		for _, poison := range []float64{math.NaN(), math.Inf(1)} {
			for at, name := range []string{"x", "w", "dy"} {
				bad := in[name][0]
				keep := bad.Data[70]
				bad.Data[70] = poison
				got := p.Run(t, in)
				bad.Data[70] = keep
				for i, reads := range [][]int{{0, 1}, {1, 2}, {0, 2}} {
					if reached := notFinite(got[i][0].Data); reached != (at == reads[0] || at == reads[1]) {
						t.Errorf("%s: %v in %s reaches result %d: %v", f, poison, name, i, reached)
					}
				}
			}
		}
	}
}

// GEMMs of experts agree with the interpreter too. Tiles of a weight lie within an expert wherever
// the experts stand: both orders give the same bytes and results.
func TestBlockDotOfExperts(t *testing.T) {
	r := quantizedRig(t, 1)
	const experts, slots, in, out = 3, 64, 32, 96
	for _, f := range []ir.Format{ir.MXFP8, ir.NVFP4} {
		var before [][]float64
		for _, first := range []bool{true, false} {
			g := expertGEMMs(t, f, dtype.F32, first, experts, slots, in, out)
			inputs := randomInputs(rand.New(rand.NewPCG(1, 9)), g)
			if !first {
				inputs["w"][0].Data = expertsSecond(inputs["w"][0].Data, experts, in, out)
			}
			want, err := eval.Run(g, inputs)
			if err != nil {
				t.Fatal(err)
			}
			for i, list := range r.Compile(t, g, lower.Options{Kernels: kernels.For("cpu")}).Run(t, inputs) {
				if d := enginetest.Distance(list[0].Data, want[i][0].Data); d > bound {
					t.Errorf("%s, first %v: result %d is off by %g", f, first, i, d)
				}
				switch {
				case first:
					before = append(before, want[i][0].Data)
				case !slices.Equal(want[i][0].Data, before[i]):
					t.Errorf("%s: result %d depends on where the experts stand", f, i)
				}
			}
		}
	}
}

// expertsSecond turns [experts, in, out] into [in, experts, out].
func expertsSecond(w []float64, experts, in, out int) []float64 {
	list := make([]float64, 0, len(w))
	for i := range in {
		for e := range experts {
			list = append(list, w[(e*in+i)*out:(e*in+i+1)*out]...)
		}
	}
	return list
}

func notFinite(list []float64) bool {
	for _, v := range list {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return true
		}
	}
	return false
}
