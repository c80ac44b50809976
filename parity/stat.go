package parity

import (
	"math"

	"github.com/deepwell/deepwell/internal/stat"
)

// Limits are the ends of one-sided intervals: the true mean lies below Upper with 95 % confidence,
// and above Lower with 95 %.
type Limits struct {
	Lower float64 `json:"lower"`
	Upper float64 `json:"upper"`
}

// limits returns the confidence limits of a mean by Student's t distribution; nil for a single
// number.
func limits(x []float64) *Limits {
	n := len(x)
	if n < 2 {
		return nil
	}
	half := stat.Student95(n-1) * stat.Deviation(x) / math.Sqrt(float64(n))
	m := stat.Mean(x)
	return &Limits{m - half, m + half}
}
