package ir

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/program"
)

// A Rewriter builds a graph from the operations of another, or changes a graph in place
// ([Table.Edit]).
type Rewriter struct {
	*Builder
	// Replacement has, for values of the old graph, the value that replaces each in the new one.
	Replacement map[*Value]*Value
}

// NewRewriter begins a new graph for one device of a mesh. Nothing has a replacement yet.
func NewRewriter(name string, mesh ...Axis) *Rewriter {
	return &Rewriter{NewBuilder(name, mesh...), map[*Value]*Value{}}
}

// Inputs adds copies of inputs of the old graph and maps them.
func (r *Rewriter) Inputs(list ...*Value) {
	for _, v := range list {
		r.Replacement[v] = r.InputLike(v, v.Type)
	}
}

// Mapped returns the replacements of values; nil for a value that has none.
func (r *Rewriter) Mapped(list []*Value) []*Value {
	return lists.Map(list, func(v *Value) *Value { return r.Replacement[v] })
}

// Map records now[i] as the replacement of old[i], and returns now.
func (r *Rewriter) Map(old, now []*Value) []*Value {
	for i, v := range now {
		r.Replacement[old[i]] = v
	}
	return now
}

// Copy adds a copy of an operation of the old graph, whose arguments are the replacements of its
// arguments, and maps its results. A body is cloned.
func (r *Rewriter) Copy(op *Op) []*Value {
	body := op.Body
	if body != nil {
		body = body.Clone()
	}
	return r.Map(op.Out, r.CopyWith(op, op.Attrs, body, r.Mapped(op.In)...))
}

// returned checks the number of values that a callback gives for the results of an operation.
func (r *Rewriter) returned(op *Op, out []*Value) []*Value {
	if len(out) > 0 && (len(out) != len(op.Out) || slices.Contains(out, nil)) && r.err == nil {
		r.err = diag.New(diag.GraphInvalid, "%d values, or a nil one, replace the %d results of %s",
			len(out), len(op.Out), op.Kind).At("graph %s", r.g.Name)
	}
	if r.err != nil && len(out) > 0 {
		return r.dead(len(op.Out))
	}
	return out
}

// end ends a copy of a graph. Results keep their names and meanings: they are the interface to
// other graphs, and donations are paired by them.
func (r *Rewriter) end(g *Graph) (*Graph, error) {
	results, named := r.Mapped(g.Results), map[*Value]*Value{}
	for i, old := range g.Results {
		now := results[i]
		if now == nil || old.def == nil || r.err != nil {
			continue
		}
		if named[now] != nil && named[now] != old || now.def == nil { // it has another name
			now = r.one("transpose", attrs(map[string]any{"order": Names(now.Type.Dims)}), now)
			r.Replacement[old] = now
			results = r.Mapped(g.Results)
		}
		named[now] = old
		if other := r.g.Find(old.Name); other != nil && other != now && other.def != nil {
			other.Name = r.names.value(other.def.Kind)
		}
		now.Name, r.names.used[old.Name] = old.Name, true
		if now.Means == (program.Meaning{}) {
			now.Means = old.Means
		}
	}
	return r.Graph(results...)
}

// Rewrite returns a copy of a graph with changes; the old graph is not changed, nor are bodies of
// loops visited. Replace is called for every operation of the old graph, in order: op.In are values
// of the old graph, and r.Mapped(op.In) their replacements in the new one. What it returns replaces
// the results of op, one value for each; nil copies op, as a nil function does; an empty list drops
// op, whose results then must have no readers. Inputs and results keep their names and meanings.
// Compare [Table.Edit], which changes a graph in place.
func Rewrite(g *Graph, replace func(r *Rewriter, op *Op) []*Value) (*Graph, error) {
	r := NewRewriter(g.Name, g.Mesh...)
	r.Inputs(g.Inputs...)
	for _, op := range g.Ops {
		if replace == nil || r.Map(op.Out, r.returned(op, replace(r, op))) == nil {
			r.Copy(op)
		}
	}
	return r.end(g)
}

// inPlace goes through the operations of the builder's own graph, with arguments replaced. Where
// edit returns results they replace the operation's own and take their names; where it returns nil
// the operation stays. An operation is dropped if edit returns an empty list, or if an earlier call
// recorded a replacement of its first result.
func (r *Rewriter) inPlace(edit func(op *Op) []*Value) {
	old := r.g.Ops
	r.g.Ops = nil
	for _, op := range old {
		if len(op.Out) > 0 && r.Replacement[op.Out[0]] != nil {
			continue
		}
		r.swap(op.In)
		before := len(r.g.Ops)
		out := r.returned(op, edit(op))
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
			r.Substitute(op.Out[i], v)
		}
	}
	r.swap(r.g.Results)
}

// Substitute replaces a value by another, which takes over its name and meaning. The operation that
// makes the old value is dropped if it comes later and the value is its first result.
func (r *Rewriter) Substitute(old, now *Value) {
	now.Name, now.Means, r.Replacement[old] = old.Name, old.Means, now
}

