package replay

import (
	"bytes"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

// Replicas are equal, shards differ, terms of a sum differ on every device, and positions count
// along the global sequence.
func TestInputs(t *testing.T) {
	m := &program.Module{Name: "m", Devices: program.Range(0, 4),
		Mesh: []program.Axis{{Name: "fsdp", Size: 2}, {Name: "cp", Size: 2}}}
	array := func(name string, role program.Role, typ dtype.DType, split ...[]string) program.Array {
		return program.Array{Name: name, Role: role, Param: name,
			Global: dtype.Shape{Type: typ, Dims: []int64{4, 8}}, Split: split}
	}
	f := filler{module: m, kind: step.Gradient, seed: 1, vocab: 100}
	shards := func(f filler, a program.Array) [][]byte {
		t.Helper()
		list, err := f.shards(a)
		if err != nil {
			t.Fatal(err)
		}
		return list
	}
	w := shards(f, array("w", program.Copy, dtype.BF16, []string{"fsdp"}, nil))
	if !bytes.Equal(w[0], w[1]) || bytes.Equal(w[0], w[2]) || !bytes.Equal(w[2], w[3]) {
		t.Error("replicas differ, or shards are equal")
	}
	if again := shards(f, array("w", program.Copy, dtype.BF16, []string{"fsdp"}, nil)); !slices.EqualFunc(
		w, again, bytes.Equal) {
		t.Error("the same seed gave other numbers")
	}
	g := array("g.w", program.Gradient, dtype.F32)
	f.kind = step.Update
	if list := shards(f, g); !bytes.Equal(list[0], list[3]) {
		t.Error("reduced gradients differ")
	}
	f.kind = step.Reduce
	if list := shards(f, g); bytes.Equal(list[0], list[3]) {
		t.Error("terms of a sum are equal")
	}
	places := shards(f, array(model.InputPositions, program.Batch, dtype.S32, []string{"fsdp"},
		[]string{"cp"}))
	if got := dtype.S32.Values(places[1]); !slices.Equal(got, []float64{4, 5, 6, 7, 4, 5, 6, 7}) {
		t.Errorf("positions %v", got)
	}
	f.kind = step.Gradient
	for name, least := range map[string]float64{model.InputIDs: 0, model.InputLabels: -1} {
		for _, x := range dtype.S32.Values(shards(f, array(name, program.Batch, dtype.S32))[0]) {
			if x < least || x >= 100 {
				t.Errorf("%s: token %v", name, x)
			}
		}
	}
	if _, err := f.shards(array("x", program.Stat, dtype.F32)); err == nil {
		t.Error("an argument that no step has was drawn")
	}
}

// Differences are measured over all devices; NaN is never equal, and -0 is 0.
func TestCompare(t *testing.T) {
	inf, nan := math.Inf(1), math.NaN()
	f32 := func(x ...float64) []byte { return dtype.F32.Append(nil, x...) }
	for name, row := range map[string]struct {
		typ       dtype.DType
		got, want [][]byte
		relative  float64
		equal     int64
	}{
		"equal":      {dtype.F32, [][]byte{f32(1, 2), f32(3, inf)}, [][]byte{f32(1, 2), f32(3, inf)}, 0, 4},
		"apart":      {dtype.F32, [][]byte{f32(3, 4), f32(0, 1)}, [][]byte{f32(3, 4), f32(0, 0)}, 0.2, 3},
		"to zero":    {dtype.F32, [][]byte{f32(1)}, [][]byte{f32(0)}, inf, 0},
		"signs":      {dtype.F32, [][]byte{f32(math.Copysign(0, -1))}, [][]byte{f32(0)}, 0, 0},
		"NaN":        {dtype.F32, [][]byte{f32(nan, 1)}, [][]byte{f32(nan, 1)}, inf, 1},
		"infinities": {dtype.F32, [][]byte{f32(inf)}, [][]byte{f32(-inf)}, inf, 0},
		"codes":      {dtype.U8, [][]byte{{0x80, 1, 2, 3}}, [][]byte{{0, 1, 2, 3}}, 0.25, 3},
	} {
		d := compare("x", row.typ, row.got, row.want)
		if math.Abs(d.Relative-row.relative) > 1e-12 || d.Equal != row.equal {
			t.Errorf("%s: %+v", name, d)
		}
	}
}

// A gradient that is zero by mathematics is noise in both programs, and is compared against the size
// of the other gradients: noise passes, and 1e-3 of that size is beyond the bound, as is NaN. Other
// arrays are compared with themselves, however small.
func TestNoiseIsComparedAgainstOtherGradients(t *testing.T) {
	f32 := func(x ...float64) [][]byte { return [][]byte{dtype.F32.Append(nil, x...)} }
	for _, row := range []struct {
		name      string
		role      program.Role
		got, want float64
		against   bool
		relative  float64
	}{
		{"noise", program.Gradient, 3e-8, -2e-8, true, 5e-8},
		{"zero", program.Gradient, 2e-8, 0, true, 2e-8},
		{"wrong", program.Gradient, 1e-3, 2e-8, true, 1e-3},
		{"NaN", program.Gradient, math.NaN(), 2e-8, false, math.Inf(1)},
		{"infinite", program.Gradient, math.Inf(1), 2e-8, true, math.Inf(1)},
		{"small and right", program.Gradient, 1e-4, 1e-4, false, 0},
		{"small and wrong", program.Gradient, 1.1e-4, 1e-4, false, 0.1},
		{"lost", program.Gradient, 0, 1e-4, false, 1},
		{"no gradient", program.Stat, 3e-8, 2e-8, false, 0.5},
	} {
		results := []program.Array{{Role: program.Loss}, {Role: program.Gradient}, {Role: row.role}}
		r := &Result{Arrays: []Difference{compare("loss", dtype.F32, f32(9), f32(9)),
			compare("g.w", dtype.F32, f32(slices.Repeat([]float64{1}, 99)...),
				f32(slices.Repeat([]float64{1}, 99)...)),
			compare("g.b", dtype.F32, f32(row.got), f32(row.want))}}
		r.weigh(results, wideNoise)
		d := r.Arrays[2]
		far := d.Relative > row.relative*1.02 || d.Relative < row.relative*0.98
		if far || (d.Against > 0) != row.against || r.Arrays[1].Against != 0 {
			t.Errorf("%s: %+v", row.name, d)
		}
		if n := len(r.Beyond(Bound{Limit: 1e-5})); (n > 0) != (row.relative > 1e-5) {
			t.Errorf("%s: %d arrays beyond the bound", row.name, n)
		}
	}
	r := &Result{Arrays: []Difference{compare("g.w", dtype.F32, f32(math.Inf(1)), f32(math.Inf(1))),
		compare("g.b", dtype.F32, f32(2), f32(1))}}
	if r.weigh([]program.Array{{Role: program.Gradient}, {Role: program.Gradient}}, wideNoise); r.
		Arrays[1].Relative != 1 {
		t.Errorf("an infinity hides a difference: %+v", r.Arrays[1])
	}
}

// A result prints its worst array, and is held to its bound; equal bits are asked for by 0.
func TestResult(t *testing.T) {
	shape := dtype.Shape{Type: dtype.BF16, Dims: []int64{2, 3}}
	r := &Result{Module: "gradient", Wide: true, Arrays: []Difference{
		{Name: "loss", Shape: dtype.Shape{Type: dtype.F32}, Elements: 1, Equal: 1},
		{Name: "g.w", Shape: shape, Relative: 0.5, Elements: 6, Equal: 4},
		{Name: "g.x", Shape: shape, Relative: math.Inf(1), Elements: 6, Equal: 5, NaN: 1},
		{Name: "minus zero", Shape: shape, Elements: 6, Equal: 5}}}
	for _, words := range []string{"gradient, bf16 held as f32: worst +Inf (g.x), 1 of 4 arrays have " +
		"equal bits\n", "bf16[2,3]", "2 of 6 elements differ", "1 are NaN"} {
		if !strings.Contains(r.String(), words) {
			t.Errorf("%q is not in\n%s", words, r)
		}
	}
	if n := len(r.Beyond(Bound{Limit: 0.6})); n != 1 {
		t.Errorf("%d arrays beyond 0.6", n)
	}
	if n := len(r.Beyond(Bound{})); n != 3 {
		t.Errorf("%d arrays without equal bits", n)
	}
}

// Every bf16 becomes f32, but for those whose bits are read. Constants of bf16 keep bf16's value:
// unrounded ones put gradients of models with GELU 5e-4 apart.
func TestWideText(t *testing.T) {
	text := wideText(`  %0 = stablehlo.constant dense<0xFF80> : tensor<4xbf16>
  %1 = stablehlo.bitcast_convert %0 : (tensor<4xbf16>) -> tensor<4xui16>
  %2 = stablehlo.bitcast_convert %1 : (tensor<4xui16>) -> tensor<4xbf16>
  %3 = stablehlo.bitcast_convert %f : (tensor<bf16>) -> tensor<2xui8>
  %4 = stablehlo.bitcast_convert %g : (tensor<4xf32>) -> tensor<4xui32>
  %5 = stablehlo.convert %2 : (tensor<4xbf16>) -> tensor<4xf32>
  %6 = stablehlo.constant dense<4.47149999999999989e-02> : tensor<16x3xbf16>
  %7 = stablehlo.constant dense<4.47149999999999989e-02> : tensor<16x3xf32>
  %8 = stablehlo.constant dense<[-0.1, 1.00000000000000000e+00]> : tensor<2xbf16>
`)
	want := `  %0 = stablehlo.constant dense<0xFF800000> : tensor<4xf32>
  %w_1 = stablehlo.convert %0 : (tensor<4xf32>) -> tensor<4xbf16>
  %1 = stablehlo.bitcast_convert %w_1 : (tensor<4xbf16>) -> tensor<4xui16>
  %w_2 = stablehlo.bitcast_convert %1 : (tensor<4xui16>) -> tensor<4xbf16>
  %2 = stablehlo.convert %w_2 : (tensor<4xbf16>) -> tensor<4xf32>
  %w_3 = stablehlo.convert %f : (tensor<f32>) -> tensor<bf16>
  %3 = stablehlo.bitcast_convert %w_3 : (tensor<bf16>) -> tensor<2xui8>
  %4 = stablehlo.bitcast_convert %g : (tensor<4xf32>) -> tensor<4xui32>
  %5 = stablehlo.convert %2 : (tensor<4xf32>) -> tensor<4xf32>
  %6 = stablehlo.constant dense<4.46777343750000000e-02> : tensor<16x3xf32>
  %7 = stablehlo.constant dense<4.47149999999999989e-02> : tensor<16x3xf32>
  %8 = stablehlo.constant dense<[-1.00097656250000000e-01, 1.00000000000000000e+00]> : tensor<2xf32>
`
	if text != want {
		t.Errorf("%s", text)
	}
}

// Every program has a bound, with a reason; bits must be equal for updates and quantizers alone.
func TestBounds(t *testing.T) {
	all, err := allPrograms()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range all {
		for _, wide := range []bool{true, false} {
			b := d.pair.Bound(wide)
			exact := slices.Contains([]step.Kind{step.Update, step.Quantize, step.Zero}, d.pair.Kind)
			if b.Why == "" || (b.Limit == 0) != exact || b.Limit > 1 {
				t.Errorf("%s, wide %v: %+v", d, wide, b)
			}
			if wide && (b.Limit > 2e-2 || d.format == "bf16" && b.Limit > 2e-3) {
				t.Errorf("%s: %+v", d, b)
			}
		}
	}
}
