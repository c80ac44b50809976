package model

import (
	"bytes"
	"encoding/json"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/ir"
)

// raw is config.json as Hugging Face writes it: the keys that change the mathematics, under all the
// names they have had. What is not here is not looked at.
type raw struct {
	ModelType     string   `json:"model_type"`
	Architectures []string `json:"architectures"`

	VocabSize    *int64 `json:"vocab_size"`
	HiddenSize   *int64 `json:"hidden_size"`
	Layers       *int64 `json:"num_hidden_layers"`
	Heads        *int64 `json:"num_attention_heads"`
	KVHeads      *int64 `json:"num_key_value_heads"`
	HeadDim      *int64 `json:"head_dim"`
	Intermediate *int64 `json:"intermediate_size"`
	MaxPositions *int64 `json:"max_position_embeddings"`
	NEmbd        *int64 `json:"n_embd"`
	NLayer       *int64 `json:"n_layer"`
	NHead        *int64 `json:"n_head"`
	NInner       *int64 `json:"n_inner"`
	NPositions   *int64 `json:"n_positions"`
	MaxWindow    *int64 `json:"max_window_layers"`
	Pattern      *int64 `json:"sliding_window_pattern"`
	OldPattern   *int64 `json:"_sliding_window_pattern"`

	SlidingWindow    maybe[int64]   `json:"sliding_window"`
	AttnCap          maybe[float64] `json:"attn_logit_softcapping"`
	LogitCap         maybe[float64] `json:"final_logit_softcapping"`
	UseSlidingWindow *bool          `json:"use_sliding_window"`
	LayerTypes       []string       `json:"layer_types"`

	HiddenAct          *string `json:"hidden_act"`
	HiddenActivation   *string `json:"hidden_activation"`
	ActivationFunction *string `json:"activation_function"`

	RMSEps       *float64 `json:"rms_norm_eps"`
	LayerNormEps *float64 `json:"layer_norm_epsilon"`
	NormEps      *float64 `json:"norm_eps"`

	Theta      *float64        `json:"rope_theta"`
	LocalTheta *float64        `json:"rope_local_base_freq"`
	Scaling    json.RawMessage `json:"rope_scaling"`
	Parameters json.RawMessage `json:"rope_parameters"`
	Partial    *float64        `json:"partial_rotary_factor"`

	AttentionBias  *bool    `json:"attention_bias"`
	MLPBias        *bool    `json:"mlp_bias"`
	Tied           *bool    `json:"tie_word_embeddings"`
	QueryScalar    *float64 `json:"query_pre_attn_scalar"`
	BOS            *int64   `json:"bos_token_id"`
	EOS            ids      `json:"eos_token_id"`
	Bidirectional  *bool    `json:"use_bidirectional_attention"`
	ScaleWeights   *bool    `json:"scale_attn_weights"`
	ScaleByLayer   *bool    `json:"scale_attn_by_inverse_layer_idx"`
	CrossAttention *bool    `json:"add_cross_attention"`

	Quantization json.RawMessage `json:"quantization_config"`
	TextConfig   json.RawMessage `json:"text_config"`
}

// maybe is a value where null says something else than a missing key, for which transformers has a
// default.
type maybe[T any] struct {
	said  bool
	value *T
}

// UnmarshalJSON reads the value or null.
func (m *maybe[T]) UnmarshalJSON(b []byte) error {
	m.said = true
	return json.Unmarshal(b, &m.value)
}

// or gives a missing key its default; null is nil.
func (m maybe[T]) or(byDefault T) *T {
	if !m.said {
		return &byDefault
	}
	return m.value
}

// ids is one number or a list of them.
type ids []int64

// UnmarshalJSON reads either form.
func (l *ids) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '[' {
		return json.Unmarshal(b, (*[]int64)(l))
	}
	var one *int64
	if err := json.Unmarshal(b, &one); err != nil {
		return err
	}
	if *l = nil; one != nil {
		*l = ids{*one}
	}
	return nil
}

