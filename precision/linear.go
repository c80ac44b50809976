package precision

import (
	"cmp"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/model"
)

// fits reports whether both dimensions of the weight, and each head, are whole scale blocks.
func fits(l *model.Linear, f dtype.Format) bool {
	return l.In%f.Block() == 0 && l.Out%f.Block() == 0 && l.Head%f.Block() == 0
}

// Share returns the share of each format in the FLOPs of all linear layers, the head included. The
// shares add up to 1; attention's own matmuls are not counted.
func (p *Policy) Share(m model.Model) map[dtype.Format]float64 {
	share, sum := map[dtype.Format]float64{}, 0.0
	c := m.Facts()
	for _, l := range c.Linears(m.Params()) {
		// Each of the three GEMMs has in·out multiply-adds per token.
		work := float64(l.In) * float64(l.Out) * float64(l.Times)
		layers := l.Layers
		if layers == nil {
			layers = []int{-1}
		}
		for _, layer := range layers {
			for _, product := range gemms {
				share[p.Of(layer, l.Name, product)] += work
				sum += work
			}
		}
	}
	for f := range share {
		share[f] /= sum
	}
	return share
}

// Check reports the first reason why a policy does not apply to a model.
func (p *Policy) Check(m model.Model) error {
	c := m.Facts()
	if int64(p.Layers) != c.Layers {
		return misfit("the policy is for %d layers; the model has %d", p.Layers, c.Layers).
			Try(`"layers": %d`, c.Layers)
	}
	have := c.Linears(m.Params())
	var words []string // that rules may use
	for _, l := range have {
		words = append(words, string(l.Tag), l.Name)
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
			case slices.Contains(always, w) && r.Format != dtype.FormatBF16:
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

// divides looks for a GEMM whose dimensions are not whole scale blocks.
func (p *Policy) divides(have []model.Linear) error {
	for _, l := range have {
		for _, layer := range l.Layers {
			for _, product := range gemms {
				if f := p.Of(layer, l.Name, product); !fits(&l, f) {
					return misfit("%s of layer %d is %d × %d, which is not made of blocks of %d", l.Name,
						layer, l.In, l.Out, f.Block()).At("%s of %s", product, l.Name).
						Try("add a rule that keeps %s in bf16", l.Name)
				}
			}
		}
	}
	return nil
}

func misfit(format string, args ...any) *diag.Error {
	return diag.New(diag.PolicyMisfit, format, args...)
}

// compareWords sorts tags first, then linear layers in execution order.
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
