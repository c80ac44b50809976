package report

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/svg"
)

// Page draws runs on one page: one by itself, several beside each other. It follows a dark
// background.
func Page(runs []*Run) []byte {
	p := page{svg.New(title(runs), svg.Style, line(runs))}
	p.body(runs)
	return p.End()
}

type page struct{ *svg.Page }

// body is what stands under the title.
func (p page) body(runs []*Run) {
	if len(runs) == 1 {
		p.tiles(runs[0])
	} else {
		p.table(runs)
	}
	p.losses(runs)
	p.figures(runs, "Learning rate", "", "learning rate", false,
		func(s event.Step) float64 { return s.Rate })
	p.figures(runs, "Gradient norm", "Of all gradients together, before clipping.", "grad norm", true,
		func(s event.Step) float64 { return float64(s.GradNorm) })
	p.figures(runs, "Throughput", "Mean over the steps before.", "tokens/s", false,
		func(s event.Step) float64 { return s.TokensPerSecond })
	p.figures(runs, "MFU", "The share of the GPUs' BF16 peak that the model's arithmetic takes.",
		"MFU, %", false, func(s event.Step) float64 { return 100 * s.MFU })
	p.figures(runs, "Memory", "The most that the fullest device held so far.", "memory, GiB", false,
		func(s event.Step) float64 { return human.InGiB(s.MemoryBytes) })
	p.experts(runs)
	p.rejected(runs)
	p.precision(runs)
	p.warnings(runs)
}

func title(runs []*Run) string {
	if len(runs) == 1 {
		return runs[0].Name
	}
	return human.Count(len(runs), "run")
}

// line says what was trained on what; of several runs, what they have in common.
func line(runs []*Run) string {
	facts := lists.Map(runs, func(r *Run) []string { return r.facts() })
	return strings.Join(slices.DeleteFunc(slices.Clone(facts[0]), func(f string) bool {
		return slices.ContainsFunc(facts, func(other []string) bool { return !slices.Contains(other, f) })
	}), " · ")
}

// facts describes a run, a fact at a time.
func (r *Run) facts() []string {
	e := r.Run
	if e == nil {
		return nil
	}
	list := []string{e.Model, human.Parameters(e.Parameters, 1) + " parameters", e.Precision}
	if e.Plan != "" {
		list = append(list, e.Plan)
	}
	list = append(list, fmt.Sprintf("%s × %s", human.Thousands(int64(e.Devices)), e.Device),
		human.Thousands(int64(e.Batch)*int64(e.Seq))+" tokens a step")
	if w := r.Weights; w != nil && w.From != event.FromCheckpoint {
		list = append(list, w.Line())
	}
	return list
}

// last is the newest step; zero before the first.
func (r *Run) last() event.Step {
	if len(r.Steps) == 0 {
		return event.Step{}
	}
	return r.Steps[len(r.Steps)-1]
}

// state says how a run stands.
func (r *Run) state() string {
	switch s := r.last(); {
	case r.Finished != nil && r.Finished.Step >= r.Finished.Steps:
		return "done"
	case r.Finished != nil:
		return "paused"
	case s.Step > 0 && s.Step == s.Steps:
		return "done"
	}
	return "not finished"
}

// best is the lowest validation loss.
func (r *Run) best() (event.Eval, bool) {
	if len(r.Evals) == 0 {
		return event.Eval{}, false
	}
	return slices.MinFunc(r.Evals, func(a, b event.Eval) int {
		if a.Loss < b.Loss || math.IsNaN(float64(b.Loss)) {
			return -1
		}
		return 1
	}), true
}

// rate is the mean throughput, in tokens a second.
func (r *Run) rate() float64 {
	seconds := lists.Sum(r.Steps, func(s event.Step) float64 { return s.Seconds })
	if seconds == 0 {
		return 0
	}
	tokens := lists.Sum(r.Steps, func(s event.Step) float64 { return s.TokensPerSecond * s.Seconds })
	return tokens / seconds
}

// A fact is a value and what it is.
type fact struct{ name, value string }

func (p page) tiles(r *Run) {
	s := r.last()
	facts := []fact{
		{"steps, " + r.state(), fmt.Sprintf("%s of %s", human.Thousands(int64(s.Step)),
			human.Thousands(int64(s.Steps)))},
		{"loss, mean of the last steps", figure(tail(r.smooth()))},
	}
	if e, ok := r.best(); ok {
		facts = append(facts, fact{"best eval, step " + human.Thousands(int64(e.Step)),
			figure(float64(e.Loss))}, fact{"perplexity of it", figure(math.Exp(float64(e.Loss)))})
	}
	facts = append(facts, fact{"tokens", human.Amount(float64(s.Tokens))},
		fact{"tokens/s", human.Thousands(int64(math.Round(r.rate())))},
		fact{"trained for", r.trained().Round(time.Second).String()},
		fact{"rejected steps", human.Thousands(int64(len(r.Rejected)))})
	if r.Resumes > 0 {
		facts = append(facts, fact{"resumed", human.Count(r.Resumes, "time")})
	}
	p.Add(`<div class="tiles">`)
	for _, f := range facts {
		p.Add(`<div class="tile"><b>%s</b><span>%s</span></div>`, svg.Text(f.value), svg.Text(f.name))
	}
	p.Add("</div>\n")
}

