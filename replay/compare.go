package replay

import (
	"crypto/sha256"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
)

// A Difference is how far a result of a replay is from the reference's, over all devices.
type Difference struct {
	Name  string
	Shape dtype.Shape // of the global array, as the program has it
	// Relative is the Frobenius norm of the difference over the reference's, or over Against. Of
	// bytes, which may be codes of any format, it is the share that differs. It is +Inf if an element
	// is NaN.
	Relative float64
	// Against is the norm that the array would have at the typical size of the program's gradients,
	// where the reference's own is only rounding noise; else 0.
	Against  float64
	Apart    float64 // the Frobenius norm of the difference
	Elements int64   // of all shards
	Equal    int64   // elements of equal bits
	NaN      int64   // elements that are NaN here or there
	Infinite int64   // elements that are the same infinity here and there; they are in no norm
	// Norm is the Frobenius norm of the reference's result. Two programs that give zeros agree, but
	// show nothing.
	Norm float64
	// Sum is the SHA-256 of the replay's elements on all devices: replays of equal sums have equal
	// bits.
	Sum [sha256.Size]byte
}

// A Result is what the replay of one program gave.
type Result struct {
	Module string
	Wide   bool
	Arrays []Difference // in the order of the program's results
	// Seconds that were spent: on compiling and running the reference and the replay.
	Seconds struct{ CompileReference, CompileReplay, RunReference, RunReplay float64 }
}

// Worst is the result array that differs most.
func (r *Result) Worst() Difference {
	var worst Difference
	for _, d := range r.Arrays {
		if worst.Name == "" || d.Relative > worst.Relative {
			worst = d
		}
	}
	return worst
}

// Exact is the number of arrays that have equal bits.
func (r *Result) Exact() int {
	return len(lists.Filter(r.Arrays, func(d Difference) bool { return d.Equal == d.Elements }))
}

// Summary is one line.
func (r *Result) Summary() string {
	mode := "bf16 as it is"
	if r.Wide {
		mode = "bf16 held as f32"
	}
	worst := r.Worst()
	s := fmt.Sprintf("%s, %s: worst %.1e", r.Module, mode, worst.Relative)
	if worst.Relative > 0 {
		s += " (" + worst.Name + ")"
	}
	return s + fmt.Sprintf(", %d of %d arrays have equal bits", r.Exact(), len(r.Arrays))
}

// String is the summary and a line for each array.
func (r *Result) String() string {
	var b strings.Builder
	fmt.Fprintln(&b, r.Summary())
	for _, d := range r.Arrays {
		fmt.Fprintf(&b, "  %-40s %-20s %8.1e  %d of %d elements differ", d.Name, d.Shape, d.Relative,
			d.Elements-d.Equal, d.Elements)
		if d.NaN > 0 {
			fmt.Fprintf(&b, ", %d are NaN", d.NaN)
		}
		if d.Infinite > 0 {
			fmt.Fprintf(&b, ", %d are infinite in both", d.Infinite)
		}
		if d.Against > 0 {
			b.WriteString(", noise: against the size of other gradients")
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// compare compares the shards of a result, dense bytes of one type, one for each device.
func compare(name string, t dtype.DType, got, want [][]byte) Difference {
	d := Difference{Name: name, Sum: sha256.Sum256(slices.Concat(got...))}
	var apart, size float64 // sums of squares
	for i := range want {
		width := max(1, t.Bits()/8)
		g, w := t.Values(got[i]), t.Values(want[i])
		for j := range w {
			d.Elements++
			if math.IsNaN(g[j]) || math.IsNaN(w[j]) {
				d.NaN++
				continue
			}
			if string(got[i][j*width:(j+1)*width]) == string(want[i][j*width:(j+1)*width]) {
				d.Equal++
				if math.IsInf(w[j], 0) { // it would make the norm infinite, and all else nothing
					d.Infinite++
					continue
				}
			} else {
				apart += (g[j] - w[j]) * (g[j] - w[j])
			}
			size += w[j] * w[j]
		}
	}
	d.Norm, d.Apart = math.Sqrt(size), math.Sqrt(apart)
	switch {
	case d.NaN > 0:
		d.Relative = math.Inf(1)
	case d.Equal == d.Elements || apart == 0: // -0 is 0
	case t == dtype.U8:
		d.Relative = float64(d.Elements-d.Equal) / float64(d.Elements)
	default:
		d.Relative = d.Apart / d.Norm
	}
	if math.IsNaN(d.Relative) || apart > 0 && math.IsInf(d.Norm, 0) { // infinities that differ
		d.Relative = math.Inf(1)
	}
	return d
}
