package model

import (
	"bytes"
	"cmp"
	"encoding/json"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/ir"
)

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

// An arch is a model_type that can be read: its class in transformers, which config.json mentions,
// and what is true of all its models and what transformers assumes where a key is missing.
type arch struct {
	class string
	read  func(*reader)
}

// archs are the families that config.json can describe, by model_type.
var archs = map[string]arch{
	"llama":       {"LlamaForCausalLM", (*reader).llama},
	"mistral":     {"MistralForCausalLM", (*reader).mistral},
	"qwen2":       {"Qwen2ForCausalLM", (*reader).qwen2},
	"qwen3":       {"Qwen3ForCausalLM", (*reader).qwen3},
	"gemma2":      {"Gemma2ForCausalLM", (*reader).gemma2},
	"gemma3_text": {"Gemma3ForCausalLM", (*reader).gemma3},
	"phi3":        {"Phi3ForCausalLM", (*reader).phi3},
	"gpt2":        {"GPT2LMHeadModel", (*reader).gpt2},
	"nemotron":    {"NemotronForCausalLM", (*reader).nemotron},
	"mixtral":     {"MixtralForCausalLM", (*reader).mixtral},
	"qwen3_moe":   {"Qwen3MoeForCausalLM", (*reader).qwen3MoE},
	"olmoe":       {"OlmoeForCausalLM", (*reader).olmoe},
	"deepseek_v3": {"DeepseekV3ForCausalLM", (*reader).deepseekV3},
	"gpt_oss":     {"GptOssForCausalLM", (*reader).gptOSS},
}

// Parse reads a Hugging Face config.json.
func Parse(text []byte) (*Config, error) {
	key := ""
	if json.Valid(text) {
		key = twice(json.NewDecoder(bytes.NewReader(text)))
	}
	if key != "" {
		return nil, bad("the key %q stands twice", key).At("config.json").
			Because("which of the two counts is decided otherwise by every program that reads it").
			Try("remove one of them")
	}
	r := &reader{c: &Config{}}
	r.foreign("", json.Unmarshal(text, &r.keys))
	r.c.Arch = get(r, "", "model_type")
	class := get[[]string](r, nil, "architectures")
	own, ok := archs[r.c.Arch]
	if !ok && r.err == nil {
		return nil, r.unknownFamily()
	}
	r.sizes()
	if r.err != nil {
		return nil, r.err
	}
	own.read(r)
	r.quantized()
	if len(class) > 0 && class[0] != own.class {
		r.fail("architectures", "a model of class %s is not supported; of its type, %s is", class[0],
			own.class)
	}
	r.c.BOS, r.c.EOS = get(r, int64(-1), "bos_token_id"), get[ids](r, nil, "eos_token_id")
	if r.err != nil {
		return nil, r.err
	}
	return r.c, r.c.Check()
}

// quantized refuses weights of formats that are not read. FP8 with a scale for each block and MXFP4
// are brought to numbers when they are read.
func (r *reader) quantized() {
	type config struct {
		Method string  `json:"quant_method"`
		Block  []int64 `json:"weight_block_size"`
	}
	q := find[config](r, "quantization_config")
	if q == nil || q.Method == "mxfp4" || q.Method == "fp8" && len(q.Block) == 2 {
		return
	}
	r.fail("quantization_config", "quantized weights cannot be trained; take the original model")
}

// twice finds a key that one object of the next value has two times, at any depth; encoding/json
// takes the last without a word. The text must be JSON.
func twice(dec *json.Decoder) string {
	open, _ := dec.Token()
	if open != json.Delim('{') && open != json.Delim('[') {
		return ""
	}
	seen := map[string]bool{}
	for dec.More() {
		if open == json.Delim('{') {
			token, _ := dec.Token()
			key, _ := token.(string)
			if seen[key] {
				return key
			}
			seen[key] = true
		}
		if key := twice(dec); key != "" {
			return key
		}
	}
	_, _ = dec.Token() // the bracket
	return ""
}

// unknownFamily is the error of a model_type that is not in archs.
func (r *reader) unknownFamily() error {
	names, own := slices.Sorted(maps.Keys(archs)), r.c.Arch
	e := bad("model_type %q is not one that can be built", own).At("key model_type")
	if own == "" {
		e = bad("config.json has no model_type").At("key model_type")
	}
	if find[any](r, "text_config") != nil {
		e.Cause = "the text model is inside text_config, beside parts for other inputs"
	}
	// Mixtral is one letter from Mistral, and another model: a type that is known has no other name.
	for _, p := range Presets() {
		if p.Config != nil && p.Config.Arch == own {
			return e.Because("it is known by its sizes only, for deepwell plan and deepwell dryrun").
				Try("deepwell plan %s --cluster 64xgb200", p.Name)
		}
	}
	return e.Meant(own, names, "did you mean %s?",
		"use a model of one of these types: "+strings.Join(names, ", "))
}

