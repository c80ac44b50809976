package model

// Forward says where element i of the parameter stands: at place j of tensor t, both counted from 0
// in the order of rows.
func (p *Param) Forward(i int64) (t int, j int64) {
	part := p.part()
	t, i = int(i/part), i%part
	cols, row0, rows, col0, width := p.matrix()
	r, c := i/width, i%width
	if p.Transposed {
		r, c = i%rows, i/rows
	}
	return t, (row0+r)*cols + col0 + c
}
