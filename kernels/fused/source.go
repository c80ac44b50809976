package fused

import (
	"fmt"
	"math"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/kernels/expr"
	tt "github.com/deepwell/deepwell/kernels/triton"
)

// A Source is what a kernel computes before it quantizes: the tile of one or more matrices, from
// operands. Values are float32 until they are rounded to bfloat16, once.
type Source struct {
	Name     string
	Operands []Operand
	Parts    int // matrices that it gives
	Expr     *expr.Expr
	Compute  func(t *tile, in []tt.Value) []tt.Value
}

// An Operand is what a source reads.
type Operand struct {
	Name string
	Elem tt.Elem
	Over expr.Over
}

// sources are the expressions that have a name, as package rewrite finds them in models: a kernel
// of another expression is called fused.
var sources = []struct{ name, text string }{
	{"quantize", "bf16 -> 0"},
	// The statistics of rows are r = 1/√(mean x² + ε), of another kernel.
	{"rms_norm", "bf16, f32 rows, f32 cols; mul 0 1; mul 3 2 -> 4"},
	{"layer_norm", "bf16, f32 rows, f32 rows, f32 cols, f32 cols; " +
		"sub 0 1; mul 5 2; mul 6 3; add 7 4 -> 8"},
	{"swiglu", "bf16, bf16; sigmoid 0; mul 0 2; mul 3 1 -> 4"},
	// Of dy, gate and up, with s = σ(gate): d up = dy·gate·s, d gate = dy·up·s + dy·up·gate·(s − s²).
	{"swiglu_grad", "bf16, bf16, bf16; sigmoid 1; mul 1 3; mul 0 4; mul 0 2; mul 6 3; mul 6 1; " +
		"mul 3 3; sub 3 9; mul 8 10; add 7 11 -> 5 12"},
	// The tanh form as a sigmoid, x·σ(2√(2/π)(x + 0.044715x³)) (Hendrycks and Gimpel, 2016).
	{"gelu", "bf16; mul 0 0; scale 1 0.044715; shift 2 1; mul 0 3; scale 4 1.5957691216057308; " +
		"sigmoid 5; mul 0 6 -> 7"},
	{"gelu_grad", "bf16, bf16; mul 1 1; scale 2 0.044715; shift 3 1; mul 1 4; " +
		"scale 5 1.5957691216057308; sigmoid 6; mul 0 7; mul 0 1; mul 7 7; sub 7 10; mul 9 11; " +
		"scale 12 1.5957691216057308; mul 13 4; add 8 14; mul 13 1; scale 16 0.044715; mul 17 1; " +
		"add 15 18; mul 17 1; add 19 20 -> 21"},
	// The gradient of RMS norm added to the residual's, of which the rows' statistics are given:
	// d + r(dy·w − x·r·mean(dy·w·x·r)).
	{"rms_norm_grad", "bf16, bf16, f32 cols, bf16, f32 rows, f32 rows; mul 1 2; mul 3 4; mul 7 5; " +
		"sub 6 8; mul 9 4; add 0 10 -> 11"},
}

// Sources are what kernels quantize, one row each.
func Sources() (list []Source) {
	for _, row := range sources {
		e, err := expr.Parse(row.text)
		if err != nil {
			panic(err) // the table is this file's
		}
		list = append(list, Of(e))
	}
	return list
}

// Of makes a source of an expression.
func Of(e *expr.Expr) Source {
	s := Source{Name: "fused", Parts: len(e.Out), Expr: e}
	for _, row := range sources {
		if row.text == e.String() {
			s.Name = row.name
		}
	}
	for i, o := range e.In {
		elem := tt.F32
		if o.Elem == dtype.BF16 {
			elem = tt.BF16
		}
		s.Operands = append(s.Operands, Operand{fmt.Sprintf("x%d", i), elem, o.Over})
	}
	s.Compute = func(t *tile, in []tt.Value) []tt.Value {
		var wide []tt.Value
		for i, o := range s.Operands {
			wide = append(wide, t.operand(in[i], o.Over).To(tt.F32))
		}
		return expr.Do(e, wide, func(step expr.Step, args []tt.Value) tt.Value {
			return compute(t, step, args)
		})
	}
	if len(e.Steps) == 0 { // nothing is computed: the bits stay
		s.Compute = func(t *tile, in []tt.Value) []tt.Value { return []tt.Value{t.load(in[0])} }
	}
	return s
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

// args lists the operands as arrays.
func (s Source) args(rows, cols int) (list []tt.Arg) {
	for _, o := range s.Operands {
		shape := map[expr.Over][]int{expr.Matrix: {rows, cols}, expr.Rows: {rows}, expr.Cols: {cols},
			expr.Scalar: {1}}[o.Over]
		list = append(list, tt.Arg{Name: o.Name, Elem: o.Elem, Shape: shape})
	}
	return list
}

// matrices counts the operands that have an element for each of the matrix.
func (s Source) matrices() (n int) {
	for _, o := range s.Operands {
		if o.Over == expr.Matrix {
			n++
		}
	}
	return n
}

// compute prints one step, in float32.
func compute(t *tile, s expr.Step, args []tt.Value) tt.Value {
	if expr.Compares(s.Op) {
		return args[0].Is(s.Op, args[1])
	}
	switch s.Op {
	case "fill":
		return t.b.Full(s.By, tt.F32, 1, 1)
	case "select":
		return args[1].Select(args[0], args[2])
	case "add":
		return args[0].Add(args[1])
	case "sub":
		return args[0].Sub(args[1])
	case "mul":
		return args[0].Mul(args[1])
	case "div":
		return args[0].Div(args[1])
	case "neg":
		return args[0].Const(0.0).Sub(args[0])
	case "scale":
		return args[0].Mul(s.By)
	case "shift":
		return args[0].Add(s.By)
	case "exp":
		return exp2(args[0].Mul(math.Log2E))
	case "log":
		return args[0].Log2().Mul(math.Ln2)
	case "sqrt":
		return args[0].Sqrt()
	case "rsqrt":
		return args[0].Rsqrt()
	case "sigmoid":
		return sigmoid(args[0])
	case "tanh":
		return tanh(args[0])
	case "relu":
		return args[0].Const(0.0).Select(args[0].Is("le", 0.0), args[0]) // a NaN stays
	}
	return t.b.Fail("no kernel computes %s", s.Op)
}

// sigmoid is 1/(1 + 2^(−x·log₂e)). ½ tanh.approx(x/2) + ½ is shorter, but its error, 2^-12 of 1, is
// 4 % of the sigmoid of −5, where it is subtracted from nearly as much.
func sigmoid(x tt.Value) tt.Value {
	return reciprocal(exp2(x.Mul(-math.Log2E)).Add(1.0))
}

// tanh is 2σ(2x) − 1, and near 0, where that cancels, x − x³/3, both to 2e-6; the instruction's
// error is 2^-11.
func tanh(x tt.Value) tt.Value {
	near := x.Sub(x.Mul(x).Mul(x).Mul(1.0 / 3))
	return near.Select(x.Abs().Is("lt", 0.06), sigmoid(x.Mul(2.0)).Mul(2.0).Sub(1.0))
}
