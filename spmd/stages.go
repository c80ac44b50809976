package spmd

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// A Stage is one pipeline stage of a model: consecutive layers, and what comes before the first or
// after the last one.
type Stage struct {
	// Graph takes the previous stage's activation (named [Hidden]), data and parameters, and gives the
	// next stage's activation; the last stage gives the loss. Behind it come the statistics of the
	// stage's layers. Stacks have only the stage's layers.
	Graph *ir.Graph
	// Layers gives, by the name of a stacked parameter, the stage's layers in the model: [from, to).
	Layers map[string][2]int64
}

// Number renames the stage's stacks to "s2.block.q" for stage 2, so that one rank can have several
// stages (interleaved schedules). It changes the stage's graph.
func (s *Stage) Number(k int) {
	named := map[string][2]int64{}
	for _, v := range s.Graph.Inputs {
		if rounds, ok := s.Layers[v.Name]; ok {
			v.Name = fmt.Sprintf("s%d.%s", k, v.Name)
			named[v.Name] = rounds
		}
	}
	s.Layers = named
}

// Unnumbered returns the model's name for one of the stage's parameters.
func (s *Stage) Unnumbered(name string) string {
	if _, stack := s.Layers[name]; stack {
		_, name, _ = strings.Cut(name, ".")
	}
	return name
}

// Hidden is the input that takes the previous stage's activation.
const Hidden = "hidden"

// Stages splits the graph of a loss into pipeline stages, counts[k] iterations of the layer loops
// each. What comes before the first layer goes to the first stage, what comes after the last to the
// last. If an iteration has several layers, it is not split.
func Stages(loss *ir.Graph, counts []int64) ([]*Stage, error) {
	c := &stageSplitter{loss: loss, left: slices.Clone(counts)}
	rounds, want := LoopIterations(loss), lists.Sum(counts, func(n int64) int64 { return n })
	if rounds != want || slices.Min(append([]int64{1}, counts...)) < 1 || len(counts) == 0 {
		return nil, diag.New(diag.PlanMisfit, "%d rounds of layers cannot be split as %v", rounds,
			counts).At("graph %s", loss.Name)
	}
	c.begin()
	for _, op := range loss.Ops {
		if op.Kind != "repeat" {
			c.copy(op, op.Attrs, nil, c.uses(op.In))
			continue
		}
		c.splitLoop(op.Loop())
	}
	c.finish(c.use(loss.Results[0]))
	return c.stages, c.err
}

// LoopIterations returns the number of iterations of all layer loops in a graph.
func LoopIterations(g *ir.Graph) (n int64) {
	for _, op := range g.Ops {
		if op.Kind == "repeat" {
			n += op.Loop().N
		}
	}
	return n
}

// A stageSplitter walks through a loss and builds one stage after another.
type stageSplitter struct {
	loss   *ir.Graph
	left   []int64 // iterations that stages still take, the current one first
	stages []*Stage
	b      *ir.Rewriter // builds the current stage
	stage  *Stage
	stats  []*ir.Value // of the loops of the current stage
	err    error
}

// begin opens a stage.
func (c *stageSplitter) begin() {
	c.b = ir.NewRewriter(c.loss.Name)
	c.stage = &Stage{Layers: map[string][2]int64{}}
}

// use returns a value of the loss in the current stage. Inputs are added with their first use. Only
// the hidden activation may cross from one stage to the next.
func (c *stageSplitter) use(v *ir.Value) *ir.Value {
	if c.b.Replacement[v] == nil && v.Def() == nil {
		c.b.Inputs(v)
	}
	if c.b.Replacement[v] == nil && c.err == nil {
		c.err = diag.New(diag.GraphInvalid, "%s is used by a later stage, but not sent to it", v).
			At("graph %s", c.loss.Name)
	}
	return c.b.Replacement[v]
}

func (c *stageSplitter) uses(list []*ir.Value) []*ir.Value {
	return lists.Map(list, c.use)
}

func (c *stageSplitter) copy(op *ir.Op, a ir.Attrs, body *ir.Graph, in []*ir.Value) {
	if c.err == nil {
		c.b.Map(op.Out, c.b.CopyWith(op, a, body, in...))
	}
}

// splitLoop distributes the iterations of a loop over the stages. The loop must carry exactly one
// value, the hidden activation.
func (c *stageSplitter) splitLoop(l ir.Loop) {
	if len(l.Carries) != 1 {
		c.err = diag.New(diag.GraphInvalid, "a loop over layers carries %d values, not 1",
			len(l.Carries)).At("graph %s", c.loss.Name)
	}
	hidden := l.In[0]
	for from := int64(0); from < l.N && c.err == nil; {
		if c.left[0] == 0 {
			c.nextStage(hidden)
		}
		take := min(c.left[0], l.N-from)
		in := []*ir.Value{c.use(hidden)}
		for _, v := range l.Stacks {
			in = append(in, c.stack(v, from, take))
		}
		in = append(in, c.uses(l.Invariants)...)
		a := l.Attrs.With("n", take)
		if first := l.First + from; first > 0 {
			a = a.With("first", first)
		}
		c.copy(l.Op, a, l.Body.Clone(), in)
		for _, v := range l.Out[1:] { // what a loop stacks up is a result of the loss
			if x := c.b.Replacement[v]; x != nil {
				x.Name, x.Means = v.Name, v.Means
				c.stats = append(c.stats, x)
			}
		}
		hidden = l.Out[0]
		from, c.left[0] = from+take, c.left[0]-take
	}
}

// stack returns the stage's layers of a stacked parameter.
func (c *stageSplitter) stack(v *ir.Value, from, n int64) *ir.Value {
	if v.Def() != nil {
		return c.use(v) // reports that stacks must be inputs
	}
	c.stage.Layers[v.Name] = [2]int64{from, from + n}
	return c.b.InputLike(v, v.Type.Slice().Stacked(n))
}

// nextStage ends the current stage with v, which becomes the hidden input of the next one.
func (c *stageSplitter) nextStage(v *ir.Value) {
	c.finish(c.use(v))
	c.left = c.left[1:]
	c.begin()
	c.b.Replacement[v] = c.b.Input(Hidden, ir.Data, v.Type, "")
}

// finish closes a stage with its result, and the statistics of its loops.
func (c *stageSplitter) finish(result *ir.Value) {
	if c.err != nil {
		return
	}
	c.stage.Graph, c.err = c.b.Graph(append([]*ir.Value{result}, c.stats...)...)
	c.stages, c.stats = append(c.stages, c.stage), nil
}
