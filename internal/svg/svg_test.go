package svg

import (
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
