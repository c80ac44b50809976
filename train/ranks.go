package train

import (
	"context"
	"math"
	"slices"
	"sync"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/pipeline"
	"github.com/deepwell/deepwell/program"
)

// A ranks is a crew of a pipeline: the ranks that this process hosts.
type ranks struct {
	t      *Trainer
	pipe   *pipeline.Pipeline
	hosted []*rank // by number; nil is in another process
	links  []engine.Link
	peers  *peers // the other processes; nil if there are none
}

// A rank is the devices of one rank.
type rank struct {
	*feed
	number                       int
	texts                        *PipeRank
	state                        engine.State
	stages                       map[int]*pipeline.Stage // by number
	zero, reduce, square, update *engine.Executable
	toBlocks                     *engine.Executable // nil if no product has few bits
	takers                       []*program.Stage
	ends                         map[int]engine.Link    // of links to other ranks
	shared                       map[string]engine.Link // by parameter
}

// linkRoom is how many arrays may wait between two ranks: as many as a pipeline lets wait.
const linkRoom = 4

func newRanks(ctx context.Context, t *Trainer) (crew, error) {
	p := t.Programs.Pipe
	c := &ranks{t: t, hosted: make([]*rank, len(p.Ranks)), peers: t.others}
	for n := range p.Ranks {
		if c.peers.hosts(n, len(p.Ranks)) {
			var err error
			if c.hosted[n], err = newRank(ctx, t, n, c.peers); err != nil {
				c.free()
				return nil, err
			}
		}
	}
	if err := c.connect(); err != nil {
		c.free()
		return nil, err
	}
	return c, nil
}

// newRank compiles the programs of a rank.
func newRank(ctx context.Context, t *Trainer, n int, others *peers) (*rank, error) {
	p := t.Programs.Pipe
	r := &rank{number: n, texts: p.Ranks[n], stages: map[int]*pipeline.Stage{},
		shared: map[string]engine.Link{}}
	devices := others.local(r.texts.Devices, n, len(p.Ranks))
	var graphs []*ir.Graph
	for k, s := range p.Stages {
		if s.Rank != n {
			continue
		}
		for _, one := range s.Programs.List() {
			one.Devices = devices
			r.takers = append(r.takers, one)
		}
		x, err := s.Graphs.Compile(ctx, t.Engine, s.Programs)
		if err != nil {
			r.free()
			return nil, err
		}
		r.stages[k] = x
		graphs = append(graphs, s.Graphs.Forward, s.Graphs.Backward)
		for _, name := range s.Graphs.Ones {
			if err := r.one(t.Engine, devices, name); err != nil {
				r.free()
				return nil, err
			}
		}
	}
	r.feed = newFeed(t, p.plan, graphs...)
	for _, x := range []struct {
		text *program.Stage
		into **engine.Executable
	}{
		{r.texts.Zero, &r.zero}, {r.texts.Reduce, &r.reduce}, {r.texts.Square, &r.square},
		{r.texts.Update, &r.update}, {r.texts.Quantize, &r.toBlocks},
	} {
		if x.text == nil {
			continue
		}
		x.text.Devices = devices
		var err error
		if *x.into, err = t.Engine.Compile(ctx, x.text); err != nil {
			r.free()
			return nil, err
		}
	}
	return r, nil
}

// one keeps the gradient of the loss by itself.
func (r *rank) one(e *engine.Engine, devices program.Devices, name string) error {
	s := &program.Stage{Name: "one", Devices: devices}
	spec := program.Array{Name: name, Global: dtype.Shape{Type: dtype.F32}}
	a, err := e.Place(s, spec, engine.Copied,
		func(int) ([]byte, error) { return number(1), nil })
	if err == nil {
		r.state.Put(a)
	}
	return err
}

func (r *rank) free() {
	for _, s := range r.stages {
		s.Free()
	}
	for _, x := range []*engine.Executable{r.zero, r.reduce, r.square, r.update, r.toBlocks} {
		if x != nil {
			x.Free()
		}
	}
	r.state.Free()
}

func (c *ranks) free() {
	for _, l := range c.links {
		_ = l.Close()
	}
	for _, r := range c.hosted {
		if r != nil {
			r.free()
		}
	}
}

// connect links the ranks that exchange something, and makes the pipeline.
func (c *ranks) connect() error {
	p := c.t.Programs.Pipe
	config := pipeline.Config{Schedule: p.Schedule, Capacity: linkRoom, Ahead: c.t.Ahead}
	ends := make([]map[int]engine.Link, len(c.hosted))
	for n := range ends {
		ends[n] = map[int]engine.Link{}
	}
	for k := 1; k < len(p.Stages); k++ {
		a, b := p.Stages[k-1].Rank, p.Stages[k].Rank
		if a == b || ends[a][b] != nil || ends[b][a] != nil {
			continue
		}
		left, right, err := c.link(a, b, 0)
		if err != nil {
			return err
		}
		ends[a][b], ends[b][a] = left, right
	}
	for n, r := range c.hosted {
		if r == nil {
			continue
		}
		r.ends = ends[n]
		one := pipeline.Rank{Number: n, State: &r.state, Links: r.ends}
		for k := range p.Stages {
			if s := r.stages[k]; s != nil {
				one.Stages = append(one.Stages, s)
			}
		}
		config.Ranks = append(config.Ranks, one)
	}
	if err := c.share(); err != nil {
		return err
	}
	var err error
	c.pipe, err = pipeline.New(config)
	return err
}

