package fused_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	codec "github.com/deepwell/deepwell/dtype/block"
	"github.com/deepwell/deepwell/kernels/expr"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/kernels/triton"
	"github.com/deepwell/deepwell/kernels/triton/run"
)

// hostile is a matrix of bfloat16 bits with all kinds of blocks: of one size, of many, zeros,
// subnormal numbers, infinities, NaNs, and largest numbers on both sides of where a scale changes.
func hostile(r *rand.Rand, rows, cols int) []uint16 {
	x := make([]uint16, rows*cols)
	for i := range x {
		size := 4.0
		switch i / cols / 32 % 3 {
		case 1:
			size = math.Ldexp(1, -10+i%cols/32*7%60)
		case 2:
			size = math.Ldexp(1, 40-i%cols/32*11%100)
		}
		x[i] = dtype.BF16FromF32(float32(r.NormFloat64() * size))
	}
	at := func() int { return r.IntN(len(x)) }
	for range len(x) / 700 {
		i := at()
		for k := i; k < min(i+40, len(x)); k++ {
			x[k] = 0
		}
		x[at()] = 0x7f80                // infinity
		x[at()] = 0xffc1                // a NaN
		x[at()] = uint16(1 + r.IntN(9)) // subnormal
		x[at()] = 0x43e0                // 448
		x[at()] = 0x43e1                // and the next
	}
	return x
}

func source(t *testing.T, name string) fused.Source {
	t.Helper()
	s, err := fused.Find(name)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// words gives the bytes of bfloat16 bits.
func words(x []uint16) []byte {
	var b []byte
	for _, w := range x {
		b = binary.LittleEndian.AppendUint16(b, w)
	}
	return b
}

// arrays gives the operands and room for the results of a kernel.
func arrays(k *triton.Kernel, operands ...[]byte) [][]byte {
	for _, a := range k.Args[len(operands):] {
		n := a.Elem.Bits() / 8
		for _, s := range a.Shape {
			n *= s
		}
		operands = append(operands, make([]byte, n))
	}
	return operands
}

// unswizzled puts scales of tensor cores into rows again.
func unswizzled(scales []byte, rows, blocks int) []byte {
	out := make([]byte, rows*blocks)
	wide := (blocks + 3) / 4
	for r := range rows {
		for c := range blocks {
			out[r*blocks+c] = scales[(r/128*wide+c/4)*512+r%32*16+r%128/32*4+c%4]
		}
	}
	return out
}

// mxfp8 is what the codec gives for both orientations.
func mxfp8(t *testing.T, x []uint16, rows, cols int) (list [4][]byte) {
	t.Helper()
	n := rows * cols
	list = [4][]byte{make([]byte, n), make([]byte, n/32), make([]byte, n), make([]byte, n/32)}
	if err := codec.MXFP8(list[0], list[1], x); err != nil {
		t.Fatal(err)
	}
	if err := codec.MXFP8Columns(list[2], list[3], x, rows, cols); err != nil {
		t.Fatal(err)
	}
	return list
}

// both is the form of what GEMMs read at once.
var both = fused.Form{Along: true, Across: true, Swizzled: true}

// formulas are what sources compute, in float64: each number of the matrix from its operands'.
var formulas = map[string]func(in []float64) []float64{
	"quantize": func(in []float64) []float64 { return in },
	"rms_norm": func(in []float64) []float64 { return []float64{in[0] * in[1] * in[2]} },
	"layer_norm": func(in []float64) []float64 {
		return []float64{(in[0]-in[1])*in[2]*in[3] + in[4]}
	},
	"swiglu": func(in []float64) []float64 { return []float64{in[0] / (1 + math.Exp(-in[0])) * in[1]} },
	"swiglu_grad": func(in []float64) []float64 {
		dy, gate, up := in[0], in[1], in[2]
		s := 1 / (1 + math.Exp(-gate))
		return []float64{dy * gate * s, dy * up * (s + gate*s*(1-s))}
	},
	"gelu": func(in []float64) []float64 { return []float64{gelu(in[0])} },
	"gelu_grad": func(in []float64) []float64 {
		x, k := in[1], math.Sqrt(2/math.Pi)
		u := k * (x + 0.044715*x*x*x)
		slope := x / 2 / (math.Cosh(u) * math.Cosh(u)) * k * (1 + 3*0.044715*x*x)
		return []float64{in[0] * ((1+math.Tanh(u))/2 + slope)}
	},
	"rms_norm_grad": func(in []float64) []float64 {
		d, dy, w, x, r, mean := in[0], in[1], in[2], in[3], in[4], in[5]
		return []float64{d + r*(dy*w-x*r*mean)}
	},
}

func gelu(x float64) float64 {
	return x / 2 * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(x+0.044715*x*x*x)))
}

