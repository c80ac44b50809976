package main

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
)

// A bridgeSplit is which rows are fitted on and which are tested.
type bridgeSplit struct {
	name        string
	train, test func(*bridgeRow) bool
	flat        bool // releases count the same; else each counts half of the next
}

// of selects releases by their place in the list.
func of(from, to int) func(*bridgeRow) bool {
	return func(r *bridgeRow) bool { return from <= r.release && r.release <= to }
}

func bridgeSplits() []bridgeSplit {
	list := []bridgeSplit{
		{"all rows, not held out", of(0, 6), of(0, 6), true},
		{"26.02, 26.02.01 → 26.04", of(0, 1), of(2, 2), false},
		{"26.02, 26.02.01 → 26.04, 26.04.01", of(0, 1), of(2, 3), false},
		{"26.02 .. 26.04 → 26.04.01", of(0, 2), of(3, 3), false},
		{"26.06 → 26.06.01, 26.08", of(4, 4), of(5, 6), false},
		{"26.02 .. 26.04.01 → 26.06 (other epoch)", of(0, 3), of(4, 4), false},
	}
	for _, name := range []string{"deepseek-v3", "qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-120b",
		"kimi-k2", "llama3-70b", "llama3.1-405b"} {
		own := func(r *bridgeRow) bool { return r.family == name }
		list = append(list, bridgeSplit{"without " + name,
			func(r *bridgeRow) bool { return !own(r) }, own, true})
	}
	return list
}

// A bridgeResult is the errors of the tested rows of a split, bare and with families' scales.
type bridgeResult struct {
	bridgeSplit
	rows       []int
	bare, with []float64 // estimated over measured, less one
	fitted     int
	held       int // rows within the interval of their kind
	values     []float64
	logSigma   [2]logSigma // dense, experts
}

// hold fits one part of the rows and tests another.
func (b *bridge) hold(s bridgeSplit) (*bridgeResult, error) {
	weights := make([]float64, len(b.rows))
	b.latest = 0
	for i := range b.rows {
		if s.train(&b.rows[i]) {
			b.latest = max(b.latest, b.rows[i].release)
		}
	}
	r := &bridgeResult{bridgeSplit: s}
	for i := range b.rows {
		row := &b.rows[i]
		if s.train(row) && !row.check {
			weights[i] = 1
			r.fitted++
			if !s.flat {
				weights[i] = math.Exp2(float64(row.release - b.latest))
			}
		}
		if s.test(row) {
			r.rows = append(r.rows, i)
		}
	}
	f, err := b.fitting(weights)
	if err != nil {
		return nil, err
	}
	r.values = exps(f.at)
	if r.logSigma, err = b.logSigmas(f); err != nil {
		return nil, err
	}
	every := make([]int, len(b.rows))
	for i := range every {
		every[i] = i
	}
	times, err := b.times(r.values, every)
	if err != nil {
		return nil, err
	}
	logs := make([]float64, len(b.rows))
	for i := range logs {
		logs[i] = math.Log(b.measured[i] / times[i])
	}
	scale := b.scales(logs, weights)
	names := b.families(f)
	for _, i := range r.rows {
		row := &b.rows[i]
		bare := times[i] / b.measured[i]
		with := bare * math.Exp(scale[row.kin()])
		r.bare, r.with = append(r.bare, bare-1), append(r.with, with-1)
		sigma := r.logSigma[row.kind()].of(slices.Contains(names, row.family))
		if row.release >= secondEpoch && b.latest < secondEpoch {
			sigma = math.Hypot(sigma, beyond)
		}
		if math.Abs(math.Log(with)) <= 1.645*sigma {
			r.held++
		}
	}
	return r, nil
}

// kin identifies rows that share a scale: a model, in BF16 or quantized.
func (r *bridgeRow) kin() string {
	if r.run.Precision == "bf16" {
		return r.family + " in bf16"
	}
	return r.family
}

func (r *bridgeRow) kind() int {
	if r.run.Experts {
		return 1
	}
	return 0
}

// scales are what a family's fitted rows are off by in the mean, as a logarithm, of which one that
// has n rows takes the share n/(n+3): few rows say little.
func (b *bridge) scales(logs, weights []float64) map[string]float64 {
	sum, n := map[string]float64{}, map[string]float64{}
	for i, w := range weights {
		kin := b.rows[i].kin()
		sum[kin] += w * min(max(logs[i], -0.25), 0.25)
		n[kin] += w
	}
	for kin := range sum {
		sum[kin] /= n[kin] + 3
	}
	return sum
}

// mean is the mean error of some of the tested rows in per cent; NaN without rows.
func (r *bridgeResult) mean(b *bridge, off []float64, only func(*bridgeRow) bool) float64 {
	sum, n := 0.0, 0.0
	for i, row := range r.rows {
		if only(&b.rows[row]) {
			sum += math.Abs(off[i])
			n++
		}
	}
	return 100 * sum / n
}

// bridgeColumns are the kinds of row that errors are given for.
func bridgeColumns() (names []string, only []func(*bridgeRow) bool) {
	names = []string{"all", "dense", "experts", "bf16", "fp8", "mxfp8", "nvfp4"}
	only = []func(*bridgeRow) bool{
		func(*bridgeRow) bool { return true },
		func(r *bridgeRow) bool { return !r.run.Experts },
		func(r *bridgeRow) bool { return r.run.Experts },
	}
	for _, prec := range names[3:] {
		only = append(only, func(r *bridgeRow) bool { return string(r.run.Precision) == prec })
	}
	return names, only
}

