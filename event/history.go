package event

import (
	"slices"
	"time"
)

// A History is what the events of a run amount to: each step once, in order. Where a run was
// resumed, what came after the checkpoint is what the resumed run did. The zero value is empty.
type History struct {
	Run       *Run     // of the last start; nil in logs that are older than this event
	Weights   *Weights // of the first start
	Steps     []Step
	Evals     []Eval
	Rejected  []Rejected
	Precision []Precision
	Experts   []Experts
	Warnings  []Warning
	Finished  *Finished // nil while the run goes on, or if it was stopped or killed
	Resumes   int
	// First and Last are the times of the first and of the last event.
	First, Last time.Time
}

// Add takes the next record of a log.
func (h *History) Add(rec Record) {
	if h.First.IsZero() {
		h.First = rec.Time
	}
	h.Last = rec.Time
	switch e := rec.Event.(type) {
	case Run:
		h.Run, h.Finished = &e, nil
	case Weights:
		if h.Weights == nil {
			h.Weights = &e
		}
	case Resumed:
		h.Resumes++
		h.takeBack(e.Step)
	case Step:
		if n := len(h.Steps); n > 0 && h.Steps[n-1].Step >= e.Step {
			h.takeBack(e.Step - 1) // a run that began anew in the same file
		}
		h.Steps = append(h.Steps, e)
	case Eval:
		h.Evals = slices.DeleteFunc(h.Evals, func(o Eval) bool { return o.Step >= e.Step })
		h.Evals = append(h.Evals, e)
	case Rejected:
		h.Rejected = append(h.Rejected, e)
	case Precision:
		h.Precision = append(h.Precision, e)
	case Experts:
		h.Experts = append(h.Experts, e)
	case Warning:
		h.Warnings = append(h.Warnings, e)
	case Finished:
		h.Finished = &e
	}
}

// takeBack forgets what happened after a step.
func (h *History) takeBack(step int) {
	h.Steps = slices.DeleteFunc(h.Steps, func(e Step) bool { return e.Step > step })
	h.Evals = slices.DeleteFunc(h.Evals, func(e Eval) bool { return e.Step > step })
	h.Rejected = slices.DeleteFunc(h.Rejected, func(e Rejected) bool { return e.Step > step })
	h.Precision = slices.DeleteFunc(h.Precision, func(e Precision) bool { return e.Step > step })
	h.Experts = slices.DeleteFunc(h.Experts, func(e Experts) bool { return e.Step > step })
}
