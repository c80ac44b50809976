package train

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/precision/monitor"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/spmd"
	"github.com/deepwell/deepwell/step"
)

// Poison makes the loss of some steps NaN: of all steps if the first is negative, of none if it is
// 0.
func (t *Trainer) Poison(steps ...int) {
	t.share = func(labels int64) float64 {
		if steps[0] < 0 || slices.Contains(steps, t.step+1) {
			return math.NaN()
		}
		return 1 / max(1, float64(labels))
	}
}

// TimeStalls gives the watchdog, which has seen nothing yet, another clock.
func (t *Trainer) TimeStalls(now event.Clock) {
	t.watchdog = newWatchdog(t.Recipe.Guard.Stall, t.LeastStall, now)
}

// WriteFaulty builds programs with places for faults: around the linear layers with the weights of
// some names, what goes in is multiplied with the input fault.x, and the gradient of what comes out
// twice with the input fault.dy. Of 1e38 in the latter a gradient becomes no number.
func WriteFaulty(c *model.Config, r *recipe.Recipe, how *plan.Plan, policy *precision.Policy,
	weights ...string) (*step.Programs, error) {
	return step.Build(step.Spec{Model: c, Recipe: r, Arch: "cpu", Plan: how, Policy: policy,
		Edit: func(g *ir.Graph) (*ir.Graph, error) { return faulty(g, weights) }})
}

func faulty(g *ir.Graph, weights []string) (*ir.Graph, error) {
	return ir.Rewrite(g, func(r *ir.Rewriter, op *ir.Op) []*ir.Value {
		if op.Kind == "repeat" {
			return faultyLoop(r, op.Loop(), weights)
		}
		if op.Kind != "linear" || !slices.Contains(weights, op.In[1].Name) {
			return nil
		}
		x := r.Input(FaultX+op.In[1].Name, ir.Data, op.In[0].Type, "")
		dy := r.Input(FaultDY+op.In[1].Name, ir.Data, op.Out[0].Type, "")
		return faultyLinear(r, op, x, dy)
	})
}

// faultyLinear writes a linear layer with the places for faults.
func faultyLinear(r *ir.Rewriter, op *ir.Op, x, dy *ir.Value) []*ir.Value {
	in := r.Uses(op.In)
	in[0] = r.Mul(in[0], x)
	y := r.Again(op, op.Attrs, op.Body, in...)[0]
	kept, over := r.StopGradient(y), r.Relu(r.Shift(dy, -1e30))
	none := r.Sub(y, kept)
	none = r.Sub(r.Mul(dy, r.Mul(dy, none)), r.Mul(over, r.Mul(over, none)))
	return []*ir.Value{r.Add(kept, none)}
}

// faultyLoop gives the body of a loop the places, which are stacks as the weights are.
func faultyLoop(outer *ir.Rewriter, l ir.Loop, weights []string) []*ir.Value {
	r := ir.NewRewriter(l.Body.Name, l.Body.Mesh...)
	end := len(l.In) - len(l.Invariants)
	r.Inputs(l.Body.Inputs[:end]...)
	places, args := map[*ir.Op][2]*ir.Value{}, outer.Uses(l.In)
	stacks := len(l.Stacks)
	for _, one := range l.Body.Ops {
		if one.Kind != "linear" {
			continue
		}
		i := slices.Index(l.Body.Inputs, one.In[1])
		if i < 0 || !slices.ContainsFunc(weights, func(w string) bool {
			stem, _, _ := strings.Cut(l.In[i].Name, ".from")
			return w[:strings.LastIndexByte(w, '.')] == stem
		}) {
			continue
		}
		var two [2]*ir.Value
		for k, t := range []ir.Type{one.In[0].Type, one.Out[0].Type} {
			name := []string{FaultX, FaultDY}[k] + l.In[i].Name
			two[k] = r.Input(name, ir.Data, t, "")
			stack := outer.Input(name, ir.Data, t.Stacked(l.N), "")
			args = slices.Insert(args, len(l.Carries)+stacks, stack)
			stacks++
		}
		places[one] = two
	}
	r.Inputs(l.Body.Inputs[end:]...)
	for _, one := range l.Body.Ops {
		if two, ok := places[one]; ok {
			r.Set(one.Out, faultyLinear(r, one, two[0], two[1]))
		} else {
			r.Copy(one)
		}
	}
	body, err := r.Graph(r.Uses(l.Body.Results)...)
	if err != nil {
		panic(err) // a test's own graph
	}
	return outer.Again(l.Op, l.Attrs.With("stacked", stacks), body, args...)
}

// The first words of the names of the inputs that [WriteFaulty] adds.
const FaultX, FaultDY = "fault.x.", "fault.dy."

