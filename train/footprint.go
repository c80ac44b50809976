package train

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
	"github.com/deepwell/deepwell/spmd"
)

// A Footprint is what one device of a rank holds at the worst moment of a step, by cause.
type Footprint struct {
	Rank      int    `json:"rank"`                // of the pipeline
	State     int64  `json:"state"`               // masters and what the optimizer keeps
	Copies    int64  `json:"copies"`              // that the model computes with
	Grads     int64  `json:"grads"`               // kept between programs
	Residuals int64  `json:"residuals,omitempty"` // of microbatches in flight, from the schedule
	Program   int64  `json:"program"`             // temp + outputs − aliased of what runs then
	Largest   string `json:"largest"`             // which one
	Capacity  int64  `json:"capacity"`            // of the card; 0 if it is not known
}

// Total is the sum of all causes.
func (f *Footprint) Total() int64 { return f.State + f.Copies + f.Grads + f.Residuals + f.Program }

// causes lists what there is.
func (f *Footprint) causes() string {
	list := []string{"state " + event.Size(f.State), "copies " + event.Size(f.Copies),
		"gradients " + event.Size(f.Grads)}
	if f.Residuals > 0 {
		list = append(list, "residuals "+event.Size(f.Residuals))
	}
	return strings.Join(append(list, f.Largest+" "+event.Size(f.Program)), " · ")
}

// String writes the footprint for people.
func (f *Footprint) String() string {
	verdict := ""
	if f.Capacity > 0 {
		verdict = fmt.Sprintf(" of %s   fits", event.Size(f.Capacity))
		if f.Fits() != nil {
			verdict = fmt.Sprintf(" of %s   does not fit", event.Size(f.Capacity))
		}
	}
	return fmt.Sprintf("rank %-6d %s%s\n            %s\n", f.Rank, event.Size(f.Total()), verdict,
		f.causes())
}

// Fits reports whether a device can hold the step.
func (f *Footprint) Fits() error {
	if f.Capacity == 0 || f.Total() <= f.Capacity {
		return nil
	}
	return diag.New(diag.TooLarge, "a step needs %s on each device of rank %d, which has %s",
		event.Size(f.Total()), f.Rank, event.Size(f.Capacity)).Because("%s", f.causes()).
		Try("more devices along fsdp or tp, more microbatches, or recompute")
}

// Needs is what a compiled program needs on one device beside its arguments.
type Needs struct{ Temp, Output, Alias int64 }

// added is what a program adds while it runs.
func (n Needs) added() int64 { return n.Temp + n.Output - n.Alias }

// Footprints adds up what each rank holds on one of its devices; needs tells what the compiler said
// of a program. Without a pipeline there is one rank.
func (p *Programs) Footprints(needs func(*program.Stage) Needs) ([]*Footprint, error) {
	if p.Pipe == nil {
		list := []*program.Stage{p.Gradient, p.Accumulate, p.Update}
		list = slices.DeleteFunc(list, func(s *program.Stage) bool { return s == nil })
		f := &Footprint{}
		if _, err := f.resident(list); err != nil {
			return nil, err
		}
		for _, s := range list {
			n := needs(s)
			if s == p.Gradient { // the gradients that it gives are counted with those that are kept
				n.Output = max(n.Alias, n.Output-f.Grads)
			}
			f.worst(s, 0, n)
		}
		return []*Footprint{f}, nil
	}
	var all []*Footprint
	for rank := range p.Pipe.Ranks {
		f, err := p.Pipe.footprint(rank, needs)
		if err != nil {
			return nil, err
		}
		all = append(all, f)
	}
	return all, nil
}

// resident counts what programs find on the device from step to step, by the names of their
// arguments, and returns these names.
func (f *Footprint) resident(list []*program.Stage) (map[string]bool, error) {
	seen := map[string]bool{}
	for _, s := range list {
		for _, a := range s.Args {
			local, err := s.Local(a)
			if err != nil {
				return nil, err
			}
			if seen[a.Name] {
				continue
			}
			switch {
			case strings.HasPrefix(a.Name, spmd.GradientOf("")):
				f.Grads += local.Bytes()
			case strings.HasPrefix(a.Name, spmd.CopyOf("")):
				f.Copies += local.Bytes()
			case a.Into != "":
				f.State += local.Bytes()
			default:
				continue
			}
			seen[a.Name] = true
		}
	}
	return seen, nil
}

