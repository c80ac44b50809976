package stablehlo

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/rewrite"
)

const (
	// indexType counts rounds, positions and starts of slices.
	indexType = dtype.S32
	predType  = dtype.Pred
)

// Rules are the plain rules, by kind: what every target runs.
func Rules() map[string]Rule {
	t := elementRules()
	for _, part := range []map[string]Rule{shapeRules(), blockRules(), meshRules(),
		expertRules()} {
		maps.Copy(t, part)
	}
	return t
}

// elementRules print element-wise operations: StableHLO has an instruction for most.
func elementRules() map[string]Rule {
	t := map[string]Rule{
		"scale": func(w *Writer, op *ir.Op, in []Val) []Val {
			return []Val{w.Elementwise("multiply", in[0], w.Constant(in[0].Type, op.Attrs.Float("by")))}
		},
		"shift": func(w *Writer, op *ir.Op, in []Val) []Val {
			return []Val{w.Elementwise("add", in[0], w.Constant(in[0].Type, op.Attrs.Float("by")))}
		},
		"convert": func(w *Writer, op *ir.Op, in []Val) []Val {
			return []Val{w.Convert(in[0], op.Out[0].Type.Elem)}
		},
		rewrite.Barrier: func(w *Writer, _ *ir.Op, in []Val) []Val { return w.Barriers(in...) },
		"stop_gradient": func(_ *Writer, _ *ir.Op, in []Val) []Val { return in },
		"relu": func(w *Writer, _ *ir.Op, in []Val) []Val {
			return []Val{w.Elementwise("maximum", in[0], w.Constant(in[0].Type, 0))}
		},
		"select": func(w *Writer, op *ir.Op, in []Val) []Val {
			t := op.Out[0].Type
			mask, a, b := w.BroadcastTo(in[0], t), w.BroadcastTo(in[1], t), w.BroadcastTo(in[2], t)
			return []Val{w.Select(mask, a, b)}
		},
		"compare": func(w *Writer, op *ir.Op, in []Val) []Val {
			t := op.Out[0].Type
			return []Val{w.Compare(strings.ToUpper(op.Attrs.Text("how")), w.BroadcastTo(in[0], t),
				w.BroadcastTo(in[1], t))}
		},
		"fill": func(w *Writer, op *ir.Op, _ []Val) []Val {
			return []Val{w.Constant(op.Out[0].Type, op.Attrs.Float("value"))}
		},
		"iota": func(w *Writer, op *ir.Op, _ []Val) []Val {
			return []Val{w.Iota(op.Out[0].Type, op.Attrs.Text("dim"))}
		},
	}
	for kind, name := range map[string]string{
		"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide",
	} {
		t[kind] = func(w *Writer, op *ir.Op, in []Val) []Val {
			out := op.Out[0].Type
			return []Val{w.Elementwise(name, w.BroadcastTo(in[0], out), w.BroadcastTo(in[1], out))}
		}
	}
	for kind, name := range map[string]string{"neg": "negate", "exp": "exponential", "log": "log",
		"sqrt": "sqrt", "rsqrt": "rsqrt", "sin": "sine", "cos": "cosine", "tanh": "tanh",
		"sigmoid": "logistic"} {
		t[kind] = func(w *Writer, _ *ir.Op, in []Val) []Val { return []Val{w.Elementwise(name, in[0])} }
	}
	return t
}

// Select takes a where the mask holds and b elsewhere.
func (w *Writer) Select(mask, a, b Val) Val {
	return w.Emit(a.Type, "stablehlo.select %s, %s, %s : %s, %s", mask.Name, a.Name, b.Name,
		Tensor(mask.Type), Tensor(a.Type))
}

// Compare gives booleans; how is EQ, NE, LT, LE, GT or GE.
func (w *Writer) Compare(how string, a, b Val) Val {
	t := ir.Type{Elem: predType, Dims: a.Type.Dims}
	return w.Apply(t, "stablehlo.compare "+how+", ", "", a, b)
}

// Iota counts from 0 along a dimension.
func (w *Writer) Iota(t ir.Type, dim string) Val {
	return w.Emit(t, "stablehlo.iota dim = %d : %s", t.Index(dim), Tensor(t))
}