// Edit changes a graph in place and verifies it. Edit is called for every operation, in order, and
// for the operations of a loop's body before the loop itself. Unlike in [Rewrite] there is one
// graph: op.In are already replaced by the results of earlier calls, and the callback uses them as
// they are. New operations come from the rewriter, which builds them from the table's rows, before
// op. What edit returns, one value for each result of op, replaces them and takes over their names;
// nil keeps op; an empty list drops op, whose results then must have no readers or a replacement by
// [Rewriter.Substitute]. After an error g is unusable: operations are missing.
func (t Table) Edit(g *Graph, edit func(r *Rewriter, op *Op) []*Value) error {
	r := &Rewriter{t.ExtendGraph(g), map[*Value]*Value{}}
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

// ReplaceWith adds an operation of another kind, or of the table's row of the same kind, with op's
// tag. A callback of [Table.Edit] returns its results to put it in the place of op.
func (r *Rewriter) ReplaceWith(op *Op, kind string, a Attrs, in ...*Value) (out []*Value) {
	r.Tagged(op.Tag, func() { out = r.op(kind, a, nil, in...) })
	return out
}

// swap replaces values that have a replacement.
func (r *Rewriter) swap(list []*Value) {
	for i, v := range list {
		if now := r.Replacement[v]; now != nil {
			list[i] = now
		}
	}
}

// WriteOut expands operations by their rows' Lower, if selected is true of the row, also in bodies
// of loops. Values keep their names. It does not change g, and returns g itself if there is nothing
// to expand.
func WriteOut(g *Graph, selected func(*Row) bool) (*Graph, error) {
	is := func(op *Op) bool {
		row := op.spec()
		return row != nil && row.Lower != nil && selected(row)
	}
	if !g.has(is) {
		return g, nil
	}
	r := Rewriter{ExtendGraph(g.Clone()), map[*Value]*Value{}}
	r.inPlace(func(op *Op) (out []*Value) {
		if op.Body != nil && r.err == nil {
			op.Body, r.err = WriteOut(op.Body, selected)
		}
		if is(op) {
			out = r.lowered(op)
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
// Call it before Grad. Every stacked operand must be a graph input. What a repeat stacks up must be
// statistics, results of the graph, and becomes a result for each round, named likewise.
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
	whole := *g
	whole.Results = nil
	for _, v := range g.Results {
		if v.def == nil || d.parts[v] == nil {
			whole.Results = append(whole.Results, v)
			continue
		}
		for k, x := range d.parts[v] { // what a loop stacks up is a result for each run
			part := &Value{Name: d.partName(v, k), Means: v.Means, def: v.def}
			d.Replacement[part] = x
			whole.Results = append(whole.Results, part)
		}
	}
	return d.end(&whole)
}

// partName is what run k of a loop calls its part of a stack.
func (d *segmenter) partName(stack *Value, k int) string {
	if d.unroll {
		return LayerName(stack.Name, k)
	}
	return SegmentName(stack.Name, d.runs(stack.def.Loop().N)[k][0])
}

// loop writes a loop once for each run of its rounds.
func (d *segmenter) loop(l Loop) error {
	carries := len(l.Carries)
	for _, v := range l.Out[carries:] {
		if v.Means.Role != program.Stat {
			return fmt.Errorf("a repeat stacks up %s, which is no statistic", v)
		}
		d.parts[v] = make([]*Value, len(d.runs(l.N)))
	}
	in, runs := d.Mapped(l.In), d.runs(l.N)
	for k := range runs {
		k = int(Loop{N: int64(len(runs)), Reverse: l.Reverse}.StackIndex(int64(k)))
		for i, v := range l.Stacks {
			if d.parts[v] == nil {
				return fmt.Errorf("stack %s is not an input", v)
			}
			in[carries+i] = d.parts[v][k]
		}
		if !d.unroll {
			from, to := runs[k][0], runs[k][1]
			a := l.Attrs.With("n", to-from).With("first", l.First+from)
			out := d.CopyWith(l.Op, a, l.Body.Clone(), slices.Clone(in)...)
			copy(in[:carries], out)
			for i, v := range l.Out[carries:] {
				d.parts[v][k] = out[carries+i]
			}
			continue
		}
		round := Rewriter{d.Builder, map[*Value]*Value{}}
		round.Map(l.Body.Inputs, in)
		for _, op := range l.Body.Ops {
			if op.Kind == "repeat" {
				return fmt.Errorf("a repeat stands in a repeat")
			}
			round.Copy(op)
		}
		out := round.Mapped(l.Body.Results)
		copy(in[:carries], out)
		for i, v := range l.Out[carries:] {
			d.parts[v][k] = out[carries+i]
		}
	}
	d.Map(l.Out[:carries], in[:carries])
	return nil
}
