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

// An executor runs the programs of a step on the devices of this process. The devices are the ranks
// of a pipeline; a mesh is a pipeline of one rank and one stage, whose forward and backward pass
// are one program.
type executor struct {
	t      *Trainer
	x      *compiled // at work
	probes *compiled // gives the gradients of this step in the place of x, and inspects; or nil
	ranks  []*rank   // by number; nil is in another process
	links  []engine.Link
	peers  *peers // the other processes; nil if there are none
}

// A rank is the devices of one rank of the pipeline.
type rank struct {
	*inputFeed
	number  int
	devices program.Devices // as this process counts them
	state   engine.State
	told    report                 // of the step
	ends    map[int]engine.Link    // of links to other ranks
	shared  map[string]engine.Link // by parameter
}

// linkRoom is how many arrays may wait between two ranks: as many as a pipeline lets wait.
const linkRoom = 4

func newExecutor(ctx context.Context, t *Trainer) (*executor, error) {
	p := t.programs
	c := &executor{t: t, ranks: make([]*rank, len(p.Ranks)), peers: t.others}
	for n, r := range p.Ranks {
		if c.peers.hosts(n, len(p.Ranks)) {
			c.ranks[n] = &rank{number: n, devices: c.peers.local(r.Devices, n, len(p.Ranks)),
				ends: map[int]engine.Link{}, shared: map[string]engine.Link{}}
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
	return c, c.seeds()
}

// hosted lists the ranks of this process.
func (c *executor) hosted() (list []*rank) {
	return lists.Filter(c.ranks, func(r *rank) bool { return r != nil })
}

// A compiled is a table of programs on an engine: those of this process's ranks.
type compiled struct {
	programs *step.Programs
	rows     map[*step.Program]*engine.Executable
	pipe     *pipeline.Pipeline // nil if forward and backward pass are one program
}

func (c *executor) compile(ctx context.Context, p *step.Programs) (*compiled, error) {
	x := &compiled{programs: p, rows: map[*step.Program]*engine.Executable{}}
	for _, row := range p.List {
		r := c.ranks[row.Rank]
		if r == nil {
			continue
		}
		row.Module.Devices = r.devices
		var err error
		if x.rows[row], err = c.t.opts.Engine.Compile(ctx, row.Module); err != nil {
			x.free()
			return nil, err
		}
	}
	return x, nil
}

// free ends the programs.
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

// of gives the program of a kind that a rank has, nil if it has none.
func (x *compiled) of(kind step.Kind, r *rank) *engine.Executable {
	return x.rows[x.programs.Find(kind, r.number)]
}

// stage gives the program of a kind that a virtual stage has, nil if it has none.
func (x *compiled) stage(kind step.Kind, stage int) *engine.Executable {
	return x.rows[x.programs.OfStage(kind, stage)]
}

// list gives all programs, in the order of the table.
func (x *compiled) list() (all []*engine.Executable) {
	for _, row := range x.programs.List {
		if one := x.rows[row]; one != nil {
			all = append(all, one)
		}
	}
	return all
}

// join makes a pipeline of the stages, over the links between the ranks.
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

// seeds puts what begins the backward pass into the state: the gradient of the loss by itself, 1.
func (c *executor) seeds() error {
	for _, r := range c.hosted() {
		for _, row := range c.t.programs.OfRank(r.number) {
			for _, a := range row.Module.Args {
				if a.Role != program.LossSeed || r.state.Get(a.Name) != nil {
					continue
				}
				s := &program.Module{Name: "one", Devices: r.devices}
				spec := program.Array{Name: a.Name, Global: dtype.Shape{Type: dtype.F32}}
				one, err := c.t.opts.Engine.Place(s, spec, engine.Copied,
					func(int) ([]byte, error) { return number(1), nil })
				if err != nil {
					return err
				}
				r.state.Put(one)
			}
		}
	}
	return nil
}

func (c *executor) free() {
	for _, l := range c.links {
		_ = l.Close()
	}
	c.x.free()
	for _, r := range c.hosted() {
		r.state.Free()
	}
}

// connect links the ranks that exchange something: stages that follow each other, and ranks that
// have the same parameters, for their gradients.
func (c *executor) connect() error {
	p := c.t.programs
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
	way := 0 // the same in all processes
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

func (c *executor) end(rank, peer int, l engine.Link) {
	if r := c.ranks[rank]; r != nil {
		r.ends[peer] = l
	}
}

// link makes the ends of a link between two ranks that this process hosts; nil stands for an end
// that is elsewhere. way tells several links between two ranks apart.
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

// homes says where the pieces of the state are, by rank; nil is in another process.
func (c *executor) homes() []*stateShard {
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
				h.takers = append(h.takers, row.Module)
			}
		}
		list[n] = h
	}
	return list
}

// each does something for every rank of this process at the same time. The first error ends what
// the others wait for.
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
