package flash_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/kernels/flash"
	"github.com/deepwell/deepwell/kernels/triton"
	"github.com/deepwell/deepwell/kernels/triton/run"
	"github.com/deepwell/deepwell/lower"
)

// Bounds of the norm of a difference over the norm of what the CPU lowering computes. Both round
// probabilities and their gradients to bfloat16 before GEMMs, but not the same numbers: the
// kernel's probabilities are not yet divided by their sum. Each rounding is off by up to 2^-9, about
// 1.1e-3 on average over a binade; the results' own is another. The gradients have two in a row.
const (
	outBound  = 2.5e-3
	gradBound = 5e-3
	lseBound  = 2e-6 // float32 all along
)

// shapes are attentions of odd sizes and of whole tiles, with each mask and each kind of head.
var shapes = []flash.Attention{
	{Batch: 1, Seq: 64, Heads: 2, KVHeads: 1, Head: 64, Value: 64, Causal: true, SoftCap: 50},
	{Batch: 2, Seq: 150, Heads: 4, KVHeads: 2, Head: 32, Value: 32, Causal: true, SoftCap: 3},
	{Batch: 1, Seq: 130, Heads: 1, KVHeads: 1, Head: 256, Value: 256, Causal: true, Window: 37, SoftCap: 5},
	{Batch: 1, Seq: 97, Heads: 2, KVHeads: 2, Head: 192, Value: 128, Causal: true},
	{Batch: 1, Seq: 1, Heads: 3, KVHeads: 1, Head: 20, Value: 20, Causal: true, SoftCap: 50},
	{Batch: 2, Seq: 131, Heads: 2, KVHeads: 1, Head: 20, Value: 12, Documents: true, SoftCap: 7},
	{Batch: 1, Seq: 200, Heads: 2, KVHeads: 2, Head: 160, Value: 160, Causal: true, Window: 64,
		Documents: true},
	{Batch: 1, Seq: 70, Keys: 143, Heads: 2, KVHeads: 1, Head: 72, Value: 40},
	{Batch: 1, Seq: 100, Heads: 1, KVHeads: 1, Head: 16, Value: 16, Window: 1, SoftCap: 2},
	{Batch: 2, Seq: 1, Heads: 1, KVHeads: 1, Head: 16, Value: 16, Causal: true, Window: 3},
	// Caps that hardly cap: a tanh whose error is a part of 1 would leave nothing of scores.
	{Batch: 1, Seq: 97, Heads: 2, KVHeads: 1, Head: 40, Value: 40, Causal: true, SoftCap: 1000},
	{Batch: 1, Seq: 66, Heads: 1, KVHeads: 1, Head: 64, Value: 64, Causal: true, SoftCap: 1e30},
	{Batch: 1, Seq: 70, Heads: 2, KVHeads: 1, Head: 132, Value: 100, Causal: true},
	{Batch: 1, Seq: 70, Heads: 2, KVHeads: 1, Head: 136, Value: 136, Causal: true, Window: 40,
		Documents: true, SoftCap: 5},
	{Batch: 1, Seq: 40, Heads: 1, KVHeads: 1, Head: 192, Value: 192, Causal: true},
	{Batch: 1, Seq: 40, Heads: 1, KVHeads: 1, Head: 132, Value: 20, Causal: true},
}

// A problem is an attention with its operands.
type problem struct {
	flash.Attention
	q, k, v, do []float64
	documents   []float64
}

// draw makes random operands, numbers of bfloat16. Scores are of size 1 and more, so that caps and
// maxima count.
func draw(a flash.Attention, seed uint64) *problem {
	r := rand.New(rand.NewPCG(22, seed))
	if a.Keys == 0 {
		a.Keys = a.Seq
	}
	a.Scale = 2 / math.Sqrt(float64(a.Head))
	numbers := func(n int) []float64 {
		list := make([]float64, n)
		for i := range list {
			list[i] = float64(dtype.F32FromBF16(dtype.BF16FromF32(float32(r.NormFloat64()))))
		}
		return list
	}
	p := &problem{Attention: a, q: numbers(a.Batch * a.Seq * a.Heads * a.Head),
		k:  numbers(a.Batch * a.Keys * a.KVHeads * a.Head),
		v:  numbers(a.Batch * a.Keys * a.KVHeads * a.Value),
		do: numbers(a.Batch * a.Seq * a.Heads * a.Value)}
	if a.Documents {
		for range a.Batch {
			n := 0
			for range a.Seq {
				if r.IntN(25) == 0 {
					n++
				}
				p.documents = append(p.documents, float64(n))
			}
		}
	}
	return p
}

