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
	pending []flying
	outbox  map[schedule.Action][]*item // made and not sent yet; nil where nothing is sent
	out, in map[int]chan packet         // by peer; empty if links meet
	results []Result
}

// A flying is an action that the devices may not have finished.
type flying struct {
	action schedule.Action
	run    *engine.Run
}

// A packet is what one action hands to another rank.
type packet struct {
	action schedule.Action
	items  []*item
}

func (p packet) drop() {
	for _, x := range p.items {
		if x != nil {
			x.drop()
		}
	}
}

// start begins a step with the goroutines that send and receive: a rank must not wait for a slow
// connection, nor may one peer's results wait behind those of another.
func (r *rank) start(ctx context.Context, cancel context.CancelCauseFunc, wg *sync.WaitGroup,
	step int, data Data) *run {
	x := &run{rank: r, ctx: ctx, step: step, data: data, ledger: newLedger(r.stages),
		outbox: map[schedule.Action][]*item{}, out: map[int]chan packet{}, in: map[int]chan packet{}}
	coming := map[int][]schedule.Action{}
	for _, s := range r.steps {
		switch {
		case s.Op == schedule.Compute || r.Links[s.Peer].Meets():
		case s.Op == schedule.Send && x.out[s.Peer] == nil:
			x.out[s.Peer] = make(chan packet, r.config.Capacity)
		case s.Op == schedule.Receive:
			coming[s.Peer] = append(coming[s.Peer], s.Action)
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
	for peer, actions := range coming {
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

// done lets the sending goroutines end when they have sent everything.
func (r *run) done() {
	for _, queue := range r.out {
		close(queue)
	}
}

// free drops what a step that ended early has left.
func (r *run) free() {
	r.ledger.free()
	for a, items := range r.outbox {
		packet{a, items}.drop()
	}
	for _, f := range r.pending {
		f.run.Free()
	}
}

// all goes through the steps and then waits for the devices.
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

// at adds the place to an error that has none yet.
func (r *run) at(err error, where fmt.Stringer) error {
	if e := diag.From(err); e.Where == "" {
		return e.At("rank %d, %s", r.Number, where)
	}
	return err
}

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

// await waits until the devices have no more than n actions left.
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

// tag names an array on its way.
func (r *run) tag(a schedule.Action, i int) string { return fmt.Sprintf("%d %s/%d", r.step, a, i) }

// send hands a packet over. After an error the rest is dropped.
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

// fetch takes what an action of a peer hands to this rank.
func (r *run) fetch(peer int, a schedule.Action) (packet, error) {
	s, names := r.taken(a)
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

// receiveAll takes everything that a peer sends in a step, at most one packet before it is wanted.
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

// deliver gives the stage that an action feeds what it hands over.
func (r *run) deliver(a schedule.Action, items []*item) {
	s, names := r.taken(a)
	for i, name := range names {
		if items[i] != nil {
			r.ledger.put(s.number, a.Micro, name, items[i])
		}
	}
}

// compute starts an action on the devices.
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
		r.pending = append(r.pending, flying{a, started})
		if err := r.place(a, x.Module(), started.Take()); err != nil {
			return err
		}
	}
	switch a.Kind {
	case schedule.Forward:
		held.begun++
	case schedule.Backward, schedule.Weight:
		held.begun--
	case schedule.Input:
	}
	r.ledger.keep(a.Stage, a.Micro, s.needed(a.Kind, a.Micro))
	r.ledger.mark()
	return r.await(r.config.Ahead)
}

// arguments finds what an action takes, by name.
func (r *run) arguments(a schedule.Action, x *engine.Executable) ([]*engine.Array, error) {
	st := x.Module()
	args := make([]*engine.Array, len(st.Args))
	for i, spec := range st.Args {
		if held := r.ledger.get(a.Stage, a.Micro, spec.Name); held != nil {
			args[i] = held.array
			continue
		}
		if args[i] = r.State.Get(spec.Name); args[i] != nil {
			continue
		}
		if r.data == nil {
			return nil, r.missing(spec)
		}
		got, err := r.data(r.ctx, a.Stage, a.Micro, st, spec)
		if err != nil {
			return nil, err
		}
		if got == nil {
			return nil, r.missing(spec)
		}
		r.ledger.put(a.Stage, a.Micro, spec.Name, newItem(got))
		args[i] = got
	}
	return args, nil
}

func (r *run) missing(spec program.Array) error {
	return misfit("%s is neither handed over nor kept nor data", spec.Name).
		Try("put it into the rank's state, or let the data function place it")
}

// place puts the results of an action where they belong.
func (r *run) place(a schedule.Action, st *program.Module, results []*engine.Array) error {
	s := r.stages[a.Stage]
	names, needed := s.handed(a.Kind), s.needed(a.Kind, a.Micro)
	var handed []*item
	if s.feeds(a, r.config.Schedule) {
		handed = make([]*item, len(names))
	}
	for i, spec := range st.Results {
		if r.replaces(a, st, spec) {
			r.State.Put(results[i])
			continue
		}
		x := newItem(results[i])
		for k := range handed {
			if names[k] == spec.Name {
				handed[k] = x.hold()
			}
		}
		if spec.Role == program.Stat ||
			a.Kind == schedule.Forward && slices.Contains(s.Results, spec.Name) {
			x.hold() // for the caller, who frees the array
			r.results = append(r.results, Result{a.Stage, a.Micro, st.Name, spec, results[i]})
		}
		if needed[spec.Name] {
			r.ledger.put(a.Stage, a.Micro, spec.Name, x.hold())
		}
		x.drop()
	}
	if handed == nil {
		return nil
	}
	if to, _ := r.taken(a); to != nil {
		r.deliver(a, handed)
		return nil
	}
	r.outbox[a] = handed
	return nil
}

// replaces tells whether a result takes the place of something in the state.
func (r *run) replaces(a schedule.Action, st *program.Module, result program.Array) bool {
	from := slices.IndexFunc(st.Args, func(x program.Array) bool { return x.Into == result.Name })
	return from >= 0 && r.ledger.get(a.Stage, a.Micro, st.Args[from].Name) == nil
}

// feeds tells whether another stage waits for an action.
func (s *stage) feeds(a schedule.Action, all *schedule.Schedule) bool {
	if a.Kind == schedule.Forward {
		return s.number < all.Stages()-1
	}
	return a.Kind != schedule.Weight && s.number > 0
}