// worst keeps the moment at which residuals and a program need most.
func (f *Footprint) worst(s *program.Stage, residuals int64, n Needs) {
	if residuals+n.added() > f.Residuals+f.Program || f.Largest == "" {
		f.Residuals, f.Program, f.Largest = residuals, n.added(), s.Name
	}
}

// footprint goes through the list of a rank and finds the moment at which it holds most.
func (p *Pipe) footprint(rank int, needs func(*program.Stage) Needs) (*Footprint, error) {
	f := &Footprint{Rank: rank}
	kept, err := f.resident(p.Programs(rank))
	if err != nil {
		return nil, err
	}
	r := p.Ranks[rank]
	for _, s := range []*program.Stage{r.Reduce, r.Square, r.Update} {
		f.worst(s, 0, needs(s))
	}
	held := int64(0)
	holds := map[int]*holds{}
	for _, a := range p.Schedule.Lists[rank] {
		s := p.Stages[a.Stage]
		if holds[a.Stage] == nil {
			if holds[a.Stage], err = s.holds(kept); err != nil {
				return nil, err
			}
		}
		h := holds[a.Stage]
		switch a.Kind {
		case schedule.Forward:
			f.worst(s.Programs.Forward, held+h.taken, needs(s.Programs.Forward))
			held += h.forward
		case schedule.Backward:
			f.worst(s.Programs.Backward, held+h.seeds, needs(s.Programs.Backward))
			held -= h.forward
		case schedule.Input:
			if s.Programs.Input != nil {
				f.worst(s.Programs.Input, held+h.seeds, needs(s.Programs.Input))
			}
			held += h.input - h.forward
		case schedule.Weight:
			f.worst(s.Programs.Weight, held, needs(s.Programs.Weight))
			held -= h.input
		}
	}
	return f, nil
}

// A holds is what one microbatch keeps on a device of a stage, in bytes.
type holds struct {
	taken   int64 // for the forward: what the stage before sent, and data
	forward int64 // from the forward to the gradient of the input
	input   int64 // from there to the gradient of the weights
	seeds   int64 // what the stage after sends
}

// holds adds up the arguments of a stage's programs that belong to one microbatch.
func (s *PipeStage) holds(kept map[string]bool) (*holds, error) {
	sum := func(list []*program.Stage, seeds bool) (int64, error) {
		total, seen := int64(0), map[string]bool{}
		for _, one := range list {
			if one == nil {
				continue
			}
			for _, a := range one.Args {
				if seen[a.Name] || kept[a.Name] || s.shares(a.Name) ||
					slices.Contains(s.Graphs.Seeds, a.Name) != seeds {
					continue
				}
				seen[a.Name] = true
				local, err := one.Local(a)
				if err != nil {
					return 0, err
				}
				total += local.Bytes()
			}
		}
		return total, nil
	}
	h, t := &holds{}, s.Programs
	early := t.Weight // as far as it takes what is there before the gradient of the input
	if t.Input != nil && t.Weight != nil {
		part := *t.Weight
		part.Args = slices.DeleteFunc(slices.Clone(part.Args), func(a program.Array) bool {
			return slices.ContainsFunc(t.Input.Results, func(b program.Array) bool {
				return a.Name == b.Name
			})
		})
		early = &part
	}
	for _, x := range []struct {
		into  *int64
		list  []*program.Stage
		seeds bool
	}{
		{&h.taken, []*program.Stage{t.Forward}, false},
		{&h.forward, []*program.Stage{t.Backward, t.Input, early}, false},
		{&h.input, []*program.Stage{t.Weight}, false},
		{&h.seeds, []*program.Stage{t.Backward, t.Input}, true},
	} {
		var err error
		if *x.into, err = sum(x.list, x.seeds); err != nil {
			return nil, err
		}
	}
	return h, nil
}

// shares tells what all microbatches of a stage take alike: parameters, and the gradient of the
// loss by itself.
func (s *PipeStage) shares(name string) bool {
	return slices.Contains(s.Graphs.Ones, name) ||
		slices.ContainsFunc(s.Sharding.Params, func(l spmd.Layout) bool { return l.Name == name })
}
