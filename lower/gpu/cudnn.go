package gpu

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower/stablehlo"
)

// attentionKernels are cuDNN's attention, forward and backward.
func attentionKernels() []stablehlo.Kernel {
	row := func(kind string, print func(writer, *ir.Op, []val) []val) stablehlo.Kernel {
		return stablehlo.Kernel{Name: kernels.CuDNN, Kinds: []string{kind}, Print: on(print),
			Applies: kernels.Attending(kernels.CuDNN)}
	}
	return []stablehlo.Kernel{row("attention", cudnnAttention),
		row("attention_grad", cudnnAttentionGrad)}
}

// Layouts, minor to major. Attention's data is [batch, seq, heads, head]; cuDNN's results have
// heads before seq, and the layout that the call states makes the transpose a view.
const (
	rowMajor4 = "dense<[3, 2, 1, 0]> : tensor<4xindex>"
	headFirst = "dense<[3, 1, 2, 0]> : tensor<4xindex>"
	rowMajor3 = "dense<[2, 1, 0]> : tensor<3xindex>"
	rowMajor1 = "dense<0> : tensor<1xindex>"
)

// A matmul is the dimension numbers of one matrix product inside a call, as protobuf's JSON has
// them.
type matmul struct {
	LHSContracting []string `json:"lhs_contracting_dimensions"`
	RHSContracting []string `json:"rhs_contracting_dimensions"`
	LHSBatch       []string `json:"lhs_batch_dimensions"`
	RHSBatch       []string `json:"rhs_batch_dimensions"`
}

// newMatmul takes the contracting dimension and the heads' batch dimension of either side;
// dimension 0, the sequences, is a batch dimension too.
func newMatmul(lc, rc, lb, rb string) matmul {
	return matmul{[]string{lc}, []string{rc}, []string{"0", lb}, []string{"0", rb}}
}

// config spells a call's backend config as MLIR wants it: JSON inside a string. Field names come
// from CudnnfMHABackendConfig in XLA's backend_configs.proto; tuning knobs 17 and 24 are XLA's
// defaults for flash attention.
//
// With packed segments, several of each sequence, a causal mask begins anew in each of them.
func (w writer) config(op *ir.Op, segments int64, gemms map[string]matmul) string {
	q, k := op.In[0].Type, op.In[1].Type
	text := func(n int64) string { return strconv.FormatInt(n, 10) }
	causal := op.Attrs.Bool("causal")
	mask := "NO_MASK"
	switch {
	case (segments > 1 || op.Attrs.Bool("rows")) && causal:
		mask = "PADDING_CAUSAL"
	case segments > 1 || op.KeyLengths() > 0: // lengths come without a causal mask (kernels.Attention)
		mask = "PADDING"
	case causal:
		mask = "CAUSAL"
	}
	element := map[dtype.DType]string{dtype.BF16: "BF16", dtype.F16: "F16"}[q.Elem]
	fmha := map[string]any{
		"algorithm": map[string]any{"algo_id": "0", "math_type": "TENSOR_OP_MATH",
			"tuning_knobs": map[string]string{"17": "1", "24": "0"}, "is_cudnn_frontend": true},
		"fmha_scale": op.Attrs.Float("scale"),
		"intermediate_tensor_shape": map[string]any{"element_type": element,
			"dimensions": []string{text(q.Dims[0].Size), text(q.Size(ir.Heads)), text(q.Size(ir.Seq)),
				text(k.Size(ir.Keys))},
			"layout": map[string]any{"minor_to_major": []string{"3", "2", "1", "0"}}},
		"is_flash_attention": true, "mask_type": mask, "max_seg_per_batch": segments, "seed": 42,
		"sliding_window_length": op.Attrs.Int("window"),
	}
	for name, p := range gemms {
		fmha[name] = p
	}
	js, err := json.Marshal(map[string]any{"operation_queue_id": "0",
		"cudnn_fmha_backend_config": fmha})
	if err != nil {
		w.Fail("the config of attention: %v", err)
	}
	return strconv.Quote(string(js))
}

// headsFirst is [batch, heads, seq, ...] for [batch, seq, heads, ...].
func headsFirst(t ir.Type) ir.Type {
	d := slices.Clone(t.Dims)
	d[1], d[2] = d[2], d[1]
	return ir.Type{Elem: t.Elem, Dims: d}
}

// call prints a custom call with several results; the last is cuDNN's workspace, which the compiler
// sizes.
func (w writer) call(target, config string, in []val, inLayouts []string, out []ir.Type,
	outLayouts []string) []val {
	name, vals := w.Fresh(), make([]val, len(out))
	for i, t := range out {
		vals[i] = &stablehlo.Value{Name: fmt.Sprintf("%s#%d", name, i), Type: t}
	}
	names, types := stablehlo.Spell(in)
	_, results := stablehlo.Spell(vals)
	w.Line("%s:%d = stablehlo.custom_call @%s(%s) {api_version = 2 : i32, backend_config = %s, "+
		"operand_layouts = [%s], result_layouts = [%s]} : (%s) -> (%s, tensor<0xui8>)", name, len(out)+1,
		target, names, config, stablehlo.List(inLayouts), stablehlo.List(append(outLayouts, rowMajor1)),
		types, results)
	return vals
}

