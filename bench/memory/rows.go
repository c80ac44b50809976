package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
)

// A combination is a model under a plan, which names its cluster.
type combination struct {
	config *model.Config
	plan   *plan.Plan
}

// key names a combination: the plan has everything.
func (c *combination) key() string { return words(c.plan) }

// seed is the seed of the committed table.
const seed = 20261115

// A want is how many combinations of a kind of cluster there are, and what they are drawn from.
type want struct {
	gpu   string
	count int
	draw  func(r *rand.Rand) family
}

// A family is plans that differ only in how often and in which order the same programs run.
type family struct {
	model    string
	plan     plan.Plan
	variants []variant
}

// A variant is a schedule and a number of microbatches.
type variant struct {
	schedule string
	micros   int64
}

// combinations draws the plans that the predictor was read from.
func combinations(seed uint64) ([]combination, error) {
	return deal(seed, []want{{"cpu", 80, drawCPU}, {"b200", 88, drawB200},
		{"rtx6000pro", 72, drawRTX}})
}

// deal draws combinations, alternating between clusters, so that any prefix of the list is a fair
// sample.
func deal(seed uint64, wants []want) ([]combination, error) {
	lists := make([][]combination, len(wants))
	for i, w := range wants {
		r := rand.New(rand.NewPCG(seed, uint64(i)))
		seen := map[string]bool{}
		for tries := 0; len(lists[i]) < w.count; tries++ {
			if tries > 1e5 {
				return nil, diag.New(diag.Internal, "no more plans for %s", w.gpu)
			}
			for _, one := range w.draw(r).expand(w.gpu) {
				if len(lists[i]) < w.count && !seen[one.key()] {
					seen[one.key()] = true
					lists[i] = append(lists[i], one)
				}
			}
		}
	}
	var all []combination
	const turns = 40
	for at := range turns {
		for i := range lists {
			n, most := len(lists[i]), turns
			all = append(all, lists[i][at*n/most:(at+1)*n/most]...)
		}
	}
	return all, nil
}

// expand gives the plans of a family that fit its model.
func (f family) expand(gpu string) (list []combination) {
	c, err := configOf(f.model)
	if err != nil {
		return nil
	}
	rows := f.plan.Batch // of a microbatch
	for _, v := range f.variants {
		p := f.plan
		p.Version, p.Model = plan.Version, f.model
		p.Microbatches, p.Batch = v.micros, rows*v.micros
		p.PP.Schedule = v.schedule
		p.Cluster = fmt.Sprintf("%dx%s", p.Devices(), gpu)
		if p.Check(c) == nil {
			list = append(list, combination{c, &p})
		}
	}
	return list
}

// small are models for the CPU, where programs of few layers are written without loops.
var small = map[string]model.Config{
	"small-2": {Layers: 2, Vocab: 8192, Hidden: 512, Heads: 8, KVHeads: 4, HeadDim: 64, MLP: 1536},
	"small-6": {Layers: 6, Vocab: 32000, Hidden: 768, Heads: 12, KVHeads: 4, HeadDim: 64, MLP: 2048},
	"wide-4":  {Layers: 4, Vocab: 4096, Hidden: 1024, Heads: 8, KVHeads: 8, HeadDim: 128, MLP: 4096},
}

// configOf gives a model by its name.
func configOf(name string) (*model.Config, error) {
	if c, ok := small[name]; ok {
		c.Arch, c.Context, c.Norm, c.Activation = "llama", 4096, model.Norm{Eps: 1e-5}, model.SiLU
		c.Gated, c.Rope, c.Rotary, c.BOS = true, ir.Rope{Theta: 1e4}, c.HeadDim, -1
		c.AttnScale = 0.125
		return &c, nil
	}
	p, err := model.Find(name)
	if err != nil {
		return nil, err
	}
	return p.Config, nil
}

func pick[T any](r *rand.Rand, list ...T) T { return list[r.IntN(len(list))] }

// blank is a plan for one device.
func blank() plan.Plan {
	p := *plan.Default()
	p.Order = nil
	return p
}

var bf16 = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}

// recomputed draws the recompute tags: mostly full recomputation, which large models need.
func recomputed(r *rand.Rand) []ir.Tag {
	all := []ir.Tag{ir.Norm, ir.Attn, ir.MLP}
	return pick(r, all, all, all, all, nil, []ir.Tag{ir.Norm, ir.MLP}, []ir.Tag{ir.Norm, ir.Attn})
}

