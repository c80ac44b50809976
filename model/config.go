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
	// WideQKNorm: QKNorm is over all heads of queries together, and all heads of keys.
	WideQKNorm bool
	// ClipQKV bounds queries, keys and values on both sides, after their norms; 0 for none.
	ClipQKV float64

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
	Sinks       bool    // a learned score per head that takes attention from all keys
	LogitCap    float64 // bound of logits by tanh; 0 for none
	ScaledEmbed bool    // embeddings are multiplied by √Hidden
	Tied        bool    // the output layer is the table of embeddings

	BOS int64 // -1 if the model has no BOS token
	EOS []int64

	MoE *MoE // of models with experts
	MLA *MLA // of models with latent attention
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

// An MoE describes a mixture of experts: a router picks TopK of Experts MLPs for every token, whose
// outputs are added up with weights.
type MoE struct {
	Experts, TopK int64
	MLP           int64 // hidden size of one expert
	Shared        int64 // hidden size of all shared experts together; 0: none
	Dense         int64 // number of first layers with a dense MLP
	Bias          bool  // in the experts and the router

	// Score is softmax or sigmoid: how the router's logits become scores, over all experts. The
	// weights of the chosen experts are their scores, divided by their sum if Normalize is set, times
	// Scale. OverChosen says that the choice is by logits and the softmax over the chosen ones alone,
	// which is the same as softmax with Normalize.
	Score                 string
	Normalize, OverChosen bool
	Scale                 float64
	// Groups of experts compete first, if there is more than one: TopGroups of them, by the sum of
	// their two highest scores, may be chosen from.
	Groups, TopGroups int64
	// Correction is a bias of each expert's score that balances load: it counts for the choice, not
	// in the weights, and is not learned by gradient.
	Correction bool
	// AuxLoss and ZLoss are the factors of the load-balancing loss (router_aux_loss_coef) and of the
	// squared log-sum-exp of logits.
	AuxLoss, ZLoss float64
	// Limit bounds the gate from above and up on both sides, and Alpha is the factor inside the
	// sigmoid: experts compute gate·sigmoid(Alpha·gate)·(up + 1). 0 is SiLU without bounds.
	Limit, Alpha float64
}

// Bounds of sizes, so that element counts stay within an int64. The largest
// vocabulary of a known model has 262,208 entries, the longest context 10 million positions.
const (
	maxSize    = 1 << 20
	maxContext = 1 << 30
	maxLayers  = 1 << 12
	// maxExperts bounds the experts of all layers, which have tensors of their own; DeepSeek-V3 has
	// 14,848.
	maxExperts = 1 << 18
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
	case c.WideQKNorm && !c.QKNorm || !(c.ClipQKV >= 0):
		return bad("queries and keys are bounded by %v, with a norm that is not there", c.ClipQKV)
	case c.AttnCap < 0 || c.LogitCap < 0:
		return bad("scores are bounded by %v and logits by %v", c.AttnCap, c.LogitCap)
	case !slices.Contains([]Activation{SiLU, GELU, relu2}, c.Activation):
		return bad("there is no activation %q", c.Activation)
	}
	if c.MLA != nil {
		if err := c.MLA.check(c); err != nil {
			return err
		}
	}
	if c.MoE != nil {
		return c.MoE.check(c.Layers)
	}
	return nil
}

// The scores that a router may have.
const (
	softmax = "softmax"
	sigmoid = "sigmoid"
)

