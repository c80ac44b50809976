package eval_test

import (
	"maps"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
)

func f32(dims ...ir.Dim) ir.Type        { return ir.Type{Elem: dtype.F32, Dims: dims} }
func s32(dims ...ir.Dim) ir.Type        { return ir.Type{Elem: dtype.S32, Dims: dims} }
func dim(name string, n int64) ir.Dim   { return ir.Dim{Name: name, Size: n} }
func small(r *rand.Rand, n int64) int64 { return 1 + r.Int64N(n) }

// A probe is one operation with random shapes: it makes inputs and gives the result whose gradient
// is checked.
type probe struct {
	name string
	// positive keeps the inputs away from zero and below, for logarithms and roots.
	positive bool
	build    func(r *rand.Rand, b *ir.Builder, in func(name string, t ir.Type) *ir.Value, ids func(name string, t ir.Type, below int64) *ir.Value) *ir.Value
}

func unaryProbe(f func(b *ir.Builder, x *ir.Value) *ir.Value) func(*rand.Rand, *ir.Builder, func(string, ir.Type) *ir.Value, func(string, ir.Type, int64) *ir.Value) *ir.Value {
	return func(r *rand.Rand, b *ir.Builder, in func(string, ir.Type) *ir.Value, _ func(string, ir.Type, int64) *ir.Value) *ir.Value {
		return f(b, in("x", f32(dim("a", small(r, 3)), dim("b", small(r, 4)))))
	}
}

func attentionProbe(how ir.Attention) func(*rand.Rand, *ir.Builder, func(string, ir.Type) *ir.Value, func(string, ir.Type, int64) *ir.Value) *ir.Value {
	return func(r *rand.Rand, b *ir.Builder, in func(string, ir.Type) *ir.Value, _ func(string, ir.Type, int64) *ir.Value) *ir.Value {
		batch, seq, kv, share, d := small(r, 2), small(r, 5), small(r, 2), small(r, 3), 2*small(r, 2)
		q := in("q", f32(dim("batch", batch), dim(ir.Seq, seq), dim(ir.Heads, kv*share), dim(ir.HeadDim, d)))
		kt := f32(dim("batch", batch), dim(ir.Keys, seq), dim(ir.KVHeads, kv), dim(ir.HeadDim, d))
		return b.Attend(q, in("k", kt), in("v", kt), how)
	}
}

type build = func(*rand.Rand, *ir.Builder, func(string, ir.Type) *ir.Value, func(string, ir.Type, int64) *ir.Value) *ir.Value

func binaryProbe(f func(b *ir.Builder, x, y *ir.Value) *ir.Value) build {
	return func(r *rand.Rand, b *ir.Builder, in func(string, ir.Type) *ir.Value, _ func(string, ir.Type, int64) *ir.Value) *ir.Value {
		a, c := dim("a", small(r, 3)), dim("c", small(r, 4))
		y := f32(c)
		if r.IntN(2) == 0 {
			y = f32(a, c)
		}
		return f(b, in("x", f32(a, c)), in("y", y))
	}
}

