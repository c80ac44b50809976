package train

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
)

// sparse are models with experts: Mixtral's router with both losses under SGD, and DeepSeek-V3's
// with groups, a shared expert, a dense layer and a correction under AdamW.
func sparse(e *engine.Engine) map[string]*parity {
	size := plantest.Size{Batch: 16, Micros: 2, Seq: 8}
	mixtral := *parities(e)["llama"].config
	mixtral.Arch, mixtral.Layers = "mixtral", 2
	mixtral.MoE = &model.MoE{Experts: 8, TopK: 2, MLP: 8, Score: "softmax", Normalize: true, Scale: 1,
		AuxLoss: 0.02, ZLoss: 0.01}
	deep := mixtral
	deep.Layers = 2
	deep.MoE = &model.MoE{Experts: 8, TopK: 3, MLP: 8, Shared: 8, Dense: 1, Score: "sigmoid",
		Normalize: true, Scale: 2.5, Groups: 4, TopGroups: 2, Correction: true, AuxLoss: 0.01}
	adam := optim.AdamW{Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, ClipNorm: 1}
	return map[string]*parity{
		"mixtral":  {engine: e, config: &mixtral, optimizer: optim.SGD{}, size: size, rate: 0.02, scale: 5},
		"deepseek": {engine: e, config: &deep, optimizer: adam, size: size, rate: 0.02, scale: 5},
		"dropping": {engine: e, config: &mixtral, optimizer: optim.SGD{}, size: size, rate: 0.02, scale: 5,
			capacity: 0.9},
	}
}

// expertPlans use ep alone and with every other axis, on up to 8 devices.
func expertPlans() []plantest.Row {
	ep := func(n int64) plantest.Row {
		return plantest.Row{Name: "ep", Axes: []string{"ep"}, Apply: func(p *plan.Plan) { p.EP = n }}
	}
	pipes := lists.Filter(plantest.Pipes(), func(r plantest.Row) bool { // two layers are two stages
		return r.Name != "interleaved" && r.Name != "zb-v"
	})
	rows := plantest.Combine(2, append(append(plantest.Meshes(), pipes...), ep(2))...)
	var list []plantest.Row
	for _, r := range rows { // with ep; of the others, whose programs differ in the layer alone, some
		if len(list)%5 == 0 || strings.Contains(r.Name, "ep") && !strings.Contains(r.Name, "pp") {
			list = append(list, r)
		}
	}
	row := func(name string, apply func(p *plan.Plan)) {
		list = append(list, plantest.Row{Name: name, Apply: apply})
	}
	zero3 := func(n int64) plan.FSDP { return plan.FSDP{Size: n, Zero: 3, Gather: "layer"} }
	row("ep4", func(p *plan.Plan) { p.EP = 4 })
	row("ep4 overlap", func(p *plan.Plan) { p.EP, p.EPOverlap = 4, true })
	row("ep2 gather zero3", func(p *plan.Plan) { p.EP, p.EPKind, p.FSDP = 2, "gather", zero3(2) })
	row("ep8", func(p *plan.Plan) { p.EP = 8 })
	row("ep4 zero3", func(p *plan.Plan) { p.EP, p.FSDP = 4, zero3(2) })
	row("ep2 zero3 4", func(p *plan.Plan) { p.EP, p.FSDP = 2, zero3(4) })
	row("ep4 tp", func(p *plan.Plan) { p.EP, p.TP = 4, plan.TP{Size: 2} })
	row("ep4 sp", func(p *plan.Plan) { p.EP, p.TP = 4, plan.TP{Size: 2, Sequence: true} })
	row("ep4 ring", func(p *plan.Plan) { p.EP, p.CP = 4, plan.CP{Size: 2, Kind: "ring", Balance: true} })
	row("ep2 zero3 tp", func(p *plan.Plan) { p.EP, p.FSDP, p.TP = 2, zero3(2), plan.TP{Size: 2} })
	row("ep2 zero1 cp", func(p *plan.Plan) {
		p.EP, p.CP = 2, plan.CP{Size: 2, Kind: "gather", Balance: true}
		p.FSDP = plan.FSDP{Size: 2, Zero: 1, Gather: "step"}
	})
	row("ep2 zero3 1f1b", func(p *plan.Plan) {
		p.EP, p.FSDP, p.PP = 2, zero3(2), plan.PP{Size: 2, Schedule: "1f1b"}
	})
	row("ep4 interleaved", func(p *plan.Plan) {
		p.EP, p.PP = 2, plan.PP{Size: 2, Schedule: "zb-h1"}
	})
	row("ep2 sp 1f1b, recompute", func(p *plan.Plan) {
		p.EP, p.TP, p.PP = 2, plan.TP{Size: 2, Sequence: true}, plan.PP{Size: 2, Schedule: "1f1b"}
		p.Recompute = []ir.Tag{ir.Router, ir.Experts}
	})
	return list
}

