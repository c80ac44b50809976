package lower

import (
	"fmt"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/rewrite"
)

// A kernel is one way to write operations of a kind. Why tells whether a target takes it for an
// operation, and for what reason; a reason is noted in the set, "" is none to speak of.
type kernel struct {
	name  string
	kind  string
	why   func(s *kernels.Selector, op *ir.Op) (reason string, takes bool)
	print rule
}

// kernelTable lists the kernels: of the rows of a kind the first that is taken writes an operation,
// and if none is, the rule of its kind (rules.go).
func kernelTable() []kernel {
	return []kernel{
		// What the devices of an axis share by a dimension which the operation counts along.
		{kernels.Plain, "embedding", rowsShared, sharedEmbedding},
		{kernels.Plain, "embedding_dw", rowsShared, sharedEmbeddingDW},
		{kernels.Plain, "cross_entropy", scoresShared, sharedCrossEntropy},
		{kernels.Plain, "cross_entropy_grad", scoresShared, sharedCrossEntropyGrad},
		{kernels.Plain, "attention", keysShared, ringAttention},
		{kernels.Plain, "attention_grad", keysShared, ringAttentionGrad},

		{kernels.CuDNN, "attention", attends(kernels.CuDNN), cudnnAttention},
		{kernels.CuDNN, "attention_grad", attends(kernels.CuDNN), cudnnAttentionGrad},
		{kernels.HeadFirst, "attention", attends(kernels.HeadFirst), firstAttention},
		{kernels.HeadFirst, "attention_grad", attends(kernels.HeadFirst), firstAttentionGrad},
		{kernels.HeadFirst, rewrite.AttentionSaving, savedAttends, savingAttention},
		{kernels.HeadFirst, rewrite.AttentionGradSaved, savedAttends, savedAttentionGrad},
		{kernels.Plain, "attention", attends(kernels.Plain), attention},
		{kernels.Plain, "attention_grad", attends(kernels.Plain), attentionGrad},

		{kernels.Matrix, "dot", wideMatmuls, matrix},
		{kernels.Matrix, "linear", wideMatmuls, matrix},
		{kernels.Matrix, "linear_dx", wideMatmuls, matrix},
		{kernels.Matrix, "linear_dw", wideMatmuls, matrix},
		{kernels.Chunked, "cross_entropy", onCPU("the exponentials of all scores would be as large " +
			"as the scores"), chunkedCrossEntropy},
		{kernels.Chunked, "cross_entropy_grad", onCPU("as a matrix it takes the place of the scores"),
			rowsCrossEntropyGrad},
		{kernels.Folded, "sum", largeSum, foldedSum},

		{kernels.Plain, rewrite.QuantizeBlocks, onCPU("rounded as it lies; scales are made of bits"),
			quantizeBlocks},
		{kernels.Windowed, rewrite.QuantizeWith, onCard("two kernels of plain operations; " +
			"one of Triton's would read once"), windowed},
		{kernels.Matrix, "block_dot", onCPU("the CPU multiplies bf16, in which the numbers are exact"),
			blockDot},
		{kernels.CuDNN, "block_dot", func(s *kernels.Selector, _ *ir.Op) (string, bool) {
			return "cuDNN multiplies blocks", s.Blocks()
		}, cudnnBlockDot},
		{kernels.Plain, "block_dot", func(s *kernels.Selector, _ *ir.Op) (string, bool) {
			return fmt.Sprintf("%s has no products of blocks", s.Arch()), s.Arch() != ""
		}, blockDot},
	}
}

func pick(table []kernel, s *kernels.Selector, op *ir.Op) *kernel {
	for i, k := range table {
		if k.kind != op.Kind {
			continue
		}
		if why, takes := k.why(s, op); takes {
			s.Note(kernels.Choice{Kind: rewrite.Stands(op.Kind), Kernel: k.name, Why: why})
			return &table[i]
		}
	}
	return nil
}

func onCPU(why string) func(*kernels.Selector, *ir.Op) (string, bool) {
	return func(s *kernels.Selector, _ *ir.Op) (string, bool) { return why, s.Arch() == "cpu" }
}

func onCard(why string) func(*kernels.Selector, *ir.Op) (string, bool) {
	return func(s *kernels.Selector, _ *ir.Op) (string, bool) {
		return why, s.Arch() != "cpu" && s.Arch() != ""
	}
}

var wideMatmuls = onCPU("XLA:CPU turns wider products by copies")

func largeSum(s *kernels.Selector, op *ir.Op) (string, bool) {
	return "XLA:CPU writes what it sums first, unless it sums whole vectors", s.Arch() == "cpu" &&
		len(op.Out[0].Type.Dims) == 0 && op.In[0].Type.Shape().Elements() > kernels.FoldAbove
}

func attends(name string) func(*kernels.Selector, *ir.Op) (string, bool) {
	return func(s *kernels.Selector, op *ir.Op) (string, bool) {
		if s == nil {
			return "", false
		}
		kernel, why := s.Attends(op)
		return why, kernel == name
	}
}

// savedAttends is attends of an attention that saves for its gradient, or of that gradient.
func savedAttends(s *kernels.Selector, op *ir.Op) (string, bool) {
	if op.Kind == rewrite.AttentionGradSaved {
		op, _ = rewrite.SavedBy(op, op.In)
	}
	return attends(kernels.HeadFirst)(s, op)
}

func rowsShared(_ *kernels.Selector, op *ir.Op) (string, bool) {
	table := op.Out[0].Type
	if op.Kind == "embedding" {
		table = op.In[1].Type
	}
	return "", len(table.Place.Axes(table.Dims[0].Name)) > 0
}

func scoresShared(_ *kernels.Selector, op *ir.Op) (string, bool) { return "", len(op.Axes()) > 0 }

func keysShared(_ *kernels.Selector, op *ir.Op) (string, bool) {
	return "", op.Attrs.Text("ring") != ""
}
