package rewrite

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/golden"
	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/kernels/expr"
	"github.com/deepwell/deepwell/kernels/fused"
)

// A block is a residual MLP: norm, two linears or one, an activation, a linear, the residual's sum.
type block struct {
	name string
	norm func(b *ir.Builder, x, w *ir.Value) *ir.Value
	act  func(b *ir.Builder, gate, up *ir.Value) *ir.Value // up is nil without a second linear
	two  bool
}

func rms(b *ir.Builder, x, w *ir.Value) *ir.Value { return b.RMSNorm(x, w, "embed", 1e-5, 0) }

func blocks() []block {
	swiglu := func(b *ir.Builder, gate, up *ir.Value) *ir.Value { return b.Mul(b.Silu(gate), up) }
	return []block{
		{"swiglu", rms, swiglu, true},
		{"gelu", func(b *ir.Builder, x, w *ir.Value) *ir.Value {
			return b.LayerNorm(x, w, b.Scale(w, 0.1), "embed", 1e-5)
		}, func(b *ir.Builder, gate, _ *ir.Value) *ir.Value { return b.Gelu(gate) }, false},
		{"gemma", func(b *ir.Builder, x, w *ir.Value) *ir.Value { return b.RMSNorm(x, w, "embed", 1e-6, 1) },
			func(b *ir.Builder, gate, up *ir.Value) *ir.Value { return b.Mul(b.Gelu(gate), up) }, true},
		{"relu2", rms, func(b *ir.Builder, gate, _ *ir.Value) *ir.Value {
			r := b.Relu(gate)
			return b.Mul(r, r)
		}, false},
		// What is added to the norm's result is read twice, and the norm's result by others too.
		{"kept", func(b *ir.Builder, x, w *ir.Value) *ir.Value { return b.Add(rms(b, x, w), b.Scale(x, 0.5)) },
			swiglu, true},
	}
}

// graph is the block twice with its gradient, quantized to a format.
func (c block) graph(t *testing.T, f ir.Format) *ir.Graph { return lowered(t, c.joint(t, f)) }

// lowered has the GEMMs of a graph quantized.
func lowered(t *testing.T, g *ir.Graph) *ir.Graph {
	t.Helper()
	if _, _, err := ir.LowerQuantized(g, func(p string) string { return "c." + p }, nil,
		ir.ReportNothing); err != nil {
		t.Fatal(err)
	}
	return g
}

// joint is the block twice with its gradient, whose GEMMs are to be quantized to a format; without
// one it is smaller.
func (c block) joint(t *testing.T, f ir.Format) *ir.Graph { return c.taken(t, f, ir.GradPlan{}) }

// taken is joint with a gradient as a plan says.
func (c block) taken(t *testing.T, f ir.Format, how ir.GradPlan) *ir.Graph {
	t.Helper()
	scale := int64(8)
	if f == "" {
		scale = 2
	}
	b := ir.NewBuilder(c.name)
	d := irtest.D
	in := func(name string, dims ...ir.Dim) *ir.Value {
		return b.Input(name, ir.Data, ir.Type{Elem: dtype.BF16, Dims: dims}, "")
	}
	x := in("x", d("batch", 2), d("seq", 4*scale), d("embed", 8*scale))
	wrt := []string{"x"}
	for i := range 2 {
		w := func(name string, dims ...ir.Dim) *ir.Value {
			wrt = append(wrt, fmt.Sprint(name, i))
			return in(wrt[len(wrt)-1], dims...)
		}
		n := c.norm(b, x, w("norm", d("embed", 8*scale)))
		gate := b.Linear(n, w("gate", d("mlp", 12*scale), d("embed", 8*scale)))
		var up *ir.Value
		if c.two {
			up = b.Linear(n, w("up", d("mlp", 12*scale), d("embed", 8*scale)))
		}
		x = b.Add(x, b.Linear(c.act(b, gate, up), w("down", d("embed", 8*scale), d("mlp", 12*scale))))
	}
	wide := b.Convert(x, dtype.F32)
	g, err := b.Graph(b.Sum(b.Mul(wide, wide), "batch", "seq", "embed"))
	if err != nil {
		t.Fatal(err)
	}
	for _, op := range g.Ops {
		if op.Kind == "linear" && f != "" {
			for _, product := range []string{"fprop", "dgrad", "wgrad"} {
				op.Attrs = op.Attrs.With(product, string(f))
			}
		}
	}
	how.Wrt = wrt
	gr, err := ir.Grad(g, how)
	if err != nil {
		t.Fatal(err)
	}
	if g, err = gr.Joint(); err != nil {
		t.Fatal(err)
	}
	return g
}

