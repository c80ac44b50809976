package main

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
)

// A logSigma is the uncertainty of a fit, as standard deviations of the log step time: the noise
// of a row, and what a model adds that was not fitted. Both come from the fitted rows alone, by
// leaving out some of them at a time.
type logSigma struct{ noise, model float64 }

// of is the deviation of a row of a model that is among the fitted ones or is not.
func (d logSigma) of(fitted bool) float64 {
	if fitted {
		return d.noise
	}
	return math.Hypot(d.noise, d.model)
}

// A cover is how many held-out rows of a way to split lie inside their interval. Draws of the same
// rows count as one.
type cover struct {
	name     string
	held, of float64
}

// covers tells of all ways to split, and of all together.
func covers(list []cover) string {
	var w strings.Builder
	w.WriteString(coverAbout)
	var all, others cover
	for _, c := range list {
		fmt.Fprintf(&w, "| %s | %.0f | %.1f |\n", c.name, c.of, 100*c.held/c.of)
		all.held, all.of = all.held+c.held, all.of+c.of
		if !strings.HasPrefix(c.name, "vtrain-single") {
			others.held, others.of = others.held+c.held, others.of+c.of
		}
	}
	fmt.Fprintf(&w, "| **all held-out rows** | %.0f | **%.1f** |\n", all.of, 100*all.held/all.of)
	fmt.Fprintf(&w, "| all but vtrain-single, which has most of them | %.0f | **%.1f** |\n", others.of,
		100*others.held/others.of)
	return w.String()
}

const coverAbout = `
## The interval

Goal: the stated interval of 90 % holds for 85 to 95 % of held-out rows. An estimate's deviation is
the noise of a row, and on top of it, as squares add, what is new: a model that is not among the
fitted ones, and a GPU, a precision or an epoch of the stack that is not. Noise comes from rows
that are left out of the fitted part, the model's share from models that are left out of it one at
a time, each of which counts as one value of Student's distribution. No held-out row has a say. What
an epoch or a GPU adds cannot be seen from inside one, and is a prior of 0.10. Chosen with all
rows in view: that Megatron-Bridge's noise is from single rows by their weights (fifths of the rows
without weights held 125 of 128 inside an epoch), and that models with and without experts share
what a new model adds.

| split | rows | % inside |
| --- | --- | --- |
`

// nine is the standard deviation with which 1.645 of it holds nine in ten of the errors, by their
// weights, and one more that is still to come (Vovk et al., 2005). Nil weights are equal ones.
func nine(off, weights []float64) float64 {
	order := make([]int, len(off))
	sum := 0.0
	weight := func(i int) float64 {
		if weights == nil {
			return 1
		}
		return weights[i]
	}
	for i := range order {
		order[i] = i
		sum += weight(i)
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(off[a], off[b]) })
	left := 0.9 * (sum + 1)
	for _, i := range order {
		if left -= weight(i); left <= 1e-9 {
			return off[i] / 1.645
		}
	}
	return off[order[len(order)-1]] * 1.25 / 1.645 // too few to tell: room beyond the largest
}

// student is how far 1.645 standard deviations are when the deviation itself is known from n
// values: the quantile of 95 % of Student's distribution.
func student(n int) float64 {
	table := []float64{6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812}
	return table[min(max(n, 1), len(table))-1]
}

// strange is what a new model adds to the noise, from the mean squared errors of models that were
// left out. Rows of one model are off together, so that each model counts as one value.
func strange(noise float64, squares []float64) float64 {
	sum := 0.0
	for _, s := range squares {
		sum += s / float64(len(squares))
	}
	wide := math.Sqrt(sum) * student(len(squares)) / 1.645
	return math.Sqrt(max(0, wide*wide-noise*noise))
}

