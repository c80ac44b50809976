package spmd

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// A Stage is one part of a model whose layers were cut: what its devices compute of the loss.
type Stage struct {
	// Graph takes what the stage before gives, under the name [Hidden], data, and parameters, and
	// gives what the stage after takes; the last one gives the loss. Stacks hold the stage's layers.
	Graph *ir.Graph
	// Layers says, by the name of a stack, which of its rounds are the stage's: from, to.
	Layers map[string][2]int64
}

// Number gives the stacks of the stage names of their own, so that a device can have several
// stages: "s2.block.q" is what stage 2 has of "block.q".
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

// Unnumbered is the name that the model has for a parameter of a stage.
func (s *Stage) Unnumbered(name string) string {
	if _, stack := s.Layers[name]; stack {
		_, name, _ = strings.Cut(name, ".")
	}
	return name
}

// Hidden is the name of what a stage takes from the one before it.
const Hidden = "hidden"

// Stages cuts the graph of a loss into one graph for each stage. Layers are dealt in order, counts
// to each stage; what comes before the first layer goes to the first stage, what comes after the
// last to the last. A round of a loop that holds several layers is not cut, so counts are of
// rounds.
func Stages(loss *ir.Graph, counts []int64) ([]*Stage, error) {
	c := &cutter{loss: loss, left: slices.Clone(counts)}
	rounds, want := Rounds(loss), lists.Sum(counts, func(n int64) int64 { return n })
	if rounds != want || slices.Min(append([]int64{1}, counts...)) < 1 || len(counts) == 0 {
		return nil, diag.New(diag.PlanMisfit, "%d rounds of layers cannot be dealt as %v", rounds,
			counts).At("graph %s", loss.Name)
	}
	c.begin()
	for _, op := range loss.Ops {
		if op.Kind != "repeat" {
			c.copy(op, op.Attrs, nil, c.uses(op.In))
			continue
		}
		c.rounds(op.Loop())
	}
	c.finish(c.uses(loss.Results)...)
	return c.stages, c.err
}

// Rounds is how many layers the loops of a graph go through.
func Rounds(g *ir.Graph) (n int64) {
	for _, op := range g.Ops {
		if op.Kind == "repeat" {
			n += op.Loop().N
		}
	}
	return n
}

// A cutter walks through a loss and builds one stage after another.
type cutter struct {
	loss   *ir.Graph
	left   []int64 // rounds that stages still want, the one at work first
	stages []*Stage
	b      *ir.Rewriter // of the stage at work
	stage  *Stage
	err    error
}

// begin opens a stage.
func (c *cutter) begin() {
	c.b = ir.NewRewriter(c.loss.Name)
	c.stage = &Stage{Layers: map[string][2]int64{}}
}

// use gives a value of the loss in the stage at work. Inputs come with their first use.
func (c *cutter) use(v *ir.Value) *ir.Value {
	if c.b.At[v] == nil && v.Def() == nil {
		c.b.Inputs(v)
	}
	if c.b.At[v] == nil && c.err == nil {
		c.err = diag.New(diag.GraphInvalid, "%s is used by a stage that it is not handed to", v).
			At("graph %s", c.loss.Name)
	}
	return c.b.At[v]
}

func (c *cutter) uses(list []*ir.Value) []*ir.Value {
	return lists.Map(list, c.use)
}

func (c *cutter) copy(op *ir.Op, a ir.Attrs, body *ir.Graph, in []*ir.Value) {
	if c.err == nil {
		c.b.Set(op.Out, c.b.Again(op, a, body, in...))
	}
}

// rounds deals the rounds of a loop to the stages.
func (c *cutter) rounds(l ir.Loop) {
	if len(l.Carries) != 1 || len(l.Out) != 1 {
		c.err = diag.New(diag.GraphInvalid, "a loop hands over %d values, not 1", len(l.Out)).
			At("graph %s", c.loss.Name)
	}
	hidden := l.In[0]
	for from := int64(0); from < l.N && c.err == nil; {
		if c.left[0] == 0 {
			c.handOver(hidden)
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
		hidden = l.Out[0]
		from, c.left[0] = from+take, c.left[0]-take
	}
}

// stack gives the stage's layers of a stack.
func (c *cutter) stack(v *ir.Value, from, n int64) *ir.Value {
	if v.Def() != nil {
		return c.use(v) // refused there
	}
	c.stage.Layers[v.Name] = [2]int64{from, from + n}
	return c.b.Like(v, v.Type.Slice().Stacked(n))
}

// handOver ends a stage with a value, which the next one begins with.
func (c *cutter) handOver(v *ir.Value) {
	c.finish(c.use(v))
	c.left = c.left[1:]
	c.begin()
	c.b.At[v] = c.b.Input(Hidden, ir.Data, v.Type, "")
}

func (c *cutter) finish(results ...*ir.Value) {
	if c.err != nil {
		return
	}
	c.stage.Graph, c.err = c.b.Graph(results...)
	c.stages = append(c.stages, c.stage)
}
