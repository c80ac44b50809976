package call

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/deepwell/deepwell/capture/aten"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/program"
)

// A wish is what a program is compiled for.
type wish struct {
	Sizes [][]int64 `json:"sizes"` // of the caller's tensors, in their order
	Grad  bool      `json:"grad"`  // there will be backward passes
	// Inputs are the caller's tensors whose gradients are wanted, Frozen the parameters whose are not.
	Inputs []int    `json:"inputs"`
	Frozen []string `json:"frozen"`
	// Nodes are nodes of the program whose values are outputs, too.
	Nodes []string `json:"nodes"`
}

// A variant is a program that is compiled for one wish.
type variant struct {
	owner    *opened
	params   []model.Param
	graph    *ir.Graph    // that grad is taken of
	grad     *ir.Gradient // nil without gradients
	forward  *pass
	backward map[string]*backward // by the seeds that are given
	selector *kernels.Selector
}

// A backward pass, and the gradients that no result with a seed depends on, by their place.
type backward struct {
	*pass
	none []int
}

// A pass is one compiled graph.
type pass struct {
	*engine.Executable
	places []int  // of the wanted results, among the results of the module
	room   []bool // the wanted result is written into the memory of an argument
	// rooms and inputs say which wanted result's memory, or which of the caller's tensors, an argument
	// is, by its place.
	rooms, inputs map[int]int
}

// roomName is the argument in whose memory a wanted result is written.
func roomName(i int) string { return fmt.Sprint("room", i) }

// described is what the caller learns about a variant.
type described struct {
	Variant int64            `json:"variant"`
	Results []result         `json:"results"`
	Outputs []output         `json:"outputs"`
	Params  []stored         `json:"params"`
	Grads   []gradient       `json:"grads"`
	Used    []bool           `json:"used"` // by the caller's tensors
	Draws   []drawn          `json:"draws"`
	Reads   []string         `json:"reads"` // tensors of parameters that backward passes read
	Fixed   []string         `json:"fixed"` // buffers of which the program has numbers as constants
	Parts   []aten.Part      `json:"parts"`
	Kernels []kernels.Choice `json:"kernels"`
	Loop    string           `json:"loop"`
	Seconds float64          `json:"seconds"`
}

// A result is one array that a forward pass writes; Seed says that it has a gradient.
type result struct {
	Dims []int64 `json:"dims"`
	Type string  `json:"type"`
	Seed bool    `json:"seed"`
}

// An output is a result in the caller's shape and type; Result is -1 for what is no tensor.
type output struct {
	Result int     `json:"result"`
	Dims   []int64 `json:"dims"`
	Type   string  `json:"type"`
	Number *int64  `json:"number,omitempty"`
}

// A drawn mask is 1 with the probability Keep and 0 elsewhere. Masks follow the caller's tensors
// among the arguments of a forward pass.
type drawn struct {
	Dims []int64 `json:"dims"`
	Type string  `json:"type"`
	Keep float64 `json:"keep"`
}

// A stored parameter: the tensors that it is made of, one after the other in memory.
type stored struct {
	Tensors []string `json:"tensors"`
	Bytes   int64    `json:"bytes"`
	Type    string   `json:"type"`
}

// A gradient is one array that a backward pass writes: of a tensor of the caller, or of parameters.
type gradient struct {
	Input   int      `json:"input"` // -1 for parameters
	Tensors []string `json:"tensors"`
	Bytes   int64    `json:"bytes"`
	Type    string   `json:"type"`
}

// compile builds the graphs of a wish and compiles the forward pass. A backward pass is compiled
// when it is asked for: only then is it known which outputs have a gradient.
func (s *server) compile(ctx context.Context, o *opened, w wish) (*variant, *described, error) {
	began := time.Now()
	r, err := o.function.Read(w.Sizes, w.Nodes)
	if err != nil {
		return nil, nil, err
	}
	v := &variant{owner: o, params: r.Params, backward: map[string]*backward{},
		selector: kernels.For(s.engine.Arch())}
	d := &described{}
	g, err := v.unrolled(r.Graph, d)
	if err != nil {
		return nil, nil, err
	}
	wanted := len(g.Results)
	var saved []*ir.Value
	if names := v.differentiated(g, w); w.Grad && len(names) > 0 {
		if v.grad, err = ir.Grad(g, ir.GradPlan{Wrt: names}); err != nil {
			return nil, nil, err
		}
		v.graph, g = g, v.grad.Forward
		g.DetachLosses()
		v.grad.Backward.DetachLosses()
		saved = g.Results[wanted:]
	}
	if v.forward, err = s.pass(ctx, "forward", g, wanted, saved, v.selector); err != nil {
		return nil, nil, err
	}
	for i, a := range v.forward.Module().Args {
		for k := range w.Sizes {
			if a.Name == aten.InputName(k) {
				v.forward.inputs[i] = k
			}
		}
		for k, mask := range r.Draws {
			if a.Name == mask.Name {
				v.forward.inputs[i] = len(w.Sizes) + k
			}
		}
	}
	v.describe(d, r, w)
	d.Seconds = time.Since(began).Seconds()
	return v, d, nil
}

