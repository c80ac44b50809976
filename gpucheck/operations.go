package gpucheck

import (
	"regexp"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/replay"
	"github.com/deepwell/deepwell/step"
)

// plainArch is a GPU architecture without special kernels: what is written for it is the plain form
// of an operation, which the CPU engine runs.
const plainArch = "sm_80"

// An operation is a small program that XLA turns into calls of libraries.
type operation struct {
	name  string
	bound replay.Bound
	build func(*ir.Builder) []*ir.Value
	grad  bool // the gradient follows, too
}

func dim(name string, n int64) ir.Dim { return ir.Dim{Name: name, Size: n} }

func typ(elem dtype.DType, dims ...ir.Dim) ir.Type { return ir.Type{Elem: elem, Dims: dims} }

// unit is an input of standard normal numbers.
func unit(b *ir.Builder, name string, t ir.Type) *ir.Value {
	return b.Input(name, ir.Param, t, "").As(program.Meaning{Role: program.Activation})
}

// Sizes of GEMMs: no two are equal, so that a transposed operand does not fit.
var (
	rows = dim("rows", 192)
	in   = dim("in", 256)
	out  = dim("out", 320)
)

// linear is a GEMM of f32 operands rounded to a type, with an f32 result.
func linear(b *ir.Builder, operands dtype.DType) *ir.Value {
	x, w := unit(b, "x", typ(dtype.F32, rows, in)), unit(b, "w", typ(dtype.F32, in, out))
	return b.LinearIn(x, w, operands)
}

func withBias(b *ir.Builder) *ir.Value {
	y := linear(b, dtype.BF16)
	return b.Add(y, b.Broadcast(unit(b, "bias", typ(dtype.F32, out)), 0, rows))
}

// gemms are the forms of GEMM that programs have: epilogues are what XLA moves into a call of
// cuBLASLt, where it does.
func gemms() []operation {
	one := func(build func(*ir.Builder) *ir.Value) func(*ir.Builder) []*ir.Value {
		return func(b *ir.Builder) []*ir.Value { return []*ir.Value{build(b)} }
	}
	return []operation{
		{name: "GEMM, bf16", bound: boundGEMM, grad: true,
			build: one(func(b *ir.Builder) *ir.Value { return linear(b, dtype.BF16) })},
		{name: "GEMM, f32", bound: boundTF32, grad: true,
			build: one(func(b *ir.Builder) *ir.Value { return linear(b, dtype.Invalid) })},
		{name: "GEMM + C", bound: boundGEMM, build: one(func(b *ir.Builder) *ir.Value {
			return b.Add(linear(b, dtype.BF16), unit(b, "c", typ(dtype.F32, rows, out)))
		})},
		{name: "GEMM + bias", bound: boundGEMM, build: one(withBias)},
		{name: "GEMM + bias, ReLU", bound: boundGEMM,
			build: one(func(b *ir.Builder) *ir.Value { return b.Relu(withBias(b)) })},
		{name: "GEMM + bias, GELU", bound: boundGEMM,
			build: one(func(b *ir.Builder) *ir.Value { return b.Gelu(withBias(b)) })},
		{name: "batched GEMM", bound: boundAttention, grad: true,
			build: attention(ir.Attention{Causal: true, Plain: true})},
	}
}

// attention attends over two sequences of 128 tokens with 4 heads of queries and 2 of keys.
func attention(how ir.Attention) func(*ir.Builder) []*ir.Value {
	return func(b *ir.Builder) []*ir.Value {
		q, k, v := heads(b)
		how.Scale = headScale
		return []*ir.Value{b.Attend(q, k, v, how)}
	}
}

const headScale = 0.125

func heads(b *ir.Builder) (q, k, v *ir.Value) {
	q = unit(b, "q", typ(dtype.BF16, dim("batch", 2), dim(ir.Seq, 128), dim(ir.Heads, 4),
		dim(ir.HeadDim, 64)))
	t := typ(dtype.BF16, dim("batch", 2), dim(ir.Keys, 128), dim(ir.KVHeads, 2), dim(ir.HeadDim, 64))
	return q, unit(b, "k", t), unit(b, "v", t)
}

