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
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/precision/monitor"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/step"
)

// Rows is where a run takes its data from; a [data.Loader] is one.
type Rows interface {
	Take(at data.Position, rows, rank, ranks int) (*data.Batch, data.Position, error)
}

// EvalSource is where the rows of the validation come from; a [data.Loader] is one.
type EvalSource interface {
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
	Programs *step.Programs
	Data     Rows
	Eval     EvalSource // gives the rows of the validation loss; nil turns it off
	// Init gives the parameters that a run begins with, if it does not go on with another.
	Init func(p *model.Param, dst []float32) error

	// Processes is how the ranks of a pipeline are spread over processes; nil is one process.
	Processes *Processes
	// Ahead is how many actions a rank of a pipeline may have queued ([pipeline.Config]).
	Ahead int

	// Monitor are the times of the watch over products in few bits; nil takes those of a run from the
	// beginning.
	Monitor *monitor.Options

	// Build names this build of Deepwell, which all processes of a run must have; "" if it is not
	// known.
	Build string

	// Memory reads what bounds the memory of this process; nil leaves it unchecked.
	Memory func() []machine.MemoryLimit
	// Disk reads the room that a folder's disk has left; nil asks the system.
	Disk func(dir string) (int64, error)
	// Sleep waits before a save that failed is tried again; nil is time.Sleep.
	Sleep func(time.Duration)

	// Until is the step after which the run pauses, with a checkpoint; 0 is the recipe's last.
	Until int
	// Peak is the arithmetic of all devices in operations a second, for MFU; 0 if it is not known.
	Peak   float64
	Events event.Sink
	Now    event.Clock
	Spans  Spans // hears what takes how long; nil if nobody listens

	// LeastStall is the shortest time after which a step counts as stalled, whatever guard.stall
	// says; 0 means a minute. Other phases of a run have some times as much.
	LeastStall time.Duration
	// OnStall, if it is not nil, is called some seconds after a run was found to have stalled. What
	// can be canceled has been by then, and Run has returned unless it is stuck inside the engine or
	// a file system: a command ends the process here.
	OnStall func(error)
}

// Spans hears of the parts of a step as they begin; the function that it returns is called when
// the part ends.
type Spans interface {
	Begin(step int, name string) (end func())
}

// A Trainer is a run at work.
type Trainer struct {
	Options
	exec       *executor
	others     *peers // the other processes of the run; nil if there are none
	schedule   optim.Schedule
	guard      guard
	watchdog   *watchdog
	controller *precisionController // nil if no product is in few bits

	step    int // steps that were done, rejected ones included
	updates int // updates that were accepted
	at      data.Position
	policy  string  // the digest of the one of the recipe
	flops   float64 // of one token, forward and backward
	pace    float64 // seconds of a step, lately
	saved   int     // the step of the newest checkpoint of this run, or -1
	owes    bool    // the validation of the last step was not made, or given up for a stop
	last    Result

	share func(labels int64) float64 // one over the labels of a step; a test poisons it
	// gradients makes the first half of a step: the executor's, or a test's around it.
	gradients func(ctx context.Context, b *data.Batch) (float64, error)
	// put writes a checkpoint: ckpt.Save, or a test's.
	put func(ctx context.Context, dir string, step int64, m ckpt.Meta, src ckpt.Source,
		o ckpt.Options) error
}

