package train

import (
	"context"
	"errors"
	"math"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/step"
)

// later is data that begins with another row.
type later struct {
	counting
	first int64
}

func (l later) Take(ctx context.Context, at data.Position, rows, rank, ranks int) (*data.Batch,
	data.Position, error) {
	b, after, err := l.counting.Take(ctx, data.Position{"count": at["count"] + l.first}, rows, rank, ranks)
	after["count"] -= l.first
	return b, after, err
}

// rates is the schedule of a recipe from a step on.
type rates struct {
	recipe *recipe.Recipe
	first  int
}

func (r rates) LR(n int) float64 { return step.Rates(r.recipe).LR(r.first + n) }

// A branch that takes the rows and rates of the run it comes from is that run; it can be made
// again, changed at its beginning or in its gradients, and leaves nothing behind.
func TestBranch(t *testing.T) {
	r := newRig(t)
	out := t.TempDir()
	l := &log{}
	tr := r.start(out, counting{}, l)
	defer tr.Close()
	if err := tr.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := l.losses()[10:]
	c, err := ckpt.Open(filepath.Join(checkpoints(out), "step-00000010"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	o := tr.opts
	o.Eval, o.Events, o.Now = nil, event.Discard, func() time.Time { return time.Unix(0, 0) }
	branches, err := NewBranches(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer branches.Close()
	run := func(b Branch) (losses []float64) {
		t.Helper()
		b.Done = func(_ int, loss float64) { losses = append(losses, loss) }
		if err := branches.Run(t.Context(), b); err != nil {
			t.Fatal(err)
		}
		return losses
	}
	b := Branch{From: c, Steps: 14, Rate: rates{o.Recipe, 10}, Data: later{first: 40}}
	if got := run(b); !slices.Equal(got, want) {
		t.Errorf("the branch has %v, the run %v", got, want)
	}
	changed := b
	changed.Shift = func(_ string, x []float32) {
		for i := range x {
			x[i] *= 1.01
		}
	}
	if got := run(changed); got[0] == want[0] || math.Abs(got[0]/want[0]-1) > 0.5 {
		t.Errorf("with other weights the first loss is %v, not near %v", got[0], want[0])
	}
	changed = b
	changed.Noise = func(step int, _ string, g []float32) {
		if step == 3 {
			clear(g)
		}
	}
	if got := run(changed); !slices.Equal(got[:4], want[:4]) || got[4] == want[4] {
		t.Errorf("without a gradient: %v, want %v", got, want)
	}
	scratch := Branch{Steps: 24, Rate: rates{o.Recipe, 0}, Data: counting{},
		Init: func(p *model.Param, dst []float32) error { return r.config.Init(p, 3, dst) }}
	if got := run(scratch); !slices.Equal(got, l.losses()) {
		t.Errorf("from scratch the branch has %v, the run %v", got, l.losses())
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("enough"))
	if err := branches.Run(ctx, b); err == nil {
		t.Error("a branch does not stop")
	}
}
