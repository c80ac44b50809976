package ir

import (
	"fmt"

	"github.com/deepwell/deepwell/dtype"
)

// elementKinds are the operations that work element by element. Arguments may lack dimensions that
// another has; they are repeated along those.
func elementKinds() map[string]Kind {
	t := map[string]Kind{
		"add": {1, inferElement("sum"), func(d *Differ, op *Op, dy []*Value) []*Value {
			return []*Value{d.Unbroadcast(dy[0], op.In[0]), d.Unbroadcast(dy[0], op.In[1])}
		}, nil},
		"sub": {1, inferElement("sum"), func(d *Differ, op *Op, dy []*Value) []*Value {
			return []*Value{d.Unbroadcast(dy[0], op.In[0]), d.Unbroadcast(d.Neg(dy[0]), op.In[1])}
		}, nil},
		"mul": {1, inferElement("product"), mulVJP, nil},
		"div": {1, inferElement("none"), func(d *Differ, op *Op, dy []*Value) []*Value {
			// d(x/y) = dx/y - x/y · dy/y
			y, q := d.Use(op.In[1]), d.Use(op.Out[0])
			dx := d.Div(dy[0], y)
			return []*Value{d.Unbroadcast(dx, op.In[0]), d.Unbroadcast(d.Neg(d.Mul(dx, q)), op.In[1])}
		}, nil},
		"neg":   {1, inferUnary("sum"), linearVJP, nil},
		"scale": {1, inferUnary("sum"), linearVJP, nil},
		"shift": {1, inferUnary("none"), sameGradient, nil},
		"convert": {1, takes(1, inferConvert), func(d *Differ, op *Op, dy []*Value) []*Value {
			return []*Value{d.Convert(dy[0], op.In[0].Type.Elem)}
		}, nil},
		"select": {1, takes(3, inferSelect), func(d *Differ, op *Op, dy []*Value) []*Value {
			mask, zero := d.Use(op.In[0]), d.Fill(op.Out[0].Type, 0)
			return []*Value{nil, d.Unbroadcast(d.Select(mask, dy[0], zero), op.In[1]),
				d.Unbroadcast(d.Select(mask, zero, dy[0]), op.In[2])}
		}, nil},
		"compare":       {1, takes(2, inferCompare), nil, nil},
		"fill":          {1, takes(0, inferFill), noGradients, nil},
		"iota":          {1, takes(0, inferFill), noGradients, nil},
		"stop_gradient": {1, inferUnary("sum"), noGradients, nil},
	}
	for name, slope := range unaries() {
		t[name] = Kind{1, inferUnary("none"), func(d *Differ, op *Op, dy []*Value) []*Value {
			return []*Value{slope(d, op, dy[0])}
		}, nil}
	}
	return t
}

// mulVJP: d(x·y) = y·dx + x·dy. What no gradient flows to, such as a count, asks for nothing to be
// saved.
func mulVJP(d *Differ, op *Op, dy []*Value) []*Value {
	out := make([]*Value, 2)
	for i, v := range op.In {
		if d.needs[v] {
			out[i] = d.Unbroadcast(d.Mul(dy[0], d.Use(op.In[1-i])), v)
		}
	}
	return out
}

// sameGradient is the VJP of an operation that shifts its argument by a constant.
func sameGradient(_ *Differ, _ *Op, dy []*Value) []*Value { return dy }

// linearVJP is the VJP of an operation whose transpose is itself: a multiplication by a constant.
func linearVJP(d *Differ, op *Op, dy []*Value) []*Value {
	return d.CopyWith(op, op.Attrs, nil, dy[0])
}

// noGradients is the VJP of an operation through which nothing flows.
func noGradients(_ *Differ, op *Op, _ []*Value) []*Value { return make([]*Value, len(op.In)) }

