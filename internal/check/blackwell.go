package check

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/program"
)

// MXFP8 is one block-scaled linear in data parallel: the product of 4096 x 4096 by 16384 x 4096
// in E4M3 with a scale for every 32 elements, then a sum over all devices.
func MXFP8(devices int) *program.Stage {
	const (
		x, xs = "tensor<4096x4096xf8E4M3FN>", "tensor<4096x128xf8E8M0FNU>"
		w, ws = "tensor<16384x4096xf8E4M3FN>", "tensor<16384x128xf8E8M0FNU>"
		y     = "tensor<4096x16384xbf16>"
	)
	text := fmt.Sprintf(`module @mxfp8 attributes {mhlo.num_replicas = %d : i32} {
  func.func @main(%%x: %s, %%xs: %s, %%w: %s, %%ws: %s) -> %s {
    %%y = stablehlo.custom_call @__op$block_scaled_dot(%%x, %%w, %%xs, %%ws)
      {api_version = 2 : i32} : (%[2]s, %[4]s, %[3]s, %[5]s) -> %[6]s
    %%s = "stablehlo.all_reduce"(%%y) (%s) {%s} : (%[6]s) -> %[6]s
    return %%s : %[6]s
  }
}
`, devices, x, xs, w, ws, y, adder("bf16"), groups(devices, devices))
	return &program.FromText("mxfp8", text, devices).Stages[0]
}

// An attention is the shape of causal attention with grouped keys, in bf16.
type attention struct{ batch, seq, heads, kvHeads, headDim int }

// Attention is causal attention with 32 heads over 8 key heads, forward and backward, as the two
// calls of cuDNN.
func Attention(devices int) *program.Stage {
	a := attention{batch: 4, seq: 2048, heads: 32, kvHeads: 8, headDim: 128}
	return &program.FromText("attention", a.module(devices), devices).Stages[0]
}

// dot are the dimension numbers of one product inside the call.
type dot struct {
	LHSContracting []string `json:"lhs_contracting_dimensions"`
	RHSContracting []string `json:"rhs_contracting_dimensions"`
	LHSBatch       []string `json:"lhs_batch_dimensions"`
	RHSBatch       []string `json:"rhs_batch_dimensions"`
}

func newDot(lc, rc, lb, rb string) dot {
	return dot{[]string{lc}, []string{rc}, []string{"0", lb}, []string{"0", rb}}
}

// config is the backend config of a call, as a string of JSON in MLIR. Names and defaults are
// those of CudnnfMHABackendConfig in XLA's backend_configs.proto.
func (a attention) config(dots map[string]dot) string {
	fmha := map[string]any{
		"algorithm": map[string]any{"algo_id": "0", "math_type": "TENSOR_OP_MATH",
			"tuning_knobs": map[string]string{"17": "1", "24": "0"}, "is_cudnn_frontend": true},
		"fmha_scale": 1 / math.Sqrt(float64(a.headDim)),
		"intermediate_tensor_shape": map[string]any{"element_type": "BF16",
			"dimensions": []string{strconv.Itoa(a.batch), strconv.Itoa(a.heads),
				strconv.Itoa(a.seq), strconv.Itoa(a.seq)},
			"layout": map[string]any{"minor_to_major": []string{"3", "2", "1", "0"}}},
		"is_flash_attention": true, "mask_type": "CAUSAL", "max_seg_per_batch": 1, "seed": 42,
	}
	for name, d := range dots {
		fmha[name] = d
	}
	js, err := json.Marshal(map[string]any{"operation_queue_id": "0",
		"cudnn_fmha_backend_config": fmha})
	if err != nil {
		return "" // maps of strings and numbers always marshal
	}
	return strconv.Quote(string(js))
}

