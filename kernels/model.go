package kernels

import (
	"fmt"
	"maps"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
)

// maxUnrolled bounds the layers that are written one after another on a CPU, since the time to
// compile grows with them. It is a choice, not a measured optimum: deeper models are rare here.
const maxUnrolled = 32

// Unroll says whether a model's layers are written one after another, each with weights of its own,
// or as a loop over stacks, and why.
func (s *Selector) Unroll(layers int64) (bool, string) {
	switch {
	case s.arch != "cpu":
		return false, "a loop compiles as fast for 126 layers as for 4"
	case layers > maxUnrolled:
		return false, fmt.Sprintf("%d layers take long to compile one by one; up to %d are unrolled",
			layers, maxUnrolled)
	}
	return true, "the gradient of a slice of a stack is written into the whole stack"
}

// Unrolled is Unroll under a plan, which may ask for a loop; nil is one device.
func (s *Selector) Unrolled(layers int64, how *plan.Plan, recompute bool) (bool, string) {
	unrolled, why := s.Unroll(layers)
	switch {
	case how != nil && (how.PP.Size > 1 || how.TP.Overlap):
		return false, "stages and halves of a batch are made of a loop's body"
	case unrolled && how.Offloads(plan.Activations):
		return false, "what a loop stacks up goes to the host"
	case recompute:
		return false, "outside a loop XLA finds what is computed again, and keeps it"
	}
	return unrolled, why
}

// Types says what a model that computes in a precision keeps its values in, and what its products
// take: a GPU reads and writes bf16 everywhere, while a CPU only multiplies in it, since it has no
// other arithmetic of that type.
func (s *Selector) Types(precision dtype.DType) (elem, products dtype.DType) {
	if s.arch == "cpu" && precision != dtype.F32 {
		return dtype.F32, precision
	}
	return precision, precision
}

// Documents says whether the documents that share a row are kept apart, and why or why not.
func (s *Selector) Documents() (bool, string) {
	if s.arch == "cpu" {
		return true, "attention compares the numbers of documents"
	}
	return false, "no document mask on GPUs: documents packed into one sequence attend to one " +
		"another, since XLA's call of cuDNN takes no mask of documents"
}

// Planned is the attention of a model's layers, with a window or without, that computes in a type
// and whose sequences a plan cuts so. It says what package spmd writes into the graph of the plan,
// so that what is chosen can be priced before there is one.
func Planned(c model.Facts, windowed bool, elem dtype.DType, cut plan.CP) Attention {
	a := Attention{Elem: elem, Head: c.HeadDim, Causal: true, Capped: c.AttnCap > 0}
	if c.MLA != nil {
		a.Head = c.MLA.NoPE + c.MLA.Rope
	}
	if windowed {
		a.Window = c.Window
	}
	if cut.Size > 1 {
		a.Part, a.Ring, a.Balanced = true, cut.Kind == "ring", cut.Balance
	}
	return a
}

// xlaJoins is the most that XLA:GPU joins into one reduce-scatter by default
// (reference/overlap.md, 4h).
const xlaJoins = 30 << 20

// Joined gives the compile options that let XLA join the gradients of a layer, so many bytes on a
// device, into one reduce-scatter, where they are more than it joins by default: else it issues
// them all early in the backward body, and nothing is left to hide behind its second half (405b on
// 64 B200: 69 % of the communication hidden, 93 % with it; docs/results/overlap.txt). It must not
// join what tensor parallelism hands on in two halves, handed bytes together; 0 is none.
func (s *Selector) Joined(layer, handed int64) map[string]any {
	limit := layer * 6 / 5
	if s.arch == "cpu" || limit <= xlaJoins || handed > 0 && limit >= handed {
		return nil
	}
	return map[string]any{"xla_gpu_reduce_scatter_combine_threshold_bytes": limit}
}

// Gathered adds the option that lets XLA join most of the weights of a layer, so many bytes, into
// one gather, where so many devices meet that small gathers take as long as large ones: 405b over
// 128 devices, 88.1 % of the communication hidden, 92.0 % with it; over 8 devices 92.9 % and 89.3 %
// (docs/results/overlap.txt).
func (s *Selector) Gathered(flags map[string]any, layer, devices int64) map[string]any {
	if s.arch == "cpu" || devices < manyDevices {
		return flags
	}
	return with(flags, "xla_gpu_all_gather_combine_threshold_bytes", layer*3/4)
}

// manyDevices lies between 8, where small gathers are hidden, and 128, where they are not.
const manyDevices = 32

// HostMemory is what PJRT calls the memory of the host that a device reaches by itself; "" where
// the device has no other. A program without kernels, which every target runs, has none either.
func (s *Selector) HostMemory() string {
	if s == nil || s.arch == "cpu" {
		return ""
	}
	return "pinned_host"
}

// Offloading adds the compile options of programs that keep activations on the host: copies of one
// layer run beside the compute of the next. Without it the schedule waits for them: 405b on 64
// B200, 61.1 % of the communication hidden, 91.3 % with it (docs/decisions/0016-offload.md).
func (s *Selector) Offloading(flags map[string]any) map[string]any {
	if s.arch == "cpu" {
		return flags
	}
	return with(flags, "xla_gpu_enable_pipelined_host_offloading", true)
}

// Exact adds the compile option of programs that write numbers of few bits: a value that a graph
// rounds to bf16 is rounded, and not kept in f32 where two kernels are joined, or the bytes would
// depend on what was joined.
func (s *Selector) Exact(flags map[string]any) map[string]any {
	return with(flags, "xla_allow_excess_precision", false)
}

// with gives compile options and one more.
func with(flags map[string]any, name string, value any) map[string]any {
	flags = maps.Clone(flags)
	if flags == nil {
		flags = map[string]any{}
	}
	flags[name] = value
	return flags
}
