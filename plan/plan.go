package plan

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/strictjson"
	"github.com/deepwell/deepwell/ir"
)

// Version is the version of the JSON form.
const Version = 1

// The names of the axes, from the one whose devices may be farthest apart to the one that
// communicates most. [Plan.Order] may differ.
const (
	PipelineAxis = "pp"
	DataAxis     = "dp"
	FSDPAxis     = "fsdp"
	ContextAxis  = "cp"
	ExpertAxis   = "ep"
	TensorAxis   = "tp"
)

// A Plan describes how a model is trained on a cluster.
type Plan struct {
	Version int    `json:"version"`
	Model   string `json:"model"`   // a model source, as deepwell capture accepts it
	Cluster string `json:"cluster"` // such as 64xgb200

	Seq          int64 `json:"seq"`          // tokens of a sequence
	Batch        int64 `json:"batch"`        // sequences of a step (global batch)
	Microbatches int64 `json:"microbatches"` // microbatches of a step

	DP   int64 `json:"dp,omitzero"` // replicas, each with its own sequences
	FSDP FSDP  `json:"fsdp,omitzero"`
	TP   TP    `json:"tp,omitzero"`
	CP   CP    `json:"cp,omitzero"`
	PP   PP    `json:"pp,omitzero"`
	EP   int64 `json:"ep,omitzero"` // expert parallelism, and data parallelism of the rest
	// EPKind is how rows go to experts: by an all-to-all (a2a, also if it is empty), or every device
	// of ep gathers all tokens and takes what its experts need (gather), which sends less where ep is
	// smaller than the number of experts of a token.
	EPKind string `json:"ep_kind,omitempty"`
	// EPOverlap runs two half batches in one layer body, so that one computes while the other is on
	// its way to experts or back.
	EPOverlap bool `json:"ep_overlap,omitempty"`
	// EPSave saves the rows that an all-to-all brings to experts, in the bytes that they are sent in,
	// where Recompute would have them sent again.
	EPSave bool `json:"ep_save,omitempty"`
	// Slots is how many rows an expert has room for, in parts of its mean load: a step is computed
	// with the first number, and again with the next if an expert has more. Memory is planned for the
	// last. Empty means 1.5 and 4, and room for all tokens on CPU devices.
	Slots []float64 `json:"slots,omitempty"`

	// Recompute lists the parts of a block that the backward pass recomputes (activation
	// checkpointing). The file may also say "none" or "full".
	Recompute []ir.Tag `json:"recompute,omitempty"`
	// Offload lists what is stored in host memory: activations, optimizer.
	Offload []string `json:"offload,omitempty"`
	Types   Types    `json:"types"`
	// Precision is the format of linear-layer GEMMs: bf16, fp8, mxfp8 or nvfp4. Empty means the type
	// of the parameters.
	Precision string `json:"precision,omitempty"`
	// Attention is "plain", or empty: the fastest kernel that the GPU has for it.
	Attention string `json:"attention,omitempty"`
	// Documents is how many documents a sequence packs at most, which do not attend to one another.
	// 0 leaves it to the data. More of them need more calls of attention, not more memory.
	Documents int64 `json:"documents,omitzero"`
	// Compile is "ahead", or empty: a run compiles its programs for the GPUs that it finds.
	Compile string `json:"compile,omitempty"`
	// Order lists the axes from the outermost, whose devices are farthest apart, to the innermost,
	// whose devices are neighbours on NVLink.
	Order []string `json:"order,omitempty"`
}

// Halved reports whether layers work on two half batches at once, to overlap the collectives of one
// with the other: [TP].Overlap or EPOverlap, where there is something to overlap.
func (p *Plan) Halved() bool {
	return p.TP.Overlap && p.Size(TensorAxis) > 1 || p.EPOverlap && p.Size(ExpertAxis) > 1
}

// GathersTokens reports whether devices of ep gather all tokens, and sum up what experts give.
func (p *Plan) GathersTokens() bool { return p.EPKind == epGather && p.Size(ExpertAxis) > 1 }