// operands draws the operands of a source, as bytes and as numbers for each element of the matrix.
func operands(r *rand.Rand, s fused.Source, rows, cols int) (list [][]byte, at func(i int) []float64) {
	var numbers [][]float64
	for _, o := range s.Operands {
		n := map[expr.Over]int{expr.Matrix: rows * cols, expr.Rows: rows, expr.Cols: cols}[o.Over]
		x := make([]uint16, n)
		for i := range x {
			x[i] = dtype.BF16FromF32(float32(r.NormFloat64() * 2))
		}
		if s.Name == "quantize" {
			x = hostile(r, rows, cols)
		}
		b, f := words(x), make([]float64, n)
		if o.Elem == triton.F32 {
			b = nil
		}
		for i, w := range x {
			v := dtype.F32FromBF16(w)
			if f[i] = float64(v); o.Elem == triton.F32 {
				b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
			}
		}
		list, numbers = append(list, b), append(numbers, f)
	}
	return list, func(i int) []float64 {
		v := make([]float64, len(numbers))
		for k, f := range numbers {
			v[k] = f[map[expr.Over]int{expr.Matrix: i, expr.Rows: i / cols, expr.Cols: i % cols}[s.Operands[k].Over]]
		}
		return v
	}
}

// computed gives what a source computes, as the kernel keeps it, part by part, and holds it to the
// formula: to bfloat16's rounding, and to float32's of numbers of about 1 that cancel.
func computed(t *testing.T, s fused.Source, rows, cols int, in [][]byte, at func(i int) []float64) (parts [][]uint16) {
	t.Helper()
	k, err := fused.MXFP8(fused.Matrix{Rows: rows, Cols: cols}, s, fused.Form{Along: true, Keep: true})
	if err != nil {
		t.Fatal(err)
	}
	all := arrays(k, in...)
	if err := run.Kernel(k, all); err != nil {
		t.Fatal(err)
	}
	for p := range s.Parts {
		b := all[len(in)+3*p]
		y := make([]uint16, rows*cols)
		for i := range y {
			y[i] = binary.LittleEndian.Uint16(b[2*i:])
			got, want := float64(dtype.F32FromBF16(y[i])), formulas[s.Name](at(i))[p]
			if s.Name == "quantize" {
				if b[2*i] != in[0][2*i] || b[2*i+1] != in[0][2*i+1] {
					t.Fatalf("%s, element %d: %v, not %v", s.Name, i, got, want)
				}
			} else if math.Abs(got-want) > halfUnit*math.Abs(want)+cancelBound {
				t.Fatalf("%s, element %d of part %d: %v, not %v", s.Name, i, p, got, want)
			}
		}
		parts = append(parts, y)
	}
	return parts
}

// hold compares codes and scales both ways with the codec's.
func hold(t *testing.T, s fused.Source, got [][]byte, want [4][]byte, rows, cols int) {
	t.Helper()
	for i, b := range got {
		n, first := differ(b, want[i])
		// NVFP4's transform sums float32 in the codec and exactly here: where all but the smallest
		// numbers of a block cancel, codes differ.
		most := 0.0
		if i >= 2 && len(got[0]) != rows*cols {
			most = mostFlips
		}
		if float64(n) > most*float64(len(b)) {
			t.Errorf("%s, %d×%d: %s: %d of %d bytes differ, the first at %d: %#x, want %#x", s.Name, rows,
				cols, []string{"codes", "scales", "transposed codes", "transposed scales"}[i], n, len(b), first,
				b[first], want[i][first])
		}
	}
}

// mostFlips is the share of NVFP4's transformed codes that may differ from the codec's.
const mostFlips = 1e-3

// halfUnit is the rounding of bfloat16 and a little for float32's before it.
const halfUnit = 1.001 / 256

// cancelBound is what float32 loses where numbers of about 10 cancel, as in 1 − tanh².
const cancelBound = 5e-6

// differ counts the bytes that differ and names the first.
func differ(got, want []byte) (n, first int) {
	for i := range want {
		if got[i] != want[i] {
			if n++; n == 1 {
				first = i
			}
		}
	}
	return n, first
}

var shapes = [][2]int{{128, 256}, {32, 128}, {96, 384}, {256, 128}, {160, 128}, {128, 512}}

// oddShapes have tiles that lie partly outside, with columns that only sources of one part take.
var oddShapes = [][2]int{{32, 32}, {96, 160}, {160, 288}}

