package overlap

import (
	"encoding/json"
	"fmt"
	"strings"
)

// maxWaits is how many collectives the text names; JSON has all.
const maxWaits = 12

// JSON writes the report for programs.
func (r *Report) JSON() ([]byte, error) { return json.MarshalIndent(r, "", "  ") }

// String writes the report for people.
func (r *Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "overlap     %.1f %% of %s on the wire hidden, %s exposed; a run takes %s\n",
		100*r.Hidden, seconds(r.Wire), seconds(r.Exposed), seconds(r.Seconds))
	c := r.Compute
	fmt.Fprintf(&b, "compute     %s: GEMMs %s (%s), attention %s (%s), memory %s (%s)\n",
		seconds(c.Seconds()), seconds(c.GEMMs), amount(c.GEMMFLOPs, "FLOP"),
		seconds(c.Attention), amount(c.AttentionFLOPs, "FLOP"), seconds(c.Memory), size(c.MemoryBytes))
	for n, t := range r.Traffic {
		fmt.Fprintf(&b, "%-11s %s, %s in %s: %s, exposed %s", label("traffic", n), t.Fabric, t.Kind,
			t.Group, size(t.Bytes), seconds(t.Exposed))
		fmt.Fprintf(&b, " of %s, %.0f %% with a GEMM between", seconds(t.Wire),
			100*share(t.Between, t.Bytes))
		if t.Sync > 0 {
			fmt.Fprintf(&b, ", %.0f %% synchronous", 100*share(t.Sync, t.Bytes))
		}
		b.WriteByte('\n')
	}
	for n, l := range r.Loops {
		rounds := fmt.Sprint(l.Rounds)
		if l.Rounds < 0 {
			rounds = "unknown"
		}
		fmt.Fprintf(&b, "%-11s %s, %s rounds: %s each, exposed %s of %s\n", label("loops", n), l.Body,
			rounds, seconds(l.Seconds), seconds(l.Exposed), seconds(l.Wire))
		for _, g := range l.Gathers {
			fmt.Fprintf(&b, "            %s of %s gathered in %s are for the next round\n",
				size(float64(g.Ahead)), size(float64(g.Bytes)), g.Group)
		}
	}
	for n, w := range r.Waits[:min(maxWaits, len(r.Waits))] {
		fmt.Fprintf(&b, "%-11s %s of %s in %s: %s %s", label("exposed", n), seconds(w.Exposed),
			seconds(w.Wire), w.In, w.Name, w.Shape)
		if w.Tensors > 1 {
			fmt.Fprintf(&b, " and %d more", w.Tensors-1)
		}
		fmt.Fprintf(&b, ", %s\n", w.Group)
	}
	for _, note := range r.Notes {
		fmt.Fprintf(&b, "%s\n", note)
	}
	return b.String()
}

// label stands before the first of some lines.
func label(text string, n int) string {
	if n > 0 {
		return ""
	}
	return text
}

func share(part, whole float64) float64 {
	if whole == 0 {
		return 0
	}
	return part / whole
}

// seconds writes a time with three digits.
func seconds(t float64) string {
	switch {
	case t == 0:
		return "0 s"
	case t < 1e-6:
		return fmt.Sprintf("%.3g ns", t*1e9)
	case t < 1e-3:
		return fmt.Sprintf("%.3g µs", t*1e6)
	case t < 1:
		return fmt.Sprintf("%.3g ms", t*1e3)
	}
	return fmt.Sprintf("%.2f s", t)
}

// size writes bytes in powers of ten, as rates are given.
func size(n float64) string { return amount(n, "B") }

func amount(n float64, unit string) string {
	at := 0
	for at < len(prefixes)-1 && n >= 999.5 { // which would be written as 1e+03
		n, at = n/1000, at+1
	}
	return fmt.Sprintf("%.3g %s%s", n, prefixes[at], unit)
}

var prefixes = []string{"", "k", "M", "G", "T", "P", "E"}
