package dryrun

import (
	"bytes"
	_ "embed" // for the style of the page
	"fmt"
	"html"
	"math"
	"strings"
)

//go:embed report.css
var reportStyle string

// A Report is what a page about a step shows.
type Report struct {
	Title    string // such as llama3.1-70b on 64 GB200
	Line     string // one sentence under it
	Timeline *Timeline
	// Low and High are the ends of the interval that nine in ten steps lie in; 0 if not known.
	Low, High float64
	Capacity  int64  // bytes of a device; 0 if not known
	Facts     []Fact // shown large, such as the price of all tokens
	Parts     []Part // of the step, which they sum up to
	Helps     []Help // what would change the step, the best first
	WhatIfs   []Help // what may go wrong
	Notes     []string
	Plan      string // the text of the plan
}

// A Fact is a value and what it is.
type Fact struct{ Name, Value string }

// A Part is one cause of a step's time.
type Part struct {
	Name    string  `json:"name"`
	Seconds float64 `json:"seconds"`
}

// A Help is a change and what a step would take with it.
type Help struct {
	Change string  `json:"change"`
	Step   float64 `json:"step"`
	Peak   int64   `json:"peak,omitempty"` // bytes of the worst rank; 0 if it does not change
}

// HTML draws the page. It needs nothing from elsewhere, and follows a dark background.
func (r *Report) HTML() []byte {
	p := &page{}
	p.add(`<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" `+
		`content="width=device-width"><title>%s</title><style>%s</style><main>`,
		html.EscapeString(r.Title), reportStyle)
	p.add(`<h1>%s</h1><p>%s</p>`, html.EscapeString(r.Title), html.EscapeString(r.Line))
	if r.Timeline.Policy != "" {
		p.add(`<p>%s</p>`, html.EscapeString(r.Timeline.Policy))
	}
	p.tiles(r)
	p.waterfall(r)
	p.helps("What would help most", "Each change alone, the rest as it is.", r.Helps, r.Timeline.Step)
	p.pipeline(r.Timeline)
	p.memory(r.Timeline, r.Capacity)
	p.helps("What may go wrong", "Each mishap alone, for a whole step.", r.WhatIfs, r.Timeline.Step)
	p.notes(r)
	p.add("</main></html>\n")
	return p.Bytes()
}

// A page is HTML on its way.
type page struct{ bytes.Buffer }

func (p *page) add(format string, args ...any) { fmt.Fprintf(p, format, args...) }

func (p *page) head(title, text string) {
	p.add("<h2>%s</h2><p>%s</p>", html.EscapeString(title), html.EscapeString(text))
}

func (p *page) tiles(r *Report) {
	t := r.Timeline
	facts := []Fact{{"seconds a step", span(t.Step)}}
	if r.High > 0 {
		facts[0].Name = fmt.Sprintf("a step (90 %%: %s–%s)", span(r.Low), span(r.High))
	}
	peak, rank := t.Peak()
	fact := Fact{fmt.Sprintf("peak, on rank %d", rank), gib(peak.Total())}
	if r.Capacity > 0 {
		fact.Name = fmt.Sprintf("peak of %s, rank %d", gib(r.Capacity), rank)
	}
	facts = append(facts, fact)
	if len(t.Ranks) > 1 {
		facts = append(facts, Fact{"bubble", percent(t.Bubble)})
	}
	p.add(`<div class="tiles">`)
	for _, f := range append(facts, r.Facts...) {
		p.add(`<div class="tile"><b>%s</b><span>%s</span></div>`, html.EscapeString(f.Value),
			html.EscapeString(f.Name))
	}
	p.add("</div>\n")
}

// least is the share of a step below which a part is not worth a line.
const least = 0.0005

func (p *page) waterfall(r *Report) {
	total := 0.0
	for _, x := range r.Parts {
		total += x.Seconds
	}
	if total <= 0 {
		return
	}
	p.head("Where the time goes", "Of the rank that works longest; the causes sum up to the step.")
	p.add(`<div class="rows">`)
	from := 0.0
	for _, x := range r.Parts {
		if x.Seconds < least*total {
			from += x.Seconds
			continue
		}
		p.row(x.Name, span(x.Seconds), percent(x.Seconds/total), "", from/total, x.Seconds/total)
		from += x.Seconds
	}
	p.row("step", span(total), "", "sum", 0, 1)
	p.add("</div>\n")
}

// row writes a line with a bar; from and width are shares of its track.
func (p *page) row(name, value, share, class string, from, width float64) {
	p.add(`<div>%s</div><div class="n">%s</div><div class="n s">%s</div>`+
		`<div class="track"><i class="%s" style="left:%.2f%%;width:%.2f%%"></i></div>`,
		html.EscapeString(name), value, share, class, 100*from, 100*width)
}

// helps writes changes with bars of what they save or cost.
func (p *page) helps(title, text string, list []Help, step float64) {
	if len(list) == 0 || step <= 0 {
		return
	}
	p.head(title, text)
	widest := 0.01
	for _, h := range list {
		widest = max(widest, math.Abs(h.Step/step-1))
	}
	p.add(`<div class="rows">`)
	for _, h := range list {
		change := h.Step/step - 1
		class := "good"
		if change > 0 {
			class = "worse"
		}
		value := span(h.Step)
		if h.Peak > 0 {
			value += ", " + gib(h.Peak)
		}
		p.row(h.Change, value, signed(change), class, 0, math.Abs(change)/widest)
	}
	p.add("</div>\n")
}

func (p *page) notes(r *Report) {
	if r.Plan != "" {
		p.head("The plan", "As deepwell compile and deepwell train take it.")
		p.add("<pre>%s</pre>", html.EscapeString(strings.TrimSpace(r.Plan)))
	}
	if len(r.Notes) > 0 {
		p.add("<footer>")
		for _, n := range r.Notes {
			p.add("<div>%s</div>", html.EscapeString(n))
		}
		p.add("</footer>")
	}
}

// span spells seconds with three digits.
func span(s float64) string {
	switch {
	case s >= 100:
		return fmt.Sprintf("%.0f s", s)
	case s >= 10:
		return fmt.Sprintf("%.1f s", s)
	case s >= 1:
		return fmt.Sprintf("%.2f s", s)
	case s >= 0.1:
		return fmt.Sprintf("%.0f ms", 1e3*s)
	case s >= 0.01:
		return fmt.Sprintf("%.1f ms", 1e3*s)
	case s >= 1e-3:
		return fmt.Sprintf("%.2f ms", 1e3*s)
	case s > 0:
		return fmt.Sprintf("%.3g µs", 1e6*s)
	}
	return "0 s"
}

func percent(share float64) string { return fmt.Sprintf("%.1f %%", 100*share) }

func signed(share float64) string {
	return strings.Replace(fmt.Sprintf("%+.1f %%", 100*share), "-", "−", 1)
}

func gib(bytes int64) string {
	x := float64(bytes) / (1 << 30)
	switch {
	case x >= 100:
		return fmt.Sprintf("%.0f GiB", x)
	case x >= 0.1:
		return fmt.Sprintf("%.1f GiB", x)
	}
	return fmt.Sprintf("%.1f MiB", 1024*x)
}