// cudnnAttention prints flash attention: O [batch, seq, heads, head] and the log-sum-exp [batch,
// seq, heads].
func cudnnAttention(w writer, op *ir.Op, in []val) []val {
	documents, _ := op.MaskArgs()
	switch offsets := withOffsets(op); {
	case op.Attrs.Bool("ranges") && offsets:
		return w.ranged(op, in).attention(in)
	case op.Attrs.Bool("ranges"):
		return w.ranged(op, in).rowsAttention(in)
	case op.KeyLengths() > 0:
		return w.lengthsAttention(op, in)
	case len(documents) > 0 && offsets:
		return w.pack(op, in[3]).attention(op, in[:3])
	case len(documents) > 0:
		return w.pack(op, in[3]).rowsAttention(op, in[:3])
	}
	out := w.attend(op, in, 1)
	out[1] = w.Transpose(out[1], ir.Names(op.Out[1].Type.Dims))
	return out
}

// attend calls cuDNN with Q, K and V and, if they are packed, the lengths and offsets of segments.
// It gives O as the operation has it and the log-sum-exp [batch, heads, seq], or
// [segment, heads, seq].
func (w writer) attend(op *ir.Op, in []val, segments int64) []val {
	config := w.config(op, segments, map[string]matmul{
		"bmm1_dot_dimension_numbers": newMatmul("3", "3", "2", "2"),
		"bmm2_dot_dimension_numbers": newMatmul("3", "1", "1", "2"),
	})
	stat := headsFirst(op.Out[1].Type)
	stat.Dims[0].Size *= segments
	out := w.call("__cudnn$fmhaSoftmax", config, in, layouts(in),
		[]ir.Type{headsFirst(op.Out[0].Type), stat}, []string{headFirst, rowMajor3})
	out[0] = w.Transpose(out[0], ir.Names(op.Out[0].Type.Dims))
	return out
}

// layouts are the layouts of operands, all row-major.
func layouts(in []val) []string {
	return lists.Map(in, func(v val) string {
		return map[int]string{1: rowMajor1, 3: rowMajor3, 4: rowMajor4}[len(v.Type.Dims)]
	})
}

// cudnnAttentionGrad prints dQ, dK and dV from Q, K, V, O, the log-sum-exp and dO.
func cudnnAttentionGrad(w writer, op *ir.Op, in []val) []val {
	documents, _ := op.MaskArgs()
	switch offsets := withOffsets(op); {
	case op.Attrs.Bool("ranges") && offsets:
		return w.ranged(op, in).attentionGrad(in)
	case op.Attrs.Bool("ranges"):
		return w.ranged(op, in).rowsAttentionGrad(in)
	case op.KeyLengths() > 0:
		return w.lengthsAttentionGrad(op, in)
	case len(documents) > 0 && offsets:
		return w.pack(op, in[6]).attentionGrad(op, in[:6])
	case len(documents) > 0:
		return w.pack(op, in[6]).rowsAttentionGrad(op, in[:6])
	}
	q, k, v, o, do := in[0], in[1], in[2], in[3], in[5]
	stat := w.Transpose(in[4], ir.Names(headsFirst(in[4].Type).Dims))
	return w.attendGrad(op, []val{q, k, v, stat, do, o}, 1)
}

// attendGrad calls cuDNN with Q, K, V, the log-sum-exp as attend gives it, dO and O and, if they
// are packed, the lengths and offsets of segments.
func (w writer) attendGrad(op *ir.Op, in []val, segments int64) []val {
	config := w.config(op, segments, map[string]matmul{
		"bmm1_grad_gemm1_dot_dimension_numbers": newMatmul("2", "1", "1", "2"),
		"bmm1_grad_gemm2_dot_dimension_numbers": newMatmul("3", "1", "1", "2"),
		"bmm2_grad_gemm1_dot_dimension_numbers": newMatmul("2", "1", "1", "2"),
		"bmm2_grad_gemm2_dot_dimension_numbers": newMatmul("3", "3", "2", "2"),
	})
	// cuDNN's results have heads before the sequence; the stated layouts make the transposes free.
	types := lists.Map(op.Out, func(v *ir.Value) ir.Type { return headsFirst(v.Type) })
	out := w.call("__cudnn$fmhaSoftmaxBackward", config, in, layouts(in), types,
		[]string{headFirst, headFirst, headFirst})
	for i := range out {
		out[i] = w.Transpose(out[i], ir.Names(op.Out[i].Type.Dims))
	}
	return out
}
