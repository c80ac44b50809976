package spmd_test

import (
	"fmt"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/spmd"
)

// sparseShapes are models with experts: Mixtral's softmax with both losses of a router, and
// DeepSeek-V3's groups of sigmoids with a correction, a shared expert and a dense first layer.
func sparseShapes() map[string]*model.Config {
	mixtral := *shapes()["llama"]
	mixtral.Arch, mixtral.Layers = "mixtral", 2
	mixtral.MoE = &model.MoE{Experts: 8, TopK: 2, MLP: 4, Score: "softmax", Normalize: true, Scale: 1,
		AuxLoss: 0.02, ZLoss: 0.01}
	deep := mixtral
	deep.Arch, deep.Layers = "qwen3_moe", 3
	deep.MoE = &model.MoE{Experts: 8, TopK: 3, MLP: 4, Shared: 4, Dense: 1, Score: "sigmoid",
		Normalize: true, Scale: 2.5, Groups: 4, TopGroups: 2, Correction: true, AuxLoss: 0.01}
	return map[string]*model.Config{"mixtral": &mixtral, "deepseek": &deep}
}

// expertMeshes are the plans that models with experts are held to: every axis alone and every pair,
// with and without ep, and some with more devices.
func expertMeshes() (rows []mesh) {
	ep := func(n int64) mesh {
		return mesh{Name: "ep", Axes: []string{"ep"}, Apply: func(p *plan.Plan) { p.EP = n }}
	}
	rows = append(rows, plantest.Combine(2, append(plantest.Meshes(), ep(2))...)...)
	rows = append(rows, ep(4))
	rows = append(rows, plantest.Larger()...)
	for _, m := range []struct {
		name  string
		apply func(p *plan.Plan)
	}{
		{"ep zero3 tp", func(p *plan.Plan) {
			p.EP, p.TP.Size, p.FSDP = 2, 2, plan.FSDP{Size: 2, Zero: 3, Gather: "layer"}
		}},
		{"ep zero1 cp", func(p *plan.Plan) {
			p.EP, p.CP, p.FSDP = 2, plan.CP{Size: 2, Kind: "ring", Balance: true},
				plan.FSDP{Size: 2, Zero: 1, Gather: "step"}
		}},
		{"ep gather", func(p *plan.Plan) { p.EP, p.EPKind = 2, "gather" }},
		{"ep4 gather", func(p *plan.Plan) { p.EP, p.EPKind = 4, "gather" }},
		{"ep gather zero3 sp cp", func(p *plan.Plan) {
			p.EP, p.EPKind, p.TP = 2, "gather", plan.TP{Size: 2, Sequence: true}
			p.FSDP = plan.FSDP{Size: 2, Zero: 3, Gather: "layer"}
			p.CP = plan.CP{Size: 2, Kind: "ring", Balance: true}
		}},
		{"ep gather overlap", func(p *plan.Plan) { p.EP, p.EPKind, p.EPOverlap = 2, "gather", true }},
		{"ep overlap", func(p *plan.Plan) { p.EP, p.EPOverlap = 2, true }},
		{"ep overlap zero3 tp, cp", func(p *plan.Plan) {
			p.EP, p.EPOverlap, p.TP.Size = 2, true, 2
			p.CP = plan.CP{Size: 2, Kind: "ring", Balance: true}
		}},
		{"ep sp cp", func(p *plan.Plan) {
			p.EP, p.CP, p.TP = 2, plan.CP{Size: 2, Kind: "a2a"}, plan.TP{Size: 2, Sequence: true}
		}},
	} {
		rows = append(rows, mesh{Name: m.name, Apply: m.apply})
	}
	return rows
}

// Loss, gradients, loads and drops of models with experts are one device's under every plan.
func TestExpertPlansAgreeWithOneDevice(t *testing.T) {
	for name, c := range sparseShapes() {
		for _, capacity := range []float64{0, 0.8} {
			t.Run(fmt.Sprintf("%s, capacity %v", name, capacity), func(t *testing.T) {
				shape := model.Shape{Batch: batch, Seq: seq, Elem: dtype.F32,
					Experts: model.ExpertShape{Capacity: capacity}}
				g, err := c.Graph(shape)
				if err != nil {
					t.Fatal(err)
				}
				whole := fills(g, c, 3)
				want, err := lossAndGradients(g, whole, ir.GradPlan{})
				if err != nil {
					t.Fatal(err)
				}
				rows := expertMeshes()
				if !slowtest.Enabled {
					rows = every(rows, 4)
				}
				plansAgree(t, c, g, whole, want, rows)
				loop := map[string]string{"mixtral": "block", "deepseek": "block1"}[name]
				t.Logf("%d plans, loads %v", len(rows), want[model.LoadPrefix+loop])
			})
		}
	}
}

// A half batch has half of the slots: both together compute and send what one batch does.
func TestHalfBatchesHaveHalfOfTheSlots(t *testing.T) {
	c := sparseShapes()["mixtral"]
	g, err := c.Graph(model.Shape{Batch: batch, Seq: seq, Elem: dtype.F32,
		Experts: model.ExpertShape{Slots: 2}})
	if err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{"a2a", "gather"} {
		sent := map[bool]int64{} // bytes along ep
		for _, halves := range []bool{false, true} {
			sh, err := spmd.Shard(g, newPlan(mesh{Apply: func(p *plan.Plan) {
				p.EP, p.EPKind, p.EPOverlap = 2, kind, halves
			}}))
			if err != nil {
				t.Fatal(err)
			}
			for _, row := range spmd.CensusOf(sh.Graph) {
				if row.Kind != hlo.AllReduce {
					sent[halves] += row.Bytes
				}
			}
		}
		if sent[true] != sent[false] || sent[true] == 0 {
			t.Errorf("%s: two half batches send %d bytes, one batch %d", kind, sent[true], sent[false])
		}
	}
}
