package train

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/pipeline"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
	"github.com/deepwell/deepwell/spmd"
)

// A Pipe is the programs of a plan with pipeline stages.
type Pipe struct {
	Schedule *schedule.Schedule
	Stages   []*PipeStage // by virtual stage
	Ranks    []*PipeRank

	plan *plan.Plan
}

// A PipeStage is what one virtual stage computes.
type PipeStage struct {
	Rank     int
	Sharding *spmd.Sharding
	Graphs   *pipeline.Graphs
	Programs *pipeline.Programs

	cut *spmd.Stage
}

// A PipeRank is what the devices of a rank do before and after the microbatches.
type PipeRank struct {
	Devices                      program.Devices
	Part                         *spmd.Part
	Zero, Reduce, Square, Update *program.Stage
	Quantize                     *program.Stage // nil if no product has few bits

	params []model.Param // what Part holds, in its order
	blocks spmd.Blocks   // what the stages take in the place of parameters
}

// Programs lists the programs of a rank: those of its stages, in order, then those around them.
func (p *Pipe) Programs(rank int) []*program.Stage {
	var list []*program.Stage
	for _, s := range p.Stages {
		if s.Rank == rank {
			list = append(list, s.Programs.List()...)
		}
	}
	r := p.Ranks[rank]
	list = append(list, r.Zero, r.Reduce, r.Square, r.Update)
	if r.Quantize != nil {
		list = append(list, r.Quantize)
	}
	return list
}

// Split tells whether the schedule has the gradients of inputs and of weights apart.
func (p *Pipe) Split() bool {
	for _, list := range p.Schedule.Lists {
		if slices.ContainsFunc(list, func(a schedule.Action) bool { return a.Kind == schedule.Input }) {
			return true
		}
	}
	return false
}

// pipe cuts a loss into the stages of a plan and writes their programs.
func (p *Programs) pipe(loss *ir.Graph, how *plan.Plan, recompute []ir.Tag,
	set *kernels.Set) error {
	order, err := how.Schedule()
	if err != nil {
		return err
	}
	rounds := int64(0)
	for _, op := range loss.Ops {
		if op.Kind == "repeat" {
			rounds += op.Attrs.Int("n")
		}
	}
	stages, err := spmd.Stages(loss, how.Stages(rounds))
	if err != nil {
		return err
	}
	p.Pipe = &Pipe{Schedule: order, plan: how}
	for k, s := range stages {
		s.Number(k)
		one := &PipeStage{Rank: order.Rank(k), cut: s}
		if err := one.differentiate(k == 0, k == len(stages)-1, how, recompute); err != nil {
			return err
		}
		p.Pipe.Stages = append(p.Pipe.Stages, one)
	}
	size := int(how.Devices()) / order.Ranks
	for rank := range order.Ranks {
		devices := make(program.Devices, size)
		for i := range devices {
			devices[i] = rank*size + i
		}
		r := &PipeRank{Devices: devices}
		for _, s := range p.Pipe.Stages {
			if s.Rank == rank {
				if err := s.narrow(&r.blocks); err != nil {
					return err
				}
			}
		}
		if err := p.hold(r, rank); err != nil {
			return err
		}
		p.Pipe.Ranks = append(p.Pipe.Ranks, r)
		if err := p.lowerRank(rank, set); err != nil {
			return err
		}
	}
	return nil
}

// differentiate cuts a stage for its devices and takes its gradient.
func (s *PipeStage) differentiate(first, last bool, how *plan.Plan,
	recompute []ir.Tag) (err error) {
	if s.Sharding, err = spmd.Shard(s.cut.Graph, how); err != nil {
		return err
	}
	g := s.Sharding.Graph
	b := pipeline.Boundary{Recompute: append(slices.Clone(recompute), ir.Gather),
		Grads: how.Types.Grads, Terms: true, Settle: s.Sharding.Scatter,
		Offload: how.Offloads(plan.Activations)}
	if !first {
		b.Inputs = []string{spmd.Hidden}
	}
	if !last {
		b.Outputs = []string{g.Results[0].Name}
	}
	s.Graphs, err = pipeline.Differentiate(g, b)
	return err
}

// narrow writes out products in few bits, and names what graphs take in the place of parameters.
func (s *PipeStage) narrow(blocks *spmd.Blocks) error {
	for _, one := range []*ir.Graph{s.Graphs.Forward, s.Graphs.Backward, s.Graphs.Input,
		s.Graphs.Weight} {
		if one == nil {
			continue
		}
		if err := blocks.Expand(one); err != nil {
			return err
		}
		s.Sharding.Copies(one)
	}
	return nil
}

// hold finds the parameters of a rank. One that two of its stages use is held once, since both add
// to one gradient; one that another rank uses as well counts in the first.
func (p *Programs) hold(r *PipeRank, rank int) error {
	byName := map[string]model.Param{}
	for _, one := range p.Params {
		byName[one.Name] = one
	}
	var held []spmd.Held
	for _, s := range p.Pipe.Stages {
		if s.Rank != rank {
			continue
		}
		for i, l := range s.Sharding.Params {
			if slices.ContainsFunc(held, func(h spmd.Held) bool { return h.Name == l.Name }) {
				continue
			}
			one := byName[s.cut.Unnumbered(l.Name)]
			if rounds, ok := s.cut.Layers[l.Name]; ok {
				one = one.Slice(rounds[0], rounds[1])
			}
			r.params = append(r.params, one)
			users := p.Pipe.users(l.Name)
			sum := s.Graphs.Backward.Find(s.Graphs.Accumulators[i])
			held = append(held, spmd.Held{
				Param:  optim.Param{Name: l.Name, Type: sum.Type, Tag: one.Tag, Decay: len(one.Shape) > 1},
				Layout: l, Shared: len(users) > 1, Counts: users[0] == rank})
		}
	}
	var err error
	r.Part, err = spmd.NewPart(p.Pipe.plan, p.optimizer, held, &r.blocks)
	return err
}

// users lists the ranks that have a parameter, in the order of their first stages.
func (p *Pipe) users(name string) (list []int) {
	for _, s := range p.Stages {
		has := slices.ContainsFunc(s.Sharding.Params, func(l spmd.Layout) bool { return l.Name == name })
		if has && !slices.Contains(list, s.Rank) {
			list = append(list, s.Rank)
		}
	}
	return list
}

// lowerRank writes the programs of a rank.
func (p *Programs) lowerRank(rank int, set *kernels.Set) error {
	r := p.Pipe.Ranks[rank]
	for k, s := range p.Pipe.Stages {
		if s.Rank != rank {
			continue
		}
		var err error
		s.Programs, err = s.Graphs.Lower(fmt.Sprintf("stage%d", k), r.Devices, p.Pipe.Split(), set)
		if err != nil {
			return err
		}
		flags := flags(set, s.Sharding, p.Pipe.plan)
		for _, one := range s.Programs.List() {
			one.Flags = flags
		}
	}
	for _, one := range []struct {
		graph *ir.Graph
		into  **program.Stage
	}{
		{r.Part.Zero, &r.Zero}, {r.Part.Reduce, &r.Reduce}, {r.Part.Square, &r.Square},
		{r.Part.Update, &r.Update}, {r.Part.Quantize, &r.Quantize},
	} {
		if one.graph == nil {
			continue
		}
		s, err := lower.Stage(fmt.Sprintf("rank%d.%s", rank, one.graph.Name), one.graph,
			lower.Options{Kernels: set})
		if err != nil {
			return err
		}
		s.Devices = r.Devices
		*one.into = s
	}
	p.exact(set, p.Pipe.Programs(rank))
	return nil
}
