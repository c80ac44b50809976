// Package triton turns kernels, written as Go functions, into Triton IR, the text that XLA:GPU
// compiles inside StableHLO (custom call __gpu$xla.gpu.triton).
//
// A kernel is one program, run once for each place of a grid. Its values are blocks: small tensors
// whose shapes are known, held in registers; arrays are pointers to their first elements. A
// [Builder] prints one line per method:
//
//	b, at := New("double", In(x), Out(y)), ...
//	rows := b.Program(0).Mul(32).Add(b.Range(32))
//	b.Store(y.At(rows), b.Load(x.At(rows)).Mul(2.0))
//	k, err := b.Kernel(Launch{Grid: [3]int{n / 32}, Warps: 4})
//
// Operands that are Go numbers become constants, and shapes are matched as in NumPy. The first
// mistake is kept with the place in the caller's source, and everything after it is ignored, so that
// kernels read as mathematics and one check ends them.
//
// Nothing here needs a compiler or a GPU. Package triton/run executes the printed text.
package triton
