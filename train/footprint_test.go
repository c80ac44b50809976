package train

import (
	"context"
	"testing"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
)

// The bounds of what the engine counts, in shares of the formula. It counts more where the stage
// before has sent what is not yet taken, which the formula has only for the action at work; and
// less where buffers are freed while a program runs.
const footprintFrom, footprintTo = 0.97, 1.06

// What a rank holds by the formula is what the engine counts on its devices while a step runs.
func TestFootprintsAreWhatTheEngineCounts(t *testing.T) {
	slowtest.Only(t)
	e, err := engine.Open(context.Background(), "cpu", engine.Options{Devices: 4, Cache: cache})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	c := &model.Config{Arch: "llama", Vocab: 256, Hidden: 128, Layers: 4, Heads: 4, KVHeads: 2,
		HeadDim: 32, MLP: 256, Context: 512, Norm: model.Norm{Eps: 1e-5}, Activation: model.SiLU,
		Gated: true, Rope: ir.Rope{Theta: 100}, Rotary: 32, AttnScale: 0.2, BOS: -1}
	size := plantest.Size{Batch: 16, Micros: 8, Seq: 128}
	for _, row := range []plantest.Row{
		{Name: "zero3", Apply: func(p *plan.Plan) { p.FSDP.Size = 2 }},
		{Name: "zero3 1f1b", Apply: func(p *plan.Plan) {
			p.FSDP.Size, p.PP = 2, plan.PP{Size: 2, Schedule: "1f1b"}
		}},
		{Name: "gpipe", Apply: func(p *plan.Plan) { p.PP = plan.PP{Size: 2, Schedule: "gpipe"} }},
		{Name: "zb-h1", Apply: func(p *plan.Plan) { p.PP = plan.PP{Size: 4, Schedule: "zb-h1"} }},
	} {
		t.Run(row.Name, func(t *testing.T) {
			p := &parity{engine: e, config: c, optimizer: optim.AdamW{Beta1: 0.9, Beta2: 0.95, Eps: 1e-8}}
			how := row.Plan(size)
			tr, err := p.start(t.Context(), how, size, Options{Ahead: -1})
			if err != nil {
				t.Fatal(err)
			}
			defer tr.Close()
			want, err := tr.footprints()
			if err != nil {
				t.Fatal(err)
			}
			e.ResetHighWater()
			for i := range 2 {
				if _, err := tr.Gradients(t.Context(), p.rows(uint64(i), size)); err != nil {
					t.Fatal(err)
				}
				if _, _, err := tr.Update(t.Context(), 1e-3); err != nil {
					t.Fatal(err)
				}
			}
			got := e.HighWater()
			for rank, f := range want {
				seen := got[rank*int(how.Devices())/len(want)]
				ratio := float64(seen) / float64(f.Sum())
				t.Logf("counted %s, %.3f of%s", event.Size(seen), ratio, f)
				if !(ratio >= footprintFrom && ratio <= footprintTo) {
					t.Errorf("the engine counts %.3f times what the formula says", ratio)
				}
			}
		})
	}
}
