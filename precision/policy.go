package precision

import (
	"cmp"
	"maps"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/model"
)

// Version is the version of a policy's JSON form.
const Version = 1

// Formats lists the formats that a policy may name: bf16, then the quantized ones, the one with
// more bits first.
func Formats() []dtype.Format { return slices.Clone(formats) }

var formats = append([]dtype.Format{dtype.FormatBF16}, dtype.Formats()...)

// The GEMMs of a linear layer y = x·w.
const (
	Fprop = "fprop" // x·w
	Dgrad = "dgrad" // dy·wᵀ, the gradient of x
	Wgrad = "wgrad" // xᵀ·dy, the gradient of w
)

var gemms = []string{Fprop, Dgrad, Wgrad}

// A Policy assigns a format to every GEMM of a model's linear layers.
type Policy struct {
	Layers int // number of layers of the model
	// Rules apply in order; the last one that covers a GEMM decides.
	Rules []Rule
	// Payload is the format of rows on their way to experts: BF16, or "" for MXFP8 where the experts'
	// GEMMs that read them are in MXFP8, and else BF16.
	Payload dtype.Format
}

// A Rule assigns a format to some GEMMs of some layers.
type Rule struct {
	// Linears are linear layers by the last component of their weight's name (q, k, v, o, gate, up,
	// down), or all of attention or MLP by tag (attn, mlp).
	Linears []string
	// From and To are a half-open range of layers, counted from 0.
	From, To int
	GEMMs    []string // empty means all three
	Format   dtype.Format
	// Fallen marks a rule that the precision monitor added during a run, and may remove.
	Fallen bool
	Why    string // one sentence
}

// always are parts of a model that are never quantized. Rules may name them only with bf16.
// TransformerEngine quantizes none of them either.
var always = []string{"embed", "norm", "router", "head"}

// tagged maps linear layers to recompute tags.
var tagged = map[string]string{
	"q": "attn", "k": "attn", "v": "attn", "o": "attn",
	"q_down": "attn", "q_up": "attn", "kv_down": "attn", "kv_up": "attn",
	"gate": "mlp", "up": "mlp", "down": "mlp",
	"shared_gate": "mlp", "shared_up": "mlp", "shared_down": "mlp",
	"expert_gate": "experts", "expert_up": "experts", "expert_down": "experts",
}

// Of returns the format of a GEMM of a layer. linear is a weight's name in a graph or checkpoint
// (block.q, block3.q, block.q.7), or its last component. Anything outside of layers, such as the
// head, is in BF16.
func (p *Policy) Of(layer int, linear, product string) dtype.Format {
	if r := p.rule(layer, linear, product); r != nil {
		return r.Format
	}
	return dtype.FormatBF16
}

// rule returns the deciding rule, or nil.
func (p *Policy) rule(layer int, linear, product string) *Rule {
	linear = model.LinearName(linear)
	for i := range slices.Backward(p.Rules) {
		if p.Rules[i].covers(layer, linear, product) {
			return &p.Rules[i]
		}
	}
	return nil
}

// A Layer is the formats of one layer's GEMMs, keyed by {linear, GEMM}; a missing key means BF16.
type Layer map[[2]string]dtype.Format

// Layer returns the formats of a layer.
func (p *Policy) Layer(layer int) Layer {
	l := Layer{}
	for linear := range tagged {
		for _, product := range gemms {
			if f := p.Of(layer, linear, product); f != dtype.FormatBF16 {
				l[[2]string{linear, product}] = f
			}
		}
	}
	return l
}

// Of returns the format of a GEMM.
func (l Layer) Of(linear, product string) dtype.Format {
	return cmp.Or(l[[2]string{linear, product}], dtype.FormatBF16)
}

// Has reports whether any GEMM has the (quantized) format f.
func (l Layer) Has(f dtype.Format) bool {
	return slices.Contains(slices.Collect(maps.Values(l)), f)
}

// Why returns the deciding rule's reason, or "".
func (p *Policy) Why(layer int, linear, product string) string {
	if r := p.rule(layer, linear, product); r != nil {
		return r.Why
	}
	return ""
}