// onCPU gives what the CPU lowering computes: o, lse, dq, dk and dv.
func (p *problem) onCPU(t *testing.T, rig *enginetest.Rig) [][]float64 {
	t.Helper()
	b := ir.NewBuilder("attention")
	in := map[string][]*eval.Array{}
	value := func(name string, elem dtype.DType, data []float64, dims ...ir.Dim) *ir.Value {
		x := ir.Type{Elem: elem, Dims: dims}
		in[name] = []*eval.Array{{Type: x, Data: data}}
		return b.Input(name, ir.Data, x, "")
	}
	d := func(name string, n int) ir.Dim { return ir.Dim{Name: name, Size: int64(n)} }
	batch, seq, keys := d(ir.Batch, p.Batch), d(ir.Seq, p.Seq), d(ir.Keys, p.Keys)
	heads, kv := d(ir.Heads, p.Heads), d(ir.KVHeads, p.KVHeads)
	q := value("q", dtype.F32, p.q, batch, seq, heads, d(ir.HeadDim, p.Head))
	k := value("k", dtype.F32, p.k, batch, keys, kv, d(ir.HeadDim, p.Head))
	v := value("v", dtype.F32, p.v, batch, keys, kv, d(ir.HeadDim, p.Value))
	do := value("do", dtype.F32, p.do, batch, seq, heads, d(ir.HeadDim, p.Value))
	attrs := map[string]any{"scale": p.Scale, "causal": p.Causal, "in": "bf16"}
	if p.SoftCap > 0 {
		attrs["softcap"] = p.SoftCap
	}
	if p.Window > 0 {
		attrs["window"] = int64(p.Window)
	}
	var extra []*ir.Value
	if p.Documents {
		s := value("documents", dtype.S32, p.documents, batch, seq)
		extra = []*ir.Value{s, b.Rename(s, ir.Seq, ir.Keys)}
	}
	out := b.Op("attention", attrs, append([]*ir.Value{q, k, v}, extra...)...)
	grads := b.Op("attention_grad", attrs, append([]*ir.Value{q, k, v, out[0], out[1], do}, extra...)...)
	g, err := b.Graph(append(out, grads...)...)
	if err != nil {
		t.Fatal(err)
	}
	var list [][]float64
	for _, r := range rig.Compile(t, g, lower.Options{Kernels: kernels.For("cpu")}).Run(t, in) {
		list = append(list, r[0].Data)
	}
	return list
}

// bf16 and f32 give the bytes of numbers.
func bf16(list []float64) []byte { return dtype.BF16.Append(nil, list...) }
func f32(list []float64) []byte  { return dtype.F32.Append(nil, list...) }

// inText runs the text of a kernel, changed by a function, and gives its results.
func (p *problem) inText(part flash.Part, edit func(string) string, in ...[]byte) ([][]float64, error) {
	p.Part = part
	k, err := p.Kernel()
	if err != nil {
		return nil, err
	}
	k.Text = edit(k.Text)
	if p.Documents {
		s := dtype.S32.Append(nil, p.documents...)
		in = append(in, s, s)
	}
	n := len(in)
	for _, a := range k.Args[n:] {
		size := a.Elem.Bits() / 8
		for _, d := range a.Shape {
			size *= d
		}
		in = append(in, make([]byte, size))
	}
	if err := run.Kernel(k, in); err != nil {
		return nil, err
	}
	var out [][]float64
	for i, a := range k.Args[n:] {
		elem := map[triton.Elem]dtype.DType{triton.BF16: dtype.BF16, triton.F32: dtype.F32}[a.Elem]
		out = append(out, elem.Values(in[n+i]))
	}
	return out, nil
}

// inKernels gives what the three kernels compute, each changed by a function: o, lse, dq, dk, dv.
func (p *problem) inKernels(edit func(flash.Part, string) string) (list [][]float64, err error) {
	with := func(part flash.Part) func(string) string {
		return func(text string) string { return edit(part, text) }
	}
	in := [][]byte{bf16(p.q), bf16(p.k), bf16(p.v)}
	out, err := p.inText(flash.Forward, with(flash.Forward), in...)
	if err != nil {
		return nil, err
	}
	delta := make([]float64, p.Batch*p.Seq*p.Heads)
	for i, x := range p.do {
		delta[i/p.Value] += x * out[0][i]
	}
	in = append(in, f32(out[1]), f32(delta), bf16(p.do))
	for _, part := range []flash.Part{flash.DQ, flash.DKV} {
		grads, err := p.inText(part, with(part), slices.Clone(in)...)
		if err != nil {
			return nil, err
		}
		out = append(out, grads...)
	}
	return out, nil
}

func same(_ flash.Part, text string) string { return text }

