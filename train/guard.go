package train

import (
	"fmt"
	"math"
	"slices"
)

const (
	// window is how many accepted steps the guard remembers, and settled how many it wants before it
	// calls anything a spike: losses fall fast in the first steps.
	window, settled = 64, 16
	// maxRejected is how many steps in a row may be rejected before the run stops: data that is bad
	// now and then is skipped, while a model that is lost does not come back.
	maxRejected = 8
)

// A guard judges a step by the losses and gradient norms of recent steps. It is saved in
// checkpoints, so that a resumed run judges alike.
type guard struct {
	Factor   float64   `json:"-"`
	Losses   []float64 `json:"losses"`
	Norms    []float64 `json:"norms"`
	Rejected int       `json:"rejected"` // in a row
}

// limits returns the largest loss and gradient norm that are not spikes: guard.spike times their
// recent medians, or +Inf while there is too little history.
func (g *guard) limits() (loss, norm float64) {
	if g.Factor <= 0 || len(g.Losses) < settled {
		return math.Inf(1), math.Inf(1)
	}
	return g.Factor * median(g.Losses), g.Factor * median(g.Norms)
}

// judge returns why a step is rejected, or "" if it is not.
func (g *guard) judge(loss, norm float64) string {
	maxLoss, maxNorm := g.limits()
	switch {
	// NaN compares false with every limit, so it has cases of its own.
	case math.IsNaN(loss) || math.IsInf(loss, 0):
		return "the loss is not finite"
	case math.IsNaN(norm) || math.IsInf(norm, 0):
		return "the gradient is not finite"
	case loss > maxLoss:
		return fmt.Sprintf("the loss is over %.4g, %g times the recent median", maxLoss, g.Factor)
	case norm > maxNorm:
		return fmt.Sprintf("the gradient's norm is over %.4g, %g times the recent median", maxNorm,
			g.Factor)
	}
	return ""
}

// accept adds an applied step to the history.
func (g *guard) accept(loss, norm float64) {
	g.Losses, g.Norms = last(append(g.Losses, loss)), last(append(g.Norms, norm))
	g.Rejected = 0
}

// last returns a copy of the last entries of a list, as many as the window has.
func last(list []float64) []float64 { return slices.Clone(list[max(0, len(list)-window):]) }

// median returns the upper median of a list that is not empty.
func median(list []float64) float64 {
	sorted := slices.Sorted(slices.Values(list))
	return sorted[len(sorted)/2]
}
