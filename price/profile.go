package price

import (
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
)

// A Profile is the constants of a software stack at one release. Most are factors on times that
// follow from tables and the GPU's data sheet, so that 1 means "as measured in isolation";
// [Profile.Effects] lists them.
type Profile struct {
	Name   string
	Source string // where its constants come from

	GEMM      float64 // GEMMs of linear layers, at the GPU's sustained rate
	Grouped   float64 // grouped GEMMs of experts, on top of GEMM
	Attention float64 // attention, at the rates of the table
	Stream    float64 // memory-bound kernels, at the GPU's bandwidth
	Quantize  float64 // the same for casts to quantized formats
	Link      float64 // bytes of collectives inside an NVLink domain
	Exchange  float64 // bytes of all-to-all inside a domain
	Latency   float64 // the time that a collective takes without bytes
	Network   float64 // bytes of collectives between domains
	Spread    float64 // seconds that one more member of a group between domains costs
	Gradients float64 // collectives of data parallelism, once a step, on top of Link and Network
	Optimizer float64 // bytes of the optimizer's step
	Operation float64 // seconds of the host for each operation that it starts
	Experts   float64 // operations that the host starts for a layer of experts
	Step      float64 // seconds of the host for each step

	// Shares from 0 to 1 of communication that runs beside computation.
	HideTensor, HideContext, HideExpert, HideData float64

	// Hosted is the power in which device and host time are added: a device that is behind hides
	// the host, and the other way round.
	Hosted float64
	// Regather means that with sequence parallelism backward gathers inputs once more for wgrad, as
	// Megatron does, which saves only a shard of them.
	Regather bool
	// Saved is the share of the activations of the closed form that the stack keeps, and Dummy
	// whether it has a buffer for each shape of weight that only stands for a gradient (Transformer
	// Engine with gradients that are added up in one place).
	Saved float64
	Dummy bool
	// Transient is how many tensors of a microbatch's activations are alive while one layer is
	// computed, and Logits how many times bf16's bytes the head's result takes.
	Transient, Logits float64
	Vocab             int // the vocabulary is padded to a multiple of it, times tp
	// Sharded says that context-parallel ranks share the optimizer's state, as with Megatron's
	// distributed optimizer.
	Sharded bool
	// Reserve is the bytes of libraries, communicators and workspaces.
	Reserve float64
	// Weight and Gradient are the bytes of a parameter in all forms that the model computes with, and
	// of its gradient, where the stack does not do as the plan says; 0 means that it does.
	Weight, Gradient float64
	// QuantizedInputs says that inputs of linear layers are kept in the type they are multiplied in,
	// as Transformer Engine does, and Permuted that tokens are sorted as they are exchanged, so that
	// they are kept once and not before and after.
	QuantizedInputs, Permuted bool
	// Modules means that recomputing attn and experts covers only Megatron's modules of that kind
	// (recompute_modules): MLA's up-projections or core attention, and the activation between the
	// experts' GEMMs. With norms and the other half recomputed too, it is the whole layer.
	Modules bool

	// Ends says that the embedding and the loss count as a layer each where stages are laid out, as
	// in Megatron-Bridge's recipes: the first and the last stage have a layer less, perhaps none.
	Ends bool

	// Error is how sure the profile is, by what it has seen.
	Error Error

	bridge *Bridge // where the constants follow from it: see [Profile.For]
	fused  bool    // experts are fused wherever the stack can
}

// An Error is a profile's uncertainty: standard deviations of ln(measured/estimated), whose
// squares add up. A model and a GPU that the constants were fitted on have the noise of a single
// run alone; anything new adds its own term. Each is chosen so that 1.645 times it covers 90 % of
// the rows left out of a fit (docs/accuracy.md).
type Error struct {
	Dense  float64 // a row of a model without experts
	Expert float64 // a row of a model with experts
	// Model is added for a model that is not in Models, from fits that leave out one model each.
	Model float64
	// Beyond is added for a GPU, a format or a release that the profile was not fitted on. The rows
	// cannot determine it; it is a prior.
	Beyond float64

	Models     []Known
	GPUs       []string
	Precisions []dtype.Format // empty means all
}

// A Known is a model that constants were fitted on. How many layers a run had does not matter.
type Known struct {
	Name    string // of the preset
	Hidden  int64
	MLP     int64 // of a layer, or of one of its experts
	Experts int64
}

// An Effect is one row of the table of a profile's constants.
type Effect struct {
	Name  string
	Value *float64
	Prior float64 // what it would be without a measurement of a whole step
	Sigma float64 // how far from that it may lie
	Why   string
}

// Effects lists the constants that can be fitted, one for each effect.
func (p *Profile) Effects() []Effect {
	return []Effect{
		{"product", &p.GEMM, 1.05, 0.06, "GPUs slow down under load for longer than a benchmark"},
		{"grouped", &p.Grouped, 1, 0.1, "experts are smaller and uneven"},
		{"attention", &p.Attention, 1.05, 0.1, "as product"},
		{"stream", &p.Stream, 1.4, 0.4, "more kernels than the closed form counts"},
		{"quantize", &p.Quantize, 1.4, 0.4, "as stream"},
		{"link", &p.Link, 1, 0.2, "collectives beside other work"},
		{"exchange", &p.Exchange, 1, 0.2, "all-to-all waits for the last"},
		{"latency", &p.Latency, 1, 0.5, "launch and wait"},
		{"network", &p.Network, 1.2, 0.3, "network interfaces reach 80 % of their rate"},
		{"spread", &p.Spread, 1e-6, 1e-6, "rings and trees over hosts"},
		{"gradients", &p.Gradients, 1, 0.1, "large buckets"},
		{"optimizer", &p.Optimizer, 1.4, 0.4, "as stream"},
		{"operation", &p.Operation, 1e-4, 3e-5, "one call of a framework in Python"},
		{"experts", &p.Experts, 90, 45, "three times the kernels of a dense layer"},
		{"step", &p.Step, 0.002, 0.01, "logs, norms, the loop"},
	}
}

// Overlaps reports whether the stack runs data-parallel collectives beside computation.
func (p *Profile) Overlaps() bool { return p.HideData > 0 }

// Find gives a profile by its name.
func Find(name string) (*Profile, error) {
	var names []string
	for _, p := range Profiles() {
		if p.Name == name {
			return &p, nil
		}
		names = append(names, p.Name)
	}
	return nil, diag.New(diag.BadInput, "there is no profile %q", name).
		Meant(name, names, "take %q", "take one of "+strings.Join(names, ", "))
}

// Clone gives a copy whose constants can be changed.
func (p *Profile) Clone() *Profile {
	n := *p
	n.Error.GPUs = slices.Clone(p.Error.GPUs)
	n.Error.Models = slices.Clone(p.Error.Models)
	n.Error.Precisions = slices.Clone(p.Error.Precisions)
	return &n
}