// ExpertSlots are the plan's slots. The default is 1.5 and 4: trained routers stay within 1.3 times
// the mean, and early in a run four times is common. On CPU devices, also of a nil plan, there is
// room for every token behind these.
func (p *Plan) ExpertSlots() []float64 {
	switch {
	case p != nil && len(p.Slots) > 0:
		return p.Slots
	case p == nil || strings.HasSuffix(p.Cluster, cpuDevices):
		return []float64{1.5, 4, everyToken}
	}
	return []float64{1.5, 4}
}

// everyToken is a number of slots that no load needs: models take as many as there are tokens.
const everyToken = 1 << 20

// cpuDevices ends the names of clusters of CPU devices.
const cpuDevices = "xcpu"

// FSDP shards the batch and, with it, optimizer state (Zero 1), gradients (2) and parameters (3;
// Rajbhandari et al., 2020). Gather is the lifetime of gathered parameters: [GatherLayer],
// [GatherMicrobatch] or [GatherStep]. With Zero 1 and 2 it is the step.
type FSDP struct {
	Size   int64  `json:"size"`
	Zero   int    `json:"zero"`
	Gather string `json:"gather"`
}

// TP shards heads, the MLP and the vocabulary. Sequence also shards the sequence between them:
// sequence parallelism (Korthikanti et al., 2022). Overlap runs two half batches in one layer
// body, so that one computes while the other communicates.
type TP struct {
	Size     int64 `json:"size"`
	Sequence bool  `json:"sequence,omitempty"`
	Overlap  bool  `json:"overlap,omitempty"`
}

// CP shards the sequence. For attention, keys and values are all-gathered (gather) or passed around
// (ring), or an all-to-all gives each device whole sequences of some heads (a2a). With a2a+ring,
// groups of Inner devices that follow each other exchange heads, and rings connect the groups.
type CP struct {
	Size int64  `json:"size"`
	Kind string `json:"kind"`
	// Inner is the number of devices that exchange heads, with a2a+ring only.
	Inner int64 `json:"inner,omitzero"`
	// Balance gives each device a chunk from the front and one from the back of the sequence, so that
	// a causal mask leaves all devices the same work.
	Balance bool `json:"balance,omitempty"`
}

// PP splits the layers into Size × Virtual stages, which run in the order of a schedule. Virtual 0
// means the schedule's minimum.
type PP struct {
	Size     int64  `json:"size"`
	Virtual  int64  `json:"virtual,omitzero"`
	Schedule string `json:"schedule"`
}

// Types are the element types of parameters in the model, of accumulated gradients, and of
// gradients in collectives.
type Types struct {
	Params      dtype.DType `json:"params"`
	Grads       dtype.DType `json:"grads"`
	Collectives dtype.DType `json:"collectives"`
}

// How long a gathered parameter stays on a device: in PyTorch's FSDP, layer is
// reshard_after_forward=True and microbatch is False.
const (
	GatherLayer      = "layer"      // gathered for each layer's forward and backward pass
	GatherMicrobatch = "microbatch" // from a microbatch's forward pass to its backward pass
	GatherStep       = "step"       // once a step
)

// plainAttention is attention by GEMMs and a softmax that are written out, which needs no cuDNN and
// stores all scores.
const plainAttention = "plain"

// epGather is the kind of expert parallelism in which devices gather tokens.
const epGather = "gather"

// compileAhead has a run take programs that were compiled without a GPU.
const compileAhead = "ahead"

// hierarchical is the kind of context parallelism with an all-to-all inside and a ring outside, and
// innerAxis the axis of the all-to-all in its mesh.
const (
	hierarchical = "a2a+ring"
	innerAxis    = "cp_inner"
)

// The words of a plan.
var (
	attentions = []string{plainAttention}
	compiles   = []string{compileAhead}
	gathers    = []string{GatherLayer, GatherMicrobatch, GatherStep}
	contexts   = []string{"gather", "ring", "a2a", hierarchical}
	exchanges  = []string{"a2a", epGather}
	offloads   = []string{Activations, OptimizerState}
	precisions = formatNames(dtype.FormatBF16, dtype.FormatFP8)
	recompute  = []string{"embed", "norm", "attn", "mlp", "router", "experts", "head"}
	order      = []string{PipelineAxis, DataAxis, FSDPAxis, ContextAxis, ExpertAxis, TensorAxis}
)

