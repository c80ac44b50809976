package main

import (
	"math"
	"regexp"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/estimate"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/price"
)

// A bridgeRow is a run of Megatron-Bridge's performance summary.
type bridgeRow struct {
	sample
	release int // in the list of releases
	run     price.Run
	check   bool // what is printed of the row cannot be; it is not fitted on
	pricer  *estimate.Estimator
}

// releases in their order. With the one at secondEpoch the kernels of experts changed.
var releases = []string{"26.02", "26.02.01", "26.04", "26.04.01", "26.06", "26.06.01", "26.08"}

const secondEpoch = 4

var (
	container = regexp.MustCompile(`NeMo container ([0-9.]+);`)
	// In these releases tokens a second are rounded to whole samples; the rate is taken from
	// TFLOP/s and the operations of a token, in GFLOP, that other releases agree on.
	rounded   = []string{"26.04.01", "26.06.01", "26.08"}
	published = map[string]float64{"deepseek-v3": 260, "qwen3-30b-a3b": 23, "llama3-70b": 449.2,
		"qwen3-235b-a22b": 148.05, "llama3.1-405b": 2524, "kimi-k2": 204.45}
	// Known regressions of one kernel, by the source's own footnote.
	broken = []string{"mbridge-021", "mbridge-022"}
	// One has no FSDP though its state fits no GPU without, one no virtual stages though its rate
	// leaves no room for the bubble: priced with what would make them possible.
	checked = []string{"mbridge-165", "mbridge-167"}
)

// mbridge is pretraining on Blackwell with 26.02 to 26.08, of models whose sizes are known and that
// model.Config can hold: not Nemotron 3, whose layers are Mamba for the larger part.
func mbridge() ([]bridgeRow, error) {
	rows, err := table("published_runs.csv", "mbridge-")
	if err != nil {
		return nil, err
	}
	base := price.MegatronBridge()
	var list []bridgeRow
	for _, r := range rows {
		match := container.FindStringSubmatch(r["notes"])
		gpu := strings.ToLower(strings.TrimPrefix(r["hardware"], "DGX-"))
		if match == nil || !strings.Contains(r["notes"], "Pre-Training") ||
			!slices.Contains([]string{"b200", "b300", "gb200", "gb300"}, gpu) ||
			!slices.Contains(releases, match[1]) || slices.Contains(broken, r["id"]) {
			continue
		}
		found, err := model.Find(r["model"])
		if err != nil {
			return nil, err
		}
		if found.Config == nil {
			continue
		}
		b := bridgeRow{release: slices.Index(releases, match[1]),
			check: slices.Contains(checked, r["id"])}
		b.run = bridgeRun(r, found.Config, gpu, b.release)
		if err := b.read(r, found.Config); err != nil {
			return nil, err
		}
		e, err := estimate.New(b.config, b.cluster, base.Profile(b.run))
		if err != nil {
			return nil, err
		}
		b.pricer = e.With(b.options)
		list = append(list, b)
	}
	return list, nil
}

// bridgeRun says what a run is. Which parts are captured as graphs and where exchanges overlap is
// read from today's recipes (reference/megatron_bridge_recipes.json), since rows do not say it:
// kimi-k2 and, on b200 and b300, deepseek-v3 and qwen3-235b-a22b have no graphs; gpt-oss-120b in
// BF16 has none on b200 and gb200. Fused is declared: the footnote of 26.06.01 names a fused kernel
// of experts, which MXFP8 recipes with gated experts have from 26.06 on, but not kimi-k2 nor, on
// b300, deepseek-v3 and gpt-oss-120b, whose rates did not move with it.
func bridgeRun(r record, c *model.Config, gpu string, release int) price.Run {
	run := price.Run{GPU: gpu, Precision: dtype.Format(strings.ToLower(r["precision"])),
		Experts: c.MoE != nil, Head: c.HeadDim, Bias: c.MoE != nil && c.MoE.Bias}
	grace, mx, name := strings.HasPrefix(gpu, "gb"), run.Precision == dtype.MXFP8, r["model"]
	if release >= secondEpoch && mx {
		run.Fused = strings.HasPrefix(name, "qwen3") ||
			grace && (name == "deepseek-v3" || name == "gpt-oss-120b")
	}
	switch name {
	case "kimi-k2":
		run.Eager = true
	case "deepseek-v3", "qwen3-235b-a22b":
		run.Eager = !grace
	case "gpt-oss-120b":
		run.Eager = !mx && !strings.HasSuffix(gpu, "b300")
	}
	run.Overlap = name == "deepseek-v3" && gpu == "b200" && r["ep"] == "32" ||
		name == "gpt-oss-120b" && gpu == "gb200" && !mx
	return run
}