// shapeRules print what moves and contracts dimensions.
func shapeRules() map[string]Rule {
	reshape := func(w *Writer, op *ir.Op, in []Val) []Val {
		return []Val{w.Reshape(in[0], op.Out[0].Type)}
	}
	dot := func(w *Writer, op *ir.Op, in []Val) []Val {
		out := op.Out[0].Type
		v := w.Dot(w.CastOperand(op, in[0]), w.CastOperand(op, in[1]), out.Elem, op.Attrs.List("over")...)
		return []Val{w.Transpose(v, ir.Names(out.Dims))}
	}
	return map[string]Rule{
		"split": reshape, "merge": reshape, "rename": reshape,
		"dot": dot, "linear": dot, "linear_dx": dot, "linear_dw": dot,
		"transpose": func(w *Writer, op *ir.Op, in []Val) []Val {
			return []Val{w.Transpose(in[0], op.Attrs.List("order"))}
		},
		"broadcast": func(w *Writer, op *ir.Op, in []Val) []Val {
			return []Val{w.BroadcastTo(in[0], op.Out[0].Type)}
		},
		"slice": func(w *Writer, op *ir.Op, in []Val) []Val {
			from := op.Attrs.Int("from")
			return []Val{w.Slice(in[0], op.Attrs.Text("dim"), from, op.Attrs.Int("to"))}
		},
		"pad": func(w *Writer, op *ir.Op, in []Val) []Val {
			low, high := op.Attrs.Int("low"), op.Attrs.Int("high")
			return []Val{w.Pad(in[0], op.Attrs.Text("dim"), low, high)}
		},
		"concat": func(w *Writer, op *ir.Op, in []Val) []Val {
			return []Val{w.Concat(op.Attrs.Text("dim"), op.Out[0].Type, in...)}
		},
		// Dimensions that a device shards give partial sums: the graph has the all-reduce.
		"sum": func(w *Writer, op *ir.Op, in []Val) []Val {
			// bf16 is summed in f32, or the later terms of a long sum would be lost.
			total := w.Reduce(w.Widen(in[0]), "add", 0, op.Attrs.List("over")...)
			return []Val{w.Convert(total, in[0].Type.Elem)}
		},
		"max": func(w *Writer, op *ir.Op, in []Val) []Val {
			return []Val{w.Reduce(in[0], "maximum", NegInf, op.Attrs.List("over")...)}
		},
	}
}

// Pad puts zeros before and after a value along a dimension.
func (w *Writer) Pad(v Val, dim string, before, after int64) Val {
	if before == 0 && after == 0 {
		return v
	}
	t := ir.Type{Elem: v.Type.Elem, Dims: slices.Clone(v.Type.Dims)}
	t.Dims[t.Index(dim)].Size += before + after
	none := make([]int64, len(t.Dims))
	low, high := slices.Clone(none), slices.Clone(none)
	low[t.Index(dim)], high[t.Index(dim)] = before, after
	return w.Apply(t, "stablehlo.pad ", fmt.Sprintf(", low = [%s], high = [%s], interior = [%s]",
		List(low), List(high), List(none)), v, w.Constant(ir.Type{Elem: v.Type.Elem}, 0))
}

// CastOperand rounds an operand of a matmul to the type in attribute "in", if there is one.
func (w *Writer) CastOperand(op *ir.Op, x Val) Val {
	to, err := dtype.Parse(op.Attrs.Text("in"))
	if err != nil {
		return x
	}
	return w.Convert(x, to)
}

// NegInf is minus infinity, from which the maximum of an empty list starts.
var NegInf = math.Inf(-1)

// Slice takes [from, to) of a dimension.
func (w *Writer) Slice(v Val, dim string, from, to int64) Val {
	if from == 0 && to == v.Type.Size(dim) {
		return v
	}
	t := ir.Type{Elem: v.Type.Elem}
	parts := make([]string, len(v.Type.Dims))
	for i, d := range v.Type.Dims {
		lo, hi := int64(0), d.Size
		if d.Name == dim {
			lo, hi = from, to
		}
		parts[i] = fmt.Sprintf("%d:%d", lo, hi)
		t.Dims = append(t.Dims, ir.Dim{Name: d.Name, Size: hi - lo})
	}
	return w.Apply(t, "stablehlo.slice ", " ["+List(parts)+"]", v)
}

// Concat concatenates along a dimension; t has the dimensions of the result.
func (w *Writer) Concat(dim string, t ir.Type, parts ...Val) Val {
	t = ir.Type{Elem: parts[0].Type.Elem, Dims: t.Dims}
	return w.Apply(t, "stablehlo.concatenate ", fmt.Sprintf(", dim = %d", t.Index(dim)), parts...)
}