// attentions are the masks that programs have, the statistic between forward and backward pass, and
// the gradient.
func attentions() []operation {
	return []operation{
		{name: "attention, no mask", bound: boundAttention, build: attention(ir.Attention{})},
		{name: "attention, causal", bound: boundAttention,
			build: attention(ir.Attention{Causal: true})},
		{name: "attention, window", bound: boundAttention,
			build: attention(ir.Attention{Causal: true, Window: 48})},
		{name: "attention, lengths", bound: boundAttentionGrad, grad: true,
			build: func(b *ir.Builder) []*ir.Value {
				q, k, v := heads(b)
				rows := typ(dtype.S32, dim("batch", 2))
				lengths := b.Add(b.Iota(rows, "batch"), b.Fill(rows, 77)) // of 128 keys
				return []*ir.Value{b.Attend(q, k, v, ir.Attention{Scale: headScale, KeyLengths: lengths})}
			}},
		{name: "log-sum-exp", bound: boundGEMM, build: func(b *ir.Builder) []*ir.Value {
			q, k, v := heads(b)
			return b.Op("attention", map[string]any{"scale": headScale, "causal": true}, q, k, v)[1:2]
		}},
		{name: "attention gradient", bound: boundAttentionGrad, grad: true,
			build: attention(ir.Attention{Causal: true})},
		{name: "documents", bound: boundAttention, build: documents},
		{name: "documents, gradient", bound: boundAttentionGrad, grad: true, build: documents},
		{name: "merged pair", bound: boundAttention, build: mergedPair(1)},
		{name: "soft cap", bound: boundAttention, build: softCap}, // a kernel of our own
		{name: "soft cap, gradient", bound: boundAttentionGrad, grad: true, build: softCap},
	}
}

// softCap attends with capped scores in a window.
var softCap = attention(ir.Attention{Causal: true, Window: 48, SoftCap: 2})

// documents attends within documents of 64, 32 and 5 tokens, and of 1 and 26 behind them: long and
// short ones have calls of their own.
func documents(b *ir.Builder) []*ir.Value {
	q, k, v := heads(b)
	t := typ(dtype.S32, q.Type.Dims[:2]...)
	numbers, at := b.Fill(t, 0), b.Iota(t, ir.Seq)
	for _, start := range []float64{64, 96, 101, 102} {
		numbers = b.Add(numbers, b.Convert(b.Compare("ge", at, b.Fill(t, start)), dtype.S32))
	}
	return []*ir.Value{b.Attend(q, k, v, ir.Attention{Scale: headScale, Causal: true, Documents: 40,
		Segments: numbers, KeySegments: b.Rename(numbers, ir.Seq, ir.Keys)})}
}

// mergedPair attends to each half of the keys and merges the two by their log-sum-exps, as context
// parallelism does. A unit other than 1 is how tests make a statistic of another base.
func mergedPair(unit float64) func(*ir.Builder) []*ir.Value {
	return func(b *ir.Builder) []*ir.Value {
		q, k, v := heads(b)
		half := func(from, to int64) (o, lse *ir.Value) {
			out := b.Op("attention", map[string]any{"scale": headScale}, q,
				b.Slice(k, ir.Keys, from, to), b.Slice(v, ir.Keys, from, to))
			return b.Convert(out[0], dtype.F32), b.Mul(out[1], b.Fill(out[1].Type, unit))
		}
		n := k.Type.Size(ir.Keys)
		front, first := half(0, n/2)
		back, second := half(n/2, n)
		one := b.Fill(first.Type, 1)
		weight := b.Div(one, b.Add(one, b.Exp(b.Sub(second, first)))) // of the front
		weight = b.Broadcast(weight, 3, q.Type.Dims[3])
		return []*ir.Value{b.Add(back, b.Mul(weight, b.Sub(front, back)))}
	}
}

