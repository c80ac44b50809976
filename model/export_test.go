package model

// Forward says where element i of the parameter stands: at place j of tensor t, both counted from 0
// in the order of rows.
func (p *Param) Forward(i int64) (t int, j int64) {
	part := p.part()
	t, i = int(i/part), i%part
	b := p.box()
	m, i := i/(b.rows*b.width), i%(b.rows*b.width)
	r, c := i/b.width, i%b.width
	if p.Transposed {
		r, c = i%b.rows, i/b.rows
	}
	return t, ((b.matrix0+m)*b.height+b.row0+r*b.rowStep)*b.cols + b.col0 + c*b.colStep
}

// Known reports whether config.json may describe models of a type.
func Known(arch string) bool { return archs[arch].class != "" }
