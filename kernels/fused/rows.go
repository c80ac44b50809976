package fused

import (
	"fmt"
	"math"

	tt "github.com/deepwell/deepwell/kernels/triton"
)

// A Loss is cross-entropy of rows of logits and its gradient, which takes the place of the logits:
// memory has them once, and they are read twice and written once. XLA reads them three times and
// writes the gradient elsewhere.
type Loss struct{ Rows, Cols int }

// Logits are read in chunks of 8,192 by 512 threads; each thread keeps the largest of its own
// numbers and a sum of exponentials less that, since one comparison for 8 exponentials is cheaper
// than one each (reference/triton_kernels.md, xent2).
const (
	LogitChunk  = 8192
	logitThread = 8
	logitWarps  = 16
)

// String specifies the kernel in its call, for whoever reads the program: loss 8192x128256.
func (l Loss) String() string { return fmt.Sprintf("loss %dx%d", l.Rows, l.Cols) }

// ParseLoss reads what String prints.
func ParseLoss(text string) (l Loss, err error) {
	_, err = fmt.Sscanf(text, "loss %dx%d", &l.Rows, &l.Cols)
	if err != nil || l.Rows < 1 || l.Cols < 1 || l.String() != text {
		return Loss{}, fmt.Errorf("no loss is specified by %q", text)
	}
	return l, nil
}

// Key names the kernel whatever its sizes are, as [Spec.Key] does.
func (Loss) Key() string { return "loss" }

// Bytes is what the kernel reads and writes. A row's second read is counted, though it may find
// the row in the L2 cache.
func (l Loss) Bytes() int64 { return int64(l.Rows) * (3*2*int64(l.Cols) + 4*4) }

// Kernel prints it. With l = log Σ exp x, the loss of a row is l − x[label], and its gradient
// (exp(x − l) − 1 at the label)·d; both are 0 where the label is negative. Logits are read where
// the gradient is written, so that no compiler takes the two for different memory.
//
//	x [rows, cols], labels, d [rows] → loss, lse [rows] in float32, dx [rows, cols]
func (l Loss) Kernel() (*tt.Kernel, error) {
	rows, cols := []int{l.Rows}, l.Cols
	b, v := tt.New("loss",
		tt.Arg{Name: "x", Elem: tt.BF16, Shape: []int{l.Rows, cols}},
		tt.Arg{Name: "labels", Elem: tt.I32, Shape: rows},
		tt.Arg{Name: "d", Elem: tt.F32, Shape: rows},
		tt.Arg{Name: "loss", Elem: tt.F32, Shape: rows, Result: true},
		tt.Arg{Name: "lse", Elem: tt.F32, Shape: rows, Result: true},
		tt.Arg{Name: "dx", Elem: tt.BF16, Shape: []int{l.Rows, cols}, Result: true, InPlace: "x"})
	n := b.Program(0)
	row, label := v[5].At(n.To(tt.I64).Mul(cols)), b.Load(v[1].At(n))
	here := label.Is("ge", 0).And(label.Is("lt", cols))
	at := b.LoadIf(here, row.At(label), 0).To(tt.F32)
	d := b.Load(v[2].At(n)).Select(label.Is("ge", 0), 0.0)
	lse := logSumExp(b, row, cols) // in powers of two
	loss := lse.Mul(math.Ln2).Sub(at).Select(label.Is("ge", 0), 0.0)
	b.Store(v[3].At(n), loss)
	b.Store(v[4].At(n), lse.Mul(math.Ln2))
	b.For(n.Const(0), n.Const(cols), n.Const(LogitChunk), nil,
		func(i tt.Value, _ []tt.Value) []tt.Value {
			col := i.Add(b.Range(LogitChunk))
			x := b.LoadIf(col.Is("lt", cols), row.At(col), 0).To(tt.F32)
			p := exp2(x.Mul(math.Log2E).Sub(lse))
			g := p.Sub(p.Const(1.0).Select(col.Is("eq", label), 0.0)).Mul(d)
			b.StoreIf(col.Is("lt", cols), row.At(col), g.To(tt.BF16))
			return nil
		})
	k, err := b.Kernel(tt.Launch{Grid: [3]int{l.Rows}, Warps: logitWarps, Stages: 2})
	if err == nil {
		k.Spec = l.String()
	}
	return k, err
}

// logSumExp is the logarithm, to base 2, of the sum of a row's exponentials.
func logSumExp(b *tt.Builder, row tt.Value, cols int) tt.Value {
	parts, log2e := LogitChunk/logitThread, math.Log2E
	least := b.Full(-1e30, tt.F32, parts) // finite: the difference of two infinities is a NaN
	zero := b.Program(0).Const(0)
	sums := b.For(zero, zero.Const(cols), zero.Const(LogitChunk),
		[]tt.Value{least, b.Full(0.0, tt.F32, parts)},
		func(i tt.Value, carried []tt.Value) []tt.Value {
			col := i.Add(b.Range(LogitChunk))
			x := b.LoadIf(col.Is("lt", cols), row.At(col), -1e30).To(tt.F32).Reshape(parts, logitThread)
			top := carried[0].Max(x.Largest(1).Mul(log2e))
			terms := exp2(x.Mul(log2e).Sub(top.Expand(1))).Sum(1)
			return []tt.Value{top, carried[1].Mul(exp2(carried[0].Sub(top))).Add(terms)}
		})
	top := sums[0].Largest(0)
	return sums[1].Mul(exp2(sums[0].Sub(top))).Sum(0).Log2().Add(top)
}

func reciprocal(x tt.Value) tt.Value { return x.FastReciprocal() }

func exp2(x tt.Value) tt.Value { return x.FastExp2() }