// A reader fills a Config from the keys of config.json that change the mathematics, under all the
// names they have had, and keeps the first error. Keys that nobody asks for are not looked at.
type reader struct {
	keys   map[string]json.RawMessage
	c      *Config
	window *int64 // of layers that have one
	err    error
}

// fail records the first error, at a key of config.json.
func (r *reader) fail(key, format string, args ...any) {
	if r.err == nil {
		r.err = bad(format, args...).At("key %s of config.json", key)
	}
}

// foreign notes that a key, or the whole file for "", is not of the form that it should have.
func (r *reader) foreign(key string, err error) {
	if err == nil || r.err != nil {
		return
	}
	e := bad("config.json is not what Hugging Face writes")
	if key != "" {
		e = e.At("key %s of config.json", key)
	}
	e.Err, e.Cause = err, err.Error()
	r.err = e
}

// find reads the first of some keys that is there and not null; nil if none is.
func find[T any](r *reader, keys ...string) *T {
	for _, key := range keys {
		if text := r.keys[key]; set(text) {
			var v T
			r.foreign(key, json.Unmarshal(text, &v))
			return &v
		}
	}
	return nil
}

// get is find with a default.
func get[T any](r *reader, byDefault T, keys ...string) T {
	return or(find[T](r, keys...), byDefault)
}

// unlessNull is find with a default for keys where null says something else than a missing one.
func unlessNull[T any](r *reader, byDefault T, key string) *T {
	if _, said := r.keys[key]; !said {
		return &byDefault
	}
	return find[T](r, key)
}

// need reads a number that has no default.
func (r *reader) need(keys ...string) int64 {
	v := find[int64](r, keys...)
	if v == nil {
		r.fail(keys[0], "config.json does not say %s", keys[0])
	}
	return or(v, 0)
}

// sizes reads what every family has. Sizes that do not make sense are left to Check.
func (r *reader) sizes() {
	c := r.c
	c.Vocab = r.need("vocab_size")
	c.Hidden = r.need("hidden_size", "n_embd")
	c.Layers = r.need("num_hidden_layers", "n_layer")
	c.Heads = r.need("num_attention_heads", "n_head")
	c.KVHeads = get(r, c.Heads, "num_key_value_heads")
	c.Context = r.need("max_position_embeddings", "n_positions")
	if c.Arch != "gpt2" {
		c.MLP = r.need("intermediate_size")
	}
	if r.err == nil && (c.Heads < 1 || c.Layers < 1 || c.Layers > maxLayers) {
		r.fail("num_hidden_layers", "%d layers of %d heads", c.Layers, c.Heads)
	}
	if r.err != nil {
		return
	}
	if find[int64](r, "head_dim") == nil && c.Hidden%c.Heads != 0 {
		r.fail("num_attention_heads", "a hidden size of %d is not %d heads", c.Hidden, c.Heads)
	}
	r.heads(c.Hidden / c.Heads)
	c.Norm.Eps = get(r, 1e-6, "rms_norm_eps")
	c.Tied = get(r, false, "tie_word_embeddings")
}

// heads reads the size of a head, which all of it turns with.
func (r *reader) heads(byDefault int64) {
	c := r.c
	c.HeadDim = get(r, byDefault, "head_dim")
	c.Rotary, c.AttnScale = c.HeadDim, 1/math.Sqrt(float64(c.HeadDim))
}

// gated is an MLP with a gate, and biases reads attention's biases.
func (r *reader) gated() {
	r.c.Gated, r.c.Activation = true, r.activation("silu", "hidden_act")
}

func (r *reader) biases() {
	r.c.QKVBias = get(r, false, "attention_bias")
	r.c.OutBias = r.c.QKVBias
}

// llama reads Llama 2 and 3: RMSNorm, SwiGLU, rotary embeddings, grouped-query attention.
func (r *reader) llama() {
	r.gated()
	r.biases()
	r.c.MLPBias = get(r, false, "mlp_bias")
	r.rope(10000)
}

