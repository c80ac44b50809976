package main

import (
	"bytes"
	"cmp"
	"embed"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/estimate"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
)

//go:embed testdata
var files embed.FS

// A sample is one measured run and what an estimator needs to price it.
type sample struct {
	id      string // the row
	family  string // what is left out together: the model
	layout  string // rows that differ in nothing but the number of microbatches
	weight  float64
	config  *model.Config
	cluster machine.Cluster
	plan    *plan.Plan
	options estimate.Options

	seconds float64
	gib     float64 // peak that was allocated; 0 where not known
}

// A record is a line of a table by the names of its columns.
type record map[string]string

func (r record) int(name string) int64 {
	n, err := strconv.ParseInt(r[name], 10, 64)
	if err != nil {
		return 1
	}
	return n
}

func (r record) float(name string) float64 {
	f, err := strconv.ParseFloat(r[name], 64)
	if err != nil {
		return 0
	}
	return f
}

// table reads a file of testdata, keeping lines whose id begins with a prefix.
func table(name, prefix string) ([]record, error) {
	text, err := files.ReadFile("testdata/" + name)
	if err != nil {
		return nil, err
	}
	lines, err := csv.NewReader(bytes.NewReader(text)).ReadAll()
	if err != nil {
		return nil, err
	}
	var list []record
	for _, line := range lines[1:] {
		if !strings.HasPrefix(line[0], prefix) {
			continue
		}
		r := record{}
		for i, name := range lines[0] {
			r[name] = line[i]
		}
		list = append(list, r)
	}
	return list, nil
}

// A listed model is an entry of models.json.
type listed struct {
	Layers, Hidden, FFN, Heads, Vocab int64
	KVHeads                           int64 `json:"kv_heads"`
	HeadDim                           int64 `json:"head_dim"`
	Gated                             bool  `json:"gated_mlp"`
}

// dense makes the configuration of a model without experts.
func (m listed) dense() *model.Config {
	c := &model.Config{Arch: "llama", Vocab: m.Vocab, Hidden: m.Hidden, Layers: m.Layers,
		Heads: m.Heads, KVHeads: m.KVHeads, HeadDim: m.HeadDim, MLP: m.FFN, Context: 1 << 17,
		Activation: model.SiLU, Gated: m.Gated, AttnScale: 1, Rope: ir.Rope{Theta: 1e4}}
	if c.Vocab == 0 {
		c.Vocab = 51200 // what Megatron pads GPT-2's vocabulary to
	}
	if c.KVHeads == 0 {
		c.KVHeads = c.Heads
	}
	if c.HeadDim == 0 {
		c.HeadDim = c.Hidden / c.Heads
	}
	if c.MLP == 0 {
		c.MLP = 4 * c.Hidden
	}
	c.Rotary = c.HeadDim
	return c
}

func models() (map[string]listed, error) {
	b, err := files.ReadFile("testdata/models.json")
	if err != nil {
		return nil, err
	}
	list := map[string]listed{}
	return list, json.Unmarshal(b, &list)
}

// megatronPlan is a plan as Megatron runs it: a distributed optimizer over dp, bf16 parameters,
// gradients that are kept and summed in f32.
func megatronPlan(cluster machine.Cluster, seq, batch, micros, dp, tp, cp, pp int64) *plan.Plan {
	p := plan.Default()
	p.Cluster, p.Seq, p.Batch, p.Microbatches = cluster.String(), seq, batch, micros
	p.FSDP = plan.FSDP{Size: dp, Zero: 1, Gather: "step"}
	p.TP, p.CP.Size = plan.TP{Size: tp, Sequence: true}, cp
	p.CP.Balance = true // as Megatron always does
	p.PP = plan.PP{Size: pp, Virtual: 1, Schedule: "1f1b"}
	p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.F32}
	return p
}

var microbatches = regexp.MustCompile(`mbc=(\d+)`)