// New compiles the programs and puts the state on the devices: that of the newest checkpoint in the
// recipe's folder, or the initial one.
func New(ctx context.Context, o Options) (*Trainer, error) {
	t := &Trainer{Options: o, schedule: step.Rates(o.Recipe),
		guard: guard{Factor: o.Recipe.Guard.Spike}, at: data.Position{}, saved: -1,
		watchdog: newWatchdog(o.Recipe.Guard.Stall, o.LeastStall, time.Now)} // monotonic
	sum := sha256.Sum256([]byte(o.Programs.Policy.String()))
	t.policy = hex.EncodeToString(sum[:8])
	t.share = func(labels int64) float64 { return 1 / max(1, float64(labels)) }
	forward := o.Config.Forward(int64(o.Recipe.Seq))
	t.flops = 3 * (forward.Linear + forward.Square) // backward costs twice the forward
	if o.Processes != nil {
		t.others = newPeers(o.Processes, t, len(o.Programs.Ranks))
	}
	if err := t.start(ctx); err != nil {
		t.Close()
		return nil, err
	}
	return t, nil
}

// start goes from the cheapest check to the dearest: the processes of the run agree on what they
// train, the newest checkpoint is one of this run, the programs are compiled, the state is filled.
func (t *Trainer) start(ctx context.Context) error {
	if err := t.others.agree(ctx, t.settled()); err != nil {
		return err
	}
	c, old, err := t.newest(ctx)
	if err != nil {
		return err
	}
	if c != nil {
		defer func() { _ = c.Close() }()
	} else if d, ok := t.Data.(interface{ Ready() error }); ok {
		if err := d.Ready(); err != nil {
			return err
		}
	}
	if t.exec, err = newExecutor(ctx, t); err != nil {
		return err
	}
	t.gradients = t.exec.gradients
	if err := t.fitsHost(); err != nil {
		return err
	}
	t.controller = newPrecisionController(context.WithoutCancel(ctx), t)
	if err = t.begin(ctx, c, old); err != nil {
		return err
	}
	return t.others.agree(ctx, t.begun())
}

// begin fills the state: from a checkpoint, or as a run begins if there is none.
func (t *Trainer) begin(ctx context.Context, c *ckpt.Checkpoint, old *memory) error {
	if c != nil {
		return t.resume(ctx, c, old)
	}
	return t.fill(t.computed(initial(t.Init)))
}