// mistral is llama with sliding-window attention in all layers.
func (r *reader) mistral() {
	r.gated()
	r.shared()
	r.rope(10000)
	r.window = unlessNull[int64](r, 4096, "sliding_window")
	r.windows(func(int64) bool { return r.window != nil })
}

// shared asks for the number of key heads in families for which transformers assumes one.
func (r *reader) shared() { r.need("num_key_value_heads") }

// qwen2 is llama with biases of q, k and v, and windows in some layers.
func (r *reader) qwen2() {
	r.gated()
	r.c.QKVBias = true
	r.shared()
	r.rope(10000)
	r.upperWindows()
}

// qwen3 is llama with RMSNorm over each head of queries and keys.
func (r *reader) qwen3() {
	r.gated()
	r.biases()
	r.c.QKNorm = true
	r.heads(128) // transformers' own default
	r.shared()
	r.rope(10000)
	r.upperWindows()
}

// upperWindows gives layers from max_window_layers on a window, where it is used at all.
func (r *reader) upperWindows() {
	if get(r, false, "use_sliding_window") {
		r.window = unlessNull[int64](r, 4096, "sliding_window")
	}
	from := get(r, int64(28), "max_window_layers") // transformers' own default
	r.windows(func(i int64) bool { return r.window != nil && i >= from })
}

// gemma2 has norms before and after attention and MLP, soft caps, and windows in every other layer.
func (r *reader) gemma2() {
	r.gemma()
	r.caps(50, 30)
	r.rope(10000)
	r.windows(func(i int64) bool { return i%2 == 0 })
}

// gemma3 replaces gemma2's caps by norms of queries and keys; five of six layers have a window and
// a rope of their own.
func (r *reader) gemma3() {
	r.gemma()
	r.caps(0, 0)
	r.c.QKNorm = true
	r.rope(1e6)
	every := get(r, int64(6), "sliding_window_pattern", "_sliding_window_pattern")
	if every < 1 {
		r.fail("sliding_window_pattern", "sliding_window_pattern is %d", every)
		return
	}
	r.windows(func(i int64) bool { return (i+1)%every != 0 })
}

// gemma is what Gemma 2 and 3 share. Where keys are missing they take the values of transformers.
func (r *reader) gemma() {
	c := r.c
	c.Gated, c.PostNorms, c.ScaledEmbed, c.Norm.Shift = true, true, true, 1
	c.Activation = r.activation("gelu_pytorch_tanh", "hidden_activation")
	c.Tied = get(r, true, "tie_word_embeddings")
	r.heads(256)
	c.AttnScale = 1 / math.Sqrt(get(r, 256.0, "query_pre_attn_scalar"))
	r.biases()
	if get(r, false, "use_bidirectional_attention") {
		r.fail("use_bidirectional_attention", "attention that sees what follows is not supported")
	}
	r.shared()
	window := r.need("sliding_window")
	r.window = &window
}

// caps reads the bounds of scores and logits; null means no bound.
func (r *reader) caps(scores, logits float64) {
	r.c.AttnCap = or(unlessNull(r, scores, "attn_logit_softcapping"), 0)
	r.c.LogitCap = or(unlessNull(r, logits, "final_logit_softcapping"), 0)
}

// phi3 is llama with fused projections in its checkpoints and, in some sizes, sliding windows.
func (r *reader) phi3() {
	r.gated()
	r.c.Norm.Eps = get(r, 1e-5, "rms_norm_eps")
	r.rope(10000)
	r.window = find[int64](r, "sliding_window")
	r.windows(func(int64) bool { return r.window != nil })
}

// gpt2 has LayerNorm, learned positions, biases everywhere and a tied output layer.
func (r *reader) gpt2() {
	c := r.c
	c.Learned, c.Rotary, c.Tied = true, 0, get(r, true, "tie_word_embeddings")
	c.Norm = Norm{Layer: true, Eps: get(r, 1e-5, "layer_norm_epsilon")}
	c.KVHeads, c.MLP = c.Heads, get(r, 4*c.Hidden, "n_inner")
	c.Activation = r.activation("gelu_new", "activation_function")
	c.QKVBias, c.OutBias, c.MLPBias = true, true, true
	if !get(r, true, "scale_attn_weights") {
		c.AttnScale = 1
	}
	if get(r, false, "scale_attn_by_inverse_layer_idx") {
		r.fail("scale_attn_by_inverse_layer_idx", "scores that depend on the layer are not supported")
	}
	if get(r, false, "add_cross_attention") {
		r.fail("add_cross_attention", "attention to another model is not supported")
	}
}

