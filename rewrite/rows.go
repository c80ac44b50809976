package rewrite

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// The operations that passes add. Their gradient is never taken: rewrites run last.
const (
	// Barrier returns its arguments; a compiler neither looks through it nor recomputes them.
	Barrier = "barrier"
	// AttentionSaving is attention that also returns what its gradient reads back: for each block of
	// queries the exponentials of the scores (and the scores, if they are capped), at the end one over
	// the sums of exponentials. AttentionGradSaved takes them after the arguments of attention_grad.
	AttentionSaving    = "attention_saving"
	AttentionGradSaved = "attention_grad_saved"
	// QuantizeBlocks is quantize that leaves codes, one to a byte, and scales in the layout of the
	// source; OrderBlocks puts them in the order, and the packing, that quantize promises.
	QuantizeBlocks = "quantize_blocks"
	OrderBlocks    = "order_blocks"
	// BlockAmax is the largest magnitude of each block, as bits; BlockScale makes block scales of it,
	// AmaxOfBlocks the largest magnitude of the tensor. QuantizeWith is quantize with scales given.
	BlockAmax    = "block_amax"
	BlockScale   = "block_scale"
	AmaxOfBlocks = "amax_of_blocks"
	QuantizeWith = "quantize_with"
	// QuantizeOnce is two quantizations of one source, or one, that are read once.
	QuantizeOnce = "quantize_once"
	// AmaxOnce is the largest magnitudes of a source, as it is and transformed, or one of them, in one
	// read.
	AmaxOnce = "amax_once"
	// LossInPlace is a cross_entropy and its cross_entropy_grad, which takes the memory of the logits:
	// of logits, labels and what the gradient is multiplied by, it gives the loss, the log-sum-exp and
	// the gradient.
	LossInPlace = "loss_in_place"
	// NormRows is rms_norm of a value, or of a sum, which it returns, too; NormGrad is the gradient of
	// rms_norm. Each reads rows once.
	NormRows = "norm_rows"
	NormGrad = "norm_grad"
)

// Attributes of rewritten operations.
const (
	// attrOrder lists the dimensions of a GEMM's result, outermost first, if their order is not the
	// one of package ir.
	attrOrder = "order"
	// attrSaved is the number of arguments of an attention_grad_saved that its forward pass saved.
	attrSaved = "saved"
)

// InBlock is the name of the dimension that counts elements within a block.
const InBlock = "in_block"

// rows makes the table of package ir with the operations of passes, at first use.
var rows = sync.OnceValue(func() ir.Table {
	own := ir.Table{
		Barrier:            {Kind: ir.Kind{Results: -1, Infer: inferBarrier}, Lower: sameValues},
		AttentionSaving:    {Kind: ir.Kind{Results: -1, Infer: inferSaving}},
		AttentionGradSaved: {Kind: ir.Kind{Results: 3, Infer: inferGradSaved}},
		QuantizeBlocks:     {Kind: ir.Kind{Results: 2, Infer: inferQuantizeBlocks}},
		OrderBlocks:        {Kind: ir.Kind{Results: 2, Infer: inferOrderBlocks}},
		BlockAmax:          {Kind: ir.Kind{Results: 1, Infer: inferBlockAmax}},
		BlockScale:         {Kind: ir.Kind{Results: 1, Infer: inferBlockScale}},
		AmaxOfBlocks:       {Kind: ir.Kind{Results: 1, Infer: inferAmaxOfBlocks}},
		QuantizeWith:       {Kind: ir.Kind{Results: 2, Infer: inferQuantizeWith}},
		QuantizeOnce:       {Kind: ir.Kind{Results: -1, Infer: inferQuantizeOnce}, Lower: writtenOut},
		AmaxOnce:           {Kind: ir.Kind{Results: -1, Infer: inferAmaxOnce}, Lower: writtenAmax},
		LossInPlace:        {Kind: ir.Kind{Results: 3, Infer: inferLoss}, Lower: writtenLoss},
		NormRows:           {Kind: ir.Kind{Results: -1, Infer: inferNormRows}, Lower: writtenRows},
		NormGrad:           {Kind: ir.Kind{Results: 2, Infer: inferNormGrad}, Lower: writtenGrad},
	}
	for _, kind := range []string{"dot", "linear", "linear_dx", "linear_dw"} {
		own[kind] = adapted(ir.Operations()[kind])
		own[kind].Lower = transposed
	}
	for _, kind := range []string{"block_dot", "quantize_stats"} {
		own[kind] = adapted(ir.Operations()[kind])
	}
	for _, kind := range groupedKinds {
		own[grouped+kind] = groupedRow(kind)
	}
	return ir.Operations().With(own)
})

