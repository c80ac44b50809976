package pipeline

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
)

// A run is one step of one rank. Its fields belong to the goroutine that runs all.
type run struct {
	*rank
	ctx     context.Context
	step    int
	data    Data
	ledger  *ledger
	pending []inFlight
	outbox  map[schedule.Action][]*item // computed and not sent yet; nil where nothing is sent
	out, in map[int]chan packet         // by peer; empty for rendezvous links
	results []Result
}

// An inFlight is an action that the devices may not have finished.
type inFlight struct {
	action schedule.Action
	run    *engine.Run
}

// A packet is the arrays that one action sends to another rank; nil where a name has no gradient.
type packet struct {
	action schedule.Action
	items  []*item
}

// drop releases the packet's references.
func (p packet) drop() {
	for _, x := range p.items {
		if x != nil {
			x.drop()
		}
	}
}

// start begins a step: one goroutine per peer sends and one receives, so that a rank never waits
// for a slow connection, nor one peer's packets for another's.
func (r *rank) start(ctx context.Context, cancel context.CancelCauseFunc, wg *sync.WaitGroup,
	step int, data Data) *run {
	x := &run{rank: r, ctx: ctx, step: step, data: data, ledger: newLedger(r.stages),
		outbox: map[schedule.Action][]*item{}, out: map[int]chan packet{}, in: map[int]chan packet{}}
	incoming := map[int][]schedule.Action{}
	for _, s := range r.steps {
		switch {
		// A rendezvous link is used in the rank's own goroutine, at its turn in the schedule.
		case s.Op == schedule.Compute || r.Links[s.Peer].Rendezvous():
		case s.Op == schedule.Send && x.out[s.Peer] == nil:
			x.out[s.Peer] = make(chan packet, r.config.Capacity)
		case s.Op == schedule.Receive:
			incoming[s.Peer] = append(incoming[s.Peer], s.Action)
		}
	}
	for peer, queue := range x.out {
		wg.Go(func() {
			for p := range queue {
				if err := x.send(peer, p); err != nil {
					cancel(err)
				}
			}
		})
	}
	for peer, actions := range incoming {
		queue := make(chan packet)
		x.in[peer] = queue
		wg.Go(func() {
			if err := x.receiveAll(peer, actions, queue); err != nil {
				cancel(err)
			}
		})
	}
	return x
}

// done lets the sending goroutines end once they have sent everything.
func (r *run) done() {
	for _, queue := range r.out {
		close(queue)
	}
}

// free releases what a failed step left behind.
func (r *run) free() {
	r.ledger.free()
	for a, items := range r.outbox {
		packet{a, items}.drop()
	}
	for _, f := range r.pending {
		f.run.Free()
	}
}

// all executes the steps in order, then waits for the devices.
func (r *run) all() error {
	for _, s := range r.steps {
		if err := r.ctx.Err(); err != nil {
			return err
		}
		if err := r.do(s); err != nil {
			return r.at(err, s)
		}
	}
	return r.await(0)
}

// at adds rank and action to an error that has no place yet.
func (r *run) at(err error, where fmt.Stringer) error {
	if e := diag.From(err); e.Where == "" {
		return e.At("rank %d, %s", r.Number, where)
	}
	return err
}

// do executes one step: a send, a receive or an action.
func (r *run) do(s schedule.Step) error {
	switch s.Op {
	case schedule.Send:
		p := packet{s.Action, r.outbox[s.Action]}
		delete(r.outbox, s.Action)
		queue := r.out[s.Peer]
		if queue == nil {
			return r.send(s.Peer, p)
		}
		select {
		case queue <- p:
			return nil
		case <-r.ctx.Done():
			p.drop()
			return r.ctx.Err()
		}
	case schedule.Receive:
		return r.receive(s)
	case schedule.Compute:
		return r.compute(s.Action)
	}
	return nil
}

// await waits until the devices have at most n actions queued.
func (r *run) await(n int) error {
	for len(r.pending) > max(n, 0) {
		f := r.pending[0]
		if err := f.run.Wait(r.ctx); err != nil {
			return r.at(err, f.action)
		}
		r.pending = r.pending[1:]
	}
	return nil
}

// tag identifies an array on a link: step, action, index.
func (r *run) tag(a schedule.Action, i int) string { return fmt.Sprintf("%d %s/%d", r.step, a, i) }

// send sends a packet to a peer. After an error the rest is dropped.
func (r *run) send(peer int, p packet) error {
	defer p.drop()
	for i, x := range p.items {
		if x == nil {
			continue
		}
		if err := r.Links[peer].Send(r.ctx, r.tag(p.action, i), x.array); err != nil {
			return err
		}
	}
	return nil
}

// fetch receives what a peer's action sends to this rank.
func (r *run) fetch(peer int, a schedule.Action) (packet, error) {
	s, names := r.receiver(a)
	p := packet{a, make([]*item, len(names))}
	for i, name := range names {
		if name == "" {
			continue
		}
		into, spec, _ := s.argument(name)
		got, err := r.Links[peer].Recv(r.ctx, r.tag(a, i), into, spec)
		if err != nil {
			p.drop()
			return packet{}, err
		}
		p.items[i] = newItem(got)
	}
	return p, nil
}

