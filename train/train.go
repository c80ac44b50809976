package train

import (
	"context"
	"encoding/binary"
	"math"
	"path/filepath"
	"slices"
	"time"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/spmd"
)

// Rows is where a run takes its data from; a [data.Loader] is one.
type Rows interface {
	Take(at data.Position, rows, rank, ranks int) (*data.Batch, data.Position, error)
}

// Held is where the rows of the validation come from; a [data.Loader] is one.
type Held interface {
	EvalRows() int64
	Eval(first int64, rows, rank, ranks int) (*data.Batch, error)
}

// maxEvalRows bounds a validation, so that one percent of a large corpus does not take longer than
// the training in between. The rows are the same every time.
const maxEvalRows = 1024

// Options are what a run needs.
type Options struct {
	Engine   *engine.Engine
	Config   *model.Config
	Recipe   *recipe.Recipe
	Programs *Programs
	Data     Rows
	Eval     Held // gives the rows of the validation loss; nil turns it off
	// Init gives the parameters that a run begins with, if it does not go on with another.
	Init func(p *model.Param, dst []float32) error

	// Until is the step after which the run pauses, with a checkpoint; 0 is the recipe's last.
	Until int
	// Peak is the arithmetic of all devices in operations a second, for MFU; 0 if it is not known.
	Peak   float64
	Events event.Sink
	Now    event.Clock
	Spans  Spans // hears what takes how long; nil if nobody listens
}

// Spans hears of the parts of a step as they begin; the function that it returns is called when
// the part ends.
type Spans interface {
	Begin(step int, name string) (end func())
}

// A Trainer is a run at work.
type Trainer struct {
	Options
	x        *executables
	state    engine.State
	schedule optim.Schedule
	guard    guard

	step    int // steps that were done, rejected ones included
	updates int // updates that were accepted
	at      data.Position
	flops   float64 // of one token, forward and backward
	pace    float64 // seconds of a step, lately
	last    Result

	inputs map[string]*ir.Value // of the gradient, by name

	share func(labels int64) float64 // one over the labels of a step; a test poisons it
}

// New compiles the programs and puts the state on the devices: that of the newest checkpoint in the
// recipe's folder, or the initial one.
func New(ctx context.Context, o Options) (*Trainer, error) {
	t := &Trainer{Options: o, schedule: scheduleOf(o.Recipe),
		guard: guard{Factor: o.Recipe.Guard.Spike}, at: data.Position{}}
	t.share = func(labels int64) float64 { return 1 / max(1, float64(labels)) }
	t.inputs = map[string]*ir.Value{}
	for _, v := range o.Programs.Step.Gradient.Inputs {
		t.inputs[v.Name] = v
	}
	forward := o.Config.Forward(int64(o.Recipe.Seq))
	t.flops = 3 * (forward.Linear + forward.Square) // backward costs twice the forward
	var err error
	if t.x, err = o.Programs.compile(ctx, o.Engine); err != nil {
		return nil, err
	}
	if err := t.begin(ctx); err != nil {
		t.Close()
		return nil, err
	}
	return t, nil
}

// begin fills the state.
func (t *Trainer) begin(ctx context.Context) error {
	c, err := ckpt.Latest(ctx, t.folder(), t.Events)
	if err == nil {
		defer func() { _ = c.Close() }()
		return t.resume(c)
	}
	if e := diag.From(err); e.Code != diag.CheckpointMissing {
		return err
	}
	return t.fill(func(pc *piece, dst []byte) error {
		if !pc.isMaster() {
			return nil // zeros
		}
		x := make([]float32, len(dst)/4)
		if err := t.Init(pc.param, x); err != nil {
			return err
		}
		put(dst, x)
		return nil
	})
}

// Close frees the programs and the state.
func (t *Trainer) Close() {
	t.x.free()
	t.state.Free()
}

// A Result is how far a run is.
type Result struct {
	Step     int     `json:"step"`
	Steps    int     `json:"steps"`
	Loss     float64 `json:"loss,omitempty"` // of the last step that counted, of this process
	Eval     float64 `json:"eval,omitempty"` // the last validation of this process
	Rejected int     `json:"rejected"`       // steps that did not count, of this process
	// Checkpoints is the folder of the run's checkpoints.
	Checkpoints string `json:"checkpoints"`
}

// Result tells how far the run is.
func (t *Trainer) Result() Result {
	r := t.last
	r.Step, r.Steps, r.Checkpoints = t.step, t.Recipe.Steps, filepath.ToSlash(t.folder())
	return r
}

func (t *Trainer) folder() string { return filepath.Join(t.Recipe.Out, "checkpoints") }