var names, bounds = []string{"o", "lse", "dq", "dk", "dv"},
	[]float64{outBound, lseBound, gradBound, gradBound, gradBound}

// apart gives how far results are, in units of their bounds.
func apart(got, want [][]float64) (worst float64) {
	for i := range want {
		d := enginetest.Distance(got[i], want[i]) / bounds[i]
		if math.IsNaN(d) {
			return math.Inf(1)
		}
		worst = max(worst, d)
	}
	return worst
}

// The printed text computes what the CPU lowering computes.
func TestAgreesWithTheCPULowering(t *testing.T) {
	rig := enginetest.Open(t, engine.Options{Devices: 1})
	for n, a := range shapes {
		for _, small := range []bool{false, true} {
			if a.Small = small; small != (n%2 == 1) && !slowtest.Enabled {
				continue
			}
			p := draw(a, uint64(n))
			want := p.onCPU(t, rig)
			got, err := p.inKernels(same)
			if err != nil {
				t.Fatal(err)
			}
			for i, name := range names {
				if slices.Max(want[i]) == 0 && slices.Min(want[i]) == 0 { // one key: no score counts
					if slices.ContainsFunc(got[i], func(f float64) bool { return math.Abs(f) > 1e-2 }) {
						t.Errorf("%s: %s is not zero", p, name)
					}
					continue
				}
				d := enginetest.Distance(got[i], want[i])
				t.Logf("%s: %s is off by %.2g", p, name, d)
				if !(d <= bounds[i]) {
					t.Errorf("%s: %s is off by %.2g of %.2g", p, name, d, bounds[i])
				}
			}
		}
	}
}

// A NaN spreads to what reads it, as in the plain form: of a query to its own row, of a key to the
// queries that see it.
func TestNaN(t *testing.T) {
	p := draw(flash.Attention{Batch: 1, Seq: 150, Heads: 2, KVHeads: 1, Head: 20, Value: 20, Causal: true,
		SoftCap: 30}, 9)
	const query, key = 3, 77
	p.q[query*p.Heads*p.Head] = math.NaN() // of the first head
	p.k[key*p.Head+5] = math.NaN()
	got, err := p.inKernels(same)
	if err != nil {
		t.Fatal(err)
	}
	for row := range p.Seq {
		for head := range p.Heads {
			want := row >= key || row == query && head == 0
			at := row*p.Heads + head
			for i, list := range [][]float64{got[0][at*p.Value:][:p.Value], got[1][at:][:1]} {
				for _, f := range list {
					if math.IsNaN(f) != want {
						t.Fatalf("query %d of head %d: %s is %g", row, head, names[i], f)
					}
				}
			}
		}
	}
	for i, f := range got[3] { // queries from key on are NaN, and see all keys
		if math.IsNaN(f) != (i/p.Head <= p.Seq) {
			t.Fatalf("element %d of dk is %g", i, f)
		}
	}
}

// Errors that are planted in a text are found.
func TestPlantedErrors(t *testing.T) {
	rig := enginetest.Open(t, engine.Options{Devices: 1})
	p := draw(flash.Attention{Batch: 1, Seq: 150, Heads: 4, KVHeads: 2, Head: 20, Value: 24, Causal: true,
		Window: 37, SoftCap: 3}, 11)
	want := p.onCPU(t, rig)
	if got, err := p.inKernels(same); err != nil || apart(got, want) > 1 {
		t.Fatalf("without an error: %v, %v", apart(got, want), err)
	}
	cap := fmt.Sprintf("dense<%s>", strconv.FormatFloat(2*math.Log2E*p.Scale/p.SoftCap, 'e', -1, 32))
	for _, c := range []struct {
		name     string
		part     flash.Part
		old, new string
	}{
		{"index of keys", flash.Forward, "dense<40>", "dense<39>"},
		{"index of queries", flash.DQ, "dense<80>", "dense<78>"},
		{"index of gradients", flash.DKV, "dense<96>", "dense<92>"},
		{"causal mask", flash.Forward, "arith.cmpi sle", "arith.cmpi slt"},
		{"causal mask of dq", flash.DQ, "arith.cmpi sle", "arith.cmpi slt"},
		{"causal mask of dkv", flash.DKV, "arith.cmpi sle", "arith.cmpi slt"},
		{"window", flash.Forward, "dense<37>", "dense<38>"},
		{"window of dkv", flash.DKV, "dense<37>", "dense<36>"},
		{"mask of a head's elements", flash.Forward, "dense<20> : tensor<32xi32>", "dense<21> : tensor<32xi32>"},
		{"head of keys", flash.Forward, "arith.divsi", "arith.remsi"},
		{"scale after the cap", flash.Forward, cap, "dense<9.6179670e-01>"},
		{"scale after the cap in dq", flash.DQ, cap, "dense<9.6179670e-01>"},
		{"cap", flash.DKV, "dense<4.328085e+00>", "dense<4.428085e+00>"},
		{"largest score", flash.Forward, "arith.maxnumf", "arith.minnumf"},
	} {
		found := false
		got, err := p.inKernels(func(part flash.Part, text string) string {
			if part != c.part {
				return text
			}
			found = strings.Contains(text, c.old)
			return strings.ReplaceAll(text, c.old, c.new)
		})
		if !found {
			t.Errorf("%s: the text has no %q", c.name, c.old)
			continue
		}
		if err == nil {
			t.Logf("%s: %.3g bounds apart", c.name, apart(got, want))
		}
		if err == nil && apart(got, want) < 4 {
			t.Errorf("%s: the error is not found", c.name)
		}
	}
}

