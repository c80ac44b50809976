package parity

import (
	_ "embed" // for the style of the page
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/svg"
)

//go:embed report.css
var reportStyle string

// HTML draws the page: verdicts, gaps and curves. It needs nothing from elsewhere, and follows a
// dark background.
func (r *Result) HTML() []byte {
	title := "Loss against BF16"
	if r.Model != "" {
		title = r.Model + ": loss against BF16"
	}
	p := page{svg.New(title, reportStyle, r.Line())}
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

// A series is a curve on its way into a picture.
type series struct {
	name   string
	color  int
	points []float64 // one for each step from window on
	bound  float64   // a line of its own; 0 draws none
}

// window is how many steps a point of a curve is the mean of: without it the curves are as rough as
// batches differ, and lie on each other.
func (r *Result) window() int { return max(1, min(tail, r.Steps/10)) }

// gaps draws by how much the loss is worse, step by step, in the mean over pairs.
func (p page) gaps(r *Result) {
	var list []series
	for i, c := range r.all() {
		sum := make([]float64, r.Steps-r.window()+1)
		for pair, curve := range c.Curves {
			ours, theirs := smooth(curve, r.window()), smooth(r.BF16[pair], r.window())
			for k := range sum {
				sum[k] += 100 * (ours[k] - theirs[k]) / theirs[k] / float64(len(c.Curves))
			}
		}
		list = append(list, series{c.Name, i, sum, c.Bound})
	}
	p.Add("<h2>The gap</h2><p>Percent of the loss in BF16, mean over pairs and over the %d steps "+
		"before. Broken lines are bounds.</p>", r.window())
	p.plot(r, list, true)
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
	list := []series{{"bf16", 0, mean(r.BF16), 0}}
	for i, c := range r.all() {
		if i > 0 { // the null lies on BF16
			list = append(list, series{c.Name, i, mean(c.Curves), 0})
		}
	}
	p.Add("<h2>The loss</h2><p>Mean over pairs and over the %d steps before.</p>", r.window())
	p.plot(r, list, false)
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

// The picture, in its own units.
const (
	plotLeft, plotTop     = 64.0, 10.0
	plotWidth, plotHeight = 860.0, 300.0
	colors                = 5
	mostPoints            = 430 // of a curve: one for two units of the picture's width
)

// plot draws series over the steps.
func (p page) plot(r *Result, list []series, zero bool) {
	low, high := math.Inf(1), math.Inf(-1)
	see := func(v float64) { low, high = min(low, v), max(high, v) }
	for _, s := range list {
		for _, v := range s.points {
			see(v)
		}
		if s.bound > 0 {
			see(s.bound)
		}
	}
	if zero {
		see(0)
	}
	if high <= low {
		high = low + 1e-6
	}
	pad := (high - low) * 0.05
	low, high = low-pad, high+pad
	y := func(v float64) float64 { return plotTop + plotHeight*(high-v)/(high-low) }
	p.Add(`<div class="key">`)
	for _, s := range list {
		p.Add(`<span><i style="background:var(--s%d)"></i>%s</span>`, s.color%colors,
			svg.Text(s.name))
	}
	p.Add(`</div><figure><svg viewBox="0 0 %s %s" role="img" aria-label="curves by step">`,
		svg.Px(plotLeft+plotWidth+16), svg.Px(plotTop+plotHeight+26))
	step := svg.Step((high - low) / 6)
	for i := math.Ceil(low / step); i*step <= high; i++ {
		class := "grid"
		if zero && i == 0 {
			class = "zero"
		}
		p.Add(`<path class="%s" d="M%s %sh%s"/><text class="end" x="%s" y="%s">%s</text>`, class,
			svg.Px(plotLeft), svg.Px(y(i*step)), svg.Px(plotWidth), svg.Px(plotLeft-8), svg.Px(y(i*step)+4),
			mark(i, step))
	}
	p.steps(r)
	for _, s := range list {
		if s.bound > 0 {
			p.Add(`<path class="bound" style="stroke:var(--s%d)" d="M%s %sh%s"/>`, s.color%colors,
				svg.Px(plotLeft), svg.Px(y(s.bound)), svg.Px(plotWidth))
		}
		p.curve(r, s, y)
	}
	p.Add("</svg></figure>\n")
}

// place is where a step stands.
func (r *Result) place(step float64) float64 {
	return plotLeft + plotWidth*step/float64(max(1, r.Steps))
}

func (p page) steps(r *Result) {
	every := max(1, svg.Step(float64(r.Steps)/8))
	for s := 0.0; s <= float64(r.Steps); s += every {
		p.Add(`<text class="mid" x="%s" y="%s">%.0f</text>`, svg.Px(r.place(s)),
			svg.Px(plotTop+plotHeight+18), s)
	}
}

func (p page) curve(r *Result, s series, y func(float64) float64) {
	p.Add(`<path class="curve" style="stroke:var(--s%d)" d="`, s.color%colors)
	every := (len(s.points) + mostPoints - 1) / mostPoints
	first := r.Steps - len(s.points) + 1
	word := "M"
	for k := (len(s.points) - 1) % max(1, every); k < len(s.points); k += every {
		p.Add("%s%s %s", word, svg.Px(r.place(float64(first+k))), svg.Px(y(s.points[k])))
		word = "L"
	}
	p.Add(`"/>`)
}

// mark formats a tick label, i·step, with as many digits as the step needs.
func mark(i, step float64) string {
	if i == 0 {
		return "0" // and not −0
	}
	digits := max(0, int(math.Ceil(-math.Log10(step))))
	return strings.Replace(strconv.FormatFloat(i*step, 'f', digits, 64), "-", "−", 1)
}
