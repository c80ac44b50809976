package main

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/estimate"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/price"
)

// A step is a published pair of runs that differ in their format only.
type step struct {
	source, cluster, model string
	seq, batch, microbatch int64 // tokens, sequences of a step and of a microbatch
	tp, pp, virtual, ep    int64
	zero                   int
	from, to               dtype.Format
	rates                  [2]float64 // tokens a second and GPU
}

// stepRows are torchao's table (docs/source/workflows/training.md at 2210df8: FSDP, compiled,
// rounded up as we do) and the pairs of Megatron-Bridge's summaries whose plan and release are one
// (published_runs.csv). Virtual stages of mbridge-209 are 4 of the 8: ours hold a layer at least.
// Others of torchao's do not state their plan.
var stepRows = []step{
	{"ao training.md", "8xb200", "llama3-8b", 8192, 8, 1, 1, 1, 1, 1, 3, dtype.FormatBF16,
		dtype.MXFP8, [2]float64{8307.5, 9642}},
	{"mbridge-203, 201", "64xgb300", "llama3-70b", 8192, 256, 1, 1, 4, 5, 1, 1, dtype.MXFP8,
		dtype.NVFP4, [2]float64{4596, 6798}},
	{"mbridge-204, 202", "64xgb200", "llama3-70b", 8192, 256, 1, 2, 4, 5, 1, 1, dtype.MXFP8,
		dtype.NVFP4, [2]float64{3613, 4458}},
	{"mbridge-211, 209", "256xgb200", "llama3.1-405b", 8192, 1536, 1, 4, 16, 4, 1, 1, dtype.MXFP8,
		dtype.NVFP4, [2]float64{786, 1076}},
	{"mbridge-238, 239", "256xgb300", "deepseek-v3", 4096, 4096, 1, 1, 2, 4, 32, 1, dtype.FormatBF16,
		dtype.MXFP8, [2]float64{3848, 4357}},
}

// steps compares how many times as fast a step is in another format, at one plan. Stacks differ:
// what is priced is our programs.
func steps() error {
	fmt.Println("whole steps, how many times as fast")
	fmt.Printf("%-18s %-10s %-14s %-15s %6s %24s   %s\n", "", "", "", "", "peaks", "price",
		"first run's tokens/s, price of published")
	for _, s := range stepRows {
		c, err := machine.ParseCluster(s.cluster)
		if err != nil {
			return err
		}
		var seconds [2]float64
		for i, f := range []dtype.Format{s.from, s.to} {
			if seconds[i], err = s.seconds(c, f); err != nil {
				return fmt.Errorf("%s: %w", s.source, err)
			}
		}
		rate := float64(s.seq*s.batch) / float64(c.Count) / seconds[0]
		fmt.Printf("%-18s %-10s %-14s %-15s %6.2f %24s   %.0f of %.0f\n", s.source, s.cluster, s.model,
			fmt.Sprintf("%s → %s", s.from, s.to), peaks(c, s.to, s.from),
			against(seconds[0]/seconds[1], s.rates[1]/s.rates[0]), rate, s.rates[0])
	}
	return nil
}

// seconds is the price of a step.
func (s step) seconds(c machine.Cluster, f dtype.Format) (float64, error) {
	found, err := model.Find(s.model)
	if err != nil {
		return 0, err
	}
	prof, err := price.Find(price.Own)
	if err != nil {
		return 0, err
	}
	e, err := estimate.New(found.Config, c, prof)
	if err != nil {
		return 0, err
	}
	p := plan.Default()
	dp := int64(c.Count) / (s.tp * s.pp)
	p.Model, p.Cluster, p.Seq, p.Batch = s.model, c.String(), s.seq, s.batch
	p.Microbatches = s.batch / dp / s.microbatch
	p.FSDP = plan.FSDP{Size: dp, Zero: s.zero, Gather: "step"}
	if s.zero == 3 {
		p.FSDP.Gather = "layer"
	}
	if s.ep > 1 {
		p.EP, p.FSDP.Size = s.ep, dp/s.ep
	}
	p.TP = plan.TP{Size: s.tp, Sequence: s.tp > 1}
	p.PP = plan.PP{Size: s.pp, Virtual: s.virtual, Schedule: "1f1b"}
	if s.virtual > 1 {
		p.PP.Schedule = "interleaved"
	}
	p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.BF16, Collectives: dtype.BF16}
	policy, err := precision.Default(found.Config, string(f))
	if err != nil {
		return 0, err
	}
	// Recipes of these runs quantize all layers (mixed_precision.py); ours keep the last of NVFP4.
	policy.Rules = slices.DeleteFunc(policy.Rules, func(r precision.Rule) bool { return r.From > 0 })
	est, err := e.With(estimate.Options{Policy: policy}).Price(p)
	return est.Step, err
}
