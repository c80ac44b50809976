package train

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
)

// The bounds of quantized GEMMs. Operands that are quantized from the same numbers have the
// same bytes; but sums in another order differ in their last digit, and where that decides a
// rounding, an element differs by a sixteenth (E4M3) or up to a half (E2M1) of itself.
const (
	quantizedLoss = 1e-4 // of a loss, relative: the bound of the issue that asked for the formats
	quantizedGrad = 0.2  // of a gradient, by Frobenius norm: a wrong scale or place makes it about 1
	// quantizedSlots is the same of experts in NVFP4: what shares a block in wgrad, and the numbers
	// that gradients are rounded with, follow the slots of a plan. Weight gradients of experts are
	// 0.29 from those that are not rounded (package spmd holds plans to one device by that), so that
	// two roundings that share nothing are √2 times that apart, 0.41. Seen were 0.25.
	quantizedSlots = 0.4
	quantizedParam = 1e-3 // of a parameter after SGD, likewise: the rate times that
	quantizedAdam  = 0.1  // of what AdamW moved a parameter by, likewise
)

// Sequences are long enough for cp to shard them into whole blocks. Plans with stages, and some of the
// others, add up two microbatches; the rest takes one, since each has a program to compile.
var (
	quantizedOnce  = plantest.Size{Batch: 4, Micros: 1, Seq: 128}
	quantizedTwice = plantest.Size{Batch: 8, Micros: 2, Seq: 128}
)

// narrowly gives a parity with sizes that blocks divide, in a format.
func quantizedParity(p *parity, format ir.Format, size plantest.Size) *parity {
	c := *p.config
	c.Hidden, c.HeadDim, c.Rotary, c.MLP, c.AttnScale, c.Context = 64, 32, 32, 128, 0.18, 256
	p.config, p.size, p.quantized = &c, size, string(format)
	p.rate, p.scale = 0.02, 1 // so that a rounding that differs stays one
	if _, adam := p.optimizer.(optim.AdamW); adam {
		p.rate = 0.002
	}
	return p
}

// parityOf finds a parity by its name: a model, or a format and a model.
func parityOf(e *engine.Engine, name string) *parity {
	format, model, ok := strings.Cut(name, "/")
	if !ok {
		return parities(e)[name]
	}
	p := quantizedParity(parities(e)[model], ir.Format(format), quantizedTwice)
	p.hasty, p.linears = true, []string{"k", "down"} // of each kind, to compile in less time
	return p
}

// compareQuantized holds a plan to one device that takes the same microbatches, and gives the largest
// difference of a loss.
func (p *parity) compareQuantized(t *testing.T, row plantest.Row, got *history) (worst float64) {
	t.Helper()
	name := row.Name
	for k, w := range append([]float64{p.want.Eval}, p.want.Losses...) {
		g := append([]float64{got.Eval}, got.Losses...)[k]
		d := math.Abs(g-w) / math.Abs(w)
		if worst = math.Max(worst, d); !(d <= quantizedLoss) {
			t.Errorf("%s: loss %d is %v, want %v, off by %.2g", name, k, g, w, d)
		}
	}
	if len(got.Blocks) == 0 {
		t.Errorf("%s has no quantized copies", name)
	}
	for copied, w := range p.want.Blocks {
		g, ok := got.Blocks[copied]
		switch {
		case !ok && p.splits(row, copied):
		case !ok:
			t.Errorf("%s has no copy %s", name, copied)
		case !bytes.Equal(g, w):
			t.Errorf("%s: the bytes of %s differ", name, copied)
		}
	}
	bound := quantizedGrad
	if p.config.MoE != nil && ir.Format(p.quantized).Stochastic() {
		bound = quantizedSlots
	}
	dg, where := frobenius(got.Grads, p.want.Grads)
	if !(dg <= bound) {
		t.Errorf("%s: the gradient of %s is off by %.2g", name, where, dg)
	}
	a, b := got.Params, p.want.Params
	bound = quantizedParam
	if _, adam := p.optimizer.(optim.AdamW); adam {
		bound, a, b = quantizedAdam, moved(a, p.before), moved(b, p.before)
	}
	dp, where := frobenius(a, b)
	if !(dp <= bound) {
		t.Errorf("%s: parameter %s is off by %.2g", name, where, dp)
	}
	t.Logf("%s: off by %.1e of the loss, %.1e of a gradient, %.1e of a parameter", name, worst, dg, dp)
	return worst
}

