package ir_test

import (
	"slices"
	"testing"

	. "github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
)

// evaluate runs a graph on one device.
func evaluate(t *testing.T, g *ir.Graph, in map[string][]float64) [][]float64 {
	t.Helper()
	inputs := map[string][]*eval.Array{}
	for _, v := range g.Inputs {
		a := eval.New(v.Type)
		copy(a.Data, in[v.Name])
		inputs[v.Name] = []*eval.Array{a}
	}
	out, err := eval.Run(g, inputs)
	if err != nil {
		t.Fatal(err)
	}
	var list [][]float64
	for _, r := range out {
		list = append(list, r[0].Data)
	}
	return list
}

// Positions count the earlier choices of an expert, in each sequence or in all; dropped choices have
// none. Rows go to their slots, and a choice behind the capacity to none.
func TestExpertsHaveSlots(t *testing.T) {
	b := ir.NewBuilder("route")
	idx := b.Input("idx", ir.Data, S32(D(ir.Batch, 2), D(ir.Seq, 2), D(ir.Choice, 2)), "")
	x := b.Input("x", ir.Data, F32(D(ir.Batch, 2), D(ir.Seq, 2), D(ir.EmbedDim, 1)), "")
	all := b.ExpertPositions(idx, 3, false, ir.Batch, ir.Seq, ir.Choice)
	each := b.ExpertPositions(idx, 3, false, ir.Seq, ir.Choice)
	rows := b.Dispatch(x, idx, all, 3, 2, false)
	g, err := b.Graph(all, each, b.ExpertCounts(idx, 3, ir.Batch, ir.Seq, ir.Choice), rows,
		b.Combine(rows, idx, all))
	if err != nil {
		t.Fatal(err)
	}
	got := evaluate(t, g, map[string][]float64{"idx": {2, 0, 2, -1, 0, 2, 1, 0}, "x": {1, 2, 3, 4}})
	for i, want := range [][]float64{
		{0, 0, 1, -1, 1, 2, 0, 2},
		{0, 0, 1, -1, 0, 0, 0, 1},
		{3, 1, 3},
		{1, 3, 4, 0, 1, 2}, // expert 0: tokens 1, 3 (4 is behind the capacity); 1: 4; 2: 1, 2
		{2, 2, 3, 4},
	} {
		if !slices.Equal(got[i], want) {
			t.Errorf("result %d is %v, not %v", i, got[i], want)
		}
	}
}

// The bias of a router has the load of its experts for a gradient, and an attached loss the
// gradient of a term of the loss.
func TestLoadAndAttachedLossAreGradients(t *testing.T) {
	b := ir.NewBuilder("load")
	idx := b.Input("idx", ir.Data, S32(D(ir.Seq, 3), D(ir.Choice, 2)), "")
	w := b.Input("w", ir.Param, F32(D(ir.Seq, 3), D(ir.Choice, 2)), "")
	bias := b.Input("bias", ir.Param, F32(D(ir.RouterDim, 3)), "")
	extra := b.Scale(b.Sum(b.Mul(w, w), ir.Seq, ir.Choice), 0.5)
	y := b.AttachLoss(b.ExpertLoad(w, idx, bias), extra)
	g, err := b.Graph(b.Sum(y, ir.Seq, ir.Choice))
	if err != nil {
		t.Fatal(err)
	}
	gr, err := ir.Grad(g, ir.GradPlan{})
	if err != nil {
		t.Fatal(err)
	}
	joint, err := gr.Joint()
	if err != nil {
		t.Fatal(err)
	}
	in := map[string][]float64{"idx": {0, 1, 0, 1, 0, 2}, "w": {1, 2, 3, 4, 5, 6}}
	got := evaluate(t, joint, in)
	for i, want := range [][]float64{{21}, {2, 3, 4, 5, 6, 7}, {1, 0, -1}} {
		if !slices.Equal(got[i], want) {
			t.Errorf("result %d is %v, not %v", i, got[i], want)
		}
	}
}
