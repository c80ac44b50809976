package precision

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
)

// Version is that of a policy's JSON form.
const Version = 1

// Formats lists the formats that a policy may name: bf16, then the quantized ones, the one with
// more bits first.
func Formats() []dtype.Format { return slices.Clone(formats) }

var formats = append([]dtype.Format{dtype.FormatBF16}, dtype.Formats()...)

// The products of a linear layer.
const (
	Fprop = "fprop" // x·w
	Dgrad = "dgrad" // dy·wᵀ, the gradient of x
	Wgrad = "wgrad" // xᵀ·dy, the gradient of w
)

var gemms = []string{Fprop, Dgrad, Wgrad}

// A Policy says what the products of a model's linear layers are computed in.
type Policy struct {
	Layers int // of the model
	// Rules apply in order; the last one that names a product decides.
	Rules []Rule
}

// A Rule gives some products of some layers a format.
type Rule struct {
	// Linears are linear layers by the last word of their weight's name (q, k, v, o, gate, up,
	// down), or all of a part of a block by its tag (attn, mlp).
	Linears []string
	// From and To are the layers, counted from 0: From, From+1, ... To-1.
	From, To int
	GEMMs    []string // none means all three
	Format   dtype.Format
	// Fallen marks a rule that a run put on top when it saw trouble, and may take off again.
	Fallen bool
	Why    string // a sentence for the reader
}

// always are the parts of a model that have no choice of a format, and so can only be named to say
// so: TransformerEngine quantizes none of them either (reference/precision.md 1 and 2).
var always = []string{"embed", "norm", "router", "head"}

// tagged says which part of a block a linear layer belongs to. Models with experts or latent
// attention cannot be built yet; they will name their weights so.
var tagged = map[string]string{
	"q": "attn", "k": "attn", "v": "attn", "o": "attn",
	"q_down": "attn", "q_up": "attn", "kv_down": "attn", "kv_up": "attn",
	"gate": "mlp", "up": "mlp", "down": "mlp",
	"shared_gate": "mlp", "shared_up": "mlp", "shared_down": "mlp",
	"expert_gate": "experts", "expert_up": "experts", "expert_down": "experts",
}

// Of gives the format of a product of a layer. The linear is named by its weight, as a graph or a
// checkpoint names it (block.q, block3.q, block.q.7) or by the last word alone. What has no layer,
// as the output layer has none, is in BF16.
func (p *Policy) Of(layer int, linear, product string) dtype.Format {
	if r := p.rule(layer, linear, product); r != nil {
		return r.Format
	}
	return dtype.FormatBF16
}

// rule is the one that decides; nil if there is none.
func (p *Policy) rule(layer int, linear, product string) *Rule {
	linear = last(linear)
	for i := range slices.Backward(p.Rules) {
		if p.Rules[i].covers(layer, linear, product) {
			return &p.Rules[i]
		}
	}
	return nil
}

// A Layer is what the products of one layer are computed in, by linear layer and product; what is
// not there is in BF16.
type Layer map[[2]string]dtype.Format

// Layer gives the formats of a layer.
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

// Of gives the format of a product.
func (l Layer) Of(linear, product string) dtype.Format {
	return cmp.Or(l[[2]string{linear, product}], dtype.FormatBF16)
}

// Has reports whether any product has a format, which is not BF16.
func (l Layer) Has(f dtype.Format) bool {
	return slices.Contains(slices.Collect(maps.Values(l)), f)
}

// Why gives the reason of the rule that decides, or "" where there is none.
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

// last is the word of a parameter's name that says which linear layer of a block it is. The number
// at the end of a name is that of a layer of a stack.
func last(name string) string {
	if i := strings.LastIndexByte(name, '.'); i >= 0 && strings.Trim(name[i+1:], "0123456789") == "" {
		name = name[:i]
	}
	return name[strings.LastIndexByte(name, '.')+1:]
}

// Fall gives a policy in which one product has another format, by a rule on top of the others.
func (p *Policy) Fall(layer int, linear, product string, to dtype.Format, why string) *Policy {
	return p.with(Rule{Linears: []string{last(linear)}, From: layer, To: layer + 1,
		GEMMs: []string{product}, Format: to, Fallen: true, Why: why})
}

// Return gives the policy without the last rule that [Policy.Fall] made for a product, and whether
// there was one.
func (p *Policy) Return(layer int, linear, product string) (*Policy, bool) {
	linear = last(linear)
	for i, r := range slices.Backward(p.Rules) {
		if r.Fallen && r.covers(layer, linear, product) {
			return &Policy{p.Layers, slices.Delete(slices.Clone(p.Rules), i, i+1)}, true
		}
	}
	return p, false
}

// FinalBF16 gives the policy of the last part of a training whose forward products are in BF16. Of
// a 12B model trained in NVFP4 it brought the gap of the loss from 1.5 to 0.5 % when it began at 82
// % of the tokens; the backward products brought nothing (arXiv 2509.25149, appendix D). A policy
// that is so already is given as it is.
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

// blocks lists the tags of blocks that rules name, in their order.
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
	return &Policy{p.Layers, append(slices.Clone(p.Rules), r)}
}

// A Segment is layers From, From+1, ... To-1 whose products have the same formats, so that one loop
// can run them.
type Segment struct{ From, To int }

// Segments cuts the layers where a format changes. Formats of all linear layers that rules can name
// are compared, so a cut does not depend on the model.
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

func (p *Policy) alike(a, b int) bool { return maps.Equal(p.Layer(a), p.Layer(b)) }

// Has reports whether any product has a format.
func (p *Policy) Has(f dtype.Format) bool {
	return p.any(func(_ string, has dtype.Format) bool { return has == f })
}

// any reports whether something is so of any product and its format.
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

// Quantizes reports whether any product has a format with blocks.
func (p *Policy) Quantizes() bool { return slices.ContainsFunc(dtype.Formats(), p.Has) }
