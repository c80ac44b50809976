package firstuse

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/kernels/rownorm"
	interpret "github.com/deepwell/deepwell/kernels/triton/run"
)

// What the interpreter makes of the text of norms is near their plain forms; wrong texts are not.
func TestPlainFormsOfNorms(t *testing.T) {
	for _, c := range []struct{ spec, old, new string }{
		{"rms_norm 40x96 eps=1e-05 shift=0 added normed stats", "", ""},
		{"rms_norm 8192x96 eps=1e-05 shift=1 normed rounds=1 saved=0 kept=0", "arith.addf", "arith.subf"},
		{"rms_norm 40x96 eps=1e-05 shift=0 added normed rounds=32 from=0 into=1 kept=0",
			"arith.constant 3840 : i64", "arith.constant 1920 : i64"},
		{"rms_norm_grad 40x96 eps=1e-05 shift=0 grads=3 residual rounds=32 from=0",
			"arith.constant 3840 : i64", "arith.constant 1920 : i64"},
		{"rms_norm_grad 40x96 eps=1e-05 shift=0 grads=1", "arith.subf", "arith.addf"},
	} {
		n, err := rownorm.Parse(c.spec)
		if err != nil {
			t.Fatal(err)
		}
		n = SmallNorm(n)
		k, err := n.Kernel()
		if err != nil {
			t.Fatal(err)
		}
		d := drawNorm(n, k, rand.New(rand.NewPCG(1, 2)))
		apart := func() float64 {
			all := slices.Clone(d.operands)
			for _, a := range k.Args[len(all):] {
				b := make([]byte, a.Elem.Bits()/8*elements(a.Shape))
				for i, o := range k.Args[:len(d.operands)] {
					if a.InPlace == o.Name {
						b = slices.Clone(d.operands[i])
					}
				}
				all = append(all, b)
			}
			if err := interpret.Kernel(k, all); err != nil {
				t.Fatal(err)
			}
			return d.apartNorm(n, k, all[len(d.operands):])
		}
		right := apart()
		if right > Limit {
			t.Errorf("%s: %.3g", c.spec, right)
		}
		if c.old == "" {
			continue
		}
		wrong := strings.ReplaceAll(k.Text, c.old, c.new)
		if wrong == k.Text {
			t.Fatalf("%s: the text has no %s:\n%s", c.spec, c.old, k.Text)
		}
		k.Text = wrong
		if far := apart(); far <= Limit {
			t.Errorf("%s: %s is not found: %.3g", c.spec, c.new, far)
		}
	}
}

// A loop of one round has stacks, too.
func TestLoopsOfOneRound(t *testing.T) {
	s, err := fused.ParseSpec("mxfp8 1x64x128 along rounds=1 from=0: bf16 -> 0")
	if err != nil {
		t.Fatal(err)
	}
	s = Small(s)
	k, err := s.Kernel()
	if err != nil {
		t.Fatal(err)
	}
	if d := draw(s, k, rand.New(rand.NewPCG(1, 2))); len(d.operands[0]) != 3*2*64*128 {
		t.Errorf("a stack of %d bytes", len(d.operands[0]))
	}
}
