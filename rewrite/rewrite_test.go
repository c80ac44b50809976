package rewrite

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/program"
)

func names(s *kernels.Selector) (list []string) {
	for _, p := range passes(s, nil) {
		list = append(list, p.Name)
	}
	return list
}

// The passes of a target are a list that a person can read.
func TestPassesOfTargets(t *testing.T) {
	for _, row := range []struct {
		s    *kernels.Selector
		want []string
	}{
		{nil, []string{"expand-custom", "drop-host-copies", "group-quantizations", "fold-transposes",
			"keep-block-layout", "pack-bytes"}},
		{kernels.For("cpu"), []string{"expand-custom", "drop-host-copies", "group-quantizations",
			"fold-transposes", "update-in-place", "save-softmax", "keep-block-layout", "pack-bytes"}},
		{kernels.For("sm_90"), []string{"expand-custom", "group-quantizations", "fold-transposes",
			"share-block-scales", "part-shared-experts", "pack-bytes"}},
		{kernels.For("sm_100"), []string{"expand-custom", "group-quantizations", "loss-in-place",
			"quantize-once", "norm-codes",
			"write-norms", "norm-rows", "norm-gradients", "fuse-sources",
			"share-block-scales", "part-shared-experts", "group-experts", "pack-bytes"}},
	} {
		if got := names(row.s); !slices.Equal(got, row.want) {
			t.Errorf("%q has %q, want %q", row.s.Arch(), got, row.want)
		}
	}
}

