package monitor

import (
	"math"
	"slices"
)

// window is how many samples a series remembers. Bounds were set on the medians of 12 samples of a
// run; more would only make the median lag behind the drift that is a
// part of training.
const window = 16

// A series is the history of one signal of one operand or linear layer. Values that were out of
// bounds, or of a step that was refused, are not part of it.
type series struct {
	Values []float32 `json:"values,omitempty"`
	Bad    int       `json:"bad,omitzero"`     // samples in a row that were out of bounds
	Format string    `json:"format,omitempty"` // that the values are of
	Low    int       `json:"low,omitzero"`     // samples in a row that were worth a warning

	sorted []float32
	fresh  bool // in the sample that is looked at
	now    measured
	bound  float64
}

// usual is the median. A mean would follow a fault that grows slowly, and take what comes after it
// for another: the norm of a gradient that had grown tenfold before its layer fell was 23 times
// below the mean when the fault was over.
func (s *series) usual() float64 {
	n := len(s.Values)
	if n == 0 {
		return 0
	}
	if len(s.sorted) != n { // read from a checkpoint
		s.sorted = slices.Sorted(slices.Values(s.Values))
	}
	return (float64(s.sorted[(n-1)/2]) + float64(s.sorted[n/2])) / 2
}

// learn adds a value to the history. The sorted copy is updated with it: observing a sample of 24
// linear layers, each with all six operands, takes 0.25 ms on one busy core of a Xeon.
func (s *series) learn(v float64) {
	f := float32(v)
	if math.IsInf(float64(f), 0) {
		return
	}
	if len(s.sorted) == len(s.Values) {
		if len(s.Values) == window {
			i, _ := slices.BinarySearch(s.sorted, s.Values[0])
			s.sorted = slices.Delete(s.sorted, i, i+1)
		}
		i, _ := slices.BinarySearch(s.sorted, f)
		s.sorted = slices.Insert(s.sorted, i, f)
	}
	s.Values = push(s.Values, f, window)
}

// push appends to a list of at most n entries, dropping the oldest.
func push[E any](list []E, v E, n int) []E {
	if len(list) >= n {
		list = append(list[:0], list[len(list)-n+1:]...)
	}
	return append(list, v)
}

// forget starts the history anew.
func (s *series) forget() { s.Values, s.sorted, s.Bad, s.Low = nil, nil, 0, 0 }

// A site is one linear layer of one layer of the model, with the history of its signals.
type site struct {
	layer  int
	name   string
	series [places]series
	gemms  [3]gemmState
}

// A gemmState is the fallback state of one of a site's GEMMs. JSON names are part of checkpoints.
type gemmState struct {
	Fallen []Decision `json:"fallen,omitempty"` // that are in effect, the last one on top
	Cause  string     `json:"cause,omitempty"`  // the signal that must be healthy; empty for the step
	Since  int        `json:"since,omitzero"`   // the step of the last change
	Wait   int        `json:"wait,omitzero"`    // steps that it stays so at least
	// Healthy is how many samples in a row the cause was within bounds. Measured says that it was
	// measured at all since the fall.
	Healthy  int  `json:"healthy,omitzero"`
	Measured bool `json:"measured,omitzero"`
	Returned bool `json:"returned,omitzero"` // once at least: another fall is a relapse
}

// Indices of a site's series: six signals of each of six operands, then six of the linear layer.
const (
	perOperand = 6
	ofLinear   = 6 * perOperand
	places     = ofLinear + 6
)

// placeName is the name of a series, such as "x amax" or "dw norm".
func placeName(i int) string {
	if i >= ofLinear {
		return linearSignals[i-ofLinear].name
	}
	return operands[i/perOperand] + " " + operandSignals[i%perOperand].name
}

// placeOf returns the index of a series by its name, or -1.
func placeOf(name string) int {
	for i := range places {
		if placeName(i) == name {
			return i
		}
	}
	return -1
}

// ofErrors reports whether a signal is measured in inspections only.
func ofErrors(place int) bool {
	if place >= ofLinear {
		return place == ofLinear+dwNoise
	}
	return place%perOperand >= measuredAlways
}

// signalAt returns the signal of a series.
func signalAt(i int) *signal {
	if i >= ofLinear {
		return &linearSignals[i-ofLinear]
	}
	return &operandSignals[i%perOperand]
}
