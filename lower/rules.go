package lower

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/rewrite"
)

const (
	indexType = dtype.S32
	predType  = dtype.Pred
)

// A rule writes an operation and gives its results.
type rule func(w *writer, op *ir.Op, in []val) []val

// table joins the groups of rules. Every kind of the graph has a row.
func table() map[string]rule {
	t := elementRules()
	for _, part := range []map[string]rule{shapeRules(), blockRules(), meshRules(),
		quantizeRules()} {
		maps.Copy(t, part)
	}
	return t
}

func elementRules() map[string]rule {
	t := map[string]rule{
		"scale": func(w *writer, op *ir.Op, in []val) []val {
			return []val{w.elementwise("multiply", in[0], w.constant(in[0].t, op.Attrs.Float("by")))}
		},
		"shift": func(w *writer, op *ir.Op, in []val) []val {
			return []val{w.elementwise("add", in[0], w.constant(in[0].t, op.Attrs.Float("by")))}
		},
		"convert": func(w *writer, op *ir.Op, in []val) []val {
			return []val{w.convert(in[0], op.Out[0].Type.Elem)}
		},
		rewrite.Barrier: func(w *writer, _ *ir.Op, in []val) []val { return w.barriers(in...) },
		"stop_gradient": func(_ *writer, _ *ir.Op, in []val) []val { return in },
		"relu": func(w *writer, _ *ir.Op, in []val) []val {
			return []val{w.elementwise("maximum", in[0], w.constant(in[0].t, 0))}
		},
		"select": func(w *writer, op *ir.Op, in []val) []val {
			t := op.Out[0].Type
			mask, a, b := w.as(in[0], t), w.as(in[1], t), w.as(in[2], t)
			return []val{w.choose(mask, a, b)}
		},
		"compare": func(w *writer, op *ir.Op, in []val) []val {
			t := op.Out[0].Type
			return []val{w.compare(strings.ToUpper(op.Attrs.Text("how")), w.as(in[0], t), w.as(in[1], t))}
		},
		"fill": func(w *writer, op *ir.Op, _ []val) []val {
			return []val{w.constant(op.Out[0].Type, op.Attrs.Float("value"))}
		},
		"iota": func(w *writer, op *ir.Op, _ []val) []val {
			return []val{w.iota(op.Out[0].Type, op.Attrs.Text("dim"))}
		},
	}
	for kind, name := range map[string]string{
		"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide",
	} {
		t[kind] = func(w *writer, op *ir.Op, in []val) []val {
			out := op.Out[0].Type
			return []val{w.elementwise(name, w.as(in[0], out), w.as(in[1], out))}
		}
	}
	for kind, name := range map[string]string{"neg": "negate", "exp": "exponential", "log": "log",
		"sqrt": "sqrt", "rsqrt": "rsqrt", "sin": "sine", "cos": "cosine", "tanh": "tanh",
		"sigmoid": "logistic"} {
		t[kind] = func(w *writer, _ *ir.Op, in []val) []val { return []val{w.elementwise(name, in[0])} }
	}
	return t
}

// choose takes a where the mask holds and b elsewhere.
func (w *writer) choose(mask, a, b val) val {
	return w.emit(a.t, "stablehlo.select %s, %s, %s : %s, %s", mask.name, a.name, b.name,
		tensor(mask.t), tensor(a.t))
}

func (w *writer) compare(how string, a, b val) val {
	t := ir.Type{Elem: predType, Dims: a.t.Dims}
	return w.apply(t, "stablehlo.compare "+how+", ", "", a, b)
}

func (w *writer) iota(t ir.Type, dim string) val {
	return w.emit(t, "stablehlo.iota dim = %d : %s", t.Index(dim), tensor(t))
}

