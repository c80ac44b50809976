package main

import (
	"math/rand/v2"
	"testing"
)

// The same seed draws the same plans, all different, for all devices.
func TestDraw(t *testing.T) {
	a := draw(rand.New(rand.NewPCG(2, 0)), config(), 20)
	b := draw(rand.New(rand.NewPCG(2, 0)), config(), 20)
	for i := range a {
		if a[i].String() != b[i].String() || a[i].Devices() != devices {
			t.Errorf("%s, then %s", words(a[i]), words(b[i]))
		}
	}
}

func TestKendall(t *testing.T) {
	if k := kendall([]float64{1, 2, 3}, []float64{1, 2, 3}); k != 1 {
		t.Error(k)
	}
	if k := kendall([]float64{1, 2, 3, 4}, []float64{4, 3, 2, 1}); k != -1 {
		t.Error(k)
	}
}
