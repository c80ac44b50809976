package train

import (
	"errors"
	"testing"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/step"
)

// Batches have the document numbers that a GPU's attention computes with: from 0 on in each
// sequence, without a gap, and no more than it has room for. Where the plan or the data says that a
// sequence is one document there is no mask, and a second one is refused.
func TestDocumentNumbersAreChecked(t *testing.T) {
	c, err := model.Parse([]byte(watched))
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		name                string
		planned, data, room int64
	}{
		{"unknown", 0, 0, 4}, {"planned", 3, 0, 3}, {"of the data", 0, 5, 5}, {"both", 6, 1, 6},
		{"one, planned", 1, 0, 1}, {"one of the data", 0, 1, 1},
	} {
		p := plan.Default()
		p.Seq, p.Batch, p.Microbatches, p.Documents = 8, 2, 1, row.planned
		p.Types.Params = dtype.BF16
		programs, err := step.Build(step.Spec{Model: c, Recipe: step.RecipeOf(p), Arch: "sm_100",
			Plan: p, Documents: row.data})
		if err != nil {
			t.Fatal(err)
		}
		tr := &Trainer{programs: programs}
		full := make([]int32, 8)
		for i := range full {
			full[i] = min(int32(i), int32(row.room-1))
		}
		over := append(full[:7:7], full[7]+1)
		for name, numbers := range map[string][]int32{"full": full, "over": over,
			"from 1 on": {1, 1, 1, 1, 1, 1, 1, 1}, "a gap": {0, 0, 0, 0, 0, 0, 0, 2},
			"falling": {0, 1, 0, 0, 0, 0, 0, 0}, "negative": {-1, 0, 0, 0, 0, 0, 0, 0}} {
			// The first sequence is right: numbers begin anew in the second.
			b := &data.Batch{Sequences: 2, Seq: 8, Segments: append(full[:8:8], numbers...)}
			err := tr.checkDocuments(b)
			if ok := name == "full"; ok != (err == nil) || !ok && !errors.Is(err, diag.BadInput) {
				t.Errorf("%s, %s: %v", row.name, name, err)
			}
		}
	}
}
