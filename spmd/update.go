package spmd

import (
	"slices"
	"strings"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
)

// copied tells whether the loss takes more of a parameter than a device keeps of it.
func (s *Step) copied(i int) bool {
	if s.sharding == nil {
		return false
	}
	l := s.sharding.Params[i]
	return !l.Compute.Place.Equal(l.Stored.Place)
}

// scattered leaves each device its piece of a gradient's sum, if the plan keeps gradients in pieces
// and they are not yet.
func (s *Step) scattered(b *ir.Builder, i int, g *ir.Value) *ir.Value {
	if s.sharding == nil || s.sharding.Plan.FSDP.Zero < 2 {
		return g
	}
	return s.piecewise(b, g, s.sharding.Params[i].Stored.Place)
}

// piecewise adds up terms along the axes that cut what is kept.
func (s *Step) piecewise(b *ir.Builder, g *ir.Value, stored ir.Placement) *ir.Value {
	for _, share := range slices.Clone(g.Type.Place) {
		if dim := stored.On(share.Axis); share.How == ir.Partial && dim != "" {
			g = b.Convert(g, s.sharding.Plan.Types.Collectives)
			g = b.ReduceScatter(g, share.Axis, dim)
		}
	}
	return g
}

// update builds the update. On a mesh it is that of the whole parameters, rebuilt for what one
// device keeps of them.
func (s *Step) update(o optim.Optimizer) (*ir.Graph, error) {
	if s.sharding == nil {
		return o.Update(s.Params)
	}
	p := s.sharding.Plan
	params := slices.Clone(s.Params)
	for i := range params {
		l := s.sharding.Params[i]
		t := global(l.Stored, p.Mesh())
		t.Elem = params[i].Type.Elem
		params[i].Type = t
		params[i].Group = axesOf(l.Stored.Place)
	}
	whole, err := o.Update(params)
	if err != nil {
		return nil, err
	}
	u := newSharder(whole.Name, p)
	bound := u.bind(s, o, params)
	for _, v := range whole.Inputs {
		if piece := bound[v.Name]; piece != nil {
			u.at[v] = piece(v)
		} else {
			u.at[v] = u.b.Input(v.Name, v.Role, v.Type, v.Source)
		}
	}
	if err := u.ops(whole); err != nil {
		return nil, err
	}
	return u.results(s, whole)
}

// axesOf names the axes that cut something, as one word.
func axesOf(place ir.Placement) string {
	var names []string
	for _, s := range place {
		names = append(names, s.Axis)
	}
	return strings.Join(names, " ")
}

// A binding gives what stands on a device for an input of the whole.
type binding func(whole *ir.Value) *ir.Value

// bind says, by the names of the inputs of the whole update, what a device has in their place: its
// pieces, and of gradients the sum of all terms.
func (u *sharder) bind(s *Step, o optim.Optimizer, params []optim.Param) map[string]binding {
	bound := map[string]binding{}
	for i, p := range params {
		stored := s.sharding.Params[i].Stored
		keep := func(v *ir.Value) *ir.Value {
			t := ir.Type{Elem: v.Type.Elem, Dims: stored.Dims, Place: stored.Place}
			return u.b.Input(v.Name, v.Role, t, v.Source)
		}
		bound[p.Name] = keep
		for _, slot := range o.State(p) {
			bound[slot.Name] = keep
		}
		bound[GradientOf(p.Name)] = func(v *ir.Value) *ir.Value {
			g := u.b.Input(v.Name, v.Role, s.Params[i].Type, v.Source)
			terms := func(share ir.Share) bool { return share.How == ir.Partial }
			if slices.ContainsFunc(g.Type.Place, terms) {
				g = u.b.Convert(g, u.plan.Types.Collectives)
			}
			g = u.conform(s.piecewise(u.b, g, stored.Place), stored.Place)
			return u.b.Convert(g, v.Type.Elem)
		}
	}
	return bound
}

// results names what the update gives as the whole one does, and makes the copies that the loss
// takes.
func (u *sharder) results(s *Step, whole *ir.Graph) (*ir.Graph, error) {
	var out []*ir.Value
	var names []string
	made := map[string]*ir.Value{}
	for _, v := range whole.Results {
		out, names = append(out, u.settled(u.at[v])), append(names, v.Name)
		made[v.Name] = out[len(out)-1]
	}
	for i, p := range s.Params {
		if !s.copied(i) {
			continue
		}
		name := CopyOf(p.Name)
		from := made[name]
		if from == nil {
			from = made["next."+p.Name]
			out, names = append(out, nil), append(names, name)
		}
		dim := s.sharding.Params[i].Stored.Place.On(plan.FSDPAxis)
		all := u.b.AllGather(from, plan.FSDPAxis, dim)
		out[slices.Index(names, name)] = all
	}
	g, err := u.b.Graph(out...)
	if err != nil {
		return nil, err
	}
	for i, v := range out {
		v.Name = names[i]
	}
	return g, g.Verify()
}
