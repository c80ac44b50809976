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
	// Watch lets the graphs report on their quantized GEMMs; Inspect lets those that give gradients
	// measure the errors of rounding as well.
	Watch, Inspect bool
	// Activations and State keep what loops keep for the backward pass, and what the optimizer keeps
	// between updates, in the memory of the host.
	Activations, State bool
}

// Report is what graphs that give gradients report.
func (o *Options) Report() ir.Report {
	switch {
	case o.Inspect:
		return ir.ReportErrors
	case o.Watch:
		return ir.ReportScales
	}
	return ir.ReportNothing
}

// A Step is the graphs that train a model whose forward and backward pass are one program.
type Step struct {
	// Gradient gives the loss and the gradient of every parameter.
	Gradient *ir.Graph
	// Accumulate takes gradients as well and gives them with those of another part of the batch
	// added; nil if a step has one part.
	Accumulate *ir.Graph
	// Evaluate gives the loss alone.
	Evaluate *ir.Graph
	// Stats says what stands where in the reports of Gradient and Accumulate.
	Stats []ir.Stat
	// Params are the parameters in the order of the update. Their types are those of the gradients,
	// which on a mesh are terms of a sum that the update adds up.
	Params []optim.Param

	report   ir.Report
	sharding *Sharding
	quant    *QuantizedCopies
}

// NewStep builds the graphs of forward and backward pass of a loss, the only result of its graph.
func NewStep(loss *ir.Graph, o Options, w *QuantizedCopies) (*Step, error) {
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
	s := &Step{sharding: o.Sharding, report: o.Report(), quant: w}
	w.Watch = o.Watch
	for i, v := range gr.Wrt {
		p := o.Params[v.Name]
		p.Stats = o.Watch && len(v.Type.Dims) > 1
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
	if _, err := w.Expand(s.Evaluate, ir.ReportNothing); err != nil {
		return nil, err
	}
	s.Evaluate.Results[0].Name, s.Evaluate.Results[0].Means = Loss, program.Loss.For("")
	s.copies(s.Evaluate)
	return s, s.Evaluate.Verify()
}

// RankParams lists the parameters for the update.
func (s *Step) RankParams() []RankParam {
	list := make([]RankParam, len(s.Params))
	for i, p := range s.Params {
		list[i] = RankParam{Param: p, Counts: true}
		if s.sharding != nil {
			list[i].Layout = s.sharding.Params[i]
		} else {
			list[i].Layout = Layout{Name: p.Name, Whole: p.Type.Dims, Stored: p.Type, Compute: p.Type}
		}
	}
	return list
}

// End says how the update of a step is made.
func (o *Options) End(w *QuantizedCopies) End {
	e := End{Optimizer: o.Optimizer, Copies: w, Inspect: o.Inspect, State: o.State,
		Fused: o.Sharding == nil}
	if o.Sharding != nil {
		e.Plan = o.Sharding.Plan
	}
	return e
}

// gradient joins forward and backward pass and names what comes out; onto adds it to what came
// before.
func (s *Step) gradient(gr *ir.Gradient, onto bool) (*ir.Graph, error) {
	g, err := gr.Joint()
	if err != nil {
		return nil, err
	}
	own := len(g.Results)
	stats, err := s.quant.Expand(g, s.report)
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
		if v.Type.Elem != dtype.F32 && s.quant.plain[v.Name].Valid() {
			copied(v)
		}
	}
}
