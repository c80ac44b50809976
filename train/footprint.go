package train

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
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
	Host      int64  `json:"host,omitempty"`      // in the memory of the host, at its worst moment

	hosted int64 // the part of Host that stays from step to step
}

// Total is the sum of all causes on the device.
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
	host := ""
	if f.Host > 0 {
		host = "\n            on the host " + event.Size(f.Host)
	}
	return fmt.Sprintf("rank %-6d %s%s\n            %s%s\n", f.Rank, event.Size(f.Total()), verdict,
		f.causes(), host)
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

// Needs is what a compiled program needs on one device beside its arguments, and on the host with
// those that lie there.
type Needs struct{ Temp, Output, Alias, Host int64 }

// added is what a program adds while it runs.
func (n Needs) added() int64 { return n.Temp + n.Output - n.Alias }

// Footprints adds up what each rank holds on one of its devices; needs tells what the compiler said
// of a program. Without a pipeline there is one rank.
func (p *Programs) Footprints(needs func(*program.Stage) Needs) ([]*Footprint, error) {
	if p.Pipe == nil {
		list := []*program.Stage{p.Gradient, p.Accumulate, p.Update}
		list = slices.DeleteFunc(list, func(s *program.Stage) bool { return s == nil })
		f := &Footprint{}
		if err := f.resident(list); err != nil {
			return nil, err
		}
		for _, s := range list {
			n := needs(s)
			if s == p.Gradient { // the gradients that it gives are counted with those that are kept
				n.Output = max(n.Alias, n.Output-f.Grads)
			}
			f.worst(s, amount{}, n)
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

// An amount is bytes of one device's part, in its own memory and on the host.
type amount struct{ device, host int64 }

// add counts a piece of an array.
func (n *amount) add(s *program.Stage, a program.Array) error {
	local, err := s.Local(a)
	switch {
	case err != nil:
		return err
	case a.Memory != "":
		n.host += local.Bytes()
	default:
		n.device += local.Bytes()
	}
	return nil
}

// resident counts what programs find there from step to step.
func (f *Footprint) resident(list []*program.Stage) error {
	seen := map[string]bool{}
	for _, s := range list {
		for _, a := range s.Args {
			if seen[a.Name] {
				continue
			}
			var n amount
			if err := n.add(s, a); err != nil {
				return err
			}
			switch a.Role {
			case program.Gradient:
				f.Grads += n.device
			case program.Copy:
				f.Copies += n.device
			case program.Param, program.Moment:
				f.State += n.device
			default:
				continue
			}
			f.hosted += n.host
			seen[a.Name] = true
		}
	}
	return nil
}

// worst keeps the moments at which residuals and a program need most on the device and on the host.
func (f *Footprint) worst(s *program.Stage, residuals amount, n Needs) {
	if residuals.device+n.added() > f.Residuals+f.Program || f.Largest == "" {
		f.Residuals, f.Program, f.Largest = residuals.device, n.added(), s.Name
	}
	var taken amount
	for _, a := range s.Args {
		if a.Memory != "" {
			_ = taken.add(s, a) // resident has been through the same
		}
	}
	f.Host = max(f.Host, f.hosted+residuals.host+max(0, n.Host-taken.host))
}

// footprint goes through the list of a rank and finds the moment at which it holds most.
func (p *Pipe) footprint(rank int, needs func(*program.Stage) Needs) (*Footprint, error) {
	f := &Footprint{Rank: rank}
	if err := f.resident(p.Programs(rank)); err != nil {
		return nil, err
	}
	r := p.Ranks[rank]
	var others amount // gradients of what is shared, from the other rank
	for _, a := range r.Square.Args {
		if a.Role == program.PeerGradient {
			if err := others.add(r.Square, a); err != nil {
				return nil, err
			}
		}
	}
	f.worst(r.Reduce, amount{}, needs(r.Reduce))
	f.worst(r.Square, others, needs(r.Square))
	f.worst(r.Update, amount{}, needs(r.Update))
	turns := make([]*holds, p.Schedule.Virtual)
	for turn := range turns {
		var err error
		if turns[turn], err = p.Stages[p.Schedule.Stage(rank, turn)].holds(); err != nil {
			return nil, err
		}
	}
	for place, micros := range p.Schedule.InFlight(rank) {
		var held amount
		for turn, h := range turns {
			held = held.plus(h.forward, micros.Forward[turn]).plus(h.input, micros.Input[turn])
		}
		a := p.Schedule.Lists[rank][place]
		s, h := p.Stages[a.Stage].Programs, turns[a.Stage/p.Schedule.Ranks]
		switch a.Kind {
		case schedule.Forward:
			f.worst(s.Forward, held.plus(h.taken, 1), needs(s.Forward))
		case schedule.Backward:
			f.worst(s.Backward, held.plus(h.seeds, 1), needs(s.Backward))
		case schedule.Input:
			if s.Input != nil {
				f.worst(s.Input, held.plus(h.seeds, 1), needs(s.Input))
			}
		case schedule.Weight:
			f.worst(s.Weight, held, needs(s.Weight))
		}
	}
	return f, nil
}

// A holds is what one microbatch keeps on a device of a stage, in bytes.
type holds struct {
	taken   amount // for the forward: what the stage before sent, and data
	forward amount // from the forward to the gradient of the input
	input   amount // from there to the gradient of the weights
	seeds   amount // what the stage after sends
}

// plus adds an amount so many times.
func (n amount) plus(m amount, times int) amount {
	return amount{n.device + int64(times)*m.device, n.host + int64(times)*m.host}
}

// holds adds up the arguments of a stage's programs that belong to one microbatch.
func (s *PipeStage) holds() (*holds, error) {
	sum := func(list []*program.Stage, seeds bool) (total amount, err error) {
		seen := map[string]bool{}
		for _, one := range list {
			if one == nil {
				continue
			}
			for _, a := range one.Args {
				if seen[a.Name] || !ofMicrobatch(a.Role) || (a.Role == program.Seed) != seeds {
					continue
				}
				seen[a.Name] = true
				if err := total.add(one, a); err != nil {
					return total, err
				}
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
		into  *amount
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

// ofMicrobatch tells what each microbatch has of its own.
func ofMicrobatch(role program.Role) bool {
	switch role {
	case program.Batch, program.Activation, program.Seed, program.Residual:
		return true
	}
	return false
}