// Close frees the programs and the state.
func (t *Trainer) Close() {
	t.controller.free()
	if t.exec != nil {
		t.exec.free()
	}
	t.others.close()
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

// run is the loop. ctx ends when the run has stalled, stop when it is to stop after a step. A
// validation is given up for a stop, and made when the run goes on.
func (t *Trainer) run(ctx, stop context.Context) error {
	r := t.Recipe
	next := t.prefetch(t.at)
	defer func() {
		for range next { // the data must not be closed under a batch that is still being taken
		}
	}()
	if t.owes {
		if stopped, err := t.validate(ctx, stop); err != nil || stopped {
			return t.halt(ctx, stop, err)
		}
	}
	if t.step >= t.end() {
		t.Events.Emit(event.Note{Text: fmt.Sprintf("nothing is left to do: step %d of %d is done · "+
			"next: deepwell export %s -o DIR", t.step, t.Recipe.Steps, filepath.ToSlash(t.Recipe.Out))})
	}
	for t.step < t.end() {
		start := t.Now()
		end := t.phase(phaseVote)
		stopping, err := t.others.some(ctx, stop.Err() != nil)
		end()
		if err != nil || stopping {
			return t.halt(ctx, stop, err)
		}
		b, err := t.await(ctx, next)
		if err != nil {
			return err
		}
		if t.step+1 < t.end() {
			next = t.prefetch(b.after)
		}
		if err := t.do(ctx, b, start); err != nil {
			return err
		}
		if t.Eval != nil && t.due(r.Eval.Every) {
			if stopped, err := t.validate(ctx, stop); err != nil || stopped {
				return t.halt(ctx, stop, err)
			}
		}
		if t.due(r.Save.Every) {
			if err := t.save(ctx, t.step == t.end()); err != nil {
				return err
			}
		}
	}
	return nil
}

// halt ends a run that was asked to stop, with a checkpoint, or one that failed.
func (t *Trainer) halt(ctx, stop context.Context, err error) error {
	if err == nil {
		err = t.save(ctx, true)
	}
	if err != nil {
		return err
	}
	return diag.New(diag.Canceled, "stopped after step %d of %d, saved", t.step, t.Recipe.Steps).
		Wrap(context.Cause(stop)).Try("run the same command again to go on").
		Exit(diag.Terminated) // also where another process of the run was asked
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

// await gives the next batch.
func (t *Trainer) await(ctx context.Context, next <-chan taken) (taken, error) {
	defer t.phase(phaseData)()
	select {
	case b := <-next:
		return b, b.err
	case <-ctx.Done():
		return taken{}, context.Cause(ctx)
	}
}

// do makes one step: gradients of all parts, a look at the loss, the update.
func (t *Trainer) do(ctx context.Context, b taken, start time.Time) error {
	if err := t.controller.begin(ctx); err != nil {
		return err
	}
	defer t.phase(t.controller.phase())()
	loss, err := t.gradients(ctx, b.batch)
	if err != nil {
		return err
	}
	maxLoss, maxNorm := t.limits()
	rate := t.schedule.Rate(t.step)
	sound, err := t.controller.sound(ctx)
	if err != nil {
		return err
	}
	norm, ok, err := t.exec.update(ctx, loss <= maxLoss && sound, rate, maxNorm)
	if err != nil {
		return err
	}
	why, err := t.controller.look(ctx, loss, norm)
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
	t.report(loss, norm, rate, b.batch, t.Now().Sub(start))
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
	t.Events.Emit(event.Rejected{Step: t.step + 1, Loss: event.Figure(loss),
		GradNorm: event.Figure(norm), Why: why, Replay: replay})
	t.advance(b)
	if t.guard.Rejected < maxRejected {
		return nil
	}
	return diag.New(diag.TrainingLost, "%d steps in a row were rejected; the last because %s",
		t.guard.Rejected, why).At("step %d", t.step).
		Try("look at the first of them with --replay, lower optimizer.lr, or look at the data")
}

// validate gives the loss over the held-out rows. It asks between any two parts whether the run is
// to stop, and then gives up: all processes do so after the same part.
func (t *Trainer) validate(ctx, stop context.Context) (stopped bool, err error) {
	if t.Eval == nil {
		return false, nil
	}
	defer t.span("validate")()
	t.owes = true
	sum, labels := 0.0, int64(0)
	rows := int64(t.Recipe.Microbatch)
	for first := int64(0); first < min(t.Eval.EvalRows(), maxEvalRows); first += rows {
		end := t.phase(phaseVote)
		stopped, err := t.others.some(ctx, stop.Err() != nil)
		end()
		if err != nil || stopped {
			return stopped, err
		}
		b, err := t.Eval.Eval(first, int(rows), 0, 1)
		if err != nil {
			return false, err
		}
		end = t.phase(phaseEvaluate) // each batch by itself
		loss, err := t.exec.evaluate(ctx, b)
		end()
		if err != nil {
			return false, err
		}
		sum, labels = sum+loss, labels+b.Count
	}
	t.last.Eval = sum / max(1, float64(labels))
	t.owes = false
	t.Events.Emit(event.Eval{Step: t.step, Loss: event.Figure(t.last.Eval), Tokens: labels})
	return false, nil
}

// report emits what a step came to.
func (t *Trainer) report(loss, norm, rate float64, b *data.Batch, took time.Duration) {
	tokens := b.Rows * b.Seq
	e := event.Step{Step: t.step, Steps: t.Recipe.Steps, Loss: event.Figure(loss),
		GradNorm: event.Figure(norm), Rate: rate, Tokens: int64(t.step) * int64(tokens),
		Seconds: took.Seconds(), MemoryBytes: t.memory()}
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
	done := t.watchdog.runs(name)
	if t.Spans == nil {
		return done
	}
	end := t.Spans.Begin(t.step+1, name)
	return func() {
		end()
		done()
	}
}