// unaries are the VJPs of element-wise functions: from the gradient of the result, the argument's.
// They read the result where that is cheaper to save.
func unaries() map[string]func(d *Differ, op *Op, dy *Value) *Value {
	return map[string]func(d *Differ, op *Op, dy *Value) *Value{
		"exp": func(d *Differ, op *Op, dy *Value) *Value { return d.Mul(dy, d.Use(op.Out[0])) },
		"log": func(d *Differ, op *Op, dy *Value) *Value { return d.Div(dy, d.Use(op.In[0])) },
		"sqrt": func(d *Differ, op *Op, dy *Value) *Value {
			return d.Scale(d.Div(dy, d.Use(op.Out[0])), 0.5)
		},
		"rsqrt": func(d *Differ, op *Op, dy *Value) *Value {
			y := d.Use(op.Out[0]) // d x^-1/2 = -1/2 x^-3/2
			return d.Scale(d.Mul(dy, d.Mul(y, d.Mul(y, y))), -0.5)
		},
		"sin": func(d *Differ, op *Op, dy *Value) *Value { return d.Mul(dy, d.Cos(d.Use(op.In[0]))) },
		"cos": func(d *Differ, op *Op, dy *Value) *Value {
			return d.Neg(d.Mul(dy, d.Sin(d.Use(op.In[0]))))
		},
		"tanh": func(d *Differ, op *Op, dy *Value) *Value {
			y := d.Use(op.Out[0])
			return d.Sub(dy, d.Mul(dy, d.Mul(y, y)))
		},
		"sigmoid": func(d *Differ, op *Op, dy *Value) *Value {
			y := d.Use(op.Out[0])
			return d.Mul(dy, d.Sub(y, d.Mul(y, y)))
		},
		"relu": func(d *Differ, op *Op, dy *Value) *Value {
			x := d.Use(op.In[0])
			zero := d.Fill(x.Type, 0)
			return d.Select(d.Compare("le", x, zero), zero, dy) // at NaN as in torch
		},
	}
}

// inferElement is the shape rule of an operation on two arguments, see spread for linear.
func inferElement(linear string) func(*Graph, *Op) ([]Type, error) {
	return takes(2, func(_ *Graph, op *Op) ([]Type, error) {
		return element(linear, op.In[0].Type, op.In[1].Type)
	})
}

// element gives the type of an element-wise result: the dimensions of the argument that has more.
func element(linear string, types ...Type) ([]Type, error) {
	widest := types[0]
	for _, t := range types[1:] {
		if len(t.Dims) > len(widest.Dims) {
			widest = t
		}
	}
	for _, t := range types {
		if t.Elem != types[0].Elem {
			return nil, fmt.Errorf("%s and %s differ in element type", types[0], t)
		}
		for _, d := range t.Dims {
			if widest.Size(d.Name) != d.Size || widest.Index(d.Name) < 0 {
				return nil, fmt.Errorf("%s and %s differ in %s", widest, t, d.Name)
			}
		}
	}
	place, err := spread(linear, types...)
	return []Type{{widest.Elem, widest.Dims, place}}, err
}

// inferUnary is the shape rule of an operation on one argument.
func inferUnary(linear string) func(*Graph, *Op) ([]Type, error) {
	return takes(1, func(_ *Graph, op *Op) ([]Type, error) {
		if k := op.In[0].Type.Elem.Kind(); k != dtype.Float && linear == "none" {
			return nil, fmt.Errorf("%s is not a number with a fraction", op.In[0].Type)
		}
		return element(linear, op.In[0].Type)
	})
}

// inferConvert changes the element type; partial sums stay partial only between float types.
func inferConvert(_ *Graph, op *Op) ([]Type, error) {
	to, err := dtype.Parse(op.Attrs.Text("to"))
	t := op.In[0].Type
	return []Type{{to, t.Dims, t.Place}}, err
}

// inferSelect wants booleans and two values of one element type.
func inferSelect(_ *Graph, op *Op) ([]Type, error) {
	mask := op.In[0].Type
	if mask.Elem != dtype.Pred {
		return nil, fmt.Errorf("the mask is %s, not pred", mask)
	}
	types, err := element("none", op.In[1].Type, op.In[2].Type)
	if err != nil {
		return nil, err
	}
	mask.Elem = types[0].Elem
	return element("none", types[0], mask)
}

