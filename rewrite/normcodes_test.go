package rewrite

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/internal/golden"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/kernels"
)

func equalArrays(a, b []*eval.Array) bool {
	return slices.EqualFunc(a, b, func(x, y *eval.Array) bool { return slices.Equal(x.Data, y.Data) })
}

// Where the backward pass quantizes inputs of wgrad itself, norms become kernels of rows that write
// codes, and SwiGLU is quantized in the kernel of its gradients; the results stay.
func TestRequantized(t *testing.T) {
	var text strings.Builder
	for _, c := range blocks() {
		fmt.Fprintf(&text, "%s\n", c.name)
		before := lowered(t, c.joint(t, ir.MXFP8))
		g := lowered(t, c.taken(t, ir.MXFP8, ir.GradPlan{Requantize: true}))
		want := run(t, before)
		if same := run(t, g); !slices.EqualFunc(same, want, equalArrays) {
			t.Errorf("%s: results differ before any pass", c.name)
		}
		s := kernels.For("sm_100")
		for _, pass := range []func(*ir.Graph) error{groupQuantizations, quantizeOnce(s), normCodes(s),
			writeNorms, normGradients(s), fuseSources(s)} {
			if err := pass(g); err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
		}
		each(g, func(op *ir.Op) {
			switch op.Kind {
			case NormRows:
				n, why := NormOf(op)
				fmt.Fprintf(&text, "\t%s; %s\n", n, why)
			case QuantizeOnce:
				e, _ := ExprOf(op)
				fmt.Fprintf(&text, "\talong %v across %v, across alone %v, keep %v: %s\n", along(op),
					op.Attrs.List(attrAcross), op.Attrs.List(attrColumns), op.Attrs.Bool(attrKeep), e)
			}
		})
		for i, list := range run(t, g) {
			var off, size float64
			for k, x := range list[0].Data {
				y := want[i][0].Data[k]
				off, size = off+(x-y)*(x-y), size+y*y
			}
			if off > fusedBound*fusedBound*size {
				t.Errorf("%s: result %s is off by %.2g", c.name, g.Results[i], math.Sqrt(off/size))
			}
		}
	}
	golden.Compare(t, "testdata/requantized.txt", []byte(text.String()))
}
