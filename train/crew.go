package train

import (
	"context"
	"encoding/binary"
	"math"
	"slices"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/spmd"
)

// A crew is the devices of a run at work: those of one mesh, or the ranks of a pipeline.
type crew interface {
	// gradients gives the loss of a step; its gradients stay on the devices.
	gradients(ctx context.Context, b *data.Batch) (float64, error)
	// update changes the state if the step counts, and gives the norm of the gradients.
	update(ctx context.Context, commit bool, rate, limit float64) (norm float64, ok bool, err error)
	// evaluate gives the sum of the losses of all labels.
	evaluate(ctx context.Context, b *data.Batch) (float64, error)
	// stop tells whether the run stops, which all processes do if one wishes to.
	stop(ctx context.Context, wish bool) (bool, error)
	// collect brings what other processes have of the state to the one that writes checkpoints.
	collect(ctx context.Context, s *snapshot) error
	// quantize makes the copies in blocks of the masters that programs take.
	quantize() error
	// homes says where the pieces of the state are, by piece.home; nil is in another process.
	homes() []*home
	free()
}

// A feed gives devices their parts of what comes from the host.
type feed struct {
	engine *engine.Engine
	mesh   []ir.Axis
	order  []int64              // of a row's tokens, where devices cut it; nil as it comes
	cut    map[string]*ir.Value // inputs of the loss, by name: which part is a device's
	drawn  func() []int32       // seed and step, for stochastic rounding
}

// newFeed makes that of the devices that run graphs, which take their data alike.
func newFeed(t *Trainer, p *plan.Plan, graphs ...*ir.Graph) *feed {
	f := &feed{engine: t.Engine, mesh: graphs[0].Mesh, cut: map[string]*ir.Value{}}
	f.drawn = func() []int32 { return []int32{int32(t.Recipe.Seed), int32(t.step)} }
	if p != nil {
		f.order = spmd.Order(p)
	}
	for _, g := range graphs {
		for _, v := range g.Inputs {
			if v.Role == ir.Data && len(v.Type.Place) > 0 {
				f.cut[v.Name] = v
			}
		}
	}
	return f
}

// batch gives the inputs that some rows of a batch make; share weighs each label.
func (f *feed) batch(b *data.Batch, first, rows int, share float64) map[string][]byte {
	from, to := first*b.Seq, (first+rows)*b.Seq
	return map[string][]byte{
		model.InputIDs:       f.rows(b.IDs[from:to], b.Seq),
		model.InputLabels:    f.rows(b.Labels[from:to], b.Seq),
		model.InputPositions: f.rows(b.Positions[from:to], b.Seq),
		model.InputSegments:  f.rows(b.Segments[from:to], b.Seq),
		model.InputShare:     number(share),
		ir.InputNoise:        whole(f.drawn()),
		ir.InputRows:         f.rows(count(int32(from), int32(to)), b.Seq),
	}
}

// count lists the tokens of a step from one to another.
func count(from, to int32) []int32 {
	list := make([]int32, to-from)
	for i := range list {
		list[i] = from + int32(i)
	}
	return list
}

// rows gives whole numbers in the order in which devices that cut the sequence take them.
func (f *feed) rows(list []int32, seq int) []byte {
	if f.order == nil {
		return whole(list)
	}
	turned := make([]int32, len(list))
	for row := 0; row < len(list); row += seq {
		for i, from := range f.order {
			turned[row+i] = list[row+int(from)]
		}
	}
	return whole(turned)
}

// place puts an input on the devices of a stage: of what is cut each its part, of others all.
func (f *feed) place(s *program.Stage, spec program.Array, bytes []byte) (*engine.Array, error) {
	v := f.cut[spec.Name]
	return f.engine.Place(s, spec, engine.Copied, func(device int) ([]byte, error) {
		if v == nil {
			return bytes, nil
		}
		return cut(f.mesh, f.wholeOf(v), bytes, v.Type, device), nil
	})
}

// wholeOf gives the dimensions of an input as all devices together have it.
func (f *feed) wholeOf(v *ir.Value) (dims []ir.Dim) {
	for _, d := range v.Type.Dims {
		for _, s := range v.Type.Place {
			for _, a := range f.mesh {
				if s.How == d.Name && a.Name == s.Axis {
					d.Size *= a.Size
				}
			}
		}
		dims = append(dims, d)
	}
	return dims
}

// run places inputs, runs a program on them and the state, and frees them.
func (f *feed) run(x *engine.Executable, st *engine.State, inputs map[string][]byte) (*engine.Run,
	error) {
	s := x.Stage()
	var arrays []*engine.Array
	defer func() {
		for _, a := range arrays {
			a.Free()
		}
	}()
	for _, spec := range s.Args {
		bytes, ok := inputs[spec.Name]
		if !ok {
			continue
		}
		a, err := f.place(s, spec, bytes)
		if err != nil {
			return nil, err
		}
		arrays = append(arrays, a)
	}
	return x.Step(st, arrays...)
}

