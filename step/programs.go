package step

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
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

// The kinds. A stage has Gradient, Accumulate and Evaluate where forward and backward pass are one
// program, else Forward and Backward, or the two halves of the latter.
const (
	Gradient   Kind = "gradient"   // of the first microbatch: loss and gradients
	Accumulate Kind = "accumulate" // of all others: adds to the gradients
	Evaluate   Kind = "evaluate"   // the loss alone
	Forward    Kind = "forward"
	Backward   Kind = "backward"
	Input      Kind = "input"  // the half of Backward that the stage before waits for
	Weight     Kind = "weight" // the other half
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
	Kind   Kind
	Rank   int // of the pipeline
	Stage  int // the virtual stage; -1 for what a rank does around the microbatches
	Graph  *ir.Graph
	Module *program.Module
	Stats  []ir.Stat // what stands where in its reports on quantized GEMMs
}

// Programs are what a run computes on one kind of device.
type Programs struct {
	List []*Program // by rank

	Params   []model.Param // as the loss takes them, stacked or layer by layer
	Shape    model.Shape
	Policy   *precision.Policy // what the GEMMs of linear layers are computed in
	Plan     *plan.Plan        // nil is one device
	Schedule *schedule.Schedule
	Stages   []*Stage // by number
	Ranks    []*Rank

	Optimizer optim.Optimizer
	Notes     []string // what was chosen, and why
	Warnings  []string // what the numbers of a run depend on

	spec Spec
}

// A Stage is a virtual stage of the pipeline.
type Stage struct {
	Rank     int
	Sharding *spmd.Sharding // nil on one device
	// Joint has forward and backward pass as one program; nil if other stages come between them.
	Joint *spmd.Step
	// Graphs has them apart; nil if there is Joint.
	Graphs *pipeline.Graphs

	stage *spmd.Stage
	stats map[*ir.Graph][]ir.Stat
}

// A Rank is what the devices of one pipeline rank do before and after the microbatches.
type Rank struct {
	Devices program.Devices
	Params  []model.Param // in the order of Part.Holds
	*spmd.RankUpdate

	copies spmd.QuantizedCopies // the quantized copies that the stages take
}

// Counts finds a parameter whose gradient counts in this rank, by name; nil if it does not.
func (r *Rank) Counts(param string) *spmd.RankParam {
	for i := range r.RankParams {
		if h := &r.RankParams[i]; h.Name == param && h.Counts {
			return h
		}
	}
	return nil
}

// Joint tells whether forward and backward pass are one program: there is no pipeline.
func (p *Programs) Joint() bool { return p.Schedule == nil }

// Find gives the program of a kind that a rank has around the microbatches, or its only stage has;
// nil if there is none.
func (p *Programs) Find(kind Kind, rank int) *Program {
	return lists.Find(p.List, func(one *Program) bool { return one.Kind == kind && one.Rank == rank })
}

// OfRank lists the programs of a rank.
func (p *Programs) OfRank(rank int) (list []*Program) {
	return lists.Filter(p.List, func(one *Program) bool { return one.Rank == rank })
}

// OfStage gives the program of a kind that a virtual stage has, or nil.
func (p *Programs) OfStage(kind Kind, stage int) *Program {
	return lists.Find(p.List, func(one *Program) bool {
		return one.Kind == kind && one.Stage == stage
	})
}

// module gives the module of a program; a nil program has none.
func (p *Program) module() *program.Module {
	if p == nil {
		return nil
	}
	return p.Module
}

// Without leaves programs of some kinds out of the table.
func (p *Programs) Without(kinds ...Kind) *Programs {
	q := *p
	q.List = slices.DeleteFunc(slices.Clone(p.List), func(one *Program) bool {
		return slices.Contains(kinds, one.Kind)
	})
	return &q
}

// Again builds the programs under another policy; inspect lets them measure errors of rounding, and
// leaves out those that have nothing to measure.
func (p *Programs) Again(policy *precision.Policy, inspect bool) (*Programs, error) {
	s := p.spec
	s.Policy, s.inspect = policy, inspect
	return s.build()
}

// Spec returns what the programs were built for.
func (p *Programs) Spec() Spec { return p.spec }

// Graphs gives what each program computes, by the name of its module.
func (p *Programs) Graphs() map[string]*ir.Graph {
	return byName(p, func(one *Program) *ir.Graph { return one.Graph })
}

// byName gives what f makes of each program, by the name of its module.
func byName[T any](p *Programs, f func(*Program) T) map[string]T {
	all := map[string]T{}
	for _, one := range p.List {
		all[one.Module.Name] = f(one)
	}
	return all
}

// Users lists the ranks that have a parameter, in the order of their first stages.
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

// Fingerprints name the texts of the programs, for checkpoints.
func (p *Programs) Fingerprints() map[string]string {
	return byName(p, func(one *Program) string { return hashed(one.Module.Text) })
}

// onOneDevice stands in checkpoints for a run without a plan; "" is a checkpoint that says nothing.
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

// OptionsDigest names the compile options of all programs, which their texts do not show.
func (p *Programs) OptionsDigest() string {
	text, err := json.Marshal(byName(p, func(one *Program) map[string]any { return one.Module.Flags }))
	if err != nil {
		return err.Error() // options that no compiler takes either
	}
	return hashed(string(text))
}

func hashed(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}
