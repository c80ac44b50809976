package model

import (
	"math"
	"slices"
	"strconv"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/ir"
)

// A Config is a decoder-only Transformer as mathematics.
type Config struct {
	// Arch is the family, as Hugging Face calls it in model_type: it fixes the names and the layout
	// of tensors in a checkpoint. Families that cannot be built yet have names of their own.
	Arch string

	// Sizes: tokens in the vocabulary, width of the residual stream, number of layers; query heads and
	// key/value heads (fewer with grouped-query attention); elements of a head, and of the MLP's
	// hidden layer.
	Vocab, Hidden, Layers int64
	Heads, KVHeads        int64
	HeadDim, MLP          int64
	Context               int64 // maximum sequence length; rows of a learned position table

	// Every layer normalizes the input of attention and of the MLP; the model normalizes once more
	// before the output layer.
	Norm      Norm
	PostNorms bool // a second norm after attention and after the MLP, before each sum
	QKNorm    bool // a norm over each head of queries and keys

	// Biases of the query, key and value projections, of attention's output projection, and of the
	// MLP.
	QKVBias, OutBias, MLPBias bool

	Activation Activation
	Gated      bool // act(x·gate) * (x·up), not act(x·up)

	Learned   bool    // positions are a learned table, not angles
	Rope      ir.Rope // of layers with full attention
	LocalRope ir.Rope // of layers with a window
	Rotary    int64   // elements of a head that rotary embeddings rotate; the rest pass unchanged

	// Window is how many keys a query sees in layers with a window, itself included. Windowed says
	// which layers those are; nil means none.
	Window   int64
	Windowed []bool

	AttnScale   float64 // factor of the scores q·k
	AttnCap     float64 // bound of scores by tanh; 0 for none
	LogitCap    float64 // bound of logits by tanh; 0 for none
	ScaledEmbed bool    // embeddings are multiplied by √Hidden
	Tied        bool    // the output layer is the table of embeddings

	BOS int64 // -1 if the model has no BOS token
	EOS []int64

	MoE *MoE // of models with experts, which are counted but not built yet
	MLA *MLA // of models with latent attention, likewise
}

// A Norm is how activations are brought to size.
type Norm struct {
	Layer bool    // mean taken off and bias added, as in GPT; else the root mean square alone
	Eps   float64 // added under the root
	Shift float64 // added to the weight: 1 where checkpoints store the weight less one
}

// An Activation is the function between the linear layers of an MLP.
type Activation string

// The activations. GELU is the form with tanh.
const (
	SiLU  Activation = "silu"
	GELU  Activation = "gelu_tanh"
	relu2 Activation = "relu2"
)

// An MoE describes a mixture of experts: a router picks TopK of Experts MLPs for every token.
// Biases that only balance the router, and are not learned by gradient, are not part of it.
type MoE struct {
	Experts, TopK int64
	MLP           int64 // hidden size of one expert
	Shared        int64 // hidden size of all shared experts together; 0: none
	Dense         int64 // number of first layers with a dense MLP
	Bias          bool  // in the experts and the router
	Sinks         bool  // a learned score per head that takes attention from all keys
}

// An MLA is multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): queries and keys pass
// through projections of rank QRank and KVRank. A head has NoPE elements without positions and Rope
// elements with rotary embeddings, which all key heads share; values have Value elements.
type MLA struct{ QRank, KVRank, NoPE, Rope, Value int64 }

// Bounds of sizes, so that element counts stay within an int64. The largest
// vocabulary of a known model has 262,208 entries, the longest context 10 million positions.
const (
	maxSize    = 1 << 20
	maxContext = 1 << 30
	maxLayers  = 1 << 12
)

