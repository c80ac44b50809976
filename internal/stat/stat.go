// Package stat turns samples into medians, means and limits.
package stat

import (
	"math"
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
)

// Median is the middle of a sample, or the mean of the two in the middle; 0 without one.
func Median[T ~int64 | ~float64](list []T) T {
	sorted := slices.Sorted(slices.Values(list))
	n := len(sorted)
	if n == 0 {
		return 0
	}
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// Mean is the mean of a sample.
func Mean(list []float64) float64 {
	return lists.Sum(list, func(v float64) float64 { return v }) / float64(len(list))
}

// Deviation is the standard deviation of a sample, 0 for one number.
func Deviation(list []float64) float64 {
	if len(list) < 2 {
		return 0
	}
	m := Mean(list)
	sum := lists.Sum(list, func(v float64) float64 { return (v - m) * (v - m) })
	return math.Sqrt(sum / float64(len(list)-1))
}

// Student95 is the point below which 95 % of Student's distribution lies: found by halving, since
// nothing here asks for speed.
func Student95(freedom int) float64 {
	low, high := 0.0, 700.0 // 6.31 for one degree of freedom
	for range 200 {
		mid := (low + high) / 2
		if studentBelow(mid, freedom) < 0.95 {
			low = mid
		} else {
			high = mid
		}
	}
	return (low + high) / 2
}

// studentBelow is the share of Student's distribution below t ≥ 0, in closed form for whole degrees
// of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4).
func studentBelow(t float64, freedom int) float64 {
	angle := math.Atan(t / math.Sqrt(float64(freedom)))
	sin, cos := math.Sincos(angle)
	var both float64 // the share between -t and t
	if freedom%2 == 1 {
		both = 2 / math.Pi * angle
		term := sin * cos * 2 / math.Pi
		for k := 1; k <= freedom-2; k += 2 {
			both += term
			term *= cos * cos * float64(k+1) / float64(k+2)
		}
	} else {
		term := sin
		for k := 0; k <= freedom-2; k += 2 {
			both += term
			term *= cos * cos * float64(k+1) / float64(k+2)
		}
	}
	return (1 + both) / 2
}
