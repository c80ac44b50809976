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

// A Branch is a run beside the run: it begins with a state of its own and takes rows and rates of
// its own. It writes nothing, and steps count whatever their loss as long as it is finite, so that
// branches of different precisions make the same steps.
type Branch struct {
	// From has the parameters and moments that it begins with; nil is Init, and no moments.
	From  *ckpt.Checkpoint
	Init  func(p *model.Param, dst []float32) error
	Seed  int // of stochastic rounding
	Steps int
	Rate  optim.Schedule
	Data  Dataset
	// Shift changes the parameters before the first step, and Noise the gradients of every step; nil
	// leaves them.
	Shift func(param string, x []float32)
	Noise func(step int, param string, grad []float32)
	// Done hears the loss of every step, counted from 1.
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
	t := b.t
	r := *t.opts.Recipe
	r.Seed, r.Steps = one.Seed, one.Steps
	t.opts.Recipe, t.opts.Data, t.schedule = &r, one.Data, one.Rate
	t.step, t.updates, t.at = 0, 0, data.Position{}
	if err := t.depart(one); err != nil {
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
			t.prefetch(batch.after)
		}
		if err := t.branch(ctx, one, batch); err != nil {
			return err
		}
	}
	return nil
}

// branch makes one step.
func (t *Trainer) branch(ctx context.Context, b Branch, one *prefetched) error {
	loss, err := t.hooks.gradients(ctx, one.batch)
	if err != nil {
		return err
	}
	if err := t.exec.reduce(ctx); err != nil {
		return err
	}
	if b.Noise != nil {
		if err := t.disturb(ctx, func(param string, grad []float32) {
			b.Noise(t.step, param, grad)
		}); err != nil {
			return err
		}
	}
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

// depart fills the state that a branch begins with.
func (t *Trainer) depart(b Branch) error {
	read := initial(b.Init)
	if b.From != nil {
		var old memory
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
	return t.fill(t.computed(func(name string, param *model.Param, dst []byte) error {
		if err := read(name, param, dst); err != nil || param == nil || b.Shift == nil {
			return err
		}
		x := numbers(dst, dtype.F32)
		b.Shift(name, x)
		put(dst, x)
		return nil
	}))
}

// disturb changes the gradients of a step between its halves. Those that two ranks have terms of
// are changed where they count.
func (t *Trainer) disturb(ctx context.Context, change func(param string, grad []float32)) error {
	homes := t.exec.homes()
	for _, pc := range pieces(t.programs) {
		held := t.programs.Ranks[pc.rank].Counts(pc.name)
		if !pc.master || held == nil {
			continue
		}
		h := homes[pc.rank]
		x, err := t.reduced(ctx, h, &pc)
		if err != nil {
			return err
		}
		change(pc.param.Name, x)
		var changed ckpt.Memory
		for i, n := 0, len(x)/len(pc.tensors); i < len(pc.tensors); i++ {
			whole, err := changed.Add(pc.tensors[i])
			if err != nil {
				return err
			}
			put(whole, x[i*n:][:n])
		}
		ways := []way{{stage: h.update, name: program.Gradient.Of(pc.name), elem: held.Type.Elem}}
		if pc.layout != nil {
			ways[0].part = pc.layout.Stored
		}
		if err := pc.readParts(&changed, h.mesh, ways); err != nil {
			return err
		}
		if err := t.place(h, ways[0]); err != nil {
			return err
		}
	}
	return nil
}
