package parity

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/stat"
)

// A Result is what the runs came to.
type Result struct {
	Model      string  `json:"model,omitempty"`
	Parameters int64   `json:"parameters"`
	Branch     bool    `json:"branch"`         // from one trained state, else from scratch
	From       int64   `json:"from,omitempty"` // the step of that state
	Pairs      int     `json:"pairs"`
	Steps      int     `json:"steps"`
	Tail       int     `json:"tail"` // steps at the end that gaps are means of
	Batch      int     `json:"batch"`
	Seq        int     `json:"seq"`
	Rate       float64 `json:"rate"` // the highest
	Seed       int     `json:"seed"`

	BF16    [][]float64  `json:"bf16"` // losses by pair and step
	Null    Comparison   `json:"null"`
	Matched []Comparison `json:"matched,omitempty"`
	Formats []Comparison `json:"formats"`
}

// A Comparison is what runs are against those in BF16. Gaps are in percent of the loss.
type Comparison struct {
	Name   string      `json:"name"`
	Share  float64     `json:"share,omitempty"` // of the work of linear layers that is not in BF16
	Gaps   []float64   `json:"gaps"`            // by pair
	Mean   float64     `json:"mean"`
	SD     float64     `json:"sd"`
	Limits *Limits     `json:"limits,omitempty"` // of the mean; nil for one pair
	Bound  float64     `json:"bound,omitempty"`
	Is     Verdict     `json:"verdict,omitempty"`
	Why    string      `json:"why,omitempty"`
	Curves [][]float64 `json:"curves"`
}

// A Verdict is what a gap is against its bound.
type Verdict string

// The verdicts. What is not resolved has not passed.
const (
	Met         Verdict = "met"
	Missed      Verdict = "missed"
	NotResolved Verdict = "not resolved"
)

// quiet is the share of a bound that the null may reach before it hides the answer: 0.05 % of the
// 0.25 % that MXFP8 is given from scratch, and 0.01 % of the 0.05 % of a branch (reference/
// parity_notes.md, suggested acceptance).
const quiet = 0.2

// judge computes the gaps and says what they mean.
func (r *Result) judge() {
	for _, c := range r.all() {
		r.measure(c)
	}
	noise := lists.Max(r.Null.Gaps, 0, math.Abs)
	for i := range r.Formats {
		r.Formats[i].judge(noise)
	}
}

// measure computes the gaps of a comparison.
func (r *Result) measure(c *Comparison) {
	c.Gaps = nil
	for pair, curve := range c.Curves {
		base := stat.Mean(r.BF16[pair][r.Steps-r.Tail:])
		c.Gaps = append(c.Gaps, 100*(stat.Mean(curve[r.Steps-r.Tail:])-base)/base)
	}
	c.Mean, c.SD, c.Limits = stat.Mean(c.Gaps), stat.Deviation(c.Gaps), limits(c.Gaps)
}

func (c *Comparison) judge(noise float64) {
	switch {
	case c.Limits == nil:
		c.Is, c.Why = NotResolved, "one pair has no spread"
	case c.Limits.Lower > c.Bound:
		c.Is, c.Why = Missed, "the lower limit is beyond the bound"
	case noise > quiet*c.Bound:
		c.Is = NotResolved
		c.Why = fmt.Sprintf("the null reaches %.3g %%, more than a fifth of the bound", noise)
	case c.Limits.Upper <= c.Bound:
		c.Is, c.Why = Met, "the upper limit is within the bound"
	default:
		c.Is, c.Why = NotResolved, "the bound lies between the limits"
	}
}

// Between compares two formats with each other, pair by pair: by how many percent of BF16's loss
// the first is worse than the second.
func (r *Result) Between(first, second string) (c Comparison, ok bool) {
	at := func(name string) int {
		return slices.IndexFunc(r.Formats, func(c Comparison) bool { return c.Name == name })
	}
	i, k := at(first), at(second)
	if i < 0 || k < 0 {
		return c, false
	}
	c.Name = first + " against " + second
	for pair, g := range r.Formats[i].Gaps {
		c.Gaps = append(c.Gaps, g-r.Formats[k].Gaps[pair])
	}
	c.Mean, c.SD, c.Limits = stat.Mean(c.Gaps), stat.Deviation(c.Gaps), limits(c.Gaps)
	return c, true
}

// Line says in one line what was run.
func (r *Result) Line() string {
	runs := fmt.Sprintf("%d pairs", r.Pairs)
	if r.Pairs == 1 {
		runs = "1 pair"
	}
	how := fmt.Sprintf("%s of %d steps from scratch, rate %g", runs, r.Steps, r.Rate)
	if r.Branch {
		how = fmt.Sprintf("%s of %d steps from step %d, rate %g to 0", runs, r.Steps, r.From, r.Rate)
	}
	return fmt.Sprintf("%.3gM parameters · %s · %d tokens a step", float64(r.Parameters)/1e6, how,
		r.Batch*r.Seq)
}

// Write writes the table.
func (r *Result) Write(w io.Writer) {
	fmt.Fprintln(w, r.Line())
	fmt.Fprintf(w, "%-26s %8s %7s %17s %6s  %s\n", "against bf16", "gap %", "sd", "95 % limits",
		"bound", "verdict")
	for _, c := range r.all() {
		line := fmt.Sprintf("%-26s %8s %7s %17s %6s  %s", c.Name, signed(c.Mean), c.spread(),
			c.interval(), c.bound(), c.verdict())
		fmt.Fprintln(w, strings.TrimRight(line, " "))
	}
	fmt.Fprintf(w, "gap: mean loss of the last %d steps, %% of bf16's (%s); limits are one-sided\n",
		r.Tail, strings.Join(r.losses(), ", "))
}

// losses lists the final losses of BF16, by pair.
func (r *Result) losses() []string {
	return lists.Map(r.BF16, func(curve []float64) string {
		return fmt.Sprintf("%.4f", stat.Mean(curve[r.Steps-r.Tail:]))
	})
}

// signed writes percents with a sign, and none for what is rounded to nothing.
func signed(x float64) string {
	text := strings.Replace(fmt.Sprintf("%+.4f", x), "-", "−", 1)
	return strings.Replace(text, "−0.0000", "0.0000", 1)
}

func (c *Comparison) spread() string {
	if c.Limits == nil {
		return ""
	}
	return fmt.Sprintf("%.4f", c.SD)
}

func (c *Comparison) interval() string {
	if c.Limits == nil {
		return ""
	}
	return signed(c.Limits.Lower) + " … " + signed(c.Limits.Upper)
}

func (c *Comparison) bound() string {
	if c.Bound == 0 {
		return ""
	}
	return fmt.Sprintf("%g", c.Bound)
}

func (c *Comparison) verdict() string {
	if c.Is == NotResolved {
		return string(c.Is) + ": " + c.Why
	}
	return string(c.Is)
}