// nemotron has LayerNorm with weights stored less one, and squared ReLU without a gate.
func (r *reader) nemotron() {
	c := r.c
	c.Norm = Norm{Layer: true, Eps: get(r, 1e-5, "norm_eps"), Shift: 1}
	c.Activation = r.activation("relu2", "hidden_act")
	r.biases()
	c.MLPBias = get(r, false, "mlp_bias")
	r.rope(10000)
}

// activation translates a name.
func (r *reader) activation(byDefault, key string) Activation {
	switch name := get(r, byDefault, key); name {
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
	c, types := r.c, get[[]string](r, nil, "layer_types")
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

	// YaRN's
	Fast      *float64 `json:"beta_fast"`
	Slow      *float64 `json:"beta_slow"`
	Truncate  *bool    `json:"truncate"`
	Magnitude *float64 `json:"attention_factor"`
	MScale    *float64 `json:"mscale"`
	MScaleAll *float64 `json:"mscale_all_dim"`
}

// scaling reads the set of parameters of layers with full attention, for what is no angle.
func (r *reader) scaling() (s scaling) {
	text := r.keys["rope_scaling"]
	if set(r.keys["rope_parameters"]) {
		text = r.keys["rope_parameters"]
	}
	if set(text) {
		r.foreign("rope_scaling", json.Unmarshal(text, &s))
	}
	return s
}

// yarn reads YaRN's parameters as transformers does, with the same defaults.
func (r *reader) yarn(key string, s *scaling, rope *ir.Rope) {
	context := float64(r.c.Context)
	rope.Original = or(s.Original, context)
	if rope.Factor = or(s.Factor, 0); s.Factor == nil && s.Original != nil {
		rope.Factor = context / rope.Original
	}
	rope.Fast, rope.Slow = cmp.Or(or(s.Fast, 0), 32), cmp.Or(or(s.Slow, 0), 1)
	rope.Exact = !or(s.Truncate, true)
	if rope.Original < 1 || !(rope.Fast > rope.Slow && rope.Slow > 0) || rope.Theta == 1 {
		r.fail(key, "yarn angles need original_max_position_embeddings, and a beta_fast that is larger "+
			"than beta_slow")
	}
	scale, all := or(s.MScale, 0), or(s.MScaleAll, 0)
	if scale == 0 || all == 0 {
		scale, all = 1, 0
	}
	rope.Magnitude = or(s.Magnitude, mscale(rope.Factor, scale)/mscale(rope.Factor, all))
	if !(rope.Magnitude > 0) || math.IsInf(rope.Magnitude, 0) {
		r.fail(key+".attention_factor", "the attention factor is %v", rope.Magnitude)
	}
}

// rope reads the rotary angles of both kinds of layers.
func (r *reader) rope(theta float64) {
	c, parameters := r.c, r.keys["rope_parameters"]
	theta = get(r, theta, "rope_theta")
	whole := 1.0
	if c.Arch == "nemotron" {
		whole = 0.5 // transformers' own default
	}
	partial := get(r, whole, "partial_rotary_factor")
	switch byKind := r.byKind(); {
	case byKind != nil: // a set of parameters for each kind of layer
		c.Rope, _ = r.angles("rope_parameters", byKind["full_attention"], theta)
		c.LocalRope, _ = r.angles("rope_parameters", byKind["sliding_attention"], 10000)
	case set(parameters):
		var own *float64
		c.Rope, own = r.angles("rope_parameters", parameters, theta)
		c.LocalRope, partial = c.Rope, or(own, partial)
	default:
		c.Rope, _ = r.angles("rope_scaling", r.keys["rope_scaling"], theta)
		c.LocalRope = c.Rope
	}
	if c.Arch == "gemma3_text" && r.byKind() == nil {
		// Older files scale the angles of whole attention only.
		c.LocalRope = ir.Rope{Theta: get(r, 10000.0, "rope_local_base_freq")}
	}
	c.Rotary = int64(float64(c.HeadDim) * partial)
}

// byKind is rope_parameters where it has a set for each kind of layer, else nil.
func (r *reader) byKind() map[string]json.RawMessage {
	var sets map[string]json.RawMessage
	if json.Unmarshal(r.keys["rope_parameters"], &sets) != nil ||
		!set(sets["full_attention"]) && !set(sets["sliding_attention"]) {
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
	case "yarn":
		if r.yarn(key, &s, &rope); rope.Factor > 0 {
			return rope, s.Partial
		}
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
