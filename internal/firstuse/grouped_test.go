package firstuse

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/kernels/fused"
	interpret "github.com/deepwell/deepwell/kernels/triton/run"
)

// The plain forms of grouped GEMMs are what the interpreter makes of their text; a wrong text is
// found.
func TestPlainFormsOfGroups(t *testing.T) {
	for i, text := range []string{
		"grouped bf16 24576x14336x4096 experts=8 filled=17408 weights=keo",
		"grouped mxfp8 24576x14336x4096 experts=8 filled=17408 weights=keo",
		"grouped mxfp8 24576x4096x14336 experts=8 filled=17408 weights=oek small",
		"grouped mxfp8 24576x4096x14336 experts=1 filled=17408 weights=eok",
		"grouped mxfp8 24576x384x256 experts=8 filled=17408 weights=oek grad",
		"grouped bf16 24576x256x384 experts=8 filled=17408 weights=eok grad wide",
	} {
		g, err := fused.ParseGroup(text)
		if err != nil {
			t.Fatal(err)
		}
		g = SmallGroup(g)
		k, err := g.Kernel()
		if err != nil {
			t.Fatal(err)
		}
		d, err := drawGroup(g, rand.New(rand.NewPCG(1, 2)))
		if err != nil {
			t.Fatal(err)
		}
		apart := func() float64 {
			a := k.Args[len(k.Args)-1]
			all := append(slices.Clip(d.operands),
				make([]byte, a.Elem.Bits()/8*elements(a.Shape)))
			if err := interpret.Kernel(k, all); err != nil {
				t.Fatal(err)
			}
			return d.apart(k, all[len(all)-1])
		}
		right := apart()
		if right > Limit {
			t.Errorf("%s: %.3g", text, right)
		}
		if i > 0 {
			t.Logf("%s: %.3g", text, right)
			continue
		}
		wrong := strings.Replace(k.Text, "arith.maxsi", "arith.minsi", 1) // always the first expert
		if wrong == k.Text {
			t.Fatalf("the text has no arith.maxsi:\n%s", k.Text)
		}
		k.Text = wrong
		if far := apart(); far <= Limit {
			t.Errorf("a wrong text is not found: %.3g", far)
		} else {
			t.Logf("%s: %.3g, wrong %.3g", text, right, far)
		}
	}
}
