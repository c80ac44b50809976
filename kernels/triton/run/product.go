package run

import (
	"fmt"
	"math"
	"strings"
)

// productRules are matrix products and inline PTX.
var productRules = map[string]rule{
	"tt.dot": func(_ *machine, _ *op, in []*block) ([]*block, error) {
		return product(in[0].floats, in[1].floats, in[0].shape, in[1].shape, in[2])
	},
	"tt.elementwise_inline_asm": assembly,
}

// product is x·y + c in float32, summed in order.
func product(x, y []float32, sx, sy []int, c *block) ([]*block, error) {
	m, k, n := sx[0], sx[1], sy[1]
	if sy[0] != k || c.count() != m*n {
		return nil, fmt.Errorf("%v times %v", sx, sy)
	}
	out := c.typ.block()
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
	"tanh.approx.f32":    each(math.Tanh),
	"ex2.approx.ftz.f32": each(math.Exp2),
}