// families gives, for each model_type that can be read, what is true of all its models and what
// transformers assumes where a key is missing.
func families() map[string]func(*reader) {
	return map[string]func(*reader){
		"llama":       (*reader).llama,
		"mistral":     (*reader).mistral,
		"qwen2":       (*reader).qwen2,
		"qwen3":       (*reader).qwen3,
		"gemma2":      (*reader).gemma2,
		"gemma3_text": (*reader).gemma3,
		"phi3":        (*reader).phi3,
		"gpt2":        (*reader).gpt2,
		"nemotron":    (*reader).nemotron,
	}
}

// Parse reads a Hugging Face config.json.
func Parse(text []byte) (*Config, error) {
	var in raw
	if key := twice(text); key != "" {
		return nil, bad("the key %q stands twice", key).At("config.json").
			Because("which of the two counts is decided otherwise by every program that reads it").
			Try("remove one of them")
	}
	if err := json.Unmarshal(text, &in); err != nil {
		e := bad("config.json is not what Hugging Face writes")
		e.Err, e.Cause = err, err.Error()
		return nil, e
	}
	family, ok := families()[in.ModelType]
	if !ok {
		return nil, unknownFamily(in)
	}
	r := &reader{in: in, c: &Config{Arch: in.ModelType, BOS: -1}}
	r.sizes()
	family(r)
	if set(in.Quantization) {
		r.fail("quantization_config", "quantized weights cannot be trained; take the original model")
	}
	if class := classes()[in.ModelType]; len(in.Architectures) > 0 && in.Architectures[0] != class {
		r.fail("architectures", "a model of class %s is not supported; of its type, %s is",
			in.Architectures[0], class)
	}
	if in.BOS != nil {
		r.c.BOS = *in.BOS
	}
	r.c.EOS = in.EOS
	if r.err != nil {
		return nil, r.err
	}
	return r.c, r.c.Check()
}

// twice finds a key that stands twice in one object of a JSON text; "" if there is none, or if the
// text is not JSON, which who reads it says better.
func twice(text []byte) string {
	type object struct {
		keys  map[string]bool // nil for an array
		value bool            // the next token is a value
	}
	var open []object
	dec := json.NewDecoder(bytes.NewReader(text))
	for {
		token, err := dec.Token()
		if err != nil {
			return ""
		}
		if n := len(open); n > 0 && open[n-1].keys != nil && !open[n-1].value {
			if key, ok := token.(string); ok {
				if open[n-1].keys[key] {
					return key
				}
				open[n-1].keys[key], open[n-1].value = true, true
				continue
			}
		}
		switch token {
		case json.Delim('{'):
			open = append(open, object{keys: map[string]bool{}})
			continue
		case json.Delim('['):
			open = append(open, object{})
			continue
		case json.Delim('}'), json.Delim(']'):
			open = open[:len(open)-1]
		}
		if n := len(open); n > 0 {
			open[n-1].value = false
		}
	}
}

func unknownFamily(in raw) error {
	names := slices.Sorted(maps.Keys(families()))
	e := bad("model_type %q is not one that can be built", in.ModelType).At("key model_type")
	if in.ModelType == "" {
		e = bad("config.json has no model_type").At("key model_type")
	}
	if set(in.TextConfig) {
		e.Cause = "the text model is inside text_config, beside parts for other inputs"
	}
	// Mixtral is one letter from Mistral, and another model: a type that is known has no other name.
	for _, p := range Presets() {
		if p.Config != nil && p.Config.Arch == in.ModelType {
			return e.Because("it is known by its sizes only, for deepwell plan and deepwell dryrun").
				Try("deepwell plan %s --cluster 64xgb200", p.Name)
		}
	}
	return e.Meant(in.ModelType, names, "did you mean %s?",
		"use a model of one of these types: "+strings.Join(names, ", "))
}

// A reader fills a Config and keeps the first error.
type reader struct {
	in     raw
	c      *Config
	window *int64 // of layers that have one
	err    error
}

func (r *reader) fail(key, format string, args ...any) {
	if r.err == nil {
		r.err = bad(format, args...).At("key %s of config.json", key)
	}
}

