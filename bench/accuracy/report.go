package main

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/price"
)

// rows lists every row with its error.
func (r *result) rows() string {
	var b strings.Builder
	for i, s := range r.list {
		fmt.Fprintf(&b, "%s %-44s measured %9.4f s estimated %9.4f s %+6.1f %%\n", s.id, s.layout,
			s.seconds, r.steps[i], 100*(r.steps[i]/s.seconds-1))
	}
	return b.String()
}

// worst are the places of the rows that miss most.
func (r *result) worst(n int) []int {
	order := make([]int, len(r.list))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Compare(relative(r.steps[b], r.list[b].seconds),
			relative(r.steps[a], r.list[a].seconds))
	})
	return order[:min(n, len(order))]
}

// markdown adds a section to the page.
func (r *result) markdown(b *bytes.Buffer) {
	first, last := r.list[0].id, r.list[len(r.list)-1].id
	fmt.Fprintf(b, "\n## %s\n\n%s; rows %s to %s.\nGoal: %s.\n\n", r.name, r.about, first, last,
		r.goal)
	fmt.Fprintf(b, "![measured and estimated](accuracy-%s.svg)\n\n", r.name)
	b.WriteString("| split | mean % | max % | worst draw % | inside the 90 % interval |\n")
	b.WriteString("| --- | --- | --- | --- | --- |\n")
	fmt.Fprintf(b, "| fitted on all %d rows | %.2f | %.2f | | %d of %d |\n", len(r.list),
		100*r.all.mean, 100*r.all.worst, r.all.held, r.all.of)
	mean, worst, most, held, of := total(r.random)
	fmt.Fprintf(b, "| fitted on %.0f %%, %d draws, seed %d | **%.2f** | **%.2f** | %.2f | %.1f %% |\n",
		100*r.share, len(r.random), r.seed, 100*mean, 100*worst, 100*most,
		100*float64(held)/float64(of))
	mean, worst, most, held, of = total(r.left)
	fmt.Fprintf(b, "| one of %d models left out | **%.2f** | %.2f | **%.2f** | %.1f %% |\n",
		len(r.left), 100*mean, 100*worst, 100*most, 100*float64(held)/float64(of))
	for i, f := range r.families {
		fmt.Fprintf(b, "| without %s | %.2f | %.2f | | %d of %d |\n", f, 100*r.left[i].mean,
			100*r.left[i].worst, r.left[i].held, r.left[i].of)
	}
	if r.note != "" {
		fmt.Fprintf(b, "\n%s\n", r.note)
	}
	b.WriteString("\nConstants, fitted on all rows:")
	for _, e := range r.profile.Effects() {
		if slices.Contains(r.effects, e.Name) {
			fmt.Fprintf(b, " %s %.3g;", e.Name, *e.Value)
		}
	}
	fmt.Fprintf(b, " sigma %.3f, and %.3f for a model that is new.\n\nRows that miss most:\n\n",
		r.logSigma.noise, r.logSigma.model)
	b.WriteString("| row | layout | measured s | estimated s | % |\n| --- | --- | --- | --- | --- |\n")
	for _, i := range r.worst(6) {
		s := r.list[i]
		name := s.layout
		if name == s.id {
			p := s.plan
			name = fmt.Sprintf("%s dp%d tp%d pp%d, %d microbatches of %d sequences", s.family,
				max(p.DP, 1)*max(p.FSDP.Size, 1), p.TP.Size, p.PP.Size, p.Microbatches,
				p.MicrobatchSequences())
		}
		fmt.Fprintf(b, "| %s | %s | %.4g | %.4g | %+.1f |\n", s.id, name, s.seconds, r.steps[i],
			100*(r.steps[i]/s.seconds-1))
	}
}

// picture draws estimated over measured time on logarithmic scales: a point for each row, the line
// on which both are equal, and the interval around it.
func (r *result) picture() []byte {
	const side, edge = 320.0, 34.0
	low, high := math.Inf(1), math.Inf(-1)
	for i, s := range r.list {
		low = min(low, s.seconds, r.steps[i])
		high = max(high, s.seconds, r.steps[i])
	}
	low, high = math.Log10(low)-0.05, math.Log10(high)+0.05
	at := func(v float64) float64 { return edge + (math.Log10(v)-low)/(high-low)*(side-2*edge) }
	x := at
	y := func(v float64) float64 { return side - at(v) }
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%g" height="%g" `+
		`viewBox="0 0 %g %g" font-family="sans-serif" font-size="10">`+"\n", side, side, side, side)
	fmt.Fprintf(&b, `<rect width="%g" height="%g" fill="#fff"/>`+"\n", side, side)
	from, to := math.Pow(10, low), math.Pow(10, high)
	f := math.Exp(1.645 * r.logSigma.noise)
	fmt.Fprintf(&b, `<polygon points="%.1f,%.1f %.1f,%.1f %.1f,%.1f %.1f,%.1f" fill="#dde8f5"/>`+"\n",
		x(from), y(from*f), x(to), y(to*f), x(to), y(to/f), x(from), y(from/f))
	fmt.Fprintf(&b, `<path d="M%.1f %.1fL%.1f %.1f" stroke="#888"/>`+"\n", x(from), y(from), x(to),
		y(to))
	for e := math.Ceil(low); e <= high; e++ {
		v := math.Pow(10, e)
		fmt.Fprintf(&b, `<text x="%.1f" y="%g" text-anchor="middle">%g s</text>`+"\n", x(v), side-16, v)
		fmt.Fprintf(&b, `<text x="4" y="%.1f">%g</text>`+"\n", y(v)+3, v)
	}
	// One path for all points: a dot is a line of no length with round ends.
	b.WriteString(`<path stroke="#1f5fa8" stroke-width="4" stroke-linecap="round" ` +
		`stroke-opacity=".6" d="`)
	for i, s := range r.list {
		fmt.Fprintf(&b, "M%.1f %.1fh0", x(s.seconds), y(r.steps[i]))
	}
	b.WriteString("\"/>\n")
	fmt.Fprintf(&b, `<text x="%g" y="%g" text-anchor="middle">measured; estimated upwards; %s`+
		"</text>\n</svg>\n", side/2, side-4, r.name)
	return b.Bytes()
}

