package ir

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
)

// A Rewriter builds a graph from the operations of another.
type Rewriter struct {
	*Builder
	At map[*Value]*Value // what stands in the new graph for a value of the old one
}

// NewRewriter begins a graph for one device of a mesh.
func NewRewriter(name string, mesh ...Axis) *Rewriter {
	return &Rewriter{NewBuilder(name, mesh...), map[*Value]*Value{}}
}

// Inputs takes over inputs as they are.
func (r *Rewriter) Inputs(list ...*Value) {
	for _, v := range list {
		r.At[v] = r.Like(v, v.Type)
	}
}

// Uses gives what stands for values.
func (r *Rewriter) Uses(list []*Value) []*Value {
	return lists.Map(list, func(v *Value) *Value { return r.At[v] })
}

// Set lets values stand for others, in their order, and gives them back.
func (r *Rewriter) Set(old, now []*Value) []*Value {
	for i, v := range now {
		r.At[old[i]] = v
	}
	return now
}

// Copy adds an operation of the old graph with what stands for its arguments; a body is shared, not
// cloned.
func (r *Rewriter) Copy(op *Op) []*Value {
	return r.Set(op.Out, r.Again(op, op.Attrs, op.Body, r.Uses(op.In)...))
}

// Rewrite copies a graph. Where another returns results they stand for the operation's own; where
// it returns nil, or is nil, the operation is copied. The old graph is not changed.
func Rewrite(g *Graph, another func(r *Rewriter, op *Op) []*Value) (*Graph, error) {
	r := NewRewriter(g.Name, g.Mesh...)
	r.Inputs(g.Inputs...)
	for _, op := range g.Ops {
		if another == nil || r.Set(op.Out, another(r, op)) == nil {
			r.Copy(op)
		}
	}
	return r.Graph(r.Uses(g.Results)...)
}

// inPlace goes through the operations of the builder's own graph, with what stands for their
// arguments. Where edit returns results they replace the operation's own and take their names;
// where it returns nil the operation stays as it is. An operation is dropped if edit returns an
// empty list, or if an earlier call recorded in At what stands for its first result.
func (r *Rewriter) inPlace(edit func(op *Op) []*Value) {
	old := r.g.Ops
	r.g.Ops = nil
	for _, op := range old {
		if len(op.Out) > 0 && r.At[op.Out[0]] != nil {
			continue
		}
		r.swap(op.In)
		before := len(r.g.Ops)
		out := edit(op)
		if r.err != nil {
			return
		}
		if out == nil {
			r.g.Ops = append(r.g.Ops, op)
		}
		for i, v := range out {
			if v.def == nil || slices.Contains(r.g.Ops[:before], v.def) { // it has a name
				v = r.one("transpose", attrs(map[string]any{"order": Names(v.Type.Dims)}), v)
			}
			r.Stand(op.Out[i], v)
		}
	}
	r.swap(r.g.Results)
}

// Stand replaces a value by another, which takes over its name and meaning.
func (r *Rewriter) Stand(old, now *Value) {
	now.Name, now.Means, r.At[old] = old.Name, old.Means, now
}

// Edit rewrites a graph in place, operation by operation; bodies of loops are edited before the
// loop itself. New operations come from the rewriter, which builds them from the table's rows; what
// edit returns replaces an operation, nil keeps it, an empty list drops it. An operation whose
// first result already has a stand-in (see [Rewriter.Stand]) is dropped. Arguments of the operation
// that edit sees are already replaced. The result is verified.
func (t Table) Edit(g *Graph, edit func(r *Rewriter, op *Op) []*Value) error {
	r := &Rewriter{t.Continue(g), map[*Value]*Value{}}
	r.inPlace(func(op *Op) []*Value {
		if op.Body != nil {
			if err := t.Edit(op.Body, edit); err != nil && r.err == nil {
				r.err = err
			}
		}
		return edit(r, op)
	})
	if r.err != nil {
		return r.err
	}
	_, err := r.Graph(g.Results...)
	return err
}

// Become adds an operation of another kind, or of another row, in the place of op: its tag is op's.
func (r *Rewriter) Become(op *Op, kind string, a Attrs, in ...*Value) (out []*Value) {
	r.Tagged(op.Tag, func() { out = r.op(kind, a, nil, in...) })
	return out
}

// swap puts what stands for values in their places.
func (r *Rewriter) swap(list []*Value) {
	for i, v := range list {
		if now := r.At[v]; now != nil {
			list[i] = now
		}
	}
}

// WriteOut expands operations by their rows' Lower: those that asked selects. Values keep their
// names.
func WriteOut(g *Graph, asked func(*Row) bool) (*Graph, error) {
	is := func(op *Op) bool {
		row := op.spec()
		return row != nil && row.Lower != nil && asked(row)
	}
	if !g.has(is) {
		return g, nil
	}
	r := Rewriter{Continue(g.Clone()), map[*Value]*Value{}}
	r.inPlace(func(op *Op) (out []*Value) {
		if op.Body != nil && r.err == nil {
			op.Body, r.err = WriteOut(op.Body, asked)
		}
		if is(op) {
			r.Tagged(op.Tag, func() { out = op.spec().Lower(r.Builder, op) })
		}
		return out
	})
	return r.Graph(r.g.Results...)
}