// need reads a number that has no default.
func (r *reader) need(key string, v ...*int64) int64 {
	for _, p := range v {
		if p != nil {
			return *p
		}
	}
	r.fail(key, "config.json does not say %s", key)
	return 0
}

// sizes reads what every family has. Sizes that do not make sense are left to Check.
func (r *reader) sizes() {
	in, c := r.in, r.c
	c.Vocab = r.need("vocab_size", in.VocabSize)
	c.Hidden = r.need("hidden_size", in.HiddenSize, in.NEmbd)
	c.Layers = r.need("num_hidden_layers", in.Layers, in.NLayer)
	c.Heads = r.need("num_attention_heads", in.Heads, in.NHead)
	c.KVHeads = or(in.KVHeads, c.Heads)
	c.Context = r.need("max_position_embeddings", in.MaxPositions, in.NPositions)
	if r.in.ModelType != "gpt2" {
		c.MLP = r.need("intermediate_size", in.Intermediate)
	}
	if r.err == nil && (c.Heads < 1 || c.Layers < 1 || c.Layers > maxLayers) {
		r.fail("num_hidden_layers", "%d layers of %d heads", c.Layers, c.Heads)
		return
	}
	if c.Heads > 0 {
		c.HeadDim = or(in.HeadDim, c.Hidden/c.Heads)
	}
	if r.err == nil && in.HeadDim == nil && c.Hidden%c.Heads != 0 {
		r.fail("num_attention_heads", "a hidden size of %d is not %d heads", c.Hidden, c.Heads)
	}
	c.Rotary = c.HeadDim
	c.AttnScale = 1 / math.Sqrt(float64(c.HeadDim))
	c.Norm.Eps = or(in.RMSEps, 1e-6)
	c.Tied = or(in.Tied, false)
}

func (r *reader) llama() {
	c := r.c
	c.Gated, c.Activation = true, r.activation("silu", r.in.HiddenAct)
	bias := or(r.in.AttentionBias, false)
	c.QKVBias, c.OutBias, c.MLPBias = bias, bias, or(r.in.MLPBias, false)
	r.rope(10000)
}

func (r *reader) mistral() {
	r.c.Gated, r.c.Activation = true, r.activation("silu", r.in.HiddenAct)
	r.shared()
	r.rope(10000)
	r.window = r.in.SlidingWindow.or(4096)
	r.windows(func(int64) bool { return r.window != nil })
}

// shared asks for the number of key heads in families for which transformers assumes one.
func (r *reader) shared() {
	if r.in.KVHeads == nil {
		r.fail("num_key_value_heads", "config.json does not say num_key_value_heads")
	}
}

func (r *reader) qwen2() {
	r.c.Gated, r.c.Activation = true, r.activation("silu", r.in.HiddenAct)
	r.c.QKVBias = true
	r.shared()
	r.rope(10000)
	r.upperWindows()
}

func (r *reader) qwen3() {
	c := r.c
	c.Gated, c.Activation, c.QKNorm = true, r.activation("silu", r.in.HiddenAct), true
	c.QKVBias = or(r.in.AttentionBias, false)
	c.OutBias = c.QKVBias
	c.HeadDim = or(r.in.HeadDim, 128) // transformers' own default
	c.Rotary, c.AttnScale = c.HeadDim, 1/math.Sqrt(float64(c.HeadDim))
	r.shared()
	r.rope(10000)
	r.upperWindows()
}

// upperWindows gives layers from max_window_layers on a window, where it is used at all.
func (r *reader) upperWindows() {
	if or(r.in.UseSlidingWindow, false) {
		r.window = r.in.SlidingWindow.or(4096)
	}
	from := or(r.in.MaxWindow, 28) // transformers' own default
	r.windows(func(i int64) bool { return r.window != nil && i >= from })
}

func (r *reader) gemma2() {
	r.gemma()
	r.caps(50, 30)
	r.rope(10000)
	r.windows(func(i int64) bool { return i%2 == 0 })
}

func (r *reader) gemma3() {
	r.gemma()
	r.caps(0, 0)
	r.c.QKNorm = true
	r.rope(1e6)
	every := or(r.in.Pattern, or(r.in.OldPattern, 6))
	if every < 1 {
		r.fail("sliding_window_pattern", "sliding_window_pattern is %d", every)
		return
	}
	r.windows(func(i int64) bool { return (i+1)%every != 0 })
}