func shapeRules() map[string]rule {
	reshape := func(w *writer, op *ir.Op, in []val) []val {
		return []val{w.reshape(in[0], op.Out[0].Type)}
	}
	dot := func(w *writer, op *ir.Op, in []val) []val {
		out := op.Out[0].Type
		v := w.dot(w.narrow(op, in[0]), w.narrow(op, in[1]), out.Elem, op.Attrs.List("over")...)
		return []val{w.transpose(v, ir.Names(out.Dims))}
	}
	return map[string]rule{
		"split": reshape, "merge": reshape, "rename": reshape,
		"dot": dot, "linear": dot, "linear_dx": dot, "linear_dw": dot,
		"transpose": func(w *writer, op *ir.Op, in []val) []val {
			return []val{w.transpose(in[0], op.Attrs.List("order"))}
		},
		"broadcast": func(w *writer, op *ir.Op, in []val) []val {
			return []val{w.as(in[0], op.Out[0].Type)}
		},
		"slice": func(w *writer, op *ir.Op, in []val) []val {
			from := op.Attrs.Int("from")
			return []val{w.slice(in[0], op.Attrs.Text("dim"), from, op.Attrs.Int("to"))}
		},
		"pad": func(w *writer, op *ir.Op, in []val) []val {
			low, high := op.Attrs.Int("low"), op.Attrs.Int("high")
			return []val{w.padded(in[0], op.Attrs.Text("dim"), low, high)}
		},
		"concat": func(w *writer, op *ir.Op, in []val) []val {
			return []val{w.concat(op.Attrs.Text("dim"), op.Out[0].Type, in...)}
		},
		"sum": func(w *writer, op *ir.Op, in []val) []val {
			// Sums of narrow numbers are made in f32, or the later ones of many would be lost.
			total := w.reduce(w.wide(in[0]), "add", 0, op.Attrs.List("over")...)
			return []val{w.convert(total, in[0].t.Elem)}
		},
		"max": func(w *writer, op *ir.Op, in []val) []val {
			return []val{w.reduce(in[0], "maximum", lowest, op.Attrs.List("over")...)}
		},
	}
}

// padded puts zeros before and after a value along a dimension.
func (w *writer) padded(v val, dim string, before, after int64) val {
	if before == 0 && after == 0 {
		return v
	}
	t := ir.Type{Elem: v.t.Elem, Dims: slices.Clone(v.t.Dims)}
	t.Dims[t.Index(dim)].Size += before + after
	none := make([]int64, len(t.Dims))
	low, high := slices.Clone(none), slices.Clone(none)
	low[t.Index(dim)], high[t.Index(dim)] = before, after
	return w.apply(t, "stablehlo.pad ", fmt.Sprintf(", low = [%s], high = [%s], interior = [%s]",
		list(low), list(high), list(none)), v, w.constant(ir.Type{Elem: v.t.Elem}, 0))
}

// narrow rounds an argument of a product to the type that the operation says, if it says one.
func (w *writer) narrow(op *ir.Op, x val) val {
	to, err := dtype.Parse(op.Attrs.Text("in"))
	if err != nil {
		return x
	}
	return w.convert(x, to)
}

// lowest stands for minus infinity, which MLIR spells by its bits.
const lowest = -1e301

func (w *writer) slice(v val, dim string, from, to int64) val {
	if from == 0 && to == v.t.Size(dim) {
		return v
	}
	t := ir.Type{Elem: v.t.Elem}
	parts := make([]string, len(v.t.Dims))
	for i, d := range v.t.Dims {
		lo, hi := int64(0), d.Size
		if d.Name == dim {
			lo, hi = from, to
		}
		parts[i] = fmt.Sprintf("%d:%d", lo, hi)
		t.Dims = append(t.Dims, ir.Dim{Name: d.Name, Size: hi - lo})
	}
	return w.apply(t, "stablehlo.slice ", " ["+list(parts)+"]", v)
}

func (w *writer) concat(dim string, t ir.Type, parts ...val) val {
	t = ir.Type{Elem: parts[0].t.Elem, Dims: t.Dims}
	return w.apply(t, "stablehlo.concatenate ", fmt.Sprintf(", dim = %d", t.Index(dim)), parts...)
}
