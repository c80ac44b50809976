package price

import (
	"cmp"

	"github.com/deepwell/deepwell/dtype"
)

// A Bridge holds the constants of Megatron-Bridge with Megatron-Core and Transformer Engine.
// Unlike other stacks it was measured on many GPUs and in many formats, so the profile of a run
// follows from these constants and the run: see [Bridge.Profile]. Most are factors on a time, as
// in [Profile].
type Bridge struct {
	BF16, FP8, MXFP8, NVFP4 float64 // GEMMs of linear layers, by format
	B200, B300, GB300       float64 // speed of these GPUs, relative to their sustained rate

	Grouped, GroupedBF16 float64 // grouped GEMMs of experts, on top of the format's factor
	Attention            float64
	Stream, Quantize     float64 // of models without experts
	Routed, RoutedBF16   float64 // the same of models with experts, where kernels are small
	Link, Exchange       float64
	Network              float64
	Data                 float64 // the share of data parallelism's collectives that is waited for
	Optimizer            float64
	Operation, Dense     float64 // seconds of the host for an operation; of models without experts
	Eager                float64 // on top of it, where nothing is captured as a graph
	Fused, Captured      float64 // Routed and Operation where experts are one fused kernel
	Drift                float64 // time from one release to the next
}

// A Run is what a bridge's constants depend on besides the plan.
type Run struct {
	GPU       string
	Precision dtype.Format
	Experts   bool  // the model has experts
	Bias      bool  // and they have biases: activation and casts are kernels of their own
	Head      int64 // elements of a head
	Eager     bool  // nothing is captured as a CUDA graph
	Fused     bool  // activation and casts are fused into the experts' GEMMs
	Overlap   bool  // exchanges of experts run beside computation
}

// MegatronBridge is fitted on all 146 rows of bench/accuracy, releases 26.02 to 26.08.
func MegatronBridge() *Bridge {
	return &Bridge{
		BF16: 1.304, FP8: 0.829, MXFP8: 0.868, NVFP4: 0.828,
		B200: 1.029, B300: 1.028, GB300: 1.063,
		Grouped: 0.861, GroupedBF16: 1.168, Attention: 0.612,
		Stream: 2.189, Quantize: 1.293, Routed: 2.307, RoutedBF16: 2.077,
		Link: 0.245, Exchange: 0.500, Network: 1.018, Data: 0.421, Optimizer: 1.645,
		Operation: 3.41e-5, Dense: 1.299e-4, Eager: 2.062,
		Fused: 0.514, Captured: 0.302, Drift: 0.990,
	}
}

// Effects lists the constants. Sigma over Prior is the deviation of the logarithm.
func (b *Bridge) Effects() []Effect {
	list := []Effect{
		{"bf16", &b.BF16, 1.05, 0.2, "as in Profile"},
		{"fp8", &b.FP8, 1, 0.2, "as in Profile"},
		{"mxfp8", &b.MXFP8, 1.05, 0.2, "scales of blocks are laid out anew for each product"},
		{"nvfp4", &b.NVFP4, 1.05, 0.2, "as mxfp8"},
		{"b200", &b.B200, 1, 0.1, "the ratios in prices.go are of a few pairs of rows"},
		{"b300", &b.B300, 1, 0.1, "as b200"},
		{"gb300", &b.GB300, 1, 0.1, "as b200"},
		{"grouped", &b.Grouped, 1, 0.2, "as in Profile"},
		{"grouped bf16", &b.GroupedBF16, 1, 0.2, "as in Profile"},
		{"attention", &b.Attention, 1.1, 0.3, "cuDNN of 2026 against SimuMax's table of 2025"},
		{"stream", &b.Stream, 1.5, 0.4, "as in Profile"},
		{"quantize", &b.Quantize, 1.5, 0.4, "as in Profile"},
		{"routed", &b.Routed, 3, 0.5, "permutation, padding, activation and two casts, unfused"},
		{"routed bf16", &b.RoutedBF16, 2, 0.5, "the same without casts"},
		{"link", &b.Link, 0.5, 0.5, "half of tp's collectives run beside products"},
		{"exchange", &b.Exchange, 1, 0.3, "as in Profile"},
		{"network", &b.Network, 1.2, 0.3, "as in Profile"},
		{"data", &b.Data, 0.25, 0.5, "overlapped but for the first and last buckets"},
		{"optimizer", &b.Optimizer, 1.5, 0.3, "as in Profile"},
		{"operation", &b.Operation, 3e-5, 0.4, "partial CUDA graphs"},
		{"dense", &b.Dense, 8e-5, 0.4, "no graphs"},
		{"eager", &b.Eager, 1.8, 0.3, "attention and router are half of the operations"},
		{"fused", &b.Fused, 0.4, 0.3, "of about 10 passes over what experts see, 4 are left"},
		{"captured", &b.Captured, 0.3, 0.5, "most of the step is one graph"},
		{"drift", &b.Drift, 1, 0.02, "releases get faster or slower by a few per cent"},
	}
	for i := range list {
		list[i].Sigma *= list[i].Prior
	}
	return list
}

