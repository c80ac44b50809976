package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
)

// A ranking is how well the order of plans comes out, over cells of at least five plans.
type ranking struct {
	rows, cells         int
	off                 float64 // mean error of time
	median, mean, worst float64 // regret of the plan that is estimated fastest
	five                float64 // mean regret of the best of the first five
	tau                 float64 // Kendall's, with ties (b), mean over cells
	pick                string  // the choice with the largest regret
}

// rank compares estimated and measured times of a token.
func (w *sweep) rank(rows []int, times []float64) ranking {
	r := ranking{rows: len(rows)}
	cells := map[string][]int{}
	var names []string
	for i, k := range rows {
		s := &w.rows[k]
		if cells[s.cell] == nil {
			names = append(names, s.cell)
		}
		cells[s.cell] = append(cells[s.cell], i)
		r.off += relative(times[i], s.seconds) / float64(len(rows))
	}
	var regrets []float64
	r.worst = -1
	for _, name := range names {
		if len(cells[name]) < 5 {
			continue
		}
		var measured, estimated []float64
		for _, i := range cells[name] {
			measured = append(measured, w.rows[rows[i]].seconds/w.rows[rows[i]].tokens)
			estimated = append(estimated, times[i]/w.rows[rows[i]].tokens)
		}
		order := sorted(estimated)
		best := slices.Min(measured)
		regret, five := measured[order[0]]/best-1, math.Inf(1)
		for _, i := range order[:5] {
			five = min(five, measured[i]/best-1)
		}
		regrets = append(regrets, regret)
		r.five += five
		r.tau += kendall(measured, estimated)
		if regret > r.worst {
			r.worst, r.pick = regret, name+" takes "+w.rows[rows[cells[name][order[0]]]].id
		}
	}
	r.cells = len(regrets)
	slices.Sort(regrets)
	n := float64(r.cells)
	for _, x := range regrets {
		r.mean += x / n
	}
	r.median = (regrets[(r.cells-1)/2] + regrets[r.cells/2]) / 2
	r.five, r.tau = r.five/n, r.tau/n
	return r
}

// sorted gives the places of numbers from the least.
func sorted(x []float64) []int {
	order := make([]int, len(x))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		switch {
		case x[a] < x[b]:
			return -1
		case x[a] > x[b]:
			return 1
		}
		return 0
	})
	return order
}

// kendall is the rank correlation tau-b of Kendall (1945).
func kendall(x, y []float64) float64 {
	sign := func(d float64) float64 {
		switch {
		case d > 0:
			return 1
		case d < 0:
			return -1
		}
		return 0
	}
	var both, first, second float64
	for i := range x {
		for j := range i {
			a, b := sign(x[i]-x[j]), sign(y[i]-y[j])
			both += a * b
			first += a * a
			second += b * b
		}
	}
	return both / math.Sqrt(first*second)
}

// A sweepResult is the rankings of all splits.
type sweepResult struct {
	values     []float64
	all, clean ranking // fitted on all clean rows
	draws      []ranking
	left       []ranking
	families   []string
}

// sweepDraws is how often a fifth of the rows is drawn.
const sweepDraws = 20

// hold fits clean rows that are chosen and ranks the other clean ones.
func (w *sweep) hold(chosen func(i int) bool) (ranking, []float64, error) {
	weights := make([]float64, len(w.rows))
	var rest []int
	for i := range w.rows {
		switch {
		case !w.rows[i].clean:
		case chosen(i):
			weights[i] = 1
		default:
			rest = append(rest, i)
		}
	}
	values, err := w.fit(weights)
	if err != nil || len(rest) == 0 {
		return ranking{}, values, err
	}
	times, err := w.times(values, rest)
	if err != nil {
		return ranking{}, nil, err
	}
	return w.rank(rest, times), values, nil
}

// study makes all splits.
func (w *sweep) study(seed uint64) (*sweepResult, error) {
	r := &sweepResult{}
	_, values, err := w.hold(func(int) bool { return true })
	if err != nil {
		return nil, err
	}
	r.values = values
	var every, clean []int
	for i := range w.rows {
		every = append(every, i)
		if w.rows[i].clean {
			clean = append(clean, i)
		}
	}
	for _, part := range []struct {
		rows []int
		to   *ranking
	}{{every, &r.all}, {clean, &r.clean}} {
		times, err := w.times(values, part.rows)
		if err != nil {
			return nil, err
		}
		*part.to = w.rank(part.rows, times)
	}
	for draw := range sweepDraws {
		rng := rand.New(rand.NewPCG(seed, uint64(draw)))
		one, _, err := w.hold(func(int) bool { return rng.Float64() < 0.2 })
		if err != nil {
			return nil, err
		}
		r.draws = append(r.draws, one)
	}
	for i := range w.rows {
		name := w.rows[i].family
		if slices.Contains(r.families, name) {
			continue
		}
		r.families = append(r.families, name)
		one, _, err := w.hold(func(i int) bool { return w.rows[i].family != name })
		if err != nil {
			return nil, err
		}
		r.left = append(r.left, one)
	}
	return r, nil
}

