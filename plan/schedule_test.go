package plan

import (
	"testing"

	"github.com/deepwell/deepwell/diag"
)

// A schedule lists every action, so that ten million microbatches filled 6 GiB before anything was
// said of them.
func TestSchedulesAreBounded(t *testing.T) {
	for _, tt := range []struct {
		micros, stages int64
		fits           bool
	}{{1 << 20, 1, true}, {1 << 16, 16, true}, {10_000_000, 1, false}, {1 << 20, 2, false}, {1 << 24, 1 << 24, false}} {
		p := Default()
		p.Microbatches, p.Batch, p.PP = tt.micros, tt.micros, PP{Size: tt.stages, Schedule: "gpipe"}
		if tt.fits && tt.stages > 1 {
			continue // making it takes its time; the bound is what is tested
		}
		_, err := p.Schedule()
		if fits := err == nil; fits != tt.fits || !fits && diag.From(err).Code != diag.PlanValue {
			t.Errorf("%d microbatches in %d stages: %v", tt.micros, tt.stages, err)
		}
	}
}
