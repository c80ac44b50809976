package train

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/spmd"
)

// Poison makes the loss of one step no number: of all steps if it is negative, of none if it is 0.
func (t *Trainer) Poison(step int) {
	t.share = func(labels int64) float64 {
		if step < 0 || step > 0 && t.step+1 == step {
			return math.NaN()
		}
		return 1 / max(1, float64(labels))
	}
}

// WriteWith is Write with another optimizer than a recipe can name.
func WriteWith(c *model.Config, r *recipe.Recipe, how *plan.Plan, o optim.Optimizer) (*Programs,
	error) {
	return write(c, r, "cpu", how, func(*recipe.Recipe, dtype.DType) optim.Optimizer { return o })
}

// Gradients makes the first half of a step: its loss and, by the names of checkpoints, what this
// process has of its gradients.
func (t *Trainer) Gradients(ctx context.Context, b *data.Batch) (loss float64,
	grads map[string][]float64, err error) {
	if loss, err = t.crew.gradients(ctx, b); err != nil {
		return 0, nil, err
	}
	grads = map[string][]float64{}
	homes := t.crew.homes()
	for _, pc := range t.Programs.pieces() {
		if !pc.master || homes[pc.home] == nil {
			continue
		}
		a := homes[pc.home].state.Get(spmd.GradientOf(pc.name))
		sum, err := summed(ctx, a, &pc, homes[pc.home].mesh, t.gradientType(&pc))
		if err != nil {
			return 0, nil, err
		}
		n := len(sum) / len(pc.tensors)
		for k, one := range pc.tensors {
			old := grads[one.Name]
			for i, x := range sum[k*n:][:n] {
				if old == nil {
					grads[one.Name] = append(grads[one.Name], x)
				} else {
					old[i] += x // of what another rank has, too
				}
			}
		}
	}
	return loss, grads, nil
}

// gradientType is that of a parameter's gradient between the halves of a step.
func (t *Trainer) gradientType(pc *piece) ir.Type {
	if t.Programs.Pipe != nil {
		for _, h := range t.Programs.Pipe.Ranks[pc.home].Part.Held {
			if h.Name == pc.name {
				return h.Type
			}
		}
	}
	for _, p := range t.Programs.Step.Params {
		if p.Name == pc.name {
			return p.Type
		}
	}
	return ir.Type{}
}

// summed joins pieces and adds up terms.
func summed(ctx context.Context, a *engine.Array, pc *piece, mesh []ir.Axis,
	part ir.Type) ([]float64, error) {
	dims := pc.param.Dims
	if pc.layout != nil {
		dims = pc.layout.Whole
	}
	total := make([]float64, pc.param.Size())
	for device := range a.Parts() {
		if !first(mesh, part, device) {
			continue
		}
		b, err := a.Read(ctx, device)
		if err != nil {
			return nil, err
		}
		one := make([]float32, len(total))
		spmd.Join(mesh, dims, one, part, device, numbers(b, part.Elem))
		for i, x := range one {
			total[i] += float64(x)
		}
	}
	return total, nil
}

// Update makes the second half of a step.
func (t *Trainer) Update(ctx context.Context, rate float64) (norm float64, ok bool, err error) {
	norm, ok, err = t.crew.update(ctx, true, rate, math.Inf(1))
	t.updates++
	return norm, ok, err
}

// Evaluate gives the loss of rows alone.
func (t *Trainer) Evaluate(ctx context.Context, b *data.Batch) (float64, error) {
	return t.crew.evaluate(ctx, b)
}

// Masters gives, by the names of checkpoints, what this process has of the parameters.
func (t *Trainer) Masters(ctx context.Context) (map[string][]float64, error) {
	all := map[string][]float64{}
	homes := t.crew.homes()
	for _, pc := range t.Programs.pieces() {
		h := homes[pc.home]
		if !pc.master || h == nil {
			continue
		}
		b, err := gather(ctx, h.state.Get(pc.name), &pc, h.mesh)
		if err != nil {
			return nil, err
		}
		list := numbers(b, dtype.F32)
		n := len(list) / len(pc.tensors)
		for k, one := range pc.tensors {
			var values []float64
			for _, x := range list[k*n:][:n] {
				values = append(values, float64(x))
			}
			if old := all[one.Name]; old != nil && !slices.Equal(old, values) {
				return nil, fmt.Errorf("two ranks have different copies of %s", one.Name)
			}
			all[one.Name] = values
		}
	}
	return all, nil
}

// Footprints gives what ranks should hold, by what the compiler said of the programs at work.
func (t *Trainer) Footprints() ([]*Footprint, error) {
	byName := map[string]Needs{}
	for _, x := range t.executables() {
		m, err := x.Memory()
		if err != nil {
			return nil, err
		}
		byName[x.Stage().Name] = Needs{Temp: m.Temp, Output: m.Output, Alias: m.Alias}
	}
	return t.Programs.Footprints(func(s *program.Stage) Needs { return byName[s.Name] })
}

// Census holds what the compiled programs send to their graphs.
func (t *Trainer) Census() error {
	graphs := t.Programs.Graphs()
	for _, x := range t.executables() {
		m, err := x.Optimized()
		if err != nil {
			return err
		}
		list := spmd.Census(graphs[x.Stage().Name])
		if off := spmd.Sends(list, m.Collectives(), true, dtype.F32); off != "" {
			return fmt.Errorf("%s: %s", x.Stage().Name, off)
		}
	}
	return nil
}

func (t *Trainer) executables() (list []*engine.Executable) {
	add := func(all ...*engine.Executable) {
		for _, x := range all {
			if x != nil {
				list = append(list, x)
			}
		}
	}
	switch c := t.crew.(type) {
	case *mesh:
		add(c.x.gradient, c.x.accumulate, c.x.update)
	case *ranks:
		for _, r := range c.hosted {
			if r == nil {
				continue
			}
			add(r.zero, r.reduce, r.square, r.update)
			for _, s := range r.stages {
				add(s.Forward, s.Backward, s.Input, s.Weight)
			}
		}
	}
	return list
}

// Swap is what ranks of different processes do with the gradients that they share.
var Swap = swap
