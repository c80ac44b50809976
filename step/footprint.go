package step

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
)

// A Footprint is what one device of a rank holds at the peak of a step, by cause. Host is the peak
// of offloaded bytes.
type Footprint struct {
	Rank int `json:"rank"` // of the pipeline
	program.Memory
	Largest  string `json:"largest"`  // the program that runs at the peak
	Capacity int64  `json:"capacity"` // bytes of a device; 0 if it is not known

	Hosted int64 `json:"-"` // the part of Host that stays from step to step
}

// causes lists the causes that are not zero.
func (f *Footprint) causes() string {
	list := lists.Map(f.Causes(), func(c program.Cause) string {
		return c.Name + " " + event.Size(c.Bytes)
	})
	return strings.Join(list, " · ") + " in " + f.Largest
}

// String prints the footprint for people.
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

// Fits returns an error if the step needs more than a device has.
func (f *Footprint) Fits() error {
	if f.Capacity == 0 || f.Sum() <= f.Capacity {
		return nil
	}
	return diag.New(diag.TooLarge, "a step needs %s on each device of rank %d, which has %s",
		event.Size(f.Sum()), f.Rank, event.Size(f.Capacity)).Because("%s", f.causes()).
		Try("more devices along fsdp or tp, more microbatches, or recompute")
}

// Needs is what a compiled program needs on one device beside its arguments, in bytes: temporary
// buffers, outputs, outputs that alias arguments, and host memory including offloaded arguments.
type Needs struct{ Temp, Output, Alias, Host int64 }

// Footprints returns the peak memory of one device of each rank. needs returns the compiler's
// report on a program.
func (p *Programs) Footprints(needs func(*program.Module) Needs) ([]*Footprint, error) {
	var all []*Footprint
	for rank := range p.Ranks {
		f, err := p.footprint(rank, needs)
		if err != nil {
			return nil, err
		}
		all = append(all, f)
	}
	return all, nil
}