// trained is the time of all steps that count.
func (r *Run) trained() time.Duration {
	seconds := lists.Sum(r.Steps, func(s event.Step) float64 { return s.Seconds })
	return time.Duration(seconds * float64(time.Second))
}

func (p page) table(runs []*Run) {
	p.Add(`<div class="scroll"><table><tr><th>run<th>steps<th>loss<th>best eval<th>tokens/s` +
		"<th>trained for<th>rejected<th>what differs</tr>\n")
	common := strings.Split(line(runs), " · ")
	for i, r := range runs {
		s := r.last()
		eval := "–"
		if e, ok := r.best(); ok {
			eval = figure(float64(e.Loss))
		}
		own := slices.DeleteFunc(r.facts(), func(f string) bool { return slices.Contains(common, f) })
		p.Add(`<tr><td><i class="dot" style="background:var(--s%d)"></i>%s<td>%s of %s<td>%s<td>%s`+
			"<td>%s<td>%s<td>%d<td>%s</tr>\n", color(i), svg.Text(r.Name), human.Thousands(int64(s.Step)),
			human.Thousands(int64(s.Steps)), figure(tail(r.smooth())), eval,
			human.Thousands(int64(math.Round(r.rate()))), r.trained().Round(time.Second),
			len(r.Rejected), svg.Text(strings.Join(own, " · ")))
	}
	p.Add("</table></div>\n")
}

// color is the color of a run; the first color is for grids.
func color(run int) int { return 1 + run%(svg.Colors-1) }

// figure writes a figure with four digits.
func figure(x float64) string {
	switch {
	case math.IsNaN(x):
		return "–"
	case math.IsInf(x, 0):
		return "∞"
	}
	return fmt.Sprintf("%.4g", x)
}

func tail(list []float64) float64 {
	if len(list) == 0 {
		return math.NaN()
	}
	return list[len(list)-1]
}

// window is how many steps a point of a smoothed curve is the mean of, at most.
func (r *Run) window() int { return max(1, min(100, len(r.Steps)/25)) }

// smooth gives the mean loss of each step and the window before it.
func (r *Run) smooth() []float64 {
	return means(lists.Map(r.Steps, func(s event.Step) float64 { return float64(s.Loss) }), r.window())
}

// means gives for each place the mean of the window that ends there; values that are not finite
// do not count.
func means(list []float64, window int) []float64 {
	out := make([]float64, len(list))
	sum, count := 0.0, 0
	good := func(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }
	for i, x := range list {
		if good(x) {
			sum, count = sum+x, count+1
		}
		if i >= window && good(list[i-window]) {
			sum, count = sum-list[i-window], count-1
		}
		if out[i] = math.NaN(); count > 0 {
			out[i] = sum / float64(count)
		}
	}
	return out
}

// xs are the steps of a run.
func (r *Run) xs() []float64 {
	return lists.Map(r.Steps, func(s event.Step) float64 { return float64(s.Step) })
}

// steps is how far the longest run goes.
func steps(runs []*Run) float64 {
	return float64(lists.Max(runs, 0, func(r *Run) int { return r.last().Steps }))
}

// losses draws the loss, smoothed and as it is, and validations.
func (p page) losses(runs []*Run) {
	var list []svg.Series
	for i, r := range runs {
		list = append(list, svg.Series{Faint: true, Color: color(i), X: r.xs(),
			Y: lists.Map(r.Steps, func(s event.Step) float64 { return float64(s.Loss) })})
	}
	for i, r := range runs {
		name := "loss"
		if len(runs) > 1 {
			name = r.Name
		}
		list = append(list, svg.Series{Name: name, Color: color(i), X: r.xs(), Y: r.smooth()})
	}
	for i, r := range runs {
		s := svg.Series{Name: "eval", Color: color(i), Dots: true}
		if len(runs) == 1 {
			s.Color = color(i + 1)
		} else {
			s.Name = r.Name + ", eval"
		}
		for _, e := range r.Evals {
			s.X, s.Y = append(s.X, float64(e.Step)), append(s.Y, float64(e.Loss))
		}
		if len(s.X) > 0 {
			list = append(list, s)
		}
	}
	text := "The mean over a window of steps; each step in the background."
	if slices.ContainsFunc(runs, func(r *Run) bool { return len(r.Evals) > 0 }) {
		text += " Dots are validations."
	}
	p.Head("Loss", text)
	p.Plot(svg.Plot{Label: "loss by step", X: "step", Y: "loss", Series: list, Most: steps(runs)})
}

// figures draws one figure of each step, unless it is 0 everywhere.
func (p page) figures(runs []*Run, head, text, unit string, log bool, of func(event.Step) float64) {
	var list []svg.Series
	some := false
	for i, r := range runs {
		s := svg.Series{Name: r.Name, Color: color(i), X: r.xs(), Y: lists.Map(r.Steps, of)}
		if len(runs) == 1 {
			s.Name = ""
		}
		if unit == "tokens/s" {
			s.Y = means(s.Y, r.window())
		}
		some = some || slices.ContainsFunc(s.Y, func(y float64) bool { return y != 0 })
		list = append(list, s)
	}
	if !some {
		return
	}
	p.Head(head, text)
	p.Plot(svg.Plot{Label: strings.ToLower(head) + " by step", X: "step", Y: unit, Log: log,
		Zero: !log, Series: list, Most: steps(runs)})
}
