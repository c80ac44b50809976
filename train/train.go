package train

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/watch"
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

	// Processes is how the ranks of a pipeline are spread over processes; nil is one process.
	Processes *Processes
	// Ahead is how many actions a rank of a pipeline may have queued ([pipeline.Config]).
	Ahead int

	// Watch are the times of the watch over products in few bits; nil takes those of a run from the
	// beginning.
	Watch *watch.Options

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
	crew     crew
	schedule optim.Schedule
	guard    guard
	sentry   *sentry // nil if no product is in few bits

	step    int // steps that were done, rejected ones included
	updates int // updates that were accepted
	at      data.Position
	policy  string  // the digest of the one of the recipe
	flops   float64 // of one token, forward and backward
	pace    float64 // seconds of a step, lately
	last    Result

	share func(labels int64) float64 // one over the labels of a step; a test poisons it
}

// New compiles the programs and puts the state on the devices: that of the newest checkpoint in the
// recipe's folder, or the initial one.
func New(ctx context.Context, o Options) (*Trainer, error) {
	t := &Trainer{Options: o, schedule: scheduleOf(o.Recipe),
		guard: guard{Factor: o.Recipe.Guard.Spike}, at: data.Position{}}
	sum := sha256.Sum256([]byte(o.Programs.Policy.String()))
	t.policy = hex.EncodeToString(sum[:8])
	t.share = func(labels int64) float64 { return 1 / max(1, float64(labels)) }
	forward := o.Config.Forward(int64(o.Recipe.Seq))
	t.flops = 3 * (forward.Linear + forward.Square) // backward costs twice the forward
	var err error
	if o.Programs.Pipe != nil {
		t.crew, err = newRanks(ctx, t)
	} else {
		t.crew, err = newMesh(ctx, t)
	}
	if err != nil {
		return nil, err
	}
	t.sentry = newSentry(context.WithoutCancel(ctx), t)
	if err = t.begin(ctx); err == nil {
		err = t.crew.agree(ctx, fmt.Sprint(t.step, t.updates, t.at, digest(t.Data), t.policy))
	}
	if err != nil {
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
		if !pc.master {
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
	t.sentry.free()
	t.crew.free()
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
		stopping, err := t.crew.stop(ctx, stop.Err() != nil)
		if err != nil {
			return err
		}
		if stopping {
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
	if err := t.sentry.begin(); err != nil {
		return err
	}
	loss, err := t.crew.gradients(ctx, b.batch)
	if err != nil {
		return err
	}
	maxLoss, maxNorm := t.limits()
	rate := t.schedule.Rate(t.step)
	norm, ok, err := t.crew.update(ctx, loss <= maxLoss && t.sentry.sound(), rate, maxNorm)
	if err != nil {
		return err
	}
	why, err := t.sentry.look(loss, norm)
	if err != nil {
		return err
	}
	if !ok {
		return t.reject(ctx, b, loss, norm, why)
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
func (t *Trainer) reject(ctx context.Context, b taken, loss, norm float64, why string) error {
	why = cmp.Or(t.guard.judge(loss, norm), why)
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
		loss, err := t.crew.evaluate(ctx, b)
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
