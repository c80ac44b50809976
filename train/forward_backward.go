package train

import (
	"cmp"
	"context"
	"math"
	"slices"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

// gradients runs forward and backward pass over all microbatches of a batch and returns the mean
// loss of its labels, summed over processes. The gradients stay on the devices, not yet reduced
// over the data axes. Each rank begins by clearing its accumulators ([step.Zero]); a step that is
// inspected runs programs that also measure rounding errors.
func (c *executor) gradients(ctx context.Context, b *data.Batch) (loss float64, err error) {
	base := c.x // whose gradient programs run; Zero always runs from the programs at work
	if c.probes != nil {
		base = c.probes
	}
	// Experts may have more tokens than slots: then all microbatches run once more, with more slots.
	for rung, again := c.ladder.begin(c.t.step), true; again; {
		at, err := c.ladder.at(ctx, rung, base)
		if err != nil {
			return 0, err
		}
		if loss, err = c.gradientsBy(ctx, at, b); err != nil {
			return 0, err
		}
		c.staged = nil // taken, or dropped
		if rung, again, err = c.ladder.climb(ctx, rung, c.overflow()); err != nil {
			return 0, err
		}
		if again {
			c.ladder.rung = rung
		}
	}
	return c.peers.sum(ctx, loss)
}

// gradientsBy runs the gradient programs of a table over all microbatches, and returns the sum of
// their losses in this process.
func (c *executor) gradientsBy(ctx context.Context, at *compiled, b *data.Batch) (loss float64,
	err error) {
	err = c.each(ctx, func(ctx context.Context, r *rank) error {
		r.stats.begin()
		if c.probes != nil {
			if err := r.keep(ctx, c.probes.of(step.Inspect, r)); err != nil {
				return err
			}
		}
		return r.keep(ctx, c.x.of(step.Zero, r))
	})
	switch {
	case err != nil:
	case at.pipe == nil:
		loss, err = c.joint(ctx, at, b)
	default:
		loss, err = c.pipelined(ctx, at, b)
	}
	return loss, err
}

// joint runs the microbatches one after the other, where forward and backward pass are one program.
// A single one writes the gradients, several add to them. A microbatch is queued before the loss of
// the one before it is read, so that the devices do not wait for the host.
func (c *executor) joint(ctx context.Context, at *compiled, b *data.Batch) (total float64,
	err error) {
	r := c.ranks[0]
	var before *engine.Run // whose loss is not read yet
	var last *engine.Executable
	read := func(run *engine.Run, x *engine.Executable) error {
		defer run.Free()
		defer c.t.span("gradient")()
		loss, err := scalar(ctx, run.Results[0])
		if err != nil {
			return err
		}
		total += loss
		return r.stats.read(ctx, string(step.Gradient), run.Results, x.Module())
	}
	for first := 0; first < b.Sequences; first += c.t.opts.Recipe.Microbatch {
		x := at.of(step.Gradient, r)
		run, err := c.microbatch(ctx, r, x, b, first)
		if err == nil && before != nil {
			err = read(before, last)
		} else if err != nil && before != nil {
			before.Free()
		}
		if err != nil {
			if run != nil {
				run.Free()
			}
			return 0, err
		}
		before, last = run, x
	}
	if c.t.hooks.beforeLoss != nil {
		c.t.hooks.beforeLoss()
	}
	err = read(before, last)
	return total, err
}

// microbatch queues one microbatch, the sequences from first on.
func (c *executor) microbatch(ctx context.Context, r *rank, x *engine.Executable, b *data.Batch,
	first int) (*engine.Run, error) {
	defer c.t.span("place")()
	var placed []*engine.Array
	for _, spec := range x.Module().Args {
		if a := c.staged.take(b, 0, first, spec.Name); a != nil {
			placed = append(placed, a)
		}
	}
	rows := r.batch(b, first, int(c.t.programs.Shape.Batch), c.t.hooks.lossScale(b.Total))
	run, err := r.run(ctx, x, &r.state, rows, placed...)
	if err != nil {
		return nil, err
	}
	// Sums of microbatches are returned in the buffers of the accumulators (donated arguments), which
	// need not be stored again.
	single := c.x.of(step.Zero, r) == nil
	for i, spec := range x.Module().Results {
		if single && spec.Role == program.Gradient {
			run.Keep(&r.state, run.Results[i])
		}
	}
	return run, nil
}

// pipelined runs the microbatches through the stages in the order of the schedule. Only the last
// stage has a loss.
func (c *executor) pipelined(ctx context.Context, at *compiled, b *data.Batch) (loss float64,
	err error) {
	defer c.t.span("gradient")()
	// The pipeline asks for inputs when an action is about to run, so at most a few microbatches are
	// on the devices at once.
	share := c.t.hooks.lossScale(b.Total)
	out, err := at.pipe.Run(ctx, func(_ context.Context, stage, microbatch int, m *program.Module,
		spec program.Array) (*engine.Array, error) {
		return c.data(stage, m, spec, b, microbatch*c.t.opts.Recipe.Microbatch, share)
	})
	if err != nil {
		return 0, err
	}
	defer out.Free()
	for _, one := range out.Results {
		r := c.ranks[c.t.programs.Stages[one.Stage].Rank]
		if one.Spec.Role == program.Stat {
			if err := r.stats.readOne(ctx, one.Program, one.Array, one.Spec); err != nil {
				return 0, err
			}
			continue
		}
		x, err := scalar(ctx, one.Array)
		if err != nil {
			return 0, err
		}
		loss += x
	}
	return loss, nil
}

// data places what one stage takes of a microbatch: token ids and positions on the first, labels on
// the last.
func (c *executor) data(stage int, m *program.Module, spec program.Array, b *data.Batch, first int,
	share float64) (*engine.Array, error) {
	if a := c.staged.take(b, stage, first, spec.Name); a != nil {
		return a, nil
	}
	r := c.ranks[c.t.programs.Stages[stage].Rank]
	bytes, ok := r.batch(b, first, int(c.t.programs.Shape.Batch), share)[spec.Name]
	if !ok {
		return nil, nil //nolint:nilnil // the pipeline says what is missing
	}
	return r.place(m, spec, bytes)
}

// quantize makes the quantized copies of the f32 parameters that the GEMMs read.
func (c *executor) quantize(ctx context.Context) error {
	return c.each(ctx, func(ctx context.Context, r *rank) error {
		return r.keep(ctx, c.x.of(step.Quantize, r))
	})
}

// keep runs a program on the rank's state, stores its results there under their names, and reads
// its statistics. A nil program does nothing.
func (r *rank) keep(ctx context.Context, x *engine.Executable) error {
	if x == nil {
		return nil
	}
	run, err := r.run(ctx, x, &r.state, nil)
	if err != nil {
		return err
	}
	defer run.Free()
	for i, spec := range x.Module().Results {
		if spec.Role != program.Stat {
			run.Keep(&r.state, run.Results[i])
		}
	}
	return r.stats.read(ctx, "", run.Results, x.Module())
}

// update reduces the gradients and applies the optimizer. With commit false, or a gradient norm
// above limit or not finite, the programs leave every bit of the state as it is, and ok is false.
// norm is the global norm before clipping.
func (c *executor) update(ctx context.Context, commit bool, rate, limit float64) (norm float64,
	ok bool, err error) {
	defer c.t.span("update")()
	if err := c.reduce(ctx); err != nil {
		return 0, false, err
	}
	return c.finish(ctx, commit, rate, limit)
}

// reduce sums the gradients over the data axes of each rank (reduce-scatter under FSDP), after
// which every device has its shard of the sum.
func (c *executor) reduce(ctx context.Context) error {
	return c.each(ctx, func(ctx context.Context, r *rank) error {
		return r.keep(ctx, c.x.of(step.Reduce, r))
	})
}

// finish exchanges the gradients of shared parameters, sums the squares of all gradients over ranks
// and processes, and updates. All ranks see the same global norm, and so decide alike whether the
// step counts.
func (c *executor) finish(ctx context.Context, commit bool, rate, limit float64) (norm float64,
	ok bool, err error) {
	// Squares of the gradients of each rank. A shared parameter counts in one rank only, after
	// both terms of its gradient were added.
	squares := make([]float64, len(c.ranks))
	err = c.each(ctx, func(ctx context.Context, r *rank) (err error) {
		square := c.x.of(step.Square, r)
		if square == nil {
			return nil
		}
		if err := r.exchange(ctx, c.t.programs.Ranks[r.number], square.Module()); err != nil {
			return err
		}
		if err := r.keep(ctx, square); err != nil {
			return err
		}
		for _, h := range c.t.programs.Ranks[r.number].RankParams {
			r.state.Drop(program.PeerGradient.Of(h.Name))
		}
		// With one rank the square stays on the devices: no round trip through the host.
		if len(c.ranks) > 1 {
			squares[r.number], err = scalar(ctx, r.state.Get(optim.GradSquare))
		}
		return err
	})
	if err != nil {
		return 0, false, err
	}
	// The same order of summation in all runs: the norm decides on clipping, so its bits matter.
	total := 0.0
	for _, x := range squares {
		total += x
	}
	if total, err = c.peers.sum(ctx, total); err != nil {
		return 0, false, err
	}
	// Every rank gets the same norm and limit, and so clips and commits alike.
	oks, norms := make([]bool, len(c.ranks)), make([]float64, len(c.ranks))
	err = c.each(ctx, func(ctx context.Context, r *rank) (err error) {
		inputs := c.t.settings(commit, rate, limit)
		if len(c.ranks) > 1 {
			inputs[optim.GradSquare] = f32Bytes(total)
		}
		norms[r.number], oks[r.number], err = c.apply(ctx, r, inputs)
		return err
	})
	if norm = norms[0]; len(c.ranks) > 1 {
		norm = math.Sqrt(total)
	}
	ok = !slices.ContainsFunc(c.ranks, func(r *rank) bool { return r != nil && !oks[r.number] })
	return norm, ok, err
}

// exchange swaps the gradients of parameters that two ranks share. Each adds the other's to its own
// in the program that follows.
func (r *rank) exchange(ctx context.Context, p *step.Rank, square *program.Module) error {
	for _, h := range p.RankParams {
		link := r.shared[h.Name]
		if link == nil {
			continue
		}
		got, err := swap(ctx, link, r.state.Get(program.Gradient.Of(h.Name)), square,
			square.Args[argument(square, program.PeerGradient.Of(h.Name))])
		if err != nil {
			return err
		}
		r.state.Put(got)
	}
	return nil
}

// swap sends an array and receives one at the same time. Both ends do: an array larger than the
// socket buffers is only sent while the other end receives.
func swap(ctx context.Context, l engine.Link, mine *engine.Array, m *program.Module,
	spec program.Array) (*engine.Array, error) {
	// An error of one direction cancels the other, and both have ended when swap returns.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	sent := make(chan error, 1)
	go func() { sent <- l.Send(ctx, mine.Name(), mine) }()
	got, err := l.Recv(ctx, mine.Name(), m, spec)
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

// apply runs the optimizer of a rank, keeps the parameter copies that it makes for the next step,
// and frees the gradients. norm is set if this rank knows the squares of all gradients itself.
func (c *executor) apply(ctx context.Context, r *rank, inputs map[string][]byte) (norm float64,
	ok bool, err error) {
	x := c.x.of(step.Update, r)
	run, err := r.run(ctx, x, &r.state, inputs)
	if err != nil {
		return 0, false, err
	}
	defer run.Free()
	// The square of the norm is still in the state where one rank has all gradients.
	if a := r.state.Get(optim.GradSquare); a != nil {
		square, err := scalar(ctx, a)
		if err != nil {
			return 0, false, err
		}
		norm = math.Sqrt(square)
		r.state.Drop(optim.GradSquare)
	}
	// Parameters and moments are updated in place (donated); other results are read or kept.
	for i, a := range run.Results {
		switch spec := x.Module().Results[i]; {
		case spec.Role == program.Copy:
			run.Keep(&r.state, a)
		case spec.Name == optim.Norm:
			if norm, err = scalar(ctx, a); err != nil {
				return 0, false, err
			}
		case spec.Name == optim.OK:
			b, err := a.Read(ctx, 0)
			if err != nil {
				return 0, false, err
			}
			ok = b[0] != 0
		}
	}
	// Gradients are freed until the next step: the memory is then free for saves and validations.
	for _, h := range c.t.programs.Ranks[r.number].RankParams {
		r.state.Drop(program.Gradient.Of(h.Name))
	}
	return norm, ok, r.stats.read(ctx, "", run.Results, x.Module())
}

// evaluate returns the sum of the losses over the labels of one microbatch: it runs the stages
// forward, one after the other, and saves no activations.
func (c *executor) evaluate(ctx context.Context, b *data.Batch) (loss float64, err error) {
	for rung, again := c.ladder.begin(c.t.step), true; again; {
		for _, r := range c.hosted() {
			r.stats.Loads = nil
		}
		at, err := c.ladder.at(ctx, rung, c.x)
		if err != nil {
			return 0, err
		}
		if loss, err = c.evaluateBy(ctx, at, b); err != nil {
			return 0, err
		}
		if rung, again, err = c.ladder.climb(ctx, rung, c.overflow()); err != nil {
			return 0, err
		}
	}
	return c.peers.sum(ctx, loss)
}

// evaluateBy runs the forward programs of a table.
func (c *executor) evaluateBy(ctx context.Context, at *compiled, b *data.Batch) (float64, error) {
	p := c.t.programs
	loss := 0.0
	var hidden *engine.Array
	for k, s := range p.Stages { // hidden are the activations [B, S, H] between two stages
		r := c.ranks[s.Rank]
		if r == nil {
			continue
		}
		x := at.stage(step.Forward, k)
		if p.Joint() {
			x = at.stage(step.Evaluate, k)
		}
		if k > 0 && p.Stages[k-1].Rank != s.Rank {
			at := slices.IndexFunc(x.Module().Args, func(a program.Array) bool {
				return a.Role == program.Activation
			})
			var err error
			hidden, err = r.ends[p.Stages[k-1].Rank].Recv(ctx, "evaluate", x.Module(), x.Module().Args[at])
			if err != nil {
				return 0, err
			}
		}
		out, err := c.forward(ctx, r, x, k, hidden, b)
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
	return loss, nil
}

// forward runs one stage and returns the activations for the next one, or the loss.
func (c *executor) forward(ctx context.Context, r *rank, x *engine.Executable, k int,
	hidden *engine.Array, b *data.Batch) (*engine.Array, error) {
	m := x.Module()
	// Arguments are activations from the stage before, arrays of the state, or inputs from the host.
	args := make([]*engine.Array, len(m.Args))
	for i, spec := range m.Args {
		if spec.Role == program.Activation {
			args[i] = hidden
		} else if args[i] = r.state.Get(spec.Name); args[i] == nil {
			a, err := c.data(k, m, spec, b, 0, 1)
			if err != nil {
				return nil, err
			}
			if a == nil {
				return nil, diag.New(diag.ArgumentCount, "module %s needs %s, which nothing gives", m.Name,
					spec.Name)
			}
			defer a.Free()
			args[i] = a
		}
	}
	run, err := x.Run(ctx, args...)
	if err != nil {
		return nil, err
	}
	if err := run.Wait(ctx); err != nil {
		run.Free()
		return nil, err
	}
	var out *engine.Array
	for i, a := range run.Take() {
		if role := m.Results[i].Role; role == program.Activation || role == program.Loss {
			out = a
			continue
		}
		err = cmp.Or(err, r.readLoad(ctx, a, m.Results[i]))
		a.Free()
	}
	return out, err
}
