package price

import (
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
)

// A Precision is what the products of linear layers are computed in.
type Precision string

// The precisions.
const (
	F32   Precision = "f32"
	BF16  Precision = "bf16"
	FP8   Precision = "fp8" // a scale for each tensor
	MXFP8 Precision = "mxfp8"
	NVFP4 Precision = "nvfp4"
)

// A Profile is a software stack at one release, as numbers. Most of them multiply a price that the
// tables and the card give, so that 1 means "as measured alone"; [Profile.Effects] lists them.
type Profile struct {
	Name   string
	Source string // where its constants come from

	Product   float64 // products of linear layers, at the rate that a card sustains
	Grouped   float64 // products of experts, on top of Product
	Attention float64 // attention, at the rates of the table
	Stream    float64 // bytes through memory, at the card's bandwidth
	Quantize  float64 // the same for casts to narrow types
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
	// Regather says that with a cut sequence the backward pass gathers inputs once more for the
	// gradients of weights, as Megatron does, which keeps a piece of them.
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

	// Error is the standard deviation of the logarithm of measured over estimated time, by what the
	// estimate rests on: seen is a kind of model and card that the constants were fitted on.
	Error Error

	bridge *Bridge // where the constants follow from it: see [Profile.For]
	fused  bool    // experts are fused wherever the stack can
}

// An Error is how sure a profile is. The interval of an estimate is made of these.
type Error struct {
	Dense  float64 // models without experts
	Expert float64 // models with experts
	Beyond float64 // added where the card or the precision is none that the profile was fitted on
	Cards  []string
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
		{"product", &p.Product, 1.05, 0.06, "cards slow down under load for longer than a benchmark"},
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

// Find gives a profile by its name.
func Find(name string) (*Profile, error) {
	var names []string
	for _, p := range Profiles() {
		if p.Name == name {
			return &p, nil
		}
		names = append(names, p.Name)
	}
	e := diag.New(diag.BadInput, "there is no profile %q", name).
		Try("take one of %s", strings.Join(names, ", "))
	if near := diag.Nearest(name, names); near != "" {
		return nil, e.Try("take %q", near)
	}
	return nil, e
}

// Clone gives a copy whose constants can be changed.
func (p *Profile) Clone() *Profile {
	n := *p
	n.Error.Cards = slices.Clone(p.Error.Cards)
	return &n
}
