package stablehlo

import (
	"slices"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/rewrite"
)

// A Rule prints an operation, given its arguments, and returns its results.
type Rule func(w *Writer, op *ir.Op, in []Val) []Val

// A Kernel is one way to print operations on some targets. A new kernel is one row, in the file
// that holds its Print function.
type Kernel struct {
	Name  string   // in reports
	Kinds []string // of operations
	// Applies tells whether a target takes the kernel for an operation, and why. The reason goes into
	// the report of choices; "" leaves the choice out.
	Applies func(s *kernels.Selector, op *ir.Op) (why string, ok bool)
	// Work overrides the work of the operation (see [ir.Row]) where the kernel does more or less; nil
	// leaves it.
	Work  func(g *ir.Graph, op *ir.Op) ir.Work
	Print Rule
}

// A Table is what operations become: of the kernels the first that applies, else the rule of the
// operation's kind. It is a value: tests and other packages compose their own.
type Table struct {
	Rules   map[string]Rule
	Kernels []Kernel
}

// Pick finds the kernel of an operation and notes the choice; nil if the plain rule prints it.
func (t Table) Pick(s *kernels.Selector, op *ir.Op) *Kernel {
	k := t.Find(s, op)
	if k != nil {
		why, _ := k.Applies(s, op)
		s.Note(kernels.Choice{Kind: rewrite.SourceKind(op.Kind), Kernel: k.Name, Why: why})
	}
	return k
}

// Find is Pick without the note.
func (t Table) Find(s *kernels.Selector, op *ir.Op) *Kernel {
	for i, k := range t.Kernels {
		if !slices.Contains(k.Kinds, op.Kind) {
			continue
		}
		if _, ok := k.Applies(s, op); ok {
			return &t.Kernels[i]
		}
	}
	return nil
}

// Work tells what an operation of a graph before rewriting asks of a device: what its kernel says,
// else what its row in package ir says.
func (t Table) Work(s *kernels.Selector, g *ir.Graph, op *ir.Op) ir.Work {
	prints := func(k Kernel) bool {
		return slices.ContainsFunc(k.Kinds, func(kind string) bool {
			return rewrite.SourceKind(kind) == op.Kind
		})
	}
	if !slices.ContainsFunc(t.Kernels, func(k Kernel) bool { return k.Work != nil && prints(k) }) {
		return g.Work(op)
	}
	for _, k := range t.Kernels {
		if !prints(k) {
			continue
		}
		if _, ok := k.Applies(s, op); ok && k.Work != nil {
			return k.Work(g, op)
		} else if ok {
			break
		}
	}
	return g.Work(op)
}

// named finds the rule of a kernel for a kind, for operations that are made of others.
func (t Table) named(name, kind string) Rule {
	i := slices.IndexFunc(t.Kernels, func(k Kernel) bool {
		return k.Name == name && slices.Contains(k.Kinds, kind)
	})
	if i < 0 {
		return func(w *Writer, _ *ir.Op, in []Val) []Val {
			w.Fail("there is no kernel %s for %s", name, kind)
			return in
		}
	}
	return t.Kernels[i].Print
}

// Sharded are the kernels of operations that index a dimension which devices share: rows of an
// embedding, the vocabulary of logits, the queries of attention.
func Sharded() []Kernel {
	row := func(kind string, applies func(*kernels.Selector, *ir.Op) (string, bool), p Rule) Kernel {
		return Kernel{Name: kernels.Plain, Kinds: []string{kind}, Applies: applies, Print: p}
	}
	return []Kernel{
		row("embedding", rowsSharded, shardedEmbedding),
		row("embedding_dw", rowsSharded, shardedEmbeddingDW),
		row("cross_entropy", vocabSharded, shardedCrossEntropy),
		row("cross_entropy_grad", vocabSharded, shardedCrossEntropyGrad),
		row("attention", keysSharded, ringAttention),
		row("attention_grad", keysSharded, ringAttentionGrad),
		row("attention", keysGathered, gatheredAttention),
		row("attention_grad", keysGathered, gatheredAttentionGrad),
	}
}

// Sinks are attentions with sinks, which other kernels print without them.
func Sinks() []Kernel {
	return []Kernel{{Name: kernels.Plain, Kinds: []string{"attention"}, Print: attentionWithSinks,
		Applies: func(_ *kernels.Selector, op *ir.Op) (string, bool) {
			return "", op.Attrs.Bool("sinks")
		}}}
}

// Plain are attentions that stay plain on a target that has a kernel for others; the reason is
// worth a line in the report.
func Plain() []Kernel {
	row := func(kind string, p Rule) Kernel {
		return Kernel{Name: kernels.Plain, Kinds: []string{kind},
			Applies: kernels.Attending(kernels.Plain), Print: p}
	}
	return []Kernel{row("attention", attention), row("attention_grad", attentionGrad)}
}

// rowsSharded tells an embedding whose table [vocab, embed] is sharded by rows.
func rowsSharded(_ *kernels.Selector, op *ir.Op) (string, bool) {
	table := op.Out[0].Type
	if op.Kind == "embedding" {
		table = op.In[1].Type
	}
	return "", len(table.Place.Axes(table.Dims[0].Name)) > 0
}

// vocabSharded tells cross-entropy of logits that are sharded by the vocabulary.
func vocabSharded(_ *kernels.Selector, op *ir.Op) (string, bool) { return "", len(op.Axes()) > 0 }

// keysSharded tells ring attention.
func keysSharded(_ *kernels.Selector, op *ir.Op) (string, bool) {
	return "", op.Attrs.Text("ring") != ""
}