var probes = []probe{
	{"add", false, binaryProbe(func(b *ir.Builder, x, y *ir.Value) *ir.Value { return b.Add(x, y) })},
	{"sub", false, binaryProbe(func(b *ir.Builder, x, y *ir.Value) *ir.Value { return b.Sub(x, y) })},
	{"mul", false, binaryProbe(func(b *ir.Builder, x, y *ir.Value) *ir.Value { return b.Mul(x, y) })},
	{"div", true, binaryProbe(func(b *ir.Builder, x, y *ir.Value) *ir.Value { return b.Div(x, y) })},
	{"select", false, binaryProbe(func(b *ir.Builder, x, y *ir.Value) *ir.Value {
		return b.Select(b.Compare("lt", x, y), x, b.Mul(y, y))
	})},
	{"neg", false, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Neg(x) })},
	{"scale", false, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Scale(x, 1.7) })},
	{"shift", false, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Shift(x, 0.3) })},
	{"exp", false, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Exp(x) })},
	{"log", true, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Log(x) })},
	{"sqrt", true, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Sqrt(x) })},
	{"rsqrt", true, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Rsqrt(x) })},
	{"sin", false, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Sin(x) })},
	{"cos", false, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Cos(x) })},
	{"tanh", false, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Tanh(x) })},
	{"sigmoid", false, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Sigmoid(x) })},
	{"relu", true, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Relu(b.Shift(x, -1)) })},
	{"silu", false, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Silu(x) })},
	{"gelu", false, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Gelu(x) })},
	{"convert", false, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value {
		return b.Convert(b.Convert(x, dtype.F64), dtype.F32)
	})},
	{"transpose", false, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Transpose(x, "b", "a") })},
	{"rename", false, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Rename(x, "b", "c") })},
	{"broadcast", false, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Broadcast(x, 1, dim("n", 3)) })},
	{"slice", false, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Slice(x, "b", 0, 1) })},
	{"pad", false, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Pad(x, "b", 1, 2) })},
	{"concat", false, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Concat("b", x, b.Mul(x, x)) })},
	{"sum", false, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Sum(b.Mul(x, x), "a") })},
	{"max", false, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Max(x, "b") })},
	{"softmax", false, unaryProbe(func(b *ir.Builder, x *ir.Value) *ir.Value { return b.Softmax(x, "b") })},
	{"split and merge", false, func(r *rand.Rand, b *ir.Builder, in func(string, ir.Type) *ir.Value, _ func(string, ir.Type, int64) *ir.Value) *ir.Value {
		n := small(r, 3)
		x := b.Split(in("x", f32(dim("a", 2*n), dim("b", 3))), "a", "hi", "lo", n)
		return b.Merge(b.Mul(x, x), "a", "hi", "lo")
	}},
	{"dot", false, func(r *rand.Rand, b *ir.Builder, in func(string, ir.Type) *ir.Value, _ func(string, ir.Type, int64) *ir.Value) *ir.Value {
		batch, k := dim("batch", small(r, 3)), dim("k", small(r, 4))
		return b.Dot(in("x", f32(batch, dim("m", small(r, 3)), k)), in("y", f32(batch, k, dim("n", small(r, 3)))), "k")
	}},
	{"linear", false, func(r *rand.Rand, b *ir.Builder, in func(string, ir.Type) *ir.Value, _ func(string, ir.Type, int64) *ir.Value) *ir.Value {
		k := dim("embed", small(r, 4))
		return b.Linear(in("x", f32(dim("batch", small(r, 2)), dim("seq", small(r, 3)), k)), in("w", f32(k, dim("mlp", small(r, 4)))))
	}},
	{"linear, weight turned", false, func(r *rand.Rand, b *ir.Builder, in func(string, ir.Type) *ir.Value, _ func(string, ir.Type, int64) *ir.Value) *ir.Value {
		k := dim("embed", small(r, 4))
		return b.Linear(in("x", f32(dim("rows", small(r, 3)), k)), in("w", f32(dim("mlp", small(r, 4)), k)))
	}},
	{"embedding", false, func(r *rand.Rand, b *ir.Builder, in func(string, ir.Type) *ir.Value, ids func(string, ir.Type, int64) *ir.Value) *ir.Value {
		n := 2 + small(r, 4)
		return b.Embedding(ids("ids", s32(dim("batch", 2), dim("seq", small(r, 4))), n), in("table", f32(dim("vocab", n), dim("embed", small(r, 3)))))
	}},
	{"rms_norm", false, func(r *rand.Rand, b *ir.Builder, in func(string, ir.Type) *ir.Value, _ func(string, ir.Type, int64) *ir.Value) *ir.Value {
		e := dim("embed", 1+small(r, 4))
		return b.RMSNorm(in("x", f32(dim("rows", small(r, 3)), e)), in("w", f32(e)), "embed", 1e-3, float64(r.IntN(2)))
	}},
	{"layer_norm", false, func(r *rand.Rand, b *ir.Builder, in func(string, ir.Type) *ir.Value, _ func(string, ir.Type, int64) *ir.Value) *ir.Value {
		e := dim("embed", 2+small(r, 4))
		return b.LayerNorm(in("x", f32(dim("rows", small(r, 3)), e)), in("w", f32(e)), in("b", f32(e)), "embed", 1e-2)
	}},
	{"rope", false, func(r *rand.Rand, b *ir.Builder, in func(string, ir.Type) *ir.Value, ids func(string, ir.Type, int64) *ir.Value) *ir.Value {
		seq := dim("seq", small(r, 4))
		x := in("x", f32(dim("batch", small(r, 2)), seq, dim("heads", small(r, 2)), dim("head", 2*small(r, 3))))
		how := []ir.Rope{{Theta: 10000}, {Theta: 500, Factor: 8, Low: 1, High: 4, Original: 16}, {Theta: 100, Factor: 4}}
		return b.Rope(x, ids("pos", s32(seq), 50), how[r.IntN(3)])
	}},
	{"attention", false, attentionProbe(ir.Attention{Scale: 0.7})},
	{"attention, causal", false, attentionProbe(ir.Attention{Scale: 0.5, Causal: true})},
	{"attention, window", false, attentionProbe(ir.Attention{Scale: 0.5, Causal: true, Window: 2})},
	{"attention, soft cap", false, attentionProbe(ir.Attention{Scale: 1, Causal: true, SoftCap: 1.5})},
	{"cross_entropy", false, func(r *rand.Rand, b *ir.Builder, in func(string, ir.Type) *ir.Value, ids func(string, ir.Type, int64) *ir.Value) *ir.Value {
		rows, vocab := dim("tokens", small(r, 4)), dim("vocab", 1+small(r, 5))
		return b.CrossEntropy(in("x", f32(rows, vocab)), ids("labels", s32(rows), vocab.Size), "vocab")
	}},
	{"gather", false, func(r *rand.Rand, b *ir.Builder, in func(string, ir.Type) *ir.Value, ids func(string, ir.Type, int64) *ir.Value) *ir.Value {
		rows, n := dim("rows", small(r, 3)), small(r, 5)
		return b.Gather(in("x", f32(rows, dim("e", n))), ids("idx", s32(rows, dim("e", small(r, 4))), n), "e")
	}},
	{"scatter", false, func(r *rand.Rand, b *ir.Builder, in func(string, ir.Type) *ir.Value, ids func(string, ir.Type, int64) *ir.Value) *ir.Value {
		rows, k, n := dim("rows", small(r, 3)), dim("e", small(r, 4)), small(r, 5)
		return b.Scatter(in("x", f32(rows, k)), ids("idx", s32(rows, k), n), "e", n)
	}},
	{"top_k", false, func(r *rand.Rand, b *ir.Builder, in func(string, ir.Type) *ir.Value, _ func(string, ir.Type, int64) *ir.Value) *ir.Value {
		n := 1 + small(r, 5)
		values, _ := b.TopK(in("x", f32(dim("rows", small(r, 3)), dim("e", n))), "e", 1+r.Int64N(n))
		return values
	}},
}