// logSigmas returns the log sigmas of a fit of these samples.
func (f *fitter) logSigmas(list []sample) (d logSigma, err error) {
	if d.noise, err = f.sigma(list); err != nil {
		return d, err
	}
	var names []string
	for _, s := range list {
		if !slices.Contains(names, s.family) {
			names = append(names, s.family)
		}
	}
	if len(names) < 2 { // nothing to learn it from
		d.model = beyond
		return d, nil
	}
	var squares []float64
	quantized := thin(list)
	for _, name := range names {
		in, out := apart(quantized, name)
		prof, err := f.fit(in)
		if err != nil {
			return d, err
		}
		es, err := estimates(out, prof)
		if err != nil {
			return d, err
		}
		sum := 0.0
		for i, t := range out {
			off := math.Log(es[i].Step / t.seconds)
			sum += off * off / float64(len(out))
		}
		squares = append(squares, sum)
	}
	d.model = strange(d.noise, squares)
	return d, nil
}

// beyond is what a thing adds that no row tells of: price.Error's prior.
const beyond = 0.10

// thin takes every few rows, so that at most some hundred are left.
func thin(list []sample) []sample {
	step := (len(list) + 149) / 150
	var quantized []sample
	for i := 0; i < len(list); i += step {
		quantized = append(quantized, list[i])
	}
	return quantized
}

// logSigmas returns the log sigmas of a fit of Megatron-Bridge rows, of models without and with
// experts: each row is predicted from the others, and each model from all others. Errors count as
// their rows do in the fit. Models with and without experts are too few for a number of their own
// for what is new.
func (b *bridge) logSigmas(f *fitting) (d [2]logSigma, err error) {
	slopes, err := f.slopes()
	if err != nil {
		return d, err
	}
	var off, weights [2][]float64
	var squares []float64
	for i, row := range f.rows {
		errs := b.leave(f, slopes, func(k int) bool { return k != i })
		kind := b.rows[row].kind()
		off[kind] = append(off[kind], math.Abs(errs[i]))
		weights[kind] = append(weights[kind], f.weights[i])
	}
	for _, name := range b.families(f) {
		own := func(i int) bool { return b.rows[f.rows[i]].family == name }
		sum, n := 0.0, 0.0
		for i, e := range b.leave(f, slopes, func(i int) bool { return !own(i) }) {
			if own(i) {
				sum += e * e
				n++
			}
		}
		squares = append(squares, sum/n)
	}
	for kind := range d {
		if len(off[kind]) > 0 {
			d[kind].noise = nine(off[kind], weights[kind])
		}
	}
	for kind := range d {
		d[kind].noise = max(d[kind].noise, leastNoise)
		d[kind].model = strange(d[kind].noise, squares)
	}
	return d, nil
}

// leastNoise is the rounding of rates that are printed in whole samples per second
// (planning_notes.md, 2b).
const leastNoise = 0.01

func (b *bridge) families(f *fitting) (names []string) {
	for _, row := range f.rows {
		if name := b.rows[row].family; !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// leave gives the errors of the fitted rows when only some of them are, with the scales of models
// from those.
func (b *bridge) leave(f *fitting, slopes [][]float64, in func(int) bool) []float64 {
	off := f.without(slopes, in)
	logs, weights := make([]float64, len(b.rows)), make([]float64, len(b.rows))
	for i, row := range f.rows {
		if in(i) {
			logs[row], weights[row] = -off[i], f.weights[i]
		}
	}
	scale := b.scales(logs, weights)
	for i, row := range f.rows {
		off[i] += scale[b.rows[row].kin()]
	}
	return off
}

// covers sums the splits of releases and of models.
func (b *bridge) covers(list []*bridgeResult) []cover {
	sums := []cover{{name: "megatron-bridge, another release of the epoch"},
		{name: "megatron-bridge, the other epoch"}, {name: "megatron-bridge, one model left out"}}
	for i, r := range list[1:] { // the first holds nothing out
		at := 0
		switch {
		case strings.HasPrefix(r.name, "without"):
			at = 2
		case i == 4:
			at = 1
		}
		sums[at].held += float64(r.held)
		sums[at].of += float64(len(r.rows))
	}
	return sums
}

// covers gives what a study's two ways to split hold.
func (r *result) covers() []cover {
	_, _, _, held, of := total(r.random)
	n := float64(len(r.random))
	_, _, _, left, all := total(r.left)
	return []cover{{r.name + ", random", float64(held) / n, float64(of) / n},
		{r.name + ", one model left out", float64(left), float64(all)}}
}
