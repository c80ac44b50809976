package train

import (
	"context"
	"math"
	"slices"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
)

// Gradients computes the gradients of a batch, for the [Trainer.Update] that follows, and returns
// the loss: the mean over the batch's labels. The gradients stay on the devices; calling Gradients
// again replaces them. The batch has Recipe.Batch sequences of Recipe.Seq tokens.
//
// Gradients and Update are the two halves of [Trainer.Step], without the Dataset, the guard against
// spikes, the precision monitor and events. A loop may mix them with Step: Update counts a step as
// Step does, so that the schedule of learning rates goes on, but does not move the position in the
// Dataset. Step begins with gradients of its own and drops earlier ones. After an error on the
// devices, a cancellation included, the trainer can only be closed.
func (t *Trainer) Gradients(ctx context.Context, b *data.Batch) (loss float64, err error) {
	if err := t.usable(); err != nil {
		return 0, err
	}
	if b, err = t.checkBatch(b, t.opts.Recipe.Batch); err != nil {
		return 0, err
	}
	loss, err = t.hooks.gradients(ctx, b)
	if t.pending = err == nil; !t.pending {
		t.abandon(err, "the gradients of step %d were abandoned", t.step+1)
	}
	return loss, t.canceled(ctx, err)
}

// Update applies the gradients of the last call of [Trainer.Gradients] with a learning rate, counts
// a step, and returns the norm of all gradients together, before clipping. If that is not finite,
// the state stays as it is and applied is false. Gradients must come before each Update.
func (t *Trainer) Update(ctx context.Context, lr float64) (norm float64, applied bool, err error) {
	if err := t.usable(); err != nil {
		return 0, false, err
	}
	if !t.pending {
		return 0, false, diag.New(diag.BadInput, "there are no gradients to apply").
			Try("call Gradients before each Update")
	}
	if !(lr >= 0) || math.IsInf(lr, 0) {
		return 0, false, diag.New(diag.BadInput, "the learning rate is %g", lr).
			Try("give a finite number from 0 on")
	}
	t.pending = false
	norm, applied, err = t.exec.update(ctx, true, lr, math.Inf(1))
	if err != nil {
		t.abandon(err, "the update of step %d was abandoned", t.step+1)
		return 0, false, t.canceled(ctx, err)
	}
	t.step++
	if applied {
		t.updates++
	}
	return norm, applied, nil
}

// Params reads the f32 parameters from the devices, by their names in checkpoints. Layers have
// parameters of their own; elements are in row-major order. One process of several
// returns the parameters of its pipeline ranks.
func (t *Trainer) Params(ctx context.Context) (map[string][]float32, error) {
	if err := t.usable(); err != nil {
		return nil, err
	}
	all := map[string][]float32{}
	shards := t.exec.stateShards()
	for _, pc := range stateTensors(t.programs) {
		h := shards[pc.rank]
		if !pc.master || h == nil {
			continue
		}
		b, err := gather(ctx, h.state.Get(pc.name), &pc, h.mesh)
		if err != nil {
			return nil, err
		}
		list := floats(b, dtype.F32)
		n := len(list) / len(pc.tensors)
		for k, one := range pc.tensors {
			values := list[k*n:][:n]
			if old := all[one.Name]; old != nil && !slices.Equal(old, values) { // a tied embedding
				return nil, diag.New(diag.ProgramInvalid, "two pipeline ranks have different copies of %s",
					one.Name)
			}
			all[one.Name] = values
		}
	}
	return all, nil
}
