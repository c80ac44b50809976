package pipeline

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/program"
)

// Graphs are the forward graph of a [Stage] and its gradients: whole (Backward), or split into the
// gradient of the stage's input (Dgrad) and of its parameters (Wgrad). Names are as
// in Stage.
type Graphs struct {
	Forward, Backward, Dgrad, Wgrad *ir.Graph

	Inputs, Outputs, OutputGrads, Gradients, Results []string

	// Ones names the arguments that take the gradients of Results: 1 for a loss. They belong into the
	// rank's state.
	Ones []string
	// Accumulators names, for each parameter in order, the gradient accumulator. They belong into the
	// rank's state.
	Accumulators []string
}

// A Boundary describes how a stage is connected to its neighbours, and how it is differentiated.
type Boundary struct {
	// Inputs and Outputs name the graph's inputs and results that are received from the stage before
	// and sent to the stage after. Other results go to the caller.
	Inputs, Outputs []string
	// Recompute lists the tags whose values the backward pass recomputes instead of saving them.
	Recompute []ir.Tag
	// Grads is the type of the accumulators; Invalid means f32.
	Grads dtype.DType
	// Terms leaves parameter gradients as partial sums over the stage's devices ([ir.GradPlan]).
	// ReduceGrad, if not nil, is applied to each before it is accumulated: ZeRO 2 reduce-scatters.
	Terms      bool
	ReduceGrad func(b *ir.Builder, param string, g *ir.Value) *ir.Value
	// Offload keeps the residuals of layer loops in host memory; SaveRows saves the rows of experts
	// ([ir.GradPlan]).
	Offload, SaveRows bool
}

// Differentiate builds the graphs of a stage from its forward graph, which it does not change.
// Parameter gradients are added to accumulators, which are donated.
func Differentiate(g *ir.Graph, b Boundary) (*Graphs, error) {
	out := &Graphs{Inputs: b.Inputs, Outputs: b.Outputs}
	var wrt []string
	for _, name := range b.Inputs {
		if v := g.Find(name); v != nil && v.Type.Elem.Kind() == dtype.Float {
			wrt = append(wrt, name)
		}
	}
	inputs := slices.Clone(wrt)
	var params []string
	for _, v := range g.Params() {
		wrt, params = append(wrt, v.Name), append(params, v.Name)
		out.Accumulators = append(out.Accumulators, program.Gradient.Of(v.Name))
	}
	// Gradients come in the order of wrt: inputs first, then parameters.
	gr, err := ir.Grad(g, ir.GradPlan{Wrt: wrt, Recompute: b.Recompute, Terms: b.Terms,
		Offload: b.Offload, SaveRows: b.SaveRows})
	if err != nil {
		return nil, err
	}
	for i, v := range g.Results {
		if at := slices.Index(b.Outputs, v.Name); at < 0 {
			out.Results = append(out.Results, v.Name)
			if gr.Seeds[i] != "" {
				out.Ones = append(out.Ones, gr.Seeds[i])
			}
		}
	}
	for _, name := range b.Outputs {
		at := slices.IndexFunc(g.Results, func(v *ir.Value) bool { return v.Name == name })
		if at < 0 {
			return nil, misfit("graph %s gives no %q", g.Name, name)
		}
		out.OutputGrads = append(out.OutputGrads, gr.Seeds[at])
	}
	out.Forward = gr.Forward
	out.Forward.Results = once(out.Forward.Results)
	out.Forward.DetachLosses()
	gr.Backward.DetachLosses() // recomputed
	out.means(gr.Backward)
	// Zero-bubble schedules run dgrad (early) and wgrad (late) as separate programs.
	early, late, err := gr.Split()
	if err != nil {
		return nil, err
	}
	if out.Backward, err = b.finish(gr.Backward, inputs, params); err != nil {
		return nil, err
	}
	// The first stage has no gradient to send: it has no Dgrad program.
	if len(early.Results) > 0 {
		if out.Dgrad, err = b.finish(early, inputs, nil); err != nil {
			return nil, err
		}
	}
	if out.Wgrad, err = b.finish(late, nil, params); err != nil {
		return nil, err
	}
	for _, name := range b.Inputs {
		gradient := ""
		if slices.Contains(inputs, name) {
			gradient = inputGradient(name)
		}
		out.Gradients = append(out.Gradients, gradient)
	}
	return out, nil
}

// means sets the roles of the inputs and results of forward and backward pass.
func (gs *Graphs) means(backward *ir.Graph) {
	for _, v := range slices.Concat(gs.Forward.Inputs, backward.Inputs) {
		switch {
		case slices.Contains(gs.Inputs, v.Name):
			v.As(program.Activation.For(""))
		case slices.Contains(gs.Ones, v.Name):
			v.As(program.LossSeed.For(""))
		}
	}
	for _, v := range gs.Forward.Results {
		switch {
		case slices.Contains(gs.Outputs, v.Name):
			v.As(program.Activation.For(""))
		case v.Means.Role == program.Stat:
		case slices.Contains(gs.Results, v.Name):
			v.As(program.Loss.For(""))
		default:
			v.As(program.Residual.For(""))
		}
	}
}

// inputGradient is the name of an input's gradient, the same in Backward and Dgrad.
func inputGradient(name string) string { return "dx." + name }

// once drops repeated values: a result may also be a residual.
func once(list []*ir.Value) []*ir.Value {
	var kept []*ir.Value
	for _, v := range list {
		if !slices.Contains(kept, v) {
			kept = append(kept, v)
		}
	}
	return kept
}

// finish turns the results of a gradient graph into a program's results, in this order: gradients
// of inputs, with their names; gradients of parameters, added to accumulators; and what Dgrad saves
// for Wgrad, under its own names.
func (at Boundary) finish(g *ir.Graph, inputs, params []string) (*ir.Graph, error) {
	results := g.Results
	b := ir.ExtendGraph(g)
	var out []*ir.Value
	for _, v := range results[:len(inputs)] {
		// A value of its own, even if the gradient is a seed unchanged or is saved for Wgrad, too.
		out = append(out, b.Scale(v, 1))
	}
	for i, param := range params {
		v := results[len(inputs)+i]
		if at.ReduceGrad != nil {
			v = at.ReduceGrad(b, param, v)
		}
		elem := at.Grads
		if !elem.Valid() {
			elem = dtype.F32
		}
		if v.Type.Elem != elem {
			v = b.Convert(v, elem)
		}
		sum := b.Input(program.Gradient.Of(param), ir.Residual, v.Type, "")
		out = append(out, b.Add(sum.As(program.Gradient.For(param)), v))
	}
	named := slices.Clone(out)
	done, err := b.Graph(once(append(out, results[len(out):]...))...)
	if err != nil {
		return nil, err
	}
	for i, v := range named {
		if i < len(inputs) {
			v.Name, v.Means = inputGradient(inputs[i]), program.Seed.For("")
			continue
		}
		param := params[i-len(inputs)]
		into := program.Gradient.Of(param)
		v.Name, v.Means = program.Next(into), program.Gradient.For(param).Replacing(into)
	}
	for _, v := range done.Results[len(named):] {
		v.As(program.Residual.For("")) // for the late half
	}
	return done, done.Verify()
}

// Stage connects compiled programs; those that a schedule does not use are nil.
func (gs *Graphs) Stage(forward, backward, input, weight *engine.Executable) *Stage {
	return &Stage{Forward: forward, Backward: backward, Dgrad: input, Wgrad: weight,
		Inputs: gs.Inputs, Outputs: gs.Outputs, OutputGrads: gs.OutputGrads, Gradients: gs.Gradients,
		Results: gs.Results}
}
