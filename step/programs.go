package step

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/pipeline"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
	"github.com/deepwell/deepwell/spmd"
)

// A Kind is what a program does in a step.
type Kind string

// The kinds. A stage has Gradient and Evaluate where forward and backward pass are one program,
// else Forward and Backward, or the two halves of the latter.
const (
	Gradient Kind = "gradient" // loss and gradients; adds to them where a step has microbatches
	Evaluate Kind = "evaluate" // the loss alone
	Forward  Kind = "forward"
	Backward Kind = "backward"
	Input    Kind = "input"  // the half of Backward that the stage before waits for
	Weight   Kind = "weight" // the other half
	// What a rank does around the microbatches ([spmd.RankUpdate]).
	Zero     Kind = "zero"
	Reduce   Kind = "reduce"
	Square   Kind = "square"
	Update   Kind = "update"
	Quantize Kind = "quantize"
	Inspect  Kind = "inspect"
)

// A Program is one row of the table of what a run computes.
type Program struct {
	Kind Kind
	Rank int // of the pipeline, from 0
	// Stage is the virtual stage, or -1 for what a rank does around the microbatches.
	Stage  int
	Graph  *ir.Graph       // one device's
	Module *program.Module // its StableHLO text, and arguments by name
	// Stats is the layout of the statistics that the program returns about its quantized GEMMs.
	Stats []ir.Stat
}

// Programs are all programs of a run, for one kind of device. They are not changed after [Build],
// except that an engine assigns devices to modules.
type Programs struct {
	List []*Program // by rank, then in the order of a step

	// Params are the parameters as the loss takes them: stacks of layers where it loops over layers,
	// else single layers.
	Params   []model.Param
	Shape    model.Shape        // of one microbatch
	Policy   *precision.Policy  // the formats of linear layers
	Plan     *plan.Plan         // nil is one device
	Schedule *schedule.Schedule // nil without a pipeline
	Stages   []*Stage           // virtual stages in the order of the forward pass
	Ranks    []*Rank            // of the pipeline; one without it

	Optimizer optim.Optimizer
	Choices   []kernels.Choice
	Passes    []kernels.Pass // of rewriting the graphs, in their order
	Notes     []string       // choices of kernels and loops, and why
	Warnings  []string       // properties of the target that change results

	spec Spec
}

// A Stage is a virtual stage of the pipeline.
type Stage struct {
	Rank     int
	Sharding *spmd.Sharding // nil on one device
	// Joint has forward and backward pass in one graph: there is no pipeline. Graphs has them apart.
	// One of the two is nil.
	Joint  *spmd.Step
	Graphs *pipeline.Graphs

	stage *spmd.Stage             // before sharding
	stats map[*ir.Graph][]ir.Stat // layouts of the statistics of Graphs
}

// A Rank is what the devices of one pipeline rank do before and after the microbatches.
type Rank struct {
	Devices program.Devices
	Params  []model.Param // in the order of RankUpdate.RankParams
	*spmd.RankUpdate

	copies spmd.QuantizedCopies // that its stages read
}

// Counts returns a parameter by name if its gradient counts towards the norm in this rank, else
// nil.
func (r *Rank) Counts(param string) *spmd.RankParam {
	for i := range r.RankParams {
		if h := &r.RankParams[i]; h.Name == param && h.Counts {
			return h
		}
	}
	return nil
}

// Joint reports whether forward and backward pass are one program: there is no pipeline.
func (p *Programs) Joint() bool { return p.Schedule == nil }

// Find returns a rank's program of a kind, or nil. A rank has several of the kinds of its stages,
// of which the first is returned.
func (p *Programs) Find(kind Kind, rank int) *Program {
	return lists.Find(p.List, func(one *Program) bool { return one.Kind == kind && one.Rank == rank })
}

// OfRank returns the programs of a rank.
func (p *Programs) OfRank(rank int) (list []*Program) {
	return lists.Filter(p.List, func(one *Program) bool { return one.Rank == rank })
}

// OfStage returns a virtual stage's program of a kind, or nil.
func (p *Programs) OfStage(kind Kind, stage int) *Program {
	return lists.Find(p.List, func(one *Program) bool {
		return one.Kind == kind && one.Stage == stage
	})
}

