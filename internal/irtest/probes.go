package irtest

import (
	"math/rand/v2"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// F32 is a type of 32-bit floats.
func F32(dims ...ir.Dim) ir.Type { return ir.Type{Elem: dtype.F32, Dims: dims} }

// S32 is a type of whole numbers.
func S32(dims ...ir.Dim) ir.Type { return ir.Type{Elem: dtype.S32, Dims: dims} }

// D is a dimension.
func D(name string, n int64) ir.Dim { return ir.Dim{Name: name, Size: n} }

func small(r *rand.Rand, n int64) int64 { return 1 + r.Int64N(n) }

// A Probe is one operation with random shapes: it makes inputs and gives the result that is tried.
type Probe struct {
	Name string
	// Positive draws inputs from 1.3 up, for logarithms and roots, and to stay on one side of a kink;
	// else they are normal, with either sign.
	Positive bool
	Build    Build
}

// A Build makes a probe's graph with inputs of a Maker.
type Build func(r *rand.Rand, b *ir.Builder, m Maker) *ir.Value

// A Maker adds inputs to the graph of a probe: numbers, or whole numbers below a bound.
type Maker struct {
	In  func(name string, t ir.Type) *ir.Value
	IDs func(name string, t ir.Type, below int64) *ir.Value
}

// V is short for the rows below.
type V = *ir.Value

func unary(f func(b *ir.Builder, x *ir.Value) *ir.Value) Build {
	return func(r *rand.Rand, b *ir.Builder, m Maker) *ir.Value {
		return f(b, m.In("x", F32(D("a", small(r, 3)), D("b", small(r, 4)))))
	}
}

// attend is attention with heads of values as large as of keys; attendTo gives values a size of
// their own, as latent attention has it.
func attend(how ir.Attention, documents bool) Build { return attendTo(how, documents, false) }

func attendTo(how ir.Attention, documents, latent bool) Build {
	sinks := how.Sinks != nil
	return func(r *rand.Rand, b *ir.Builder, m Maker) *ir.Value {
		batch, seq, kv, share, d := small(r, 2), small(r, 5), small(r, 2), small(r, 3), 2*small(r, 2)
		how := how
		if documents {
			how.Segments = m.IDs("segments", S32(D("batch", batch), D(ir.Seq, seq)), 3)
			how.KeySegments = b.Rename(how.Segments, ir.Seq, ir.Keys)
		}
		q := m.In("q", F32(D("batch", batch), D(ir.Seq, seq), D(ir.Heads, kv*share), D(ir.HeadDim, d)))
		kt := F32(D("batch", batch), D(ir.Keys, seq), D(ir.KVHeads, kv), D(ir.HeadDim, d))
		if how.KeyLengths != nil { // a length from 1 on
			t := S32(D("batch", batch))
			how.KeyLengths = b.Add(m.IDs("lengths", t, seq), b.Fill(t, 1))
		}
		if sinks {
			how.Sinks = m.In("sinks", F32(D(ir.Heads, kv*share)))
		}
		vt := kt
		if latent {
			vt = F32(append(kt.Dims[:3:3], D(ir.HeadDim, []int64{d + 1, d - 1}[r.IntN(2)]))...)
		}
		return b.Attend(q, m.In("k", kt), m.In("v", vt), how)
	}
}

func binary(f func(b *ir.Builder, x, y *ir.Value) *ir.Value) Build {
	return func(r *rand.Rand, b *ir.Builder, m Maker) *ir.Value {
		a, c := D("a", small(r, 3)), D("c", small(r, 4))
		y := F32(c)
		if r.IntN(2) == 0 {
			y = F32(a, c)
		}
		return f(b, m.In("x", F32(a, c)), m.In("y", y))
	}
}

// Probes has every operation that a gradient flows through, but for collectives and loops; a test
// of package lower holds it to the table of package ir.
var Probes = []Probe{
	{"add", false, binary((*ir.Builder).Add)},
	{"sub", false, binary((*ir.Builder).Sub)},
	{"mul", false, binary((*ir.Builder).Mul)},
	{"div", true, binary((*ir.Builder).Div)},
	{"select", false, binary(func(b *ir.Builder, x, y V) V {
		return b.Select(b.Compare("lt", x, y), x, b.Mul(y, y))
	})},
	{"neg", false, unary((*ir.Builder).Neg)},
	{"scale", false, unary(func(b *ir.Builder, x V) V { return b.Scale(x, 1.7) })},
	{"shift", false, unary(func(b *ir.Builder, x V) V { return b.Shift(x, 0.3) })},
	{"exp", false, unary((*ir.Builder).Exp)},
	{"log", true, unary((*ir.Builder).Log)},
	{"sqrt", true, unary((*ir.Builder).Sqrt)},
	{"rsqrt", true, unary((*ir.Builder).Rsqrt)},
	{"sin", false, unary((*ir.Builder).Sin)},
	{"cos", false, unary((*ir.Builder).Cos)},
	{"tanh", false, unary((*ir.Builder).Tanh)},
	{"sigmoid", false, unary((*ir.Builder).Sigmoid)},
	{"relu", true, unary(func(b *ir.Builder, x V) V { return b.Relu(b.Shift(x, -1)) })},
	{"silu", false, unary((*ir.Builder).Silu)},
	{"gelu", false, unary((*ir.Builder).Gelu)},
	{"convert", false, unary(func(b *ir.Builder, x V) V {
		return b.Convert(b.Convert(x, dtype.F64), dtype.F32)
	})},
	{"transpose", false, unary(func(b *ir.Builder, x V) V { return b.Transpose(x, "b", "a") })},
	{"rename", false, unary(func(b *ir.Builder, x V) V { return b.Rename(x, "b", "c") })},
	{"broadcast", false, unary(func(b *ir.Builder, x V) V { return b.Broadcast(x, 1, D("n", 3)) })},
	{"slice", false, unary(func(b *ir.Builder, x V) V { return b.Slice(x, "b", 0, 1) })},
	{"pad", false, unary(func(b *ir.Builder, x V) V { return b.Pad(x, "b", 1, 2) })},
	{"concat", false, unary(func(b *ir.Builder, x V) V { return b.Concat("b", x, b.Mul(x, x)) })},
	{"sum", false, unary(func(b *ir.Builder, x V) V { return b.Sum(b.Mul(x, x), "a") })},
	{"max", false, unary(func(b *ir.Builder, x V) V { return b.Max(x, "b") })},
	{"softmax", false, unary(func(b *ir.Builder, x V) V { return b.Softmax(x, "b") })},
	{"to_host and to_device", false, unary(func(b *ir.Builder, x V) V {
		first := b.ToHost(b.Mul(x, x))
		y := b.ToDevice(first, nil)
		return b.Add(y, b.ToDevice(b.ToHost(b.Neg(x)), first))
	})},
	{"split and merge", false, func(r *rand.Rand, b *ir.Builder, m Maker) *ir.Value {
		n := small(r, 3)
		x := b.Split(m.In("x", F32(D("a", 2*n), D("b", 3))), "a", "hi", "lo", n)
		return b.Merge(b.Mul(x, x), "a", "hi", "lo")
	}},
	{"dot", false, func(r *rand.Rand, b *ir.Builder, m Maker) *ir.Value {
		batch, k := D("batch", small(r, 3)), D("k", small(r, 4))
		return b.Dot(m.In("x", F32(batch, D("m", small(r, 3)), k)),
			m.In("y", F32(batch, k, D("n", small(r, 3)))), "k")
	}},
	{"linear", false, func(r *rand.Rand, b *ir.Builder, m Maker) *ir.Value {
		k := D("embed", small(r, 4))
		return b.Linear(m.In("x", F32(D("batch", small(r, 2)), D("seq", small(r, 3)), k)),
			m.In("w", F32(k, D("mlp", small(r, 4)))))
	}},
	{"linear, weight transposed", false, func(r *rand.Rand, b *ir.Builder, m Maker) *ir.Value {
		k := D("embed", small(r, 4))
		return b.Linear(m.In("x", F32(D("rows", small(r, 3)), k)),
			m.In("w", F32(D("mlp", small(r, 4)), k)))
	}},
	{"embedding", false, func(r *rand.Rand, b *ir.Builder, m Maker) *ir.Value {
		n := 2 + small(r, 4)
		return b.Embedding(m.IDs("ids", S32(D("batch", 2), D("seq", small(r, 4))), n),
			m.In("table", F32(D("vocab", n), D("embed", small(r, 3)))))
	}},
	{"rms_norm", false, func(r *rand.Rand, b *ir.Builder, m Maker) *ir.Value {
		e := D("embed", 1+small(r, 4))
		return b.RMSNorm(m.In("x", F32(D("rows", small(r, 3)), e)), m.In("w", F32(e)), "embed",
			1e-3, float64(r.IntN(2)))
	}},
	{"layer_norm", false, func(r *rand.Rand, b *ir.Builder, m Maker) *ir.Value {
		e := D("embed", 2+small(r, 4))
		return b.LayerNorm(m.In("x", F32(D("rows", small(r, 3)), e)), m.In("w", F32(e)),
			m.In("b", F32(e)), "embed", 1e-2)
	}},
	{"rope", false, func(r *rand.Rand, b *ir.Builder, m Maker) *ir.Value {
		seq := D("seq", small(r, 4))
		x := m.In("x",
			F32(D("batch", small(r, 2)), seq, D("heads", small(r, 2)), D("head", 2*small(r, 3))))
		how := []ir.Rope{
			{Theta: 10000},
			{Theta: 500, Factor: 8, Low: 1, High: 4, Original: 16},
			{Theta: 100, Factor: 4},
			{Theta: 100, Factor: 4, Original: 32, Fast: 8, Slow: 1, Magnitude: 1.3},
			{Theta: 50, Factor: 2, Original: 64, Fast: 4, Slow: 1, Exact: true},
		}
		if r.IntN(2) == 0 {
			x = b.Interleaved(x)
		}
		return b.Rope(x, m.IDs("pos", S32(seq), 50), how[r.IntN(len(how))])
	}},
	{"attention", false, attend(ir.Attention{Scale: 0.7}, false)},
	{"attention, causal", false, attend(ir.Attention{Scale: 0.5, Causal: true}, false)},
	{"attention, window", false, attend(ir.Attention{Scale: 0.5, Causal: true, Window: 2}, false)},
	{"attention, documents", false, attend(ir.Attention{Scale: 0.5, Causal: true}, true)},
	{"attention, lengths", false, attend(ir.Attention{Scale: 0.5, KeyLengths: &ir.Value{}}, false)},
	{"attention, soft cap", false, attend(ir.Attention{Scale: 1, Causal: true, SoftCap: 1.5}, false)},
	{"attention, size of values", false, attendTo(ir.Attention{Scale: 0.7}, false, true)},
	{"attention, size of values, window", false,
		attendTo(ir.Attention{Scale: 0.5, Causal: true, Window: 2}, false, true)},
	{"attention, size of values, documents", false,
		attendTo(ir.Attention{Scale: 0.5, Causal: true}, true, true)},
	{"attention, sinks", false, attend(ir.Attention{Scale: 0.7, Sinks: &ir.Value{}}, false)},
	{"attention, sinks, window", false,
		attend(ir.Attention{Scale: 0.5, Causal: true, Window: 2, Sinks: &ir.Value{}}, false)},
	{"attention, sinks, documents", false,
		attendTo(ir.Attention{Scale: 0.5, Causal: true, Sinks: &ir.Value{}}, true, true)},
	{"cross_entropy", false, func(r *rand.Rand, b *ir.Builder, m Maker) *ir.Value {
		rows, vocab := D("tokens", small(r, 4)), D("vocab", 1+small(r, 5))
		return b.CrossEntropy(m.In("x", F32(rows, vocab)), m.IDs("labels", S32(rows), vocab.Size),
			"vocab")
	}},
	{"gather", false, func(r *rand.Rand, b *ir.Builder, m Maker) *ir.Value {
		rows, n := D("rows", small(r, 3)), small(r, 5)
		return b.Gather(m.In("x", F32(rows, D("e", n))),
			m.IDs("idx", S32(rows, D("e", small(r, 4))), n), "e")
	}},
	{"scatter", false, func(r *rand.Rand, b *ir.Builder, m Maker) *ir.Value {
		rows, k, n := D("rows", small(r, 3)), D("e", small(r, 4)), small(r, 5)
		return b.Scatter(m.In("x", F32(rows, k)), m.IDs("idx", S32(rows, k), n), "e", n)
	}},
	{"top_k", false, func(r *rand.Rand, b *ir.Builder, m Maker) *ir.Value {
		n := 1 + small(r, 5)
		values, _ := b.TopK(m.In("x", F32(D("rows", small(r, 3)), D("e", n))), "e", 1+r.Int64N(n))
		return values
	}},
	{"dispatch and combine", false, func(r *rand.Rand, b *ir.Builder, m Maker) *ir.Value {
		x := m.In("x", F32(D("batch", small(r, 2)), D(ir.Seq, small(r, 4)), D("embed", small(r, 3))))
		return route(r, b, m, x, func(rows, _ *ir.Value) *ir.Value { return b.Mul(rows, rows) })
	}},
	{"gates of experts", false, func(r *rand.Rand, b *ir.Builder, m Maker) *ir.Value {
		x := m.In("x", F32(D("batch", small(r, 2)), D(ir.Seq, small(r, 4)), D("embed", small(r, 3))))
		return route(r, b, m, x, func(rows, gates *ir.Value) *ir.Value {
			return b.Mul(rows, gates)
		})
	}},
}

// route sends rows of x, and a number for each choice, to a random capacity of experts, and adds up
// what compute makes of them there.
func route(r *rand.Rand, b *ir.Builder, m Maker, x *ir.Value,
	compute func(rows, gates *ir.Value) *ir.Value) *ir.Value {
	experts, capacity := small(r, 3), small(r, 5)
	dims := append(x.Type.Dims[:2:2], D(ir.Choice, small(r, 3)))
	idx := m.IDs("idx", S32(dims...), experts)
	pos := b.ExpertPositions(idx, experts, false, ir.Names(dims)...)
	gates := b.Dispatch(m.In("gates", F32(dims...)), idx, pos, experts, capacity, false)
	rows := b.Dispatch(x, idx, pos, experts, capacity, false)
	return b.Combine(compute(rows, gates), idx, pos)
}