// has tells whether a graph, or a body, has an operation.
func (g *Graph) has(is func(*Op) bool) bool {
	return slices.ContainsFunc(g.Ops, func(op *Op) bool {
		return is(op) || op.Body != nil && op.Body.has(is)
	})
}

// LayerName is the name of one layer of a stack that was unrolled.
func LayerName(stack string, layer int) string { return fmt.Sprintf("%s.%d", stack, layer) }

// SegmentName is the name of the segment of a stack that begins at a layer.
func SegmentName(stack string, from int64) string {
	if from == 0 {
		return stack
	}
	return fmt.Sprintf("%s.from%d", stack, from)
}

// Unroll replaces every repeat by its rounds, one after another, and each of its stacks by an input
// per round: stack w becomes w.0, w.1 and so on. On a CPU the gradient of a slice of a stack costs
// more than the stack saves.
//
// Call it before Grad. Every stacked operand must be a graph input, and the repeat must have no
// stacked results.
func Unroll(g *Graph) (*Graph, error) {
	d := segmenter{NewRewriter(g.Name, g.Mesh...), map[*Value][]*Value{}, nil, true}
	return d.graph(g)
}

// Segment splits every repeat before the given rounds, and each stack that goes into one with it,
// so that what follows can treat layers differently. The graph must be one that [Unroll] accepts.
func Segment(g *Graph, before []int64) (*Graph, error) {
	d := segmenter{NewRewriter(g.Name, g.Mesh...), map[*Value][]*Value{}, before, false}
	return d.graph(g)
}

// A segmenter writes loops, and the stacks that go into them, in parts.
type segmenter struct {
	*Rewriter
	parts  map[*Value][]*Value // of stacks, by run
	before []int64             // the rounds before which loops are split
	unroll bool                // splits before every round, and leaves no loop
}

// runs gives the rounds of each part of a loop of n: from, to.
func (d *segmenter) runs(n int64) (list [][2]int64) {
	from := int64(0)
	for at := int64(1); at <= n; at++ {
		if d.unroll || at == n || slices.Contains(d.before, at) {
			list, from = append(list, [2]int64{from, at}), at
		}
	}
	return list
}

// graph rewrites a graph: stacks first, then loops.
func (d *segmenter) graph(g *Graph) (*Graph, error) {
	rounds := map[*Value]int64{} // of stacks
	for _, op := range g.Ops {
		if op.Kind == "repeat" {
			for _, v := range op.Loop().Stacks {
				rounds[v] = op.Loop().N
			}
		}
	}
	for _, v := range g.Inputs {
		if rounds[v] == 0 {
			d.Inputs(v)
			continue
		}
		for _, run := range d.runs(rounds[v]) {
			name, t := LayerName(v.Name, int(run[0])), v.Type.Slice()
			if !d.unroll {
				name, t = SegmentName(v.Name, run[0]), t.Stacked(run[1]-run[0])
			}
			d.parts[v] = append(d.parts[v], d.Input(name, v.Role, t, v.Source))
		}
	}
	for _, op := range g.Ops {
		if op.Kind != "repeat" {
			d.Copy(op)
			continue
		}
		if err := d.loop(op.Loop()); err != nil {
			return nil, diag.New(diag.GraphInvalid, "cannot split a loop: %v", err).At("graph %s", g.Name)
		}
	}
	return d.Graph(d.Uses(g.Results)...)
}

// loop writes a loop once for each run of its rounds.
func (d *segmenter) loop(l Loop) error {
	carries := len(l.Carries)
	if len(l.Out) > carries {
		return fmt.Errorf("a repeat stacks up %s", l.Out[carries])
	}
	in, runs := d.Uses(l.In), d.runs(l.N)
	for k := range runs {
		k = int(Loop{N: int64(len(runs)), Reverse: l.Reverse}.Layer(int64(k)))
		for i, v := range l.Stacks {
			if d.parts[v] == nil {
				return fmt.Errorf("stack %s is not an input", v)
			}
			in[carries+i] = d.parts[v][k]
		}
		if !d.unroll {
			from, to := runs[k][0], runs[k][1]
			a := l.Attrs.With("n", to-from).With("first", l.First+from)
			copy(in, d.Again(l.Op, a, l.Body.Clone(), slices.Clone(in)...))
			continue
		}
		round := Rewriter{d.Builder, map[*Value]*Value{}}
		round.Set(l.Body.Inputs, in)
		for _, op := range l.Body.Ops {
			if op.Kind == "repeat" {
				return fmt.Errorf("a repeat stands in a repeat")
			}
			round.Copy(op)
		}
		copy(in, round.Uses(l.Body.Results))
	}
	d.Set(l.Out, in[:carries])
	return nil
}
