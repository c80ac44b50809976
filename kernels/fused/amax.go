package fused

import tt "github.com/deepwell/deepwell/kernels/triton"

// Amax finds, in one read of what a source computes, the largest magnitudes that the scales of
// NVFP4 tensors come from: of the matrix itself, and of what the Hadamard transform makes of its
// columns. Each program gives its tile's, as bits of float32, of which a NaN's are the largest.
// For each part of the source there are, in the order of the results:
//
//	int32 [batch, programs] of each part if it is along, and of its transform if it is across
func Amax(m Matrix, s Source, along, across bool) (*tt.Kernel, error) {
	m.Batch = max(m.Batch, 1)
	args := s.args(m.Batch*m.Rows, m.Cols)
	first := len(args)
	wide := 128
	if m.Cols%256 == 0 {
		wide = 256
	}
	programs := ceil(m.Rows, tileRows) * ceil(m.Cols, wide)
	for part := range s.Parts {
		for i, name := range []string{"amax", "amaxt"} {
			if []bool{along, across}[i] {
				args = append(args, tt.Arg{Name: partName(name, part, s.Parts), Elem: tt.I32,
					Shape: []int{m.Batch, programs}, Result: true})
			}
		}
	}
	b, v := tt.New(s.Name+"_amax"+Form{Along: along, Across: across}.suffix(), args...)
	t, launch := newTile(b, m, tileRows)
	if s.matrices() > 1 { // or registers spill on rtx6000pro
		launch.Warps *= 2
	}
	switch {
	case !along && !across:
		b.Fail("a form without an orientation")
	case across && m.Rows%16 != 0:
		b.Fail("transforms of 16 do not divide %d rows", m.Rows)
	}
	at := b.Program(2).Mul(programs).Add(b.Program(0).Mul(launch.Grid[1])).Add(b.Program(1))
	out := v[first:]
	give := func(top tt.Value) {
		b.Store(out[0].At(at), top.Shl(16))
		out = out[1:]
	}
	for _, y := range s.Compute(t, v) {
		y = y.To(tt.BF16)
		if along {
			give(magnitude(y).Largest(1).Largest(0))
		}
		if across {
			give(magnitude(hadamard(t, y)).Largest(2).Largest(1).Largest(0))
		}
	}
	return b.Kernel(launch)
}
