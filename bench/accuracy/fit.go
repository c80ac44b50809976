package main

import (
	"math"
	"slices"

	"github.com/deepwell/deepwell/estimate"
	"github.com/deepwell/deepwell/price"
)

// A fitter finds the constants of a profile that explain measured steps best, near what they would
// be without any: least squares of relative errors, and of the distance from each prior in its own
// unit. Few rows then move few constants, and the fit of a half does not run away.
type fitter struct {
	base    *price.Profile
	effects []string // that are fitted
	noise   float64  // relative error that is expected of a step
	rounds  int
}

// estimates prices samples; equal models share an estimator, so that blocks are priced once.
func estimates(list []sample, prof *price.Profile) ([]estimate.Estimate, error) {
	type key struct {
		family, cluster string
		expert          int64
		core, plain     bool
	}
	made := map[key]*estimate.Estimator{}
	out := make([]estimate.Estimate, len(list))
	for i, s := range list {
		k := key{s.family, s.cluster.String(), s.options.ExpertRanks, s.options.Core, s.options.Plain}
		e := made[k]
		if e == nil {
			fresh, err := estimate.New(s.config, s.cluster, prof)
			if err != nil {
				return nil, err
			}
			e = fresh.With(s.options)
			made[k] = e
		}
		var err error
		if out[i], err = e.Price(s.plan); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (f *fitter) values(p *price.Profile) []price.Effect {
	return slices.DeleteFunc(p.Effects(), func(e price.Effect) bool {
		return !slices.Contains(f.effects, e.Name)
	})
}

// fit gives a profile with constants for these samples: Gauss and Newton's method with derivatives
// by differences.
func (f *fitter) fit(list []sample) (*price.Profile, error) {
	prof := f.base.Clone()
	for _, e := range f.values(prof) {
		*e.Value = e.Prior
	}
	n := len(f.values(prof))
	for range f.rounds {
		base, err := estimates(list, prof)
		if err != nil {
			return nil, err
		}
		slopes := make([][]float64, n)
		for j := range n {
			moved := prof.Clone()
			e := f.values(moved)[j]
			h := e.Sigma * 1e-3
			*e.Value += h
			next, err := estimates(list, moved)
			if err != nil {
				return nil, err
			}
			slopes[j] = make([]float64, len(list))
			for i := range list {
				slopes[j][i] = (next[i].Step - base[i].Step) / h / list[i].seconds
			}
		}
		f.move(prof, list, base, slopes)
	}
	return prof, nil
}

// move takes one step of the method.
func (f *fitter) move(prof *price.Profile, list []sample, base []estimate.Estimate,
	slopes [][]float64) {
	effects := f.values(prof)
	n := len(effects)
	a, b := make([][]float64, n), make([]float64, n)
	for j := range n {
		a[j] = make([]float64, n)
		prior := 1 / (effects[j].Sigma * effects[j].Sigma)
		a[j][j] = prior
		b[j] = prior * (effects[j].Prior - *effects[j].Value)
	}
	for i, s := range list {
		w := s.weight / (f.noise * f.noise)
		off := 1 - base[i].Step/s.seconds
		for j := range n {
			b[j] += w * slopes[j][i] * off
			for k := range n {
				a[j][k] += w * slopes[j][i] * slopes[k][i]
			}
		}
	}
	for j, d := range solve(a, b) {
		*effects[j].Value = math.Max(*effects[j].Value+d, effects[j].Prior*0.05)
	}
}

// solve is Gauss's elimination with pivots. The matrix is positive definite, since every prior adds
// to its diagonal.
func solve(a [][]float64, b []float64) []float64 {
	n := len(b)
	for c := range n {
		p := c
		for r := c; r < n; r++ {
			if math.Abs(a[r][c]) > math.Abs(a[p][c]) {
				p = r
			}
		}
		a[c], a[p], b[c], b[p] = a[p], a[c], b[p], b[c]
		for r := c + 1; r < n; r++ {
			f := a[r][c] / a[c][c]
			for k := c; k < n; k++ {
				a[r][k] -= f * a[c][k]
			}
			b[r] -= f * b[c]
		}
	}
	x := make([]float64, n)
	for c := n - 1; c >= 0; c-- {
		x[c] = b[c]
		for k := c + 1; k < n; k++ {
			x[c] -= a[c][k] * x[k]
		}
		x[c] /= a[c][c]
	}
	return x
}
