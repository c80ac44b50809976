package fused

import (
	"fmt"
	"math"

	tt "github.com/deepwell/deepwell/kernels/triton"
)

// A Source is what a kernel computes before it quantizes: the tile of one or more matrices, from
// operands. Values are float32 until they are rounded to bfloat16, once.
type Source struct {
	Name     string
	Operands []Operand
	Parts    int // matrices that it gives
	Compute  func(t *tile, in []tt.Value) []tt.Value
}

// An Operand is what a source reads.
type Operand struct {
	Name string
	Elem tt.Elem
	// Along is what the operand has elements for: "" for each element of the matrix, "rows" for each
	// row, or "cols".
	Along string
}

// args lists the operands as arrays.
func (s Source) args(rows, cols int) (list []tt.Arg) {
	for _, o := range s.Operands {
		shape := []int{rows, cols}
		switch o.Along {
		case "rows":
			shape = shape[:1]
		case "cols":
			shape = shape[1:]
		}
		list = append(list, tt.Arg{Name: o.Name, Elem: o.Elem, Shape: shape})
	}
	return list
}

// matrices counts the operands that have an element for each of the matrix.
func (s Source) matrices() (n int) {
	for _, o := range s.Operands {
		if o.Along == "" {
			n++
		}
	}
	return n
}

// Sources are what kernels quantize, one row each.
func Sources() []Source {
	x := Operand{Name: "x", Elem: tt.BF16}
	gate, up, dy := Operand{Name: "gate", Elem: tt.BF16}, Operand{Name: "up", Elem: tt.BF16},
		Operand{Name: "dy", Elem: tt.BF16}
	return []Source{
		{"quantize", []Operand{x}, 1, func(t *tile, in []tt.Value) []tt.Value {
			return []tt.Value{t.load(in[0])}
		}},
		// The statistics of rows come from the kernel that added the residual: r = 1/√(mean x² + ε).
		{"rms_norm", []Operand{x, {"weight", tt.BF16, "cols"}, {"r", tt.F32, "rows"}}, 1,
			func(t *tile, in []tt.Value) []tt.Value {
				h := t.load(in[0]).To(tt.F32).Mul(t.perRow(in[2]))
				return []tt.Value{h.Mul(t.perColumn(in[1]).To(tt.F32))}
			}},
		{"swiglu", []Operand{gate, up}, 1, func(t *tile, in []tt.Value) []tt.Value {
			g, u := t.load(in[0]).To(tt.F32), t.load(in[1]).To(tt.F32)
			return []tt.Value{g.Mul(sigmoid(g)).Mul(u)}
		}},
		// With s = σ(g): d gate = dy·u·s·(1 + g(1 − s)), d up = dy·g·s.
		{"swiglu_grad", []Operand{gate, up, dy}, 2, func(t *tile, in []tt.Value) []tt.Value {
			g, u, d := t.load(in[0]).To(tt.F32), t.load(in[1]).To(tt.F32), t.load(in[2]).To(tt.F32)
			s := sigmoid(g)
			one := s.Const(1.0)
			return []tt.Value{d.Mul(u).Mul(s).Mul(g.Mul(one.Sub(s)).Add(1.0)), d.Mul(g).Mul(s)}
		}},
		{"gelu", []Operand{x}, 1, func(t *tile, in []tt.Value) []tt.Value {
			g := t.load(in[0]).To(tt.F32)
			return []tt.Value{g.Mul(sigmoid(geluInner(g)))}
		}},
		// With s = σ(k(g + a·g³)): d = dy·s·(1 + g(1 − s)·k(1 + 3a·g²)).
		{"gelu_grad", []Operand{x, dy}, 1, func(t *tile, in []tt.Value) []tt.Value {
			g, d := t.load(in[0]).To(tt.F32), t.load(in[1]).To(tt.F32)
			s := sigmoid(geluInner(g))
			slope := g.Mul(g).Mul(3 * geluCubic).Add(1.0).Mul(geluScale)
			return []tt.Value{d.Mul(s).Mul(g.Mul(s.Const(1.0).Sub(s)).Mul(slope).Add(1.0))}
		}},
	}
}

// Find gives the source of a name.
func Find(name string) (Source, error) {
	for _, s := range Sources() {
		if s.Name == name {
			return s, nil
		}
	}
	return Source{}, fmt.Errorf("no kernel computes %q", name)
}

// The tanh form of GELU as a sigmoid: x·σ(2√(2/π)(x + 0.044715x³)) (Hendrycks and Gimpel, 2016).
const (
	geluScale = 1.5957691216057308 // 2·√(2/π)
	geluCubic = 0.044715
)

func geluInner(g tt.Value) tt.Value {
	return g.Mul(g).Mul(geluCubic).Add(1.0).Mul(g).Mul(geluScale)
}

// sigmoid is 1/(1 + 2^(−x·log₂e)). ½ tanh.approx(x/2) + ½ is shorter, but its error, 2^-12 of 1, is
// 4 % of the sigmoid of −5, where it is subtracted from nearly as much.
func sigmoid(x tt.Value) tt.Value {
	return x.Const(1.0).Div(exp2(x.Mul(-math.Log2E)).Add(1.0))
}
