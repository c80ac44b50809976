package firstuse

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/kernels/fused"
	interpret "github.com/deepwell/deepwell/kernels/triton/run"
)

// The plain form of a loss is what the interpreter makes of its text; wrong texts are found.
func TestPlainFormOfLoss(t *testing.T) {
	l := SmallLoss(fused.Loss{Rows: 8192, Cols: 128256})
	k, err := l.Kernel()
	if err != nil {
		t.Fatal(err)
	}
	d := drawLoss(l, rand.New(rand.NewPCG(1, 2)))
	apart := func() float64 {
		all := slices.Clone(d.operands)
		for _, a := range k.Args[len(all):] {
			all = append(all, make([]byte, a.Elem.Bits()/8*elements(a.Shape)))
		}
		if err := interpret.Kernel(k, all); err != nil {
			t.Fatal(err)
		}
		return d.apart(k, all[len(d.operands):])
	}
	if a := apart(); a > Limit {
		t.Errorf("%s: %.3g", l, a)
	} else {
		t.Logf("%s: %.3g", l, a)
	}
	right := k.Text
	for _, fault := range [][3]string{
		{"a label of another column", "arith.cmpi eq", "arith.cmpi ne"},
		{"another exponent", "arith.subf", "arith.addf"},
	} {
		k.Text = strings.Replace(right, fault[1], fault[2], 1)
		if k.Text == right {
			t.Fatalf("%s: the text has no %s:\n%s", fault[0], fault[1], right)
		}
		if a := apart(); a <= Limit {
			t.Errorf("%s is not found: %.3g", fault[0], a)
		}
	}
}