func (a attention) module(devices int) string {
	bthd := func(heads int) string {
		return fmt.Sprintf("tensor<%dx%dx%dx%dxbf16>", a.batch, a.seq, heads, a.headDim)
	}
	// Results have their heads before the sequence; the stated layout makes that a mere view.
	bhtd := func(heads int) string {
		return fmt.Sprintf("tensor<%dx%dx%dx%dxbf16>", a.batch, heads, a.seq, a.headDim)
	}
	stat := fmt.Sprintf("tensor<%dx%dx%dxf32>", a.batch, a.heads, a.seq)
	forward := a.config(map[string]dot{
		"bmm1_dot_dimension_numbers": newDot("3", "3", "2", "2"),
		"bmm2_dot_dimension_numbers": newDot("3", "1", "1", "2"),
	})
	backward := a.config(map[string]dot{
		"bmm1_grad_gemm1_dot_dimension_numbers": newDot("2", "1", "1", "2"),
		"bmm1_grad_gemm2_dot_dimension_numbers": newDot("3", "1", "1", "2"),
		"bmm2_grad_gemm1_dot_dimension_numbers": newDot("2", "1", "1", "2"),
		"bmm2_grad_gemm2_dot_dimension_numbers": newDot("3", "3", "2", "2"),
	})
	const (
		row4  = "dense<[3, 2, 1, 0]> : tensor<4xindex>"
		head4 = "dense<[3, 1, 2, 0]> : tensor<4xindex>"
		row3  = "dense<[2, 1, 0]> : tensor<3xindex>"
		row1  = "dense<0> : tensor<1xindex>"
	)
	layouts := func(kinds ...string) string { return "[" + strings.Join(kinds, ", ") + "]" }
	q, kv, o, okv := bthd(a.heads), bthd(a.kvHeads), bhtd(a.heads), bhtd(a.kvHeads)
	var b strings.Builder
	fmt.Fprintf(&b, "module @attention attributes {mhlo.num_replicas = %d : i32} {\n", devices)
	fmt.Fprintf(&b, "func.func @main(%%q: %s, %%k: %s, %%v: %s, %%do: %s) -> (%s, %s, %s, %s) {\n",
		q, kv, kv, q, q, q, kv, kv)
	fmt.Fprintf(&b, "%%f:3 = stablehlo.custom_call @__cudnn$fmhaSoftmax(%%q, %%k, %%v) "+
		"{api_version = 2 : i32, backend_config = %s, operand_layouts = %s, result_layouts = %s} : "+
		"(%s, %s, %s) -> (%s, %s, tensor<0xui8>)\n", forward, layouts(row4, row4, row4),
		layouts(head4, row3, row1), q, kv, kv, o, stat)
	fmt.Fprintf(&b, "%%o = stablehlo.transpose %%f#0, dims = [0, 2, 1, 3] : (%s) -> %s\n", o, q)
	fmt.Fprintf(&b, "%%g:4 = stablehlo.custom_call "+
		"@__cudnn$fmhaSoftmaxBackward(%%q, %%k, %%v, %%f#1, %%do, %%o) "+
		"{api_version = 2 : i32, backend_config = %s, operand_layouts = %s, result_layouts = %s} : "+
		"(%s, %s, %s, %s, %s, %s) -> (%s, %s, %s, tensor<0xui8>)\n", backward,
		layouts(row4, row4, row4, row3, row4, row4), layouts(head4, head4, head4, row1),
		q, kv, kv, stat, q, q, o, okv, okv)
	for i, to := range []struct{ name, from, to string }{
		{"dq", o, q}, {"dk", okv, kv}, {"dv", okv, kv},
	} {
		fmt.Fprintf(&b, "%%%s = stablehlo.transpose %%g#%d, dims = [0, 2, 1, 3] : (%s) -> %s\n",
			to.name, i, to.from, to.to)
	}
	fmt.Fprintf(&b, "return %%o, %%dq, %%dk, %%dv : %s, %s, %s, %s\n}\n}\n", q, q, kv, kv)
	return b.String()
}
