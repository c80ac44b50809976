package train

import (
	"maps"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/slowtest"
)

// The final BF16 phase of a run computes forward in bf16, the steps before it are as without it, and
// a run that is stopped anywhere ends with the same bits.
func TestFinalBF16(t *testing.T) {
	slowtest.Only(t)
	over(t, "mxfp8", repaired)
}

func repaired(t *testing.T, p *post) {
	const steps, last = 24, 18
	plain := p.run(t.TempDir(), nil, steps).byStep()
	whole, cut := t.TempDir(), t.TempDir()
	log, got := p.run(whole, nil, steps, `precision=["mxfp8", 0.25]`), &log{}
	want, said := log.byStep(), 0
	for step := 1; step <= steps; step++ {
		if x, y := plain[step], want[step]; (x == y) != (step <= last) {
			t.Errorf("step %d: loss %v, and %v without a final BF16 phase", step, y, x)
		}
	}
	for _, e := range log.list {
		if d, ok := e.(event.Precision); ok {
			if said++; d.What != "final-bf16" || !strings.Contains(d.Text, "from step 19 on") {
				t.Errorf("it says %+v", d)
			}
		}
	}
	if said != 1 {
		t.Errorf("it is said %d times", said)
	}
	stops := []int{7, last, last + 1, steps}
	if p.plan != nil && !*watchAll { // each run over stages takes a minute of CI
		stops = []int{last, steps}
	}
	for _, until := range stops {
		p.until = until
		got.list = append(got.list, p.run(cut, nil, steps, `precision=["mxfp8", 0.25]`).list...)
	}
	if !maps.Equal(want, got.byStep()) {
		t.Errorf("losses %v, resumed %v", want, got.byStep())
	}
	r := &rig{t: t}
	r.same(r.tensors(checkpoints(whole)), r.tensors(checkpoints(cut)))
}
