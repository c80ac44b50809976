package train

import (
	"context"
	"sync"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/pipeline"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

// An executor runs the programs of a step on the devices of this process.
//
// Devices are grouped by pipeline rank. Without a pipeline there is one rank with one stage: the
// mesh of all devices, whose forward and backward pass are one program. Everything below treats
// both alike; only [executor.joint] and [executor.pipelined] differ.
//
// The state of a rank (parameters, moments, quantized copies, gradients between the halves of a
// step) stays on its devices. The host sends token ids and a few scalars, and reads the loss, the
// gradient norm and the monitor's statistics.
type executor struct {
	t *Trainer
	x *compiled // the programs at work
	// probes replaces the gradient programs of x in a step that is inspected; nil in others.
	probes *compiled
	ranks  []*rank // by number; nil for a rank of another process
	links  []engine.Link
	peers  *peers       // the other processes; nil for a run in one process
	staged *stagedBatch // of the present step; nil if nothing was placed ahead
	ladder *slotLadder  // nil for a model without experts
}

// A rank is one pipeline rank of this process: its devices and the state that they hold.
type rank struct {
	*inputFeed
	number  int
	devices program.Devices // as this process's engine numbers them
	// state has the rank's arrays by the names of program arguments. Between steps these are
	// parameters, moments and copies; between the halves of a step also gradients.
	state  engine.State
	stats  report                 // of the present step
	ends   map[int]engine.Link    // to the ranks of neighbouring stages, by rank
	shared map[string]engine.Link // to the rank that shares a parameter, by parameter
	// replicas is what was last compared between devices, and digesters the programs for it, by shape.
	replicas  *replicaCheck
	digesters map[string]*engine.Executable
}

// linkRoom is how many arrays may wait in a link between two ranks: as many as the schedule lets
// run ahead.
const linkRoom = 4

// newExecutor compiles the programs of this process's ranks and connects the ranks. The state is
// empty but for the loss seed.
func newExecutor(ctx context.Context, t *Trainer) (*executor, error) {
	p := t.programs
	c := &executor{t: t, ranks: make([]*rank, len(p.Ranks)), peers: t.others}
	for n, r := range p.Ranks {
		if c.peers.hosts(n, len(p.Ranks)) {
			c.ranks[n] = &rank{number: n, devices: c.peers.local(r.Devices, n, len(p.Ranks)),
				ends: map[int]engine.Link{}, shared: map[string]engine.Link{},
				digesters: map[string]*engine.Executable{}}
		}
	}
	var err error
	if c.x, err = c.compile(ctx, p); err == nil {
		err = c.connect()
	}
	if err == nil {
		err = c.x.join(c)
	}
	if err != nil {
		c.free()
		return nil, err
	}
	for n, r := range c.ranks {
		if r != nil {
			r.inputFeed = newInputFeed(t, p.Plan, p.OfRank(n))
		}
	}
	c.ladder = newLadder(context.WithoutCancel(ctx), c)
	return c, c.seeds()
}

// hosted returns the ranks of this process.
func (c *executor) hosted() (list []*rank) {
	return lists.Filter(c.ranks, func(r *rank) bool { return r != nil })
}

// compiled is a table of programs on the engine, as far as they belong to ranks of this process.
type compiled struct {
	programs *step.Programs
	rows     map[*step.Program]*engine.Executable
	pipe     *pipeline.Pipeline // nil without a pipeline
}

// compile compiles the programs of this process's ranks. The engine caches executables, so programs
// that another precision leaves unchanged cost nothing.
func (c *executor) compile(ctx context.Context, p *step.Programs) (*compiled, error) {
	x := &compiled{programs: p, rows: map[*step.Program]*engine.Executable{}}
	for _, row := range p.List {
		r := c.ranks[row.Rank]
		if r == nil {
			continue
		}
		row.Module.Devices = r.devices // an engine of one process numbers its devices from 0
		var err error
		if x.rows[row], err = c.t.opts.Engine.Compile(ctx, row.Module); err != nil {
			x.free()
			return nil, err
		}
	}
	return x, nil
}

// free releases the executables; x may be nil.
func (x *compiled) free() {
	if x == nil {
		return
	}
	for _, one := range x.rows {
		if one != nil {
			one.Free()
		}
	}
}

// of returns a rank's program of a kind, or nil if it has none.
func (x *compiled) of(kind step.Kind, r *rank) *engine.Executable {
	return x.rows[x.programs.Find(kind, r.number)]
}

// stage returns a virtual stage's program of a kind, or nil if it has none.
func (x *compiled) stage(kind step.Kind, stage int) *engine.Executable {
	return x.rows[x.programs.OfStage(kind, stage)]
}

// list returns all executables, in the order of the table.
func (x *compiled) list() (all []*engine.Executable) {
	for _, row := range x.programs.List {
		if one := x.rows[row]; one != nil {
			all = append(all, one)
		}
	}
	return all
}

// join builds the pipeline that runs the stages over the links between ranks. Without a pipeline
// there is nothing to join.
func (x *compiled) join(c *executor) (err error) {
	p := x.programs
	if p.Joint() {
		return nil
	}
	config := pipeline.Config{Schedule: p.Schedule, Capacity: linkRoom, Ahead: c.t.opts.Ahead}
	for _, r := range c.hosted() {
		one := pipeline.Rank{Number: r.number, State: &r.state, Links: r.ends}
		for k, s := range p.Stages {
			if s.Rank == r.number {
				one.Stages = append(one.Stages, s.Graphs.Stage(x.stage(step.Forward, k),
					x.stage(step.Backward, k), x.stage(step.Input, k), x.stage(step.Weight, k)))
			}
		}
		config.Ranks = append(config.Ranks, one)
	}
	x.pipe, err = pipeline.New(config)
	return err
}

// seeds puts the start of the backward pass into the state: dLoss/dLoss = 1.
func (c *executor) seeds() error {
	for _, r := range c.hosted() {
		for _, row := range c.t.programs.OfRank(r.number) {
			for _, a := range row.Module.Args {
				if a.Role != program.LossSeed || r.state.Get(a.Name) != nil {
					continue
				}
				m := &program.Module{Name: "one", Devices: r.devices}
				spec := program.Array{Name: a.Name, Global: dtype.Shape{Type: dtype.F32}}
				one, err := c.t.opts.Engine.Place(m, spec, engine.Copied,
					func(int) ([]byte, error) { return f32Bytes(1), nil })
				if err != nil {
					return err
				}
				r.state.Put(one)
			}
		}
	}
	return nil
}

// free closes the links and releases programs and state.
func (c *executor) free() {
	for _, l := range c.links {
		_ = l.Close()
	}
	c.ladder.free()
	c.x.free()
	for _, r := range c.hosted() {
		for _, x := range r.digesters {
			x.Free()
		}
		r.state.Free()
	}
}

// connect links the ranks that exchange arrays: neighbouring stages, for activations and their
// gradients, and ranks that share a parameter (a tied embedding), for its gradient. All processes
// number these links alike, so that both ends of a TCP connection agree.
func (c *executor) connect() error {
	p := c.t.programs
	// Stage transfers: one link for each pair of ranks with neighbouring stages.
	done := map[[2]int]bool{}
	for k := 1; k < len(p.Stages); k++ {
		a, b := p.Stages[k-1].Rank, p.Stages[k].Rank
		if a == b || done[[2]int{a, b}] || done[[2]int{b, a}] {
			continue
		}
		done[[2]int{a, b}] = true
		left, right, err := c.link(a, b, 0)
		if err != nil {
			return err
		}
		c.end(a, b, left)
		c.end(b, a, right)
	}
	// Shared parameters: a link of its own for each, numbered alike in all processes.
	way := 0
	for n, r := range p.Ranks {
		for _, h := range r.RankParams {
			users := p.Users(h.Name)
			switch {
			case len(users) < 2 || users[0] != n:
				continue
			case len(users) > 2:
				return diag.New(diag.PlanLater, "%d ranks share %s", len(users), h.Name)
			}
			way++
			left, right, err := c.link(users[0], users[1], way)
			if err != nil {
				return err
			}
			for i, l := range []engine.Link{left, right} {
				if one := c.ranks[users[i]]; one != nil {
					one.shared[h.Name] = l
				}
			}
		}
	}
	return nil
}

// end keeps a rank's end of the link to a peer, if the rank is in this process.
func (c *executor) end(rank, peer int, l engine.Link) {
	if r := c.ranks[rank]; r != nil {
		r.ends[peer] = l
	}
}

// link returns both ends of a link between two ranks, nil for an end in another process. way tells
// several links between the same two ranks apart.
func (c *executor) link(a, b, way int) (left, right engine.Link, err error) {
	switch x, y := c.ranks[a], c.ranks[b]; {
	case x != nil && y != nil:
		left, right, err = c.t.opts.Engine.Pipe(x.devices, y.devices, linkRoom)
	case x != nil:
		left = c.peers.link(a, b, way, len(c.ranks))
	case y != nil:
		right = c.peers.link(b, a, way, len(c.ranks))
	}
	for _, l := range []engine.Link{left, right} {
		if l != nil {
			c.links = append(c.links, l)
		}
	}
	return left, right, err
}

// stateShards returns what each rank holds of the state, by rank; nil for a rank of another
// process.
func (c *executor) stateShards() []*stateShard {
	list := make([]*stateShard, len(c.ranks))
	for n, r := range c.ranks {
		if r == nil {
			continue
		}
		h := &stateShard{state: &r.state, mesh: r.mesh}
		for _, row := range c.t.programs.OfRank(n) {
			switch {
			case row.Kind == step.Update:
				h.update = row.Module
			case row.Stage >= 0:
				h.readers = append(h.readers, row.Module)
			}
		}
		list[n] = h
	}
	return list
}

// each runs a function for all ranks of this process concurrently. The first error cancels the
// context of the others, which may be waiting for a rank that failed.
func (c *executor) each(ctx context.Context, do func(ctx context.Context, r *rank) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for _, r := range c.ranks {
		if r != nil {
			wg.Go(func() {
				if err := do(ctx, r); err != nil {
					cancel(err)
				}
			})
		}
	}
	wg.Wait()
	return context.Cause(ctx)
}