// SourceKind returns the kind of package ir that a rewritten operation came from, for reports: a
// quantize_with was a quantize. Other kinds are returned as they are.
func SourceKind(kind string) string {
	switch kind {
	case AttentionSaving:
		return "attention"
	case AttentionGradSaved:
		return "attention_grad"
	case QuantizeBlocks, QuantizeWith, QuantizeOnce:
		return "quantize"
	case AmaxOnce:
		return "amax"
	case LossInPlace:
		return "cross_entropy"
	case NormRows:
		return "rms_norm"
	case NormGrad:
		return "rms_norm_grad"
	}
	return strings.TrimPrefix(kind, grouped)
}

// inferBarrier gives the types of the arguments.
func inferBarrier(_ *ir.Graph, op *ir.Op) ([]ir.Type, error) {
	if len(op.In) == 0 {
		return nil, fmt.Errorf("takes at least one argument")
	}
	return lists.Map(op.In, func(v *ir.Value) ir.Type { return v.Type }), nil
}

// sameValues is what a barrier means to the interpreter.
func sameValues(_ *ir.Builder, op *ir.Op) []*ir.Value { return op.In }

// adapted is the row of a GEMM, or of statistics of one, that reads quantized arguments in the
// layout of [QuantizeBlocks] too, and returns its result in the order that [attrOrder] gives.
func adapted(row *ir.Row) *ir.Row {
	infer := row.Infer
	row = &ir.Row{Kind: row.Kind, Lower: row.Lower}
	row.Infer = func(g *ir.Graph, op *ir.Op) ([]ir.Type, error) {
		plain := *op
		plain.In = slices.Clone(op.In)
		for i, v := range op.In {
			if v.Type.Index(InBlock) < 0 {
				continue
			}
			types, err := ordered(op, v.Type, op.In[i+1].Type)
			if err != nil {
				return nil, err
			}
			plain.In[i], plain.In[i+1] = &ir.Value{Type: types[0]}, &ir.Value{Type: types[1]}
		}
		types, err := infer(g, &plain)
		if order := op.Attrs.List(attrOrder); err == nil && len(order) > 0 {
			types[0].Dims = slices.Clone(types[0].Dims)
			lists.Sort(types[0].Dims, func(a, b ir.Dim) int {
				return slices.Index(order, a.Name) - slices.Index(order, b.Name)
			})
		}
		return types, err
	}
	return row
}

// transposed is a product in the order of package ir, and a transpose if another is asked for: what
// it means to the interpreter.
func transposed(b *ir.Builder, op *ir.Op) []*ir.Value {
	constants := map[string]any{}
	for _, a := range op.Attrs {
		if a.Key != attrOrder {
			constants[a.Key] = a.Value
		}
	}
	out := b.Op(op.Kind, constants, op.In...)
	if order := op.Attrs.List(attrOrder); len(order) > 0 {
		out = b.Op("transpose", map[string]any{"order": order}, out...)
	}
	return out
}

// along lists the dimensions that blocks of an operation lie along: those that a product sums over.
func along(op *ir.Op) []string {
	if list := op.Attrs.List("along"); list != nil {
		return list
	}
	return op.Attrs.List("over")
}

// ordered gives the types that quantize promises for codes and scales in the layout of their
// source: [..., n/block, in_block, ...] and [..., n/block, ...] become [others..., along...].
func ordered(op *ir.Op, codes, scales ir.Type) ([]ir.Type, error) {
	f := ir.Format(op.Attrs.Text("format"))
	dims := along(op)
	at := codes.Index(InBlock)
	if at < 1 || codes.Dims[at].Size != f.Block() || codes.Dims[at-1].Name != dims[len(dims)-1] {
		return nil, fmt.Errorf("%s has no blocks along %v", codes, dims)
	}
	put := func(t ir.Type, elem dtype.DType, times int64) ir.Type {
		list := ir.Without(t.Dims, append(slices.Clone(dims), InBlock)...)
		for _, name := range dims {
			list = append(list, ir.Dim{Name: name, Size: t.Size(name)})
		}
		list[len(list)-1].Size *= times
		return ir.Type{Elem: elem, Dims: list, Place: t.Place}
	}
	return []ir.Type{put(codes, f.Codes(), f.Block()), put(scales, f.Scales(), 1)}, nil
}

// inferAs gives the types of an operation of package ir with these arguments.
func inferAs(kind string, g *ir.Graph, op *ir.Op, in ...*ir.Value) ([]ir.Type, error) {
	plain := *op
	plain.Kind, plain.In = kind, in
	return ir.Operations()[kind].Infer(g, &plain)
}
