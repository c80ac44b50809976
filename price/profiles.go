package price

import (
	"github.com/deepwell/deepwell/dtype"
)

// Own is the name of the profile of our own programs.
const Own = "deepwell"

// Profiles lists the stacks that are known.
func Profiles() []Profile {
	return []Profile{deepwell(), megatron(), megatron2022(),
		bridged("megatron-26.04", false), bridged("megatron-26.08", true), torchtitan(), maxtext()}
}

// prior is a stack of which nothing was measured.
func prior(name string) Profile {
	p := Profile{Name: name, Source: "priors, no run of it was fitted", Hosted: 4, Saved: 1,
		Transient: 3, Logits: 1, Vocab: 1}
	for _, e := range p.Effects() {
		*e.Value = e.Prior
	}
	p.Error = Error{Dense: 0.06, Expert: 0.10, Beyond: 0.10}
	return p
}

// megatron is Megatron-LM with Transformer Engine 2.11 and no overlap at all. TestShippedConstants
// of bench/accuracy holds the constants to the fit.
func megatron() Profile {
	p := prior("megatron")
	p.Source = "fitted to 43 runs of SimuMax v1.2 (2026) on B200"
	p.GEMM, p.Grouped, p.Attention, p.Stream = 1.067, 1.091, 1.049, 1.486
	p.Link, p.Exchange, p.Latency, p.Gradients = 0.9478, 1.129, 0.8456, 1.026
	p.Optimizer, p.Operation, p.Experts = 1.592, 9.204e-5, 118.7
	p.Dummy, p.Regather, p.Sharded, p.Vocab = true, true, true, 128
	p.Saved, p.Transient, p.QuantizedInputs = 0.9906, 3.313, true
	p.Modules = true // none of the 43 runs recomputes anything
	p.Error = Error{Dense: 0.0251, Expert: 0.0251, Model: 0.0351, Beyond: 0.10,
		Models: []Known{{"llama3-70b", 8192, 28672, 0}, {"deepseek-v2", 5120, 1536, 160},
			{"deepseek-v3", 7168, 2048, 256}, {"llama3.1-405b", 16384, 53248, 0}},
		GPUs: []string{"b200"}, Precisions: []dtype.Format{dtype.FormatBF16, ""}}
	return p
}

// megatron2022 is Megatron-LM before FlashAttention and Transformer Engine.
func megatron2022() Profile {
	p := prior("megatron-2022")
	p.Source = "fitted to 8 runs of arXiv 2205.05198 on A100"
	p.GEMM, p.Stream, p.Link, p.Network = 1.064, 1.063, 1.060, 1.224
	p.Operation = 1.110e-4
	p.Regather, p.Sharded, p.Vocab = true, true, 128
	p.Error = Error{Dense: 0.0407, Expert: 0.10, Model: 0.0564, Beyond: 0.10,
		Models: []Known{{"megatron-22b", 6144, 24576, 0}, {"gpt3-175b", 12288, 49152, 0},
			{"turing-530b", 20480, 81920, 0}, {"megatron-1t", 25600, 102400, 0}},
		GPUs: []string{"a100"}, Precisions: []dtype.Format{dtype.FormatBF16, ""}}
	return p
}

// deepwell is our own engine. A step is a few programs that XLA compiled: an operation costs the
// host what starting a kernel does; in a compiled step of FSDP and tp, 87 % of the time of
// collectives was hidden.
func deepwell() Profile {
	p := prior(Own)
	p.Source = "priors and compiled programs, no run on a GPU yet"
	p.Operation, p.Step = 4e-6, 0.001
	p.HideData, p.HideTensor = 0.87, 0.5
	p.Quantize = 1 // the bytes of programs were counted: see Prices.Blocks
	p.Logits = 2   // kept in f32 for the loss
	p.Regather = true
	return p
}

// torchtitan compiles blocks with torch.compile, so that the host starts fewer operations, and
// prefetches the parameters of FSDP.
func torchtitan() Profile {
	p := prior("torchtitan")
	p.Operation, p.HideData, p.Logits = 4e-5, 0.87, 2
	return p
}

// maxtext runs on the same compiler as our own engine.
func maxtext() Profile {
	p := deepwell()
	p.Name, p.Source = "maxtext", prior("").Source
	p.Quantize, p.Regather = prior("").Quantize, false
	return p
}
