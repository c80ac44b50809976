package firstuse

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/kernels/fused"
	interpret "github.com/deepwell/deepwell/kernels/triton/run"
)

// The plain forms of grouped GEMMs are what the interpreter makes of their text; a wrong text is
// found.
func TestPlainFormsOfGroups(t *testing.T) {
	found := map[[2]string]bool{}
	for i, text := range []string{
		"grouped bf16 24576x14336x4096 experts=8 filled=17408 weights=keo",
		"grouped mxfp8 24576x14336x4096 experts=8 filled=17408 weights=keo",
		"grouped mxfp8 24576x4096x14336 experts=8 filled=17408 weights=oek small",
		"grouped mxfp8 24576x4096x14336 experts=1 filled=17408 weights=eok",
		"grouped mxfp8 24576x384x256 experts=8 filled=17408 weights=oek grad",
		"grouped bf16 24576x256x384 experts=8 filled=17408 weights=eok grad wide",
		"grouped nvfp4 24576x14336x4096 experts=8 filled=17408 weights=eok shards=8",
		"grouped nvfp4 24576x4096x14336 experts=8 filled=17408 weights=oek small",
		"grouped nvfp4 24576x384x384 experts=1 filled=17408 weights=eok",
		"grouped nvfp4 24576x384x256 experts=8 filled=18432 weights=oek grad",
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
		t.Logf("%s: %.3g", text, right)
		if i > 0 && (g.Format != dtype.NVFP4 || g.Experts == 1) {
			continue
		}
		for _, w := range wrongTexts {
			text := strings.Replace(k.Text, w[0], w[1], 1)
			if text == k.Text {
				continue
			}
			whole := k.Text
			k.Text = text
			if far := apart(); far <= Limit {
				t.Errorf("%s for %s is not found: %.3g", w[1], w[0], far)
			} else {
				found[w] = true
				t.Logf("%s for %s: %.3g", w[1], w[0], far)
			}
			k.Text = whole
		}
	}
	if len(found) != len(wrongTexts) {
		t.Errorf("of %d wrong texts %d were tried", len(wrongTexts), len(found))
	}
}

// wrongTexts are what could be wrong with a kernel.
var wrongTexts = [][2]string{
	{"arith.maxsi", "arith.minsi"},                                             // always the first expert
	{"arith.remsi %20", "arith.divsi %20"},                                     // a step of another shard
	{"order = array<i32: 0, 3, 2, 1, 4>", "order = array<i32: 0, 1, 2, 3, 4>"}, // scales of other rows
	{"arith.mulf", "arith.addf"},                                               // a tensor's scale
}
