package replay

import (
	"fmt"
	"math"
	"strings"

	"github.com/deepwell/deepwell/dtype/block"
)

// gemmText is the configuration of a GEMM [m, k] · [k, n], or of a batch of them.
func gemmText(alpha, beta float64, epilogue string, batch bool, lhs, rhs int64) string {
	dims, contracting, other := "", `"1"`, `"0"`
	if batch {
		dims, contracting, other = `"0"`, `"2"`, `"1"`
	}
	return fmt.Sprintf(`{"operation_queue_id":"0","gemm_backend_config":{"alpha_real":%g,"beta":%g,`+
		`"dot_dimension_numbers":{"lhs_contracting_dimensions":[%s],"rhs_contracting_dimensions":[%s],`+
		`"lhs_batch_dimensions":[%s],"rhs_batch_dimensions":[%[5]s]},"alpha_imag":0,`+
		`"precision_config":{"operand_precision":["DEFAULT","DEFAULT"],"algorithm":"ALG_UNSET"},`+
		`"epilogue":"%[6]s","lhs_stride":"%d","rhs_stride":"%d","grad_x":false,"grad_y":false,`+
		`"damax_output":false,"autotune_workspace_size":"0","scale_mode":0}}`,
		alpha, beta, contracting, other, dims, epilogue, lhs, rhs)
}

// matmul64 multiplies [m, k] by [k, n].
func matmul64(a, b []float64, m, k, n int) []float64 {
	out := make([]float64, m*n)
	for i := range m {
		for j := range n {
			for l := range k {
				out[i*n+j] += a[i*k+l] * b[l*n+j]
			}
		}
	}
	return out
}

// withWorkspace is a result with scratch memory.
func withWorkspace(typ elemType, results ...*shape) *shape {
	return tup(append(results, arr(typ, []int64{64}))...)
}

// gemmExamples call cuBLAS with factors, epilogues and batches. The matrices are square or not, so
// that a fault that transposes one still fits somewhere.
func gemmExamples() (list []example) {
	const m, k, n = 4, 4, 6
	a, b, c, bias := randoms(1, m*k), randoms(2, k*n), randoms(3, m*n), randoms(4, n)
	matrix := func(rows, cols int64) *shape { return arr(typeBF16, []int64{rows, cols}) }
	for _, row := range []struct {
		name, target, epilogue string
		alpha, beta            float64
		f                      func(float64) float64
	}{
		{"gemm", "__cublas$lt$matmul", "DEFAULT", 1, 0, nil},
		{"gemm with alpha", "__cublas$gemm", "DEFAULT", 0.5, 0, nil},
		{"gemm with beta", "__cublas$lt$matmul", "DEFAULT", 1, 2, nil},
		{"gemm with bias", "__cublas$lt$matmul", "BIAS", 1, 1, nil},
		{"gemm with relu", "__cublas$lt$matmul", "RELU", 1, 0, func(x float64) float64 { return max(x, 0) }},
		{"gemm with gelu", "__cublas$lt$matmul", "BIAS_GELU", 1, 0, func(x float64) float64 {
			return x / 2 * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(x+0.044715*x*x*x)))
		}},
		{"gemm with silu", "__cublas$lt$matmul", "SILU", 1, 0, func(x float64) float64 {
			return x / (1 + math.Exp(-x))
		}},
	} {
		p := newBuilder(row.name)
		operands := []int64{p.param(0, matrix(m, k)), p.param(1, matrix(k, n))}
		args, want := one(a, b), matmul64(a, b, m, k, n)
		add := func(s *shape, values []float64, factor float64) {
			operands = append(operands, p.param(int64(len(operands)), s))
			args = append(args, one(values)...)
			for i := range want {
				want[i] += factor * values[i%len(values)]
			}
		}
		for i := range want {
			want[i] *= row.alpha
		}
		if row.beta != 0 {
			add(matrix(m, n), c, row.beta)
		}
		if strings.Contains(row.epilogue, "BIAS") {
			add(arr(typeBF16, []int64{n}), bias, 1)
		}
		for i := range want {
			if row.f != nil {
				want[i] = row.f(want[i])
			}
		}
		v := p.call(row.target, gemmText(row.alpha, row.beta, row.epilogue, false, m*k, k*n),
			withWorkspace(typeS8, matrix(m, n)), operands...)
		list = append(list, example{name: row.name, code: p.returns(p.element(v, 0)), args: args,
			want: one(want), bound: 1e-2})
	}
	return append(list, batchedGEMM(), expertGEMM(), keptProduct())
}

// batchedGEMM has an f32 result, in another layout, and no workspace.
func batchedGEMM() example {
	const batch, m, k, n = 3, 2, 4, 5
	a, b := randoms(5, batch*m*k), randoms(6, batch*k*n)
	p := newBuilder("batch of gemms")
	v := p.call("__cublas$gemm", gemmText(1, 0, "DEFAULT", true, m*k, k*n),
		arr(typeF32, []int64{batch, m, n}, 1, 2, 0), p.param(0, arr(typeBF16, []int64{batch, m, k})),
		p.param(1, arr(typeBF16, []int64{batch, k, n}, 1, 2, 0)))
	var want []float64
	for i := range batch {
		want = append(want, matmul64(a[i*m*k:(i+1)*m*k], b[i*k*n:(i+1)*k*n], m, k, n)...)
	}
	return example{name: p.name, code: p.returns(v), args: one(a, b), want: one(want), bound: 1e-6}
}

