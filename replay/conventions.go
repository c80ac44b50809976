package replay

// A Convention is one reading of a library or of XLA's runtime that a replay trusts: the program's
// HLO does not show it, and only a real GPU can confirm it.
type Convention struct {
	Name    string
	Says    string
	Targets []string // the custom calls whose rules trust it
}

// Conventions lists what replays trust, in the order of the rules' files.
func Conventions() []Convention {
	gemms := []string{"__cublas$gemm", "__cublas$lt$matmul"}
	attention := []string{"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
	blocks := []string{"__cudnn$blockScaledDot"}
	return []Convention{
		{"gemm", "A call of cuBLAS computes alpha·A·B + beta·C over the dimension numbers of its " +
			"configuration, sums in float32, and applies the epilogue before it rounds; a bias is " +
			"added along the last dimension, and GELU is the tanh approximation.", gemms},
		{"workspace", "The last result of a call is scratch memory that nothing reads.",
			append(append(append([]string{}, gemms...), blocks...), attention...)},
		{"block-dot", "Operands are A, B, the scales of A and the scales of B; both matrices have the " +
			"contracted dimension last, and 32 (E8M0) or 16 (E4M3) elements along it share a scale.",
			blocks},
		{"scale-tiles", "Scales are read in tiles of 128 rows and 4 columns, 32 lines of 16 bytes with " +
			"rows i, i+32, i+64 and i+96 side by side; each matrix of a batch has its own.", blocks},
		{"element-codes", "E8M0 is a power of two with a bias of 127 and NaN for 255; E2M1 codes are " +
			"packed two in a byte, the low half first.", blocks},
		{"attention", "Attention is softmax(scale·Q·Kᵀ)·V with operands Q, K, V; its first result is " +
			"[batch, heads, seq, head], and query head h reads key head h·K/H.", attention[:1]},
		{"attention-mask", "CAUSAL lets query i see the keys up to i; a sliding window of w leaves the " +
			"last w of them, and 0 is no window.", attention},
		{"attention-lengths", "PADDING and PADDING_CAUSAL take lengths of queries and of keys, int32 " +
			"[batch], after the other operands: keys from the length on are seen by no query, and what " +
			"results hold beyond a length is not known.", attention},
		{"attention-segments", "With several segments a sequence, further operands are their lengths " +
			"and offsets, of queries and of keys: offsets count elements of the flat operand, K and V " +
			"have the same, a causal mask begins anew in each segment, and tokens of no segment are " +
			"neither read nor written.", attention},
		{"log-sum-exp", "The statistic between forward and backward pass is the natural logarithm of " +
			"the sum of exp(scale·Q·Kᵀ), float32 [batch, heads, seq], or [segment, heads, seq].", attention},
		{"attention-grad", "The gradient's operands are Q, K, V, log-sum-exp, dO and O; its results " +
			"are dQ, dK and dV with heads before the sequence.", attention[1:]},
		{"triton", "A call of Triton IR runs its text; MXFP8 codes are rounded to the nearest, ties to " +
			"even, and a NaN is 0x7f. The text is run by an interpreter, and its PTX by the software GPU; " +
			"how a GPU runs the machine code is not known.", []string{"__gpu$xla.gpu.triton"}},
		{"stochastic-rounding", "cvt.rs to four E2M1 numbers adds 8 of 32 random bits to the first " +
			"8 that it drops, below 1 too, and truncates: the first element takes bits 0 to 7, the " +
			"second 16 to 23, the third 8 to 15, the fourth 24 to 31.", []string{"__gpu$xla.gpu.triton"}},
		{"transform-sums", "The Hadamard transform of 16 bfloat16 numbers, a product of tensor " +
			"cores, is summed in float32; the order of the sums is not known, and changes the last bit " +
			"of few elements.", []string{"__gpu$xla.gpu.triton"}},
		{"allocate-buffer", "AllocateBuffer returns memory of any contents.",
			[]string{"AllocateBuffer"}},
	}
}
