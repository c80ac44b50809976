package triton

// At is the pointers to elements that are offsets behind v's.
func (v Value) At(offset Value) Value {
	if !v.ptr {
		return v.b.Fail("%s is no pointer", v.typ())
	}
	p, offset := match(v, offset)
	return v.b.emit(v.elem, true, p.shape, "tt.addptr %s, %s : %s, %s", p.name, offset.name, p.typ(),
		offset.typ())
}

// Load reads what pointers point to.
func (b *Builder) Load(p Value) Value {
	if !p.ptr {
		return b.Fail("%s is no pointer", p.typ())
	}
	return b.emit(p.elem, false, p.shape, "tt.load %s : %s", p.name, p.typ())
}

// LoadIf reads where the mask holds, and gives a number elsewhere.
func (b *Builder) LoadIf(mask, p Value, other any) Value {
	o := b.constant(other, p.elem, p.shape)
	mask = mask.Broadcast(p.shape...)
	return b.emit(p.elem, false, p.shape, "tt.load %s, %s, %s : %s", p.name, mask.name, o.name,
		p.typ())
}

// Store writes elements to where pointers point. No two programs may write to one place.
func (b *Builder) Store(p, v Value) {
	if p.elem != v.elem || !p.ptr {
		b.Fail("a store of %s to %s", v.typ(), p.typ())
		return
	}
	v = v.Broadcast(p.shape...)
	b.line("tt.store %s, %s : %s", p.name, v.name, p.typ())
}

// StoreIf writes where the mask holds.
func (b *Builder) StoreIf(mask, p, v Value) {
	if p.elem != v.elem || !p.ptr {
		b.Fail("a store of %s to %s", v.typ(), p.typ())
		return
	}
	v, mask = v.Broadcast(p.shape...), mask.Broadcast(p.shape...)
	b.line("tt.store %s, %s, %s : %s", p.name, v.name, mask.name, p.typ())
}