// read makes the plan of a row.
func (b *bridgeRow) read(r record, c *model.Config) error {
	cluster, err := machine.ParseCluster(r["gpus"] + "x" + b.run.GPU)
	if err != nil {
		return err
	}
	tp, pp, cp, virtual := r.int("tp"), r.int("pp"), r.int("cp"), bridgeVirtual(r, c, b.release)
	dp := r.int("gpus") / (tp * pp * cp)
	p := megatronPlan(cluster, r.int("seq_len"), r.int("gbs"), r.int("gbs")/dp/r.int("mbs"), dp, tp,
		cp, pp)
	p.CP.Kind = "ring"
	// The recipes for performance sum gradients in bf16 (perf_recipes/_common.py at 067f987).
	p.Types.Grads, p.Types.Collectives = dtype.BF16, dtype.BF16
	if strings.Contains(r["notes"], "FSDP") || r["id"] == "mbridge-165" {
		p.FSDP.Zero, p.FSDP.Gather = 3, "layer"
	}
	if virtual > 1 {
		p.PP.Virtual, p.PP.Schedule = virtual, "interleaved"
	}
	o := estimate.Options{Precision: b.run.Precision}
	if c.MoE != nil {
		o.ExpertRanks = r.int("ep")
	}
	if r["model"] == "deepseek-v3" {
		o.Predict = 1
	}
	if pp > 1 {
		o.Layers = bridgeLayers(c, pp*virtual)
	}
	rate := r.float("tokens_per_s_per_gpu")
	if slices.Contains(rounded, releases[b.release]) {
		rate = r.float("tflops_per_gpu") * 1e3 / bridgeFLOP(r["model"], b.run.Precision)
	}
	b.sample = sample{id: r["id"], family: r["model"], layout: r["id"], weight: 1, config: c,
		cluster: cluster, plan: p, options: o,
		seconds: r.float("gbs") * r.float("seq_len") / r.float("gpus") / rate}
	return nil
}

// bridgeFLOP is the operations of a token in GFLOP. gpt-oss-120b's count changed with the rows of
// MXFP8.
func bridgeFLOP(name string, prec dtype.Format) float64 {
	if name != "gpt-oss-120b" {
		return published[name]
	}
	if prec == dtype.FormatBF16 {
		return 27.17
	}
	return 32.59
}

// bridgeVirtual is the virtual stages of a rank. Releases 26.02 and 26.02.01 print none for
// qwen3-235b-a22b, whose layers divide by no pipeline; the next one has the same plans with these.
func bridgeVirtual(r record, c *model.Config, release int) int64 {
	switch {
	case c.MLA != nil && r.int("pp") > 1:
		return 16 / r.int("pp") // a layout of 16 stages
	case r["vp"] != "":
		return r.int("vp")
	case r["id"] == "mbridge-167":
		return 5
	case r["model"] == "qwen3-235b-a22b" && release < 2 && strings.HasSuffix(r["hardware"], "GB300"):
		return 12
	case r["model"] == "qwen3-235b-a22b" && release < 2 && strings.HasSuffix(r["hardware"], "GB200"):
		return 3
	}
	return 1
}

// bridgeLayers lays layers out as the recipes do: models with latent attention by four, and what is
// left with the loss; others evenly, with the embedding and the loss counted as layers.
func bridgeLayers(c *model.Config, n int64) []int64 {
	list := make([]int64, n)
	left := c.Layers
	for i := range list {
		if c.MLA != nil {
			list[i] = min(4, left)
			left -= list[i]
			continue
		}
		list[i] = (c.Layers + 2) / n
		if int64(i) < (c.Layers+2)%n {
			list[i]++
		}
	}
	if c.MLA == nil {
		list[0]--
		list[n-1]--
	}
	return list
}

// A bridge is the rows and what is fitted on them.
type bridge struct {
	rows   []bridgeRow
	stack  *price.Bridge
	latest int // the last release that was fitted on; drift counts from it
	regression
}

func newBridge() (*bridge, error) {
	rows, err := mbridge()
	if err != nil {
		return nil, err
	}
	b := &bridge{rows: rows, stack: new(price.Bridge)}
	b.regression = regression{constants: b.stack.Effects(), noise: 0.05, rounds: 20,
		predict: b.times}
	for i := range rows {
		b.measured = append(b.measured, rows[i].seconds)
	}
	return b, nil
}

// times prices rows with these constants.
func (b *bridge) times(values []float64, rows []int) ([]float64, error) {
	for j, c := range b.constants {
		*c.Value = values[j]
	}
	out := make([]float64, len(rows))
	for i, k := range rows {
		r := &b.rows[k]
		est, err := r.pricer.Under(b.stack.Profile(r.run)).Price(r.plan)
		if err != nil {
			return nil, err
		}
		out[i] = est.Step * math.Pow(b.stack.Drift, float64(r.release-b.latest))
	}
	return out, nil
}