// Blocks become the kernels of the goldens, and the interpreter sees the same numbers: but for what
// rounding to bfloat16 between steps did.
func TestSourcesAreFused(t *testing.T) {
	for _, c := range []struct {
		format ir.Format
		file   string
	}{{ir.MXFP8, "fused.txt"}, {ir.NVFP4, "fused_nvfp4.txt"}} {
		var text strings.Builder
		found := map[string]bool{}
		for _, one := range blocks() {
			fmt.Fprintf(&text, "%s\n", one.name)
			one.fused(t, c.format, func(op *ir.Op, e *expr.Expr) {
				found[e.String()] = true
				kind := ""
				if op.Kind == AmaxOnce {
					kind = "amax of "
				}
				fmt.Fprintf(&text, "\t%s%-12s along %v across %v keep %v: %s\n", kind, fused.Of(e).Name, along(op),
					op.Attrs.List(attrAcross), op.Attrs.Bool(attrKeep), e)
			})
		}
		golden.Compare(t, "testdata/"+c.file, []byte(text.String()))
		for _, s := range fused.Sources() {
			if !found[s.Expr.String()] {
				t.Errorf("%s: no block has the kernel %s, %s", c.format, s.Name, s.Expr)
			}
		}
	}
}

// fused fuses a block's sources, lists the kernels and compares the block's results.
func (c block) fused(t *testing.T, f ir.Format, list func(*ir.Op, *expr.Expr)) {
	t.Helper()
	g := c.graph(t, f)
	want := run(t, g)
	for _, pass := range []func(*ir.Graph) error{groupQuantizations, quantizeOnce(nil), writeNorms,
		fuseSources(nil)} {
		if err := pass(g); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
	}
	for _, op := range g.Ops {
		if op.Kind != QuantizeOnce && op.Kind != AmaxOnce {
			continue
		}
		e, err := ExprOf(op)
		if err != nil {
			t.Fatal(err)
		}
		list(op, e)
	}
	for i, list := range run(t, g) {
		var off, size float64
		for k, x := range list[0].Data {
			y := want[i][0].Data[k]
			off, size = off+(x-y)*(x-y), size+y*y
		}
		if off > fusedBound*fusedBound*size {
			t.Errorf("%s: %s: result %s is off by %.2g", c.name, f, g.Results[i], math.Sqrt(off/size))
		}
	}
}

// fusedBound is the error of MXFP8 blocks whose sources flip in their last bits of bfloat16: a
// hundredth of what quantization to E4M3 itself does, 3 %, times the blocks.
const fusedBound = 5e-3

// Plans are priced as what the passes do: sources are computed where the selector says so.
func TestSelectorKnowsWhatIsFused(t *testing.T) {
	for _, arch := range []string{"sm_90", "sm_100", "sm_103", "sm_120"} {
		for _, f := range []ir.Format{ir.MXFP8, ir.NVFP4} {
			g, err := Apply(blocks()[0].graph(t, f), kernels.For(arch), nil)
			if err != nil {
				t.Fatal(err)
			}
			n := count(g, func(op *ir.Op) bool {
				e, err := ExprOf(op)
				return (op.Kind == QuantizeOnce || op.Kind == AmaxOnce) && err == nil && len(e.Steps) > 0
			})
			if want := kernels.For(arch).ComputesSource(f); want != (n > 0) {
				t.Errorf("%s, %s: %d kernels compute their source; the selector says %v", arch, f, n, want)
			}
		}
	}
}

// The source of a norm's gradient is the next layer's, too: it is kept. No norm is left.
func TestKeptSources(t *testing.T) {
	g := blocks()[0].graph(t, ir.MXFP8)
	for _, pass := range []func(*ir.Graph) error{quantizeOnce(nil), writeNorms, fuseSources(nil)} {
		if err := pass(g); err != nil {
			t.Fatal(err)
		}
	}
	if n := count(g, func(op *ir.Op) bool { return op.Kind == QuantizeOnce && op.Attrs.Bool(attrKeep) }); n != 2 {
		t.Errorf("%d kernels keep their source", n)
	}
	if n := count(g, func(op *ir.Op) bool { return op.Kind == "rms_norm" }); n != 0 {
		t.Errorf("%d norms are left", n)
	}
}
