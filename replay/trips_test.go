package replay

import (
	"encoding/json"
	"testing"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/step"
)

// Loops over layers of a small plan run twice or more, also where parameters are gathered a layer
// ahead: of a loop of one trip no stride is replayed.
func TestSmallLoopsRepeat(t *testing.T) {
	slowtest.Only(t)
	s, err := Shrink(preset(t, "llama3.1-8b"), planOf(func(p *plan.Plan) {
		p.FSDP.Size, p.Microbatches = 8, 1
	}))
	if err != nil {
		t.Fatal(err)
	}
	pairs, err := Pairs(step.Spec{Model: s.Model, Recipe: step.RecipeOf(s.Plan), Plan: s.Plan})
	if err != nil {
		t.Fatal(err)
	}
	p := lists.Find(pairs, func(p Pair) bool { return p.Kind == step.Gradient })
	format, code, err := runner(t).Compile(t.Context(), p.GPU, p.Cluster)
	if err != nil {
		t.Fatal(err)
	}
	m, err := decodeProgram(format, code)
	if err != nil {
		t.Fatal(err)
	}
	loops := 0
	for _, c := range m.computations {
		for _, i := range c.list {
			var config loopConfig
			if i.opcode != "while" || json.Unmarshal(i.config, &config) != nil || config.Trips == nil {
				continue
			}
			if loops++; config.Trips.N < 2 {
				t.Errorf("%s runs %d times", i.name, config.Trips.N)
			}
		}
	}
	if loops < 2 {
		t.Errorf("%d loops", loops)
	}
}
