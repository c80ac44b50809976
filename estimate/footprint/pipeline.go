package footprint

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/schedule"
)

// A stage is what one virtual stage has: bytes of a microbatch between its actions, and programs.
type stage struct {
	part
	params                           []holding
	load                             schedule.Load
	forward, backward, input, weight need
}

// stages are the virtual stages of a plan. Most are alike, so that each kind is sized once.
type stages struct {
	kinds []stage
	loads []schedule.Load // of each kind
	of    []int           // the kind of each
}

func (l *stages) at(k int) *stage { return &l.kinds[l.of[k]] }

// walk goes through the plan's schedule.
func (p *Predictor) walk(pl *plan.Plan) (*schedule.Walk, error) {
	return p.walks.Of(pl.PP.Schedule, schedule.Shape{Ranks: int(pl.PP.Size),
		Virtual: int(pl.PP.Virtual), Micros: int(pl.Microbatches)})
}

// pipeline predicts a plan with stages.
func (p *Predictor) pipeline(pl *plan.Plan) (Footprint, error) {
	walk, err := p.walk(pl)
	if err != nil {
		return Footprint{}, err
	}
	s := p.sizes(pl)
	w := p.way(pl, &s)
	list := p.stages(pl, &s, &w, walk)
	f := &p.result
	ranks := len(walk.Stages)
	f.Ranks = slices.Grow(f.Ranks[:0], ranks)[:ranks]
	f.Loads = f.Loads[:0]
	for _, kind := range list.of {
		f.Loads = append(f.Loads, list.loads[kind])
	}
	var still Rank // of the rank before, as long as no microbatch is there
	var bound int64
	for rank := range f.Ranks {
		r := &f.Ranks[rank]
		if rank == 0 || !list.alike(walk.Stages[rank-1], walk.Stages[rank]) {
			p.all = p.all[:0]
			for _, k := range walk.Stages[rank] {
				p.all = join(p.all, list.at(k).params)
			}
			still = Rank{}
			still.resident(&w, p.all)
			bound = w.updateBound(p.all)
		}
		*r = still
		at, activations, temp := walk.Peak(rank, list.of, list.loads)
		r.Activations, r.Temp, r.Largest = activations, temp, programNames[at.Kind]
		if bound > activations+temp { // else it is not worth asking
			r.end(p.reduce("reduce", &w, &s, p.all))
			r.end(p.update("adamw", &w, &s, p.all, false))
		}
	}
	return *f, nil
}

// programNames are those of a stage, by kind of action.
var programNames = [...]string{schedule.Forward: "forward", schedule.Backward: "backward",
	schedule.Input: "input", schedule.Weight: "weight"}

// alike tells whether two ranks have the same parts of the model.
func (l *stages) alike(one, other []int) bool {
	return slices.EqualFunc(one, other, func(a, b int) bool { return l.of[a] == l.of[b] })
}

// join adds the parameters of a stage to those of its rank, which has a tied table once.
func join(all, more []holding) []holding {
	for _, h := range more {
		if h.stack || !slices.ContainsFunc(all, func(x holding) bool { return x.name == h.name }) {
			all = append(all, h)
		}
	}
	return all
}

// reduce is the program that adds gradients up over the mesh of a rank.
func (p *Predictor) reduce(name string, w *way, s *sizes, list []holding) need {
	n := need{name: name}
	for i := range list {
		h := &list[i]
		if !w.spread && (h.cut && w.zero >= 2 || !h.cut && !w.sharded) {
			continue // it takes the place of its only term
		}
		n.results += h.stored() * w.grad
	}
	n.temp = p.reduceTemp(w, s, list)
	return n
}

// stages sizes the virtual stages. The result is the predictor's own until the next one.
func (p *Predictor) stages(pl *plan.Plan, s *sizes, w *way, e *schedule.Walk) *stages {
	list := &p.list
	list.kinds, list.loads, list.of = list.kinds[:0], list.loads[:0], list.of[:0]
	n := len(e.Stages) * len(e.Stages[0])
	each, more, at := p.rounds/int64(n), p.rounds%int64(n), int64(0)
	for k := range n {
		rounds := each
		if int64(k) < more { // as plan.Plan.Stages deals them
			rounds++
		}
		t := p.part(at, rounds, k == 0, k == n-1)
		at += rounds
		if last := len(list.kinds) - 1; last < 0 || list.kinds[last].part != t {
			list.kinds = append(list.kinds, *p.stage(pl, s, w, t, e.Split))
			list.loads = append(list.loads, list.kinds[len(list.kinds)-1].load)
		}
		list.of = append(list.of, len(list.kinds)-1)
	}
	return list
}

// stage sizes one, once for all that it depends on: what its programs do, and whether the way back
// is cut in two.
func (p *Predictor) stage(pl *plan.Plan, s *sizes, w *way, t part, split bool) *stage {
	g := gradient{p: p, s: s, w: w, again: againOf(pl.Recompute), part: t, plan: pl, onto: true}
	key := g.key()
	if split {
		key.flags |= 1 << splitBit
	}
	st := p.sized[key]
	if st == nil {
		st = &stage{part: t, params: p.held(s, t)}
		g.params = st.params
		st.size(&g, split)
		p.sized[key] = st
	}
	return st
}