// Three steps of models with experts end where one device ends, whatever the plan: losses,
// gradients and parameters, with and without dropped tokens. Slots of experts overflow in some of
// the plans, and their steps run again.
func TestExpertPlansEndAlike(t *testing.T) {
	e, err := engine.Open(context.Background(), "cpu", engine.Options{Devices: 8, Cache: cache})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	climbed, plans := 0, 0
	for k, name := range []string{"mixtral", "deepseek", "dropping"} {
		p := sparse(e)[name]
		p.hasty = true
		rows := expertPlans()
		if !slowtest.Enabled {
			rows = rows[len(rows)-4:]
		}
		if p.want, err = p.run(t.Context(), nil, Options{}); err != nil {
			t.Fatal(err)
		}
		for i, row := range rows {
			// Each plan trains one of two models, and some of them also drop tokens; spmd's interpreter
			// holds every plan to every model.
			if k < 2 && i%2 != k || k == 2 && i%6 != 0 {
				continue
			}
			how := p.plan(row)
			how.Slots = []float64{4} // with which nothing overflows
			if i%3 == 0 || !slowtest.Enabled {
				how.Slots = []float64{1.5, 4}
			}
			got, err := p.run(t.Context(), how, Options{})
			if err != nil {
				t.Errorf("%s, %s: %v", name, row.Name, err)
				continue
			}
			p.compare(t, name+", "+row.Name, got)
			plans++
		}
		climbed += p.climbed
	}
	t.Logf("%d plans, %d of which needed more slots", plans, climbed)
	if slowtest.Enabled && (plans < 30 || climbed == 0 || climbed == plans) {
		t.Errorf("%d of %d plans needed more slots", climbed, plans)
	}
}

// A step whose experts overflow the plan's last slots is refused by name, and changes nothing.
func TestExpertsOverflowIsAnError(t *testing.T) {
	e, err := engine.Open(context.Background(), "cpu", engine.Options{Devices: 2, Cache: cache})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	p := sparse(e)["mixtral"]
	p.hasty = true
	how := p.plan(plantest.Row{Apply: func(q *plan.Plan) { q.EP, q.Slots = 2, []float64{1, 1.01} }})
	_, err = p.run(t.Context(), how, Options{})
	if !errors.Is(err, diag.ExpertsOverflow) || !strings.Contains(diag.From(err).Format(), "slots") {
		t.Errorf("%v", err)
	}
}

// One expert that every token chooses, four times the mean load, makes steps run with more slots,
// and the run goes on; what the programs with the most slots need is what was planned.
func TestARunWithOneBusyExpertGoesOn(t *testing.T) {
	e, err := engine.Open(context.Background(), "cpu", engine.Options{Devices: 2, Cache: cache})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	p := sparse(e)["deepseek"]
	moe := *p.config.MoE
	moe.TopK, moe.Groups, moe.TopGroups = 2, 1, 1
	p.config.MoE = &moe
	p.busy, p.hasty = true, true
	if p.want, err = p.run(t.Context(), nil, Options{}); err != nil {
		t.Fatal(err)
	}
	how := p.plan(plantest.Row{Apply: func(q *plan.Plan) { q.EP, q.Slots = 2, []float64{1.25, 4} }})
	got, err := p.run(t.Context(), how, Options{})
	if err != nil {
		t.Fatal(err)
	}
	p.compare(t, "one busy expert", got)
	if p.climbed == 0 {
		t.Error("no step needed more slots")
	}
	tr, err := p.start(t.Context(), how, p.size, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	for _, x := range tr.exec.x.list() { // all slots of experts fit in what the largest rung needs
		small, err := x.Memory()
		if err != nil {
			t.Fatal(err)
		}
		large, err := tr.exec.ladder.largest(true)
		if err != nil {
			t.Fatal(err)
		}
		for _, y := range large {
			if need, err := y.Memory(); y.Module().Name == x.Module().Name && (err != nil ||
				need.Temp < small.Temp) {
				t.Errorf("%s needs %d bytes with more slots, %d with fewer: %v", x.Module().Name,
					need.Temp, small.Temp, err)
			}
		}
	}
}