// formatNames lists some formats, and then all quantized ones.
func formatNames(first ...dtype.Format) []string {
	all := append(first, dtype.Formats()...)
	return lists.Map(all, func(f dtype.Format) string { return string(f) })
}

// What a plan can offload to host memory: activations saved by layers, from forward to backward;
// and optimizer state, between updates.
const (
	Activations    = "activations"
	OptimizerState = "optimizer"
)

// PlainAttention reports whether the plan asks for attention without a kernel of its own.
func (p *Plan) PlainAttention() bool { return p != nil && p.Attention == plainAttention }

// Context is how the plan shards sequences; a nil plan does not.
func (p *Plan) Context() CP {
	if p == nil {
		return CP{}
	}
	return p.CP
}

// Ahead reports whether a run takes the programs that `deepwell compile` made of the plan, if the
// cache has them.
func (p *Plan) Ahead() bool { return p != nil && p.Compile == compileAhead }

// Offloads reports whether something is offloaded to host memory; a nil plan offloads nothing.
func (p *Plan) Offloads(what string) bool {
	return p != nil && slices.Contains(p.Offload, what)
}

// IsZero leaves out of the JSON form what [Plan.Marshal] has emptied.
func (a FSDP) IsZero() bool { return a == FSDP{} }

// IsZero leaves an axis of one device out of the JSON form.
func (a TP) IsZero() bool { return a.Size <= 1 }

// IsZero leaves an axis of one device out of the JSON form.
func (a CP) IsZero() bool { return a.Size <= 1 }

// IsZero leaves an axis of one device out of the JSON form.
func (a PP) IsZero() bool { return a.Size <= 1 }

// Default returns a plan for one device, which a document overrides.
func Default() *Plan {
	return &Plan{Version: Version, Cluster: "1xcpu", Seq: 1, Batch: 1, Microbatches: 1, DP: 1, EP: 1,
		FSDP: FSDP{1, 3, "layer"}, TP: TP{Size: 1}, CP: CP{Size: 1, Kind: "gather"}, PP: PP{1, 0, "1f1b"},
		Types: Types{dtype.F32, dtype.F32, dtype.F32}, Order: slices.Clone(order)}
}

// Size is the number of devices along an axis.
func (p *Plan) Size(axis string) int64 {
	n := int64(1)
	switch axis {
	case PipelineAxis:
		n = p.PP.Size
	case DataAxis:
		n = p.DP
	case FSDPAxis:
		n = p.FSDP.Size
	case ContextAxis:
		n = p.CP.Size
	case ExpertAxis:
		n = p.EP
	case TensorAxis:
		n = p.TP.Size
	}
	return max(n, 1)
}

// Mesh lists the axes within a stage that have more than one device, the outermost first. An
// all-to-all within a ring has an axis of its own, inside cp.
func (p *Plan) Mesh() []ir.Axis {
	var mesh []ir.Axis
	for _, name := range p.axes() {
		n := p.Size(name)
		if n == 1 || name == PipelineAxis {
			continue
		}
		if name == ContextAxis && p.CP.AllToAllAxis() == innerAxis {
			mesh = append(mesh, ir.Axis{Name: name, Size: p.CP.Shards()},
				ir.Axis{Name: innerAxis, Size: p.CP.AllToAll()})
			continue
		}
		mesh = append(mesh, ir.Axis{Name: name, Size: n})
	}
	return mesh
}

// Label writes the axes with more than one device, and the ZeRO stage with fsdp, as in
// "fsdp 32 zero 2, tp 2"; "" for one device.
func (p *Plan) Label() string {
	var words []string
	for _, axis := range labelled {
		n := p.Size(axis)
		if n == 1 {
			continue
		}
		word := fmt.Sprintf("%s %d", axis, n)
		if axis == FSDPAxis {
			word += " zero " + p.FSDP.ZeRO()
		}
		words = append(words, word)
	}
	return strings.Join(words, ", ")
}

// labelled are the axes in the order in which people name them.
var labelled = []string{DataAxis, FSDPAxis, TensorAxis, ContextAxis, ExpertAxis, PipelineAxis}

