package parity

import (
	"bytes"
	"encoding/json"
	"flag"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/internal/golden"
	"github.com/deepwell/deepwell/internal/stat"
)

var pages = flag.String("pages", "", "a folder to write the page of the test to, to be looked at")

// A limit moves with its numbers and grows with their spread.
func TestLimits(t *testing.T) {
	if limits([]float64{1}) != nil {
		t.Error("one number has limits")
	}
	rapid.Check(t, func(t *rapid.T) {
		x := rapid.SliceOfN(rapid.Float64Range(-10, 10), 2, 12).Draw(t, "x")
		by := rapid.Float64Range(-5, 5).Draw(t, "by")
		l := limits(x)
		y := make([]float64, len(x))
		for i := range x {
			y[i] = 2*x[i] + by
		}
		k := limits(y)
		const tolerance = 1e-9 // sums of a dozen numbers of size 25
		if math.Abs(k.Lower-2*l.Lower-by) > tolerance || math.Abs(k.Upper-2*l.Upper-by) > tolerance {
			t.Fatalf("%v became %v", l, k)
		}
		if m := stat.Mean(x); l.Lower > m+tolerance || l.Upper < m-tolerance {
			t.Fatalf("%v is not around %v", l, m)
		}
	})
}

func TestVerdict(t *testing.T) {
	for _, c := range []struct {
		name  string
		gaps  []float64
		noise float64
		want  Verdict
		why   string
	}{
		{"well below", []float64{0.01, 0.02, 0.015}, 0.001, Met, "upper limit"},
		{"better than bf16", []float64{-1, -1.1, -0.9}, 0.001, Met, "upper limit"},
		{"far above", []float64{3, 3.1, 2.9}, 0.001, Missed, "lower limit"},
		{"far above in noise", []float64{3, 3.1, 2.9}, 0.4, Missed, "lower limit"},
		{"mean below, limit above", []float64{0.01, 0.4, 0.1}, 0.001, NotResolved, "between"},
		{"mean above, limit below", []float64{0.1, 0.9, 0.4}, 0.001, NotResolved, "between"},
		{"below in noise", []float64{0.01, 0.02, 0.015}, 0.2, NotResolved, "null reaches 0.2"},
		{"one pair", []float64{0.01}, 0, NotResolved, "one pair"},
	} {
		one := Comparison{Gaps: c.gaps, Mean: stat.Mean(c.gaps), SD: stat.Deviation(c.gaps),
			Limits: limits(c.gaps), Bound: 0.25}
		one.judge(c.noise)
		if one.Is != c.want || !strings.Contains(one.Why, c.why) {
			t.Errorf("%s: %s, %s", c.name, one.Is, one.Why)
		}
	}
}

// sample is a result as runs of a real size give it, with curves that were made up.
func sample() *Result {
	r := &Result{Model: "llama <2m>", Parameters: 2_021_376, Branch: true, From: 500, Pairs: 3, Steps: 120,
		Tail: 50, Batch: 4, Seq: 128, Rate: 1e-3, Seed: 1}
	curve := func(pair int, gap float64) []float64 {
		list := make([]float64, r.Steps)
		for i := range list {
			rough := 0.2 * math.Sin(float64(7*i*(pair+1)))
			list[i] = (1.5 + math.Exp(-float64(i)/60) + rough) * (1 + gap/100)
		}
		return list
	}
	several := func(gaps ...float64) (all [][]float64) {
		for pair, g := range gaps {
			all = append(all, curve(pair, g))
		}
		return all
	}
	r.BF16 = several(0, 0, 0)
	r.Null = Comparison{Name: "bf16, weights · (1 ± 1e-5)", Curves: several(-0.003, 0.001, 0.002)}
	r.Matched = []Comparison{{Name: "bf16, dW noise 13 %", Curves: several(0.02, 0.05, 0.03)}}
	r.Formats = []Comparison{
		{Name: "mxfp8", Share: 0.97, Bound: 0.05, Curves: several(0.026, 0.017, -0.002)},
		{Name: "nvfp4", Share: 0.73, Bound: 0.25, Curves: several(0.083, 0.111, 0.088)},
		{Name: "all <4>.json", Share: 0.97, Bound: 0.25, Curves: several(0.4, 0.45, 0.43)},
	}
	r.judge()
	return r
}