// gemma is what Gemma 2 and 3 share. Where keys are missing they take the values of transformers.
func (r *reader) gemma() {
	c, in := r.c, r.in
	c.Gated, c.PostNorms, c.ScaledEmbed, c.Norm.Shift = true, true, true, 1
	c.Activation = r.activation("gelu_pytorch_tanh", in.HiddenActivation)
	c.Tied = or(in.Tied, true)
	c.HeadDim = or(in.HeadDim, 256)
	c.Rotary, c.AttnScale = c.HeadDim, 1/math.Sqrt(or(in.QueryScalar, 256))
	bias := or(in.AttentionBias, false)
	c.QKVBias, c.OutBias = bias, bias
	if or(in.Bidirectional, false) {
		r.fail("use_bidirectional_attention", "attention that sees what follows is not supported")
	}
	r.shared()
	if r.window = in.SlidingWindow.value; r.window == nil {
		r.fail("sliding_window", "config.json does not say sliding_window")
	}
}

// caps reads the bounds of scores and logits; null is none.
func (r *reader) caps(scores, logits float64) {
	r.c.AttnCap = or(r.in.AttnCap.or(scores), 0)
	r.c.LogitCap = or(r.in.LogitCap.or(logits), 0)
}

func (r *reader) phi3() {
	c := r.c
	c.Gated, c.Activation = true, r.activation("silu", r.in.HiddenAct)
	c.Norm.Eps = or(r.in.RMSEps, 1e-5)
	r.rope(10000)
	r.window = r.in.SlidingWindow.value
	r.windows(func(int64) bool { return r.window != nil })
}

func (r *reader) gpt2() {
	c, in := r.c, r.in
	c.Learned, c.Rotary, c.Tied = true, 0, or(in.Tied, true)
	c.Norm = Norm{Layer: true, Eps: or(in.LayerNormEps, 1e-5)}
	c.KVHeads, c.MLP = c.Heads, or(in.NInner, 4*c.Hidden)
	c.Activation = r.activation("gelu_new", in.ActivationFunction)
	c.QKVBias, c.OutBias, c.MLPBias = true, true, true
	if !or(in.ScaleWeights, true) {
		c.AttnScale = 1
	}
	if or(in.ScaleByLayer, false) {
		r.fail("scale_attn_by_inverse_layer_idx", "scores that depend on the layer are not supported")
	}
	if or(in.CrossAttention, false) {
		r.fail("add_cross_attention", "attention to another model is not supported")
	}
}

func (r *reader) nemotron() {
	c := r.c
	c.Norm = Norm{Layer: true, Eps: or(r.in.NormEps, 1e-5), Shift: 1}
	c.Activation = r.activation("relu2", r.in.HiddenAct)
	bias := or(r.in.AttentionBias, false)
	c.QKVBias, c.OutBias, c.MLPBias = bias, bias, or(r.in.MLPBias, false)
	if r.in.Partial == nil {
		half := 0.5 // transformers' own default
		r.in.Partial = &half
	}
	r.rope(10000)
}

// activation translates a name.
func (r *reader) activation(byDefault string, v *string) Activation {
	switch name := or(v, byDefault); name {
	case "silu", "swish":
		return SiLU
	case "gelu_new", "gelu_pytorch_tanh", "gelu_fast":
		return GELU
	case "relu2":
		return relu2
	default:
		r.fail("hidden_act", "the activation %q is not supported", name)
		return ""
	}
}

// windows says which layers have one. A list of layer types, which newer files have, comes first.
func (r *reader) windows(rule func(layer int64) bool) {
	c, types := r.c, r.in.LayerTypes
	if r.err != nil {
		return
	}
	if types != nil && int64(len(types)) != c.Layers {
		r.fail("layer_types", "layer_types lists %d of %d layers", len(types), c.Layers)
		return
	}
	windowed := make([]bool, c.Layers)
	for i := range windowed {
		windowed[i] = rule(int64(i))
		if types == nil {
			continue
		}
		switch types[i] {
		case "full_attention":
			windowed[i] = false
		case "sliding_attention":
			windowed[i] = true
		default:
			r.fail("layer_types", "a layer of type %q is not supported", types[i])
		}
	}
	if !slices.Contains(windowed, true) {
		return
	}
	c.Windowed, c.Window = windowed, or(r.window, 0)
}