// unrolled gives the graph with layers as the target runs them best.
func (v *variant) unrolled(g *ir.Graph, d *described) (*ir.Graph, error) {
	rounds := int64(0)
	for _, op := range g.Ops {
		if op.Kind == "repeat" {
			rounds = max(rounds, op.Loop().N)
		}
	}
	if rounds == 0 {
		return g, nil
	}
	unroll, why := v.selector.Unroll(rounds)
	if d.Loop = fmt.Sprintf("a loop of %d rounds, because %s", rounds, why); !unroll {
		return g, nil
	}
	d.Loop = fmt.Sprintf("%d equal layers, unrolled: %s", rounds, why)
	var single []model.Param
	for _, p := range v.params {
		single = append(single, p.Layers()...)
	}
	v.params = single
	return ir.Unroll(g)
}

// differentiated lists the inputs of the graph whose gradients are wanted: tensors of the caller,
// then parameters.
func (v *variant) differentiated(g *ir.Graph, w wish) (names []string) {
	for _, in := range g.Inputs {
		for _, i := range w.Inputs {
			if in.Name == aten.InputName(i) && in.Type.Elem.Kind() == dtype.Float {
				names = append(names, in.Name)
			}
		}
	}
	for _, p := range v.params {
		trained := func(name string) bool { return !slices.Contains(w.Frozen, name) }
		if !p.Buffer && slices.ContainsFunc(p.Tensors(), trained) {
			names = append(names, p.Name)
		}
	}
	return names
}

// describe says what the caller needs to know.
func (v *variant) describe(d *described, r *aten.Reading, w wish) {
	d.Parts, d.Kernels, d.Fixed = r.Parts, v.selector.Choices(), r.Fixed
	args := map[string]program.Array{}
	for _, a := range v.forward.Module().Args {
		args[a.Name] = a
	}
	for i, at := range v.forward.places {
		a := v.forward.Module().Results[at].Global
		d.Results = append(d.Results, result{a.Dims, a.Type.String(),
			v.grad != nil && v.grad.Seeds[i] != ""})
	}
	for _, o := range r.Outputs {
		d.Outputs = append(d.Outputs, output{o.Result, o.Dims, o.Type.String(), o.Number})
	}
	for i := range w.Sizes {
		_, used := args[aten.InputName(i)]
		d.Used = append(d.Used, used)
	}
	for _, mask := range r.Draws {
		a := args[mask.Name].Global
		d.Draws = append(d.Draws, drawn{a.Dims, a.Type.String(), mask.Keep})
	}
	shape := map[string]gradient{}
	for _, p := range v.params {
		a := args[p.Name].Global
		size := a.Type.Bytes(p.Size())
		d.Params = append(d.Params, stored{p.Tensors(), size, a.Type.String()})
		shape[p.Name] = gradient{-1, p.Tensors(), size, a.Type.String()}
	}
	if v.grad == nil {
		return
	}
	for _, p := range v.params {
		if v.grad.Backward.Find(p.Name) != nil {
			d.Reads = append(d.Reads, p.Tensors()...)
		}
	}
	for _, in := range v.grad.Wrt {
		g, ok := shape[in.Name]
		for i := range w.Sizes {
			if !ok && in.Name == aten.InputName(i) {
				g = gradient{i, nil, in.Type.Elem.Bytes(elements(in.Type)), in.Type.Elem.String()}
			}
		}
		d.Grads = append(d.Grads, g)
	}
}

func elements(t ir.Type) int64 {
	n := int64(1)
	for _, d := range t.Dims {
		n *= d.Size
	}
	return n
}

