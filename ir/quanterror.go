package ir

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/program"
)

// ErrorSums is the number of statistics of one operand's rounding error: elements that underflowed
// to zero; elements that were clamped, which have the largest code and exceeded it by more than a
// millionth; the sum of squares, and the sum of squared errors; over blocks that are not all zero,
// the sum of log2(largest / smallest nonzero magnitude), and the number of these blocks.
//
// All are sums, so that devices and microbatches can be added up, in float64: squares of gradients
// leave the range of float32.
const ErrorSums = 6

// QuantizeStats measures what rounding did to the part of a source that a device has, q being how
// it was rounded and list what came of it: [ErrorSums] numbers, of a stack each for all layers.
// Where a Hadamard transform came before the rounding, what it gave is the source.
func (b *Builder) QuantizeStats(x *Value, q Quantize, list ...*Value) *Value {
	return b.one("quantize_stats", q.attrs(), append([]*Value{x}, list...)...)
}

// inferQuantizeStats checks that codes and scales are what the source becomes.
func inferQuantizeStats(g *Graph, op *Op) ([]Type, error) {
	f, values, err := formatOf(op, "format")
	if err != nil {
		return nil, err
	}
	if err := arity(op, 1+values); err != nil {
		return nil, err
	}
	x := op.In[0]
	types, err := quantized(g, x, quantizeOf(op))
	if err != nil {
		return nil, err
	}
	for i, t := range types {
		if got := op.In[1+i].Type; !got.Equal(t) {
			return nil, fmt.Errorf("%s is not what %s becomes in %s, %s", got, x.Type, f, t)
		}
	}
	return []Type{{Elem: dtype.F64, Dims: []Dim{{dimStat, ErrorSums * x.Type.StackDepth()}}}}, nil
}

// JoinSums adds up the statistics of all devices of the mesh. Replicated operands are counted once
// per replica.
func (b *Builder) JoinSums(sums *Value) *Value {
	return b.one("join_stats", attrs(map[string]any{"axes": b.axes(), "sum": true}), sums)
}

// A source is where codes are read: in the body of a loop, or in the graph itself.
type source struct {
	codes *Value
	loop  *Op
}

// origin follows codes back to the quantize that made them: past operations that move them, and
// from a reverse loop to the forward loop that stacked them. It returns nil for codes that no
// operation of the graph made: a weight's copy.
func (s source) origin() (made *Op, loop *Op) {
	v, loop := s.codes, s.loop
	for {
		op := v.def
		switch {
		case op == nil && loop == nil:
			return nil, nil
		case op == nil:
			v, loop = loop.In[slices.Index(loop.Body.Inputs, v)], nil
		case op.Kind == "quantize":
			return op, loop
		case op.Kind == "repeat":
			v, loop = op.Body.Results[slices.Index(op.Out, v)], op
		case len(op.In) == 0:
			return nil, nil
		default:
			v = op.In[0]
		}
	}
}

// A gauge is one graph or body in which rounding errors are measured. made and sums are parallel:
// the quantizations and their [ErrorSums].
type gauge struct {
	loop *Op // nil for the graph itself
	b    *Builder
	made []*Op // quantizations, in the order of the numbers
	sums []*Value
}

// measure adds the results that report rounding errors: once per operand of a linear, however many
// times a backward pass rounds it again, and once for operands that linears share (q, k and v have
// one input).
func (e *quantLowering) measure(all []Stat, sources []source) {
	type key struct {
		layer, slot int64
		operand     string
	}
	seen := map[key]bool{}
	gauges := []*gauge{{b: e.Builder}}
	at := make([]*gauge, len(all)) // of each operand
	for i := range all {
		s := &all[i]
		k := key{s.Layer, s.Slot, s.Operand}
		op, loop := sources[i].origin()
		if op == nil || seen[k] {
			continue
		}
		seen[k] = true
		g := slices.IndexFunc(gauges, func(g *gauge) bool { return g.loop == loop })
		if g < 0 {
			g = len(gauges)
			gauges = append(gauges, &gauge{loop: loop, b: ExtendGraph(loop.Body)})
		}
		at[i] = gauges[g]
		s.Errors = ErrorSums * at[i].place(op)
		s.Elements, s.Copies, s.Length = e.shares(op.Out[0].Type, op.Attrs.List("along"))
	}
	var parts []*Value
	for _, g := range gauges {
		v := e.gauged(g)
		if e.err != nil {
			return
		}
		if v == nil {
			continue
		}
		from := lists.Sum(parts, func(p *Value) int64 { return p.Type.Dims[0].Size })
		parts = append(parts, v)
		for i := range all {
			if at[i] == g {
				all[i].Errors += from
				all[i].ErrorStride = ErrorSums * int64(len(g.made))
			}
		}
	}
	if len(parts) == 0 {
		return
	}
	if v := e.JoinSums(e.ConcatAny(dimStat, parts)); e.err == nil {
		v.Name, v.Means = StatErrors, program.Stat.For("")
		e.g.Results = append(e.g.Results, v)
	}
}

// place measures a quantization once, and gives its index in the gauge's list.
func (g *gauge) place(op *Op) int64 {
	if i := slices.Index(g.made, op); i >= 0 {
		return int64(i)
	}
	q, list := quantizeOf(op), op.Out
	if q.Format.TensorScale() {
		list = append(slices.Clone(list), op.In[1])
	}
	g.b.Tagged(op.Tag, func() { g.sums = append(g.sums, g.b.QuantizeStats(op.In[0], q, list...)) })
	g.made = append(g.made, op)
	return int64(len(g.made) - 1)
}

// gauged gives all that a gauge measured as one list, nil if that is nothing. A loop stacks its
// numbers up.
func (e *quantLowering) gauged(g *gauge) *Value {
	if e.err == nil {
		e.err = g.b.err
	}
	if len(g.sums) == 0 || e.err != nil {
		return nil
	}
	v := g.b.ConcatAny(dimStat, g.sums)
	if g.loop == nil || g.b.err != nil {
		e.err = g.b.err
		return v
	}
	return e.Merge(e.stacked(g.loop, v), dimStat, Layer, dimStat)
}

// stacked lets a loop stack a statistic of its body.
func (e *quantLowering) stacked(loop *Op, v *Value) *Value {
	loop.Body.Results = append(loop.Body.Results, v)
	return loop.gives(e.names.name("stat"), v.Type.Stacked(loop.Loop().N))
}

// shares gives how many elements all devices have of a value, how many devices have the same, and
// how long it is along some dimensions.
func (e *quantLowering) shares(t Type, along []string) (elements, copies, length int64) {
	elements, copies, length = t.Shape().Elements(), 1, 1
	for _, name := range along {
		length *= t.Size(name)
	}
	for _, a := range e.g.Mesh {
		elements *= a.Size
		switch how := t.Place.On(a.Name); {
		case how == "":
			copies *= a.Size
		case slices.Contains(along, how):
			length *= a.Size
		}
	}
	return elements, copies, length
}