// scaling is rope_scaling of older files and rope_parameters of newer ones.
type scaling struct {
	Type     *string  `json:"rope_type"`
	OldType  *string  `json:"type"`
	Theta    *float64 `json:"rope_theta"`
	Factor   *float64 `json:"factor"`
	Low      *float64 `json:"low_freq_factor"`
	High     *float64 `json:"high_freq_factor"`
	Original *float64 `json:"original_max_position_embeddings"`
	Partial  *float64 `json:"partial_rotary_factor"`
}

// rope reads the rotary angles of both kinds of layers.
func (r *reader) rope(theta float64) {
	c, in := r.c, r.in
	theta = or(in.Theta, theta)
	partial := or(in.Partial, 1)
	switch byKind := r.byKind(); {
	case byKind != nil: // a set of parameters for each kind of layer
		c.Rope, _ = r.angles("rope_parameters", byKind["full_attention"], theta)
		c.LocalRope, _ = r.angles("rope_parameters", byKind["sliding_attention"], 10000)
	case set(in.Parameters):
		var own *float64
		c.Rope, own = r.angles("rope_parameters", in.Parameters, theta)
		c.LocalRope, partial = c.Rope, or(own, partial)
	default:
		c.Rope, _ = r.angles("rope_scaling", in.Scaling, theta)
		c.LocalRope = c.Rope
	}
	if in.ModelType == "gemma3_text" && r.byKind() == nil {
		// Older files scale the angles of whole attention only.
		c.LocalRope = ir.Rope{Theta: or(in.LocalTheta, 10000)}
	}
	c.Rotary = int64(float64(c.HeadDim) * partial)
}

// byKind is rope_parameters where it has a set for each kind of layer, else nil.
func (r *reader) byKind() map[string]json.RawMessage {
	var sets map[string]json.RawMessage
	if !set(r.in.Parameters) || json.Unmarshal(r.in.Parameters, &sets) != nil {
		return nil
	}
	if !set(sets["full_attention"]) && !set(sets["sliding_attention"]) {
		return nil
	}
	return sets
}

// angles reads one set. theta is what holds where the set does not say.
func (r *reader) angles(key string, text json.RawMessage, theta float64) (ir.Rope, *float64) {
	rope := ir.Rope{Theta: theta}
	if !set(text) {
		return rope, nil
	}
	var s scaling
	if err := json.Unmarshal(text, &s); err != nil {
		r.fail(key, "%s is not understood: %v", key, err)
		return rope, nil
	}
	rope.Theta = or(s.Theta, theta)
	kind := or(s.Type, or(s.OldType, "default"))
	switch kind {
	case "default":
		return rope, s.Partial
	case "linear":
	case "llama3":
		if s.Low == nil || s.High == nil || s.Original == nil || !(*s.High > *s.Low && *s.Low > 0) {
			r.fail(key, "llama3 angles need low_freq_factor, high_freq_factor and "+
				"original_max_position_embeddings, the second larger than the first")
			return rope, nil
		}
		rope.Low, rope.High, rope.Original = *s.Low, *s.High, *s.Original
	default:
		r.fail(key+".rope_type", "angles of type %q are not supported", kind)
		return rope, nil
	}
	if rope.Factor = or(s.Factor, 0); !(rope.Factor > 0) {
		r.fail(key+".factor", "%s angles need a factor above 0", kind)
	}
	return rope, s.Partial
}

// set reports whether a value is there and is not null.
func set(text json.RawMessage) bool {
	return len(text) > 0 && !bytes.Equal(text, []byte("null"))
}

// or is what a pointer leads to, or else a default.
func or[T any](p *T, byDefault T) T {
	if p == nil {
		return byDefault
	}
	return *p
}