func (r *Rule) covers(layer int, linear, product string) bool {
	return r.From <= layer && layer < r.To &&
		(len(r.GEMMs) == 0 || slices.Contains(r.GEMMs, product)) &&
		(slices.Contains(r.Linears, linear) || slices.Contains(r.Linears, tagged[linear]))
}

// Fall returns a policy in which one GEMM has another format, by a rule on top of the others.
func (p *Policy) Fall(layer int, linear, product string, to dtype.Format, why string) *Policy {
	return p.with(Rule{Linears: []string{model.LinearName(linear)}, From: layer, To: layer + 1,
		GEMMs: []string{product}, Format: to, Fallen: true, Why: why})
}

// Return undoes the last [Policy.Fall] for a GEMM, and reports whether there was one.
func (p *Policy) Return(layer int, linear, product string) (*Policy, bool) {
	linear = model.LinearName(linear)
	for i, r := range slices.Backward(p.Rules) {
		if r.Fallen && r.covers(layer, linear, product) {
			return p.of(slices.Delete(slices.Clone(p.Rules), i, i+1)), true
		}
	}
	return p, false
}

// FinalBF16 returns the policy of the final phase of training, with fprop in BF16. For a 12B model
// trained in NVFP4 it reduced the loss gap from 1.5 to 0.5 % when it began at 82 % of the tokens;
// backward GEMMs in BF16 gained nothing (arXiv 2509.25149, appendix D). A policy with fprop in
// BF16 is returned unchanged.
func (p *Policy) FinalBF16() *Policy {
	quantized := func(product string, f dtype.Format) bool {
		return product == Fprop && f != dtype.FormatBF16
	}
	if !p.any(quantized) {
		return p
	}
	return p.with(Rule{Linears: p.blocks(), To: p.Layers, GEMMs: []string{Fprop},
		Format: dtype.FormatBF16,
		Why: "The last part of the training runs forward in BF16, which wins back most of what" +
			" narrow numbers cost (arXiv 2509.25149, appendix D)."})
}

// blocks lists the tags that rules name.
func (p *Policy) blocks() (list []string) {
	for _, tag := range []string{"attn", "mlp", "experts"} {
		named := func(w string) bool { return w == tag || tagged[w] == tag }
		if slices.ContainsFunc(p.Rules, func(r Rule) bool {
			return slices.ContainsFunc(r.Linears, named)
		}) {
			list = append(list, tag)
		}
	}
	return list
}

func (p *Policy) with(r Rule) *Policy {
	return p.of(append(slices.Clone(p.Rules), r))
}

// of is the policy with other rules.
func (p *Policy) of(rules []Rule) *Policy { return &Policy{p.Layers, rules, p.Payload} }

// A Segment is a half-open range of layers with equal formats, which one loop can run.
type Segment struct{ From, To int }

// Segments splits the layers where a format changes. It compares all linear layers that rules can
// name, so the result does not depend on the model.
func (p *Policy) Segments() []Segment {
	var list []Segment
	for layer := range p.Layers {
		if n := len(list); n > 0 && p.alike(list[n-1].From, layer) {
			list[n-1].To = layer + 1
			continue
		}
		list = append(list, Segment{layer, layer + 1})
	}
	return list
}

func (p *Policy) alike(a, b int) bool {
	between := func(r Rule) bool {
		return (r.From <= a && a < r.To) != (r.From <= b && b < r.To)
	}
	return !slices.ContainsFunc(p.Rules, between) || maps.Equal(p.Layer(a), p.Layer(b))
}

// Has reports whether any GEMM has format f.
func (p *Policy) Has(f dtype.Format) bool {
	return p.any(func(_ string, has dtype.Format) bool { return has == f })
}

// any reports whether a predicate holds for any GEMM and its format.
func (p *Policy) any(is func(product string, f dtype.Format) bool) bool {
	for _, s := range p.Segments() {
		for linear := range tagged {
			for _, product := range gemms {
				if is(product, p.Of(s.From, linear, product)) {
					return true
				}
			}
		}
	}
	return false
}

// Quantizes reports whether any GEMM is quantized.
func (p *Policy) Quantizes() bool { return slices.ContainsFunc(dtype.Formats(), p.Has) }