// settings gives the inputs of an update.
func (t *Trainer) settings(commit bool, rate, limit float64) map[string][]byte {
	flag := []byte{0}
	if commit {
		flag[0] = 1
	}
	inputs := map[string][]byte{optim.Commit: flag, optim.Rate: number(rate),
		optim.Limit: number(limit)}
	for name, x := range t.Programs.optimizer.Scalars(t.updates + 1) {
		inputs[name] = number(x)
	}
	return inputs
}

// keepCopies puts what an update made for the model into the state, and reads whether it changed
// anything, and the norm if it gives one.
func keepCopies(ctx context.Context, run *engine.Run, s *program.Stage, st *engine.State,
	takers []*program.Stage) (norm float64, ok bool, err error) {
	for i, a := range run.Results {
		switch spec := s.Results[i]; spec.Name {
		case optim.Norm:
			if norm, err = scalar(ctx, a); err != nil {
				return 0, false, err
			}
		case optim.OK:
			var b []byte
			if b, err = a.Read(ctx, 0); err != nil {
				return 0, false, err
			}
			ok = b[0] != 0
		default:
			if slices.ContainsFunc(takers, func(t *program.Stage) bool {
				return argument(t, spec.Name) >= 0
			}) {
				run.Keep(st, a)
			}
		}
	}
	return norm, ok, nil
}

// scalar reads one number of f32.
func scalar(ctx context.Context, a *engine.Array) (float64, error) {
	b, err := a.Read(ctx, 0)
	if err != nil {
		return 0, err
	}
	return float64(math.Float32frombits(binary.LittleEndian.Uint32(b))), nil
}

func number(x float64) []byte {
	return binary.LittleEndian.AppendUint32(nil, math.Float32bits(float32(x)))
}

func whole(list []int32) []byte {
	b := make([]byte, 0, 4*len(list))
	for _, x := range list {
		b = binary.LittleEndian.AppendUint32(b, uint32(x))
	}
	return b
}

// A mesh is a crew without pipeline stages: all devices run the same programs.
type mesh struct {
	*feed
	t     *Trainer
	x     *executables
	state engine.State
	told  report       // of the step
	looks *executables // that give the gradients of this step in the place of x, and inspect; or nil
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
	return &mesh{feed: newFeed(t, how, t.Programs.Step.Gradient), t: t, x: x}, nil
}

func (m *mesh) free() {
	m.x.free()
	m.state.Free()
}

func (m *mesh) quantize() error {
	if m.x.quantize == nil {
		return nil
	}
	run, err := m.run(m.x.quantize, &m.state, nil)
	if err != nil {
		return err
	}
	defer run.Free()
	s := m.x.quantize.Stage()
	for i, a := range run.Results {
		if s.Results[i].Role == program.Copy {
			run.Keep(&m.state, a)
		}
	}
	return m.told.read(context.Background(), run, s, true)
}

func (m *mesh) homes() []*home {
	p := m.t.Programs
	return []*home{{&m.state, p.Update, []*program.Stage{p.Gradient}, m.mesh}}
}

// inspect measures the errors of the copies that the products of a step read, if it is inspected.
func (m *mesh) inspect(ctx context.Context) error {
	if m.looks == nil || m.looks.inspect == nil {
		return nil
	}
	run, err := m.run(m.looks.inspect, &m.state, nil)
	if err != nil {
		return err
	}
	defer run.Free()
	return m.told.read(ctx, run, m.looks.inspect.Stage(), true)
}

// gradients runs the parts of a step, one after the other.
func (m *mesh) gradients(ctx context.Context, b *data.Batch) (float64, error) {
	total := 0.0
	micro, at := m.t.Recipe.Micro, m.x
	if m.looks != nil {
		at = m.looks
	}
	m.told.begin()
	if err := m.inspect(ctx); err != nil {
		return 0, err
	}
	for first := 0; first < b.Rows; first += micro {
		x := at.gradient
		if first > 0 {
			x = at.accumulate
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
		err = m.told.read(ctx, run, x.Stage(), first == 0)
		for i, spec := range x.Stage().Results[1:] {
			if first == 0 && spec.Role == program.Gradient {
				run.Keep(&m.state, run.Results[1+i])
			}
		}
		run.Free()
		if err != nil {
			return 0, err
		}
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
	if err := m.told.read(ctx, run, h.update, true); err != nil {
		return 0, false, err
	}
	if norm, ok, err = keepCopies(ctx, run, h.update, h.state, h.takers); err != nil {
		return 0, false, err
	}
	for _, p := range m.t.Programs.Step.Params {
		m.state.Drop(program.Gradient.Of(p.Name))
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
