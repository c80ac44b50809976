package train

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"path/filepath"
	"time"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/flock"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/step"
)

// A Trainer is a run at work: compiled programs, and the state (parameters and optimizer moments)
// on the devices of its engine.
//
// [Trainer.Run] trains to the last step. A loop of one's own calls [Trainer.Step], [Trainer.Eval]
// and [Trainer.Save] instead, or, to decide about each update itself, [Trainer.Gradients] and
// [Trainer.Update].
//
// A Trainer is used by one goroutine at a time; its methods must not be called concurrently, also
// not while Run is at work. It reads its Dataset, compiles fallback programs and watches for stalls
// in goroutines of its own, which have ended when Close returns. If a run has several processes,
// all of them call the same methods in the same order.
type Trainer struct {
	opts     Options        // complete; never changed after New
	programs *step.Programs // at work: a change of precision replaces them

	exec       *executor
	others     *peers // the other processes of the run; nil for a run in one process
	schedule   optim.Schedule
	guard      guard
	watchdog   *watchdog            // nil for branches
	controller *precisionController // nil if no GEMM is quantized

	// step counts the steps that were done, rejected ones included; it is the index of the next batch
	// and of its learning rate. updates counts those that were applied, for AdamW's bias correction.
	step, updates int
	at            data.Position
	// pending says that Gradients has left gradients for Update.
	pending bool
	// next is the batch of the next step while it is read, or nil.
	next *prefetched
	// config is the model's config.json for checkpoints; nil if it cannot be written.
	config []byte
	policy string  // digest of the recipe's precision policy
	flops  float64 // of one token, forward and backward
	pace   float64 // moving average of the seconds of a step
	// saved is the step of the newest checkpoint in the run's folder, or -1.
	saved int
	// owes says that the validation of the last step was given up for a stop.
	owes bool
	last Result
	// evalLabels is the number of labels of the last validation.
	evalLabels int64

	// lock is of the run's folder; nil if the caller or another process has it.
	lock *flock.Lock
	// spent is why the trainer can only be closed, or nil.
	spent *diag.Error
	// reran says that Rerun has replaced the state; it may do so again.
	reran, closed bool

	hooks hooks

	balance balance // of the experts' loads
}

// hooks are the seams at which tests inject faults into a run.
type hooks struct {
	// lossScale weighs each of the labels of a step: one over their number.
	lossScale func(labels int64) float64
	// gradients is the first half of a step: the executor's.
	gradients func(ctx context.Context, b *data.Batch) (float64, error)
	// beforeLoss is called before the last loss of a step is read, without a pipeline; nil does
	// nothing.
	beforeLoss func()
	// put writes a checkpoint: [ckpt.Save], or nil for the writer of several processes.
	put func(ctx context.Context, dir string, step int64, m ckpt.Meta, src ckpt.Source,
		o ckpt.Options) error
}

// New compiles the programs and fills the state on the devices: from the newest checkpoint in the
// folder Recipe.Out/checkpoints, or from Options.Init for a new run. It makes the folder Recipe.Out
// and locks it until Close; if another trainer, here or in another process, has the lock, the error
// has the code [diag.RunBusy].
func New(ctx context.Context, o Options) (*Trainer, error) {
	o, err := o.complete()
	if err != nil {
		return nil, err
	}
	t := newTrainer(o)
	t.guard, t.saved = guard{Factor: o.Recipe.Guard.Spike}, -1
	t.watchdog = newWatchdog(o.Recipe.Guard.Stall, o.LeastStall, time.Now) // monotonic
	sum := sha256.Sum256([]byte(o.Programs.Policy.String()))
	t.policy = hex.EncodeToString(sum[:8])
	if o.Processes != nil {
		t.others = newPeers(o.Processes, t, len(o.Programs.Ranks))
	}
	if err := t.start(ctx); err != nil {
		t.Close()
		return nil, err
	}
	return t, nil
}