// ZeRO writes the ZeRO stage, 1, 2 or 3, and after a slash how long ZeRO 3 keeps gathered
// parameters if that is longer than a layer: 3/microbatch or 3/step. It is "-" without shards.
func (a FSDP) ZeRO() string {
	switch {
	case a.Size <= 1:
		return "-"
	case a.Zero == 3 && a.Gather == GatherMicrobatch:
		return "3/microbatch"
	case a.Zero == 3 && a.Gather == GatherStep:
		return "3/step"
	}
	return strconv.Itoa(a.Zero)
}

// Devices is the number of devices of the plan, the product of all axes; [math.MaxInt64] if the
// product is larger.
func (p *Plan) Devices() int64 {
	all := int64(1)
	for _, axis := range order {
		n := p.Size(axis)
		if all > math.MaxInt64/n {
			return math.MaxInt64
		}
		all *= n
	}
	return all
}

// SplitAcrossNVLink describes, one sentence each, the axes whose groups would fit in an NVLink
// domain of that many devices, but of which some span two domains, because the domain is not a
// multiple of a group's span.
func (p *Plan) SplitAcrossNVLink(domain int64) []string {
	var list []string
	span := int64(1)
	for _, axis := range slices.Backward(p.axes()) {
		n := p.Size(axis)
		span *= n
		if n > 1 && axis != PipelineAxis && span < domain && domain%span != 0 &&
			p.Devices() > domain {
			list = append(list, fmt.Sprintf("groups of %s %d straddle NVLink domains of %d devices, "+
				"and all wait for the network; %s would fit", axis, n, domain,
				fits(domain/(span/n), n)))
		}
	}
	slices.Reverse(list)
	return list
}

// Crosses finds the innermost axis with a group that is in one NVLink domain if domains are as
// large as domain and follow each other, and in several by actual, which names the domain of every
// device. It returns the devices of that group, or "" if all groups stay in theirs.
func (p *Plan) Crosses(domain int64, actual []string) (axis string, group []int64) {
	span := int64(1)
	for _, axis := range slices.Backward(p.axes()) {
		n, stride := p.Size(axis), span
		span *= n
		if n < 2 || axis == PipelineAxis {
			continue
		}
		for first := range p.Devices() {
			last := first + (n-1)*stride
			if first/stride%n != 0 || first/domain != last/domain {
				continue
			}
			group = group[:0]
			several := false
			for d := first; d <= last; d += stride {
				group = append(group, d)
				several = several || actual[d] != actual[first]
			}
			if several {
				return axis, group
			}
		}
	}
	return "", nil
}

// fits lists the divisors of a size that are near another one, for messages.
func fits(size, near int64) string {
	below, above := int64(1), size
	for d := int64(1); d <= size; d++ {
		if size%d == 0 && d <= near {
			below = d
		} else if size%d == 0 {
			above = min(above, d)
		}
	}
	return fmt.Sprintf("%d or %d", below, above)
}

// MicrobatchSequences is the number of sequences of a microbatch, over all data-parallel ranks.
func (p *Plan) MicrobatchSequences() int64 { return p.Batch / max(p.Microbatches, 1) }

func (p *Plan) axes() []string {
	if len(p.Order) == 0 {
		return order
	}
	return p.Order
}

// Marshal writes the plan in the form that Parse reads. Equal plans have equal text. Values that
// Parse would refuse are written as they are: see [Plan.Check].
func (p *Plan) Marshal() ([]byte, error) {
	q := *p
	q.Version = cmp.Or(q.Version, Version) // a plan made in code may leave it out
	if slices.Contains(gathers, q.FSDP.Gather) && (q.FSDP.Zero == 1 || q.FSDP.Zero == 2) {
		q.FSDP.Gather = GatherStep // parameters are whole for the step
	}
	// The ZeRO stage of one device says how ep shards what is not experts.
	if q.FSDP.Size <= 1 && (q.EP <= 1 || q.FSDP.Zero == 3 && q.FSDP.Gather == GatherLayer) {
		q.FSDP = FSDP{}
	}
	if q.DP == 1 {
		q.DP = 0
	}
	if q.EP == 1 {
		q.EP = 0
	}
	if slices.Equal(q.Order, order) {
		q.Order = nil
	}
	return strictjson.Encode(q)
}

// String is the JSON form.
func (p *Plan) String() string {
	b, err := p.Marshal()
	if err != nil {
		return err.Error()
	}
	return string(b)
}