// share links the ranks that have the same parameters, for their gradients.
func (c *ranks) share() error {
	p := c.t.Programs.Pipe
	way := 0 // the same in all processes
	for _, r := range p.Ranks {
		for _, h := range r.Part.Held {
			users := p.users(h.Name)
			switch {
			case len(users) < 2 || p.Ranks[users[0]] != r:
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
				if one := c.hosted[users[i]]; one != nil {
					one.shared[h.Name] = l
				}
			}
		}
	}
	return nil
}

// link makes the ends of a link between two ranks that this process hosts; nil stands for an end
// that is elsewhere. way tells several links between two ranks apart.
func (c *ranks) link(a, b, way int) (left, right engine.Link, err error) {
	switch x, y := c.hosted[a], c.hosted[b]; {
	case x != nil && y != nil:
		left, right, err = c.t.Engine.Pipe(x.update.Stage().Devices, y.update.Stage().Devices, linkRoom)
	case x != nil:
		left = c.peers.link(a, b, way, len(c.hosted))
	case y != nil:
		right = c.peers.link(b, a, way, len(c.hosted))
	}
	for _, l := range []engine.Link{left, right} {
		if l != nil {
			c.links = append(c.links, l)
		}
	}
	return left, right, err
}

func (c *ranks) homes() []*home {
	list := make([]*home, len(c.hosted))
	for n, r := range c.hosted {
		if r != nil {
			list[n] = &home{&r.state, r.texts.Update, r.takers, r.mesh}
		}
	}
	return list
}