// receiveAll receives everything that a peer sends in a step, at most one packet ahead of its use.
func (r *run) receiveAll(peer int, actions []schedule.Action, queue chan<- packet) error {
	for _, a := range actions {
		p, err := r.fetch(peer, a)
		if err != nil {
			return err
		}
		select {
		case queue <- p:
		case <-r.ctx.Done():
			p.drop()
			return r.ctx.Err()
		}
	}
	return nil
}

// receive waits for a packet and delivers it to its stage.
func (r *run) receive(s schedule.Step) (err error) {
	var p packet
	if queue := r.in[s.Peer]; queue == nil {
		p, err = r.fetch(s.Peer, s.Action)
	} else {
		select {
		case p = <-queue:
		case <-r.ctx.Done():
			err = r.ctx.Err()
		}
	}
	if err == nil {
		r.deliver(s.Action, p.items)
	}
	return err
}

// deliver gives an action's results to the stage of this rank that takes them.
func (r *run) deliver(a schedule.Action, items []*item) {
	s, names := r.receiver(a)
	for i, name := range names {
		if items[i] != nil {
			r.ledger.put(s.number, a.Microbatch, name, items[i])
		}
	}
}

// compute starts an action on the devices and stores its results. It returns before the devices are
// done, unless more than Ahead actions are queued.
func (r *run) compute(a schedule.Action) error {
	s := r.stages[a.Stage]
	held := r.ledger.stages[a.Stage]
	if x, _ := s.program(a.Kind); x != nil {
		args, err := r.arguments(a, x)
		if err != nil {
			return err
		}
		started, err := x.Run(r.ctx, args...)
		if err != nil {
			return err
		}
		r.pending = append(r.pending, inFlight{a, started})
		if err := r.place(a, x.Module(), started.Take()); err != nil {
			return err
		}
	}
	// begun is the number of microbatches in flight, for [Usage].
	switch a.Kind {
	case schedule.Forward:
		held.begun++
	case schedule.Backward, schedule.Weight:
		held.begun--
	case schedule.Input:
	}
	r.ledger.keep(a.Stage, a.Microbatch, s.needed(a.Kind, a.Microbatch))
	r.ledger.mark()
	return r.await(r.config.Ahead)
}

// arguments finds an action's arguments by name: in the ledger, in the state, else from the caller.
func (r *run) arguments(a schedule.Action, x *engine.Executable) ([]*engine.Array, error) {
	m := x.Module()
	args := make([]*engine.Array, len(m.Args))
	for i, spec := range m.Args {
		if held := r.ledger.get(a.Stage, a.Microbatch, spec.Name); held != nil {
			args[i] = held.array
			continue
		}
		if args[i] = r.State.Get(spec.Name); args[i] != nil {
			continue
		}
		if r.data == nil {
			return nil, r.missing(spec)
		}
		got, err := r.data(r.ctx, a.Stage, a.Microbatch, m, spec)
		if err != nil {
			return nil, err
		}
		if got == nil {
			return nil, r.missing(spec)
		}
		r.ledger.put(a.Stage, a.Microbatch, spec.Name, newItem(got))
		args[i] = got
	}
	return args, nil
}

// missing is the error of an argument that nothing provides.
func (r *run) missing(spec program.Array) error {
	return misfit("%s is neither received nor in the state nor data", spec.Name).
		Try("put it into the rank's state, or let the data function place it")
}

// place stores an action's results: in the state, in the ledger, with the caller, or for sending.
func (r *run) place(a schedule.Action, m *program.Module, results []*engine.Array) error {
	s := r.stages[a.Stage]
	names, needed := s.sent(a.Kind), s.needed(a.Kind, a.Microbatch)
	var sent []*item
	if s.feeds(a, r.config.Schedule) {
		sent = make([]*item, len(names))
	}
	for i, spec := range m.Results {
		if r.replaces(a, m, spec) {
			r.State.Put(results[i])
			continue
		}
		x := newItem(results[i])
		for k := range sent {
			if names[k] == spec.Name {
				sent[k] = x.hold()
			}
		}
		if spec.Role == program.Stat ||
			a.Kind == schedule.Forward && slices.Contains(s.Results, spec.Name) {
			x.hold() // for the caller, who frees the array
			r.results = append(r.results, Result{a.Stage, a.Microbatch, m.Name, spec, results[i]})
		}
		if needed[spec.Name] {
			r.ledger.put(a.Stage, a.Microbatch, spec.Name, x.hold())
		}
		x.drop()
	}
	if sent == nil {
		return nil
	}
	if to, _ := r.receiver(a); to != nil {
		r.deliver(a, sent)
		return nil
	}
	r.outbox[a] = sent
	return nil
}

// replaces reports whether a result replaces a donated argument in the state.
func (r *run) replaces(a schedule.Action, m *program.Module, result program.Array) bool {
	from := slices.IndexFunc(m.Args, func(x program.Array) bool { return x.Into == result.Name })
	return from >= 0 && r.ledger.get(a.Stage, a.Microbatch, m.Args[from].Name) == nil
}

// feeds reports whether another stage waits for an action.
func (s *stage) feeds(a schedule.Action, all *schedule.Schedule) bool {
	if a.Kind == schedule.Forward {
		return s.number < all.Stages()-1
	}
	return a.Kind != schedule.Weight && s.number > 0
}
