package kernels

import (
	"fmt"
	"iter"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// A MatmulShape is a product of matrices to choose for: batches of [M, K] times [K, N], each
// argument with what is summed over last or before last, and the result with M before N or after
// it.
type MatmulShape struct {
	Batch, M, N, K int64
	Elem           dtype.DType // of the arguments
	ALast, BLast   bool        // what is summed over stands last in the first, second argument
	NFirst         bool        // the result is wanted as [N, M]
}

// A MatmulStrategy is how a product is written.
type MatmulStrategy struct {
	// Swap puts the second argument first, which gives the result as [N, M].
	Swap bool
	// Transpose writes the argument that comes first once more, so that what is summed over stands
	// last.
	Transpose bool
	// Wide makes the product in f32, of arguments that were rounded before.
	Wide bool
}

// Matmul says how to write a product. On the CPU f32 products go to Eigen or YNNPACK, which take
// every form. Those of bf16 are five times as fast, if YNNPACK takes them: batches first, more than
// one row and column, and what is summed over last in the first argument; others are computed in
// f32 (XLA's ynn_support.cc; measured in docs/decisions/0014-cpu-lowering.md).
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
		s.Note(Choice{"product", "bf16", "what is summed over stands last already"})
	case Split(f.K) == 0:
		s.Note(Choice{"product", "f32", "what has no divisors cannot be turned"})
		return MatmulStrategy{Swap: f.NFirst, Wide: true}
	default:
		s.Note(Choice{"product", "bf16, turned", "YNNPACK wants what is summed over last"})
	}
	return way
}

// cheapest compares what must be moved in memory beside the product: the argument that is turned,
// in bf16, and the result if it comes out the wrong way, in f32.
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

// Split gives the number of parts that a dimension is cut into while it is turned, 0 if it has
// none: a plain transpose would be folded into the product again.
func Split(size int64) int64 {
	for _, n := range []int64{32, 16, 8, 4, 2, 3, 5, 7} {
		if size%n == 0 && size > n {
			return n
		}
	}
	return 0
}

// pieceRows and mostPieces bound the pieces of an attention: what was tried is in
// docs/decisions/0014-cpu-lowering.md.
const (
	pieceRows  = 64
	mostPieces = 4
)

// Fold is the number of parts that a sum of everything adds at a time, as long as there are more
// than FoldAbove elements: 32 is the most that XLA:CPU sums without a second pass
// (tree_reduction_rewriter.cc), and below FoldAbove the sum costs nothing.
const (
	Fold      = 32
	FoldAbove = 1 << 13
)

// Chunks gives the parts, from and to, in which a row of scores is summed: eight, so that what is
// written beside the scores is an eighth of them.
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

// A Piece is some queries of an attention, From to To, and the keys that they may see.
type Piece struct{ From, To, Low, High int64 }

// Pieces cuts the queries of an attention in which a query sees no later key, so that scores nobody
// sees are not computed. With places of their own the queries stand in any order. Fewer than
// pieceRows queries are not worth a product of their own, and products in bf16 cost so little that
// two pieces are better than four.
func (s *Selector) Pieces(op *ir.Op, products dtype.DType, queries, keys int64) []Piece {
	n := min(queries/pieceRows, mostPieces)
	if products != dtype.F32 {
		n = min(n, 2)
	}
	if !op.Attrs.Bool("causal") || op.Attrs.Bool("placed") || queries != keys || n < 2 {
		return []Piece{{0, queries, 0, keys}}
	}
	s.Note(Choice{"attention", "in pieces", "keys that no query of a piece sees are left out"})
	var list []Piece
	for i := range n {
		p := Piece{From: queries * i / n, To: queries * (i + 1) / n}
		p.High = p.To
		if window := op.Attrs.Int("window"); window > 0 {
			p.Low = max(0, p.From-window+1)
		}
		list = append(list, p)
	}
	return list
}

// Note keeps a choice, once, if it has a reason and somebody asks.
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