// each does something for every rank of this process at the same time. The first error ends what
// the others wait for.
func (c *ranks) each(ctx context.Context, do func(ctx context.Context, r *rank) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for _, r := range c.hosted {
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

// gradients runs all microbatches through the pipeline.
func (c *ranks) gradients(ctx context.Context, b *data.Batch) (float64, error) {
	defer c.t.span("gradient")()
	err := c.each(ctx, func(_ context.Context, r *rank) error { return r.keep(r.zero, nil) })
	if err != nil {
		return 0, err
	}
	share := c.t.share(b.Total)
	out, err := c.pipe.Run(ctx, func(_ context.Context, stage, micro int, s *program.Stage,
		spec program.Array) (*engine.Array, error) {
		return c.data(stage, s, spec, b, micro*c.t.Recipe.Micro, share)
	})
	if err != nil {
		return 0, err
	}
	defer out.Free()
	loss := 0.0
	for _, one := range out.Results {
		x, err := scalar(ctx, one.Array)
		if err != nil {
			return 0, err
		}
		loss += x
	}
	return c.peers.sum(ctx, loss)
}

// data places what a stage takes of some rows of a batch.
func (c *ranks) data(stage int, s *program.Stage, spec program.Array, b *data.Batch, first int,
	share float64) (*engine.Array, error) {
	r := c.hosted[c.t.Programs.Pipe.Stages[stage].Rank]
	bytes, ok := r.batch(b, first, int(c.t.Programs.Shape.Batch), share)[spec.Name]
	if !ok {
		return nil, nil //nolint:nilnil // the pipeline says what is missing
	}
	return r.place(s, spec, bytes)
}

func (c *ranks) quantize() error {
	return c.each(context.Background(), func(_ context.Context, r *rank) error {
		if r.toBlocks == nil {
			return nil
		}
		return r.keep(r.toBlocks, nil)
	})
}

// keep runs a program on the state, and keeps all that it gives.
func (r *rank) keep(x *engine.Executable, inputs map[string][]byte) error {
	run, err := r.run(x, &r.state, inputs)
	if err != nil {
		return err
	}
	run.Keep(&r.state, run.Results...)
	run.Free()
	return nil
}

// update sums up the gradients of each rank, exchanges those of what ranks share and the squares of
// all, and changes the state.
func (c *ranks) update(ctx context.Context, commit bool, rate, limit float64) (norm float64,
	ok bool, err error) {
	defer c.t.span("update")()
	squares := make([]float64, len(c.hosted))
	err = c.each(ctx, func(ctx context.Context, r *rank) (err error) {
		if err = r.keep(r.reduce, nil); err != nil {
			return err
		}
		if err = r.exchange(ctx); err != nil {
			return err
		}
		if err = r.keep(r.square, nil); err != nil {
			return err
		}
		for _, h := range r.texts.Part.Held {
			r.state.Drop(program.PeerGradient.Of(h.Name))
		}
		squares[r.number], err = scalar(ctx, r.state.Get(optim.Square))
		return err
	})
	if err != nil {
		return 0, false, err
	}
	total := 0.0
	for _, x := range squares { // in the order of the ranks
		total += x
	}
	if total, err = c.peers.sum(ctx, total); err != nil {
		return 0, false, err
	}
	oks := make([]bool, len(c.hosted))
	err = c.each(ctx, func(ctx context.Context, r *rank) (err error) {
		oks[r.number], err = r.finish(ctx, c.t.settings(commit, rate, limit), total)
		return err
	})
	ok = !slices.ContainsFunc(c.hosted, func(r *rank) bool { return r != nil && !oks[r.number] })
	return math.Sqrt(total), ok, err
}

// exchange sends the gradients of what the rank shares, and takes those of the other.
func (r *rank) exchange(ctx context.Context) error {
	for _, h := range r.texts.Part.Held {
		link := r.shared[h.Name]
		if link == nil {
			continue
		}
		s := r.square.Stage()
		got, err := swap(ctx, link, r.state.Get(program.Gradient.Of(h.Name)), s,
			s.Args[argument(s, program.PeerGradient.Of(h.Name))])
		if err != nil {
			return err
		}
		r.state.Put(got)
	}
	return nil
}

// swap sends an array and takes one at the same time: both ends do, and what is larger than the
// buffers between them is only sent while the other takes.
func swap(ctx context.Context, l engine.Link, mine *engine.Array, s *program.Stage,
	spec program.Array) (*engine.Array, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	sent := make(chan error, 1)
	go func() { sent <- l.Send(ctx, mine.Name(), mine) }()
	got, err := l.Recv(ctx, mine.Name(), s, spec)
	if err != nil {
		cancel()
		<-sent
		return nil, err
	}
	if err := <-sent; err != nil {
		got.Free()
		return nil, err
	}
	return got, nil
}

// finish runs the update and drops the gradients.
func (r *rank) finish(ctx context.Context, inputs map[string][]byte, square float64) (bool, error) {
	inputs[optim.Square] = number(square)
	run, err := r.run(r.update, &r.state, inputs)
	if err != nil {
		return false, err
	}
	defer run.Free()
	_, ok, err := keepCopies(ctx, run, r.texts.Update, &r.state, r.takers)
	for _, h := range r.texts.Part.Held {
		r.state.Drop(program.Gradient.Of(h.Name))
	}
	r.state.Drop(optim.Square)
	return ok, err
}

// evaluate runs the stages forward, one after the other.
func (c *ranks) evaluate(ctx context.Context, b *data.Batch) (float64, error) {
	p := c.t.Programs.Pipe
	loss := 0.0
	var hidden *engine.Array
	for k, s := range p.Stages {
		r := c.hosted[s.Rank]
		if r == nil {
			continue
		}
		x := r.stages[k]
		if k > 0 && p.Stages[k-1].Rank != s.Rank {
			st := x.Forward.Stage()
			at := argument(st, x.Inputs[0])
			var err error
			if hidden, err = r.ends[p.Stages[k-1].Rank].Recv(ctx, "evaluate", st, st.Args[at]); err != nil {
				return 0, err
			}
		}
		out, err := c.forward(ctx, r, k, hidden, b)
		if hidden != nil {
			hidden.Free()
		}
		if err != nil {
			return 0, err
		}
		hidden = out
		switch {
		case k == len(p.Stages)-1:
			loss, err = scalar(ctx, out)
			out.Free()
		case p.Stages[k+1].Rank != s.Rank:
			err = r.ends[p.Stages[k+1].Rank].Send(ctx, "evaluate", out)
			out.Free()
			hidden = nil
		}
		if err != nil {
			return 0, err
		}
	}
	return c.peers.sum(ctx, loss)
}

// forward runs one stage and gives what the next one takes, or the loss.
func (c *ranks) forward(ctx context.Context, r *rank, k int, hidden *engine.Array,
	b *data.Batch) (*engine.Array, error) {
	x := r.stages[k]
	st := x.Forward.Stage()
	args := make([]*engine.Array, len(st.Args))
	for i, spec := range st.Args {
		if slices.Contains(x.Inputs, spec.Name) {
			args[i] = hidden
		} else if args[i] = r.state.Get(spec.Name); args[i] == nil {
			a, err := c.data(k, st, spec, b, 0, 1)
			if err != nil {
				return nil, err
			}
			if a == nil {
				return nil, diag.New(diag.ArgumentCount, "stage %s needs %s, which nothing gives", st.Name,
					spec.Name)
			}
			defer a.Free()
			args[i] = a
		}
	}
	run, err := x.Forward.Run(args...)
	if err != nil {
		return nil, err
	}
	if err := run.Wait(ctx); err != nil {
		run.Free()
		return nil, err
	}
	want := append(slices.Clone(x.Outputs), x.Results...)[0]
	var out *engine.Array
	for i, a := range run.Take() {
		if st.Results[i].Name == want {
			out = a
		} else {
			a.Free()
		}
	}
	return out, nil
}