// A memory is the peaks of SimuMax's layouts, with constants that were fitted on all of them, and
// on all models but one.
type memory struct {
	list        []sample
	peaks       []float64 // GiB
	mean, worst float64
	left        []split
	families    []string
	saved       float64
	transient   float64
}

// memories judges the two constants of memory: the share of activations that is kept, and the
// tensors that are alive while one layer is computed.
func memories() (*memory, error) {
	list, err := simumax()
	if err != nil {
		return nil, err
	}
	m := &memory{list: layouts(list)}
	base, err := price.Find("megatron")
	if err != nil {
		return nil, err
	}
	all, err := fitMemory(m.list, base)
	if err != nil {
		return nil, err
	}
	m.saved, m.transient = all.Saved, all.Transient
	if m.mean, m.worst, m.peaks, err = judgeMemory(m.list, all); err != nil {
		return nil, err
	}
	for _, t := range m.list {
		if slices.Contains(m.families, t.family) {
			continue
		}
		m.families = append(m.families, t.family)
		in, out := apart(m.list, t.family)
		prof, err := fitMemory(in, base)
		if err != nil {
			return nil, err
		}
		mean, worst, _, err := judgeMemory(out, prof)
		if err != nil {
			return nil, err
		}
		m.left = append(m.left, split{mean: mean, worst: worst, of: len(out)})
	}
	return m, nil
}

func judgeMemory(list []sample, prof *price.Profile) (mean, worst float64, peaks []float64,
	err error) {
	es, err := estimates(list, prof)
	if err != nil {
		return 0, 0, nil, err
	}
	for i, s := range list {
		gib := float64(es[i].Peak) / (1 << 30)
		peaks = append(peaks, gib)
		off := relative(gib, s.gib)
		mean += off / float64(len(list))
		worst = max(worst, off)
	}
	return mean, worst, peaks, nil
}

// fitMemory finds the two constants by least squares of relative errors.
func fitMemory(list []sample, base *price.Profile) (*price.Profile, error) {
	prof := base.Clone()
	prof.Saved, prof.Transient = 1, 3
	fields := []func(*price.Profile) *float64{
		func(p *price.Profile) *float64 { return &p.Saved },
		func(p *price.Profile) *float64 { return &p.Transient },
	}
	steps := []float64{1e-3, 1e-2}
	for range 6 {
		_, _, now, err := judgeMemory(list, prof)
		if err != nil {
			return nil, err
		}
		a, b := [][]float64{{1e-9, 0}, {0, 1e-9}}, []float64{0, 0}
		slopes := make([][]float64, len(fields))
		for j, field := range fields {
			moved := prof.Clone()
			*field(moved) += steps[j]
			_, _, next, err := judgeMemory(list, moved)
			if err != nil {
				return nil, err
			}
			for i, s := range list {
				slopes[j] = append(slopes[j], (next[i]-now[i])/steps[j]/s.gib)
			}
		}
		for i, s := range list {
			for j := range fields {
				b[j] += slopes[j][i] * (1 - now[i]/s.gib)
				for k := range fields {
					a[j][k] += slopes[j][i] * slopes[k][i]
				}
			}
		}
		for j, d := range solve(a, b) {
			*fields[j](prof) += d
		}
	}
	return prof, nil
}

func (m *memory) text() string {
	var b strings.Builder
	mean, _, most, _, _ := total(m.left)
	fmt.Fprintf(&b, "%d layouts, 2 constants: %.3f mean, %.3f max; one of %d models left out: "+
		"%.3f mean, %.3f max; saved %.4f, transient %.3f\n", len(m.list), 100*m.mean, 100*m.worst,
		len(m.left), 100*mean, 100*most, m.saved, m.transient)
	return b.String()
}

func (m *memory) markdown(b *bytes.Buffer) {
	mean, _, most, _, _ := total(m.left)
	fmt.Fprintf(b, "\n## Memory of SimuMax's layouts\n\nGoal: at most 0.35 mean, 1.2 max (SimuMax "+
		"itself 0.46 / 1.38). Two constants, fitted on all %d layouts:\n**%.2f mean, %.2f max %%**. "+
		"One of %d models left out: %.2f mean, %.2f max %%.\n\n", len(m.list), 100*m.mean,
		100*m.worst, len(m.left), 100*mean, 100*most)
	b.WriteString("| row | layout | measured GiB | estimated GiB | % |\n" +
		"| --- | --- | --- | --- | --- |\n")
	for i, s := range m.list {
		fmt.Fprintf(b, "| %s | %s | %.2f | %.2f | %+.2f |\n", s.id, s.layout, s.gib, m.peaks[i],
			100*(m.peaks[i]/s.gib-1))
	}
}
