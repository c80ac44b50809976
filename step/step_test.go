package step_test

import (
	"slices"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

const small = `{"model_type": "llama", "vocab_size": 128, "hidden_size": 128,
"intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
"num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
"rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true}`

var size = plantest.Size{Batch: 8, Micros: 4, Seq: 64}

// plans are every use of an axis, every schedule, recomputation and offload in f32, and every axis
// and schedule quantized.
func plans() (list []*plan.Plan) {
	axes := slices.Concat(plantest.Meshes(), plantest.Pipes())
	for _, row := range slices.Concat([]plantest.Row{{Apply: func(*plan.Plan) {}}}, axes,
		plantest.Recomputations(), plantest.Offloads()) {
		list = append(list, row.Plan(size))
	}
	for i, row := range axes {
		p := row.Plan(size)
		p.Precision, p.Types.Params = []string{"mxfp8", "nvfp4"}[i%2], dtype.BF16
		list = append(list, p)
	}
	return list
}

func build(t *testing.T, p *plan.Plan, arch string) *step.Programs {
	t.Helper()
	c, err := model.Parse([]byte(small))
	if err != nil {
		t.Fatal(err)
	}
	if p.Check(c) != nil { // its shards are not whole blocks
		return nil
	}
	programs, err := step.Build(step.Spec{Model: c, Recipe: step.RecipeOf(p), Arch: arch, Plan: p})
	if err != nil {
		t.Fatalf("%s: %v", p, err)
	}
	return programs
}

// foreign is a model that no configuration makes: a graph of its own, with one more operation.
type foreign struct{ from *model.Config }

func (m foreign) Params() []model.Param { return m.from.Params() }
func (m foreign) Facts() model.Facts    { return m.from.Facts() }

func (m foreign) Graph(s model.Shape) (*ir.Graph, error) {
	g, err := m.from.Graph(s)
	if err != nil {
		return nil, err
	}
	return ir.Rewrite(g, func(r *ir.Rewriter, op *ir.Op) []*ir.Value {
		if op.Out[0] != g.Results[0] {
			return nil
		}
		return []*ir.Value{r.Scale(r.Copy(op)[0], 0.5)}
	})
}

// Programs are built of any graph with parameters and facts, on one device, a mesh and a pipeline.
func TestProgramsOfAModelThatIsNoConfig(t *testing.T) {
	c, err := model.Parse([]byte(small))
	if err != nil {
		t.Fatal(err)
	}
	for _, change := range []func(p *plan.Plan){
		func(*plan.Plan) {},
		func(p *plan.Plan) { p.FSDP.Size, p.TP = 2, plan.TP{Size: 2, Sequence: true} },
		func(p *plan.Plan) { p.PP = plan.PP{Size: 2, Schedule: "1f1b"} },
	} {
		p := plantest.Row{Apply: change}.Plan(size)
		of := func(m model.Model) *step.Programs {
			w, err := step.Build(step.Spec{Model: m, Recipe: step.RecipeOf(p), Arch: "cpu", Plan: p})
			if err != nil {
				t.Fatal(err)
			}
			return w
		}
		theirs, ours := of(foreign{c}), of(c)
		if len(theirs.List) != len(ours.List) || len(theirs.List) == 0 {
			t.Errorf("%d programs, and %d of a configuration", len(theirs.List), len(ours.List))
		}
		changed := 0
		for i, one := range theirs.List {
			if one.Module.Text != ours.List[i].Module.Text {
				changed++
			}
		}
		if changed == 0 {
			t.Error("the model's own graph is not in any program")
		}
	}
}

// Every array of every program has a role, and what is neither the host's nor kept from step to
// step another program gives: of the rank, or of a stage beside it.
func TestEveryArrayHasARole(t *testing.T) {
	built, least := 0, 10
	if slowtest.Enabled {
		least = 30
	}
	for i, p := range plans() {
		if !slowtest.Enabled && i%3 != 0 {
			continue
		}
		programs := build(t, p, []string{"cpu", "sm_100"}[i%2])
		if programs == nil {
			continue
		}
		built++
		rolesOf(t, programs)
		if !programs.Policy.Quantizes() {
			continue
		}
		inspects, err := programs.Again(programs.Policy, true)
		if err != nil {
			t.Fatal(err)
		}
		rolesOf(t, inspects)
	}
	if built < least {
		t.Errorf("%d plans were built", built)
	}
}

// given are the roles of arguments that programs give each other within a step.
var given = []program.Role{program.Gradient, program.Activation, program.Seed, program.Residual}

func rolesOf(t *testing.T, p *step.Programs) {
	t.Helper()
	results := map[program.Role]bool{}
	for _, row := range p.List {
		for _, a := range row.Module.Results {
			results[a.Role] = true
		}
	}
	for _, row := range p.List {
		for _, a := range slices.Concat(row.Module.Args, row.Module.Results) {
			if a.Role == "" {
				t.Errorf("%s: %s of %s has no role", p.Plan, a.Name, row.Module.Name)
			}
		}
		for _, a := range row.Module.Args {
			if slices.Contains(given, a.Role) && !results[a.Role] {
				t.Errorf("%s: no program gives the %s %s that %s takes", p.Plan, a.Role, a.Name,
					row.Module.Name)
			}
		}
	}
}

// An update is one program on one device, and else reduce, square and update; where no gradient is
// a term of a sum, nothing is reduced. Microbatches, of which these plans have two, add to zeros.
func TestUpdatesAreThreePrograms(t *testing.T) {
	for _, row := range []struct {
		name  string
		apply func(p *plan.Plan)
		want  []step.Kind
	}{
		{"one device", func(*plan.Plan) {}, []step.Kind{step.Zero, step.Update}},
		{"dp", func(p *plan.Plan) { p.DP = 2 },
			[]step.Kind{step.Zero, step.Reduce, step.Square, step.Update}},
		{"tp", func(p *plan.Plan) { p.TP.Size = 2 },
			[]step.Kind{step.Zero, step.Square, step.Update}},
		{"stages", func(p *plan.Plan) { p.PP = plan.PP{Size: 2, Schedule: "1f1b"} },
			[]step.Kind{step.Zero, step.Square, step.Update}},
	} {
		p := plantest.Row{Apply: row.apply}.Plan(size)
		var got []step.Kind
		for _, one := range build(t, p, "cpu").OfRank(0) {
			if one.Stage < 0 {
				got = append(got, one.Kind)
			}
		}
		if !slices.Equal(got, row.want) {
			t.Errorf("%s: %v, want %v", row.name, got, row.want)
		}
	}
}
