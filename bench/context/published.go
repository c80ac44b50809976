package main

import (
	"context"
	"encoding/csv"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/autoplan"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
)

// A long is a published run with context parallelism.
type long struct {
	name, model, gpu, precision  string
	gpus, seq, batch, tp, cp, pp int64
	kind                         string  // of context parallelism
	tflops                       float64 // per GPU
	// square counts attention in tflops as if every query saw every key, as NeMo did until August
	// 2025 (its change 14424), when both tables were written; Megatron-LM counts half.
	square bool
}

// llama is the stage of 131,072 tokens of Llama 3 (Grattafiori et al., 2024, table 4), which does
// not say how attention is counted: it is held to both.
func llama(square bool) long {
	return long{name: "llama3", model: "llama3.1-405b", gpu: "h100", precision: "bf16",
		kind: "gather", gpus: 16384, seq: 131072, batch: 128, tp: 8, cp: 16, pp: 16, tflops: 380,
		square: square}
}

// read takes from a table NeMo's runs with context parallelism. On B200 the sizes of the axes as
// printed, dp among them, multiply to a quarter of the printed GPUs, over which the last batches do
// not divide: the product is taken.
func read(path string) ([]long, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	lines, err := csv.NewReader(f).ReadAll()
	if err != nil {
		return nil, err
	}
	list := []long{llama(false), llama(true)}
	for _, l := range lines[1:] {
		text := func(column string) string { return l[slices.Index(lines[0], column)] }
		number := func(column string) int64 {
			n, _ := strconv.ParseInt(text(column), 10, 64)
			return n
		}
		r := long{name: text("id"), model: text("model"), seq: number("seq_len"), kind: "ring",
			batch: number("gbs"), tp: number("tp"), cp: number("cp"), pp: number("pp"), gpu: "h100",
			precision: strings.ToLower(text("precision")), square: true}
		if r.cp < 2 || !strings.HasPrefix(r.name, "nemolong-") {
			continue
		}
		if strings.Contains(text("hardware"), "B200") {
			r.gpu = "b200"
		}
		r.gpus = number("dp") * r.tp * r.cp * r.pp
		if r.tflops, err = strconv.ParseFloat(text("tflops_per_gpu"), 64); err != nil {
			return nil, err
		}
		list = append(list, r)
	}
	return list, nil
}

// tokens is the published rate, per second and GPU, and says how attention was counted.
func (r long) tokens() (float64, string, error) {
	preset, err := model.Find(r.model)
	if err != nil {
		return 0, "", err
	}
	f := preset.Config.Forward(r.seq).Training()
	if r.square {
		return r.tflops * 1e12 / (f.Linear + f.Square), "square", nil
	}
	return r.tflops * 1e12 / f.Sum(), "causal", nil
}

// same is the best plan with the published axes and kind.
func (r long) same(ctx context.Context, env *deepwell.Env) (*autoplan.Choice, error) {
	return r.plan(ctx, env, autoplan.Fixed{"tp": fmt.Sprint(r.tp), "cp": fmt.Sprint(r.cp),
		"pp": fmt.Sprint(r.pp), "cp.kind": r.kind})
}

// published holds plans to published rates: with the published axes, and the best of all kinds.
func published(ctx context.Context, env *deepwell.Env, w io.Writer, path string) error {
	list, err := read(path)
	if err != nil {
		return err
	}
	fmt.Fprintln(w, "run\tmodel\tGPUs\tseq\ttp cp pp\tTFLOP/s\tattention\ttok/s/GPU\t"+
		"plan with these axes\tratio\tbest plan\tratio\ttp cp pp")
	for _, r := range list {
		tokens, how, err := r.tokens()
		if err != nil {
			return err
		}
		same, err := r.same(ctx, env)
		if err != nil {
			return err
		}
		best := same
		for _, kind := range (plan.CP{}).Kinds() {
			c, err := r.plan(ctx, env, autoplan.Fixed{"cp.kind": kind})
			if err != nil {
				return err
			}
			if c.Rate > best.Rate {
				best = c
			}
		}
		p := best.Plan
		fmt.Fprintf(w, "%s\t%s\t%d %s\t%d\t%d %d %d\t%.0f\t%s\t%.0f\t", r.name, r.model, r.gpus,
			r.gpu, r.seq, r.tp, r.cp, r.pp, r.tflops, how, tokens)
		fmt.Fprintf(w, "%.0f\t%.2f\t%.0f\t%.2f\t%d %d %s %d\n", same.Rate, same.Rate/tokens, best.Rate,
			best.Rate/tokens, p.TP.Size, p.CP.Size, p.CP.Kind, p.PP.Size)
	}
	return nil
}

// plan gives the best plan for the job with what is fixed, by the profile that was fitted to
// Megatron-LM's runs.
func (r long) plan(ctx context.Context, env *deepwell.Env, fixed autoplan.Fixed) (
	*autoplan.Choice, error) {
	found, err := env.Plan(ctx, deepwell.PlanJob{Source: r.model, Seq: r.seq, Top: 1, Fixed: fixed,
		Cluster: fmt.Sprintf("%dx%s", r.gpus, r.gpu), Batch: deepwell.Batch{Sequences: r.batch},
		Precisions: []string{r.precision}, Devices: int(r.gpus), Stack: "megatron"})
	if err != nil {
		return nil, fmt.Errorf("%s, %v: %w", r.name, fixed, err)
	}
	return &found.Choices[0], nil
}