// check reports the first thing that makes experts impossible.
func (m *MoE) check(layers int64) error {
	switch {
	case m.Experts < 1 || m.Experts > maxSize || m.TopK < 1 || m.TopK > m.Experts:
		return bad("a token is routed to %d of %d experts", m.TopK, m.Experts)
	case m.Experts*layers > maxExperts:
		return bad("%d layers of %d experts, more than %d in all", layers, m.Experts, int64(maxExperts))
	case m.MLP < 1 || m.MLP > maxSize || m.Shared < 0 || m.Shared > maxSize:
		return bad("experts have an MLP of %d, and shared ones of %d", m.MLP, m.Shared)
	case m.Dense < 0 || m.Dense >= layers:
		return bad("%d of %d layers have no experts", m.Dense, layers)
	case m.Score != softmax && m.Score != sigmoid:
		return bad("there is no score %q of experts", m.Score)
	case !(m.Scale > 0) || math.IsInf(m.Scale, 0):
		return bad("the weights of experts are multiplied by %v", m.Scale)
	case m.OverChosen && (m.Score != softmax || !m.Normalize || m.Groups > 1 || m.Correction):
		return bad("a softmax over the chosen experts excludes groups and corrections of scores")
	case m.Groups < 0 || m.Groups > 1 && (m.Experts%m.Groups != 0 || m.Experts/m.Groups < 2):
		return bad("%d experts cannot form %d groups", m.Experts, m.Groups)
	case m.Groups > 1 && (m.TopGroups < 1 || m.TopGroups > m.Groups ||
		m.TopK > m.TopGroups*(m.Experts/m.Groups)):
		return bad("%d experts cannot come from %d of %d groups", m.TopK, m.TopGroups, m.Groups)
	case !(m.AuxLoss >= 0) || !(m.ZLoss >= 0) || !(m.Limit >= 0) || !(m.Alpha >= 0):
		return bad("a factor or bound of the experts is below 0")
	}
	return nil
}

// windowed reports whether a layer has a window.
func (c *Config) windowed(layer int64) bool { return c.Windowed != nil && c.Windowed[layer] }

// sparse reports whether a layer has experts.
func (c *Config) sparse(layer int64) bool { return c.MoE != nil && layer >= c.MoE.Dense }

// alike reports whether two layers have the same form.
func (c *Config) alike(a, b int64) bool {
	return c.windowed(a) == c.windowed(b) && c.sparse(a) == c.sparse(b)
}

// A slot is one place in the body of a repeat: layers first, first+step, ... that are alike.
type slot struct {
	name               string // prefix of its parameters
	first, step, count int64
	windowed, experts  bool
}

// A segment is one repeat: its slots run in order, as many times as each of them has layers.
type segment []slot

// segments groups the layers into repeats: a run of leading dense layers, one repeat over the
// shortest turn of windows and whole attention that comes round at least twice, then one for each
// run of equal layers that is left.
func (c *Config) segments() []segment {
	first := int64(0)
	if c.MoE != nil {
		first = c.MoE.Dense
	}
	list := c.runs(nil, 0, first)
	period := c.period(first)
	var turn segment
	for i := range period {
		turn = append(turn, slot{first: first + i, step: period, count: (c.Layers - first) / period,
			windowed: c.windowed(first + i), experts: c.sparse(first + i)})
	}
	if period > 0 {
		list, first = append(list, turn), first+period*((c.Layers-first)/period)
	}
	list = c.runs(list, first, c.Layers)
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

// runs appends a segment for each run of equal layers.
func (c *Config) runs(list []segment, next, layers int64) []segment {
	for next < layers {
		end := next + 1
		for end < layers && c.alike(end, next) {
			end++
		}
		run := slot{first: next, step: 1, count: end - next, windowed: c.windowed(next),
			experts: c.sparse(next)}
		list, next = append(list, segment{run}), end
	}
	return list
}

// longest is the longest turn that one body holds. Gemma 3 has 6; a body that holds more grows the
// program without need.
const longest = 12

// period is the length of the shortest turn of the layers from first on that comes round at least
// twice, or 0.
func (c *Config) period(first int64) int64 {
	for p := int64(1); p <= min(longest, (c.Layers-first)/2); p++ {
		same := true
		for i := first + p; i < c.Layers; i++ {
			same = same && c.alike(i, i-p)
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
