package kernels

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
)

// maxUnrolled bounds the layers that are unrolled on a CPU, since compile time grows with them. It
// is a choice, not a measured optimum: deeper models are rare here.
const maxUnrolled = 32

// Unroll says whether a model's layers are unrolled, each with weights of its own, or a loop over
// stacked weights, and why.
func (s *Selector) Unroll(layers int64) (bool, string) {
	switch {
	case s.arch != "cpu":
		return false, "a loop compiles as fast for 126 layers as for 4"
	case layers > maxUnrolled:
		return false, fmt.Sprintf("%d layers take long to compile one by one; up to %d are unrolled",
			layers, maxUnrolled)
	}
	return true, "in a loop, each layer's gradient would rewrite the whole stack"
}

// Unrolled is Unroll under a plan, which may need a loop; a nil plan is one device.
func (s *Selector) Unrolled(layers int64, how *plan.Plan, recompute bool) (bool, string) {
	unrolled, why := s.Unroll(layers)
	switch {
	case how != nil && (how.PP.Size > 1 || how.TP.Overlap || how.EPOverlap):
		return false, "pipeline stages and half batches are built from the loop's body"
	case unrolled && how.Offloads(plan.Activations):
		return false, "only activations that a loop stacks can be offloaded"
	case recompute:
		return false, "XLA undoes recomputation in unrolled layers and keeps the activations"
	}
	return unrolled, why
}

// Types gives, for a model that computes in a precision, the type of its activations and the type
// to which matmul operands are rounded: a GPU reads and writes bf16 everywhere, while a CPU only
// multiplies in it, since it has no other bf16 arithmetic.
func (s *Selector) Types(precision dtype.DType) (elem, gemm dtype.DType) {
	if s.arch == "cpu" && precision != dtype.F32 {
		return dtype.F32, precision
	}
	return precision, precision
}

// Documents says how many documents packed into one sequence are masked from each other, and why:
// most of them, 0 if the data is not known, or none where cuDNN has no call for it, or if most is
// negative. a is the attention without documents ([Planned]).
func (s *Selector) Documents(most int64, a Attention) (int64, string) {
	const compared = "attention compares the numbers of documents"
	if s.arch == "cpu" { // whatever the data is
		return anyDocuments, compared
	}
	if most < 0 {
		return 0, "documents are not masked"
	}
	if kernel, _ := s.Attention(a); kernel != CuDNN {
		return anyDocuments, compared
	}
	most = cmp.Or(most, plannedDocuments)
	if most == 1 {
		return 0, "a sequence is one document"
	}
	a.Documents = true
	if why := s.againstCuDNN(a); why != "" {
		return 0, "no document mask on GPUs: documents packed into one sequence attend to one another: " +
			why
	}
	return most, fmt.Sprintf("up to %d documents of a sequence are segments of cuDNN's call", most)
}

// Planned is the attention of a model's layers, with a window or without, in an element type, under
// a plan's context parallelism of sequences of seq tokens. It predicts what package spmd writes
// into the plan's graph, so that its kernel can be priced before there is a graph.
func Planned(c model.Facts, windowed bool, elem dtype.DType, cut plan.CP, seq int64,
	plain bool) Attention {
	a := Attention{Elem: elem, Head: c.HeadDim, Causal: true, Capped: c.AttnCap > 0, Plain: plain}
	if c.MLA != nil {
		a.Head, a.Value = c.MLA.NoPE+c.MLA.Rope, c.MLA.Value
	}
	if windowed {
		a.Window = c.Window
	}
	if cut.Shards() > 1 {
		a.Chunk, a.Ring = cut.Chunk(seq), cut.Ring()
	}
	return a
}

// xlaCombines is the most bytes that XLA:GPU combines into one reduce-scatter by default
// (xla_gpu_reduce_scatter_combine_threshold_bytes).
const xlaCombines = 30 << 20

