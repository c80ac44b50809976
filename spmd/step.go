package spmd

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/program"
)

// Loss is the name of the loss among the results of a gradient, and of the graph that gives it
// alone.
const Loss = "loss"

// Options say how a step is made.
type Options struct {
	Optimizer optim.Optimizer
	// Recompute lists the parts of a block that the backward pass computes again.
	Recompute []ir.Tag
	// Parts is the number of gradients that are added up before an update.
	Parts int
	// Params describes the parameters to the optimizer, by name: tag and decay.
	Params map[string]optim.Param
	// Sharding is how the loss was cut for a mesh; nil for one device.
	Sharding *Sharding
	// Watch lets the graphs report on their products in few bits; Inspect lets those that give
	// gradients measure the errors of rounding as well.
	Watch, Inspect bool
	// Activations and State keep what loops keep for the backward pass, and what the optimizer keeps
	// between updates, in the memory of the host.
	Activations, State bool
}

// A Step is the graphs that train a model.
type Step struct {
	// Gradient gives the loss and the gradient of every parameter.
	Gradient *ir.Graph
	// Accumulate takes gradients as well and gives them with those of another part of the batch added;
	// nil if a step has one part.
	Accumulate *ir.Graph
	// Update changes parameters and state ([optim.Optimizer]).
	Update *ir.Graph
	// Evaluate gives the loss alone.
	Evaluate *ir.Graph
	// Quantize makes the copies in blocks that the others take of the parameters; nil if they take
	// none.
	Quantize *ir.Graph
	// Params are the parameters in the order of the update. Their types are those of the gradients,
	// which on a mesh are terms of a sum that the update adds up.
	Params []optim.Param

	// Stats says what stands where in the reports of Gradient and Accumulate.
	Stats []ir.Stat
	// Inspect measures the errors of the copies in blocks of the masters ([CopyErrors]), and Measured
	// says where they stand, by the names of the copies' scales; nil if that was not asked for.
	Inspect  *ir.Graph
	Measured map[string]Measured

	tells    ir.Report
	sharding *Sharding
	blocks   Blocks
}

// Train builds the graphs for a loss, the only result of its graph.
func Train(loss *ir.Graph, o Options) (*Step, error) {
	// What is no part of a loop's body stands in one program with its gradient: XLA would find that
	// it is computed again, and keep it.
	o.Recompute = slices.DeleteFunc(slices.Clone(o.Recompute), func(t ir.Tag) bool {
		return t == ir.Embed || t == ir.Head
	})
	how := ir.GradPlan{Recompute: o.Recompute, Offload: o.Activations}
	if o.Sharding != nil {
		how.Terms, how.Recompute = true, append(slices.Clone(o.Recompute), ir.Gather)
	}
	gr, err := ir.Grad(loss, how)
	if err != nil {
		return nil, err
	}
	s := &Step{sharding: o.Sharding}
	switch {
	case o.Inspect:
		s.tells = ir.ReportErrors
	case o.Watch:
		s.tells = ir.ReportScales
	}
	s.blocks.watch = o.Watch
	for i, v := range gr.Wrt {
		p := o.Params[v.Name]
		p.Watched = o.Watch && len(v.Type.Dims) > 1
		p.Name, p.Type = v.Name, gr.Backward.Results[i].Type
		switch {
		case o.Sharding != nil:
			p.Type.Elem = o.Sharding.Plan.Types.Grads
		case o.Parts > 1:
			p.Type.Elem = dtype.F32 // sums of several parts want more digits than the parts have
		}
		s.Params = append(s.Params, p)
	}
	if s.Gradient, err = s.gradient(gr, false); err != nil {
		return nil, err
	}
	if o.Parts > 1 {
		if s.Accumulate, err = s.gradient(gr, true); err != nil {
			return nil, err
		}
	}
	s.Evaluate = loss.Clone()
	s.Evaluate.Name = "evaluate"
	if err := s.blocks.Expand(s.Evaluate); err != nil {
		return nil, err
	}
	s.Evaluate.Results[0].Name, s.Evaluate.Results[0].Means = Loss, program.Loss.For("")
	s.copies(s.Evaluate)
	if err := s.Evaluate.Verify(); err != nil {
		return nil, err
	}
	if s.Update, err = s.update(o.Optimizer); err != nil {
		return nil, err
	}
	if o.State {
		if s.Update, err = offloaded(s.Update); err != nil {
			return nil, err
		}
	}
	kept := func(i int) (ir.Type, *Layout) {
		if s.sharding == nil {
			return s.Params[i].Type, nil
		}
		return s.sharding.Params[i].Stored, &s.sharding.Params[i]
	}
	if s.Quantize, err = s.blocks.graph(loss.Mesh, s.names(), kept); err == nil && o.Inspect {
		s.Inspect, s.Measured, err = s.blocks.inspection(loss.Mesh, s.names(), kept)
	}
	return s, err
}

// Copies lists what the graphs take of parameters in blocks.
func (s *Step) Copies() []ir.Copy { return s.blocks.Copies }

// names lists the parameters.
func (s *Step) names() []string {
	list := make([]string, len(s.Params))
	for i, p := range s.Params {
		list[i] = p.Name
	}
	return list
}

// gradient joins forward and backward pass and names what comes out; onto adds it to what came
// before.
func (s *Step) gradient(gr *ir.Gradient, onto bool) (*ir.Graph, error) {
	g, err := gr.Joint()
	if err != nil {
		return nil, err
	}
	own := len(g.Results)
	stats, err := s.blocks.expand(g, s.tells)
	if err != nil {
		return nil, err
	}
	s.copies(g)
	g.Name, s.Stats = "gradient", stats
	if onto {
		g.Name = "accumulate"
	}
	results := g.Results
	b := ir.Continue(g)
	out := []*ir.Value{results[0]}
	for i, p := range s.Params {
		v := results[1+i]
		if s.sharding != nil {
			v = s.sharding.Scatter(b, p.Name, v)
		}
		if v.Type.Elem != p.Type.Elem {
			v = b.Convert(v, p.Type.Elem)
		}
		p.Type = v.Type
		s.Params[i] = p
		if onto {
			sum := b.Input(program.Gradient.Of(p.Name), ir.Residual, p.Type, "")
			v = b.Add(sum.As(program.Gradient.For(p.Name)), v)
		}
		if slices.Contains(out, v) || v.Def() == nil {
			v = b.Scale(v, 1) // a result has one name, and parameters that are added have one gradient
		}
		out = append(out, v)
	}
	if g, err = b.Graph(append(slices.Clone(out), results[own:]...)...); err != nil {
		return nil, err
	}
	out[0].Name, out[0].Means = Loss, program.Loss.For("")
	for i, p := range s.Params {
		one := gradient(out[1+i], p.Name, onto)
		one.v.Name, one.v.Means = one.name, one.is
	}
	return g, g.Verify()
}

// copies names the parameters of a graph that computes in another type than f32, or with more of a
// parameter than a device keeps, as the copies that the update makes.
func (s *Step) copies(g *ir.Graph) {
	if s.sharding != nil {
		s.sharding.Copies(g)
		return
	}
	for _, v := range g.Params() {
		if v.Type.Elem != dtype.F32 && s.blocks.plain[v.Name].Valid() {
			copied(v)
		}
	}
}