// residualsOf returns the bytes saved for the backward pass in a joint graph: values computed from
// data before the loss and read after it. What depends on parameters alone are gathered parameters,
// not activations.
func residualsOf(g *ir.Graph) (n amount) {
	// Operations up to the loss are the forward pass, those after it the backward pass.
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

// takenBy returns the arguments that stages read.
func takenBy(list []*Program) map[string]bool {
	taken := map[string]bool{}
	for _, one := range list {
		if one.Stage < 0 {
			continue
		}
		for _, a := range one.Module.Args {
			taken[a.Name] = true
		}
	}
	return taken
}

// An amount is the bytes of one device's shards, in its own memory and offloaded to the host.
type amount struct{ device, host int64 }

// add counts the shard of an array.
func (n *amount) add(m *program.Module, a program.Array) error {
	local, err := m.Local(a)
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

// resident counts what stays from step to step. A master that stages compute with is a parameter;
// one that only the optimizer reads belongs to the optimizer state.
func (f *Footprint) resident(list []*Program) error {
	// An argument that several programs of the rank take is one array.
	seen, computes := map[string]bool{}, takenBy(list)
	for _, one := range list {
		m := one.Module
		for _, a := range m.Args {
			if seen[a.Name] {
				continue
			}
			var n amount
			if err := n.add(m, a); err != nil {
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
			f.Hosted += n.host
			seen[a.Name] = true
		}
	}
	return nil
}

// worst keeps the maximum over the programs of a step, for the device and for the host. The results
// of a program are activations, except for the update's.
func (f *Footprint) worst(m *program.Module, held amount, n Needs) {
	// Outputs that alias an argument are counted with it.
	temp := n.Temp
	if given := n.Output - n.Alias; held == (amount{}) {
		temp += given
	} else {
		held.device += given
	}
	if held.device+temp > f.Activations+f.Temp || f.Largest == "" {
		f.Activations, f.Temp, f.Largest = held.device, temp, m.Name
	}
	var taken amount
	for _, a := range m.Args {
		if a.Memory != "" {
			_ = taken.add(m, a) // resident has been through the same
		}
	}
	f.Host = max(f.Host, f.Hosted+held.host+max(0, n.Host-taken.host))
}

// atOnce are the kinds of programs that run while no microbatch of a pipeline is in flight, and
// that need memory of their own.
var atOnce = []Kind{Gradient, Reduce, Square, Update}

// footprint finds the peak of a rank over all programs of a step.
func (p *Programs) footprint(rank int, needs func(*program.Module) Needs) (*Footprint, error) {
	f := &Footprint{Rank: rank}
	if err := f.resident(p.OfRank(rank)); err != nil {
		return nil, err
	}
	if !p.Joint() {
		if err := p.microbatches(f, needs); err != nil {
			return nil, err
		}
	}
	for _, one := range p.OfRank(rank) {
		if !slices.Contains(atOnce, one.Kind) {
			continue
		}
		m, held := one.Module, amount{}
		n := needs(m)
		switch one.Kind {
		case Gradient: // residuals are in the temporary memory of the only program
			if p.Find(Zero, rank) == nil { // its gradients are counted with those that are kept
				n.Output = max(n.Alias, n.Output-f.Grads)
			}
			residuals := residualsOf(p.Find(Gradient, rank).Graph)
			held = amount{min(n.Temp, residuals.device), residuals.host}
			n.Temp -= held.device
			n.Host = max(0, n.Host-held.host)
		case Square: // gradients of what is shared, from the other rank
			for _, a := range m.Args {
				if a.Role == program.PeerGradient {
					if err := held.add(m, a); err != nil {
						return nil, err
					}
				}
			}
		}
		f.worst(m, held, n)
	}
	return f, nil
}

// microbatches walks the schedule of a rank: at each action it adds the bytes of all microbatches
// in flight to the needs of the program that runs.
func (p *Programs) microbatches(f *Footprint, needs func(*program.Module) Needs) error {
	// One entry per virtual stage of the rank (interleaved schedules have several).
	turns := make([]*microbatchBytes, p.Schedule.Virtual)
	for turn := range turns {
		var err error
		if turns[turn], err = p.microbatchBytes(p.Schedule.Stage(f.Rank, turn)); err != nil {
			return err
		}
	}
	kinds := [...]Kind{schedule.Forward: Forward, schedule.Backward: Backward,
		schedule.Input: Input, schedule.Weight: Weight}
	for place, micros := range p.Schedule.InFlight(f.Rank) {
		a := p.Schedule.Lists[f.Rank][place]
		one := p.OfStage(kinds[a.Kind], a.Stage).module()
		if one == nil { // a first stage has no gradient of its input
			continue
		}
		held := turns[a.Stage/p.Schedule.Ranks].passing(a.Kind)
		for turn, h := range turns {
			held = held.plus(h.forward, micros.Forward[turn]).plus(h.input, micros.Input[turn])
		}
		f.worst(one, held, needs(one))
	}
	return nil
}

// microbatchBytes is what one microbatch holds on a device of a stage, in bytes, between which
// passes.
type microbatchBytes struct {
	// taken is read by the forward pass alone: activations from the stage before, and token ids.
	taken amount
	// forward is saved from the forward pass until dgrad (the backward pass towards the input).
	forward amount
	// input is saved from dgrad until wgrad, where a zero-bubble schedule splits the backward pass.
	input amount
	// seeds are the gradients of activations that the stage after sends.
	seeds amount
}

// plus adds a multiple of an amount.
func (n amount) plus(m amount, times int) amount {
	return amount{n.device + int64(times)*m.device, n.host + int64(times)*m.host}
}

// passing is what arrives for an action and is freed by it.
func (h *microbatchBytes) passing(k schedule.Kind) amount {
	switch k {
	case schedule.Forward:
		return h.taken
	case schedule.Backward, schedule.Input:
		return h.seeds
	}
	return amount{}
}

// microbatchBytes sums the arguments of a stage's programs that belong to one microbatch.
func (p *Programs) microbatchBytes(stage int) (*microbatchBytes, error) {
	sum := func(seeds bool, list ...*program.Module) (total amount, err error) {
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
	of := func(k Kind) *program.Module { return p.OfStage(k, stage).module() }
	backward, input, weight := of(Backward), of(Input), of(Weight)
	// wgrad reads inputs saved by the forward pass and gradients made by dgrad; until dgrad has run,
	// only the former exist.
	early := weight // as far as it takes what is there before the gradient of the input
	if input != nil && weight != nil {
		part := *weight
		part.Args = slices.DeleteFunc(slices.Clone(part.Args), func(a program.Array) bool {
			return slices.ContainsFunc(input.Results, func(b program.Array) bool { return a.Name == b.Name })
		})
		early = &part
	}
	h := &microbatchBytes{}
	for _, x := range []struct {
		into  *amount
		seeds bool
		list  []*program.Module
	}{
		{&h.taken, false, []*program.Module{of(Forward)}},
		{&h.forward, false, []*program.Module{backward, input, early}},
		{&h.input, false, []*program.Module{weight}},
		{&h.seeds, true, []*program.Module{backward, input}},
	} {
		var err error
		if *x.into, err = sum(x.seeds, x.list...); err != nil {
			return nil, err
		}
	}
	return h, nil
}

// ofMicrobatch reports whether each microbatch has its own array of a role.
func ofMicrobatch(role program.Role) bool {
	switch role {
	case program.Batch, program.Activation, program.Seed, program.Residual:
		return true
	}
	return false
}
