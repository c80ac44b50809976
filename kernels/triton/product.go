package triton

// A Descriptor is a view of an array by which the tensor memory accelerator (TMA) copies whole
// blocks to and from shared memory. Elements outside read as zero and are not written.
type Descriptor struct {
	b     *Builder
	name  string
	elem  Elem
	block []int
}

// descriptorBytes is what a descriptor takes of a call's scratch memory (CUtensorMap).
const descriptorBytes = 128

// Describe makes the descriptor of a whole array that begins at p, row-major with these sizes, of
// which blocks are read and written.
func (b *Builder) Describe(p Value, sizes, block []int) Descriptor {
	d := Descriptor{b: b, elem: p.elem, block: block}
	if len(sizes) != len(block) || !p.ptr || p.shape != nil {
		b.Fail("a descriptor of %v by %v", sizes, block)
		return d
	}
	extents, strides := make([]string, len(sizes)), make([]string, len(sizes))
	for i, n := len(sizes)-1, 1; i >= 0; i-- {
		extents[i] = b.constant(sizes[i], I32, nil).name
		strides[i] = b.constant(n, I64, nil).name
		n *= sizes[i]
	}
	v := b.fresh(p.elem, false, nil)
	d.name = v.name
	b.line("%s = tt.make_tensor_descriptor %s, [%s], [%s] : <%s>, <%s>", d.name, p.name, join(extents),
		join(strides), p.elem, d.inner())
	b.scratch += descriptorBytes
	return d
}

// inner spells a block: 128x64xbf16. Bytes are spelled without a sign there.
func (d Descriptor) inner() string {
	e := string(d.elem)
	if d.elem == I8 {
		e = "ui8"
	}
	return sizes(d.block) + "x" + e
}

// at spells the first indices of a block.
func (d Descriptor) at(index []Value) string {
	list := make([]string, len(index))
	for i, v := range index {
		list[i] = v.name
	}
	if len(index) != len(d.block) {
		d.b.Fail("%d indices of a block with %d dimensions", len(index), len(d.block))
	}
	return "[" + join(list) + "]"
}

// Load reads the block whose first element has these indices.
func (d Descriptor) Load(index ...Value) Value {
	return d.b.emit(d.elem, false, d.block, "tt.descriptor_load %s%s : !tt.tensordesc<%s> -> %s",
		d.name, d.at(index), d.inner(), spell(d.elem, false, d.block))
}

// Store writes a block.
func (d Descriptor) Store(v Value, index ...Value) {
	if v.elem != d.elem {
		d.b.Fail("a store of %s to %s", v.typ(), d.inner())
	}
	d.b.line("tt.descriptor_store %s%s, %s : !tt.tensordesc<%s>, %s", d.name, d.at(index), v.name,
		d.inner(), v.typ())
}

// Dot is v·w + sum, of matrices [m, k] and [k, n] on tensor cores.
func (v Value) Dot(w, sum Value) Value {
	return v.b.emit(F32, false, sum.shape,
		"tt.dot %s, %s, %s, inputPrecision = tf32 : %s * %s -> %s", v.name, w.name, sum.name, v.typ(),
		w.typ(), sum.typ())
}

// A Scaled is a block of codes with the scales of their blocks: [m, k] and [m, k/32] bytes, or
// [n, k/32] beside codes [k, n]. Codes of E2M1 are packed, two to a byte along k.
type Scaled struct{ Codes, Scales Value }

// DotScaled is v·w + sum of block-scaled matrices on tensor cores, whose codes are e4m3 or e2m1.
func (b *Builder) DotScaled(v, w Scaled, sum Value, codes string) Value {
	return b.emit(F32, false, sum.shape,
		"tt.dot_scaled %s scale %s, %s scale %s, %s lhs = %s rhs = %s {fastMath = false} : "+
			"%s, %s * %s, %s -> %s", v.Codes.name, v.Scales.name, w.Codes.name, w.Scales.name, sum.name,
		codes, codes, v.Codes.typ(), v.Scales.typ(), w.Codes.typ(), w.Scales.typ(), sum.typ())
}

// If does something where a scalar condition holds.
func (b *Builder) If(cond Value, then func()) {
	b.line("scf.if %s {", cond.name)
	b.depth++
	then()
	b.depth--
	b.line("}")
}

// Unswizzle gives scales as tensor cores number them, [128·r, 4·k], from a block of the swizzled
// array [1, r, k, 2, 256]. Only in this order of operations are scales copied to tensor memory
// without a way through registers (reference/moe_lowering.md 2a).
func (v Value) Unswizzle() Value {
	r, k := v.shape[1], v.shape[2]
	v = v.reshape(" efficient_layout", r, k, 32, 4, 4)
	return v.Trans(0, 3, 2, 1, 4).reshape(" efficient_layout", 128*r, 4*k)
}
