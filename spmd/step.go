package spmd

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/program"
)

// Loss is the result of a gradient graph, and of Evaluate, that has the loss.
const Loss = "loss"

// Options describe a training step.
type Options struct {
	Optimizer optim.Optimizer
	// Recompute lists the parts of a layer whose activations the backward pass recomputes (activation
	// checkpointing).
	Recompute []ir.Tag
	// Microbatches is the number of gradients that are accumulated before an update.
	Microbatches int
	// Params describes parameters to the optimizer, by name: tag and weight decay.
	Params map[string]optim.Param
	// Sharding is how the loss was sharded over a mesh; nil for one device.
	Sharding *Sharding
	// Monitor adds statistics of quantized GEMMs to the results; Inspect adds measured quantization
	// errors to the gradient graphs as well.
	Monitor, Inspect bool
	// OffloadActivations keeps the residuals of layer loops in host memory; OffloadState keeps the
	// optimizer state there between updates.
	OffloadActivations, OffloadState bool
	// Requantize is as in [ir.GradPlan].
	Requantize bool
}

// Report returns what gradient graphs report about their quantized GEMMs.
func (o *Options) Report() ir.Report {
	switch {
	case o.Inspect:
		return ir.ReportErrors
	case o.Monitor:
		return ir.ReportScales
	}
	return ir.ReportNothing
}

// A Step is the graphs of a model whose forward and backward pass are one program.
type Step struct {
	// Gradient gives the loss and the gradient of every parameter, for one microbatch. Where a step
	// has several it adds to gradients that it takes as arguments, which begin as zeros.
	Gradient *ir.Graph
	// Evaluate gives the loss, and the loss's statistics.
	Evaluate *ir.Graph
	// Stats describes the elements of the statistics that Gradient reports.
	Stats []ir.Stat
	// Params are the parameters in the order of the update. Their types are the gradients' types; on a
	// mesh these are partial sums that the update reduces.
	Params []optim.Param

	// What the gradient graphs report; how parameters are sharded, nil for one device; and the copies
	// that all graphs of the step take.
	report   ir.Report
	sharding *Sharding
	quant    *QuantizedCopies
}

// NewStep builds the graphs of forward and backward pass of a loss, the first result of its graph;
// others are statistics. w collects the quantized copies that they take of parameters.
func NewStep(loss *ir.Graph, o Options, w *QuantizedCopies) (*Step, error) {
	// Outside a loop, forward and backward are in one program: XLA's CSE would merge a recomputed
	// embedding or head with the first computation and keep it.
	o.Recompute = slices.DeleteFunc(slices.Clone(o.Recompute), func(t ir.Tag) bool {
		return t == ir.Embed || t == ir.Head
	})
	how := ir.GradPlan{Recompute: o.Recompute, Offload: o.OffloadActivations,
		Requantize: o.Requantize}
	// On a mesh, gathers of parameters are recomputed in the backward pass (ZeRO 3), and gradients
	// stay partial sums until the update.
	if o.Sharding != nil {
		how.Terms, how.Recompute = true, append(slices.Clone(o.Recompute), ir.Gather)
		how.SaveRows = o.Sharding.Plan.EPSave
	}
	gr, err := ir.Grad(loss, how)
	if err != nil {
		return nil, err
	}
	s := &Step{sharding: o.Sharding, report: o.Report(), quant: w}
	w.Monitor = o.Monitor
	for i, v := range gr.Wrt {
		p := o.Params[v.Name]
		p.Stats = o.Monitor && len(v.Type.Dims) > 1 && p.Balance == 0
		p.Name, p.Type = v.Name, gr.Backward.Results[i].Type
		switch {
		case o.Sharding != nil:
			p.Type.Elem = o.Sharding.Plan.Types.Grads
		case o.Microbatches > 1:
			p.Type.Elem = dtype.F32 // accumulate in f32
		}
		s.Params = append(s.Params, p)
	}
	if s.Gradient, err = s.gradient(gr, o.Microbatches > 1); err != nil {
		return nil, err
	}
	s.Evaluate = loss.Clone()
	s.Evaluate.Name = "evaluate"
	s.Evaluate.DetachLosses()
	if _, err := w.Expand(s.Evaluate, ir.ReportNothing); err != nil {
		return nil, err
	}
	s.Evaluate.Results[0].Name, s.Evaluate.Results[0].Means = Loss, program.Loss.For("")
	s.copies(s.Evaluate)
	return s, s.Evaluate.Verify()
}

// RankParams lists the parameters for the update. Without a mesh, every device has all of each.
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

// UpdateOptions returns the options of the step's update.
func (o *Options) UpdateOptions(w *QuantizedCopies) UpdateOptions {
	e := UpdateOptions{Optimizer: o.Optimizer, Quantized: w, Inspect: o.Inspect,
		OffloadState: o.OffloadState, Fused: o.Sharding == nil, Zero: o.Microbatches > 1}
	if o.Sharding != nil {
		e.Plan = o.Sharding.Plan
	}
	return e
}

// gradient joins forward and backward pass, quantizes and names the results; onto adds the
// gradients to earlier microbatches' gradients, which are donated.
func (s *Step) gradient(gr *ir.Gradient, onto bool) (*ir.Graph, error) {
	g, err := gr.Joint()
	if err != nil {
		return nil, err
	}
	g.DetachLosses()
	own := len(g.Results)
	stats, err := s.quant.Expand(g, s.report)
	if err != nil {
		return nil, err
	}
	s.copies(g)
	g.Name, s.Stats = "gradient", stats
	results, stated := g.Results, len(gr.Seeds) // the loss and statistics, then gradients
	b := ir.ExtendGraph(g)
	out := []*ir.Value{results[0]}
	for i, p := range s.Params {
		v := results[stated+i]
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
			v = b.Scale(v, 1) // a result has one name; added parameters share a gradient
		}
		out = append(out, v)
	}
	all := slices.Concat(out, results[1:stated], results[own:])
	if g, err = b.Graph(all...); err != nil {
		return nil, err
	}
	out[0].Name, out[0].Means = Loss, program.Loss.For("")
	for i, p := range s.Params {
		one := gradient(out[1+i], p.Name, onto)
		one.v.Name, one.v.Means = one.name, one.is
	}
	return g, g.Verify()
}

// copies renames parameters that are not f32 masters: the graph takes the compute copies, "c.w",
// that the update makes.
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
