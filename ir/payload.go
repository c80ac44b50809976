package ir

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
)

// Payload is the attribute of a dispatch with the format that its rows are quantized to before they
// are copied, along their last dimension: an all-to-all then carries codes and scales. Of a combine
// it is the payload of the dispatch in its gradient. It is part of what a graph computes, under
// every plan, whatever is sent.
const Payload = "payload"

// checkPayload checks that the rows of a dispatch, x less the dimensions of tokens, are made of
// whole blocks of its payload's format.
func checkPayload(op *Op, x Type, tokens int) error {
	name := op.Attrs.Text(Payload)
	if name == "" {
		return nil
	}
	f := Format(name)
	if !f.Quantized() || f.TensorScale() {
		return fmt.Errorf("rows cannot be rounded to %q alone", name)
	}
	if len(x.Dims) == tokens || x.Dims[len(x.Dims)-1].Size%f.Block() != 0 {
		return fmt.Errorf("rows %s are not made of blocks of %d", x, f.Block())
	}
	return nil
}

// rowsBlocks is how the payload of rows is quantized: along their last dimension.
func rowsBlocks(f Format, t Type) Quantize {
	return Quantize{Format: f, Along: []string{t.Dims[len(t.Dims)-1].Name}}
}

// inferDequantize gives what codes and scales stand for, in the order of the codes.
func inferDequantize(_ *Graph, op *Op) ([]Type, error) {
	f, values, err := formatOf(op, "format")
	if err == nil {
		err = arity(op, values)
	}
	if err != nil {
		return nil, err
	}
	codes, scales := op.In[0].Type, op.In[1].Type
	n := len(codes.Dims)
	if n == 0 || f.TensorScale() || codes.Elem != f.Codes() {
		return nil, fmt.Errorf("%s are not codes of %s", codes, f)
	}
	want := Type{f.Scales(), append([]Dim{}, codes.Dims...), codes.Place}
	want.Dims[n-1].Size /= f.Block()
	if codes.Dims[n-1].Size%f.Block() != 0 || !want.Equal(scales) {
		return nil, fmt.Errorf("%s are not the scales of %s", scales, codes)
	}
	to, err := dtype.Parse(op.Attrs.Text("to"))
	if err != nil || to != dtype.F32 && to != dtype.BF16 {
		return nil, fmt.Errorf("codes do not become %q", op.Attrs.Text("to"))
	}
	return []Type{{to, codes.Dims, codes.Place}}, nil
}

// Dequantize gives the numbers that codes and scales stand for, rounded to a type. The codes have
// the dimension of their blocks last.
func (b *Builder) Dequantize(f Format, codes, scales *Value, to dtype.DType) *Value {
	a := map[string]any{"format": string(f), "to": to.String()}
	return b.one("dequantize", attrs(a), codes, scales)
}

// decodes tells whether a value is what codes stand for.
func decodes(v *Value) bool { return v.def != nil && v.def.Kind == "dequantize" }

// decodedBy is how the codes of a dequantize were made.
func decodedBy(op *Op) Quantize {
	return rowsBlocks(Format(op.Attrs.Text("format")), op.Out[0].Type)
}

// reachesExperts tells the all-to-all that brings rows to the devices of their experts.
func reachesExperts(op *Op) bool {
	return op.Kind == "all_to_all" && op.Attrs.Text("from") == Slots &&
		op.Attrs.Text("to") == ExpertDim
}

// rowsFormat is the format of rows that were dispatched with a payload, and maybe brought to their
// experts; "" for other values.
func rowsFormat(v *Value) Format {
	op := v.def
	if op != nil && reachesExperts(op) {
		op = op.In[0].def
	}
	if op == nil || op.Kind != "dispatch" {
		return ""
	}
	return Format(op.Attrs.Text(Payload))
}

// savedRows gives rows in the backward graph. The forward graph saves their codes and scales if
// they have a payload: LowerQuantized finds that these are what was received.
func (d *Differ) savedRows(v *Value) *Value {
	f := rowsFormat(v)
	if f == "" {
		return d.residual(v)
	}
	b := ExtendGraph(d.fwd)
	b.names = d.names // what is kept is an input of the backward graph by the same name
	codes, scales := b.Quantize(v, rowsBlocks(f, v.Type))
	if b.err != nil {
		d.fail(b.err)
	}
	return d.Dequantize(f, d.residual(codes), d.residual(scales), v.Type.Elem)
}

// quantizedRows hands rows with a payload from one half of a graph to the other: the first half
// quantizes them, which gives it what it received, and the second decodes what it is to be given.
func (c *splitter) quantizedRows(v *Value) (codes, rows *Op) {
	f, tag := rowsFormat(v), v.def.Tag
	how := rowsBlocks(f, v.Type)
	codes = &Op{Kind: "quantize", Tag: tag, In: []*Value{v}, Attrs: how.attrs()}
	types, _ := inferQuantize(c.g, codes) // the dispatch has checked its rows
	for _, t := range types {
		codes.gives(c.names.value("quantize"), t)
	}
	a := map[string]any{"format": string(f), "to": v.Type.Elem.String()}
	rows = &Op{Kind: "dequantize", Tag: tag, In: make([]*Value, len(types)), Attrs: attrs(a)}
	rows.gives(v.Name, v.Type)
	return codes, rows
}

// dispatch copies codes and scales of rows to slots.
func (e *quantLowering) dispatch(op *Op) *Value {
	x := op.In[0]
	how := rowsBlocks(Format(op.Attrs.Text(Payload)), x.Type)
	var list []*Value
	e.Tagged(op.Tag, func() { list = e.quantize(x, how) })
	if e.err != nil {
		return e.dead(1)[0]
	}
	return e.movedCodes(op, op.Attrs.With(Payload, ""), list)
}

// movedCodes lets an operation that moves rows move codes and scales, and decodes them behind it:
// whoever wants the codes takes them, and else nobody reads what is decoded.
func (e *quantLowering) movedCodes(op *Op, a Attrs, list []*Value) (y *Value) {
	var moved [2]*Value
	for i := range moved {
		in := append([]*Value{list[i]}, op.In[1:]...)
		moved[i] = e.CopyWith(op, a, nil, in...)[0]
	}
	f := Format(op.Attrs.Text(Payload))
	if f == "" {
		f = Format(op.In[0].def.Attrs.Text("format"))
	}
	e.Tagged(op.Tag, func() {
		y = e.Dequantize(f, moved[0], moved[1], op.Out[0].Type.Elem)
	})
	return y
}

// codesAgain drops a quantize of what was decoded from the same blocks: its results are the codes
// and scales themselves. Others stay.
func (e *quantLowering) codesAgain(op *Op) []*Value {
	from := op.In[0]
	if !decodes(from) || quantizeOf(op).key() != decodedBy(from.def).key() ||
		op.Attrs.Bool("stochastic") {
		return nil
	}
	for _, v := range from.def.In {
		if v.def == nil || e.taken(v) {
			return from.def.In
		}
	}
	for i, v := range from.def.In {
		e.Substitute(op.Out[i], v)
	}
	return []*Value{}
}

// taken tells whether a value has the name of one that it replaces, or is a result.
func (e *quantLowering) taken(v *Value) bool {
	for _, now := range e.Replacement {
		if now == v {
			return true
		}
	}
	return slices.Contains(e.g.Results, v)
}
