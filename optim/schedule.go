package optim

import "math"

// A Schedule gives the learning rate of a step, counted from 0.
type Schedule interface {
	Rate(step int) float64
}

// WarmupCosine rises in a line to Peak and falls along a cosine to Floor.
type WarmupCosine struct {
	Peak, Floor   float64
	Warmup, Steps int
}

// Rate implements Schedule.
func (s WarmupCosine) Rate(step int) float64 {
	if step < s.Warmup {
		return s.Peak * float64(step+1) / float64(s.Warmup)
	}
	left := float64(min(step, s.Steps)-s.Warmup) / float64(max(1, s.Steps-s.Warmup))
	return s.Floor + (s.Peak-s.Floor)*(1+math.Cos(math.Pi*left))/2
}

// WSD rises in a line, stays, and falls in a line over its last Decay steps (Hu et al., 2024).
type WSD struct {
	Peak, Floor          float64
	Warmup, Decay, Steps int
}

// Rate implements Schedule.
func (s WSD) Rate(step int) float64 {
	switch first := s.Steps - s.Decay; {
	case step < s.Warmup:
		return s.Peak * float64(step+1) / float64(s.Warmup)
	case step < first:
		return s.Peak
	default:
		left := float64(min(step, s.Steps)-first) / float64(max(1, s.Decay))
		return s.Peak + (s.Floor-s.Peak)*left
	}
}