// pass compiles a graph whose first results are wanted: each is written into the memory of an
// argument, unless the result is saved as well, or is an argument itself.
func (s *server) pass(ctx context.Context, name string, g *ir.Graph, wanted int,
	saved []*ir.Value, k *kernels.Selector) (*pass, error) {
	p := &pass{}
	var results []*ir.Value
	for _, v := range g.Results {
		at := slices.Index(results, v)
		if at < 0 {
			at = len(results)
			results = append(results, v)
		}
		if len(p.places) < wanted {
			p.places = append(p.places, at)
		}
	}
	b := ir.ExtendGraph(g)
	for i, at := range p.places {
		v := results[at]
		own := !slices.Contains(saved, v) && !slices.Contains(g.Inputs, v) &&
			!slices.Contains(p.places[:i], at)
		if p.room = append(p.room, own); own {
			b.Input(roomName(i), ir.Residual, v.Type, "")
		}
	}
	g, err := b.Graph(results...)
	if err != nil {
		return nil, err
	}
	for i, at := range p.places {
		if p.room[i] {
			results[at].Means = program.Activation.For("").Replacing(roomName(i))
		}
	}
	m, err := lower.Module(name, g, lower.Options{Kernels: k})
	if err != nil {
		return nil, err
	}
	p.rooms, p.inputs = map[int]int{}, map[int]int{}
	for i, a := range m.Args {
		for k := range p.places {
			if a.Name == roomName(k) && a.Into != "" {
				p.rooms[i] = k
			}
		}
	}
	p.Executable, err = s.engine.Compile(ctx, m)
	return p, err
}

// back gives the backward pass for the seeds that are given.
func (s *server) back(ctx context.Context, v *variant, given []bool) (*backward, error) {
	key := fmt.Sprint(given)
	if p := v.backward[key]; p != nil {
		return p, nil
	}
	if v.grad == nil {
		return nil, diag.New(diag.BadInput, "the call was made without gradients")
	}
	grad, err := v.gradient(given)
	if err != nil {
		return nil, err
	}
	made := &backward{}
	for i, reached := range grad.Reached {
		if !reached {
			made.none = append(made.none, i)
		}
	}
	g, err := zeroed(grad, given)
	if err != nil {
		return nil, err
	}
	if made.pass, err = s.pass(ctx, "backward", g, len(g.Results), nil, v.selector); err == nil {
		v.backward[key] = made
	}
	return made, err
}

// gradient takes the gradient of the results that have one, so that nothing is computed for the
// others: 0 times infinity is no 0. It reads what the forward pass has saved for the gradient of
// all.
func (v *variant) gradient(given []bool) (*ir.Gradient, error) {
	var without []int
	for i, name := range v.grad.Seeds {
		if name != "" && !given[i] {
			without = append(without, i)
		}
	}
	if len(without) == 0 {
		return v.grad, nil
	}
	wrt := make([]string, len(v.grad.Wrt))
	for i, in := range v.grad.Wrt {
		wrt[i] = in.Name
	}
	some, err := ir.Grad(v.graph, ir.GradPlan{Wrt: wrt, Without: without})
	if err != nil {
		return nil, err
	}
	some.Backward.DetachLosses()
	loops := 0
	for _, op := range v.graph.Ops {
		if op.Kind == "repeat" {
			loops++
		}
	}
	for _, in := range some.Backward.Inputs {
		if was := v.grad.Backward.Find(in.Name); was == nil || !was.Type.Equal(in.Type) {
			loops = 2
		}
	}
	if loops > 1 { // what is saved of loops has names by their order: the seeds are 0 instead
		all := *v.grad
		all.Reached = some.Reached
		return &all, nil
	}
	return some, nil
}

// zeroed gives the backward graph with 0 for the seeds that it has and that are not given.
func zeroed(grad *ir.Gradient, given []bool) (*ir.Graph, error) {
	b, to := ir.NewBuilder(grad.Backward.Name), map[*ir.Value]*ir.Value{}
	for _, in := range grad.Backward.Inputs {
		if i := slices.Index(grad.Seeds, in.Name); i >= 0 && !given[i] {
			to[in] = b.Fill(in.Type, 0)
		} else {
			to[in] = b.InputLike(in, in.Type)
		}
	}
	mapped := func(list []*ir.Value) []*ir.Value {
		out := make([]*ir.Value, len(list))
		for i, v := range list {
			out[i] = to[v]
		}
		return out
	}
	for _, op := range grad.Backward.Ops {
		for i, made := range b.CopyWith(op, op.Attrs, op.Body, mapped(op.In)...) {
			to[op.Out[i]] = made
		}
	}
	return b.Graph(mapped(grad.Backward.Results)...)
}

func (v *variant) free() {
	v.forward.Free()
	for _, p := range v.backward {
		p.Free()
	}
}
