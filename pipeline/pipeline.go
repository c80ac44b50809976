package pipeline

import (
	"cmp"
	"context"
	"slices"
	"sync"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
)

// A Stage is the programs of one virtual stage, on the devices of its rank. The schedule decides
// which are needed: Forward, and Backward or its two halves, Dgrad and Wgrad ([schedule.Input]
// and [schedule.Weight]).
type Stage struct {
	Forward  *engine.Executable
	Backward *engine.Executable
	// Dgrad computes the gradients of the stage's inputs. It is nil in a stage whose inputs have none:
	// then Wgrad has nothing to wait for.
	Dgrad *engine.Executable
	Wgrad *engine.Executable

	// Inputs names the arguments that the stage before sends, in the order of its Outputs.
	Inputs []string
	// Outputs names the results of Forward that go to the stage after.
	Outputs []string
	// OutputGrads names, for each output, the argument that takes its gradient from the stage
	// after; "" if the output has no gradient.
	OutputGrads []string
	// Gradients names, for each input, the result of Backward or Dgrad that is sent to the stage
	// before; "" if the input has no gradient.
	Gradients []string
	// Results names the results of Forward that the caller gets, such as the loss. Statistics
	// ([program.Stat]) of all programs go to the caller as well.
	Results []string
}

// program returns what runs an action, and whether the stage supports it at all.
func (s *Stage) program(k schedule.Kind) (x *engine.Executable, ok bool) {
	switch k {
	case schedule.Forward:
		return s.Forward, s.Forward != nil
	case schedule.Backward:
		return s.Backward, s.Backward != nil
	case schedule.Input:
		return s.Dgrad, s.Wgrad != nil
	case schedule.Weight:
		return s.Wgrad, s.Wgrad != nil
	}
	return nil, false
}

// programs lists the stage's programs.
func (s *Stage) programs() []*engine.Executable {
	all := []*engine.Executable{s.Forward, s.Backward, s.Dgrad, s.Wgrad}
	return slices.DeleteFunc(all, func(x *engine.Executable) bool { return x == nil })
}

// Free releases the programs.
func (s *Stage) Free() {
	for _, x := range s.programs() {
		x.Free()
	}
}

// A Rank is one rank of the pipeline that this process hosts.
type Rank struct {
	Number int
	// Stages are the rank's virtual stages, in the order of the model.
	Stages []*Stage
	// State has what all microbatches share: parameters, accumulators, seeds of losses. Gradient
	// accumulators must be there when a step begins; the step adds to them.
	State *engine.State
	// Links has one end of a link to each other rank with which the schedule exchanges arrays.
	Links map[int]engine.Link
}

// A Config is one process's part of a pipeline.
type Config struct {
	Schedule *schedule.Schedule
	// Ranks are the ranks that this process hosts.
	Ranks []Rank
	// Costs are the predicted times of actions, which decide the order of receives
	// ([schedule.Schedule.Steps]). The zero value takes all actions as equally long.
	Costs schedule.Costs
	// Capacity is the number of packets that may be queued from one rank to another; 0 means 4. It
	// must be the same in all processes. Rendezvous links have no queue.
	Capacity int
	// Ahead is the number of actions that a rank may have queued on its devices; 0 means 3, negative
	// none. More hide more host work, but each holds its memory until the devices get there.
	Ahead int
}

const (
	// defaultCapacity lets a rank be some actions late without making others wait.
	defaultCapacity = 4
	// defaultAhead keeps a device busy while the host prepares the next action, and one more.
	defaultAhead = 3
)

// Data places an argument that is neither received nor in the state: ids, labels, positions. It is
// called once per name, stage and microbatch, from the goroutine of the stage's rank, so several
// calls may run at once. The pipeline frees the array.
type Data func(ctx context.Context, stage, microbatch int, m *program.Module,
	spec program.Array) (*engine.Array, error)

// A Pipeline runs steps, one at a time: Run must not be called concurrently.
type Pipeline struct {
	config Config
	ranks  []*rank
	step   int
}

