package spmd_test

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/spmd"
)

// twoAxes are plans in which fsdp and ep, which outside the experts is data parallel, shard one
// dimension of a parameter, in both orders of the mesh.
func twoAxes() (rows []mesh) {
	swapped := []string{plan.PipelineAxis, plan.DataAxis, plan.ExpertAxis, plan.FSDPAxis,
		plan.ContextAxis, plan.TensorAxis}
	for _, how := range []plan.FSDP{{Size: 2, Zero: 3, Gather: "layer"},
		{Size: 2, Zero: 3, Gather: "microbatch"}, {Size: 2, Zero: 3, Gather: "step"},
		{Size: 2, Zero: 1, Gather: "step"}, {Size: 2, Zero: 2, Gather: "step"}} {
		for _, order := range [][]string{nil, swapped} {
			for tp := int64(1); tp <= 2; tp++ {
				name := fmt.Sprint("two axes ", how, order, tp)
				rows = append(rows, mesh{Name: name, Apply: func(p *plan.Plan) {
					p.FSDP, p.EP, p.TP, p.Order = how, 2, plan.TP{Size: tp, Sequence: true}, order
				}})
			}
		}
	}
	return rows
}

// Loss and gradients of plans that shard along two axes equal one device's.
func TestTwoAxesShardOneDimension(t *testing.T) {
	c := shapes()["llama"]
	g, err := c.Graph(model.Shape{Batch: batch, Seq: seq, Elem: dtype.F32})
	if err != nil {
		t.Fatal(err)
	}
	whole := fills(g, c, 3)
	want, err := lossAndGradients(g, whole, ir.GradPlan{})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range twoAxes() {
		p := newPlan(m)
		sh, err := spmd.Shard(g, p)
		if err != nil {
			t.Fatalf("%s: %v", m.Name, err)
		}
		both := 0
		for _, l := range sh.Params {
			if len(l.Shards) == 2 && l.Shards[0].Dim == l.Shards[1].Dim {
				both++
			}
		}
		if both == 0 {
			t.Errorf("%s: no parameter is sharded over two axes", m.Name)
		}
		got, err := lossAndGradients(sh.Graph, whole, ir.GradPlan{Recompute: []ir.Tag{ir.Gather}})
		if err != nil {
			t.Errorf("%s: %v", m.Name, err)
			continue
		}
		if d, where := differ(got, want); !(d <= exact) {
			t.Errorf("%s: %s is off by %g", m.Name, where, d)
		}
	}
}

// Steps of an optimizer end where one device ends.
func TestTrainingWithTwoAxesAgrees(t *testing.T) {
	o := optim.AdamW{Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, ClipNorm: 0.5}
	trainingAgrees(t, shapes()["llama"], o, "adamw", 1, every(twoAxes(), 3))
}

// Whatever axes shard a parameter, its shards make up the whole, each element once for every
// copy, and the innermost axis of the mesh, gathered last, is the first shard of its layout.
func TestShardsMakeUpTheWhole(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := func(name string) int64 { return rapid.Int64Range(1, 4).Draw(t, name) }
		p := plan.Default()
		p.DP, p.FSDP.Size, p.EP, p.TP.Size = size("dp"), size("fsdp"), size("ep"), size("tp")
		p.Order = rapid.Permutation(plan.Default().Order).Draw(t, "order")
		whole := ir.Type{Elem: dtype.F32, Dims: []ir.Dim{{Name: ir.Layer, Size: 2},
			{Name: ir.EmbedDim, Size: 12 * size("embed")}, {Name: ir.MLPDim, Size: 12 * size("mlp")}}}
		l, mesh := spmd.LayoutOf("w", whole, p), p.Mesh()
		var axes []string
		for _, a := range slices.Backward(mesh) {
			if slices.ContainsFunc(l.Shards, func(s ir.AxisSharding) bool { return s.Axis == a.Name }) {
				axes = append(axes, a.Name)
			}
		}
		for i, s := range l.Shards {
			if s.Axis != axes[i] || l.Stored.Place.On(s.Axis) != s.Dim || l.Compute.Place.On(s.Axis) == "" &&
				p.FSDP.Gather == "layer" {
				t.Fatalf("shards %v of %v on mesh %v", l.Shards, l.Stored, mesh)
			}
		}
		n := int(whole.Shape().Elements())
		data, seen := make([]int, n), make([]int, n)
		for i := range data {
			data[i] = i
		}
		for d := range devices(mesh) {
			shard := spmd.TakeShard(mesh, whole.Dims, data, l.Stored, d)
			back := make([]int, n)
			spmd.PutShard(mesh, whole.Dims, back, l.Stored, d, shard)
			for _, i := range shard {
				seen[i]++
				if back[i] != i {
					t.Fatalf("element %d comes back as %d", i, back[i])
				}
			}
		}
		copies := devices(mesh) * len(spmd.TakeShard(mesh, whole.Dims, data, l.Stored, 0)) / n
		for i, times := range seen {
			if times != copies {
				t.Fatalf("element %d lies on %d devices, of %d copies", i, times, copies)
			}
		}
	})
}
