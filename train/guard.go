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

// A guard judges steps by those before them.
type guard struct {
	Factor   float64   `json:"-"`
	Losses   []float64 `json:"losses"`
	Norms    []float64 `json:"norms"`
	Rejected int       `json:"rejected"` // in a row
}

// limits gives the largest loss and norm that are no spikes.
func (g *guard) limits() (loss, norm float64) {
	if g.Factor <= 0 || len(g.Losses) < settled {
		return math.Inf(1), math.Inf(1)
	}
	return g.Factor * median(g.Losses), g.Factor * median(g.Norms)
}

// judge says why a step does not count, or "" if it does.
func (g *guard) judge(loss, norm float64) string {
	maxLoss, maxNorm := g.limits()
	switch {
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

// accept remembers a step that counted.
func (g *guard) accept(loss, norm float64) {
	g.Losses, g.Norms = last(append(g.Losses, loss)), last(append(g.Norms, norm))
	g.Rejected = 0
}

func last(list []float64) []float64 { return slices.Clone(list[max(0, len(list)-window):]) }

func median(list []float64) float64 {
	sorted := slices.Sorted(slices.Values(list))
	return sorted[len(sorted)/2]
}
