package kernels

import (
	"fmt"
	"iter"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// A MatmulShape is a batch of products [M, K] · [K, N] to choose for. ALast and BLast tell that K
// is the last dimension of an operand.
type MatmulShape struct {
	Batch, M, N, K int64
	Elem           dtype.DType // of the arguments
	ALast, BLast   bool
	NFirst         bool // the result is wanted as [N, M]
}

// A MatmulStrategy is how a product is printed.
type MatmulStrategy struct {
	// Swap puts the second operand first, which gives the result as [N, M].
	Swap bool
	// Transpose copies the operand that comes first, so that K is its last dimension.
	Transpose bool
	// Wide multiplies in f32, of operands that were rounded before.
	Wide bool
}

// Matmul chooses how to print a product. On the CPU f32 products go to Eigen or YNNPACK, which take
// every form. bf16 products are five times as fast if YNNPACK takes them: batch dimensions first,
// more than one row and column, and K last in the first operand; others are computed in f32 (XLA's
// ynn_support.cc; measured in docs/decisions/0014-cpu-lowering.md).
func (s *Selector) Matmul(f MatmulShape) MatmulStrategy {
	way := MatmulStrategy{Swap: f.NFirst}
	if f.Elem != dtype.BF16 {
		s.Note(Choice{"product", "f32", "every form of it is fast"})
		return way
	}
	if f.M == 1 || f.N == 1 || f.K == 1 {
		s.Note(Choice{"product", "f32", "YNNPACK has no bf16 product with a side of 1"})
		way.Wide = true
		return way
	}
	way = f.cheapest()
	switch {
	case !way.Transpose:
		s.Note(Choice{"product", "bf16", "the summed dimension is last already"})
	case Split(f.K) == 0:
		s.Note(Choice{"product", "f32", "a prime dimension cannot be transposed by a copy"})
		return MatmulStrategy{Swap: f.NFirst, Wide: true}
	default:
		s.Note(Choice{"product", "bf16, transposed", "YNNPACK wants the summed dimension last"})
	}
	return way
}

// cheapest compares the bytes that are moved beside the product: the operand that is transposed, in
// bf16, and the result if it comes out transposed, in f32.
func (f MatmulShape) cheapest() MatmulStrategy {
	cost := func(swap, last bool, side int64) (MatmulStrategy, int64) {
		way, bytes := MatmulStrategy{Swap: swap, Transpose: !last}, int64(0)
		if way.Transpose {
			bytes = 2 * side * f.K
		}
		if swap != f.NFirst {
			bytes += 4 * f.M * f.N
		}
		return way, bytes
	}
	straight, a := cost(false, f.ALast, f.M)
	swapped, b := cost(true, f.BLast, f.N)
	if b < a || b == a && f.NFirst {
		return swapped
	}
	return straight
}

// Split gives the number of parts into which a dimension is split while it is transposed, 0 if it
// has no divisors: a plain transpose would be folded into the product again.
func Split(size int64) int64 {
	for _, n := range []int64{32, 16, 8, 4, 2, 3, 5, 7} {
		if size%n == 0 && size > n {
			return n
		}
	}
	return 0
}

// minBlockRows and maxQueryBlocks bound the query blocks of an attention; the alternatives that
// were measured are in docs/decisions/0014-cpu-lowering.md.
const (
	minBlockRows   = 64
	maxQueryBlocks = 4
)

// Fold is the number of parts that a sum of everything adds at a time, as long as there are more
// than FoldAbove elements: 32 is the most that XLA:CPU sums without a second pass
// (tree_reduction_rewriter.cc), and below FoldAbove the sum costs nothing.
const (
	Fold      = 32
	FoldAbove = 1 << 13
)

// Chunks gives the bounds [from, to) of the vocabulary chunks in which exponentials are summed:
// eight, so that an eighth of the logits' bytes is written beside the logits.
func Chunks(width int64) iter.Seq2[int64, int64] {
	return func(yield func(from, to int64) bool) {
		step := (width + 7) / 8
		for from := int64(0); from < width; from += step {
			if !yield(from, min(from+step, width)) {
				return
			}
		}
	}
}

// A QueryBlock is queries [From, To) of an attention and the keys [Low, High) that they may see.
type QueryBlock struct{ From, To, Low, High int64 }

// QueryBlocks splits the queries of a causal attention, so that scores nobody sees are not
// computed. Queries with positions of their own are in any order and are not split. Fewer than
// minBlockRows queries are not worth a product of their own; bf16 products are so fast that two
// blocks beat four.
func (s *Selector) QueryBlocks(op *ir.Op, gemm dtype.DType, queries, keys int64) []QueryBlock {
	n := min(queries/minBlockRows, maxQueryBlocks)
	if gemm != dtype.F32 {
		n = min(n, 2)
	}
	if !op.Attrs.Bool("causal") || op.Attrs.Bool("placed") || op.Attrs.Bool("lengths") ||
		queries != keys || n < 2 {
		return []QueryBlock{{0, queries, 0, keys}}
	}
	s.Note(Choice{"attention", "in query blocks", "keys that no query of a block sees are left out"})
	var list []QueryBlock
	for i := range n {
		p := QueryBlock{From: queries * i / n, To: queries * (i + 1) / n}
		p.High = p.To
		if window := op.Attrs.Int("window"); window > 0 {
			p.Low = max(0, p.From-window+1)
		}
		list = append(list, p)
	}
	return list
}

// Note records a choice, once, if it has a reason.
func (s *Selector) Note(c Choice) {
	if s == nil || c.Why == "" {
		return
	}
	if s.seen == nil {
		s.seen = map[string]bool{}
	}
	if key := fmt.Sprint(c); !s.seen[key] {
		s.seen[key] = true
		s.choices = append(s.choices, c)
	}
}
