package dryrun

import (
	_ "embed" // for the style of the page
	"fmt"
	"math"
	"strings"

	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/svg"
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
	Capacity  int64        // bytes of a device; 0 if not known
	Facts     []Fact       // shown large, such as the price of all tokens
	Parts     []Part       // of the step, which they sum up to
	Helps     []Suggestion // what would change the step, the best first
	WhatIfs   []Suggestion // what may go wrong
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

// A Suggestion is a change and what a step would take with it.
type Suggestion struct {
	Change string  `json:"change"`
	Step   float64 `json:"step"`
	Peak   int64   `json:"peak,omitempty"` // bytes of the worst rank; 0 if it does not change
}

// HTML draws the page. It needs nothing from elsewhere, and follows a dark background.
func (r *Report) HTML() []byte {
	p := page{svg.New(r.Title, reportStyle, r.Line)}
	if r.Timeline.Policy != "" {
		p.Add(`<p>%s</p>`, svg.Text(r.Timeline.Policy))
	}
	p.tiles(r)
	p.waterfall(r)
	p.helps("What would help most", "One change at a time.", r.Helps, r.Timeline.Step)
	p.pipeline(r.Timeline)
	p.memory(r.Timeline, r.Capacity)
	p.helps("Sensitivity", "One change at a time, for a whole step.", r.WhatIfs, r.Timeline.Step)
	p.notes(r)
	return p.End()
}

type page struct{ *svg.Page }

func (p page) tiles(r *Report) {
	t := r.Timeline
	facts := []Fact{{"seconds per step", human.Seconds(t.Step)}}
	if r.High > 0 {
		facts[0].Name = fmt.Sprintf("per step (90 %% interval %s–%s)",
			human.Seconds(r.Low), human.Seconds(r.High))
	}
	peak, rank := t.Peak()
	fact := Fact{fmt.Sprintf("peak, on rank %d", rank), human.GiB(peak.Sum())}
	if r.Capacity > 0 {
		fact.Name = fmt.Sprintf("peak of %s, rank %d", human.GiB(r.Capacity), rank)
	}
	facts = append(facts, fact)
	if len(t.Ranks) > 1 {
		facts = append(facts, Fact{"bubble", human.Percent(t.Bubble)})
	}
	p.Add(`<div class="tiles">`)
	for _, f := range append(facts, r.Facts...) {
		p.Add(`<div class="tile"><b>%s</b><span>%s</span></div>`, svg.Text(f.Value),
			svg.Text(f.Name))
	}
	p.Add("</div>\n")
}

// least is the share of a step below which a part is not worth a line.
const least = 0.0005

func (p page) waterfall(r *Report) {
	total := lists.Sum(r.Parts, func(x Part) float64 { return x.Seconds })
	if total <= 0 {
		return
	}
	p.Head("Where the time goes", "Of the rank that works longest; the causes sum up to the step.")
	p.Add(`<div class="rows">`)
	from := 0.0
	for _, x := range r.Parts {
		if x.Seconds < least*total {
			from += x.Seconds
			continue
		}
		p.row(x.Name, human.Seconds(x.Seconds), human.Percent(x.Seconds/total), "", from/total,
			x.Seconds/total)
		from += x.Seconds
	}
	p.row("step", human.Seconds(total), "", "sum", 0, 1)
	p.Add("</div>\n")
}

// row writes a line with a bar; from and width are shares of its track.
func (p page) row(name, value, share, class string, from, width float64) {
	p.Add(`<div>%s</div><div class="n">%s</div><div class="n s">%s</div>`+
		`<div class="track"><i class="%s" style="left:%.2f%%;width:%.2f%%"></i></div>`,
		svg.Text(name), value, share, class, 100*from, 100*width)
}

// helps writes changes with bars of what they save or cost.
func (p page) helps(title, text string, list []Suggestion, step float64) {
	if len(list) == 0 || step <= 0 {
		return
	}
	p.Head(title, text)
	widest := lists.Max(list, 0.01, func(h Suggestion) float64 { return math.Abs(h.Step/step - 1) })
	p.Add(`<div class="rows">`)
	for _, h := range list {
		change := h.Step/step - 1
		class := "good"
		if change > 0 {
			class = "worse"
		}
		value := human.Seconds(h.Step)
		if h.Peak > 0 {
			value += ", " + human.GiB(h.Peak)
		}
		p.row(h.Change, value, human.Signed(change), class, 0, math.Abs(change)/widest)
	}
	p.Add("</div>\n")
}

func (p page) notes(r *Report) {
	if r.Plan != "" {
		p.Head("The plan", "As deepwell compile and deepwell train take it.")
		p.Add("<pre>%s</pre>", svg.Text(strings.TrimSpace(r.Plan)))
	}
	if len(r.Notes) > 0 {
		p.Add("<footer>")
		for _, n := range r.Notes {
			p.Add("<div>%s</div>", svg.Text(n))
		}
		p.Add("</footer>")
	}
}