// splits reports whether fsdp leaves devices parts of blocks of a copy along the embedding, in which
// case no copy is stored: the weight is quantized where its shards are gathered.
func (p *parity) splits(row plantest.Row, copied string) bool {
	how := p.plan(row)
	shard := p.config.Hidden / max(1, how.FSDP.Size)
	if !strings.Contains(copied, ".expert_") { // ep shards all others like fsdp
		shard /= how.Size(plan.ExpertAxis)
	}
	return strings.Contains(copied, ".embed") && shard%ir.Format(p.quantized).Block() != 0
}

// quantizedPlans are the rows of the suite that a format allows, all with -plans.all (then of two
// kinds of linear layers, which compile in less time). They compile for minutes: else it is one of
// 24 for either model in either format, each in its turn, in each format on one of the models with
// all linear layers. That all of them round alike is shown by package spmd in float64.
func quantizedPlans(p *parity, turn int) []plantest.Row {
	rows := plans(p, rand.New(rand.NewPCG(*plansSeed, 1)), false)
	at := -1
	return slices.DeleteFunc(rows, func(r plantest.Row) bool {
		at++
		switch {
		case p.plan(r).Check(p.config) != nil:
			return true
		case *plansLike != "":
			return !regexp.MustCompile(*plansLike).MatchString(r.Name)
		}
		return !*plansAll && at%24 != 6*turn+3
	})
}

// Three quantized steps of any plan, each from the state of one device that takes the same
// microbatches, have its losses, and the first begins with its bytes.
func TestQuantizedPlansEndAlike(t *testing.T) {
	if *plansLike == "" {
		slowtest.Only(t) // compiles programs for many devices
	}
	e, err := engine.Open(context.Background(), "cpu", engine.Options{Devices: 8, Cache: cache})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	*plansSeed = slowtest.Seed(t, "plans.seed", *plansSeed)
	for k, format := range []ir.Format{ir.MXFP8, ir.NVFP4} {
		for i, name := range []string{"llama", "qwen3"} {
			t.Run(string(format)+"/"+name, func(t *testing.T) {
				ways := map[string]*parity{}
				worst := 0.0
				for _, row := range quantizedPlans(quantizedParity(parities(e)[name], format, quantizedTwice), 2*k+i) {
					d, err := quantizedWay(ways, e, name, format, row).hold(t, row)
					if err != nil {
						t.Errorf("%s: %v", row.Name, err)
					}
					worst = math.Max(worst, d)
				}
				if len(ways) == 0 {
					t.Skip("with -tags long")
				}
				t.Logf("losses are off by at most %.1e", worst)
			})
		}
	}
}

// narrowWay finds how a row is run, and what it is held to.
func quantizedWay(ways map[string]*parity, e *engine.Engine, name string, format ir.Format,
	row plantest.Row) *parity {
	p := quantizedParity(parities(e)[name], format, quantizedTwice)
	how := p.plan(row)
	if how.PP.Size == 1 && len(how.Offload)+len(how.Recompute) == 0 {
		p.size = quantizedOnce
	}
	// These add up in another order. In bf16 that decides many roundings of attention, and these many
	// quantized values: losses of 512 tokens in bf16 differ by 5e-5, and then in MXFP8 by 5e-4.
	p.wide = how.TP.Size > 1 || how.CP.Kind == "ring"
	p.hasty = true
	if *plansAll || (name == "llama") == (format == ir.MXFP8) {
		p.linears = []string{"k", "down"} // one column-parallel and one row-parallel
	}
	key := fmt.Sprint(p.size, p.wide)
	if ways[key] == nil {
		ways[key] = p
	}
	return ways[key]
}

// hold runs a plan, and one device if it did not run yet, and compares them.
func (p *parity) hold(t *testing.T, row plantest.Row) (worst float64, err error) {
	t.Helper()
	if p.want == nil {
		if p.want, err = p.run(t.Context(), nil, Options{}); err != nil {
			return 0, err
		}
	}
	got, err := p.run(t.Context(), p.plan(row), Options{})
	if err != nil {
		return 0, err
	}
	return p.compareQuantized(t, row, got), nil
}
