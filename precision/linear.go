package precision

import (
	"cmp"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
)

// A linear is the linear layers of a model that share a name and a shape.
type linear struct {
	name    string
	tag     ir.Tag
	in, out int64
	head    int64   // elements of a head, where one side is made of heads
	times   float64 // that a token passes through it in a layer: the experts it is sent to
	layers  []int   // none where it stands outside of layers
}

// linears lists those of a model, with the output layer and the router.
func linears(m model.Model) []linear {
	c := m.Facts()
	if c.MoE != nil || c.MLA != nil {
		return uncommon(&c)
	}
	var list []linear
	for _, p := range m.Params() {
		if !p.Stacked() || len(p.Shape) != 2 {
			continue
		}
		l := linear{name: last(p.Name), tag: p.Tag, out: p.To - p.From, in: p.Shape[1-p.Axis], times: 1}
		if p.Tag == ir.Attn {
			l.head = c.HeadDim
		}
		for i := range p.Dims[0].Size {
			l.layers = append(l.layers, int(p.First+i*p.Step))
		}
		list = append(list, l)
	}
	return append(list, output(&c))
}

func output(c *model.Facts) linear {
	return linear{name: "head", tag: ir.Head, in: c.Hidden, out: c.Vocab, times: 1}
}

// uncommon lists those of models that have no list of parameters yet: [model.Config.Count] counts
// the same ones.
func uncommon(c *model.Facts) []linear {
	moe := model.MoE{Dense: c.Layers}
	if c.MoE != nil {
		moe = *c.MoE
	}
	every, sparse := span(0, int(c.Layers)), span(int(moe.Dense), int(c.Layers))
	q, kv := c.Heads*c.HeadDim, c.KVHeads*c.HeadDim
	attn := []linear{{name: "q", in: c.Hidden, out: q}, {name: "k", in: c.Hidden, out: kv},
		{name: "v", in: c.Hidden, out: kv}, {name: "o", in: q, out: c.Hidden}}
	if a := c.MLA; a != nil {
		attn = []linear{{name: "q_down", in: c.Hidden, out: a.QRank},
			{name: "q_up", in: a.QRank, out: c.Heads * (a.NoPE + a.Rope)},
			{name: "kv_down", in: c.Hidden, out: a.KVRank + a.Rope},
			{name: "kv_up", in: a.KVRank, out: c.Heads * (a.NoPE + a.Value)},
			{name: "o", in: c.Heads * a.Value, out: c.Hidden}}
	}
	var list []linear
	for _, l := range attn {
		l.tag, l.times, l.layers = ir.Attn, 1, every
		list = append(list, l)
	}
	list = append(list, gated(c, ir.MLP, "", c.MLP, 1, span(0, int(moe.Dense)))...)
	list = append(list, gated(c, ir.MLP, "shared_", moe.Shared, 1, sparse)...)
	list = append(list, gated(c, ir.Experts, "expert_", moe.MLP, float64(moe.TopK), sparse)...)
	if len(sparse) > 0 {
		list = append(list, linear{"router", ir.Router, c.Hidden, moe.Experts, 0, 1, sparse})
	}
	return append(list, output(c))
}

// gated lists the linear layers of an MLP.
func gated(c *model.Facts, tag ir.Tag, prefix string, size int64, times float64,
	layers []int) (list []linear) {
	if size == 0 || len(layers) == 0 {
		return nil
	}
	if c.Gated {
		list = append(list, linear{prefix + "gate", tag, c.Hidden, size, 0, times, layers})
	}
	return append(list, linear{prefix + "up", tag, c.Hidden, size, 0, times, layers},
		linear{prefix + "down", tag, size, c.Hidden, 0, times, layers})
}

func span(from, to int) (list []int) {
	for i := from; i < to; i++ {
		list = append(list, i)
	}
	return list
}

// fits reports whether both sides of the weight, and each head, come out even in blocks.
func (l *linear) fits(f Format) bool {
	return l.in%f.Block() == 0 && l.out%f.Block() == 0 && l.head%f.Block() == 0
}

// Share gives the part of the work of all linear layers, the output layer among them, that is done
// in each format. The parts add up to 1; the products of attention are not counted.
func (p *Policy) Share(m model.Model) map[Format]float64 {
	share, sum := map[Format]float64{}, 0.0
	for _, l := range linears(m) {
		// Each of the three products multiplies and adds in·out times for a token.
		work := float64(l.in) * float64(l.out) * l.times
		layers := l.layers
		if layers == nil {
			layers = []int{-1}
		}
		for _, layer := range layers {
			for _, product := range products {
				share[p.Of(layer, l.name, product)] += work
				sum += work
			}
		}
	}
	for f := range share {
		share[f] /= sum
	}
	return share
}

// Check reports the first thing that keeps a policy from being one of a model.
func (p *Policy) Check(m model.Model) error {
	c := m.Facts()
	if int64(p.Layers) != c.Layers {
		return misfit("the policy is for %d layers; the model has %d", p.Layers, c.Layers).
			Try(`"layers": %d`, c.Layers)
	}
	have := linears(m)
	var words []string // that rules may use
	for _, l := range have {
		words = append(words, string(l.tag), l.name)
	}
	words = append(words, "embed", "norm")
	slices.Sort(words)
	words = slices.Compact(words)
	for i, r := range p.Rules {
		for _, w := range r.Linears {
			switch {
			case !slices.Contains(words, w):
				return misfit("the model has no linear layer or part %q", w).At("rule %d", i+1).
					Meant(w, words, "did you mean %q?", "it has "+strings.Join(words, ", "))
			case slices.Contains(always, w) && r.Format != BF16:
				return misfit("%s cannot be in %s", w, r.Format).At("rule %d", i+1).
					Because("only linear layers of blocks are put into blocks with scales").
					Try(`"format": "bf16", or leave %q out`, w)
			}
		}
		if r.From < 0 || r.From >= r.To || r.To > p.Layers {
			return misfit("the layers %d to %d are not in the model", r.From, r.To-1).
				At("rule %d", i+1).Try("its layers are 0-%d", p.Layers-1)
		}
	}
	return p.divides(have)
}

// divides looks for a product whose blocks do not come out even.
func (p *Policy) divides(have []linear) error {
	for _, l := range have {
		for _, layer := range l.layers {
			for _, product := range products {
				if f := p.Of(layer, l.name, product); !l.fits(f) {
					return misfit("%s of layer %d is %d × %d, which is not made of blocks of %d", l.name,
						layer, l.in, l.out, f.Block()).At("%s of %s", product, l.name).
						Try("add a rule that keeps %s in bf16", l.name)
				}
			}
		}
	}
	return nil
}

func misfit(format string, args ...any) *diag.Error {
	return diag.New(diag.PolicyMisfit, format, args...)
}

// compareWords puts tags first, then linear layers in the order in which a block runs them.
func compareWords(a, b string) int {
	return cmp.Or(cmp.Compare(rank(a), rank(b)), strings.Compare(a, b))
}

func rank(w string) int {
	order := []string{"embed", "norm", "attn", "mlp", "experts", "router", "head",
		"q", "k", "v", "q_down", "q_up", "kv_down", "kv_up", "o", "gate", "up", "down",
		"shared_gate", "shared_up", "shared_down", "expert_gate", "expert_up", "expert_down"}
	if i := slices.Index(order, w); i >= 0 {
		return i
	}
	return len(order)
}