func drawB200(r *rand.Rand) family {
	f := family{model: pick(r, "llama3.1-8b", "llama3.1-8b", "llama3.1-70b", "llama3.1-70b",
		"llama3.1-405b", "qwen3-8b", "qwen3-32b", "mistral-7b"), plan: blank()}
	p := &f.plan
	p.Types, p.Seq, p.Recompute = bf16, pick[int64](r, 4096, 8192), recomputed(r)
	if r.IntN(6) == 0 {
		p.Types.Grads = dtype.BF16
	}
	switch f.model {
	case "llama3.1-405b":
		p.Recompute = []ir.Tag{ir.Norm, ir.Attn, ir.MLP}
		f.axes(r, pick[int64](r, 64, 128, 256, 1024), 8, 8)
	case "llama3.1-70b", "qwen3-32b":
		f.axes(r, pick[int64](r, 16, 32, 64, 128), 4, 8)
	default:
		f.axes(r, pick[int64](r, 1, 4, 8, 8, 16), 1, 4)
	}
	return f
}

func drawRTX(r *rand.Rand) family {
	f := family{model: pick(r, "llama3.1-8b", "llama3.2-3b", "qwen3-8b", "qwen3-4b", "mistral-7b"),
		plan: blank()}
	p := &f.plan
	p.Types, p.Seq, p.Recompute = bf16, pick[int64](r, 2048, 4096), recomputed(r)
	f.axes(r, pick[int64](r, 8, 8, 16, 32, 64), 1, 4)
	return f
}

func drawCPU(r *rand.Rand) family {
	f := family{model: pick(r, "small-2", "small-6", "wide-4", "small-6", "wide-4", "qwen3-0.6b",
		"llama3.2-1b", "gpt2"), plan: blank()}
	p := &f.plan
	p.Seq, p.Recompute = pick[int64](r, 128, 256, 512), recomputed(r)
	if r.IntN(3) == 0 {
		p.Types = bf16
	}
	if _, ok := small[f.model]; !ok && p.Recompute == nil {
		p.Recompute = []ir.Tag{ir.Norm, ir.Attn, ir.MLP} // else 12 to 28 layers would stand in a row
	}
	n := pick[int64](r, 1, 2, 4, 8, 8)
	if n == 1 && !strings.Contains(f.model, "-") || f.model == "qwen3-0.6b" {
		n = 2 // many layers without a loop take long to compile
	}
	f.axes(r, n, 1, 4)
	return f
}

// axes deals devices to axes: tp between two bounds, then perhaps cp and pp, and the rest to fsdp
// and dp.
func (f *family) axes(r *rand.Rand, devices, least, most int64) {
	p := &f.plan
	take := func(n int64) int64 {
		if devices%n != 0 {
			return 1
		}
		devices /= n
		return n
	}
	tps := slices.DeleteFunc([]int64{1, 1, 2, 4, 8}, func(n int64) bool {
		return n < least || n > most
	})
	p.TP.Size = take(pick(r, tps...))
	if p.TP.Size > 1 {
		p.TP.Sequence = r.IntN(4) > 0
		p.TP.Overlap = p.TP.Sequence && r.IntN(3) == 0
	}
	if r.IntN(6) == 0 {
		p.CP = plan.CP{Size: take(2), Kind: "ring"}
	}
	f.variants = []variant{{"1f1b", 1}}
	switch r.IntN(8) {
	case 0:
		p.PP.Size = take(pick[int64](r, 2, 2, 4))
	case 1:
		f.variants = []variant{{"1f1b", 2}}
	}
	if n := p.PP.Size; n > 1 {
		f.variants = []variant{{"1f1b", n}, {"1f1b", 3 * n}, {"gpipe", 2 * n}, {"gpipe", 3 * n},
			{"gpipe", 4 * n}}
		if other := pick(r, "", "", "", "", "interleaved", "zb-h1"); other != "" {
			f.variants = []variant{{other, n}, {other, 2 * n}, {other, 4 * n}}
		}
	}
	if devices > 32 {
		p.DP = take(devices / 32)
	} else if r.IntN(4) == 0 {
		p.DP = take(2)
	}
	p.FSDP = pick(r, plan.FSDP{Zero: 3, Gather: "layer"}, plan.FSDP{Zero: 3, Gather: "layer"},
		plan.FSDP{Zero: 3, Gather: "microbatch"}, plan.FSDP{Zero: 1, Gather: "step"},
		plan.FSDP{Zero: 2, Gather: "step"})
	p.FSDP.Size = devices
	rows := pick[int64](r, 1, 1, 2)
	if p.TP.Overlap {
		rows = 2
	}
	p.Batch = rows * p.DataParallelSize()
}

// words writes a plan in one line.
func words(p *plan.Plan) string {
	return strings.Join(strings.Fields(p.String()), "")
}
