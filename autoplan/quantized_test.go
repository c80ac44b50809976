package autoplan

import (
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
)

// Of several precisions a search takes the one that serves the goal best, tells what became of
// layers and what it costs, and offers only plans that programs can be made of.
func TestPrecisionIsChosen(t *testing.T) {
	for _, row := range []struct {
		list []dtype.Format
		goal Goal
		want dtype.Format
	}{
		{[]dtype.Format{dtype.FormatBF16, dtype.MXFP8}, Time, dtype.MXFP8},
		{[]dtype.Format{dtype.FormatBF16, dtype.MXFP8, dtype.NVFP4}, Time, dtype.NVFP4},
		{[]dtype.Format{dtype.NVFP4, dtype.MXFP8, dtype.FormatBF16}, Money, dtype.NVFP4},
	} {
		j := jobFor(t, "llama3.1-8b", "8xb200", 8192, 1<<20)
		j.Precisions, j.Goal = row.list, row.goal
		r, err := Search(t.Context(), j)
		if err != nil {
			t.Fatal(err)
		}
		best := r.Choices[0]
		if best.Precision != row.want || best.Plan.Precision != string(row.want) {
			t.Errorf("%v: %s, the plan says %q", row.list, best.Precision, best.Plan.Precision)
		}
		if best.Policy == "" || !strings.HasSuffix(best.Why, best.Policy) ||
			!strings.Contains(best.Why, "quantization takes") {
			t.Errorf("%v: %q", row.list, best.Why)
		}
		for _, c := range r.Choices {
			if err := c.Plan.Check(j.Config); err != nil {
				t.Errorf("%v: %v", c.Plan, err)
			}
		}
		t.Logf("%s: %s", best.Precision, best.Why)
	}
}

// A mesh whose chunks are not whole scale blocks is left out.
func TestChunksAreWholeBlocks(t *testing.T) {
	j := jobFor(t, "llama3.1-8b", "8xb200", 8192, 1<<20)
	for _, row := range []struct {
		m    mesh
		seq  int64
		prec dtype.Format
		want bool
	}{
		{mesh{1, 1, 1, 1, 8, "ring"}, 8192, dtype.MXFP8, true},
		{mesh{1, 1, 1, 1, 8, "ring"}, 8200, dtype.MXFP8, false},
		{mesh{1, 1, 1, 1, 8, "ring"}, 8200, dtype.FormatBF16, true},
		{mesh{1, 4, 1, 1, 2, "ring"}, 256, dtype.MXFP8, true}, // chunks of 32: a zigzag ring has two for each device
		{mesh{1, 4, 1, 1, 2, "ring"}, 128, dtype.MXFP8, false},
		{mesh{1, 8, 1, 1, 1, "ring"}, 128, dtype.MXFP8, false},
		{mesh{1, 4, 1, 1, 2, "ring"}, 128, dtype.NVFP4, true},
		{mesh{896, 1, 1, 1, 1, "ring"}, 8192, dtype.NVFP4, true},
		{mesh{896, 1, 1, 1, 1, "ring"}, 8192, dtype.MXFP8, false},
	} {
		j.Seq = row.seq
		if got := j.divides(row.m, row.prec); got != row.want {
			t.Errorf("%+v: %v", row, got)
		}
	}
}
