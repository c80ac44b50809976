package replay

import (
	"slices"

	"github.com/deepwell/deepwell/diag"
)

// A gemmConfig is GemmBackendConfig of XLA's backend_configs.proto.
type gemmConfig struct {
	Alpha     float64         `json:"alpha_real"`
	AlphaImag float64         `json:"alpha_imag"`
	Beta      float64         `json:"beta"`
	Dims      dotConfig       `json:"dot_dimension_numbers"`
	Precision precisionConfig `json:"precision_config"`
	Epilogue  string          `json:"epilogue"`
	LHSStride number          `json:"lhs_stride"`
	RHSStride number          `json:"rhs_stride"`
	GradX     bool            `json:"grad_x"`
	GradY     bool            `json:"grad_y"`
	AmaxOut   bool            `json:"damax_output"`
	ScaleMode int64           `json:"scale_mode"`
	Algorithm number          `json:"selected_algorithm"`
	Workspace number          `json:"autotune_workspace_size"`
}

// A precisionConfig is PrecisionConfig of xla_data.proto: how fast an f32 product may be computed.
type precisionConfig struct {
	Operands  []string `json:"operand_precision"`
	Algorithm string   `json:"algorithm"`
}

// An epilogue is what cuBLASLt does with a product before it writes it.
type epilogue struct {
	bias       bool // a vector is added to each row
	activation func(*writer, *value) *value
	aux        bool // what the activation is applied to is a result too
}

var epilogues = map[string]epilogue{
	"DEFAULT":       {},
	"BIAS":          {bias: true},
	"RELU":          {activation: (*writer).relu},
	"BIAS_RELU":     {bias: true, activation: (*writer).relu},
	"GELU":          {activation: (*writer).gelu},
	"BIAS_GELU":     {bias: true, activation: (*writer).gelu},
	"GELU_AUX":      {activation: (*writer).gelu, aux: true},
	"BIAS_GELU_AUX": {bias: true, activation: (*writer).gelu, aux: true},
	"SILU":          {activation: (*writer).silu},
	"BIAS_SILU":     {bias: true, activation: (*writer).silu},
}

// gemm rewrites a call of cuBLAS: alpha · A · B + beta · C, and an epilogue. Operands are A, B, C
// if beta is not 0, and the bias if the epilogue has one.
func (w *writer) gemm(s *site) []*value {
	var g gemmConfig
	w.readConfig(s, "gemm_backend_config", &g)
	e, known := epilogues[g.Epilogue]
	switch {
	case !known:
		w.refuse(diag.ReplayCall, "%s has the epilogue %s", s.target, g.Epilogue)
	case g.GradX || g.GradY || g.AmaxOut || g.ScaleMode != 0 || g.AlphaImag != 0:
		w.refuse(diag.ReplayCall, "%s has a gradient, a scale, an amax or an imaginary factor",
			s.target)
	}
	want := 2
	if g.Beta != 0 {
		want++
	}
	if e.bias {
		want++
	}
	out := s.shape.results()[0]
	if len(s.values) != want || !elemRows[out.typ].float {
		w.refuse(diag.ReplayCall, "%s of %s has %d operands; beta %g and epilogue %s take %d",
			s.target, out.typ, len(s.values), g.Beta, g.Epilogue, want)
	}
	w.checkStrides(s, g)
	v := w.dot(s.values[0], s.values[1], g.Dims.dims())
	if g.Alpha != 1 {
		v = w.elementwise("multiply", v, w.full(typeF32, v.shape.dims, g.Alpha))
	}
	if g.Beta != 0 {
		v = w.elementwise("add", v, w.scaledC(s, v, g.Beta))
	}
	if e.bias {
		v = w.elementwise("add", v, w.biasRows(s, v, out))
	}
	results := []*value{v}
	if e.activation != nil {
		results[0] = e.activation(w, v)
	}
	if e.aux {
		results = append(results, v)
	}
	for i := range results {
		results[i] = w.convert(results[i], s.shape.results()[min(i, len(s.shape.results())-1)].typ)
	}
	return results
}

// scaledC is the matrix that is added to a product.
func (w *writer) scaledC(s *site, product *value, beta float64) *value {
	c := w.convert(s.values[2], typeF32)
	if !slices.Equal(c.shape.dims, product.shape.dims) {
		w.refuse(diag.ReplayCall, "%s adds %v to %v", s.target, c.shape.dims, product.shape.dims)
	}
	if beta == 1 {
		return c
	}
	return w.elementwise("multiply", c, w.full(typeF32, c.shape.dims, beta))
}

// biasRows repeats the bias along all dimensions but the last.
func (w *writer) biasRows(s *site, product *value, out *shape) *value {
	bias := w.convert(s.values[len(s.values)-1], typeF32)
	dims := product.shape.dims
	last := len(dims) - 1
	if !out.rowMajor() || len(bias.shape.dims) != 1 || last < 0 || bias.shape.dims[0] != dims[last] {
		w.refuse(diag.ReplayCall, "%s adds a bias of %v to %v", s.target, bias.shape.dims, dims)
	}
	return w.broadcast(bias, dims, int64(last))
}

func (w *writer) relu(x *value) *value {
	return w.elementwise("maximum", x, w.full(typeF32, x.shape.dims, 0))
}

// gelu is x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))).
func (w *writer) gelu(x *value) *value {
	of := func(v float64) *value { return w.full(typeF32, x.shape.dims, v) }
	mul := func(a, b *value) *value { return w.elementwise("multiply", a, b) }
	cube := mul(mul(x, x), mul(x, of(0.044715)))
	t := w.elementwise("tanh", mul(of(0.7978845608028654), w.elementwise("add", x, cube)))
	return mul(mul(x, of(0.5)), w.elementwise("add", of(1), t))
}

func (w *writer) silu(x *value) *value {
	return w.elementwise("multiply", x, w.elementwise("logistic", x))
}
