package main

import (
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/schedule"
)

// devices is the number of CPU devices of every plan.
const devices = 8

// Rows and tokens of a step, the same for every plan: 2,048 tokens take a core under a second.
const (
	batch = 32
	seq   = 64
)

// config is the model: 4 layers, which compile fast, and heads for tp 8. It has 5.2M parameters.
func config() *model.Config {
	return &model.Config{Arch: "llama", Layers: 4, Vocab: 2048, Hidden: 256, Heads: 8, KVHeads: 8,
		HeadDim: 32, MLP: 1024, Context: seq, Norm: model.Norm{Eps: 1e-5}, Activation: model.SiLU,
		Gated: true, Rope: ir.Rope{Theta: 1e4}, Rotary: 32, BOS: -1, AttnScale: 0.1767767}
}

// draw gives n different plans that fit the model.
func draw(r *rand.Rand, c *model.Config, n int) []*plan.Plan {
	var list []*plan.Plan
	seen := map[string]bool{}
	for len(list) < n {
		p := one(r)
		if name := words(p); !seen[name] && p.Check(c) == nil {
			seen[name] = true
			list = append(list, p)
		}
	}
	return list
}

// one deals eight devices to axes by halves, and chooses the rest at random.
func one(r *rand.Rand) *plan.Plan {
	p := plan.Default()
	p.Cluster, p.Seq, p.Batch = fmt.Sprintf("%dxcpu", devices), seq, batch
	axes := []*int64{&p.DP, &p.FSDP.Size, &p.FSDP.Size, &p.TP.Size, &p.CP.Size, &p.PP.Size}
	for n := 1; n < devices; n *= 2 {
		*axes[r.IntN(len(axes))] *= 2
	}
	p.Microbatches = []int64{1, 2, 4}[r.IntN(3)]
	p.FSDP.Zero = 1 + r.IntN(3)
	p.FSDP.Gather = "step"
	if p.FSDP.Zero == 3 {
		p.FSDP.Gather = []string{"layer", "microbatch", "step"}[r.IntN(3)]
	}
	p.TP.Sequence = p.TP.Size > 1 && r.IntN(2) == 0
	if p.CP.Size > 1 {
		p.CP.Kind = []string{"gather", "ring"}[r.IntN(2)]
		p.CP.Balance = r.IntN(2) == 0
	}
	if p.PP.Size > 1 {
		p.PP.Schedule = schedule.Names()[r.IntN(len(schedule.Names()))]
		p.Microbatches = max(p.Microbatches, p.PP.Size)
	}
	if r.IntN(3) == 0 {
		p.Recompute = []ir.Tag{ir.Norm, ir.Attn, ir.MLP}
	}
	return p
}

// words tells a plan in a few words.
func words(p *plan.Plan) string {
	var list []string
	add := func(format string, args ...any) { list = append(list, fmt.Sprintf(format, args...)) }
	if p.DP > 1 {
		add("dp %d", p.DP)
	}
	if p.FSDP.Size > 1 {
		add("fsdp %d zero %d", p.FSDP.Size, p.FSDP.Zero)
		if p.FSDP.Zero == 3 {
			add("%s", p.FSDP.Gather)
		}
	}
	if p.TP.Size > 1 {
		name := "tp"
		if p.TP.Sequence {
			name = "tp+sp"
		}
		add("%s %d", name, p.TP.Size)
	}
	if p.CP.Size > 1 {
		name := p.CP.Kind
		if p.CP.Balance {
			name += "+balance"
		}
		add("cp %d %s", p.CP.Size, name)
	}
	if p.PP.Size > 1 {
		add("pp %d %s", p.PP.Size, p.PP.Schedule)
	}
	add("microbatch %d", p.Microbatches)
	if len(p.Recompute) > 0 {
		add("recompute")
	}
	return strings.Join(list, " ")
}