// Run trains until the recipe's last step. It ends early if its context does: after the step that
// has begun, with a checkpoint.
func (t *Trainer) Run(stop context.Context) error {
	r := t.Recipe
	ctx := context.WithoutCancel(stop) // a step that has begun is ended
	next := t.prefetch(t.at)
	defer func() {
		for range next { // the data must not be closed under a batch that is still being taken
		}
	}()
	for t.step < t.end() {
		start := t.Now()
		if stop.Err() != nil {
			if err := t.save(ctx); err != nil {
				return err
			}
			return diag.New(diag.Canceled, "stopped after step %d of %d", t.step, r.Steps).
				Wrap(context.Cause(stop)).Try("run the same command again: it goes on where it stopped")
		}
		b := <-next
		if b.err != nil {
			return b.err
		}
		if t.step+1 < t.end() {
			next = t.prefetch(b.after)
		}
		if err := t.do(ctx, b, start); err != nil {
			return err
		}
		if t.Eval != nil && t.due(r.Eval.Every) {
			if err := t.validate(ctx); err != nil {
				return err
			}
		}
		if t.due(r.Save.Every) {
			if err := t.save(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// end is the last step that this process makes.
func (t *Trainer) end() int {
	if t.Until > 0 {
		return min(t.Until, t.Recipe.Steps)
	}
	return t.Recipe.Steps
}

// due tells whether something is done after so many steps, and after the last.
func (t *Trainer) due(every int) bool {
	return t.step == t.end() || every > 0 && t.step%every == 0
}

// A taken is the batch of a step and the position after it.
type taken struct {
	batch *data.Batch
	after data.Position
	err   error
}

// prefetch takes the next batch while the devices are busy.
func (t *Trainer) prefetch(at data.Position) <-chan taken {
	c := make(chan taken, 1)
	go func() {
		defer close(c)
		b, after, err := t.Data.Take(at, t.Recipe.Batch, 0, 1)
		c <- taken{b, after, err}
	}()
	return c
}

// do makes one step: gradients of all parts, a look at the loss, the update.
func (t *Trainer) do(ctx context.Context, b taken, start time.Time) error {
	loss, err := t.gradients(ctx, b.batch)
	if err != nil {
		return err
	}
	maxLoss, maxNorm := t.guard.limits()
	rate := t.schedule.Rate(t.step)
	norm, ok, err := t.update(ctx, loss <= maxLoss, rate, maxNorm)
	if err != nil {
		return err
	}
	if !ok {
		return t.reject(ctx, b, loss, norm)
	}
	t.guard.accept(loss, norm)
	t.last.Loss = loss
	t.updates++
	t.advance(b)
	t.tell(loss, norm, rate, b.batch, t.Now().Sub(start))
	return nil
}

// advance counts a step.
func (t *Trainer) advance(b taken) { t.step, t.at = t.step+1, b.after }

// reject writes down a step that did not count, and stops a run that is lost.
func (t *Trainer) reject(ctx context.Context, b taken, loss, norm float64) error {
	why := t.guard.judge(loss, norm)
	t.guard.Rejected++
	t.last.Rejected++
	replay := ""
	if t.guard.Rejected == 1 { // the first of a row tells the most, and a state is large
		var err error
		if replay, err = t.keepForReplay(ctx, b.batch); err != nil {
			return err
		}
	}
	t.Events.Emit(event.Rejected{Step: t.step + 1, Loss: loss,
		GradNorm: norm, Why: why, Replay: replay})
	t.advance(b)
	if t.guard.Rejected < maxRejected {
		return nil
	}
	return diag.New(diag.TrainingLost, "%d steps in a row were rejected; the last because %s",
		t.guard.Rejected, why).At("step %d", t.step).
		Try("look at the first of them with --replay, lower optimizer.rate, or look at the data")
}

// gradients runs the parts of a step and gives its loss; the gradients stay in the state.
func (t *Trainer) gradients(ctx context.Context, b *data.Batch) (float64, error) {
	total := 0.0
	micro := t.Recipe.Micro
	for first := 0; first < b.Rows; first += micro {
		x := t.x.gradient
		if first > 0 {
			x = t.x.accumulate
		}
		run, err := t.part(x, b, first, b.Total)
		if err != nil {
			return 0, err
		}
		end := t.span("gradient")
		loss, err := scalar(ctx, run.Results[0])
		end()
		if err != nil {
			run.Free()
			return 0, err
		}
		total += loss
		if first == 0 {
			run.Keep(&t.state, run.Results[1:]...)
		}
		run.Free()
	}
	return total, nil
}

// part starts a program on some rows of a batch.
func (t *Trainer) part(x *engine.Executable, b *data.Batch, first int, labels int64) (*engine.Run,
	error) {
	defer t.span("place")()
	rows := int(t.Programs.Shape.Batch)
	from, to := first*b.Seq, (first+rows)*b.Seq
	inputs := map[string][]byte{
		model.InputIDs:       t.rows(b.IDs[from:to], b.Seq),
		model.InputLabels:    t.rows(b.Labels[from:to], b.Seq),
		model.InputPositions: t.rows(b.Positions[from:to], b.Seq),
		model.InputSegments:  t.rows(b.Segments[from:to], b.Seq),
		model.InputShare:     number(t.share(labels)),
	}
	return t.run(x, inputs)
}

// run places inputs, runs a program on them and the state, and frees them.
func (t *Trainer) run(x *engine.Executable, inputs map[string][]byte) (*engine.Run, error) {
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
		a, err := t.Engine.Place(s, spec, engine.Copied, func(device int) ([]byte, error) {
			return t.own(spec.Name, bytes, device), nil
		})
		if err != nil {
			return nil, err
		}
		arrays = append(arrays, a)
	}
	return x.Step(&t.state, arrays...)
}

// rows gives whole numbers in the order in which devices that cut the sequence take them.
func (t *Trainer) rows(list []int32, seq int) []byte {
	if t.Programs.Sharding == nil {
		return whole(list)
	}
	order := spmd.Order(t.Programs.Sharding.Plan)
	turned := make([]int32, len(list))
	for row := 0; row < len(list); row += seq {
		for i, from := range order {
			turned[row+i] = list[row+int(from)]
		}
	}
	return whole(turned)
}

// own gives a device its part of an input of the loss; all devices have all of any other.
func (t *Trainer) own(name string, bytes []byte, device int) []byte {
	v := t.inputs[name]
	if t.Programs.Sharding == nil || v == nil || len(v.Type.Place) == 0 {
		return bytes
	}
	var whole []ir.Dim
	for _, d := range v.Type.Dims {
		for _, s := range v.Type.Place {
			if s.How == d.Name {
				d.Size *= t.Programs.Step.Gradient.AxisSize(s.Axis)
			}
		}
		whole = append(whole, d)
	}
	return cut(t.mesh(), whole, bytes, v.Type, device)
}

// update changes the state if the step counts, and gives the norm of the gradients.
func (t *Trainer) update(ctx context.Context, commit bool, rate, limit float64) (norm float64,
	ok bool, err error) {
	defer t.span("update")()
	flag := []byte{0}
	if commit {
		flag[0] = 1
	}
	inputs := map[string][]byte{optim.Commit: flag, optim.Rate: number(rate),
		optim.Limit: number(limit)}
	for name, x := range t.Programs.optimizer.Scalars(t.updates + 1) {
		inputs[name] = number(x)
	}
	run, err := t.run(t.x.update, inputs)
	if err != nil {
		return 0, false, err
	}
	defer run.Free()
	for i, a := range run.Results {
		switch spec := t.x.update.Stage().Results[i]; spec.Name {
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
			if t.isCopy(spec) {
				run.Keep(&t.state, a)
			}
		}
	}
	for _, p := range t.Programs.Step.Params {
		t.state.Drop(spmd.GradientOf(p.Name))
	}
	return norm, ok, nil
}

// isCopy tells the model's copies among the results of an update.
func (t *Trainer) isCopy(spec program.Array) bool {
	return slices.ContainsFunc(t.Programs.Gradient.Args, func(a program.Array) bool {
		return a.Name == spec.Name
	})
}

// validate gives the loss over the held-out rows.
func (t *Trainer) validate(ctx context.Context) error {
	defer t.span("validate")()
	sum, labels := 0.0, int64(0)
	rows := int64(t.Recipe.Micro)
	for first := int64(0); first < min(t.Eval.EvalRows(), maxEvalRows); first += rows {
		b, err := t.Eval.Eval(first, int(rows), 0, 1)
		if err != nil {
			return err
		}
		run, err := t.part(t.x.evaluate, b, 0, 1) // the sum over all labels
		if err != nil {
			return err
		}
		loss, err := scalar(ctx, run.Results[0])
		run.Free()
		if err != nil {
			return err
		}
		sum, labels = sum+loss, labels+b.Count
	}
	t.last.Eval = sum / max(1, float64(labels))
	t.Events.Emit(event.Eval{Step: t.step, Loss: t.last.Eval, Tokens: labels})
	return nil
}

// tell emits what a step came to.
func (t *Trainer) tell(loss, norm, rate float64, b *data.Batch, took time.Duration) {
	tokens := b.Rows * b.Seq
	e := event.Step{Step: t.step, Steps: t.Recipe.Steps, Loss: loss,
		GradNorm: norm, Rate: rate, Tokens: int64(t.step) * int64(tokens), Seconds: took.Seconds(),
		MemoryBytes: t.memory()}
	if s := took.Seconds(); s > 0 {
		e.TokensPerSecond = float64(tokens) / s
		if t.Peak > 0 {
			e.MFU = e.TokensPerSecond * t.flops / t.Peak
		}
	}
	if t.pace == 0 {
		t.pace = took.Seconds()
	}
	t.pace += (took.Seconds() - t.pace) / 16 // one slow step says little about those to come
	e.ETASeconds = float64(t.Recipe.Steps-t.step) * t.pace
	t.Events.Emit(e)
}

// memory is the most that any device held.
func (t *Trainer) memory() int64 { return slices.Max(append(t.Engine.HighWater(), 0)) }

func (t *Trainer) span(name string) func() {
	if t.Spans == nil {
		return func() {}
	}
	return t.Spans.Begin(t.step+1, name)
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
