package train

import (
	"context"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/spmd"
)

// A mesh is a crew without pipeline stages: all devices run the same programs.
type mesh struct {
	*feed
	t     *Trainer
	x     *executables
	state engine.State
}

func newMesh(ctx context.Context, t *Trainer) (crew, error) {
	x, err := t.Programs.compile(ctx, t.Engine)
	if err != nil {
		return nil, err
	}
	var how *plan.Plan
	if s := t.Programs.Sharding; s != nil {
		how = s.Plan
	}
	return &mesh{feed: newFeed(t.Engine, how, t.Programs.Step.Gradient), t: t, x: x}, nil
}

func (m *mesh) free() {
	m.x.free()
	m.state.Free()
}

func (m *mesh) homes() []*home {
	p := m.t.Programs
	return []*home{{&m.state, p.Update, []*program.Stage{p.Gradient}, m.mesh}}
}

// gradients runs the parts of a step, one after the other.
func (m *mesh) gradients(ctx context.Context, b *data.Batch) (float64, error) {
	total := 0.0
	micro := m.t.Recipe.Micro
	for first := 0; first < b.Rows; first += micro {
		x := m.x.gradient
		if first > 0 {
			x = m.x.accumulate
		}
		run, err := m.part(x, b, first, m.t.share(b.Total))
		if err != nil {
			return 0, err
		}
		end := m.t.span("gradient")
		loss, err := scalar(ctx, run.Results[0])
		end()
		if err != nil {
			run.Free()
			return 0, err
		}
		total += loss
		if first == 0 {
			run.Keep(&m.state, run.Results[1:]...)
		}
		run.Free()
	}
	return total, nil
}

// part starts a program on some rows of a batch.
func (m *mesh) part(x *engine.Executable, b *data.Batch, first int, share float64) (*engine.Run,
	error) {
	defer m.t.span("place")()
	return m.run(x, &m.state, m.batch(b, first, int(m.t.Programs.Shape.Batch), share))
}

func (m *mesh) update(ctx context.Context, commit bool, rate, limit float64) (norm float64, ok bool,
	err error) {
	defer m.t.span("update")()
	run, err := m.run(m.x.update, &m.state, m.t.settings(commit, rate, limit))
	if err != nil {
		return 0, false, err
	}
	defer run.Free()
	h := m.homes()[0]
	if norm, ok, err = keepCopies(ctx, run, h.update, h.state, h.takers); err != nil {
		return 0, false, err
	}
	for _, p := range m.t.Programs.Step.Params {
		m.state.Drop(spmd.GradientOf(p.Name))
	}
	return norm, ok, nil
}

func (m *mesh) evaluate(ctx context.Context, b *data.Batch) (float64, error) {
	run, err := m.part(m.x.evaluate, b, 0, 1)
	if err != nil {
		return 0, err
	}
	defer run.Free()
	return scalar(ctx, run.Results[0])
}

func (m *mesh) stop(_ context.Context, wish bool) (bool, error) { return wish, nil }

func (m *mesh) collect(context.Context, *snapshot) error { return nil }
