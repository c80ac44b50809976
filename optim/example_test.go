package optim_test

import (
	"fmt"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/optim"
)

// What a loop that trains needs to know: what to keep, what to give, and what comes out.
func ExampleOptimizer() {
	params := []optim.Param{
		{Name: "up", Tag: ir.MLP, Decay: true, Type: ir.Type{Elem: dtype.F32,
			Dims: []ir.Dim{{Name: "embed", Size: 4}, {Name: "mlp", Size: 8}}}},
		{Name: "norm", Tag: ir.Norm, Type: ir.Type{Elem: dtype.F32,
			Dims: []ir.Dim{{Name: "embed", Size: 4}}}},
	}
	var o optim.Optimizer = optim.Muon{
		AdamW:    optim.AdamW{Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, ClipNorm: 1},
		Momentum: 0.95,
	}
	for _, p := range params {
		for _, s := range o.State(p) {
			fmt.Println("keep", s.Name, s.Type)
		}
	}
	g, err := o.Update(params)
	if err != nil {
		fmt.Println(err)
		return
	}
	into := g.Donations()
	for _, v := range g.Inputs {
		if into[v.Name] == "" {
			fmt.Println("give", v.Name)
		}
	}
	for _, v := range g.Results {
		fmt.Println("take", v.Name)
	}
	// Output:
	// keep m.up f32[embed=4, mlp=8]
	// keep m.norm f32[embed=4]
	// keep v.norm f32[embed=4]
	// give commit
	// give rate
	// give limit
	// give fix1
	// give fix2
	// give g.up
	// give g.norm
	// take next.up
	// take next.m.up
	// take next.norm
	// take next.m.norm
	// take next.v.norm
	// take grad_norm
	// take ok
}
