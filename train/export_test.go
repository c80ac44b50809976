package train

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/spmd"
	"github.com/deepwell/deepwell/watch"
)

// Poison makes the loss of some steps NaN: of all steps if the first is negative, of none if it is 0.
func (t *Trainer) Poison(steps ...int) {
	t.share = func(labels int64) float64 {
		if steps[0] < 0 || slices.Contains(steps, t.step+1) {
			return math.NaN()
		}
		return 1 / max(1, float64(labels))
	}
}

// WriteWith is [WriteIn] with another optimizer than a recipe can name.
func WriteWith(c *model.Config, r *recipe.Recipe, how *plan.Plan, policy *precision.Policy,
	o optim.Optimizer) (*Programs, error) {
	return write(c, r, "cpu", how, policy,
		func(*recipe.Recipe, dtype.DType) optim.Optimizer { return o }, nil)
}

// WriteFaulty is [WriteIn] with places for faults: around the linear layers with the weights of
// some names, what goes in is multiplied with the input fault.x, and the gradient of what comes out
// twice with the input fault.dy. Of 1e38 in the latter a gradient becomes no number.
func WriteFaulty(c *model.Config, r *recipe.Recipe, how *plan.Plan, policy *precision.Policy,
	weights ...string) (*Programs, error) {
	return write(c, r, "cpu", how, policy, optimizerOf, func(g *ir.Graph) (*ir.Graph, error) {
		return faulty(g, weights)
	})
}

func faulty(g *ir.Graph, weights []string) (*ir.Graph, error) {
	b, at := ir.NewBuilder(g.Name, g.Mesh...), map[*ir.Value]*ir.Value{}
	for _, v := range g.Inputs {
		at[v] = b.Input(v.Name, v.Role, v.Type, v.Source)
	}
	for _, op := range g.Ops {
		in := make([]*ir.Value, len(op.In))
		for i, v := range op.In {
			in[i] = at[v]
		}
		site := op.Kind == "linear" && slices.Contains(weights, op.In[1].Name)
		if site {
			in[0] = b.Mul(in[0], b.Input(FaultX+op.In[1].Name, ir.Data, in[0].Type, ""))
		}
		for i, v := range b.Again(op, op.Attrs, op.Body, in...) {
			at[op.Out[i]] = v
		}
		if site {
			y := at[op.Out[0]]
			f := b.Input(FaultDY+op.In[1].Name, ir.Data, y.Type, "")
			kept, over := b.StopGradient(y), b.Relu(b.Shift(f, -1e30))
			none := b.Sub(y, kept)
			none = b.Sub(b.Mul(f, b.Mul(f, none)), b.Mul(over, b.Mul(over, none)))
			at[op.Out[0]] = b.Add(kept, none)
		}
	}
	var out []*ir.Value
	for _, v := range g.Results {
		out = append(out, at[v])
	}
	return b.Graph(out...)
}

// The first words of the names of the inputs that [WriteFaulty] adds.
const FaultX, FaultDY = "fault.x.", "fault.dy."

// Break does something before the gradients of each step, and between these and the update.
func (t *Trainer) Break(before, between func(step int) error) {
	m := t.sentry.mesh
	t.crew = &broken{m, before, between}
}

// Wrapped gives what Break was told to do before a step.
func (t *Trainer) Wrapped() func(step int) error {
	return t.crew.(*broken).before //nolint:errcheck,forcetypeassert // a test knows
}

type broken struct {
	*mesh
	before, between func(step int) error
}

func (b *broken) gradients(ctx context.Context, batch *data.Batch) (float64, error) {
	if err := b.before(b.t.step + 1); err != nil {
		return 0, err
	}
	loss, err := b.mesh.gradients(ctx, batch)
	if err != nil {
		return 0, err
	}
	return loss, b.between(b.t.step + 1)
}

// Sample is what the watch was shown of the last step, less its loss.
func (t *Trainer) Sample() *watch.Sample {
	return t.sentry.reader.sample(t.step, 0, 0, &t.sentry.mesh.told)
}

// Change changes the bytes of an argument of the gradient or of the update on the device; one that
// the state does not have yet has bytes that are zero.
func (t *Trainer) Change(name string, change func([]byte)) error {
	m, p := t.sentry.mesh, t.Programs
	for _, s := range []*program.Stage{p.Gradient, p.Update} {
		i := argument(s, name)
		if i < 0 {
			continue
		}
		data, err := make([]byte, s.Args[i].Global.Bytes()), error(nil)
		if a := m.state.Get(name); a != nil {
			if data, err = a.Read(context.Background(), 0); err != nil {
				return err
			}
		}
		change(data)
		a, err := t.Engine.Place(s, s.Args[i], engine.Copied,
			func(int) ([]byte, error) { return data, nil })
		if err != nil {
			return err
		}
		m.state.Put(a)
		return nil
	}
	return fmt.Errorf("no program takes %s", name)
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
		a := homes[pc.home].state.Get(program.Gradient.Of(pc.name))
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
	needs, err := t.needs()
	if err != nil {
		return nil, err
	}
	return t.Programs.Footprints(needs)
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

// Swap is what ranks of different processes do with the gradients that they share.
var Swap = swap

// Agree holds processes to the same facts.
func Agree(ctx context.Context, p *Processes, e *engine.Engine, values map[string]string) error {
	x := p.connect(e)
	defer x.close()
	var facts []fact
	for _, name := range slices.Sorted(maps.Keys(values)) {
		facts = append(facts, fact{name, values[name]})
	}
	return x.agree(ctx, facts)
}

// Exchange gives what every process has sent.
func Exchange(ctx context.Context, p *Processes, mine []byte) ([][]byte, error) {
	x := p.connect(nil)
	defer x.close()
	return x.exchange(ctx, "test", mine)
}

// Fail lets writing a checkpoint fail as the function says, before a byte is written.
func (t *Trainer) Fail(fails func(dir string, step int64) error) {
	t.put = func(ctx context.Context, dir string, step int64, m ckpt.Meta, src ckpt.Source,
		o ckpt.Options) error {
		if err := fails(dir, step); err != nil {
			return err
		}
		return ckpt.Save(ctx, dir, step, m, src, o)
	}
}