// simumax is 43 runs of Megatron-LM on 8 B200: nothing overlaps, nothing is recomputed, experts
// have a capacity that tokens are padded to, and cp is all-to-all.
func simumax() ([]sample, error) {
	rows, err := table("published_runs.csv", "simumax-")
	if err != nil {
		return nil, err
	}
	known, err := models()
	if err != nil {
		return nil, err
	}
	cluster, err := machine.ParseCluster("8xb200")
	if err != nil {
		return nil, err
	}
	var list []sample
	for _, r := range rows {
		config := known[r["model"]].dense()
		var options estimate.Options
		if strings.HasPrefix(r["model"], "deepseek") {
			found, err := model.Find(r["model"])
			if err != nil {
				return nil, err
			}
			c, moe := *found.Config, *found.Config.MoE
			moe.Dense = 1
			c.MoE, config = &moe, &c
			options.ExpertRanks, options.Capacity = r.int("ep"), 1
		}
		config.Layers = r.int("layers")
		match := microbatches.FindStringSubmatch(r["notes"])
		if match == nil {
			return nil, fmt.Errorf("%s does not say how many microbatches it has", r["id"])
		}
		micros, err := strconv.ParseInt(match[1], 10, 64)
		if err != nil {
			return nil, err
		}
		p := megatronPlan(cluster, r.int("seq_len"), r.int("gbs"), micros, r.int("dp"), r.int("tp"),
			r.int("cp"), r.int("pp"))
		p.CP.Kind, p.CP.Balance = "a2a", false
		list = append(list, sample{id: r["id"], family: r["model"], config: config, cluster: cluster,
			plan: p, options: options, seconds: r.float("step_time_s"), gib: r.float("mem_gb"),
			layout: fmt.Sprint(r["model"], " seq ", r["seq_len"], " tp", r["tp"], " pp", r["pp"],
				" cp", r["cp"], " ep", cmp.Or(r["ep"], "1"))})
	}
	weigh(list)
	return list, nil
}

// weigh gives each layout the same weight, however many rows it has.
func weigh(list []sample) {
	count := map[string]float64{}
	for _, s := range list {
		count[s.layout]++
	}
	for i := range list {
		list[i].weight = 1 / count[list[i].layout]
	}
}

// layouts keeps the first row of each layout: memory was measured there and copied to the others.
func layouts(list []sample) []sample {
	seen := map[string]bool{}
	return slices.DeleteFunc(slices.Clone(list), func(s sample) bool {
		was := seen[s.layout]
		seen[s.layout] = true
		return was
	})
}

// calculon is the 8 runs of Korthikanti et al. (2022) that Calculon is validated on: Megatron-LM
// on A100 before FlashAttention, with full recomputation, or selective recomputation and sequence
// parallelism.
func calculon() ([]sample, error) {
	rows, err := table("published_runs.csv", "korth-")
	if err != nil {
		return nil, err
	}
	known, err := models()
	if err != nil {
		return nil, err
	}
	var list []sample
	for _, r := range rows {
		cluster, err := machine.ParseCluster(r["gpus"] + "xa100")
		if err != nil {
			return nil, err
		}
		config := known[r["model"]].dense()
		config.Activation, config.Gated = model.GELU, false
		dp := r.int("dp")
		p := megatronPlan(cluster, r.int("seq_len"), r.int("gbs"), r.int("gbs")/dp/r.int("mbs"), dp,
			r.int("tp"), 1, r.int("pp"))
		if v := r.int("vp"); v > 1 {
			p.PP.Virtual, p.PP.Schedule = v, "interleaved"
		}
		options := estimate.Options{Plain: true}
		if r["recompute"] == "full" {
			p.TP.Sequence = false
			p.Recompute = []ir.Tag{ir.Norm, ir.Attn, ir.MLP}
		} else {
			options.Core = true
		}
		list = append(list, sample{id: r["id"], family: r["model"], layout: r["id"], config: config,
			cluster: cluster, plan: p, options: options, seconds: r.float("step_time_s")})
	}
	weigh(list)
	return list, nil
}

// vtrain is 1,549 runs of Megatron on A100, 1,440 of them on one host. Recomputation is not
// recorded; the largest models and microbatches only fit with full recomputation.
func vtrain(multi bool) ([]sample, error) {
	rows, err := table("published_runs_vtrain_a100.csv", "vt-")
	if err != nil {
		return nil, err
	}
	var list []sample
	for _, r := range rows {
		if strings.Contains(r["source"], "multi") != multi {
			continue
		}
		cluster, err := machine.ParseCluster(r["gpus"] + "xa100")
		if err != nil {
			return nil, err
		}
		m := listed{Layers: r.int("layers"), Hidden: r.int("hidden"), Heads: r.int("heads")}
		config := m.dense()
		config.Activation = model.GELU
		dp := r.int("dp")
		p := megatronPlan(cluster, r.int("seq_len"), r.int("gbs"), r.int("gbs")/dp/r.int("mbs"), dp,
			r.int("tp"), 1, r.int("pp"))
		p.TP.Sequence = false
		p.FSDP, p.DP = plan.FSDP{Size: 1}, dp
		p.Recompute = []ir.Tag{ir.Norm, ir.Attn, ir.MLP}
		list = append(list, sample{id: r["id"], layout: r["id"], config: config, cluster: cluster,
			family: fmt.Sprint("h", r["hidden"], " L", r["layers"]), plan: p,
			options: estimate.Options{Plain: true}, seconds: r.float("iteration_time_ms") / 1e3})
	}
	weigh(list)
	return list, nil
}

// relative is how far an estimate is off, as a share of what was measured.
func relative(estimated, measured float64) float64 { return math.Abs(estimated/measured - 1) }
