package rewrite

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// carried is the type of a value in a program. Quantized elements and scales, with which only
// block_dot computes, travel as bytes; 4-bit elements two to a byte along the last dimension. So
// arguments, collectives and loops know only bytes.
func carried(t ir.Type) ir.Type {
	switch t.Elem {
	case dtype.F8E4M3FN, dtype.F8E8M0FNU:
		t.Elem = dtype.U8
	case dtype.F4E2M1FN:
		t.Elem = dtype.U8
		if n := len(t.Dims); n > 0 {
			t.Dims = slices.Clone(t.Dims)
			t.Dims[n-1].Size /= 2
		}
	}
	return t
}

// Packed returns a graph in which every value has the type in which a program carries it: quantized
// codes and scales as bytes. It is g itself if nothing is quantized, and a copy otherwise. Do not
// verify a packed graph: the shape rules of quantized operations expect the types before packing.
func Packed(g *ir.Graph) *ir.Graph {
	if !hasPacked(g) {
		return g
	}
	g = g.Clone()
	_ = pack(g) // it never fails
	return g
}

// pack is the last pass: the shape rules of quantize and block_dot know only the types that it
// replaces, so a packed graph no longer verifies.
func pack(g *ir.Graph) error {
	if hasPacked(g) {
		carry(g)
	}
	return nil
}

// hasPacked tells whether any value of a graph is packed.
func hasPacked(g *ir.Graph) bool {
	packed := func(v *ir.Value) bool { return carried(v.Type).Elem != v.Type.Elem }
	return slices.ContainsFunc(g.Inputs, packed) || slices.ContainsFunc(g.Ops, func(op *ir.Op) bool {
		return slices.ContainsFunc(op.Out, packed) || op.Body != nil && hasPacked(op.Body)
	})
}

// carry packs the values of a graph and of bodies.
func carry(g *ir.Graph) {
	values := slices.Clone(g.Inputs)
	for _, op := range g.Ops {
		op.Attrs = packedAttrs(op) // by the types as they are
		if values = append(values, op.Out...); op.Body != nil {
			carry(op.Body)
		}
	}
	for _, v := range values {
		v.Type = carried(v.Type)
	}
}

// packedAttrs halves the bounds of an operation that slices or pads the packed dimension of 4-bit
// elements.
func packedAttrs(op *ir.Op) ir.Attrs {
	if op.Kind != "slice" && op.Kind != "pad" {
		return op.Attrs
	}
	t, a := op.In[0].Type, op.Attrs
	if t.Elem != dtype.F4E2M1FN || t.Index(a.Text("dim")) != len(t.Dims)-1 {
		return a
	}
	for _, key := range []string{"from", "to", "low", "high"} {
		if n := a.Int(key); n != 0 {
			a = a.With(key, n/2)
		}
	}
	return a
}