func TestTable(t *testing.T) {
	var b bytes.Buffer
	sample().Write(&b)
	golden.Compare(t, filepath.Join("testdata", "table.txt"), b.Bytes())
}

func TestReport(t *testing.T) {
	r := sample()
	page := r.HTML()
	if !bytes.Equal(page, r.HTML()) {
		t.Error("two pages of one result differ")
	}
	elsewhere := regexp.MustCompile(`(?i)https?://|<script|<link|@import|url\(|src=`)
	if m := elsewhere.Find(page); m != nil {
		t.Errorf("the page asks for something: %s", m)
	}
	for _, bad := range []string{"<2m>", "<4>", "NaN", "Inf"} {
		if bytes.Contains(page, []byte(bad)) {
			t.Errorf("the page has %s", bad)
		}
	}
	for _, want := range []string{`class="met"`, `class="missed"`, "97 % of the work"} {
		if !bytes.Contains(page, []byte(want)) {
			t.Errorf("the page lacks %s", want)
		}
	}
	if len(page) > 1_000_000 {
		t.Errorf("the page has %d bytes", len(page))
	}
	if *pages != "" {
		if err := os.WriteFile(filepath.Join(*pages, "parity.html"), page, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// Formats are compared pair by pair, which resolves more than their gaps do.
func TestBetween(t *testing.T) {
	c, ok := sample().Between("nvfp4", "mxfp8")
	want := []float64{0.057, 0.094, 0.090}
	for i, w := range want {
		if !ok || math.Abs(c.Gaps[i]-w) > 1e-9 { // of sums of 50 numbers
			t.Errorf("gaps %v, want %v", c.Gaps, want)
		}
	}
	if c.Limits.Lower < 0.04 || c.Limits.Lower > 0.06 {
		t.Errorf("at least %g", c.Limits.Lower)
	}
	if _, ok := sample().Between("nvfp4", "fp6"); ok {
		t.Error("there is no fp6")
	}
}

// Results are read back by whoever plots them.
func TestJSON(t *testing.T) {
	text, err := json.Marshal(sample())
	if err != nil {
		t.Fatal(err)
	}
	var back Result
	if err := json.Unmarshal(text, &back); err != nil {
		t.Fatal(err)
	}
	if back.Formats[0].Is != Met || back.Formats[2].Is != Missed {
		t.Errorf("read back: %s, %s", back.Formats[0].Is, back.Formats[2].Is)
	}
}

// A page of one short run has no limits and few points.
func TestShort(t *testing.T) {
	r := &Result{Parameters: 10, Pairs: 1, Steps: 1, Tail: 1, Batch: 1, Seq: 1, BF16: [][]float64{{2}}}
	r.Null.Curves = [][]float64{{2}}
	r.Formats = []Comparison{{Name: "mxfp8", Bound: 1, Curves: [][]float64{{2.1}}}}
	r.judge()
	if page := r.HTML(); bytes.Contains(page, []byte("NaN")) {
		t.Errorf("%s", page)
	}
}

// The null moves every weight, by the same steps in every run.
func TestNudge(t *testing.T) {
	x, y := []float32{1, -2, 3, 0.5}, []float32{1, -2, 3, 0.5}
	nudge("w", x)
	nudge("w", y)
	for i, v := range []float32{1, -2, 3, 0.5} {
		if x[i] != y[i] || x[i] == v || math.Abs(float64(x[i]/v-1)) > 1.1e-5 {
			t.Errorf("%g became %g and %g", v, x[i], y[i])
		}
	}
}

// The noise is as large as it says.
func TestShake(t *testing.T) {
	x := make([]float32, 10_000)
	for i := range x {
		x[i] = float32(i%7) - 3
	}
	y := append([]float32(nil), x...)
	shake(3, "w", y, 0.13)
	e, n := 0.0, 0.0
	for i := range x {
		d := float64(y[i] - x[i])
		e, n = e+d*d, n+float64(x[i])*float64(x[i])
	}
	// The norm of 10,000 normal numbers varies by 0.7 %.
	if got := math.Sqrt(e / n); math.Abs(got-0.13) > 0.004 {
		t.Errorf("the noise is %g of the norm", got)
	}
}