func TestMXFP8(t *testing.T) {
	r := rand.New(rand.NewPCG(22, 1))
	for _, s := range fused.Sources() {
		t.Run(s.Name, func(t *testing.T) {
			for _, d := range slices.Concat(shapes, oddShapes) {
				k, err := fused.MXFP8(fused.Matrix{Rows: d[0], Cols: d[1]}, s, both)
				if err != nil {
					t.Fatal(err)
				}
				in, at := operands(r, s, d[0], d[1])
				all := arrays(k, in...)
				if err := run.Kernel(k, all); err != nil {
					t.Fatal(err)
				}
				rows, cols, got := d[0], d[1], all[len(in):]
				for _, y := range computed(t, s, rows, cols, in, at) {
					hold(t, s, [][]byte{got[0], unswizzled(got[1], rows, cols/32), got[2],
						unswizzled(got[3], cols, rows/32)}, mxfp8(t, y, rows, cols), rows, cols)
					got = got[4:]
				}
			}
		})
	}
}

// Other forms: one orientation, scales in rows, several matrices, rows that are no whole blocks.
func TestMXFP8Forms(t *testing.T) {
	r, s := rand.New(rand.NewPCG(22, 10)), source(t, "quantize")
	for _, m := range []fused.Matrix{{1, 96, 160}, {3, 64, 128}, {2, 160, 288}, {1, 50, 256}, {5, 32, 32}} {
		for _, f := range []fused.Form{{Along: true}, {Across: true}, {Along: true, Across: true}} {
			if f.Across && m.Rows%32 != 0 {
				if _, err := fused.MXFP8(m, s, f); err == nil {
					t.Errorf("%v is taken, %v", m, f)
				}
				continue
			}
			k, err := fused.MXFP8(m, s, f)
			if err != nil {
				t.Fatal(err)
			}
			n := m.Rows * m.Cols
			x := hostile(r, m.Batch*m.Rows, m.Cols)
			all := arrays(k, words(x))
			if err := run.Kernel(k, all); err != nil {
				t.Fatal(err)
			}
			for i, got := range all[1:] {
				for batch := range m.Batch {
					one := x[batch*n:][:n]
					var want []byte
					if m.Rows%32 != 0 {
						codes, scales := make([]byte, n), make([]byte, n/32)
						if err := codec.MXFP8(codes, scales, one); err != nil {
							t.Fatal(err)
						}
						want = [][]byte{codes, scales}[i]
					} else if list := mxfp8(t, one, m.Rows, m.Cols); f.Along {
						want = list[i]
					} else {
						want = list[i+2]
					}
					if n, at := differ(got[batch*len(want):][:len(want)], want); n > 0 {
						t.Errorf("%v, %v: result %d: %d of %d bytes differ, the first at %d", m, f, i, n, len(want), at)
					}
				}
			}
		}
	}
}

// A kernel in a loop reads and writes one round of its stacks and leaves the others as they are.
func TestStacks(t *testing.T) {
	const rounds, round = 3, 1
	r, s := rand.New(rand.NewPCG(22, 11)), source(t, "swiglu_grad")
	for _, d := range [][2]int{{128, 256}, {96, 160}} {
		m, n := fused.Matrix{Batch: 1, Rows: d[0], Cols: d[1]}, d[0]*d[1]
		form := fused.Form{Along: true, Across: true, Stacks: fused.Stacks{Rounds: rounds,
			From: []int{1}, Into: []int{2, 7}, Saved: []int{0, 2}}}
		k, err := fused.MXFP8(m, s, form)
		if err != nil {
			t.Fatal(err)
		}
		spec, err := fused.ParseSpec(k.Spec)
		if err != nil || spec.String() != k.Spec || spec.Matrix != m {
			t.Errorf("%s: %v, %v", k.Spec, spec, err)
		}
		in, _ := operands(r, s, d[0], d[1])
		plain, err := fused.MXFP8(m, s, fused.Form{Along: true, Across: true})
		if err != nil {
			t.Fatal(err)
		}
		want := arrays(plain, in...)
		if err := run.Kernel(plain, want); err != nil {
			t.Fatal(err)
		}
		stack := bytes.Repeat([]byte{7}, 2*n*rounds)
		copy(stack[2*n*round:], in[1])
		all := [][]byte{in[0], stack, in[2], {round, 0, 0, 0}}
		for _, a := range k.Args[4:] {
			size := a.Elem.Bits() / 8
			for _, n := range a.Shape {
				size *= n
			}
			all = append(all, bytes.Repeat([]byte{9}, size))
		}
		if err := run.Kernel(k, all); err != nil {
			t.Fatal(err)
		}
		got := all[len(all)-10:]
		for i, a := range k.Args[len(k.Args)-10:] {
			var b []byte
			if i < 8 {
				b = want[3+i]
			} else {
				b = in[[]int{0, 2}[i-8]]
			}
			if a.InPlace != "" {
				b = slices.Concat(bytes.Repeat([]byte{9}, len(b)), b, bytes.Repeat([]byte{9}, len(b)))
			}
			if !bytes.Equal(got[i], b) {
				t.Errorf("%v: %s differs", d, a.Name)
			}
		}
	}
}