// bridgeSection runs all splits, which have nothing random, and tells of them.
func bridgeSection(uint64) (*section, error) {
	b, err := newBridge()
	if err != nil {
		return nil, err
	}
	var list []*bridgeResult
	for _, s := range bridgeSplits() {
		r, err := b.hold(s)
		if err != nil {
			return nil, err
		}
		list = append(list, r)
	}
	return &section{name: "megatron-bridge", text: b.text(list), page: b.page(list),
		covers: b.covers(list)}, nil
}

func percent(x float64) string {
	if math.IsNaN(x) {
		return "-"
	}
	return fmt.Sprintf("%.1f", x)
}

func (b *bridge) text(list []*bridgeResult) string {
	var w strings.Builder
	names, only := bridgeColumns()
	fmt.Fprintf(&w, "%d runs on B200, B300, GB200 and GB300; mean error of held-out rows in %%, and "+
		"with a scale for each model from fitted rows\n", len(b.rows))
	for _, r := range list {
		fmt.Fprintf(&w, "%s: fitted on %d rows, tested on %d\n ", r.name, r.fitted, len(r.rows))
		for k, off := range [][]float64{r.bare, r.with} {
			for i, f := range only {
				fmt.Fprintf(&w, " %s %s", names[i], percent(r.mean(b, off, f)))
			}
			if k == 0 {
				w.WriteString("\n  with scales:")
			}
		}
		fmt.Fprintf(&w, "; %d of %d inside the interval; sigma %.3f\n", r.held, len(r.rows), r.logSigma)
		for _, i := range r.worst(3) {
			fmt.Fprintf(&w, "    %s\n", b.line(r, i, " "))
		}
	}
	for j, c := range b.constants {
		fmt.Fprintf(&w, "  %-12s %-10.4g before %.4g ± %.2g: %s\n", c.Name, list[0].values[j], c.Prior,
			c.Sigma, c.Why)
	}
	return w.String()
}

// worst are the places of the tested rows that miss most.
func (r *bridgeResult) worst(n int) []int {
	order := make([]int, len(r.rows))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(x, y int) int {
		return cmp.Compare(math.Abs(r.with[y]), math.Abs(r.with[x]))
	})
	return order[:min(n, len(order))]
}

func (b *bridge) line(r *bridgeResult, i int, sep string) string {
	row := &b.rows[r.rows[i]]
	p := row.plan
	return strings.Join([]string{row.id, row.family, row.run.GPU, releases[row.release],
		string(row.run.Precision), fmt.Sprintf("tp%d pp%d ep%d, %d microbatches", p.TP.Size, p.PP.Size,
			max(row.options.ExpertRanks, 1), p.Microbatches), fmt.Sprintf("%+.1f %%", 100*r.with[i])}, sep)
}

const bridgeAbout = `
## Megatron-Bridge

%d runs of NVIDIA's performance summary on B200, B300, GB200 and GB300, releases 26.02 to 26.08:
rows mbridge-* of bench/accuracy/testdata/published_runs.csv but for Nemotron 3 nano, whose Mamba
layers model.Config does not hold.
Goal: a release that was not fitted on, of the same epoch, at most 6 mean, dense 4; across the epoch
of 26.04 to 26.06 experts at most 12 with a declared feature.

Declared, with all rows in view: which plans have fused experts (from 26.06, MXFP8, gated experts,
but not kimi-k2 nor deepseek-v3 and gpt-oss-120b on b300), which run without graphs, where exchanges
of experts overlap (both from the recipes), priors and their widths, and that a release counts half
of the next one in a fit. No row of 26.06 is fitted on in the split across the epoch: what fusion is
worth is its prior there. That 80 layers on 20 stages are laid out with embedding and loss counted,
which the recipe does not say, fits better (with equal stages dense rows of 26.04 are 4.3 %% off).
mbridge-165 and 167 are priced with what makes them possible, and never
fitted on. "Scale" is one number for each model from fitted rows, shrunk by n/(n+3).

`

const bridgeHead = "| split | rows | all | dense | experts | bf16 | fp8 | mxfp8 | nvfp4 | " +
	"with scale: all | dense | experts | in 90 % interval |\n" +
	"| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"

func (b *bridge) page(list []*bridgeResult) string {
	var w strings.Builder
	fmt.Fprintf(&w, bridgeAbout, len(b.rows))
	w.WriteString(bridgeHead)
	_, only := bridgeColumns()
	for _, r := range list {
		fmt.Fprintf(&w, "| %s | %d | ", r.name, len(r.rows))
		for _, f := range only {
			fmt.Fprintf(&w, "%s | ", percent(r.mean(b, r.bare, f)))
		}
		for _, f := range only[:3] {
			fmt.Fprintf(&w, "%s | ", percent(r.mean(b, r.with, f)))
		}
		fmt.Fprintf(&w, "%d of %d |\n", r.held, len(r.rows))
	}
	w.WriteString("\nRows that miss most, with scales:\n\n| split | row | model | GPU | release | " +
		"precision | plan | off |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n")
	for _, r := range list[:6] {
		for _, i := range r.worst(3) {
			fmt.Fprintf(&w, "| %s | %s |\n", r.name, b.line(r, i, " | "))
		}
	}
	w.WriteString("\nConstants, fitted on all rows:")
	for j, c := range b.constants {
		fmt.Fprintf(&w, " %s %.3g;", c.Name, list[0].values[j])
	}
	d := list[0].logSigma
	fmt.Fprintf(&w, " sigma %.3f dense, %.3f experts, and %.3f or %.3f for a model that is new.\n",
		d[0].noise, d[1].noise, d[0].model, d[1].model)
	return w.String()
}