// New checks that programs, links and schedule fit together.
func New(c Config) (*Pipeline, error) {
	c.Capacity, c.Ahead = cmp.Or(c.Capacity, defaultCapacity), cmp.Or(c.Ahead, defaultAhead)
	// Without costs all actions are equally long; the time of a transfer keeps its value.
	if len(c.Costs.Forward) == 0 {
		send := c.Costs.Send
		c.Costs = schedule.Even(1, 1, 1)
		c.Costs.Send = send
	}
	if err := c.Schedule.Validate(); err != nil {
		return nil, err
	}
	rendezvous, links := 0, 0
	for _, r := range c.Ranks {
		for _, l := range r.Links {
			links++
			if l.Rendezvous() {
				rendezvous++
			}
		}
	}
	switch {
	case rendezvous > 0 && rendezvous < links:
		return nil, misfit("some links are rendezvous links and some are not").
			Try("use rendezvous links between all ranks, or between none")
	case rendezvous > 0:
		c.Capacity = 0
	}
	// All processes compute the same steps from the same schedule, costs and capacity: sends and
	// receives of two ranks match without any negotiation.
	steps, err := c.Schedule.Steps(c.Costs, c.Capacity)
	if err != nil {
		return nil, err
	}
	p := &Pipeline{config: c}
	hosted := map[int]bool{}
	// A process hosts any subset of the ranks, each once.
	for i := range c.Ranks {
		n := c.Ranks[i].Number
		if n < 0 || n >= c.Schedule.Ranks || hosted[n] {
			return nil, misfit("rank %d stands twice, or is not one of %d", n, c.Schedule.Ranks)
		}
		hosted[n] = true
		r, err := newRank(&p.config, &c.Ranks[i], steps[n])
		if err != nil {
			return nil, err
		}
		p.ranks = append(p.ranks, r)
	}
	return p, nil
}

// misfit is the error of stages, links or programs that contradict the schedule.
func misfit(format string, args ...any) *diag.Error {
	return diag.New(diag.PipelineStage, format, args...)
}

// A Result is an array that a stage gives to the caller, who frees it.
type Result struct {
	Stage, Microbatch int
	Program           string // the name of the module that gave it
	Spec              program.Array
	Array             *engine.Array
}

// A Usage is the peak of what a virtual stage keeps for microbatches between their actions.
type Usage struct {
	Stage        int
	Bytes        int64 // on one device
	Microbatches int
}

// An Outcome is what a step gave.
type Outcome struct {
	// Results are sorted by stage, microbatch and position in the stage's list.
	Results []Result
	// Usage has an entry for each virtual stage of this process, by number.
	Usage []Usage
	// HighWater is, for each rank of the process in the order of the config, the peak bytes of all its
	// stages together, on one device.
	HighWater []int64
}

// Free frees the results.
func (o *Outcome) Free() {
	for _, r := range o.Results {
		r.Array.Free()
	}
}

// Run runs one step: all microbatches through all stages of this process. It returns when the
// devices are done. After an error the links are in an unknown state and must be made anew, and
// accumulators have some of the gradients.
func (p *Pipeline) Run(ctx context.Context, data Data) (*Outcome, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	step := p.step
	p.step++
	var wg sync.WaitGroup
	runs := lists.Map(p.ranks, func(r *rank) *run { return r.start(ctx, cancel, &wg, step, data) })
	for _, r := range runs {
		wg.Go(func() {
			if err := r.all(); err != nil {
				cancel(err)
			}
			r.done()
		})
	}
	// All goroutines end before anything is freed, also after an error: cancel stops the others.
	wg.Wait()
	out := &Outcome{}
	for _, r := range runs {
		r.free()
		out.Results = append(out.Results, r.results...)
		out.Usage = append(out.Usage, r.ledger.usage()...)
		out.HighWater = append(out.HighWater, r.ledger.most)
	}
	if ctx.Err() != nil {
		out.Free()
		return nil, failure(ctx)
	}
	// The order does not depend on which rank was faster.
	lists.Sort(out.Results, func(a, b Result) int {
		return cmp.Or(cmp.Compare(a.Stage, b.Stage), cmp.Compare(a.Microbatch, b.Microbatch))
	})
	lists.Sort(out.Usage, func(a, b Usage) int { return cmp.Compare(a.Stage, b.Stage) })
	return out, nil
}

// failure returns the first error; errors that follow from it are left out.
func failure(ctx context.Context) error {
	err := context.Cause(ctx)
	if err == ctx.Err() { //nolint:errorlint // the caller's context ended: it gave no cause
		return diag.New(diag.Canceled, "the pipeline was stopped").Wrap(err)
	}
	return err
}
