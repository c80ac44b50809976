package main

import (
	"testing"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/price"
)

// Where cores are shared, what is done twice costs twice, and waiting costs nothing.
func TestSharedOrder(t *testing.T) {
	preset, err := model.Find("gpt2")
	if err != nil {
		t.Fatal(err)
	}
	host := price.NewShared(machine.Measured{MatmulF32: 200e9, DeviceCopy: 8e9}, 2)
	seconds := func(change func(p *plan.Plan)) float64 {
		p := plan.Default()
		p.Seq, p.Batch, p.Microbatches = 128, 32, 4
		change(p)
		return host.Seconds(shared(preset.Config, p))
	}
	fsdp := func(p *plan.Plan) { p.FSDP = plan.FSDP{Size: 8, Zero: 3, Gather: "step"} }
	for name, pair := range map[string][2]func(p *plan.Plan){
		"recomputing":        {fsdp, func(p *plan.Plan) { fsdp(p); p.Recompute = []ir.Tag{ir.Attn, ir.MLP} }},
		"copies":             {fsdp, func(p *plan.Plan) { p.DP = 8 }},
		"gathering by layer": {fsdp, func(p *plan.Plan) { fsdp(p); p.FSDP.Gather = "layer" }},
		"smaller parts":      {func(p *plan.Plan) { fsdp(p); p.Microbatches = 1 }, fsdp},
		"more programs": {func(p *plan.Plan) { p.PP = plan.PP{Size: 4, Schedule: "1f1b"} },
			func(p *plan.Plan) { p.PP = plan.PP{Size: 4, Schedule: "zb-h1"} }},
	} {
		if less, more := seconds(pair[0]), seconds(pair[1]); !(less > 0 && less < more) {
			t.Errorf("%s: %v s, and %v s without", name, more, less)
		}
	}
	a := seconds(func(p *plan.Plan) { p.PP = plan.PP{Size: 4, Schedule: "gpipe"} })
	if b := seconds(func(p *plan.Plan) { p.PP = plan.PP{Size: 4, Schedule: "1f1b"} }); a != b {
		t.Errorf("schedules of the same programs take %v and %v s", a, b)
	}
}
