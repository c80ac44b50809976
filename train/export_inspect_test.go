package train

import (
	"fmt"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/spmd"
)

// A Rounded is what rounding did to an argument of a product: the sums of the squares of its
// elements and of their errors.
type Rounded struct{ Power, Noise float64 }

// Noise is the norm of the error that is expected of a weight's gradient, over some tokens.
func Noise(x, dy Rounded, tokens int) float64 {
	return noise(&rounding{power: x.Power, noise: x.Noise, length: float64(tokens)},
		&rounding{power: dy.Power, noise: dy.Noise})
}

// Inspected tells whether the errors of rounding were measured in the last step. If they were, what
// the program that did sends must be what its graph says.
func (t *Trainer) Inspected() (bool, error) {
	if _, inspected := t.controller.reader.tellings(t.exec.reports()); !inspected {
		return false, nil
	}
	for row, x := range t.controller.probes.x.rows {
		m, err := x.Optimized()
		if err != nil {
			return true, err
		}
		list := spmd.Census(row.Graph)
		if off := spmd.Sends(list, m.Collectives(), true, dtype.F32); off != "" {
			return true, fmt.Errorf("an inspection: %s", off)
		}
	}
	return true, nil
}
