package lower

import (
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower/stablehlo"
	"github.com/deepwell/deepwell/rewrite"
)

// kernelOf says what an operation becomes on a target, and notes why.
func kernelOf(s *kernels.Selector, op *ir.Op) string {
	if k := table().Pick(s, op); k != nil {
		return k.Name
	}
	return kernels.Plain
}

// The choice for the CPU does not reach other targets.
func TestOtherTargetsStayPlain(t *testing.T) {
	op := causal(t, 256)
	for arch, want := range map[string]string{"cpu": kernels.HeadFirst, "sm_100": kernels.Plain} {
		s := kernels.For(arch)
		if got := kernelOf(s, op); got != want {
			t.Errorf("%s: %s, want %s", arch, got, want)
		}
		if !slices.ContainsFunc(s.Choices(), func(c kernels.Choice) bool { return c.Kernel == want }) {
			t.Errorf("%s: %v says nothing of it", arch, s.Choices())
		}
		if s.FusesOneOutput() != (arch == "cpu") {
			t.Errorf("%s: results one at a time: %v", arch, s.FusesOneOutput())
		}
	}
}

// causal is the operation of a causal attention of n rows.
func causal(t *testing.T, rows int64) *ir.Op {
	t.Helper()
	b := ir.NewBuilder("attention")
	d := func(name string, n int64) ir.Dim { return ir.Dim{Name: name, Size: n} }
	in := func(name string, dims ...ir.Dim) *ir.Value {
		return b.Input(name, ir.Data, ir.Type{Elem: dtype.F32, Dims: dims}, "")
	}
	q := in("q", d(ir.Seq, rows), d(ir.Heads, 2), d(ir.HeadDim, 4))
	k := in("k", d(ir.Keys, rows), d(ir.KVHeads, 2), d(ir.HeadDim, 4))
	g, err := b.Graph(b.Attend(q, k, k, ir.Attention{Scale: 1, Causal: true}))
	if err != nil {
		t.Fatal(err)
	}
	return g.Ops[0]
}

// Block-scaled matmuls are cuDNN's where GPUs have them, and each choice has a reason.
func TestBlocks(t *testing.T) {
	b := ir.NewBuilder("blocks")
	x := b.Input("x", ir.Data, ir.Type{Elem: dtype.BF16,
		Dims: []ir.Dim{{Name: "rows", Size: 64}, {Name: "embed", Size: 32}}}, "")
	w := b.Rename(x, "rows", "out")
	how := ir.Quantize{Format: ir.MXFP8, Along: []string{"embed"}}
	y := b.BlockDot(ir.MXFP8, b.QuantizeAll(x, how), b.QuantizeAll(w, how), []string{"embed"}, dtype.BF16)
	g, err := b.Graph(y)
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct{ arch, quantize, product, why string }{
		{"cpu", kernels.Plain, kernels.Matrix, "exact"},
		{"sm_90", kernels.Windowed, kernels.Plain, "sm_90 has no block-scaled matmuls"},
		{"sm_100", kernels.Triton, kernels.CuDNN, "cuDNN multiplies blocks"},
		{"sm_103", kernels.Triton, kernels.CuDNN, "cuDNN multiplies blocks"},
	} {
		s := kernels.For(row.arch)
		g, err := rewrite.Apply(g, s, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, op := range g.Ops {
			got, kind := kernelOf(s, op), rewrite.SourceKind(op.Kind)
			if kind == "quantize" && got != row.quantize || kind == "block_dot" && got != row.product {
				t.Errorf("%s: %s becomes %s", row.arch, op.Kind, got)
			}
		}
		list := s.Choices()
		if len(list) != 2 || list[0].Why == "" || !strings.Contains(list[1].Why, row.why) {
			t.Errorf("%s: %+v", row.arch, list)
		}
		if flags := s.Exact(map[string]any{"a": 1}); flags["xla_allow_excess_precision"] != false ||
			len(flags) != 2 {
			t.Errorf("%s: %v", row.arch, flags)
		}
	}
}

// A kernel that applies says what work an operation is; without one its row in ir does.
func TestWorkOfAKernel(t *testing.T) {
	op := causal(t, 64)
	g := &ir.Graph{}
	own := stablehlo.Kernel{Name: "fused", Kinds: []string{"attention"}, Applies: kernels.OnGPU("it is there"),
		Work: func(*ir.Graph, *ir.Op) ir.Work { return ir.Work{Class: ir.Streaming, Bytes: 7} }}
	all := stablehlo.Table{Kernels: append([]stablehlo.Kernel{own}, table().Kernels...)}
	if w := all.Work(kernels.For("sm_100"), g, op); w.Bytes != 7 {
		t.Errorf("on a GPU the work is %+v", w)
	}
	if w := all.Work(kernels.For("cpu"), g, op); w.Class != ir.Attend {
		t.Errorf("on the CPU the work is %+v", w)
	}
	if w := Work(nil, g, op); w.Class != ir.Attend {
		t.Errorf("without a target the work is %+v", w)
	}
}
