package spmd_test

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/spmd"
)

// planted is a plan with all axes but pp.
func planted(t *testing.T) (*model.Config, *ir.Graph, *plan.Plan) {
	t.Helper()
	c := shapes()["llama"]
	g, err := c.Graph(model.Shape{Batch: batch, Seq: seq, Elem: dtype.F32, Documents: 8})
	if err != nil {
		t.Fatal(err)
	}
	return c, g, newPlan(mesh{Apply: func(p *plan.Plan) {
		p.TP = plan.TP{Size: 2, Sequence: true}
		p.FSDP = plan.FSDP{Size: 2, Zero: 3, Gather: "layer"}
		p.CP = plan.CP{Size: 2, Kind: "gather"}
	}})
}

// sites lists the collectives of a graph and of its bodies.
func sites(g *ir.Graph) (list []*ir.Op) {
	for _, op := range g.Ops {
		if op.Body != nil {
			list = append(list, sites(op.Body)...)
		}
		if len(op.Axes()) > 0 {
			list = append(list, op)
		}
	}
	return list
}

// without takes an operation out of a graph: who read its result reads its argument.
func without(g *ir.Graph, op *ir.Op) {
	swap := func(list []*ir.Value) {
		for i, v := range list {
			if v == op.Out[0] {
				list[i] = op.In[0]
			}
		}
	}
	for _, other := range g.Ops {
		if other.Body != nil {
			without(other.Body, op)
		}
		swap(other.In)
	}
	swap(g.Results)
	g.Ops = slices.DeleteFunc(g.Ops, func(other *ir.Op) bool { return other == op })
}

// A collective that is left out of a device's graph, or goes along another axis, is an error of the
// verifier or leaves a loss that says it is not whole.
func TestPlantedFaultsInGraphs(t *testing.T) {
	_, g, p := planted(t)
	sh, err := spmd.Shard(g, p)
	if err != nil {
		t.Fatal(err)
	}
	found := func(c *ir.Graph) bool { return c.Verify() != nil || len(c.Results[0].Type.Place) > 0 }
	if found(sh.Graph.Clone()) {
		t.Fatal("the sound graph is refused")
	}
	n := len(sites(sh.Graph))
	if n < 15 {
		t.Fatalf("the graph has %d collectives", n)
	}
	for i := range n {
		c := sh.Graph.Clone()
		op := sites(c)[i]
		if len(op.Out) == 1 && op.Kind != "cross_entropy" {
			if without(c, op); !found(c) {
				t.Errorf("%s along %v can be left out", op.Kind, op.Axes())
			}
		}
		for _, a := range p.Mesh() {
			c := sh.Graph.Clone()
			op := sites(c)[i]
			if slices.Contains(op.Axes(), a.Name) || len(op.Axes()) > 1 {
				continue
			}
			from := op.Axes()
			op.Attrs = op.Attrs.With("axis", a.Name)
			if !found(c) {
				t.Errorf("%s along %v can go along %s", op.Kind, from, a.Name)
			}
		}
	}
}

// What the verifier cannot see, groups of other devices in the program's text, or none at all, the
// comparison with one device finds.
func TestPlantedFaultsInPrograms(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles programs")
	}
	e := openEngine(t)
	c, g, _ := planted(t)
	p := newPlan(mesh{Apply: func(p *plan.Plan) { p.TP, p.DP = plan.TP{Size: 2}, 2 }})
	whole := rounded(fills(g, c, 3))
	want, err := lossAndGradients(g, whole, ir.GradPlan{})
	if err != nil {
		t.Fatal(err)
	}
	sh, err := spmd.Shard(g, p)
	if err != nil {
		t.Fatal(err)
	}
	d := newDevice(t, e, nil)
	across := regexp.MustCompile(`\[\[0, 1\], \[2, 3\]\]> : tensor<2x2xi64>`)
	for _, row := range []struct {
		name, groups string
		sound        bool
	}{
		{"sound", "[[0, 1], [2, 3]]> : tensor<2x2xi64>", true},
		{"wrong groups", "[[0, 2], [1, 3]]> : tensor<2x2xi64>", false},
		{"no sum", "[[0], [1], [2], [3]]> : tensor<4x1xi64>", false},
	} {
		d.plant = func(text string) string { return across.ReplaceAllString(text, row.groups) }
		got, err := gradientsOn(d, sh.Graph, whole)
		if err != nil && row.sound {
			t.Fatal(err)
		}
		off, where := 1.0, "a copy" // devices that disagree are found as well
		if err == nil {
			off, where = frobenius(got, want)
		}
		if sound := off <= gradBound; sound != row.sound {
			t.Errorf("%s: %s is off by %g", row.name, where, off)
		}
	}
}

func gradientsOn(d *device, g *ir.Graph, whole map[string]*eval.Array) (map[string][]float64, error) {
	return lossAndGradientsBy(d.run, g, whole, ir.GradPlan{Recompute: []ir.Tag{ir.Gather}, Terms: true})
}

// The census of a plan is what a person counts: three layers, each with a gather and a scatter of
// the sequence around attention and around the MLP.
func ExampleCensus() {
	c := shapes()["llama"]
	g, _ := c.Graph(model.Shape{Batch: batch, Seq: seq, Elem: dtype.F32})
	p := plan.Default()
	p.TP = plan.TP{Size: 2, Sequence: true}
	sh, err := spmd.Shard(g, p)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, row := range spmd.CensusOf(sh.Graph) {
		fmt.Println(row.Kind, strings.Join(row.Axes, "+"), row.Group, row.Count, row.Bytes)
	}
	// Output:
	// all-gather tp 1 group of 2 7 7168
	// all-reduce tp 1 group of 2 2 384
	// reduce-scatter tp 1 group of 2 7 7168
}

// The text of a program does not grow with the mesh, but for its groups, which stand in front.
func TestTextIsThatOfOneDevice(t *testing.T) {
	c := shapes()["llama"]
	size := func(dp int64) int {
		g, err := c.Graph(model.Shape{Batch: dp, Seq: seq, Elem: dtype.F32})
		if err != nil {
			t.Fatal(err)
		}
		sh, err := spmd.Shard(g, newPlan(mesh{Apply: func(p *plan.Plan) { p.Batch, p.DP = dp, dp }}))
		if err != nil {
			t.Fatal(err)
		}
		text, err := lower.StableHLO(sh.Graph, lower.Options{})
		if err != nil {
			t.Fatal(err)
		}
		_, body, _ := strings.Cut(text, "module")
		return len(body)
	}
	if a, b := size(8), size(4096); b > a+10 {
		t.Errorf("8 devices have a text of %d bytes, 4096 of %d", a, b)
	}
}
