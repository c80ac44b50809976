package svg

import (
	"math"
	"strings"
	"testing"
)

func TestPage(t *testing.T) {
	p := New("a < b", "p{}", "c & d")
	p.Head("<h>", "x")
	text := string(p.End())
	for _, want := range []string{"<title>a &lt; b</title>", "<p>c &amp; d</p>",
		"<h2>&lt;h&gt;</h2>", "</main></html>\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in %s", want, text)
		}
	}
	for x, want := range map[float64]float64{0.9: 1, 1: 1, 1.1: 2, 3: 5, 6: 10, 0.03: 0.05,
		700: 1000} {
		if got := Step(x); got-want > 1e-12 || want-got > 1e-12 {
			t.Errorf("a step for %v is %v, want %v", x, got, want)
		}
	}
	if got := Px(1.0/3) + " " + Px(2); got != "0.3 2" {
		t.Error(got)
	}
}

// Figures of axes are round, whatever sums of steps come to.
func TestAxes(t *testing.T) {
	for _, c := range []struct {
		low, high float64
		log       bool
		want      string
	}{
		{0, 3e-4, false, "0 1e−4 2e−4 3e−4"},
		{-0.07, 0.1, false, "−0.05 0 0.05 0.10"},
		{0, 1.7e6, false, "0 500k 1M 1.5M"},
		{0, 4, false, "0 1 2 3 4"},
		{0.3, 12, true, "0.5 1 2 5 10"},
		{1e-6, 1e3, true, "1e−6 1e−5 1e−4 0.001 0.01 0.1 1 10 100 1000"},
	} {
		f := frame{Plot: Plot{Log: c.log, Series: []Series{{X: []float64{0, 1}, Y: []float64{c.low, c.high}}}},
			width: 100, height: 100}
		f.fit()
		var got []string
		for _, v := range f.levels() {
			got = append(got, f.level(v))
		}
		if text := strings.Join(got, " "); text != c.want {
			t.Errorf("%g to %g: %s, want %s", c.low, c.high, text, c.want)
		}
	}
}

// A curve of many points keeps its lowest and highest, and is broken where it is not finite.
func TestThinned(t *testing.T) {
	y := make([]float64, 100_000)
	x := make([]float64, len(y))
	for i := range y {
		x[i] = float64(i)
	}
	y[12_345], y[54_321] = 7, -3
	for i := 70_000; i < 80_000; i++ {
		y[i] = math.NaN()
	}
	f := frame{width: 860}
	list := f.thinned(Series{X: x, Y: y})
	seen, breaks := map[int]bool{}, 0
	for _, i := range list {
		seen[i] = true
		if i < 0 {
			breaks++
		}
	}
	if len(list) > 900 || !seen[12_345] || !seen[54_321] || breaks < 10 {
		t.Errorf("%d points, %d breaks, spikes %v %v", len(list), breaks, seen[12_345], seen[54_321])
	}
}