// What parses prints itself, and what it prints parses to the same.
func FuzzParse(f *testing.F) {
	for _, a := range shapes {
		for _, part := range []flash.Part{flash.Forward, flash.DQ, flash.DKV} {
			p := draw(a, 0)
			p.Part = part
			f.Add(p.String())
			if again, err := flash.Parse(p.String()); err != nil || again != p.Attention {
				f.Errorf("%s is read as %s: %v", p, again, err)
			}
		}
	}
	f.Fuzz(func(t *testing.T, text string) {
		a, err := flash.Parse(text)
		if err != nil {
			return
		}
		if again, err := flash.Parse(a.String()); err != nil || again != a {
			t.Errorf("%q is printed as %q: %v", text, a, err)
		}
	})
}

// Where a sequence has more elements than 32 bits count, 64 bits do: 524,288 tokens of 16 heads of
// 256 have 2^31. A batch is counted by 64 bits in any case.
func TestLongSequences(t *testing.T) {
	for _, part := range []flash.Part{flash.Forward, flash.DQ, flash.DKV} {
		for _, seq := range []int{1<<19 - 128, 1 << 19, 1 << 24} {
			a := flash.Attention{Part: part, Batch: 3, Seq: seq, Keys: seq, Heads: 16, KVHeads: 16, Head: 256,
				Value: 256, Scale: 1, Causal: true}
			k, err := a.Kernel()
			if err != nil {
				t.Fatal(err)
			}
			offset := "i32"
			if seq >= 1<<19 {
				offset = "i64"
			}
			n := 0
			for line := range strings.Lines(k.Text) {
				if strings.Contains(line, "tt.addptr") && strings.Contains(line, "x256x!tt.ptr<bf16>") {
					if n++; !strings.HasSuffix(strings.TrimSpace(line), "x256x"+offset+">") {
						t.Errorf("%s: %s", a, line)
					}
				}
			}
			if n == 0 {
				t.Errorf("%s has no pointers to heads", a)
			}
		}
	}
}

// What the kernels do not compute is refused.
func TestRefuses(t *testing.T) {
	good := flash.Attention{Part: flash.Forward, Batch: 1, Seq: 64, Keys: 64, Heads: 2, KVHeads: 1, Head: 64,
		Value: 64, Scale: 1, Causal: true}
	if _, err := good.Kernel(); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*flash.Attention){
		"part":          func(a *flash.Attention) { a.Part = "dv" },
		"head":          func(a *flash.Attention) { a.Head = 257 },
		"heads of keys": func(a *flash.Attention) { a.Heads, a.KVHeads = 4, 3 },
		"lengths":       func(a *flash.Attention) { a.Keys = 65 },
		"sequence":      func(a *flash.Attention) { a.Seq, a.Keys = 1<<25, 1<<25 },
		"batch":         func(a *flash.Attention) { a.Batch = 1 << 16 },
		"heads":         func(a *flash.Attention) { a.Heads = 1 << 16 },
		"group":         func(a *flash.Attention) { a.Seq, a.Keys, a.Heads = 1<<24, 1<<24, 1<<14 },
		"tiny cap":      func(a *flash.Attention) { a.SoftCap = 1e-45 },
		"huge cap":      func(a *flash.Attention) { a.SoftCap = 3e38 },
		"huge":          func(a *flash.Attention) { a.Scale = 1e300 },
		"scale":         func(a *flash.Attention) { a.Scale = math.NaN() },
		"cap":           func(a *flash.Attention) { a.SoftCap = -1 },
		"no values":     func(a *flash.Attention) { a.Value = 0 },
	} {
		a := good
		change(&a)
		if _, err := a.Kernel(); err == nil {
			t.Errorf("%s: %s is taken", name, a)
		}
	}
}
