package gpu

import (
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/kernels/flash"
	"github.com/deepwell/deepwell/lower/stablehlo"
)

// flashKernels are attention that cuDNN has no call for, forward and backward.
func flashKernels() []stablehlo.Kernel {
	row := func(kind string, print func(writer, *ir.Op, []val) []val) stablehlo.Kernel {
		return stablehlo.Kernel{Name: kernels.Triton, Kinds: []string{kind}, Print: on(print),
			Applies: kernels.Attending(kernels.Triton)}
	}
	return []stablehlo.Kernel{row("attention", flashAttention),
		row("attention_grad", flashAttentionGrad)}
}

// flashCall prints the call of a kernel, whose results have the types of the operation's.
func (w writer) flashCall(a flash.Attention, out []*ir.Value, in []val) []val {
	k, err := a.Kernel()
	if err != nil {
		w.Fail("%s", err)
		return in
	}
	list := w.tritonCall(k, in...)
	for i, v := range out {
		list[i] = w.Reshape(list[i], ir.Type{Dims: v.Type.Dims})
	}
	return list
}

// flashAttention gives O and the log-sum-exp [batch, seq, heads].
func flashAttention(w writer, op *ir.Op, in []val) []val {
	return w.flashCall(w.Target.FlashOf(op, flash.Forward), op.Out, in)
}

// flashAttentionGrad gives dQ, dK and dV from Q, K, V, O, the log-sum-exp and dO. The sums of
// dO ∘ O over a head, which both kernels read, are XLA's.
func flashAttentionGrad(w writer, op *ir.Op, in []val) []val {
	wide := func(v val) val { return w.Convert(v, dtype.F32) }
	delta := w.Reduce(w.Elementwise("multiply", wide(in[5]), wide(in[3])), "add", 0, ir.HeadDim)
	args := append([]val{in[0], in[1], in[2], in[4], delta, in[5]}, in[6:]...)
	dq := w.flashCall(w.Target.FlashOf(op, flash.DQ), op.Out[:1], args)
	dkv := w.flashCall(w.Target.FlashOf(op, flash.DKV), op.Out[1:], args)
	return []val{dq[0], dkv[0], dkv[1]}
}
