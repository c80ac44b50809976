package monitor

import (
	"fmt"
	"math"
)

// A Kind is what a decision is about.
type Kind string

// The kinds of decision.
const (
	Refuse Kind = "refuse" // the update is not made
	Fall   Kind = "fall"   // a product is computed in a wider format from the next step on
	Return Kind = "return" // a product goes back to what it fell from
	Warn   Kind = "warn"   // nothing is done, but somebody should know
)

// A Decision is what should be done, and the numbers that say so.
type Decision struct {
	Kind Kind `json:"kind"`
	Step int  `json:"step"`

	// Layer is -1 and Linear is empty where no linear layer is known to be the cause. Only falls and
	// returns have a GEMM and formats.
	Layer  int    `json:"layer"`
	Linear string `json:"linear,omitempty"`
	GEMM   string `json:"product,omitempty"`
	From   string `json:"from,omitempty"` // formats
	To     string `json:"to,omitempty"`

	Signal string  `json:"signal"` // such as "x amax" or "loss"
	Value  float64 `json:"value"`
	Usual  float64 `json:"usual"` // the median of its own history
	Bound  float64 `json:"bound"`
	// Retry says that the same batch may well go through: the fault is not in the data.
	Retry bool   `json:"retry,omitempty"`
	Note  string `json:"note,omitempty"` // what the numbers do not say
}

// String describes the decision in one line.
func (d Decision) String() string {
	what := "the update is refused"
	if d.Linear != "" {
		what += fmt.Sprintf(" for %s, layer %d", d.Linear, d.Layer)
	}
	at := fmt.Sprintf("%s of %s, layer %d", d.GEMM, d.Linear, d.Layer)
	switch d.Kind {
	case Fall:
		what = fmt.Sprintf("%s falls from %s to %s", at, d.From, d.To)
	case Return:
		what = fmt.Sprintf("%s returns from %s to %s", at, d.From, d.To)
	case Warn:
		what = "warning"
		if d.Linear != "" {
			what = fmt.Sprintf("warning of %s, layer %d", d.Linear, d.Layer)
		}
	}
	text := fmt.Sprintf("step %d: %s: %s is %.4g, usual %.4g, bound %.4g", d.Step, what, d.Signal,
		d.Value, d.Usual, d.Bound)
	if d.Note != "" {
		text += "; " + d.Note
	}
	return text
}

// finite replaces NaN by 0 and infinities by the largest number, which JSON can carry.
func finite(v float64) float64 {
	switch {
	case math.IsNaN(v):
		return 0
	case math.IsInf(v, 0):
		return math.Copysign(math.MaxFloat64, v)
	}
	return v
}
