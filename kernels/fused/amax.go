package fused

import (
	"github.com/deepwell/deepwell/dtype"
	tt "github.com/deepwell/deepwell/kernels/triton"
)

// Amax finds, in one read of what a source computes, the largest magnitudes that the scales of
// NVFP4 tensors come from: of the matrix itself, and of what the Hadamard transform makes of its
// columns. Each program gives its tile's, as bits of float32, of which a NaN's are the largest.
// For each part of the source there are, in the order of the results:
//
//	the part itself in bfloat16 [batch·rows, cols], if the form keeps it,
//	int32 [batch, programs] of the part if it is along, and of its transform if it is across
func Amax(m Matrix, s Source, f Form) (*tt.Kernel, error) {
	m.Batch = max(m.Batch, 1)
	programs := ceil(m.Rows, tileRows) * ceil(m.Cols, tileCols(m))
	var results []tt.Arg
	for part := range s.Parts {
		if f.Keep {
			results = append(results, kept(m, part, s.Parts))
		}
		for i, name := range []string{"amax", "amaxt"} {
			if []bool{f.Along, f.Across}[i] {
				results = append(results, tt.Arg{Name: partName(name, part, s.Parts), Elem: tt.I32,
					Shape: []int{m.Batch, programs}, Result: true})
			}
		}
	}
	args := f.into(f.from(s.args(m.Batch*m.Rows, m.Cols)), results)
	b, v := tt.New(s.Name+"_amax"+f.suffix(), args...)
	t, launch := newTile(b, m, tileRows)
	if s.matrices() > 1 { // or registers spill on rtx6000pro
		launch.Warps *= 2
	}
	switch {
	case !f.Along && !f.Across:
		b.Fail("a form without an orientation")
	case f.Across && m.Rows%16 != 0:
		b.Fail("transforms of 16 do not divide %d rows", m.Rows)
	}
	at := b.Program(2).Mul(programs).Add(b.Program(0).Mul(launch.Grid[1])).Add(b.Program(1))
	out := f.shift(t, args, v)
	give := func(top tt.Value) {
		b.Store(out[0].At(at), top.Shl(16))
		out = out[1:]
	}
	for _, y := range s.Compute(t, v) {
		y = y.To(tt.BF16)
		if f.Keep {
			t.keep(out[0], y)
			out = out[1:]
		}
		if f.Along {
			give(magnitude(y).Largest(1).Largest(0))
		}
		if f.Across {
			give(magnitude(hadamard(t, y)).Largest(2).Largest(1).Largest(0))
		}
	}
	k, err := b.Kernel(launch)
	if err == nil {
		k.Spec = Spec{Format: dtype.NVFP4, Matrix: m, NVFP4Form: NVFP4Form{Form: f}, Amax: true,
			Expr: *s.Expr}.String()
	}
	return k, err
}
