package replay

import (
	"strings"
	"testing"

	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/step"
)

// An update that takes the new state always is found: state after a step that does not count, or
// with a NaN gradient, is not what it was. The right program leaves every bit.
func TestSkippedUpdates(t *testing.T) {
	slowtest.Only(t)
	r := runner(t)
	p := programOf(t, "llama", step.Update, "bf16", "fsdp8")
	format, code, err := r.Compile(t.Context(), p.GPU, p.Cluster)
	if err != nil {
		t.Fatal(err)
	}
	right, err := Rewrite(format, code, Options{Fill: NaNs})
	if err != nil {
		t.Fatal(err)
	}
	wrong, err := rewrite(format, code, Options{Fill: NaNs}, func(_ *writer, s *site) *value {
		if s.opcode == "select" && len(s.shape.dims) > 0 {
			return s.values[1]
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	results, err := r.Run(t.Context(), p, false, right, wrong)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(p.Reference.Results); len(results[0].Arrays) < 2*n || results[0].Exact() <
		len(results[0].Arrays) {
		t.Errorf("%d results: %s", n, results[0])
	}
	for _, row := range skipRows {
		found := 0
		for _, d := range results[1].Beyond(p.Bound(false)) {
			if strings.HasSuffix(d.Name, row.name) {
				found++
			}
		}
		if found == 0 {
			t.Errorf("%s: not seen", row.name)
		}
	}
}