// Break does something before the gradients of each step, and between these and the update. Places
// for faults that have none yet are 1.
func (t *Trainer) Break(before, between func(step int) error) {
	t.gradients = func(ctx context.Context, batch *data.Batch) (float64, error) {
		if err := t.ones(); err != nil {
			return 0, err
		}
		if err := before(t.step + 1); err != nil {
			return 0, err
		}
		loss, err := t.exec.gradients(ctx, batch)
		if err != nil {
			return 0, err
		}
		return loss, between(t.step + 1)
	}
}

func (t *Trainer) ones() error {
	for _, row := range t.Programs.List {
		for _, a := range row.Module.Args {
			if !strings.Contains(a.Name, "fault.") || t.exec.ranks[row.Rank].state.Get(a.Name) != nil {
				continue
			}
			if err := t.change(row, a, func(b []byte) {
				for i := range len(b) / 4 {
					binary.LittleEndian.PutUint32(b[4*i:], math.Float32bits(1))
				}
			}); err != nil {
				return err
			}
		}
	}
	return nil
}

// Sample is what the watch was shown of the last step, less its loss.
func (t *Trainer) Sample() *monitor.Sample {
	return t.controller.reader.sample(t.step, 0, 0, t.exec.reports())
}

// Change changes the bytes of an argument of a program on the devices, each of which has its own;
// one that the state does not have yet has bytes that are zero. Over stages of one layer each,
// "block.q.1" is what stage 1 has of block.q.
func (t *Trainer) Change(name string, change func([]byte)) error {
	for _, row := range t.Programs.List {
		for _, a := range row.Module.Args {
			if a.Name == name || !t.Programs.Joint() && layered(a.Name) == name {
				return t.change(row, a, change)
			}
		}
	}
	return fmt.Errorf("no program takes %s", name)
}

var stacked = regexp.MustCompile(`^(g\.)?s(\d+)\.(.*?)(\.from\d+)?$`)

// layered gives the name on one device of what a stage of one layer has of a stack.
func layered(name string) string { return stacked.ReplaceAllString(name, "$1$3.$2") }

func (t *Trainer) change(row *step.Program, spec program.Array, change func([]byte)) error {
	s, r := row.Module, t.exec.ranks[row.Rank]
	local, err := s.Local(spec)
	if err != nil {
		return err
	}
	old := r.state.Get(spec.Name)
	a, err := t.Engine.Place(s, spec, engine.Copied, func(device int) ([]byte, error) {
		data := make([]byte, local.Bytes())
		if old != nil {
			var err error
			if data, err = old.Read(context.Background(), device); err != nil {
				return nil, err
			}
		}
		change(data)
		return data, nil
	})
	if err == nil {
		r.state.Put(a)
	}
	return err
}

// Gradients makes the first half of a step: its loss and, by the names of checkpoints, what this
// process has of its gradients.
func (t *Trainer) Gradients(ctx context.Context, b *data.Batch) (loss float64,
	grads map[string][]float64, err error) {
	if loss, err = t.gradients(ctx, b); err != nil {
		return 0, nil, err
	}
	grads = map[string][]float64{}
	homes := t.exec.homes()
	for _, pc := range pieces(t.Programs) {
		if !pc.master || homes[pc.rank] == nil {
			continue
		}
		a := homes[pc.rank].state.Get(program.Gradient.Of(pc.name))
		sum, err := summed(ctx, a, &pc, homes[pc.rank].mesh, t.gradientType(&pc))
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
func (t *Trainer) gradientType(pc *stateTensor) ir.Type {
	for _, h := range t.Programs.Ranks[pc.rank].RankParams {
		if h.Name == pc.name {
			return h.Type
		}
	}
	return ir.Type{}
}

// summed joins pieces and adds up terms.
func summed(ctx context.Context, a *engine.Array, pc *stateTensor, mesh []ir.Axis,
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
	norm, ok, err = t.exec.update(ctx, true, rate, math.Inf(1))
	t.updates++
	return norm, ok, err
}

// Evaluate gives the loss of rows alone.
func (t *Trainer) Evaluate(ctx context.Context, b *data.Batch) (float64, error) {
	return t.exec.evaluate(ctx, b)
}

// Masters gives, by the names of checkpoints, what this process has of the parameters.
func (t *Trainer) Masters(ctx context.Context) (map[string][]float64, error) {
	all := map[string][]float64{}
	homes := t.exec.homes()
	for _, pc := range pieces(t.Programs) {
		h := homes[pc.rank]
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
func (t *Trainer) Footprints() ([]*step.Footprint, error) {
	needs, err := t.needs()
	if err != nil {
		return nil, err
	}
	return t.Programs.Footprints(needs)
}

// Census holds what the compiled programs send to their graphs.
func (t *Trainer) Census() error {
	graphs := t.Programs.Graphs()
	for _, x := range t.exec.x.list() {
		m, err := x.Optimized()
		if err != nil {
			return err
		}
		list := spmd.Census(graphs[x.Module().Name])
		if off := spmd.Sends(list, m.Collectives(), true, dtype.F32); off != "" {
			return fmt.Errorf("%s: %s", x.Module().Name, off)
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