// Joined gives the compile options that let XLA combine a layer's gradients, layer bytes on a
// device, into one reduce-scatter where they exceed XLA's default: else it issues them all early in
// the backward body, and nothing is left to hide behind its second half (405b on 64 B200: 69 % of
// the communication hidden, 93 % with it; docs/results/overlap.txt). It must not combine what
// tensor parallelism sends in two halves, halves bytes together; zero means there are no halves.
func (s *Selector) Joined(layer, halves int64) map[string]any {
	limit := layer * 6 / 5
	if s.arch == "cpu" || limit <= xlaCombines || halves > 0 && limit >= halves {
		return nil
	}
	return map[string]any{"xla_gpu_reduce_scatter_combine_threshold_bytes": limit}
}

// Gathered adds the option that lets XLA combine most of a layer's weights, layer bytes, into one
// all-gather where groups are so large that small gathers take as long as large ones: 405b over 128
// devices, 88.1 % of the communication hidden, 92.0 % with it; over 8 devices 92.9 % and 89.3 %
// (docs/results/overlap.txt).
func (s *Selector) Gathered(flags map[string]any, layer, devices int64) map[string]any {
	if s.arch == "cpu" || devices < manyDevices {
		return flags
	}
	return with(flags, "xla_gpu_all_gather_combine_threshold_bytes", layer*3/4)
}

// manyDevices lies between 8, where small gathers are hidden, and 128, where they are not.
const manyDevices = 32

// HostMemory is PJRT's name for the host memory that a device reaches by itself; "" where the
// device has no other. A nil selector has none either.
func (s *Selector) HostMemory() string {
	if s == nil || s.arch == "cpu" {
		return ""
	}
	return "pinned_host"
}

// UninitializedStacks reports whether what a forward loop stacks round by round begins as memory
// that holds anything, instead of zeros: XLA:GPU fills a buffer of zeros with a kernel. A step of
// llama3.1-8b in MXFP8 that recomputes nothing fills 2.8 GB, and 49.8 GB otherwise. Other targets
// begin with zeros: XLA:CPU cannot allocate such a buffer, and programs for GPUs without a kernel
// of their own are what replay compares others with.
func (s *Selector) UninitializedStacks() bool { return slices.Contains(blackwell, s.Arch()) }

// Doubled adds the option that has XLA write two rounds of a loop into one, for programs that
// gather each layer's weights a round ahead (FSDP): weights that arrive while the last ones are
// read, and gradients that are computed while the last are sent, then have two buffers by turns,
// where a loop of single rounds copies one into the other. llama3.1-8b in MXFP8 on 8 B200 moves
// 0.4 GB less a layer and takes no more memory. NVFP4, whose loops take most time to compile, stays
// as it is.
func (s *Selector) Doubled(flags map[string]any, ahead bool,
	formats []dtype.Format) map[string]any {
	if !s.Own() || !ahead || !slices.Contains(formats, dtype.MXFP8) ||
		slices.Contains(formats, dtype.NVFP4) {
		return flags
	}
	return with(flags, "xla_gpu_enable_while_loop_unrolling", "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER")
}

// Offloading adds the compile options of programs that offload activations: copies of one layer run
// beside the compute of the next. Without it the schedule waits for them: 405b on 64 B200, 61.1 %
// of the communication hidden, 91.3 % with it (docs/decisions/0016-offload.md).
func (s *Selector) Offloading(flags map[string]any) map[string]any {
	if s.arch == "cpu" {
		return flags
	}
	return with(flags, "xla_gpu_enable_pipelined_host_offloading", true)
}

// Exact adds the compile option of quantized programs: a value that a graph rounds to bf16 is
// rounded, and not kept in f32 where two kernels are fused, or the codes would depend on fusion.
func (s *Selector) Exact(flags map[string]any) map[string]any {
	return with(flags, "xla_allow_excess_precision", false)
}

// with adds an option to a copy of compile options.
func with(flags map[string]any, name string, value any) map[string]any {
	flags = maps.Clone(flags)
	if flags == nil {
		flags = map[string]any{}
	}
	flags[name] = value
	return flags
}