// joint is the tiny model with its gradient.
func joint(t *testing.T) *ir.Graph {
	t.Helper()
	g, err := irtest.Tiny(2)
	if err != nil {
		t.Fatal(err)
	}
	grad, err := ir.Grad(g, ir.GradPlan{Wrt: []string{"wq", "w1", "w2", "table"}})
	if err != nil {
		t.Fatal(err)
	}
	g, err = grad.Joint()
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func run(t *testing.T, g *ir.Graph) [][]*eval.Array {
	t.Helper()
	r, in := rand.New(rand.NewPCG(1, 2)), map[string][]*eval.Array{}
	for _, v := range g.Inputs {
		a := eval.New(v.Type)
		for i := range a.Data {
			if a.Data[i] = r.NormFloat64() / 2; v.Type.Elem.Kind() != dtype.Float {
				a.Data[i] = float64(r.IntN(5))
			}
		}
		in[v.Name] = []*eval.Array{a}
	}
	out, err := eval.Run(g, in)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func count(g *ir.Graph, is func(*ir.Op) bool) (n int) {
	for _, op := range g.Ops {
		if is(op) {
			n++
		}
		if op.Body != nil {
			n += count(op.Body, is)
		}
	}
	return n
}

// A folded transpose is gone, and the interpreter sees the same numbers.
func TestFoldedTransposesKeepTheNumbers(t *testing.T) {
	g := joint(t)
	want := run(t, g)
	transposes := func(op *ir.Op) bool { return op.Kind == "transpose" }
	before := count(g, transposes)
	g = g.Clone()
	if err := foldInto("dot", "linear", "linear_dx", "linear_dw")(g); err != nil {
		t.Fatal(err)
	}
	if after := count(g, transposes); after >= before {
		t.Errorf("%d transposes before, %d after", before, after)
	}
	for i, list := range run(t, g) {
		for k, x := range list[0].Data {
			if y := want[i][0].Data[k]; math.Abs(x-y) > 1e-9*math.Max(1, math.Abs(y)) {
				t.Fatalf("result %d[%d] is %v, not %v", i, k, x, y)
			}
		}
	}
}

// Rewriting does not touch the graph that it is given.
func TestTheGraphIsLeftAlone(t *testing.T) {
	g := joint(t)
	was := g.String()
	for _, s := range []*kernels.Selector{nil, kernels.For("cpu"), kernels.For("sm_100")} {
		if _, err := Apply(g, s, nil); err != nil {
			t.Fatal(err)
		}
		if g.String() != was {
			t.Fatalf("the passes of %q changed it", s.Arch())
		}
	}
}

// A new moment is read back from its donated result by a barrier, and the numbers stay the same.
func TestUpdatesReadBackWhatTheyStore(t *testing.T) {
	b := ir.NewBuilder("update")
	typ := irtest.F32(irtest.D("n", 4))
	m, p := b.Input("m", ir.Data, typ, ""), b.Input("p", ir.Data, typ, "")
	ok := b.Compare("lt", b.Sum(p, "n"), b.Fill(irtest.F32(), 9))
	next := b.Add(b.Scale(m, 0.9), p)
	param := b.Select(ok, b.Sub(p, next), p).As(program.Meaning{Replaces: "p"})
	moment := b.Select(ok, next, m).As(program.Meaning{Replaces: "m"})
	g, err := b.Graph(param, moment)
	if err != nil {
		t.Fatal(err)
	}
	want := run(t, g)
	g = g.Clone()
	if err := updateInPlace(g); err != nil {
		t.Fatal(err)
	}
	if n := count(g, func(op *ir.Op) bool { return op.Kind == Barrier }); n != 1 {
		t.Fatalf("%d barriers in\n%s", n, g)
	}
	for i, list := range run(t, g) {
		if !slices.Equal(list[0].Data, want[i][0].Data) {
			t.Errorf("result %d is %v, not %v", i, list[0].Data, want[i][0].Data)
		}
	}
}

// Attention saves its exponentials for a gradient in the same graph, and only on the CPU.
func TestSoftmaxIsSavedInOneGraph(t *testing.T) {
	b := ir.NewBuilder("attend")
	d := irtest.D
	q := b.Input("q", ir.Param, irtest.F32(d("batch", 2), d(ir.Seq, 128), d(ir.Heads, 4), d(ir.HeadDim, 8)), "")
	k := b.Input("k", ir.Param, irtest.F32(d("batch", 2), d(ir.Keys, 128), d(ir.KVHeads, 2), d(ir.HeadDim, 8)), "")
	o := b.Attend(q, k, k, ir.Attention{Scale: 1, Causal: true})
	g, err := b.Graph(b.Sum(b.Mul(o, o), ir.Names(o.Type.Dims)...))
	if err != nil {
		t.Fatal(err)
	}
	grad, err := ir.Grad(g, ir.GradPlan{})
	if err != nil {
		t.Fatal(err)
	}
	whole, err := grad.Joint()
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		g    *ir.Graph
		arch string
		want int
	}{{whole, "cpu", 1}, {whole, "sm_100", 0}, {grad.Backward, "cpu", 0}} {
		g, err := Apply(row.g, kernels.For(row.arch), nil)
		if err != nil {
			t.Fatal(err)
		}
		n := count(g, func(op *ir.Op) bool { return op.Kind == AttentionGradSaved })
		if n != row.want {
			t.Errorf("%s on %s: %d gradients read saved values, want %d", row.g.Name, row.arch, n, row.want)
		}
	}
}

// Quantizations of one source are one operation where kernels of our own are, and share a barrier on
// other GPUs; on the CPU a product reads blocks as stored.
func TestQuantizationsOfOneSource(t *testing.T) {
	b := ir.NewBuilder("blocks")
	x := b.Input("x", ir.Data, ir.Type{Elem: dtype.BF16,
		Dims: []ir.Dim{{Name: "rows", Size: 64}, {Name: "embed", Size: 32}}}, "")
	one := b.QuantizeAll(x, ir.Quantize{Format: ir.NVFP4, Along: []string{"embed"}})
	h := b.Scale(x, 2)
	two := b.QuantizeAll(x, ir.Quantize{Format: ir.NVFP4, Along: []string{"rows"}, Hadamard: true})
	w := b.QuantizeAll(b.Rename(x, "rows", "out"), ir.Quantize{Format: ir.NVFP4, Along: []string{"embed"}})
	y := b.BlockDot(ir.NVFP4, one, w, []string{"embed"}, dtype.BF16)
	g, err := b.Graph(y, two[0], h)
	if err != nil {
		t.Fatal(err)
	}
	own, err := Apply(g, kernels.For("sm_100"), nil)
	if err != nil {
		t.Fatal(err)
	}
	for kind, want := range map[string]int{AmaxOnce: 2, QuantizeOnce: 2, QuantizeWith: 0, "amax": 0} {
		if n := count(own, func(op *ir.Op) bool { return op.Kind == kind }); n != want {
			t.Errorf("%d of %s, want %d:\n%s", n, kind, want, own)
		}
	}
	gpu, err := Apply(g, kernels.For("sm_90"), nil)
	if err != nil {
		t.Fatal(err)
	}
	shared := func(op *ir.Op) bool { return op.Kind == Barrier && len(op.In) == 3 } // two scales, x
	if count(gpu, shared) != 1 {
		t.Errorf("no barrier is shared:\n%s", gpu)
	}
	cpu, err := Apply(g, kernels.For("cpu"), nil)
	if err != nil {
		t.Fatal(err)
	}
	raw := func(op *ir.Op) bool {
		return op.Kind == "block_dot" && op.In[0].Type.Index(InBlock) > 0 && op.In[3].Type.Index(InBlock) > 0
	}
	if count(cpu, raw) != 1 {
		t.Errorf("the product does not read blocks as stored:\n%s", cpu)
	}
}

// On a target with one memory no value stays on the host, also where a loop offloads its own input.
func TestHostCopiesAreDropped(t *testing.T) {
	g, err := irtest.Tiny(2)
	if err != nil {
		t.Fatal(err)
	}
	grad, err := ir.Grad(g, ir.GradPlan{Offload: true})
	if err != nil {
		t.Fatal(err)
	}
	whole, err := grad.Joint()
	if err != nil {
		t.Fatal(err)
	}
	if count(whole, isMove) == 0 {
		t.Fatal("nothing is offloaded")
	}
	out, err := Apply(whole, kernels.For("cpu"), nil)
	if err != nil {
		t.Fatal(err)
	}
	if n := count(out, isMove); n > 0 {
		t.Errorf("%d copies between device and host are left", n)
	}
}
