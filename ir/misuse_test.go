package ir_test

import (
	"maps"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/program"
)

var vector = ir.Type{Elem: dtype.F32, Dims: []ir.Dim{{Name: "n", Size: 4}}}

// An attribute of another type than its reader's was read as zero, and x times 2 was x times zero.
func TestAttributesAreChecked(t *testing.T) {
	for want, a := range map[string]map[string]any{
		"it must be a float64":    {"by": 2},
		"did you mean by?":        {"bye": 2.0},
		"lacks the attribute by":  nil,
		"has no attribute factor": {"by": 2.0, "factor": 1.0},
		"":                        {"by": 2.0},
	} {
		b := ir.NewBuilder("g")
		x := b.Input("x", ir.Data, vector, "")
		_, err := b.Graph(b.Op("scale", a, x)...)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, not %q", a, err, want)
		}
	}
}

// Names and meanings of results are the interface between graphs.
func TestRewriteKeepsResults(t *testing.T) {
	b := ir.NewBuilder("g")
	x, y := b.Input("x", ir.Param, vector, ""), b.Input("y", ir.Data, vector, "")
	x.As(program.Meaning{Role: program.Param, Param: "x"})
	sum := b.Add(x, y)
	sum.Name = "new_x"
	sum.As(x.Means.Replacing("x"))
	neg := b.Neg(sum)
	neg.Name = "add_1" // the name that a copy of sum would have
	g, err := b.Graph(sum, neg, neg, y)
	if err != nil {
		t.Fatal(err)
	}
	before := g.String()
	drop := func(r *ir.Rewriter, op *ir.Op) []*ir.Value { // neg becomes its argument
		if op.Kind == "neg" {
			return r.Mapped(op.In)
		}
		return nil
	}
	for name, change := range map[string]func(*ir.Rewriter, *ir.Op) []*ir.Value{
		"copy": nil, "drop": drop,
	} {
		h, err := ir.Rewrite(g, change)
		if err != nil {
			t.Fatal(name, err)
		}
		for i, v := range h.Results {
			if old := g.Results[i]; v.Name != old.Name || v.Means != old.Means {
				t.Errorf("%s: result %d is %s %v, not %s %v", name, i, v, v.Means, old, old.Means)
			}
		}
		if !maps.Equal(h.Donations(), map[string]string{"x": "new_x"}) {
			t.Errorf("%s: donations %v", name, h.Donations())
		}
	}
	if g.String() != before {
		t.Errorf("the graph has changed:\n%s", g)
	}
	for n, out := range map[string][]*ir.Value{"two": {x, x}, "nil": {nil}} {
		if _, err := ir.Rewrite(g, func(*ir.Rewriter, *ir.Op) []*ir.Value { return out }); err == nil {
			t.Errorf("%s values for one result", n)
		}
	}
}

// A copy's loop has a body of its own: to edit it does not change the original.
func TestRewriteClonesBodies(t *testing.T) {
	b := ir.NewBuilder("g")
	w := b.Input("w", ir.Param, vector.Stacked(3), "")
	x := b.Input("x", ir.Data, vector, "")
	layer := ir.NewBuilder("layer")
	body, err := layer.Graph(layer.Mul(layer.Input("x", ir.Data, vector, ""),
		layer.Input("w", ir.Param, vector, "")))
	if err != nil {
		t.Fatal(err)
	}
	g, err := b.Graph(b.Repeat(3, body, []*ir.Value{x}, []*ir.Value{w}, nil)...)
	if err != nil {
		t.Fatal(err)
	}
	before := g.String()
	h, err := ir.Rewrite(g, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = ir.Operations().Edit(h, func(r *ir.Rewriter, op *ir.Op) []*ir.Value {
		if op.Kind == "mul" {
			return []*ir.Value{r.Add(op.In[0], op.In[1])}
		}
		return nil
	})
	if err != nil || g.String() != before || h.String() == before {
		t.Errorf("%v; the original is now\n%s", err, g)
	}
}

// What is misused is an error of Graph or Verify, not a panic and not a graph.
func TestBuilderMisuse(t *testing.T) {
	b := ir.NewBuilder("g")
	x := b.Input("x", ir.Data, vector, "")
	g, err := b.Graph(b.Neg(x))
	if err != nil {
		t.Fatal(err)
	}
	b.Neg(x)
	if len(g.Ops) != 1 || b.Err() == nil || !strings.Contains(b.Err().Error(), "misuse_test.go:") {
		t.Errorf("an operation was added to a complete graph: %v", b.Err())
	}
	other := ir.NewBuilder("other")
	if _, err := other.Graph(other.Neg(x)); err == nil || !strings.Contains(err.Error(), "another graph") {
		t.Errorf("a value of another graph: %v", err)
	}
	spaced := ir.NewBuilder("my graph") // it lowered to "module @my graph"
	if _, err := spaced.Graph(spaced.Input("x", ir.Data, vector, "")); err == nil {
		t.Error("a name with a space")
	}
	dead := ir.NewBuilder("dead")
	v := dead.Op("typo", nil)[0]
	dead.Halve(v, "n")
	_ = v.Type.Slice()
	dead = ir.NewBuilder("dead")
	dead.Halve(nil, "n")
	if dead.Err() == nil {
		t.Error("half of nil")
	}
	if _, err := ir.Grad(g, ir.GradPlan{Wrt: []string{"x"}, Recompute: []ir.Tag{"nope"}}); err == nil {
		t.Error("a tag that no operation can have is recomputed")
	}
}