// Check reports the first thing that makes a configuration impossible.
func (c *Config) Check() error {
	sizes := []struct {
		name string
		n    int64
	}{
		{"vocabulary", c.Vocab}, {"hidden size", c.Hidden}, {"number of layers", c.Layers},
		{"number of heads", c.Heads}, {"number of KV heads", c.KVHeads}, {"head size", c.HeadDim},
		{"MLP size", c.MLP}, {"size of all heads", c.Heads * min(c.HeadDim, maxSize)},
	}
	for _, s := range sizes {
		if s.n < 1 || s.n > maxSize {
			return bad("the %s is %d", s.name, s.n)
		}
	}
	switch {
	case c.Context < 1 || c.Context > maxContext:
		return bad("the context is %d", c.Context)
	case c.Layers > maxLayers:
		return bad("%d layers, more than %d", c.Layers, maxLayers)
	case c.Heads%c.KVHeads != 0:
		return bad("%d heads cannot share %d KV heads evenly", c.Heads, c.KVHeads)
	case !c.Learned && (c.Rotary < 2 || c.Rotary > c.HeadDim || c.Rotary%2 != 0):
		return bad("%d of %d elements of a head turn with position; it must be an even number of them",
			c.Rotary, c.HeadDim)
	case !c.Learned && !(c.Rope.Theta > 0):
		return bad("the base of the rotary angles is %v", c.Rope.Theta)
	case c.Windowed != nil && int64(len(c.Windowed)) != c.Layers:
		return bad("windows are given for %d of %d layers", len(c.Windowed), c.Layers)
	case slices.Contains(c.Windowed, true) && c.Window < 1:
		return bad("layers have a window of %d", c.Window)
	case !(c.Norm.Eps >= 0) || math.IsInf(c.Norm.Eps, 0):
		return bad("the norm adds %v under its root", c.Norm.Eps)
	case !(c.AttnScale > 0) || math.IsInf(c.AttnScale, 0):
		return bad("scores are multiplied by %v", c.AttnScale)
	case c.AttnCap < 0 || c.LogitCap < 0:
		return bad("scores are bounded by %v and logits by %v", c.AttnCap, c.LogitCap)
	case !slices.Contains([]Activation{SiLU, GELU, relu2}, c.Activation):
		return bad("there is no activation %q", c.Activation)
	}
	return nil
}

// windowed reports whether a layer has a window.
func (c *Config) windowed(layer int64) bool { return c.Windowed != nil && c.Windowed[layer] }

// A slot is one place in the body of a repeat: layers first, first+step, ... that are alike.
type slot struct {
	name               string // prefix of its parameters
	first, step, count int64
	windowed           bool
}

// A segment is one repeat: its slots run in order, as many times as each of them has layers.
type segment []slot

// segments groups the layers into repeats: one over the shortest turn of windows and whole
// attention that comes round at least twice, then one for each run of equal layers that is left.
func (c *Config) segments() []segment {
	period := c.period()
	var turn segment
	for i := range period {
		turn = append(turn, slot{first: i, step: period, count: c.Layers / period,
			windowed: c.windowed(i)})
	}
	var list []segment
	next := int64(0)
	if period > 0 {
		list, next = append(list, turn), period*(c.Layers/period)
	}
	for next < c.Layers {
		end := next + 1
		for end < c.Layers && c.windowed(end) == c.windowed(next) {
			end++
		}
		run := slot{first: next, step: 1, count: end - next, windowed: c.windowed(next)}
		list, next = append(list, segment{run}), end
	}
	number := 0
	for _, s := range list {
		for i := range s {
			s[i].name = "block"
			if len(list) > 1 || len(s) > 1 {
				s[i].name += strconv.Itoa(number)
			}
			number++
		}
	}
	return list
}

// longest is the longest turn that one body holds. Gemma 3 has 6; a body that holds more grows the
// program without need.
const longest = 12

// period is the length of the shortest turn that comes round at least twice, or 0.
func (c *Config) period() int64 {
	for p := int64(1); p <= min(longest, c.Layers/2); p++ {
		same := true
		for i := p; i < c.Layers; i++ {
			same = same && c.windowed(i) == c.windowed(i-p)
		}
		if same {
			return p
		}
	}
	return 0
}

// bad is the error of a configuration that cannot be built.
func bad(format string, args ...any) *diag.Error {
	return diag.New(diag.BadInput, format, args...).Try("correct config.json, or take another model")
}
