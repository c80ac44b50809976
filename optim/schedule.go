package optim

import "math"

// A Schedule gives the learning rate of a step, counted from 0.
type Schedule interface {
	LR(step int) float64
}

// WarmupCosine rises linearly to Peak over Warmup steps and decays along a cosine to Floor at
// Steps.
type WarmupCosine struct {
	Peak, Floor   float64
	Warmup, Steps int
}

// LR implements Schedule.
func (s WarmupCosine) LR(step int) float64 {
	if step < s.Warmup {
		return s.Peak * float64(step+1) / float64(s.Warmup)
	}
	left := float64(min(step, s.Steps)-s.Warmup) / float64(max(1, s.Steps-s.Warmup))
	return s.Floor + (s.Peak-s.Floor)*(1+math.Cos(math.Pi*left))/2
}

// WSD (warmup, stable, decay) rises linearly, stays at Peak, and falls linearly to Floor over its
// last Decay steps (Hu et al., 2024).
type WSD struct {
	Peak, Floor          float64
	Warmup, Decay, Steps int
}

// LR implements Schedule.
func (s WSD) LR(step int) float64 {
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
