package call

import (
	"context"
	"maps"
	"slices"

	"github.com/deepwell/deepwell/capture/aten"
	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/program"
)

// An opened program, and the parameters that its variants read.
type opened struct {
	archive  *pt2.Archive
	function *aten.Function
	places   map[string]place // of tensors
	binding  int64            // counts changes of places
	// arrays are parameters that the engine reads where they are. The caller changes them between
	// passes, never during one, so they are lent once.
	arrays map[string]*engine.Array
}

func (o *opened) free() {
	o.unbind()
	_ = o.archive.Close()
}

func (o *opened) unbind() {
	for _, a := range o.arrays {
		a.Free()
	}
	o.arrays = map[string]*engine.Array{}
}

// unmapped gives up what was in a block. Where a parameter was it is no more, whose name is then an
// error, and the rest is lent again.
func (o *opened) unmapped(block int64) {
	there := false
	for name, p := range o.places {
		if p[0] == block {
			there = true
			delete(o.places, name)
		}
	}
	if there {
		o.unbind()
	}
}

// A pending call has what its backward pass reads.
type pending struct {
	v *variant
	// places are where the tensors of parameters were: the caller keeps what was there.
	places  map[string]place
	binding int64
	blocks  map[int64]bool           // that its arguments are in
	values  map[string]*engine.Array // by the names that graphs have for them
}

func (p *pending) free() {
	for _, a := range p.values {
		a.Free()
	}
}

// forward runs a variant: args are the places of the caller's tensors (one that is not used is
// ignored), outs the results' places. What it returns is nil for a variant without gradients.
func (s *server) forward(ctx context.Context, v *variant, args, outs []place) (*pending, error) {
	p := &pending{v: v, places: v.owner.places, binding: v.owner.binding,
		values: map[string]*engine.Array{}, blocks: map[int64]bool{}}
	m := v.forward.Module()
	for k, a := range m.Args {
		i, ok := v.forward.inputs[k]
		if !ok {
			continue
		}
		if i >= len(args) {
			p.free()
			return nil, diag.New(diag.BadInput, "%d tensors are given, and not the one of number %d",
				len(args), i)
		}
		x, err := s.lend(m, a, args[i], engine.Lent)
		if err != nil {
			p.free()
			return nil, err
		}
		p.values[a.Name], p.blocks[args[i][0]] = x, true
	}
	kept, err := s.run(ctx, p, v.forward, p.values, outs)
	if err != nil || v.grad == nil {
		p.free()
		return nil, err
	}
	for _, a := range kept {
		p.values[a.Name()] = a
	}
	return p, nil
}

// differentiate runs the backward pass of a call, and lists the gradients that do not exist. A seed
// whose block is negative is not given.
func (s *server) differentiate(ctx context.Context, p *pending, seeds, grads []place) (
	none []int, err error) {
	names := p.v.grad.Seeds
	if len(seeds) != len(names) {
		return nil, diag.New(diag.BadInput, "%d gradients of %d results are given",
			len(seeds), len(names))
	}
	given := make([]bool, len(names))
	for i := range seeds {
		given[i] = seeds[i][0] >= 0 && names[i] != ""
	}
	back, err := s.back(ctx, p.v, given)
	if err != nil {
		return nil, err
	}
	values := maps.Clone(p.values)
	for _, a := range back.Module().Args {
		if i := slices.Index(names, a.Name); i >= 0 {
			x, err := s.lend(back.Module(), a, seeds[i], engine.Lent)
			if err != nil {
				return nil, err
			}
			defer x.Free()
			values[a.Name] = x
		}
	}
	kept, err := s.run(ctx, p, back.pass, values, grads)
	for _, a := range kept {
		a.Free()
	}
	return back.none, err
}

// run runs a pass to its end: arguments are values, parameters, and the memory of wanted results.
// It gives the results that are not written there.
func (s *server) run(ctx context.Context, c *pending, p *pass, values map[string]*engine.Array,
	outs []place) ([]*engine.Array, error) {
	m := p.Module()
	if len(outs) != len(p.places) {
		return nil, diag.New(diag.BadInput, "%s has %d results, not %d", m.Name, len(p.places), len(outs))
	}
	args := make([]*engine.Array, len(m.Args))
	for i, a := range m.Args {
		var err error
		at, room := p.rooms[i]
		switch {
		case values[a.Name] != nil:
			args[i] = values[a.Name]
		case room:
			if args[i], err = s.lend(m, a, outs[at], engine.Given); err == nil {
				defer args[i].Free()
			}
		default:
			var own bool
			if args[i], own, err = s.param(ctx, c, m, a); own {
				defer args[i].Free()
			}
		}
		if err != nil {
			return nil, err
		}
	}
	run, err := p.Run(ctx, args...)
	if err != nil {
		return nil, err
	}
	list := run.Take()
	err = run.Wait(ctx)
	run.Free()
	written := make([]bool, len(list))
	for i, at := range p.places {
		if p.room[i] {
			written[at] = true
			continue
		}
		if err != nil {
			break
		}
		err = s.store(ctx, list[at], bytesOf(m.Results[at]), outs[i])
	}
	var kept []*engine.Array
	for i, a := range list {
		if written[i] || err != nil {
			a.Free()
		} else {
			kept = append(kept, a)
		}
	}
	return kept, err
}

func bytesOf(a program.Array) int64 { return a.Global.Type.Bytes(a.Global.Elements()) }

// param gives a parameter: where it is, if its tensors follow each other there, else a copy, which
// the caller frees.
func (s *server) param(ctx context.Context, c *pending, m *program.Module, a program.Array) (
	*engine.Array, bool, error) {
	v, now := c.v, c.binding == c.v.owner.binding
	if x := v.owner.arrays[a.Name]; now && x != nil && x.Local().Equal(a.Global) {
		return x, false, nil
	}
	at := slices.IndexFunc(v.params, func(p model.Param) bool { return p.Name == a.Name })
	if at < 0 {
		return nil, false, diag.New(diag.Internal, "%s has no argument %q", m.Name, a.Name)
	}
	names := v.params[at].Tensors()
	size := bytesOf(a) / int64(len(names))
	var parts []place
	dense := true
	for i, name := range names {
		p, ok := c.places[name]
		if !ok || !s.blocks.has(p, size) {
			return nil, false, diag.New(diag.BadInput, "the caller has not said where %s is", name)
		}
		parts = append(parts, p)
		dense = dense && p == place{parts[0][0], parts[0][1] + int64(i)*size}
	}
	if unit := s.unit(parts[0]); dense && parts[0][1]%unit == 0 {
		x, err := s.lend(m, a, parts[0], engine.Lent)
		if !now { // of a call before the tensors were replaced
			return x, err == nil, err
		}
		if err == nil {
			if old := v.owner.arrays[a.Name]; old != nil { // of another shape
				old.Free()
			}
			v.owner.arrays[a.Name] = x
		}
		return x, false, err
	}
	x, err := s.gather(ctx, m, a, parts)
	return x, err == nil, err
}
