package train

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/precision/monitor"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/step"
)

// poison makes the loss of some steps NaN: of all steps if the first is negative, of none if it is
// 0.
func (t *Trainer) poison(steps ...int) {
	t.hooks.lossScale = func(labels int64) float64 {
		if steps[0] < 0 || slices.Contains(steps, t.step+1) {
			return math.NaN()
		}
		return 1 / max(1, float64(labels))
	}
}

// timeStalls gives the watchdog, which has seen nothing yet, another clock.
func (t *Trainer) timeStalls(now event.Clock) {
	t.watchdog = newWatchdog(t.opts.Recipe.Guard.Stall, t.opts.LeastStall, now)
}

// buildFaulty builds programs with inputs for faults: around the linear layers of some weights, the
// layer's input is multiplied by the program input fault.x, and the gradient of its output twice by
// fault.dy. 1e38 in the latter makes a gradient NaN.
func buildFaulty(c *model.Config, r *recipe.Recipe, how *plan.Plan, policy *precision.Policy,
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
		x := r.Input(faultX+op.In[1].Name, ir.Data, op.In[0].Type, "")
		dy := r.Input(faultDY+op.In[1].Name, ir.Data, op.Out[0].Type, "")
		return faultyLinear(r, op, x, dy)
	})
}

// faultyLinear writes a linear layer with the inputs for faults.
func faultyLinear(r *ir.Rewriter, op *ir.Op, x, dy *ir.Value) []*ir.Value {
	in := r.Mapped(op.In)
	in[0] = r.Mul(in[0], x)
	y := r.CopyWith(op, op.Attrs, op.Body, in...)[0]
	kept, over := r.StopGradient(y), r.Relu(r.Shift(dy, -1e30))
	none := r.Sub(y, kept)
	none = r.Sub(r.Mul(dy, r.Mul(dy, none)), r.Mul(over, r.Mul(over, none)))
	return []*ir.Value{r.Add(kept, none)}
}

// faultyLoop gives the body of a loop the inputs, stacked as the weights are.
func faultyLoop(outer *ir.Rewriter, l ir.Loop, weights []string) []*ir.Value {
	r := ir.NewRewriter(l.Body.Name, l.Body.Mesh...)
	end := len(l.In) - len(l.Invariants)
	r.Inputs(l.Body.Inputs[:end]...)
	inputs, args := map[*ir.Op][2]*ir.Value{}, outer.Mapped(l.In)
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
			name := []string{faultX, faultDY}[k] + l.In[i].Name
			two[k] = r.Input(name, ir.Data, t, "")
			stack := outer.Input(name, ir.Data, t.Stacked(l.N), "")
			args = slices.Insert(args, len(l.Carries)+stacks, stack)
			stacks++
		}
		inputs[one] = two
	}
	r.Inputs(l.Body.Inputs[end:]...)
	for _, one := range l.Body.Ops {
		if two, ok := inputs[one]; ok {
			r.Map(one.Out, faultyLinear(r, one, two[0], two[1]))
		} else {
			r.Copy(one)
		}
	}
	body, err := r.Graph(r.Mapped(l.Body.Results)...)
	if err != nil {
		panic(err) // a test's own graph
	}
	return outer.CopyWith(l.Op, l.Attrs.With("stacked", stacks), body, args...)
}

// The prefixes of the inputs that buildFaulty adds.
const faultX, faultDY = "fault.x.", "fault.dy."

// intercept calls functions before the gradients of each step, and between gradients and update.
// Fault inputs that are not set yet are 1.
func (t *Trainer) intercept(before, between func(step int) error) {
	t.hooks.gradients = func(ctx context.Context, batch *data.Batch) (float64, error) {
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
	for _, row := range t.programs.List {
		for _, a := range row.Module.Args {
			if !strings.Contains(a.Name, "fault.") || t.exec.ranks[row.Rank].state.Get(a.Name) != nil {
				continue
			}
			if err := t.changeArray(row, a, func(b []byte) {
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

// sample is what the monitor observed in the last step, without its loss.
func (t *Trainer) sample() *monitor.Sample {
	return t.controller.reader.sample(t.step, 0, 0, t.exec.reports())
}

// change edits the bytes of a program argument on each device; one that the state does not have yet
// begins as zeros. Over pipeline stages of one layer each, "block.q.1" is stage 1's shard of
// block.q.
func (t *Trainer) change(name string, change func([]byte)) error {
	for _, row := range t.programs.List {
		for _, a := range row.Module.Args {
			if a.Name == name || !t.programs.Joint() && layered(a.Name) == name {
				return t.changeArray(row, a, change)
			}
		}
	}
	return fmt.Errorf("no program takes %s", name)
}

var stacked = regexp.MustCompile(`^(g\.)?s(\d+)\.(.*?)(\.from\d+)?$`)

// layered gives the name on one device of what a stage of one layer has of a stack.
func layered(name string) string { return stacked.ReplaceAllString(name, "$1$3.$2") }

func (t *Trainer) changeArray(row *step.Program, spec program.Array, change func([]byte)) error {
	m, r := row.Module, t.exec.ranks[row.Rank]
	local, err := m.Local(spec)
	if err != nil {
		return err
	}
	old := r.state.Get(spec.Name)
	a, err := t.opts.Engine.Place(m, spec, engine.Copied, func(device int) ([]byte, error) {
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