// inferCompare gives booleans.
func inferCompare(_ *Graph, op *Op) ([]Type, error) {
	switch how := op.Attrs.Text("how"); how {
	case "eq", "ne", "lt", "le", "gt", "ge":
	default:
		return nil, fmt.Errorf("no comparison is called %q", how)
	}
	types, err := element("none", op.In[0].Type, op.In[1].Type)
	if err != nil {
		return nil, err
	}
	types[0].Elem = dtype.Pred
	return types, nil
}

// inferFill reads the type of a constant from its attributes.
func inferFill(_ *Graph, op *Op) ([]Type, error) {
	t, err := ParseType(op.Attrs.Text("type"))
	if err != nil {
		return nil, err
	}
	for _, s := range t.Place {
		if s.Dim == Partial && op.Attrs.Float("value") != 0 || s.Dim == op.Attrs.Text("dim") {
			return nil, fmt.Errorf("%s cannot be a constant", t)
		}
	}
	return []Type{t}, nil
}

// Add gives x + y.
func (b *Builder) Add(x, y *Value) *Value { return b.one("add", nil, x, y) }

// Sub gives x - y.
func (b *Builder) Sub(x, y *Value) *Value { return b.one("sub", nil, x, y) }

// Mul gives x · y, element by element.
func (b *Builder) Mul(x, y *Value) *Value { return b.one("mul", nil, x, y) }

// Div gives x / y.
func (b *Builder) Div(x, y *Value) *Value { return b.one("div", nil, x, y) }

// Neg gives -x.
func (b *Builder) Neg(x *Value) *Value { return b.one("neg", nil, x) }

// Scale gives x times a number.
func (b *Builder) Scale(x *Value, by float64) *Value {
	return b.one("scale", attrs(map[string]any{"by": by}), x)
}

// Shift gives x plus a number.
func (b *Builder) Shift(x *Value, by float64) *Value {
	return b.one("shift", attrs(map[string]any{"by": by}), x)
}

// Convert changes the element type.
func (b *Builder) Convert(x *Value, to dtype.DType) *Value {
	if x != nil && x.Type.Elem == to {
		return x
	}
	return b.one("convert", attrs(map[string]any{"to": to.String()}), x)
}

// Select takes x where the mask holds and y elsewhere.
func (b *Builder) Select(mask, x, y *Value) *Value { return b.one("select", nil, mask, x, y) }

// Compare gives a mask; how is eq, ne, lt, le, gt or ge.
func (b *Builder) Compare(how string, x, y *Value) *Value {
	return b.one("compare", attrs(map[string]any{"how": how}), x, y)
}

// Fill gives a constant of a type.
func (b *Builder) Fill(t Type, value float64) *Value {
	return b.one("fill", attrs(map[string]any{"type": t.String(), "value": value}))
}

// Iota counts along a dimension of a type, which must not be sharded.
func (b *Builder) Iota(t Type, dim string) *Value {
	return b.one("iota", attrs(map[string]any{"type": t.String(), "dim": dim}))
}

// StopGradient gives x, through which no gradient flows.
func (b *Builder) StopGradient(x *Value) *Value { return b.one("stop_gradient", nil, x) }

// Exp gives e to the x.
func (b *Builder) Exp(x *Value) *Value { return b.one("exp", nil, x) }

// Log gives the natural logarithm.
func (b *Builder) Log(x *Value) *Value { return b.one("log", nil, x) }

// Sqrt gives the square root.
func (b *Builder) Sqrt(x *Value) *Value { return b.one("sqrt", nil, x) }

// Rsqrt gives one over the square root.
func (b *Builder) Rsqrt(x *Value) *Value { return b.one("rsqrt", nil, x) }

// Sin gives the sine.
func (b *Builder) Sin(x *Value) *Value { return b.one("sin", nil, x) }

// Cos gives the cosine.
func (b *Builder) Cos(x *Value) *Value { return b.one("cos", nil, x) }

// Tanh gives the hyperbolic tangent.
func (b *Builder) Tanh(x *Value) *Value { return b.one("tanh", nil, x) }

// Sigmoid gives 1 / (1 + e^-x).
func (b *Builder) Sigmoid(x *Value) *Value { return b.one("sigmoid", nil, x) }

// Relu gives max(x, 0).
func (b *Builder) Relu(x *Value) *Value { return b.one("relu", nil, x) }