// newTrainer is what a run and its branches have in common.
func newTrainer(o Options) *Trainer {
	t := &Trainer{opts: o, programs: o.Programs, config: configOf(o.Model, o.Events),
		schedule: step.Rates(o.Recipe), at: data.Position{},
		flops: trainingFLOPs(o.Model, o.Recipe.Seq)}
	t.hooks.lossScale = func(labels int64) float64 { return 1 / max(1, float64(labels)) }
	return t
}

// start goes from the cheapest check to the dearest: nobody else trains in the folder, the
// processes of the run agree on what they train, the newest checkpoint belongs to this run, the
// programs compile and fit, the state is filled.
func (t *Trainer) start(ctx context.Context) error {
	if err := t.lockFolder(); err != nil {
		return err
	}
	if err := t.others.agree(ctx, t.settled()); err != nil {
		return err
	}
	c, old, err := t.newest(ctx)
	if err != nil {
		return err
	}
	if c != nil {
		defer func() { _ = c.Close() }()
	} else if t.opts.Init == nil {
		return diag.New(diag.BadInput, "train.Options.Init is not set, and the model has no method Init")
	} else if d, ok := t.opts.Data.(ReadyChecker); ok {
		if err := d.Ready(); err != nil {
			return err
		}
	}
	if err := t.compile(ctx); err != nil {
		return err
	}
	t.controller = newPrecisionController(context.WithoutCancel(ctx), t)
	if c != nil {
		err = t.resume(ctx, c, old)
	} else {
		state := t.computed(initial(t.opts.Init))
		state.ofExperts = true
		err = t.fill(ctx, state)
	}
	if err != nil {
		return err
	}
	return t.others.agree(ctx, t.begun())
}

// compile compiles the programs, and checks that they fit into memory.
func (t *Trainer) compile(ctx context.Context) (err error) {
	if t.exec, err = newExecutor(ctx, t); err != nil {
		return err
	}
	t.hooks.gradients = t.exec.gradients
	return t.fitsMemory()
}

// Close cancels the context of the batch that is being read, waits until Take has returned, and
// frees programs, state and the folder's lock. It writes nothing, and comes before the engine's
// Close. It may be called again; all other methods but Result and Programs then return an error of
// the code [diag.TrainerClosed].
func (t *Trainer) Close() {
	if t.closed {
		return
	}
	t.closed = true
	t.spent, t.reran = diag.New(diag.TrainerClosed, "the trainer is closed"), false
	t.dropPrefetched()
	t.controller.free()
	if t.exec != nil {
		t.exec.free()
	}
	t.others.close()
	if t.lock != nil {
		t.lock.Release()
	}
}

// Programs returns the programs at work. A change of precision replaces them.
func (t *Trainer) Programs() *step.Programs { return t.programs }

// A Result is the progress of a run.
type Result struct {
	Step  int `json:"step"`
	Steps int `json:"steps"`
	// Loss is the loss of the last applied step, and Eval the last validation loss; both are 0 before
	// this process made one. Rejected counts the steps that this process rejected.
	Loss     float64 `json:"loss,omitempty"`
	Eval     float64 `json:"eval,omitempty"`
	Rejected int     `json:"rejected"`
	// Memory is what the last Run planned and used of a GPU's memory; nil on CPU devices.
	Memory *event.Memory `json:"memory,omitempty"`
	// Checkpoints is the folder of the run's checkpoints.
	Checkpoints string `json:"checkpoints"`
}

// MarshalJSON writes a loss that is not finite as a string, as events do.
func (r Result) MarshalJSON() ([]byte, error) {
	type plain Result
	return json.Marshal(struct {
		plain
		Loss event.Figure `json:"loss,omitempty"`
		Eval event.Figure `json:"eval,omitempty"`
	}{plain(r), event.Figure(r.Loss), event.Figure(r.Eval)})
}

// Result returns the progress of the run so far.
func (t *Trainer) Result() Result {
	r := t.last
	r.Step, r.Steps, r.Checkpoints = t.step, t.opts.Recipe.Steps, filepath.ToSlash(t.folder())
	return r
}

func (t *Trainer) folder() string { return filepath.Join(t.opts.Recipe.Out, "checkpoints") }
