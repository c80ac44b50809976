package pipeline

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/program"
)

// Graphs are what the programs of a [Stage] compute, with the same names.
type Graphs struct {
	Forward, Backward, Input, Weight *ir.Graph

	Inputs, Outputs, Seeds, Gradients, Results []string

	// Ones names the arguments that take the gradients of Results. They are for the state to keep,
	// and are 1 for a loss.
	Ones []string
	// Accumulators names, for each parameter of the stage in their order, what its gradient is added
	// to. They are for the state to keep.
	Accumulators []string
}

// Boundary says how a stage is cut out of a model.
type Boundary struct {
	// Inputs and Outputs name the inputs and results of the graph that the stages before and after
	// exchange with it. Other results are the caller's.
	Inputs, Outputs []string
	// Recompute lists the tags whose values are computed again instead of kept.
	Recompute []ir.Tag
	// Grads is the type of the accumulators; Invalid is f32.
	Grads dtype.DType
	// Terms leaves the gradients of parameters as terms of a sum over the devices of the stage
	// ([ir.GradPlan]), and Settle, if there is one, does to each what must be done before it is added
	// to its accumulator.
	Terms  bool
	Settle func(b *ir.Builder, param string, g *ir.Value) *ir.Value
	// Offload keeps the residuals of loops in the memory of the host.
	Offload bool
}

// Differentiate makes the graphs of a stage from what it computes forward. Gradients of parameters
// are added to accumulators.
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
	gr, err := ir.Grad(g, ir.GradPlan{Wrt: wrt, Recompute: b.Recompute, Terms: b.Terms,
		Offload: b.Offload})
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
		out.Seeds = append(out.Seeds, gr.Seeds[at])
	}
	out.Forward = gr.Forward
	out.Forward.Results = once(out.Forward.Results)
	out.means(gr.Backward)
	early, late, err := gr.Split()
	if err != nil {
		return nil, err
	}
	if out.Backward, err = b.finish(gr.Backward, inputs, params); err != nil {
		return nil, err
	}
	if len(early.Results) > 0 {
		if out.Input, err = b.finish(early, inputs, nil); err != nil {
			return nil, err
		}
	}
	if out.Weight, err = b.finish(late, nil, params); err != nil {
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

// means says what the inputs and results of the forward and backward pass are.
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
		case slices.Contains(gs.Results, v.Name):
			v.As(program.Loss.For(""))
		default:
			v.As(program.Residual.For(""))
		}
	}
}

// inputGradient is the name of the gradient of an input, which is the same in Backward and Input.
func inputGradient(name string) string { return "dx." + name }

// once drops values that stand twice: a result may also be a residual.
func once(list []*ir.Value) []*ir.Value {
	var kept []*ir.Value
	for _, v := range list {
		if !slices.Contains(kept, v) {
			kept = append(kept, v)
		}
	}
	return kept
}

// finish makes the results of a gradient's graph those of a program: first the gradients of inputs,
// which get their names, then those of parameters, which are added to accumulators, then what an
// early half hands to the late one, which keeps its names.
func (at Boundary) finish(g *ir.Graph, inputs, params []string) (*ir.Graph, error) {
	results := g.Results
	b := ir.Continue(g)
	var out []*ir.Value
	for _, v := range results[:len(inputs)] {
		// A value of its own, even if the gradient is a seed as it came or is handed over as well.
		out = append(out, b.Scale(v, 1))
	}
	for i, param := range params {
		v := results[len(inputs)+i]
		if at.Settle != nil {
			v = at.Settle(b, param, v)
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

// Stage gives the stage of compiled programs; those that a schedule does not ask for are nil.
func (gs *Graphs) Stage(forward, backward, input, weight *engine.Executable) *Stage {
	return &Stage{Forward: forward, Backward: backward, Input: input, Weight: weight,
		Inputs: gs.Inputs, Outputs: gs.Outputs, Seeds: gs.Seeds, Gradients: gs.Gradients,
		Results: gs.Results}
}