// ownKernels quantize along rows, along columns, and both in one read. Rows and columns are no
// whole tiles.
func ownKernels() []operation {
	quantize := func(along ...string) func(*ir.Builder) []*ir.Value {
		return func(b *ir.Builder) (list []*ir.Value) {
			x := unit(b, "x", typ(dtype.BF16, rows, out))
			for _, dim := range along {
				codes, scales := b.Quantize(x, ir.Quantize{Format: ir.MXFP8, Along: []string{dim}})
				list = append(list, b.Dequantize(ir.MXFP8, codes, scales, dtype.F32))
			}
			return list
		}
	}
	return []operation{
		{name: "mxfp8 quantize, rows", bound: boundCodes, build: quantize("out")},
		{name: "mxfp8 quantize, columns", bound: boundCodes, build: quantize("rows")},
		{name: "mxfp8 quantize, both", bound: boundCodes, build: quantize("out", "rows")},
		{name: "nvfp4 quantize, random", bound: boundCodes, build: randomBits},
	}
}

// randomBits rounds to E2M1 by random bits, along rows: codes and scales.
func randomBits(b *ir.Builder) []*ir.Value {
	x := unit(b, "x", typ(dtype.BF16, rows, out))
	noise := b.Iota(typ(dtype.S32, dim("word", 3)), "word")
	return b.QuantizeAll(x, ir.Quantize{Format: ir.NVFP4, Along: []string{"out"}, Noise: noise,
		Tensor: 5, Rows: b.Iota(typ(dtype.S32, rows), "rows"),
		Cols: b.Iota(typ(dtype.S32, out), "out")})[:2]
}

// blockDots multiply quantized operands. With equal scales only operands and codes count; with
// scales of their own for each block, the order of scales does, too.
func blockDots() (list []operation) {
	for _, f := range []dtype.Format{dtype.MXFP8, dtype.NVFP4} {
		for _, equal := range []bool{true, false} {
			name := string(f) + " GEMM, own scales"
			if equal {
				name = string(f) + " GEMM, equal scales"
			}
			list = append(list, operation{name: name, bound: boundBlocks,
				build: func(b *ir.Builder) []*ir.Value { return []*ir.Value{blockDot(b, f, equal)} }})
		}
	}
	return list
}

func blockDot(b *ir.Builder, f dtype.Format, equal bool) *ir.Value {
	const sum, block = 384, 32 // 32 elements have one scale in MXFP8, and two in NVFP4
	side := func(name string, outer ir.Dim) []*ir.Value {
		blocks := dim("blocks", sum/block)
		x := unit(b, name, typ(dtype.F32, outer, blocks, dim("block", block)))
		if equal {
			one := b.Fill(x.Type, 1)
			x = b.Select(b.Compare("lt", x, b.Fill(x.Type, 0)), b.Neg(one), one)
		} else {
			size := unit(b, name+".size", typ(dtype.F32, outer, blocks))
			x = b.Mul(x, b.Broadcast(size, 2, dim("block", block)))
		}
		x = b.Merge(x, "sum", "blocks", "block")
		return b.QuantizeAll(x, ir.Quantize{Format: f, Along: []string{"sum"}})
	}
	return b.BlockDot(f, side("x", rows), side("w", out), []string{"sum"}, dtype.F32)
}

// moduleName matches what a module's name has not.
var moduleName = regexp.MustCompile(`[^\w.-]+`)

// pair builds an operation for a GPU, and in its plain form.
func (o operation) pair(arch string) (p replay.Pair, err error) {
	b := ir.NewBuilder("operation")
	g, err := b.Graph(o.build(b)...)
	if err != nil {
		return p, err
	}
	if o.grad {
		gr, err := ir.Grad(g, ir.GradPlan{})
		if err != nil {
			return p, err
		}
		if g, err = gr.Joint(); err != nil {
			return p, err
		}
	}
	p.Kind = step.Gradient
	p.Vocab = 1
	for arch, to := range map[string]**program.Module{arch: &p.GPU, plainArch: &p.Reference} {
		name := moduleName.ReplaceAllString(o.name, "_")
		m, err := lower.Module(name, g, lower.Options{Kernels: kernels.For(arch)})
		if err != nil {
			return p, err
		}
		// What follows from an input that nobody gave a meaning, the seed of a gradient, is drawn, too.
		m.Args = lists.Map(m.Args, func(a program.Array) program.Array {
			if a.Role == program.Batch || a.Role == program.Residual || a.Role == "" {
				a.Role = program.Activation
			}
			return a
		})
		*to = m
	}
	return p, nil
}
