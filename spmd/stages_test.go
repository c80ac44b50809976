package spmd_test

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/spmd"
)

// Stages that run one after another, forward and then backward, each on a mesh of its own, give the
// loss and the gradients of one device.
func TestStagesAgreeWithOneDevice(t *testing.T) {
	for k, row := range []struct {
		model  string
		counts []int64
	}{
		{"llama", []int64{3}}, {"llama", []int64{2, 1}}, {"llama", []int64{1, 1, 1}},
		{"qwen3", []int64{1, 1}}, {"gemma2", []int64{1}},
	} {
		c := shapes()[row.model]
		if row.model == "gemma2" { // two kinds of layers, one after the other
			row.counts = []int64{1, 1}
		}
		g, err := c.Graph(model.Shape{Batch: batch, Seq: seq, Elem: dtype.F32, Documents: 8})
		if err != nil {
			t.Fatal(err)
		}
		whole := fills(g, c, 3)
		want, err := lossAndGradients(g, whole, ir.GradPlan{})
		if err != nil {
			t.Fatal(err)
		}
		stages, err := spmd.Stages(g, row.counts)
		if err != nil {
			t.Fatal(err)
		}
		for i, m := range append(plantest.Meshes(), mesh{Name: "one", Apply: func(*plan.Plan) {}}) {
			if !slowtest.Enabled && (i+k)%2 > 0 { // each mesh with some of the rows
				continue
			}
			got, err := runStages(stages, newPlan(m), ordered(whole, newPlan(m)))
			if err != nil {
				t.Errorf("%s %v, %s: %v", row.model, row.counts, m.Name, err)
				continue
			}
			if d, where := differ(got, want); !(d <= exact) {
				t.Errorf("%s %v, %s: %s is off by %g", row.model, row.counts, m.Name, where, d)
			}
		}
	}
}

// runStages runs all stages forward, then backward.
func runStages(stages []*spmd.Stage, p *plan.Plan, whole map[string]*eval.Array) (map[string][]float64, error) {
	type done struct {
		gr    *ir.Gradient
		given map[string][]*eval.Array
	}
	var list []done
	got := map[string][]float64{}
	var hand []*eval.Array
	for i, s := range stages {
		sh, err := spmd.Shard(s.Graph, p)
		if err != nil {
			return nil, err
		}
		var wrt []string
		for _, v := range sh.Graph.Params() {
			wrt = append(wrt, v.Name)
		}
		if i > 0 {
			wrt = append(wrt, spmd.Hidden)
		}
		gr, err := ir.Grad(sh.Graph, ir.GradPlan{Wrt: wrt, Terms: true, Recompute: []ir.Tag{ir.Gather}})
		if err != nil {
			return nil, err
		}
		given := map[string][]*eval.Array{}
		for _, v := range gr.Forward.Inputs {
			if v.Name == spmd.Hidden {
				given[v.Name] = hand
				continue
			}
			w := part(whole[v.Name], s.Layers[v.Name])
			for d := range devices(p.Mesh()) {
				data := spmd.TakeShard(p.Mesh(), w.Type.Dims, w.Data, v.Type, d)
				given[v.Name] = append(given[v.Name], &eval.Array{Type: v.Type, Data: data})
			}
		}
		out, err := eval.Run(gr.Forward, given)
		if err != nil {
			return nil, err
		}
		for k, v := range gr.Forward.Results {
			given[v.Name] = out[k]
		}
		hand = out[0]
		list = append(list, done{gr, given})
	}
	got["loss"] = hand[0].Data
	one := make([]*eval.Array, len(hand))
	for d := range one {
		one[d] = &eval.Array{Data: []float64{1}}
	}
	hand = one
	for i, stage := range slices.Backward(stages) {
		gr, given := list[i].gr, list[i].given
		given[gr.Seeds[0]] = hand
		out, err := eval.Run(gr.Backward, given)
		if err != nil {
			return nil, err
		}
		for k, v := range gr.Wrt {
			if v.Name == spmd.Hidden {
				hand = out[k]
				continue
			}
			w := whole[v.Name]
			own := part(w, stage.Layers[v.Name])
			sum, err := assemble(p.Mesh(), own.Type.Dims, gr.Backward.Results[k].Type, out[k])
			if err != nil {
				return nil, fmt.Errorf("%s: %w", v.Name, err)
			}
			if got[v.Name] == nil {
				got[v.Name] = make([]float64, len(w.Data))
			}
			first := int(stage.Layers[v.Name][0]) * len(w.Data) / max(1, int(w.Type.Size(ir.Layer)))
			for k, x := range sum {
				got[v.Name][first+k] += x
			}
		}
	}
	if math.IsNaN(got["loss"][0]) {
		return nil, fmt.Errorf("the loss is NaN")
	}
	return got, nil
}

// part is some layers of a stack, or all of what is not stacked.
func part(w *eval.Array, layers [2]int64) *eval.Array {
	if layers[1] == 0 {
		return w
	}
	n := int64(len(w.Data)) / w.Type.Size(ir.Layer)
	t := ir.Type{Elem: w.Type.Elem, Dims: append([]ir.Dim{{Name: ir.Layer, Size: layers[1] - layers[0]}},
		w.Type.Dims[1:]...)}
	return &eval.Array{Type: t, Data: w.Data[layers[0]*n : layers[1]*n]}
}

func TestStagesThatCannotBe(t *testing.T) {
	g, err := shapes()["llama"].Graph(model.Shape{Batch: 1, Seq: 4, Elem: dtype.F32})
	if err != nil {
		t.Fatal(err)
	}
	for _, counts := range [][]int64{nil, {2}, {3, 1}, {3, 0}, {4, -1}} {
		if _, err := spmd.Stages(g, counts); err == nil {
			t.Errorf("three layers were dealt as %v", counts)
		}
	}
}
