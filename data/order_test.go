package data

import (
	"math"
	"testing"

	"pgregory.net/rapid"
)

func TestPermutationIsOne(t *testing.T) {
	for n := range int64(300) {
		n++
		p := newPermutation(n, 42, n%7, "books")
		seen := make([]bool, n)
		for i := range n {
			at := p.at(i)
			if at < 0 || at >= n || seen[at] {
				t.Fatalf("%d of %d goes to %d", i, n, at)
			}
			seen[at] = true
		}
	}
}

// The orders of a run never change, or runs could not be resumed by a newer binary.
func TestPermutationIsForGood(t *testing.T) {
	p := newPermutation(1000, 1, 0, "data")
	got := [6]int64{p.at(0), p.at(1), p.at(2), p.at(3), p.at(4), p.at(999)}
	if want := [6]int64{513, 960, 62, 753, 53, 589}; got != want {
		t.Errorf("got %v", got)
	}
}

// Where a row lands is as good as random: over many keys each place is equally likely, and
// neighbours do not stay together.
func TestPermutationSpreads(t *testing.T) {
	const n, keys = 50, 4000
	var counts [n]int
	near := 0
	for key := range uint64(keys) {
		p := newPermutation(n, key, 0, "data")
		counts[p.at(7)]++
		if d := p.at(20) - p.at(21); d == 1 || d == -1 {
			near++
		}
	}
	chi := 0.0
	for _, c := range counts {
		d := float64(c) - keys/n
		chi += d * d / (keys / n)
	}
	// 49 degrees of freedom: 1 in 10,000 lies above 94. The keys are fixed, so that the test is too.
	if chi > 94 {
		t.Errorf("chi square is %.1f", chi)
	}
	// Two of 50 places are neighbours with probability 2/50: 160 ± 12.4.
	if near < 110 || near > 210 {
		t.Errorf("neighbours stay together %d times", near)
	}
}

// At any prefix each source is less than one row away from its share.
func TestMixtureFollowsItsWeights(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		weights := rapid.SliceOfN(rapid.Float64Range(0.001, 1), 1, 12).Draw(t, "weights")
		shares, err := newShares(weights)
		if err != nil {
			t.Fatal(err)
		}
		sum, total := int64(0), 0.0
		for i, s := range shares {
			sum += s
			total += weights[i]
		}
		if sum != whole {
			t.Fatalf("the shares %v have the sum %d", shares, sum)
		}
		taken := make([]int64, len(shares))
		for n := range int64(2000) {
			taken[next(shares, taken, n)]++
			for i := range shares {
				// The shares are weights to 12 parts in 2^24, over 2000 rows.
				if d := float64(taken[i]) - weights[i]/total*float64(n+1); math.Abs(d) >= 1.002 {
					t.Fatalf("source %d of %v is %v rows off after %d", i, weights, d, n+1)
				}
				if d := taken[i]*whole - shares[i]*(n+1); d >= whole || d <= -whole {
					t.Fatalf("source %d of %v is a row off its share after %d", i, shares, n+1)
				}
			}
		}
	})
}

func TestWeightsThatCannotBe(t *testing.T) {
	for _, w := range [][]float64{{0}, {-1, 2}, {math.NaN()}, {math.Inf(1)}, {1e308, 1e308}} {
		if s, err := newShares(w); err == nil {
			t.Errorf("%v gives %v", w, s)
		}
	}
	if s, err := newShares([]float64{1e-30, 1}); err != nil || s[0] != 1 || s[1] != whole-1 {
		t.Errorf("a tiny weight gives %v, %v", s, err)
	}
}
