package ir

import (
	"fmt"
	"math"

	"github.com/deepwell/deepwell/dtype"
)

// A Rope is how positions turn into angles (Su et al., 2021). Factor stretches waves: all of them
// alone, and with Low, High and Original, or with Fast, Slow and Original, the long ones.
type Rope struct {
	Theta  float64
	Factor float64
	// Original is the context that a model was trained with before its waves were stretched.
	Original float64
	// Low and High are Llama 3.1's: waves that turn less than Low times in the original context are
	// stretched, more than High times kept, and others blended by how often they turn.
	Low, High float64
	// Fast and Slow are YaRN's (Peng et al., 2023): waves that turn less than Slow times in the
	// original context are stretched, more than Fast times kept, and others blended by their place
	// among the waves. Exact leaves the two places as they are; else they are rounded to whole
	// waves, outwards.
	Fast, Slow float64
	Exact      bool
	// Magnitude multiplies what was rotated, YaRN's attention factor; 0 is 1.
	Magnitude float64
}

// Rope rotates the halves of x's last dimension by position.
func (b *Builder) Rope(x, pos *Value, r Rope) *Value {
	a := map[string]any{"theta": r.Theta, "factor": some(r.Factor), "low": some(r.Low),
		"high": some(r.High), "original": some(r.Original), "fast": some(r.Fast),
		"slow": some(r.Slow), "exact": r.Exact, "magnitude": some(r.Magnitude)}
	return b.one("rope", attrs(a), x, pos)
}

// Interleaved puts neighbours of x's last dimension, which some models rotate as pairs, where Rope
// has a pair: elements 0, 2, 4, ... become the first half, and 1, 3, 5, ... the second.
func (b *Builder) Interleaved(x *Value) *Value {
	n := len(x.Type.Dims) - 1
	if n < 0 {
		return x // Rope reports it
	}
	const pair, side = "pair", "side"
	dim, order := x.Type.Dims[n], append(Names(x.Type.Dims[:n]), side, pair)
	y := b.Transpose(b.Split(x, dim.Name, pair, side, 2), order...)
	return b.Merge(y, dim.Name, side, pair)
}

// inferRope rotates the halves of the last dimension by angles that grow with position.
func inferRope(_ *Graph, op *Op) ([]Type, error) {
	x, pos := op.In[0].Type, op.In[1].Type
	if len(x.Dims) == 0 || x.Dims[len(x.Dims)-1].Size%2 != 0 {
		return nil, fmt.Errorf("%s does not end in an even dimension", x)
	}
	if pos.Elem.Kind() != dtype.Signed {
		return nil, fmt.Errorf("positions are whole numbers, not %s", pos)
	}
	for _, d := range pos.Dims {
		if x.Size(d.Name) != d.Size {
			return nil, fmt.Errorf("%s and positions %s differ in %s", x, pos, d.Name)
		}
	}
	place, err := KeepPlacement(x, x.Dims[len(x.Dims)-1].Name)
	return []Type{{x.Elem, x.Dims, place}}, err
}

// ropeVJP: a rotation's transpose is the rotation back; a magnitude stays.
func ropeVJP(d *Differ, op *Op, dy []*Value) []*Value {
	a := op.Attrs.With("back", !op.Attrs.Bool("back"))
	return []*Value{d.one("rope", a, dy[0], d.Use(op.In[1])), nil}
}

// RopeMagnitude is the factor of a rope operation's results.
func RopeMagnitude(op *Op) float64 {
	if m := op.Attrs.Float("magnitude"); m != 0 {
		return m
	}
	return 1
}

// RopeFrequencies are the angles by position of a rope operation, a number for each pair of
// elements, stretched as [Rope] says.
func RopeFrequencies(op *Op) []float64 {
	t := op.In[0].Type
	n := t.Dims[len(t.Dims)-1].Size
	f := make([]float64, n/2)
	for i := range f {
		f[i] = math.Pow(op.Attrs.Float("theta"), -2*float64(i)/float64(n))
	}
	switch factor := op.Attrs.Float("factor"); {
	case factor == 0:
	case op.Attrs.Float("fast") != 0:
		yarn(f, op.Attrs)
	default:
		llama3(f, op.Attrs)
	}
	return f
}

// llama3 stretches waves as Llama 3.1 does, or all of them without an original context.
func llama3(f []float64, a Attrs) {
	factor, original := a.Float("factor"), a.Float("original")
	low, high := a.Float("low"), a.Float("high")
	for i := range f {
		switch wave := 2 * math.Pi / f[i]; {
		case original == 0 || wave > original/low:
			f[i] /= factor
		case wave > original/high:
			blend := (original/wave - low) / (high - low)
			f[i] *= (1-blend)/factor + blend
		}
	}
}

// yarn stretches waves as YaRN does. A wave turns a number of times in the original context at a
// place among the waves, which need not be whole.
func yarn(f []float64, a Attrs) {
	n := float64(2 * len(f))
	place := func(turns float64) float64 {
		return n * math.Log(a.Float("original")/(turns*2*math.Pi)) / (2 * math.Log(a.Float("theta")))
	}
	low, high := place(a.Float("fast")), place(a.Float("slow"))
	if !a.Bool("exact") {
		low, high = math.Floor(low), math.Ceil(high)
	}
	if low, high = max(low, 0), min(high, n-1); low == high {
		high += 0.001
	}
	for i := range f {
		blend := min(max((float64(i)-low)/(high-low), 0), 1)
		f[i] = f[i]/a.Float("factor")*blend + f[i]*(1-blend)
	}
}
