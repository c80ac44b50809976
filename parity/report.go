package parity

import (
	"fmt"
	"strings"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/svg"
)

// HTML draws the page: verdicts, gaps and curves. It needs nothing from elsewhere, and follows a
// dark background.
func (r *Result) HTML() []byte {
	title := "Loss against BF16"
	if r.Model != "" {
		title = r.Model + ": loss against BF16"
	}
	p := page{svg.New(title, svg.Style, r.Line())}
	p.table(r)
	p.gaps(r)
	p.losses(r)
	p.Add("<footer>%s</footer>", svg.Text(reading))
	return p.End()
}

// reading says how to read the page.
const reading = "Runs of a pair have the same seed and the same rows in the same order. Limits " +
	"are one-sided, 95 %, of the mean over pairs, by Student's distribution. The null is BF16 " +
	"against BF16 with weights changed by one part in 100,000: what it shows is noise. What is " +
	"not resolved has not passed."

type page struct{ *svg.Page }

// all lists what is compared with BF16: the null, noise, then formats.
func (r *Result) all() []*Comparison {
	list := []*Comparison{&r.Null}
	for _, more := range [][]Comparison{r.Matched, r.Formats} {
		for i := range more {
			list = append(list, &more[i])
		}
	}
	return list
}

func (p page) table(r *Result) {
	p.Add(`<div class="scroll"><table><tr><th>against BF16<th>gap %%<th>sd<th>95 %% limits<th>bound` +
		"<th>by pair<th>verdict</tr>\n")
	for _, c := range r.all() {
		name := svg.Text(c.Name)
		if c.Share > 0 {
			name += fmt.Sprintf("<small>%.0f %% of the work of linear layers</small>", 100*c.Share)
		}
		class := map[Verdict]string{Met: "met", Missed: "missed", NotResolved: "open"}[c.Is]
		verdict := ""
		if c.Is != "" {
			verdict = fmt.Sprintf(`<b class="%s">%s</b><small>%s</small>`, class, c.Is,
				svg.Text(c.Why))
		}
		p.Add("<tr><td>%s<td>%s<td>%s<td>%s<td>%s<td>%s<td>%s</tr>\n", name, signed(c.Mean), c.spread(),
			c.interval(), c.bound(), strings.Join(lists.Map(c.Gaps, signed), ", "), verdict)
	}
	p.Add("</table></div>\n")
}

// window is how many steps a point of a curve is the mean of: without it the curves are as rough as
// batches differ, and lie on each other.
func (r *Result) window() int { return max(1, min(tail, r.Steps/10)) }

// gaps draws by how much the loss is worse, step by step, in the mean over pairs.
func (p page) gaps(r *Result) {
	var list []svg.Series
	for i, c := range r.all() {
		sum := make([]float64, r.Steps-r.window()+1)
		for pair, curve := range c.Curves {
			ours, theirs := smooth(curve, r.window()), smooth(r.BF16[pair], r.window())
			for k := range sum {
				sum[k] += 100 * (ours[k] - theirs[k]) / theirs[k] / float64(len(c.Curves))
			}
		}
		list = append(list, svg.Series{Name: c.Name, Color: i, X: r.steps(), Y: sum, Bound: c.Bound})
	}
	p.Add("<h2>The gap</h2><p>Percent of the loss in BF16, mean over pairs and over the %d steps "+
		"before. Broken lines are bounds.</p>", r.window())
	p.Plot(svg.Plot{Label: "gap by step", X: "step", Y: "gap, %", Series: list, Zero: true})
}

// losses draws the curves themselves.
func (p page) losses(r *Result) {
	mean := func(curves [][]float64) []float64 {
		sum := make([]float64, r.Steps-r.window()+1)
		for _, curve := range curves {
			for k, v := range smooth(curve, r.window()) {
				sum[k] += v / float64(len(curves))
			}
		}
		return sum
	}
	list := []svg.Series{{Name: "bf16", X: r.steps(), Y: mean(r.BF16)}}
	for i, c := range r.all() {
		if i > 0 { // the null lies on BF16
			list = append(list, svg.Series{Name: c.Name, Color: i, X: r.steps(), Y: mean(c.Curves)})
		}
	}
	p.Add("<h2>The loss</h2><p>Mean over pairs and over the %d steps before.</p>", r.window())
	p.Plot(svg.Plot{Label: "loss by step", X: "step", Y: "loss", Series: list})
}

// smooth gives means over a window, one for each place where it fits.
func smooth(x []float64, window int) []float64 {
	out := make([]float64, 0, len(x)-window+1)
	sum := 0.0
	for i, v := range x {
		if sum += v; i >= window {
			sum -= x[i-window]
		}
		if i >= window-1 {
			out = append(out, sum/float64(window))
		}
	}
	return out
}

// steps are the steps that a curve of means has a point for.
func (r *Result) steps() []float64 {
	list := make([]float64, r.Steps-r.window()+1)
	for i := range list {
		list[i] = float64(r.window() + i)
	}
	return list
}
