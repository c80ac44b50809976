package parity

import "math"

// Limits are the ends of one-sided intervals: the true mean lies below Upper with 95 % confidence,
// and above Lower with 95 %.
type Limits struct {
	Lower float64 `json:"lower"`
	Upper float64 `json:"upper"`
}

// mean gives the mean of numbers.
func mean(x []float64) float64 {
	sum := 0.0
	for _, v := range x {
		sum += v
	}
	return sum / float64(len(x))
}

// deviation gives the standard deviation of a sample, 0 for one number.
func deviation(x []float64) float64 {
	if len(x) < 2 {
		return 0
	}
	m, sum := mean(x), 0.0
	for _, v := range x {
		sum += (v - m) * (v - m)
	}
	return math.Sqrt(sum / float64(len(x)-1))
}

// limits gives those of a mean by Student's distribution, nil for one number.
func limits(x []float64) *Limits {
	n := len(x)
	if n < 2 {
		return nil
	}
	half := student95(n-1) * deviation(x) / math.Sqrt(float64(n))
	m := mean(x)
	return &Limits{m - half, m + half}
}

// student95 is the point below which 95 % of Student's distribution lies: found by halving, since
// nothing here asks for speed.
func student95(freedom int) float64 {
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
