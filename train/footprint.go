package train

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
)

// A Footprint is what one device of a rank holds at the worst moment of a step, by cause; Host is
// the worst moment of the host.
type Footprint struct {
	Rank int `json:"rank"` // of the pipeline
	program.Memory
	Largest  string `json:"largest"`  // the program that runs then
	Capacity int64  `json:"capacity"` // of the card; 0 if it is not known

	hosted int64 // the part of Host that stays from step to step
}

// causes lists what there is.
func (f *Footprint) causes() string {
	var list []string
	for _, c := range f.Causes() {
		list = append(list, c.Name+" "+event.Size(c.Bytes))
	}
	return strings.Join(list, " · ") + " in " + f.Largest
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
	return fmt.Sprintf("rank %-6d %s%s\n            %s%s\n", f.Rank, event.Size(f.Sum()), verdict,
		f.causes(), host)
}

// Fits reports whether a device can hold the step.
func (f *Footprint) Fits() error {
	if f.Capacity == 0 || f.Sum() <= f.Capacity {
		return nil
	}
	return diag.New(diag.TooLarge, "a step needs %s on each device of rank %d, which has %s",
		event.Size(f.Sum()), f.Rank, event.Size(f.Capacity)).Because("%s", f.causes()).
		Try("more devices along fsdp or tp, more microbatches, or recompute")
}

// Needs is what a compiled program needs on one device beside its arguments, and on the host with
// those that lie there.
type Needs struct{ Temp, Output, Alias, Host int64 }

// Footprints adds up what each rank holds on one of its devices; needs tells what the compiler said
// of a program. Without a pipeline there is one rank.
func (p *Programs) Footprints(needs func(*program.Stage) Needs) ([]*Footprint, error) {
	if p.Pipe == nil {
		f, err := p.footprint(needs)
		return []*Footprint{f}, err
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

// footprint is that of programs without stages.
func (p *Programs) footprint(needs func(*program.Stage) Needs) (*Footprint, error) {
	list := []*program.Stage{p.Gradient, p.Accumulate, p.Update}
	list = slices.DeleteFunc(list, func(s *program.Stage) bool { return s == nil })
	f := &Footprint{}
	if err := f.resident(list, takenBy(p.Gradient)); err != nil {
		return nil, err
	}
	residuals := residualsOf(p.Step.Gradient)
	for _, s := range list {
		n := needs(s)
		var held amount
		if s == p.Gradient { // the gradients that it gives are counted with those that are kept
			n.Output = max(n.Alias, n.Output-f.Grads)
		}
		if s != p.Update { // loss and gradients are one program, in whose temp the residuals are
			held = amount{min(n.Temp, residuals.device), residuals.host}
			n.Temp -= held.device
			n.Host = max(0, n.Host-held.host)
		}
		f.worst(s, held, n)
	}
	return f, nil
}

// residualsOf adds up what a graph of loss and gradients computes up to the loss and takes after
// it, beside what it makes of parameters alone, which are gathered ones.
func residualsOf(g *ir.Graph) (n amount) {
	loss := slices.Index(g.Ops, g.Results[0].Def())
	before := map[*ir.Value]bool{} // what depends on data
	for _, v := range g.Inputs {
		before[v] = v.Role == ir.Data
	}
	for _, op := range g.Ops[:loss+1] {
		some := slices.ContainsFunc(op.In, func(v *ir.Value) bool { return before[v] })
		for _, v := range op.Out {
			before[v] = some
		}
	}
	for _, v := range g.Inputs {
		delete(before, v)
	}
	hosted := g.Hosted()
	for _, op := range g.Ops[loss+1:] {
		for _, v := range op.In {
			switch {
			case !before[v]:
			case hosted[v]:
				n.host += v.Type.Shape().Bytes()
			default:
				n.device += v.Type.Shape().Bytes()
			}
			delete(before, v)
		}
	}
	return n
}

// takenBy tells which arguments programs take.
func takenBy(list ...*program.Stage) map[string]bool {
	taken := map[string]bool{}
	for _, s := range list {
		for _, a := range s.Args {
			taken[a.Name] = true
		}
	}
	return taken
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

// resident counts what programs find there from step to step. Computes are the arguments of those
// that compute with the model.
func (f *Footprint) resident(list []*program.Stage, computes map[string]bool) error {
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
				f.Params += n.device
			case program.Param, program.Moment:
				if computes[a.Name] {
					f.Params += n.device
				} else {
					f.Optimizer += n.device
				}
			default:
				continue
			}
			f.hosted += n.host
			seen[a.Name] = true
		}
	}
	return nil
}

// worst keeps the moments at which activations and a program need most on the device and on the
// host. Results of a program are activations, but for those of the update.
func (f *Footprint) worst(s *program.Stage, held amount, n Needs) {
	temp := n.Temp
	if given := n.Output - n.Alias; held == (amount{}) {
		temp += given
	} else {
		held.device += given
	}
	if held.device+temp > f.Activations+f.Temp || f.Largest == "" {
		f.Activations, f.Temp, f.Largest = held.device, temp, s.Name
	}
	var taken amount
	for _, a := range s.Args {
		if a.Memory != "" {
			_ = taken.add(s, a) // resident has been through the same
		}
	}
	f.Host = max(f.Host, f.hosted+held.host+max(0, n.Host-taken.host))
}

// footprint goes through the list of a rank and finds the moment at which it holds most.
func (p *Pipe) footprint(rank int, needs func(*program.Stage) Needs) (*Footprint, error) {
	f := &Footprint{Rank: rank}
	var computes []*program.Stage
	for _, k := range p.Schedule.Of(rank) {
		computes = append(computes, p.Stages[k].Programs.List()...)
	}
	if err := f.resident(p.Programs(rank), takenBy(computes...)); err != nil {
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
		a := p.Schedule.Lists[rank][place]
		t := p.Stages[a.Stage].Programs
		one := [...]*program.Stage{schedule.Forward: t.Forward, schedule.Backward: t.Backward,
			schedule.Input: t.Input, schedule.Weight: t.Weight}[a.Kind]
		if one == nil {
			continue
		}
		held := turns[a.Stage/p.Schedule.Ranks].passing(a.Kind)
		for turn, h := range turns {
			held = held.plus(h.forward, micros.Forward[turn]).plus(h.input, micros.Input[turn])
		}
		f.worst(one, held, needs(one))
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

// passing is what comes in for an action and is not held by its microbatch.
func (h *holds) passing(k schedule.Kind) amount {
	switch k {
	case schedule.Forward:
		return h.taken
	case schedule.Backward, schedule.Input:
		return h.seeds
	}
	return amount{}
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
