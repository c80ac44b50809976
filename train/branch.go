package train

import (
	"context"
	"encoding/json"
	"math"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

// A Branch is a short run beside a run: it begins with a state of its own and has its own data and
// learning rates. It writes nothing. Every step with a finite loss is applied, spikes included, so
// that branches of different precisions make the same steps and their losses can be compared.
type Branch struct {
	// From has the parameters and moments to begin with; nil is Init, with moments of zero.
	From *ckpt.Checkpoint
	Init func(p *model.Param, dst []float32) error
	// Seed is the seed of stochastic rounding.
	Seed  int
	Steps int
	Rate  optim.Schedule // the learning rate of each step
	Data  Dataset
	// Shift changes the parameters before the first step, and Noise the reduced gradients of every
	// step. nil leaves them alone.
	Shift func(param string, x []float32)
	Noise func(step int, param string, grad []float32)
	// Done is called after every step, counted from 1, with its loss.
	Done func(step int, loss float64)
}

// Branches makes branches of a run with programs that are compiled once. Like a [Trainer] it is
// used by one goroutine at a time.
type Branches struct{ t *Trainer }

// NewBranches compiles the programs of branches, in one process. It neither reads nor writes the
// recipe's folder; Data, Eval, Init and Until are not used.
func NewBranches(ctx context.Context, o Options) (*Branches, error) {
	o, err := o.complete()
	if err != nil {
		return nil, err
	}
	o.Programs = o.Programs.Without(step.Evaluate) // it takes long to compile
	t := newTrainer(o)
	if err := t.compile(ctx); err != nil {
		t.Close()
		return nil, err
	}
	return &Branches{t}, nil
}

// Close frees the programs and the state.
func (b *Branches) Close() { b.t.Close() }

// Run makes the steps of a branch. It ends early, with an error, at a step whose loss or gradient
// is not finite.
func (b *Branches) Run(ctx context.Context, one Branch) error {
	// The trainer is this branch's alone: a branch begins by replacing all of its state.
	t := b.t
	r := *t.opts.Recipe
	r.Seed, r.Steps = one.Seed, one.Steps
	t.opts.Recipe, t.opts.Data, t.schedule = &r, one.Data, one.Rate
	t.step, t.updates, t.at = 0, 0, data.Position{}
	if err := t.beginBranch(ctx, one); err != nil {
		return err
	}
	defer t.dropPrefetched() // the data must not be closed under a batch that is still being read
	for t.step < one.Steps {
		if err := ctx.Err(); err != nil {
			return diag.New(diag.Canceled, "stopped after step %d of a branch", t.step).Wrap(err)
		}
		batch, err := t.batch(ctx)
		if err != nil {
			return err
		}
		if t.step+1 < one.Steps {
			t.prefetch(ctx, batch.after)
		}
		if err := t.branch(ctx, one, batch); err != nil {
			return err
		}
	}
	return nil
}

// branch makes one step.
func (t *Trainer) branch(ctx context.Context, b Branch, one *prefetched) error {
	loss, err := t.gradientsOf(ctx, one)
	if err != nil {
		return err
	}
	if err := t.exec.reduce(ctx); err != nil {
		return err
	}
	if b.Noise != nil {
		if err := t.editGradients(ctx, func(param string, grad []float32) {
			b.Noise(t.step, param, grad)
		}); err != nil {
			return err
		}
	}
	// No limit on loss or norm: only a value that is not finite stops the update.
	finite := !math.IsNaN(loss) && !math.IsInf(loss, 0)
	norm, ok, err := t.exec.finish(ctx, finite, t.schedule.LR(t.step), math.Inf(1))
	if err != nil {
		return err
	}
	if !ok {
		return diag.New(diag.TrainingLost, "step %d of a branch has a loss of %g and a gradient of %g",
			t.step+1, loss, norm).Try("lower optimizer.lr")
	}
	t.updates++
	t.advance(one)
	if b.Done != nil {
		b.Done(t.step, loss)
	}
	return nil
}

// beginBranch fills the state that a branch begins with.
func (t *Trainer) beginBranch(ctx context.Context, b Branch) error {
	// Both sources fill a whole tensor, so that Shift sees each parameter once, unsharded.
	read := initial(b.Init)
	if b.From != nil {
		var old loopState
		if err := json.Unmarshal(b.From.Extra[extraKey], &old); err != nil {
			return diag.New(diag.CheckpointDamaged, "the checkpoint of step %d was not written by a run",
				b.From.Step).At("%s", b.From.Path()).Wrap(err)
		}
		t.updates = old.Updates
		if err := t.sameModel(b.From.Model); err != nil {
			return err.At("%s", b.From.Path())
		}
		if err := t.fits(b.From); err != nil {
			return err
		}
		tensors := tensors(t.programs)
		read = func(name string, _ *model.Param, dst []byte) error {
			return b.From.ReadSlice(name, tensors[name].Box(), dst)
		}
	}
	return t.fill(ctx, t.computed(func(name string, param *model.Param, dst []byte) error {
		if err := read(name, param, dst); err != nil || param == nil || b.Shift == nil {
			return err
		}
		x := floats(dst, dtype.F32)
		b.Shift(name, x)
		dtype.F32.Encode(dst, x)
		return nil
	}))
}

// editGradients changes the gradients between the halves of a step. A gradient that two ranks have
// terms of is changed in the rank that counts it towards the norm.
func (t *Trainer) editGradients(ctx context.Context,
	change func(param string, grad []float32)) error {
	shards := t.exec.stateShards()
	for _, pc := range stateTensors(t.programs) {
		// nil for moments, and in a rank whose term of a shared gradient does not count.
		held := t.programs.Ranks[pc.rank].Counts(pc.name)
		if !pc.master || held == nil {
			continue
		}
		h := shards[pc.rank]
		x, err := t.reduced(ctx, h, &pc)
		if err != nil {
			return err
		}
		change(pc.param.Name, x)
		// The changed gradient goes back to the devices the way the state does: as tensors of layers,
		// of which each device reads its box.
		var changed ckpt.Memory
		for i, n := 0, len(x)/len(pc.tensors); i < len(pc.tensors); i++ {
			whole, err := changed.Add(pc.tensors[i])
			if err != nil {
				return err
			}
			dtype.F32.Encode(whole, x[i*n:][:n])
		}
		ways := []target{{module: h.update, name: program.Gradient.Of(pc.name), elem: held.Type.Elem}}
		if pc.layout != nil {
			ways[0].local = pc.layout.Stored
		}
		if err := t.fillArrays(ctx, &pc, &changed, h, ways); err != nil {
			return err
		}
	}
	return nil
}