// module returns the module of a program; nil for nil.
func (p *Program) module() *program.Module {
	if p == nil {
		return nil
	}
	return p.Module
}

// Without returns a table without the programs of some kinds.
func (p *Programs) Without(kinds ...Kind) *Programs {
	q := *p
	q.List = slices.DeleteFunc(slices.Clone(p.List), func(one *Program) bool {
		return slices.Contains(kinds, one.Kind)
	})
	return &q
}

// Again builds the programs of the same run under another policy. With inspect they measure
// rounding errors, and programs without quantized GEMMs are left out.
func (p *Programs) Again(policy *precision.Policy, inspect bool) (*Programs, error) {
	s := p.spec
	s.Policy, s.inspect = policy, inspect
	return s.build()
}

// Layers says which layers of the model a program's part of a stack has, by the name that the stack
// has in the loss: the first, and the distance to the next.
func (p *Programs) Layers(module, stack string) (first, stride int64) {
	one := lists.Find(p.Params, func(one model.Param) bool { return one.Name == stack })
	first, stride = one.First, max(one.Step, 1)
	row := lists.Find(p.List, func(row *Program) bool { return row.Module.Name == module })
	if row == nil || row.Stage < 0 || p.Joint() {
		return first, stride
	}
	if rounds, ok := p.Stages[row.Stage].stage.Layers[fmt.Sprintf("s%d.%s", row.Stage, stack)]; ok {
		first += rounds[0] * stride
	}
	return first, stride
}

// Rungs is how many sizes of slots the plan has for experts; 1 for a model without any.
func (p *Programs) Rungs() int {
	if p.spec.Model.Facts().MoE == nil {
		return 1
	}
	return len(p.Plan.ExpertSlots())
}

// Rung builds the programs of the same run with the plan's next larger slots of experts, from 0 on.
func (p *Programs) Rung(n int) (*Programs, error) {
	s := p.spec
	s.rung = n
	return s.build()
}

// Spec returns what the programs were built for.
func (p *Programs) Spec() Spec { return p.spec }

// Graphs returns the graph of each program, by the name of its module.
func (p *Programs) Graphs() map[string]*ir.Graph {
	return byName(p, func(one *Program) *ir.Graph { return one.Graph })
}

// byName maps every program by the name of its module.
func byName[T any](p *Programs, f func(*Program) T) map[string]T {
	all := map[string]T{}
	for _, one := range p.List {
		all[one.Module.Name] = f(one)
	}
	return all
}

// Users returns the ranks that use a parameter, in the order of their first stages. On one device,
// where nothing is sharded, it is empty.
func (p *Programs) Users(name string) (list []int) {
	for _, s := range p.Stages {
		if s.Sharding == nil {
			continue
		}
		has := slices.ContainsFunc(s.Sharding.Params, func(l spmd.Layout) bool { return l.Name == name })
		if has && !slices.Contains(list, s.Rank) {
			list = append(list, s.Rank)
		}
	}
	return list
}

// Fingerprints are the SHA-256 of the programs' texts, for checkpoints.
func (p *Programs) Fingerprints() map[string]string {
	return byName(p, func(one *Program) string { return hashed(one.Module.Text) })
}

// onOneDevice stands in checkpoints for a run without a plan; "" is a checkpoint that recorded
// nothing.
const onOneDevice = "one device"

// PlanDigest names the plan of a run.
func (p *Programs) PlanDigest() string {
	if p.Plan == nil {
		return onOneDevice
	}
	how := *p.Plan
	how.Model = "" // a path, which may be another on each host; what is in it is compared by itself
	return hashed(how.String())
}

// OptionsDigest names the compile options of all programs, which are not part of their texts.
func (p *Programs) OptionsDigest() string {
	text, err := json.Marshal(byName(p, func(one *Program) map[string]any { return one.Module.Flags }))
	if err != nil {
		return err.Error() // options that no compiler takes either
	}
	return hashed(string(text))
}

// hashed is the SHA-256 of a text.
func hashed(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}
