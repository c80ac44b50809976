package flash

import (
	"fmt"
	"math"

	tt "github.com/deepwell/deepwell/kernels/triton"
)

// A Part is which of the kernels of an attention one is.
type Part string

// The kernels.
const (
	Forward Part = "forward" // q, k, v → o, lse
	DQ      Part = "dq"      // q, k, v, lse, delta, do → dq
	DKV     Part = "dkv"     // q, k, v, lse, delta, do → dk, dv
)

// An Attention is softmax(cap(Scale · QKᵀ)) V of bfloat16 queries [Batch, Seq, Heads, Head], keys
// [Batch, Keys, KVHeads, Head] and values [Batch, Keys, KVHeads, Value], where the cap is
// SoftCap · tanh(x / SoftCap).
type Attention struct {
	Part           Part
	Batch          int
	Seq, Keys      int
	Heads, KVHeads int // query head h reads key head h · KVHeads / Heads
	Head, Value    int
	Scale          float64
	SoftCap        float64 // 0 means no cap
	Window         int     // keys that a query sees, itself included; 0 is all
	Causal         bool
	// Documents tells that there are numbers of documents, s32 [Batch, Seq] and [Batch, Keys], behind
	// the other operands; a query sees the keys of its own.
	Documents bool
	// Small tiles fit GPUs without tensor memory, whose sums are in registers (rtx6000pro).
	Small bool
}

// masked is the score of a key that a query does not see: far below every real score.
const masked = -1e30

// Check refuses what the kernels do not compute. A query must see a key, itself: so masks are of
// as many queries as keys.
func (a Attention) Check() error {
	for _, n := range []int{a.Batch, a.Seq, a.Keys, a.Heads, a.KVHeads, a.Head, a.Value} {
		if n < 1 || n > 1<<24 {
			return fmt.Errorf("attention of %d", n)
		}
	}
	hidden := a.Causal || a.Window > 0 || a.Documents
	switch {
	case a.Part != Forward && a.Part != DQ && a.Part != DKV:
		return fmt.Errorf("attention has no part %q", a.Part)
	case a.Heads%a.KVHeads != 0:
		return fmt.Errorf("%d heads share %d", a.Heads, a.KVHeads)
	case a.Head > MaxHead || a.Value > MaxHead:
		return fmt.Errorf("heads of %d and %d, more than %d", a.Head, a.Value, MaxHead)
	case !tt.Launches(a.grid()) || a.Heads/a.KVHeads*ceil(a.Seq, leastChunk) >= 1<<31:
		return fmt.Errorf("attention of %d sequences of %d with %d heads", a.Batch, a.Seq, a.Heads)
	case hidden && a.Seq != a.Keys:
		return fmt.Errorf("a mask of %d queries and %d keys", a.Seq, a.Keys)
	case a.Window < 0 || a.Window > 1<<30 || !(a.SoftCap >= 0) || !finite(a.SoftCap*math.Log2E) ||
		!finite(a.Scale*math.Log2E) || a.Scale == 0 ||
		a.SoftCap > 0 && !finite(2*math.Log2E*a.Scale/a.SoftCap):
		return fmt.Errorf("scale %g, cap %g, window %d", a.Scale, a.SoftCap, a.Window)
	}
	return nil
}

// finite tells whether a factor is a number of float32.
func finite(f float64) bool { return math.Abs(f) <= math.MaxFloat32 }

// Kernel prints the kernel.
func (a Attention) Kernel() (*tt.Kernel, error) {
	if err := a.Check(); err != nil {
		return nil, err
	}
	w := a.newWriter()
	switch a.Part {
	case Forward:
		w.forward()
	case DQ:
		w.queryGrad()
	default:
		w.keyGrad()
	}
	t := a.tiles()
	k, err := w.b.Kernel(tt.Launch{Grid: a.grid(), Warps: t.warps, Stages: t.stages})
	if err == nil {
		k.Spec = a.String()
	}
	return k, err
}

// grid is the programs of the kernel: blocks of queries or of keys, heads and sequences.
func (a Attention) grid() [3]int {
	t := a.tiles()
	if a.Part == DKV {
		return [3]int{ceil(a.Keys, t.keys), a.KVHeads, a.Batch}
	}
	return [3]int{ceil(a.Seq, t.queries), a.Heads, a.Batch}
}

func ceil(n, by int) int { return (n + by - 1) / by }

// operands are the arrays that the kernel reads, as the operation has them.
func (a Attention) operands() []tt.Arg {
	q := []int{a.Batch, a.Seq, a.Heads, a.Head}
	list := []tt.Arg{{Name: "q", Elem: tt.BF16, Shape: q},
		{Name: "k", Elem: tt.BF16, Shape: []int{a.Batch, a.Keys, a.KVHeads, a.Head}},
		{Name: "v", Elem: tt.BF16, Shape: []int{a.Batch, a.Keys, a.KVHeads, a.Value}}}
	if a.Part != Forward {
		list = append(list, tt.Arg{Name: "lse", Elem: tt.F32, Shape: q[:3]},
			tt.Arg{Name: "delta", Elem: tt.F32, Shape: q[:3]},
			tt.Arg{Name: "do", Elem: tt.BF16, Shape: []int{a.Batch, a.Seq, a.Heads, a.Value}})
	}
	if a.Documents {
		list = append(list, tt.Arg{Name: "documents", Elem: tt.I32, Shape: []int{a.Batch, a.Seq}},
			tt.Arg{Name: "key_documents", Elem: tt.I32, Shape: []int{a.Batch, a.Keys}})
	}
	return list
}

// results are the arrays that it writes.
func (a Attention) results() []tt.Arg {
	switch a.Part {
	case Forward:
		return []tt.Arg{
			{Name: "o", Elem: tt.BF16, Shape: []int{a.Batch, a.Seq, a.Heads, a.Value}, Result: true},
			{Name: "out_lse", Elem: tt.F32, Shape: []int{a.Batch, a.Seq, a.Heads}, Result: true}}
	case DQ:
		return []tt.Arg{{Name: "dq", Elem: tt.BF16, Shape: []int{a.Batch, a.Seq, a.Heads, a.Head},
			Result: true}}
	}
	return []tt.Arg{
		{Name: "dk", Elem: tt.BF16, Shape: []int{a.Batch, a.Keys, a.KVHeads, a.Head}, Result: true},
		{Name: "dv", Elem: tt.BF16, Shape: []int{a.Batch, a.Keys, a.KVHeads, a.Value}, Result: true}}
}
