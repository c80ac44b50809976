package rewrite

import (
	"fmt"
	"slices"
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
)

// Attributes of rewritten operations.
const (
	// Order lists the dimensions of a product's result, outermost first, if they are not those that
	// package ir gives it.
	Order = "order"
	// Saved counts the arguments of an attention_grad_saved that its forward pass saved.
	Saved = "saved"
)

// InBlock is the name of the dimension that counts elements within a block.
const InBlock = "in_block"

// Rows is the table of package ir with the operations of passes.
var Rows = sync.OnceValue(func() ir.Table {
	rows := ir.Table{
		Barrier:            {Kind: ir.Kind{Results: -1, Infer: inferBarrier}, Lower: sameValues},
		AttentionSaving:    {Kind: ir.Kind{Results: -1, Infer: inferSaving}},
		AttentionGradSaved: {Kind: ir.Kind{Results: 3, Infer: inferGradSaved}},
		QuantizeBlocks:     {Kind: ir.Kind{Results: 2, Infer: inferQuantizeBlocks}},
		OrderBlocks:        {Kind: ir.Kind{Results: 2, Infer: inferOrderBlocks}},
		BlockAmax:          {Kind: ir.Kind{Results: 1, Infer: inferBlockAmax}},
		BlockScale:         {Kind: ir.Kind{Results: 1, Infer: inferBlockScale}},
		AmaxOfBlocks:       {Kind: ir.Kind{Results: 1, Infer: inferAmaxOfBlocks}},
		QuantizeWith:       {Kind: ir.Kind{Results: 2, Infer: inferQuantizeWith}},
	}
	for _, kind := range []string{"dot", "linear", "linear_dx", "linear_dw"} {
		rows[kind] = adapted(ir.Operations()[kind])
		rows[kind].Lower = transposed
	}
	for _, kind := range []string{"block_dot", "quantize_stats"} {
		rows[kind] = adapted(ir.Operations()[kind])
	}
	return ir.Operations().With(rows)
})

// Stands gives the kind of package ir that a rewritten operation computes, for reports: a
// quantize_with computes quantize. Kinds of package ir, and parts of an operation, stand for
// themselves.
func Stands(kind string) string {
	switch kind {
	case AttentionSaving:
		return "attention"
	case AttentionGradSaved:
		return "attention_grad"
	case QuantizeBlocks, QuantizeWith:
		return "quantize"
	}
	return kind
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

// adapted is the row of a product, or of statistics of one, that reads quantized arguments in the
// layout of [QuantizeBlocks] too, and returns its result in another [Order] if one is given.
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
		if order := op.Attrs.List(Order); err == nil && len(order) > 0 {
			types[0].Dims = slices.Clone(types[0].Dims)
			slices.SortFunc(types[0].Dims, func(a, b ir.Dim) int {
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
		if a.Key != Order {
			constants[a.Key] = a.Value
		}
	}
	out := b.Op(op.Kind, constants, op.In...)
	if order := op.Attrs.List(Order); len(order) > 0 {
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
