package model_test

import (
	"fmt"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
)

// A mixture of experts in a graph of one's own.
func ExampleMoE_Layer() {
	moe := &model.MoE{Experts: 8, TopK: 2, MLP: 64, Score: "softmax", Normalize: true, Scale: 1}
	b := ir.NewBuilder("mine")
	f32 := func(dims ...ir.Dim) ir.Type { return ir.Type{Elem: dtype.F32, Dims: dims} }
	embed, mlp := ir.Dim{Name: ir.EmbedDim, Size: 32}, ir.Dim{Name: ir.MLPDim, Size: 64}
	experts := ir.Dim{Name: ir.ExpertDim, Size: 8}
	x := b.Input("x", ir.Data, f32(ir.Dim{Name: ir.Batch, Size: 2}, ir.Dim{Name: ir.Seq, Size: 16},
		embed), "")
	weights := map[string]*ir.Value{
		"router": b.Input("router", ir.Param, f32(embed, ir.Dim{Name: ir.RouterDim, Size: 8}), ""),
	}
	for _, name := range []string{"expert_gate", "expert_up", "expert_down"} {
		weights[name] = b.Input(name, ir.Param, f32(experts, embed, mlp), "")
	}
	y, load := moe.Layer(b, x, weights, model.ExpertShape{Slots: 2})
	g, err := b.Graph(y, load)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(g.Results[0].Type, g.Results[1].Type)
	// Output: f32[batch=2, seq=16, embed=32] f32[router=11]
}
