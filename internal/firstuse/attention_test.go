package firstuse

import (
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/kernels/flash"
	interpret "github.com/deepwell/deepwell/kernels/triton/run"
)

// The plain forms of attention are what the interpreter makes of its text; a wrong text is found.
func TestPlainFormsOfAttention(t *testing.T) {
	for _, c := range []struct{ text, old, new string }{
		{"attention forward 2x4096x4096 heads=16/8 sizes=64/64 scale=0.125 softcap=50 window=4096 causal",
			"arith.cmpi sle", "arith.cmpi slt"},
		{"attention dq 2x1000x1000 heads=4/4 sizes=20/12 scale=0.2 softcap=0 window=0 causal documents small",
			"arith.cmpi eq", "arith.cmpi ne"},
		{"attention dkv 2x600x600 heads=16/8 sizes=32/32 scale=0.2 softcap=5 window=0 causal",
			"dense<1.0e+00>", "dense<1.1e+00>"},
		// Where a query sees one key, or a cap leaves little of a score, nothing else is wrong.
		{"attention dq 2x600x600 heads=2/2 sizes=16/16 scale=0.2 softcap=0 window=1 causal",
			"arith.cmpi sle", "arith.cmpi slt"},
		{"attention dkv 8x1x1 heads=2/2 sizes=16/16 scale=0.2 softcap=0 window=0 causal",
			"arith.cmpi sle", "arith.cmpi slt"},
		{"attention dq 1x200x200 heads=2/2 sizes=16/16 scale=0.2 softcap=0.1 window=0 causal",
			"arith.cmpi sle", "arith.cmpi slt"},
		{"attention dq 1x200x200 heads=2/2 sizes=16/16 scale=0.2 softcap=1e+20 window=0 causal",
			"arith.cmpi sle", "arith.cmpi slt"},
	} {
		a, err := flash.Parse(c.text)
		if err != nil {
			t.Fatal(err)
		}
		a = SmallAttention(a)
		k, err := a.Kernel()
		if err != nil {
			t.Fatal(err)
		}
		d := drawAttention(a, rand.New(rand.NewPCG(1, 2)))
		apart := func() float64 {
			all := d.operands(a)
			n := len(all)
			for _, arg := range k.Args[n:] {
				all = append(all, make([]byte, arg.Elem.Bits()/8*elements(arg.Shape)))
			}
			if err := interpret.Kernel(k, all); err != nil {
				t.Fatal(err)
			}
			return d.apart(k, all[n:])
		}
		right := apart()
		wrong := strings.ReplaceAll(k.Text, c.old, c.new)
		if wrong == k.Text {
			t.Fatalf("the text of %s has no %s", c.text, c.old)
		}
		k.Text = wrong
		far := apart()
		t.Logf("%s: %.3g, wrong %.3g", c.text, right, far)
		if right > attentionLimit || far <= 4*attentionLimit {
			t.Errorf("%s: %.3g, wrong %.3g of %.3g", c.text, right, far, attentionLimit)
		}
	}
}
