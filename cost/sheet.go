package cost

import (
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// A Pass is the part of a step that an item belongs to.
type Pass int

// The passes. Recomputation belongs to the backward pass that needs it.
const (
	Forward Pass = iota
	Input        // dgrad
	Weight       // wgrad
	passes
)

// A sheet is the graph of one way of sharding, sorted into entries by part and pass, with its
// saved values. Sizes are of the devices it was built for.
type sheet struct {
	mesh        []ir.Axis
	rows        int64
	layers      []*part // by loop
	embed, head *part
}

// A part is some operations of a model: a loop body, or what comes before or after the loops.
type part struct {
	from, rounds int64 // of the loop over layers
	work         [passes][]entry
	residuals    []*ir.Value // of an iteration, live from forward to dgrad
	late         []*ir.Value // residuals that wgrad reads
	cheap        []*ir.Value // residuals produced and read by fused kernels
	made         []*ir.Value // what dgrad produces for wgrad
	data         []*ir.Value // batch inputs that backward reads
	params       []*ir.Value
	// The residual stream between layers and after tp's gather, an MLP activation, the logits.
	flow, whole, mlp, logits *ir.Value
	rows, expert             *ir.Value // the experts' rows, and an activation of their MLPs
	body                     *ir.Graph // forward body
}

// newSheet sorts the gradient of a loss. loss itself has the parameters' shapes and unexpanded
// linear layers.
func newSheet(loss *ir.Graph, gr *ir.Gradient) *sheet {
	s := &sheet{mesh: gr.Forward.Mesh, embed: &part{}, head: &part{}}
	s.forward(gr.Forward)
	s.loss(loss)
	s.backward(gr)
	return s
}

// loss records parameters, and the values whose sizes package footprint counts buffers in.
func (s *sheet) loss(g *ir.Graph) {
	next := 0
	for _, op := range g.Ops {
		if op.Body != nil {
			s.layers[next].flowing(op.Body)
			s.layers[next].params = op.Body.Params()
			next++
		} else if op.Kind == "linear" && next > 0 {
			s.head.logits = op.Out[0]
		}
		end := s.embed
		if next > 0 {
			end = s.head
		}
		for _, v := range op.In {
			if op.Body == nil && v.Role == ir.Param && !slices.Contains(s.embed.params, v) &&
				!slices.Contains(s.head.params, v) {
				end.params = append(end.params, v)
			}
		}
	}
}

// forward visits the loss graph. Its loops follow each other.
func (s *sheet) forward(g *ir.Graph) {
	var before, after []*ir.Op
	for _, op := range g.Ops {
		switch {
		case op.Body != nil:
			p := &part{rounds: op.Loop().N, body: op.Body}
			if n := len(s.layers); n > 0 {
				p.from = s.layers[n-1].from + s.layers[n-1].rounds
			}
			p.work[Forward] = entries(op.Body, op.Body.Ops)
			s.layers = append(s.layers, p)
		case len(s.layers) == 0:
			before = append(before, op)
		default:
			after = append(after, op)
		}
	}
	s.embed.work[Forward], s.head.work[Forward] = entries(g, before), entries(g, after)
}

// flowing records the values of a layer.
func (p *part) flowing(g *ir.Graph) {
	p.flow = g.Inputs[0]
	for _, op := range g.Ops {
		switch {
		case op.Kind == "linear" && op.Tag == ir.Attn && p.whole == nil:
			p.whole = op.In[0]
		case op.Kind == "linear" && op.Tag == ir.MLP && p.mlp == nil:
			p.mlp = op.Out[0]
		case op.Kind == "linear" && op.Tag == ir.Experts && p.rows == nil:
			p.rows, p.expert = op.In[0], op.Out[0]
		}
	}
}

// backward visits the gradient: the head first, then loops from the last to the first.
func (s *sheet) backward(gr *ir.Gradient) {
	g := gr.Backward
	var before, after []*ir.Op
	stacks := map[*ir.Value]bool{}
	var flows []*ir.Value // gradients that enter the first backward loop
	next := len(s.layers)
	for _, op := range g.Ops {
		switch {
		case op.Body != nil && next > 0:
			next--
			l := op.Loop()
			if flows == nil {
				flows = l.Carries
			}
			for _, v := range slices.Concat(l.Stacks, l.Invariants) {
				if stacks[v] = true; v.Role == ir.Data {
					s.layers[next].data = append(s.layers[next].data, v)
				}
			}
			s.layers[next].back(l)
		case next == len(s.layers):
			before = append(before, op)
		default:
			after = append(after, op)
		}
	}
	for _, v := range g.Inputs {
		switch {
		case slices.Contains(gr.Seeds, v.Name) || v.Role == ir.Param || stacks[v]:
		case v.Role == ir.Residual:
			s.head.residuals = append(s.head.residuals, v)
		case slices.ContainsFunc(after, func(op *ir.Op) bool { return slices.Contains(op.In, v) }):
			s.embed.data = append(s.embed.data, v)
		default:
			s.head.data = append(s.head.data, v)
		}
	}
	s.head.split(g, before, nil, flows)
	s.embed.work[Weight] = entries(g, after)
}

// back sorts the body of a backward loop.
func (p *part) back(l ir.Loop) {
	body, carries := l.Body, len(l.Carries)
	p.residuals = lists.Filter(body.Inputs[carries:carries+len(l.Stacks)], func(v *ir.Value) bool {
		return v.Role != ir.Param
	})
	for _, v := range p.residuals {
		fused := func(op *ir.Op) bool { return op.Body == nil && body.Work(op).Class == ir.Fused }
		made := p.body.Find(v.Name)
		if made == nil || made.Def() == nil || !fused(made.Def()) ||
			slices.Contains(views, made.Def().Kind) {
			continue
		}
		if !slices.ContainsFunc(body.Ops, func(op *ir.Op) bool {
			return slices.Contains(op.In, v) && !fused(op)
		}) {
			p.cheap = append(p.cheap, v)
		}
	}
	p.split(body, body.Ops, body.Inputs[:carries], body.Results[:carries])
}

// split divides operations by whether the outgoing input gradient depends on them (dgrad) or not
// (wgrad), and records what crosses over, incoming gradients included.
func (p *part) split(g *ir.Graph, ops []*ir.Op, in, flows []*ir.Value) {
	need := map[*ir.Value]bool{}
	for _, v := range flows {
		need[v] = true
	}
	isEarly := map[*ir.Op]bool{}
	for _, op := range slices.Backward(ops) {
		if slices.ContainsFunc(op.Out, func(v *ir.Value) bool { return need[v] }) {
			for _, v := range op.In {
				need[v] = true
			}
			isEarly[op] = true
		}
	}
	seen := map[*ir.Value]bool{}
	for _, op := range ops {
		if isEarly[op] {
			continue
		}
		for _, v := range op.In {
			switch {
			case seen[v]:
			case v.Def() != nil && isEarly[v.Def()] || slices.Contains(in, v):
				p.made = append(p.made, v)
			case v.Def() == nil && v.Role != ir.Param && slices.Contains(p.residuals, v):
				p.late = append(p.late, v)
			}
			seen[v] = true
		}
	}
	// A kernel with operations of both halves runs in the first.
	for _, e := range entries(g, ops) {
		pass := Weight
		if isEarly[e.op] || slices.ContainsFunc(e.ops, func(op *ir.Op) bool { return isEarly[op] }) {
			pass = Input
		}
		p.work[pass] = append(p.work[pass], e)
	}
}
