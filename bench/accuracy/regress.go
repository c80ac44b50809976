package main

import (
	"math"
	"slices"

	"github.com/deepwell/deepwell/price"
)

// A regression fits constants to measured times by their logarithms: squares of errors in units of
// the noise that is expected, of which large ones count less (Cauchy), so that rows which nothing
// explains do not move the rest; and squares of the distance of each constant from its prior.
// Constants are positive and are fitted by their logarithms, too.
type regression struct {
	constants []price.Effect
	noise     float64
	rounds    int
	measured  []float64
	// predict gives the times of the rows that are asked for.
	predict func(values []float64, rows []int) ([]float64, error)
}

// cauchy is where errors begin to count less, in units of the noise.
const cauchy = 2.0

// A fitting is the state of one fit: rows with their weights, and where it is.
type fitting struct {
	*regression
	rows    []int
	weights []float64
	at, off []float64 // logarithms of constants; errors in units of the noise
	cost    float64
}

// fit gives the constants for rows with these weights.
func (r *regression) fit(weights []float64) ([]float64, error) {
	f, err := r.fitting(weights)
	if err != nil {
		return nil, err
	}
	return exps(f.at), nil
}

// fitting goes to the constants for rows with these weights, by the method of Levenberg and
// Marquardt.
func (r *regression) fitting(weights []float64) (*fitting, error) {
	f := &fitting{regression: r}
	for i, w := range weights {
		if w > 0 {
			f.rows, f.weights = append(f.rows, i), append(f.weights, w)
		}
	}
	for _, c := range r.constants {
		f.at = append(f.at, math.Log(c.Prior))
	}
	var err error
	if f.off, err = f.errors(f.at); err != nil {
		return nil, err
	}
	f.cost = f.costs(f.at, f.off)
	damp := 1e-2
	for range r.rounds {
		before := f.cost
		if damp, err = f.improve(damp); err != nil {
			return nil, err
		}
		if before-f.cost <= 1e-4*before {
			break
		}
	}
	return f, nil
}

// improve looks for a step that lowers the cost, shorter and shorter ones.
func (f *fitting) improve(damp float64) (float64, error) {
	a, b, err := f.normal()
	if err != nil {
		return damp, err
	}
	for ; damp < 1e4; damp *= 5 {
		m := make([][]float64, len(a))
		for j := range a {
			m[j] = slices.Clone(a[j])
			m[j][j] *= 1 + damp
		}
		next := slices.Clone(f.at)
		for j, d := range solve(m, slices.Clone(b)) {
			next[j] += d
		}
		off, err := f.errors(next)
		if err != nil {
			return damp, err
		}
		if c := f.costs(next, off); c < f.cost {
			f.at, f.off, f.cost = next, off, c
			return max(damp/5, 1e-6), nil
		}
	}
	return damp, nil
}

func exps(x []float64) []float64 {
	v := make([]float64, len(x))
	for i := range x {
		v[i] = math.Exp(x[i])
	}
	return v
}

func (f *fitting) errors(at []float64) ([]float64, error) {
	times, err := f.predict(exps(at), f.rows)
	if err != nil {
		return nil, err
	}
	for i, row := range f.rows {
		times[i] = math.Log(times[i]/f.measured[row]) / f.noise
	}
	return times, nil
}

func (f *fitting) costs(at, off []float64) float64 {
	sum := 0.0
	for i, w := range f.weights {
		sum += w * cauchy * cauchy / 2 * math.Log1p(off[i]*off[i]/(cauchy*cauchy))
	}
	for j, c := range f.constants {
		d := (at[j] - math.Log(c.Prior)) * c.Prior / c.Sigma
		sum += d * d / 2
	}
	return sum
}

// normal gives the equations of a step.
func (f *fitting) normal() (a [][]float64, b []float64, err error) {
	slopes, err := f.slopes()
	if err != nil {
		return nil, nil, err
	}
	a, b = f.equations(slopes, func(int) bool { return true })
	return a, b, nil
}

// slopes are the derivatives of errors by constants, from differences.
func (f *fitting) slopes() (slopes [][]float64, err error) {
	const h = 1e-3
	slopes = make([][]float64, len(f.at))
	for j := range slopes {
		moved := slices.Clone(f.at)
		moved[j] += h
		if slopes[j], err = f.errors(moved); err != nil {
			return nil, err
		}
		for i := range slopes[j] {
			slopes[j][i] = (slopes[j][i] - f.off[i]) / h
		}
	}
	return slopes, nil
}

// equations returns the linear system of a step on the selected rows.
func (f *fitting) equations(slopes [][]float64, in func(int) bool) (a [][]float64, b []float64) {
	n := len(f.at)
	a, b = make([][]float64, n), make([]float64, n)
	for j, c := range f.constants {
		quantized := c.Prior * c.Prior / (c.Sigma * c.Sigma)
		a[j] = make([]float64, n)
		a[j][j] = quantized
		b[j] = quantized * (math.Log(c.Prior) - f.at[j])
	}
	for i, w := range f.weights {
		if !in(i) {
			continue
		}
		w /= 1 + f.off[i]*f.off[i]/(cauchy*cauchy)
		for j := range n {
			b[j] -= w * slopes[j][i] * f.off[i]
			for k := range n {
				a[j][k] += w * slopes[j][i] * slopes[k][i]
			}
		}
	}
	return a, b
}

// without gives the errors of all rows, as logarithms, when only some are fitted: one step of the
// method from where the fit of all is, which costs nothing. What moves far moves by its slope.
func (f *fitting) without(slopes [][]float64, in func(int) bool) []float64 {
	off := make([]float64, len(f.rows))
	step := solve(f.equations(slopes, in))
	for i := range off {
		off[i] = f.off[i]
		for j, d := range step {
			off[i] += slopes[j][i] * d
		}
		off[i] *= f.noise
	}
	return off
}

// A section is what a study prints and what it adds to the page.
type section struct {
	name, text, page string
	covers           []cover
}