// Errors that are planted in a text are found.
func TestPlantedErrors(t *testing.T) {
	k, err := fused.MXFP8(fused.Matrix{Rows: 96, Cols: 160}, source(t, "quantize"), both)
	if err != nil {
		t.Fatal(err)
	}
	x := hostile(rand.New(rand.NewPCG(22, 2)), 96, 160)
	for _, c := range []struct{ name, old, new string }{
		{"index", "dense<160> : tensor<32x1xi32>", "dense<159> : tensor<32x1xi32>"},
		{"mask", "dense<96> : tensor<32xi32>", "dense<97> : tensor<32xi32>"},
		{"scale order", "dense<16> : tensor<32x1xi32>", "dense<4> : tensor<32x1xi32>"},
		{"rounding of scales", "dense<31> : tensor<32x4xi32>", "dense<32> : tensor<32x4xi32>"},
		{"transposition", "order = array<i32: 1, 0>", "order = array<i32: 0, 1>"},
	} {
		bad := *k
		if bad.Text = strings.Replace(k.Text, c.old, c.new, 1); bad.Text == k.Text {
			t.Errorf("%s: the text has no %q", c.name, c.old)
			continue
		}
		all := arrays(&bad, words(x))
		err := run.Kernel(&bad, all)
		want := mxfp8(t, x, 96, 160)
		wrong := 0
		for i, b := range [][]byte{all[1], unswizzled(all[2], 96, 5), all[3], unswizzled(all[4], 160, 3)} {
			n, _ := differ(b, want[i])
			wrong += n
		}
		t.Logf("%s: %v, %d bytes differ", c.name, err, wrong)
		if err == nil && wrong == 0 {
			t.Errorf("%s: the error is not found", c.name)
		}
	}
}

// nvfp4 is what the codec gives: along rows, and along columns after the Hadamard transform; and the
// largest magnitudes of both.
func nvfp4(t *testing.T, x []uint16, rows, cols int) (list [4][]byte, amax [2]float32) {
	t.Helper()
	n := rows * cols
	transposed := make([]uint16, n)
	err := errors.Join(codec.Transpose(transposed, x, rows, cols), codec.Hadamard(transposed, transposed))
	list = [4][]byte{make([]byte, n/2), make([]byte, n/16), make([]byte, n/2), make([]byte, n/16)}
	amax = [2]float32{codec.Amax(x), codec.Amax(transposed)}
	err = errors.Join(err, codec.NVFP4(list[0], list[1], x, amax[0]),
		codec.NVFP4(list[2], list[3], transposed, amax[1]))
	if err != nil {
		t.Fatal(err)
	}
	return list, amax
}

func TestNVFP4(t *testing.T) {
	r := rand.New(rand.NewPCG(22, 5))
	for _, s := range fused.Sources() {
		t.Run(s.Name, func(t *testing.T) {
			for i, d := range slices.Concat(shapes, oddShapes) {
				k, err := fused.NVFP4(fused.Matrix{Rows: d[0], Cols: d[1]}, s, fused.NVFP4Form{Form: both})
				if err != nil {
					t.Fatal(err)
				}
				in, at := operands(r, s, d[0], d[1])
				if s.Name == "quantize" && i%2 == 0 { // a NaN would be everywhere, by the tensor's scale
					in, at = finite(in[0])
				}
				var want [][4][]byte
				for _, part := range computed(t, s, d[0], d[1], in, at) {
					list, amax := nvfp4(t, part, d[0], d[1])
					want = append(want, list)
					for _, a := range amax {
						in = append(in, binary.LittleEndian.AppendUint32(nil, math.Float32bits(a)))
					}
				}
				all := arrays(k, in...)
				if err := run.Kernel(k, all); err != nil {
					t.Fatal(err)
				}
				got := all[len(in):]
				for _, list := range want {
					hold(t, s, [][]byte{got[0], unswizzled(got[1], d[0], d[1]/16), got[2],
						unswizzled(got[3], d[1], d[0]/16)}, list, d[0], d[1])
					got = got[4:]
				}
			}
		})
	}
}

// finite replaces infinities and NaNs by zeros.
func finite(x []byte) (in [][]byte, at func(i int) []float64) {
	for i := 0; i < len(x); i += 2 {
		if w := binary.LittleEndian.Uint16(x[i:]); w&0x7f80 == 0x7f80 {
			x[i], x[i+1] = 0, 0
		}
	}
	return [][]byte{x}, func(i int) []float64 {
		return []float64{float64(dtype.F32FromBF16(binary.LittleEndian.Uint16(x[2*i:])))}
	}
}
