// Package replay turns the optimized program that XLA:GPU made for a Blackwell GPU into a plain HLO
// program that the CPU engine runs, so that what the compiler made of a step can be computed and
// compared where there is no GPU.
//
// [Rewrite] keeps the meaning of the optimized program and drops what only a GPU needs: fusions
// become calls, bitcasts become transposes and reshapes, asynchronous pairs become the operation
// itself, and calls of cuBLAS and cuDNN become the matrix products that they stand for. Layouts,
// memory spaces, schedules and control edges are dropped, so the replay follows the data flow. What
// the rewriter does not know it refuses by name; it never guesses.
//
// [Pairs] builds the programs of a step twice: for the GPUs of a plan, and as references without
// special kernels. A [Runner] compiles, rewrites and runs them on the same inputs, in child
// processes, since XLA ends its process where it cannot go on. It compares every result array;
// [Pair.Bound] says how far they may be apart. Held as f32, bf16 is not rounded by either program,
// and faults of 1 % in one operation stand out; as it is, its rounding hides them.
//
// The replay shows that XLA's passes over HLO kept the meaning of the program, and that Deepwell
// passes the right operands to libraries. It does not show that the libraries compute what
// [Conventions] says that they compute: these readings are what the replay trusts. Code generation,
// buffer assignment, stream order and the GPU's rounding are outside of it.
package replay