// Profile gives the constants of one run.
func (b *Bridge) Profile(r Run) *Profile {
	made := megatron()
	p := &made
	p.Name, p.Source = "megatron-bridge", "fitted to 146 runs of Megatron-Bridge 26.02 to 26.08"
	p.Ends = true
	faster := map[string]float64{"b200": b.B200, "b300": b.B300, "gb300": b.GB300}[r.GPU]
	slow := 1 / cmp.Or(faster, 1)
	routed := b.Routed
	p.GEMM, p.Grouped = b.MXFP8*slow, b.Grouped
	switch r.Precision {
	case dtype.FormatFP8:
		p.GEMM = b.FP8 * slow
	case dtype.NVFP4:
		p.GEMM = b.NVFP4 * slow
	case dtype.FormatBF16, dtype.FormatF32, "":
		p.GEMM, p.Grouped, routed = b.BF16*slow, b.GroupedBF16, b.RoutedBF16
	}
	p.Attention = b.Attention * slow
	if r.Head > 0 && r.Head < 128 { // exponentials bound it, and there are as many for small heads
		p.Attention *= 128 / float64(r.Head)
	}
	p.Stream, p.Quantize, p.Operation = b.Stream, b.Quantize, b.Dense
	if r.Experts {
		b.experts(p, r, routed)
	}
	p.Link, p.Exchange, p.Network, p.Latency = b.Link, b.Exchange, b.Network, 1
	p.Gradients, p.HideData = 1, 1-min(b.Data, 1)
	p.Optimizer, p.Hosted, p.Step = b.Optimizer, 3, 0.002
	p.remembers(r.Precision)
	p.Error = Error{Dense: 0.039, Expert: 0.061, Model: 0.11, Beyond: 0.10,
		Models: []Known{{"deepseek-v3", 7168, 2048, 256}, {"qwen3-30b-a3b", 2048, 768, 128},
			{"qwen3-235b-a22b", 4096, 1536, 128}, {"gpt-oss-120b", 2880, 2880, 128},
			{"kimi-k2", 7168, 2048, 384}, {"llama3-70b", 8192, 28672, 0},
			{"llama3.1-405b", 16384, 53248, 0}},
		GPUs: []string{"b200", "b300", "gb200", "gb300"}}
	return p
}

// remembers is what the recipes for performance keep in memory, by their source at 067f987
// (perf_recipes/_common.py, training/mixed_precision.py): gradients are summed in bf16; parameters
// are fp8 with current scaling, which Blackwell multiplies in both directions from one form, mxfp8
// in two forms of 1 + 1/32 bytes, and for nvfp4 bf16 with two forms of 1/2 + 1/16.
func (p *Profile) remembers(prec dtype.Format) {
	p.Gradient, p.Permuted, p.Modules = 2, true, true
	switch prec {
	case dtype.FormatFP8:
		p.Weight = 1
	case dtype.MXFP8:
		p.Weight = 2 * (1 + 1.0/32)
	case dtype.NVFP4:
		p.Weight = 2 + 2*(0.5+1.0/16)
	}
}

// For gives the profile of a run. It is p itself, except for stacks that are a bridge's; the
// profile of theirs that comes of it depends on nothing any more, so that its constants can be
// changed.
func (p *Profile) For(r Run) *Profile {
	if p.bridge == nil {
		return p
	}
	r.Fused = p.fused && r.Experts && r.Precision == dtype.MXFP8
	n := p.bridge.Profile(r)
	n.Name, n.Source = p.Name, p.Source
	return n
}

// bridged is a release of Megatron-Bridge under its name. By itself it has the constants of an MoE
// model in MXFP8 on gb200; [Profile.For] returns a run's own.
func bridged(name string, fused bool) Profile {
	b := MegatronBridge()
	p := *b.Profile(Run{GPU: "gb200", Precision: dtype.MXFP8, Experts: true, Fused: fused})
	p.Name, p.bridge, p.fused = name, b, fused
	return p
}

// experts changes what is different in models with experts.
func (b *Bridge) experts(p *Profile, r Run, routed float64) {
	p.Operation, p.Experts = b.Operation, 120
	if r.Fused {
		routed *= b.Fused
		p.Operation *= b.Captured
	}
	if r.Bias {
		routed *= 2 // biases and a clamped activation double the passes between the two products
	}
	p.Stream, p.Quantize = routed, routed
	if r.Eager {
		p.Operation *= b.Eager
	}
	if r.Overlap { // from 0.37 to all of it; delayed weight gradients hide most
		p.HideExpert = 0.8
	}
}