// size works out what the stage takes, keeps and hands on, and its programs. What goes to the host
// is counted nowhere.
func (st *stage) size(g *gradient, split bool) {
	p, s, l := g.p, g.s, &st.load
	flow, ids := s.values(s.piece, s.embed), s.tokens*4
	places := ids // positions
	if p.cpu {
		places += ids // documents
	}
	if p.config.Learned && !st.first {
		places -= ids
	}
	taken, seeds, results := places, int64(0), g.residuals()+g.staying()
	l.Kept = results + places
	if st.first {
		l.Kept += ids
		taken += ids
	} else {
		taken += flow
	}
	if st.last {
		l.Kept += ids
		taken += ids
	} else {
		results += flow
		seeds = flow
	}
	g.forward = true
	st.forward = need{"forward", g.temp(), results}
	g.forward, g.backward = false, true
	st.back(g, flow, split)
	st.charge(schedule.Forward, taken, st.forward)
	st.charge(schedule.Backward, seeds, st.backward)
	st.charge(schedule.Input, seeds, st.input)
	st.charge(schedule.Weight, 0, st.weight)
}

// residuals is the bytes of what the way back takes from the way forward, beside parameters and
// data: stacks of all layers, unless they are on the host, and what the head keeps.
func (g *gradient) residuals() (n int64) {
	s := g.s
	if !g.w.offload {
		n = sum(g.kept())
	}
	if g.part.last {
		flow := s.values(s.piece, s.embed)
		n += flow + s.tokens*s.vocab*s.elem + 4*s.tokens
		switch {
		case g.forward && g.backward && s.piece < s.tokens: // the head's input stays gathered
			n += s.values(s.tokens, s.embed)
		case !g.again.norm:
			n += flow
		}
	}
	return n
}

// staying is the bytes of gathered parameters that a stage hands from its way forward to its way
// back.
func (g *gradient) staying() (n int64) {
	if !g.stays() {
		return 0
	}
	for i := range g.params {
		h := &g.params[i]
		if h.cut && (h.stack || g.part.last && (h.name != "embed" || g.p.config.Tied)) {
			n += h.whole() * g.w.elem
		}
	}
	return n
}

// charge counts a program: what it takes beside what microbatches hold, what it gives, and its
// temp.
func (st *stage) charge(k schedule.Kind, taken int64, n need) {
	if n.name != "" {
		st.load.Passing[k], st.load.Temp[k] = taken+n.results, n.temp
	}
}

// back sizes the programs of the way back: one, or two halves of it.
func (st *stage) back(g *gradient, flow int64, split bool) {
	given := flow
	if st.first {
		given = 0
	}
	switch {
	case !split:
		st.backward = need{"backward", g.temp(), given}
	case st.first: // there is no input to have a gradient
		st.load.Handed = st.load.Kept
		st.weight = need{"weight", g.temp(), 0}
	default:
		var made int64
		st.load.Handed, made = g.handed()
		g.half = ofInput
		st.input = need{"input", g.temp(), given + made}
		g.half = ofWeights
		st.weight = need{"weight", g.temp(), 0}
	}
}

// handed is what the gradient of weights takes of a microbatch, and what of it the gradient of the
// input makes: the gradients of all products, in f32 of norms, and the other factor of each.
func (g *gradient) handed() (all, made int64) {
	s, a := g.s, g.again
	flow, whole := s.values(s.piece, s.embed), s.values(s.tokens, s.embed)
	mlp, heads := s.values(s.tokens, s.mlp), s.values(s.tokens, s.heads)
	made = 2*whole + s.ups*mlp + 16*s.piece*s.embed + 2*s.values(s.tokens, s.keys) + heads
	var kept int64
	part := func(again bool, before, after int64) {
		if again {
			made += after
		} else {
			kept += before
		}
	}
	down, out := g.thin(mlp, "down"), g.thin(heads, "o")
	part(a.mlp, down, mlp+down)
	part(a.norm, g.thin(flow, "q")+g.thin(flow, "up"), g.thin(whole, "q")+g.thin(whole, "up"))
	part(a.attn, out, out)
	rounds := g.part.rounds * s.layers
	made, kept = made*rounds, kept*rounds
	if g.w.offload { // what the forward pass stacked up is on the host
		kept = 0
	}
	if g.part.last {
		made += s.values(s.tokens, s.vocab) + 8*s.piece*s.embed
		kept += flow
	}
	return made + kept, made
}

// stageNeeds lists the programs of all stages and ranks.
func (p *Predictor) stageNeeds(pl *plan.Plan, s *sizes, w *way,
	e *schedule.Walk) (list []need) {
	stages := p.stages(pl, s, w, e)
	for k := range stages.of {
		st := stages.at(k)
		for _, n := range []need{st.forward, st.backward, st.input, st.weight} {
			n.name = fmt.Sprintf("stage%d.%s", k, n.name)
			list = append(list, n)
		}
	}
	for rank, of := range e.Stages {
		var all []holding
		for _, k := range of {
			all = join(all, stages.at(k).params)
		}
		name := fmt.Sprintf("rank%d.", rank)
		list = append(list, p.reduce(name+"reduce", w, s, all),
			p.update(name+"adamw", w, s, all, false))
	}
	return list
}
