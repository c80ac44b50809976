package pipeline

import (
	"slices"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
)

// A rank is what is known of a rank before any step.
type rank struct {
	config *Config
	*Rank
	steps  []schedule.Step
	stages map[int]*stage // by number
}

// A stage is a Stage with its number and what follows from its programs.
type stage struct {
	*Stage
	number int
	// joint says of each microbatch whether the schedule runs Backward, not Dgrad and Wgrad.
	joint []bool
	// Names of the arrays that a microbatch keeps: after Forward for Backward, after Forward for Dgrad
	// and Wgrad, and after Dgrad for Wgrad.
	afterJoint, afterSplit, afterDgrad map[string]bool
}

// newRank checks a rank's programs and links against its steps.
func newRank(c *Config, spec *Rank, steps []schedule.Step) (*rank, error) {
	r := &rank{config: c, Rank: spec, steps: steps, stages: map[int]*stage{}}
	if len(spec.Stages) != c.Schedule.Virtual {
		return nil, misfit("rank %d has %d stages; the schedule has %d on each rank", spec.Number,
			len(spec.Stages), c.Schedule.Virtual)
	}
	if spec.State == nil {
		return nil, misfit("rank %d has no state", spec.Number)
	}
	for at, number := range c.Schedule.Of(spec.Number) {
		r.stages[number] = newStage(spec.Stages[at], number, c.Schedule.Micros)
	}
	for _, step := range steps {
		if err := r.check(step); err != nil {
			return nil, err
		}
	}
	for _, s := range r.stages {
		if err := r.checkStage(s); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// newStage derives from the programs' arguments what microbatches must keep.
func newStage(spec *Stage, number, microbatches int) *stage {
	return &stage{Stage: spec, number: number, joint: make([]bool, microbatches),
		afterJoint: arguments(spec.Backward), afterSplit: arguments(spec.Dgrad, spec.Wgrad),
		afterDgrad: arguments(spec.Wgrad)}
}

// arguments is the set of names that programs take.
func arguments(programs ...*engine.Executable) map[string]bool {
	names := map[string]bool{}
	for _, x := range programs {
		if x == nil {
			continue
		}
		for _, a := range x.Module().Args {
			names[a.Name] = true
		}
	}
	return names
}

// needed returns the names that a microbatch must keep after an action.
func (s *stage) needed(k schedule.Kind, microbatch int) map[string]bool {
	switch {
	case k == schedule.Forward && s.joint[microbatch]:
		return s.afterJoint
	case k == schedule.Forward:
		return s.afterSplit
	case k == schedule.Input:
		return s.afterDgrad
	}
	return nil
}

// check reports a step without a program or link.
func (r *rank) check(step schedule.Step) error {
	a := step.Action
	if step.Op != schedule.Compute {
		if r.Links[step.Peer] == nil {
			return misfit("rank %d has no link to rank %d", r.Number, step.Peer).At("%s", step)
		}
		return nil
	}
	s := r.stages[a.Stage]
	if _, ok := s.program(a.Kind); !ok {
		return misfit("stage %d has no program for %s", a.Stage, a).
			Try("compile all kinds of program that the schedule has")
	}
	if a.Kind == schedule.Backward {
		s.joint[a.Microbatch] = true
	}
	return nil
}

// checkStage checks a stage's names against its programs and its neighbours in this process.
func (r *rank) checkStage(s *stage) error {
	bad := func(format string, args ...any) error {
		return misfit(format, args...).At("stage %d", s.number)
	}
	last := s.number == r.config.Schedule.Stages()-1
	switch {
	case s.number == 0 && len(s.Inputs) > 0:
		return bad("the first stage has inputs of a stage before")
	case last && len(s.Outputs) > 0:
		return bad("the last stage has outputs for a stage after")
	case len(s.OutputGrads) != len(s.Outputs) || len(s.Gradients) != len(s.Inputs):
		return bad("%d outputs have %d gradients, and %d inputs %d", len(s.Outputs), len(s.OutputGrads),
			len(s.Inputs), len(s.Gradients))
	}
	devices := s.Forward.Module().Devices
	for _, x := range s.programs() {
		if !slices.Equal(x.Module().Devices, devices) {
			return bad("the programs are on devices %s and %s", devices, x.Module().Devices)
		}
	}
	for _, name := range slices.Concat(s.Inputs, s.OutputGrads) {
		if name == "" {
			continue
		}
		if _, _, ok := s.argument(name); !ok {
			return bad("no program takes %q", name)
		}
	}
	for _, name := range slices.Concat(s.Outputs, s.Results) {
		if _, ok := result(s.Forward, name); !ok {
			return bad("the forward program does not give %q", name)
		}
	}
	for _, name := range s.Gradients {
		if name == "" {
			continue
		}
		if s.Dgrad == nil && slices.Contains(s.joint, false) {
			return bad("there is no program that gives %q before the gradients of the weights", name)
		}
		for _, x := range []*engine.Executable{s.Backward, s.Dgrad} {
			if _, ok := result(x, name); x != nil && !ok {
				return bad("%s does not give %q", x.Module().Name, name)
			}
		}
	}
	return r.checkNext(s, bad)
}

// checkNext checks what a stage sends against what the next one takes, if both are in this process.
func (r *rank) checkNext(s *stage, bad func(string, ...any) error) error {
	next := r.config.stage(s.number + 1)
	if next == nil {
		return nil
	}
	if len(next.Inputs) != len(s.Outputs) {
		return bad("%d outputs are sent to a stage with %d inputs", len(s.Outputs), len(next.Inputs))
	}
	for i, name := range s.Outputs {
		from, _ := result(s.Forward, name)
		fromShape, err := s.Forward.Module().Local(from)
		if err != nil {
			return err
		}
		into, to, ok := next.argument(next.Inputs[i])
		if !ok {
			return bad("no program of the next stage takes %q", next.Inputs[i])
		}
		toShape, err := into.Local(to)
		if err != nil {
			return err
		}
		if !fromShape.Equal(toShape) {
			return bad("%s is sent as %s; the next stage takes %s as %s", name, fromShape,
				next.Inputs[i], toShape)
		}
		if (s.OutputGrads[i] == "") != (next.Gradients[i] == "") {
			return bad("%s has a gradient on one side only", name)
		}
	}
	return nil
}

// stage returns a virtual stage that this process hosts, or nil.
func (c *Config) stage(number int) *Stage {
	if number >= c.Schedule.Stages() {
		return nil
	}
	home := c.Schedule.Rank(number)
	for i := range c.Ranks {
		r, at := &c.Ranks[i], slices.Index(c.Schedule.Of(home), number)
		if r.Number == home && at < len(r.Stages) {
			return r.Stages[at]
		}
	}
	return nil
}

// argument finds a program of the stage that takes a name.
func (s *Stage) argument(name string) (*program.Module, program.Array, bool) {
	for _, x := range s.programs() {
		for _, a := range x.Module().Args {
			if a.Name == name {
				return x.Module(), a, true
			}
		}
	}
	return nil, program.Array{}, false
}

// result finds a program's result by name.
func result(x *engine.Executable, name string) (program.Array, bool) {
	if x == nil {
		return program.Array{}, false
	}
	i := slices.IndexFunc(x.Module().Results, func(a program.Array) bool { return a.Name == name })
	if i < 0 {
		return program.Array{}, false
	}
	return x.Module().Results[i], true
}

// sent names the results of an action that go to another stage.
func (s *stage) sent(k schedule.Kind) []string {
	switch k {
	case schedule.Forward:
		return s.Outputs
	case schedule.Backward, schedule.Input:
		return s.Gradients
	case schedule.Weight:
	}
	return nil
}

// receiver returns the stage of this rank that takes an action's results, and the names of the
// arguments there; nil if it is on another rank.
func (r *rank) receiver(a schedule.Action) (*stage, []string) {
	next, before := r.stages[a.Stage+1], r.stages[a.Stage-1]
	switch {
	case a.Kind == schedule.Forward && next != nil:
		return next, next.Inputs
	case a.Kind != schedule.Forward && a.Kind != schedule.Weight && before != nil:
		return before, before.OutputGrads
	}
	return nil, nil
}
