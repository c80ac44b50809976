package precision

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/model"
)

// Default returns the policy that a format's name stands for: bf16, mxfp8 or nvfp4. The reasons of
// its rules are part of the text whose hash identifies the policy of a saved run, so they must not
// change: a run could not be resumed.
func Default(m model.Model, precision string) (*Policy, error) {
	f := dtype.Format(precision)
	if !slices.Contains(formats, f) {
		return nil, diag.New(diag.PolicyValue, "there is no policy for %q", precision).
			Meant(precision, names(), "did you mean %q?", "take one of "+strings.Join(names(), ", "))
	}
	c := m.Facts()
	p := &Policy{Layers: int(c.Layers)}
	have := c.Linears(m.Params())
	p.keep(have)
	switch f {
	case dtype.FormatBF16:
		p.all(have, dtype.FormatBF16, "Nothing is rounded to blocks with scales.")
		return p, nil
	case dtype.MXFP8:
		// The first and the last block are no exception. Megatron can keep them in BF16, but all
		// blocks in MXFP8 cost 0.02 % of the loss at test size (docs/precision.md), while
		// two of 32 blocks in BF16 are 6 % of the work at half the speed. A person adds a rule.
		p.all(have, dtype.MXFP8,
			"Every linear layer of every block: what the recipe keeps at the model's two"+
				" ends is the embedding and the head.")
	case dtype.NVFP4:
		p.all(have, dtype.NVFP4,
			"NVIDIA's recipe: 16x16 tiles of weights, Hadamard transforms before and"+
				" stochastic rounding of gradients (arXiv 2509.25149).")
		p.keepSensitive(&c)
	}
	p.uneven(have, f)
	return p, p.Check(m)
}

func names() []string {
	return lists.Map(formats, func(f dtype.Format) string { return string(f) })
}

// keep adds the rule for what stays in BF16 whatever the format. Reasons are part of the digest by
// which a resumed run knows its policy (train.New), so their words do not change.
func (p *Policy) keep(have []model.Linear) {
	words := []string{"embed", "norm"}
	for _, l := range have {
		if slices.Contains(always, l.Name) {
			words = append(words, l.Name)
		}
	}
	p.add(words, 0, dtype.FormatBF16,
		"Embeddings, norms, router and head, as the products of attention itself,"+
			" are never put into blocks with scales: both recipes of NVIDIA keep them.")
}

func (p *Policy) all(have []model.Linear, f dtype.Format, why string) {
	var tags []string
	for _, l := range have {
		if tag := tagged[l.Name]; tag != "" && !slices.Contains(tags, tag) {
			tags = append(tags, tag)
		}
	}
	p.add(tags, 0, f, why)
}

// add appends a rule for all layers from from on.
func (p *Policy) add(words []string, from int, f dtype.Format, why string) {
	words = slices.Clone(words)
	lists.Sort(words, compareWords)
	p.Rules = append(p.Rules, Rule{Linears: words, From: from, To: p.Layers, Format: f, Why: why})
}

// keepSensitive keeps in BF16 what four bits do not carry.
//
// The last blocks: 15 % of them, rounded up, which is 14 of the 88 layers of the 120B model
// trained longest in NVFP4 (arXiv 2604.12374, table 3). All blocks in FP4 diverge (arXiv
// 2509.25149, 4.1), and even at test size only this part of the recipe shows in the loss
// (docs/precision.md). The attention of MoE models: the same table has Q, K, V, output
// and latent projections in BF16.
func (p *Policy) keepSensitive(c *model.Facts) {
	if c.MoE != nil {
		p.add([]string{"attn"}, 0, dtype.FormatBF16, "Models with experts keep attention and its latent"+
			" projections, as the 120B model that was trained longest in NVFP4 (arXiv 2604.12374).")
	}
	const percent = 15
	kept := (p.Layers*percent + 99) / 100
	p.add(p.blocks(), p.Layers-kept, dtype.FormatBF16,
		fmt.Sprintf("The last %d %% of the layers, %d of %d: with"+
			" all blocks in FP4 training diverges (arXiv 2509.25149, 4.1).", percent, kept, p.Layers))
}

// uneven keeps weights in BF16 whose sizes are not multiples of the scale block: they would have
// to be padded, and weights that small gain nothing.
func (p *Policy) uneven(have []model.Linear, f dtype.Format) {
	done := map[[3]int64]bool{}
	for _, l := range have {
		shape := [3]int64{l.In, l.Out, l.Head}
		if tagged[l.Name] == "" || fits(&l, f) || done[shape] {
			continue
		}
		done[shape] = true
		var words []string
		for _, other := range have {
			if tagged[other.Name] != "" && shape == [3]int64{other.In, other.Out, other.Head} &&
				!slices.Contains(words, other.Name) {
				words = append(words, other.Name)
			}
		}
		what := fmt.Sprintf("A weight of %d × %d", l.In, l.Out)
		if l.Head%f.Block() != 0 {
			what = fmt.Sprintf("A head of %d", l.Head)
		}
		p.add(words, 0, dtype.FormatBF16, fmt.Sprintf("%s is not made of blocks of %d.", what, f.Block()))
	}
}