// expertGEMM has weights [k, batch, n], as FSDP gathers them along k. Their stride, batch·n, is not
// how far the matrices are apart.
func expertGEMM() example {
	const batch, m, k, n = 3, 2, 4, 5
	a, b := randoms(5, batch*m*k), randoms(6, batch*k*n)
	p := newBuilder("gemms of experts")
	text := strings.NewReplacer(`"rhs_contracting_dimensions":["1"]`, `"rhs_contracting_dimensions":["0"]`,
		`"rhs_batch_dimensions":["0"]`, `"rhs_batch_dimensions":["1"]`).
		Replace(gemmText(1, 0, "DEFAULT", true, m*k, batch*n))
	v := p.call("__cublas$lt$matmul", text, withWorkspace(typeS8, arr(typeF32, []int64{batch, m, n})),
		p.param(0, arr(typeBF16, []int64{batch, m, k})), p.param(1, arr(typeBF16, []int64{k, batch, n})))
	var want []float64
	for i := range batch {
		var w []float64
		for row := range k {
			w = append(w, b[(row*batch+i)*n:(row*batch+i+1)*n]...)
		}
		want = append(want, matmul64(a[i*m*k:(i+1)*m*k], w, m, k, n)...)
	}
	return example{name: p.name, code: p.returns(p.element(v, 0)), args: one(a, b), want: one(want),
		bound: 1e-6}
}

// keptProduct is an instruction, not a call.
func keptProduct() example {
	a, b := randoms(7, 6), randoms(8, 12)
	p := newBuilder("dot")
	dims := msg(nil).Bytes(30, msg(nil).Packed(1, 1).Packed(2, 0))
	v := p.op("dot", arr(typeF32, []int64{2, 4}), dims, p.param(0, arr(typeBF16, []int64{2, 3})),
		p.param(1, arr(typeBF16, []int64{3, 4})))
	return example{name: p.name, code: p.returns(v), args: one(a, b),
		want: one(matmul64(a, b, 2, 3, 4)), bound: 1e-6}
}

// tiled puts scales [rows, cols] in the order of tensor cores, by the place of each.
func tiled(scales []byte, rows, cols int) []byte {
	out := make([]byte, rows*cols)
	for i := range rows {
		for j := range cols {
			tile := i/128*(cols/4) + j/4
			out[tile*512+i%32*16+i%128/32*4+j%4] = scales[i*cols+j]
		}
	}
	return out
}

func bytesAsNumbers(b []byte) []float64 {
	out := make([]float64, len(b))
	for i, v := range b {
		out[i] = float64(v)
	}
	return out
}

// blockDotExamples multiply [128, k] by [128, k] transposed, in MXFP8 and NVFP4: one of them, and
// three side by side.
func blockDotExamples() []example { return append(blockDots(0), blockDots(3)...) }

// blockDots are of matrices, or of batches of them.
func blockDots(batch int) []example {
	const m, n = 128, 128
	var list []example
	shape := func(dims ...int) (out []int64) {
		if batch > 0 {
			out = append(out, int64(batch))
		}
		for _, d := range dims {
			out = append(out, int64(d))
		}
		return out
	}
	for _, f := range []struct {
		name           string
		codes, scales  elemType
		block, k, each int // elements of a block, of a row, and codes of a byte
		quantize       func(q, scales []byte, x []float32) error
		decode         func(x []float32, q, scales []byte) error
	}{
		{"mxfp8", typeE4M3, typeE8M0, 32, 256, 1, block.MXFP8[float32], block.FromMXFP8},
		{"nvfp4", typeE2M1, typeE4M3, 16, 128, 2, func(q, s []byte, x []float32) error {
			return block.NVFP4(q, s, x, 448*6)
		}, func(x []float32, q, s []byte) error { return block.FromNVFP4(x, q, s, 1) }},
	} {
		p := newBuilder(fmt.Sprintf("block dot %s %d", f.name, batch))
		var operands [4]int64
		var args [][][]float64
		var exact [2][]float64
		for side, rows := range []int{m, n} {
			x := make([]float32, max(batch, 1)*rows*f.k)
			for i, v := range randoms(uint64(10+side), int64(len(x))) {
				// Scales differ by powers of two, the more the farther down and right.
				x[i] = float32(v) * float32(math.Exp2(float64(i/f.k%7+i%f.k/f.block%5)))
			}
			q, s := make([]byte, len(x)/f.each), make([]byte, len(x)/f.block)
			if err := f.quantize(q, s, x); err != nil {
				panic(err)
			}
			if err := f.decode(x, q, s); err != nil {
				panic(err)
			}
			for _, v := range x {
				exact[side] = append(exact[side], float64(v))
			}
			args = append(args, one(bytesAsNumbers(q), bytesAsNumbers(tiled(s, max(batch, 1)*rows, f.k/f.block)))...)
			codes := p.param(int64(2*side), arr(typeU8, shape(rows, f.k/f.each)))
			operands[side] = p.op("bitcast", arr(f.codes, shape(rows, f.k)), nil, codes)
			scale := shape(rows, f.k/f.block)
			operands[side+2] = p.op("bitcast", arr(f.scales, scale), nil,
				p.param(int64(2*side+1), arr(typeU8, scale)))
		}
		v := p.call("__cudnn$blockScaledDot", "", withWorkspace(typeU8, arr(typeF32, shape(m, n))),
			operands[:]...)
		var want []float64
		for e := range max(batch, 1) {
			transposed := make([]float64, n*f.k)
			for i := range n {
				for j := range f.k {
					transposed[j*n+i] = exact[1][(e*n+i)*f.k+j]
				}
			}
			want = append(want, matmul64(exact[0][e*m*f.k:(e+1)*m*f.k], transposed, m, f.k, n)...)
		}
		list = append(list, example{name: p.name, code: p.returns(p.element(v, 0)), args: args,
			want: one(want), bound: 1e-5})
	}
	return list
}
