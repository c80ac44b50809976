package spmd_test

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/spmd"
)

// A runner runs a graph on all devices of its mesh.
type runner func(g *ir.Graph, in map[string][]*eval.Array) ([][]*eval.Array, error)

// graphs are all of a step on one mesh.
type graphs struct {
	*spmd.Step
	*spmd.RankUpdate
}

// build builds them for a loss.
func build(loss *ir.Graph, o spmd.Options) (*graphs, error) {
	w := &spmd.QuantizedCopies{}
	s, err := spmd.NewStep(loss, o, w)
	if err != nil {
		return nil, err
	}
	p, err := spmd.NewRankUpdate(s.RankParams(), o.UpdateOptions(w))
	return &graphs{s, p}, err
}

// A rig trains a model for a quantized steps with the graphs of one plan, or of one device.
type rig struct {
	step     *graphs
	sharding *spmd.Sharding // nil for one device
	mesh     []ir.Axis
	whole    map[string]*eval.Array // what it begins with
	o        optim.Optimizer
	state    map[string][]*eval.Array
	run      runner
	plan     *plan.Plan // nil for one device
}

func newRig(g *ir.Graph, p *plan.Plan, o optim.Optimizer, parts int, whole map[string]*eval.Array,
	run runner) (*rig, error) {
	r := &rig{whole: whole, o: o, state: map[string][]*eval.Array{}, run: run, plan: p}
	opt := spmd.Options{Optimizer: o, Microbatches: parts, Params: map[string]optim.Param{}}
	for _, v := range g.Params() {
		tag := ir.Attn
		if v.Type.Dims[0].Name != ir.Layer {
			tag = ir.Embed
		}
		opt.Params[v.Name] = optim.Param{Tag: tag, Decay: len(v.Type.Dims) > 2}
	}
	loss := g
	if p != nil {
		var err error
		if r.sharding, err = spmd.Shard(g, p); err != nil {
			return nil, err
		}
		loss, opt.Sharding, opt.Recompute = r.sharding.Graph, r.sharding, p.Recompute
		r.mesh = p.Mesh()
	}
	var err error
	if r.step, err = build(loss, opt); err != nil {
		return nil, err
	}
	r.begin()
	return r, nil
}

// begin deals out parameters and zeros.
func (r *rig) begin() {
	for _, v := range r.step.Update.Inputs {
		if v.Role == ir.Param {
			r.state[v.Name] = r.deal(v.Type, r.whole[v.Name])
		}
	}
	for _, v := range r.step.Gradient.Params() {
		if name, ok := strings.CutPrefix(v.Name, "c."); ok {
			r.state[v.Name] = r.deal(v.Type, r.whole[name])
		}
	}
}

// deal shards a global array for the devices; nil makes zeros.
func (r *rig) deal(t ir.Type, whole *eval.Array) (list []*eval.Array) {
	for d := range devices(r.mesh) {
		a := eval.New(t)
		if whole != nil {
			a.Data = spmd.TakeShard(r.mesh, whole.Type.Dims, whole.Data, t, d)
		}
		list = append(list, a)
	}
	return list
}

func (r *rig) feed(g *ir.Graph, batch map[string]*eval.Array) map[string][]*eval.Array {
	in := map[string][]*eval.Array{}
	if r.plan != nil {
		batch = ordered(batch, r.plan)
	}
	for _, v := range g.Inputs {
		if in[v.Name] = r.state[v.Name]; in[v.Name] == nil {
			in[v.Name] = r.deal(v.Type, batch[v.Name])
		}
	}
	return in
}

// gradients runs the parts of a step and gives the loss.
func (r *rig) gradients(parts []map[string]*eval.Array) (float64, error) {
	total := 0.0
	if zero := r.step.Zero; zero != nil {
		out, err := r.run(zero, nil)
		if err != nil {
			return 0, err
		}
		for k, p := range r.step.Params {
			r.state[program.Gradient.Of(p.Name)] = out[k]
		}
	}
	for _, part := range parts {
		g := r.step.Gradient
		out, err := r.run(g, r.feed(g, part))
		if err != nil {
			return 0, err
		}
		for d := range out[0] {
			if x, y := out[0][d].Data[0], out[0][0].Data[0]; x != y {
				return 0, fmt.Errorf("devices %d and 0 have losses %v and %v", d, x, y)
			}
		}
		total += out[0][0].Data[0]
		for k, p := range r.step.Params {
			r.state[program.Gradient.Of(p.Name)] = out[1+k]
		}
	}
	return total, nil
}

// update changes the state and gives the norm of the gradients.
func (r *rig) update(n int, rate float64) (float64, error) {
	one := func(x float64) *eval.Array { return &eval.Array{Data: []float64{x}} }
	scalars := map[string]*eval.Array{optim.Commit: one(1), optim.LR: one(rate),
		optim.MaxNorm: one(math.MaxFloat32)}
	for name, x := range r.o.Scalars(n) {
		scalars[name] = one(x)
	}
	norm := 0.0
	for _, g := range []*ir.Graph{r.step.Reduce, r.step.Square, r.step.Update} {
		if g == nil {
			continue
		}
		out, err := r.run(g, r.feed(g, scalars))
		if err != nil {
			return 0, err
		}
		for i, v := range g.Results {
			switch v.Name {
			case optim.Norm:
				norm = out[i][0].Data[0]
			case optim.GradSquare:
				norm = math.Sqrt(out[i][0].Data[0])
			}
			r.state[cmp.Or(v.Means.Replaces, v.Name)] = out[i]
		}
	}
	return norm, nil
}

// wholes puts the parameters, or their gradients, together.
func (r *rig) wholes(grads bool) (map[string][]float64, error) {
	list := map[string][]float64{}
	for i, p := range r.step.Params {
		name, t := p.Name, p.Type
		if grads {
			name = program.Gradient.Of(name)
		} else if r.sharding != nil {
			t = r.sharding.Params[i].Stored
		} else {
			t = ir.Type{Elem: t.Elem, Dims: t.Dims}
		}
		var err error
		list[p.Name], err = assemble(r.mesh, r.whole[p.Name].Type.Dims, t, r.state[name])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return list, nil
}

// A history is what a quantized steps gave.
type history struct {
	losses, norms []float64
	grads, params map[string][]float64 // of the first step; after the last
}

// train makes steps, each of some parts of the batch.
func (r *rig) train(steps int, rate float64, batches [][]map[string]*eval.Array) (*history, error) {
	h := &history{}
	for i := range steps {
		loss, err := r.gradients(batches[i])
		if err != nil {
			return nil, err
		}
		if i == 0 {
			if h.grads, err = r.wholes(true); err != nil {
				return nil, err
			}
		}
		norm, err := r.update(i+1, rate)
		if err != nil {
			return nil, err
		}
		h.losses, h.norms = append(h.losses, loss), append(h.norms, norm)
	}
	var err error
	h.params, err = r.wholes(false)
	return h, err
}

// batches makes the inputs of some steps, each in parts.
func batches(g *ir.Graph, c *model.Config, steps, parts int) [][]map[string]*eval.Array {
	list := make([][]map[string]*eval.Array, steps)
	for i := range list {
		for k := range parts {
			list[i] = append(list[i], fills(g, c, uint64(100+i*parts+k)))
		}
	}
	return list
}

// evalRunner is the interpreter.
func evalRunner(g *ir.Graph, in map[string][]*eval.Array) ([][]*eval.Array, error) {
	return eval.Run(g, in)
}

// names lists the keys in order.
func names[E any](m map[string]E) []string {
	var list []string
	for name := range m {
		list = append(list, name)
	}
	slices.Sort(list)
	return list
}
