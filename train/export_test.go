package train

import "math"

// Poison makes the loss of one step no number: of all steps if it is negative, of none if it is 0.
func (t *Trainer) Poison(step int) {
	t.share = func(labels int64) float64 {
		if step < 0 || step > 0 && t.step+1 == step {
			return math.NaN()
		}
		return 1 / max(1, float64(labels))
	}
}