// Tolerance of a central difference in float64 with a step of 1e-5: the truncation is about 1e-10
// of the third derivative, the cancellation about 1e-11 of the value.
const differenceBound = 1e-6

// Every operation's gradient is held to central differences of the interpreter, over random shapes.
func TestGradientsAgainstDifferences(t *testing.T) {
	for _, p := range probes {
		t.Run(p.name, func(t *testing.T) {
			for seed := range uint64(20) {
				checkGradient(t, p, seed)
			}
		})
	}
}

func checkGradient(t *testing.T, p probe, seed uint64) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 7))
	b := ir.NewBuilder("probe")
	inputs := map[string][]*eval.Array{}
	in := func(name string, typ ir.Type) *ir.Value {
		a := eval.New(typ)
		for i := range a.Data {
			a.Data[i] = r.NormFloat64()
			if p.positive {
				a.Data[i] = 1.3 + 0.5*math.Abs(a.Data[i])
			}
		}
		inputs[name] = []*eval.Array{a}
		return b.Input(name, ir.Param, typ, "")
	}
	ids := func(name string, typ ir.Type, below int64) *ir.Value {
		a := eval.New(typ)
		for i := range a.Data {
			a.Data[i] = float64(r.Int64N(below))
		}
		inputs[name] = []*eval.Array{a}
		return b.Input(name, ir.Data, typ, "")
	}
	y := p.build(r, b, in, ids)
	// A weighted sum of the result, so that every element's gradient differs.
	weights := b.Input("weights", ir.Data, y.Type, "")
	g, err := b.Graph(b.Sum(b.Mul(y, weights), names(y.Type)...))
	if err != nil {
		t.Fatalf("seed %d: %v", seed, err)
	}
	wa := eval.New(weights.Type)
	for i := range wa.Data {
		wa.Data[i] = r.NormFloat64()
	}
	inputs["weights"] = []*eval.Array{wa}
	if again, err := ir.Parse(g.String()); err != nil || again.String() != g.String() {
		t.Fatalf("seed %d: the text does not come back: %v\n%s", seed, err, g)
	}
	grads := gradients(t, g, inputs)
	for i, v := range g.Params() {
		data := inputs[v.Name][0].Data
		for k := range data {
			const h = 1e-5
			old := data[k]
			data[k] = old + h
			up := value(t, g, inputs)
			data[k] = old - h
			down := value(t, g, inputs)
			data[k] = old
			want := (up - down) / (2 * h)
			if got := grads[i].Data[k]; math.Abs(got-want) > differenceBound*(1+math.Abs(want)) {
				t.Fatalf("seed %d: d/d%s[%d] is %v, the difference says %v\n%s", seed, v.Name, k, got, want, g)
			}
		}
	}
}

func names(t ir.Type) []string {
	var list []string
	for _, d := range t.Dims {
		list = append(list, d.Name)
	}
	return list
}

func value(t *testing.T, g *ir.Graph, inputs map[string][]*eval.Array) float64 {
	t.Helper()
	out, err := eval.Run(g, inputs)
	if err != nil {
		t.Fatal(err)
	}
	return out[0][0].Data[0]
}

// gradients runs forward, hands the residuals over by name, and runs backward.
func gradients(t *testing.T, g *ir.Graph, inputs map[string][]*eval.Array, recompute ...ir.Tag) []*eval.Array {
	t.Helper()
	gr, err := ir.Grad(g, ir.GradPlan{Recompute: recompute})
	if err != nil {
		t.Fatalf("%v\n%s", err, g)
	}
	kept, err := eval.Run(gr.Forward, inputs)
	if err != nil {
		t.Fatal(err)
	}
	given := map[string][]*eval.Array{}
	maps.Copy(given, inputs)
	for i, v := range gr.Forward.Results {
		given[v.Name] = kept[i]
	}
	for k, v := range g.Results {
		one := eval.New(v.Type)
		for i := range one.Data {
			one.Data[i] = 1
		}
		given[gr.Seeds[k]] = []*eval.Array{one}
	}
	out, err := eval.Run(gr.Backward, given)
	if err != nil {
		t.Fatalf("%v\n%s", err, gr.Backward)
	}
	list := make([]*eval.Array, len(out))
	for i := range out {
		list[i] = out[i][0]
	}
	return list
}
