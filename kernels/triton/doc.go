// Package triton turns kernels, written as Go functions, into Triton IR, the text that XLA:GPU
// compiles inside StableHLO (custom call __gpu$xla.gpu.triton).
//
// A kernel is one program, run once for each place of a grid. Its values are blocks: small tensors
// whose shapes are known, held in registers; arrays are pointers to their first elements. A
// [Builder] prints one line per method:
//
//	b, v := triton.New("double", x, y) // an operand and a result
//	rows := b.Program(0).Mul(32).Add(b.Range(32))
//	b.Store(v[1].At(rows), b.Load(v[0].At(rows)).Mul(2.0))
//	k, err := b.Kernel(triton.Launch{Grid: [3]int{n / 32}, Warps: 1})
//
// Operands that are Go numbers become constants, and shapes are matched as in NumPy. The first
// mistake is kept with the place in the caller's source, and everything after it is ignored: so
// kernels read as mathematics and one check ends them.
//
// Nothing here needs a compiler or a GPU. Package triton/run executes the printed text.
package triton
