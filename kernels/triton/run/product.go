package run

import (
	"fmt"
	"math"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	codec "github.com/deepwell/deepwell/dtype/block"
)

// productRules are matrix products and inline PTX.
var productRules = map[string]rule{
	"tt.dot": func(_ *machine, _ *op, in []*block) ([]*block, error) {
		return product(in[0].floats, in[1].floats, in[0].shape, in[1].shape, in[2])
	},
	"tt.dot_scaled":             dotScaled,
	"tt.elementwise_inline_asm": assembly,
}

// dotScaled multiplies decoded matrices: [m, k] codes with scales [m, k/b], and [k, n] with
// [n, k/b].
func dotScaled(_ *machine, o *op, in []*block) ([]*block, error) {
	x, err := decoded(o, in[0], in[1])
	if err != nil {
		return nil, err
	}
	y, err := decoded(o, in[2].trans([]int{1, 0}), in[3])
	if err != nil {
		return nil, err
	}
	y = y.trans([]int{1, 0})
	return product(x.floats, y.floats, x.shape, y.shape, in[4])
}

// decoded gives the numbers of codes [m, k], or packed [m, k/2], times the scales of their blocks.
// Scales of packed codes are E4M3 numbers; others are powers of two.
func decoded(o *op, codes, scales *block) (*block, error) {
	m, k := codes.shape[0], codes.shape[1]
	packed := strings.Contains(o.text, "lhs = e2m1")
	if packed {
		k *= 2
	}
	out := typ{"f32", "", []int{m, k}}.block()
	per := k / scales.shape[1]
	if scales.shape[0] != m || per*scales.shape[1] != k {
		return nil, fmt.Errorf("scales %v of codes %v", scales.shape, codes.shape)
	}
	for i := range out.floats {
		var f float32
		if packed {
			f = dtype.F32FromE2M1(byte(codes.encode(i/2) >> (4 * (i % 2)) & 15))
		} else {
			f = codes.floats[i]
		}
		s := scales.encode(i/k*scales.shape[1] + i%k/per)
		if by := dtype.F32FromE8M0(byte(s)); packed {
			f *= dtype.F32FromE4M3(byte(s))
		} else {
			f *= by
		}
		out.floats[i] = f
	}
	return out, nil
}

// product is x·y + c in float32, summed in order.
func product(x, y []float32, sx, sy []int, c *block) ([]*block, error) {
	m, k, n := sx[0], sx[1], sy[1]
	if sy[0] != k || c.count() != m*n {
		return nil, fmt.Errorf("%v times %v", sx, sy)
	}
	out := c.block()
	for i := range m {
		for j := range n {
			sum := float64(c.floats[i*n+j])
			for l := range k {
				sum += float64(x[i*k+l]) * float64(y[l*n+j])
			}
			out.floats[i*n+j] = float32(sum)
		}
	}
	return []*block{out}, nil
}

// assembly runs inline PTX, of which it knows some instructions.
func assembly(_ *machine, o *op, in []*block) ([]*block, error) {
	out := o.out[0].block()
	for prefix, f := range instructions {
		if strings.HasPrefix(o.quoted[0], prefix) {
			f(out, in)
			return []*block{out}, nil
		}
	}
	return nil, fmt.Errorf("unknown PTX %q", o.quoted[0])
}

// each computes a function of one float for every element.
func each(f func(x float64) float64) func(out *block, in []*block) {
	return func(out *block, in []*block) {
		for i, x := range in[0].floats {
			out.floats[i] = float32(f(float64(x)))
		}
	}
}

var instructions = map[string]func(out *block, in []*block){
	"ex2.approx.ftz.f32": each(math.Exp2),
	"rcp.approx.ftz.f32": each(func(x float64) float64 { return 1 / x }),
	"{ .reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, $2, $1; " +
		"mov.b32 $0, {t, t, t, t}; }": packE2M1,
	"{ .reg .b16 t; cvt.rs.satfinite.e2m1x4.f32 t, {$4, $3, $2, $1}, $5; " +
		"mov.b32 $0, {t, t}; }": packRandomly,
	"fma.rz.f32 $0, $1, 0f3F000000, 0f3F000000;": each(func(x float64) float64 {
		f := x/2 + 0.5
		return math.Float64frombits(math.Float64bits(f) &^ (1<<29 - 1)) // towards zero, in float32
	}),
}

// packRandomly rounds four numbers to 16 bits, the first in the lowest, and repeats them.
func packRandomly(out *block, in []*block) {
	for i := range out.ints {
		var word int64
		for k := range 4 {
			word |= int64(codec.Round(in[k].floats[i], k, uint32(in[4].ints[i]))) << (4 * k)
		}
		out.ints[i] = wrap(word*0x00010001, "i32")
	}
}

// packE2M1 rounds two numbers to a byte, the first in the low half, and repeats it four times.
func packE2M1(out *block, in []*block) {
	for i := range out.ints {
		low, high := dtype.E2M1FromF32(in[0].floats[i]), dtype.E2M1FromF32(in[1].floats[i])
		out.ints[i] = wrap(int64(low|high<<4)*0x01010101, "i32")
	}
}