// spread is the mean of something over draws, and its standard deviation.
func spread(draws []ranking, of func(*ranking) float64) (mean, sd float64) {
	n := float64(len(draws))
	for i := range draws {
		mean += of(&draws[i]) / n
	}
	for i := range draws {
		d := of(&draws[i]) - mean
		sd += d * d / n
	}
	return mean, math.Sqrt(sd)
}

func sweepSection(seed uint64) (*section, error) {
	w, err := newSweep()
	if err != nil {
		return nil, err
	}
	r, err := w.study(seed)
	if err != nil {
		return nil, err
	}
	var text, page strings.Builder
	fmt.Fprintf(&text, "%d runs of nanotron on H100, %d of them clean; goal: median regret at most 3 "+
		"%%, tau at least 0.86 when a fifth of the rows is fitted on\n", r.all.rows, r.clean.rows)
	fmt.Fprintf(&page, sweepAbout, r.all.rows, r.clean.rows)
	line := func(name string, x *ranking) {
		fmt.Fprintf(&text, "%s: %d rows in %d cells, error %.1f %%, regret %.2f median %.1f mean "+
			"%.0f max, of the first five %.2f; tau %.3f; worst: %s\n", name, x.rows, x.cells, 100*x.off,
			100*x.median, 100*x.mean, 100*x.worst, 100*x.five, x.tau, x.pick)
		fmt.Fprintf(&page, "| %s | %d | %d | %.1f | %.2f | %.1f | %.0f | %.2f | %.3f |\n", name, x.rows,
			x.cells, 100*x.off, 100*x.median, 100*x.mean, 100*x.worst, 100*x.five, x.tau)
	}
	line("fitted on clean rows, clean rows ranked", &r.clean)
	line("fitted on clean rows, all rows ranked", &r.all)
	for i := range r.draws {
		line(fmt.Sprintf("a fifth of the clean rows, seed %d draw %d", seed, i), &r.draws[i])
	}
	for i := range r.left {
		line("without "+r.families[i], &r.left[i])
	}
	w.summary(&text, &page, r)
	return &section{name: "nanotron", text: text.String(), page: page.String()}, nil
}

// summary tells of the draws together, and of the constants.
func (w *sweep) summary(text, page *strings.Builder, r *sweepResult) {
	median, medianSD := spread(r.draws, func(x *ranking) float64 { return 100 * x.median })
	mean, meanSD := spread(r.draws, func(x *ranking) float64 { return 100 * x.mean })
	worst, worstSD := spread(r.draws, func(x *ranking) float64 { return 100 * x.worst })
	tau, tauSD := spread(r.draws, func(x *ranking) float64 { return x.tau })
	said := fmt.Sprintf("Over %d draws of a fifth: regret median **%.2f** ± %.2f, mean %.1f ± "+
		"%.1f, max %.0f ± %.0f %%; tau **%.3f** ± %.3f.", len(r.draws), median, medianSD, mean,
		meanSD, worst, worstSD, tau, tauSD)
	fmt.Fprintln(text, said)
	fmt.Fprintf(page, "\n%s\nThe largest regrets are choices of runs of the second population that "+
		"the rule does not find, since they have\nfewer than 4 microbatches: of all clean rows, %s.\n\n"+
		"Constants, fitted on all clean rows:", said, r.clean.pick)
	for j, c := range w.constants {
		fmt.Fprintf(text, "  %-10s %-9.4g before %.4g ± %.2g: %s\n", c.Name, r.values[j], c.Prior,
			c.Sigma, c.Why)
		fmt.Fprintf(page, " %s %.3g;", c.Name, r.values[j])
	}
	page.WriteString("\n")
}

const sweepAbout = `
## Order of plans: nanotron's sweep

%d runs on H100, %d of them clean (function sift of bench/accuracy; the rule looks at what was
measured, so both sets are given). A cell is a model on a number of hosts; regret is how much slower
the plan estimated fastest is than the fastest measured one of the cell, among rows that were not
fitted on. Goal: median at most 3 %%, tau at least 0.86 when a fifth of the rows is fitted on.
Chosen with all rows in view: the form of the least time of a layer by tp and pp, and priors.

| split | rows | cells | error %% | regret median %% | mean | max | of the first five | tau |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
`
