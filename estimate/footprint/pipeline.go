package footprint

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/schedule"
)

// A shape is a schedule and its size.
type shape struct {
	name                   string
	ranks, virtual, micros int64
}

// An event is an action of a rank with what it holds then: by turn, microbatches between forward
// and the input's gradient, and between that and the weights'.
type event struct {
	kind    schedule.Kind
	stage   int
	forward [maxTurns]int16
	input   [maxTurns]int16
}

// maxTurns bounds the virtual stages of a rank: more are not of use, since each sends.
const maxTurns = 32

// events are those of each rank that differ, and where each stage lies.
type events struct {
	ranks [][]event
	of    [][]int // stages of a rank
	turn  []int   // of a stage on its rank
	split bool
}

// walk goes through a schedule, once for each shape.
func (p *Predictor) walk(pl *plan.Plan) (*events, error) {
	key := shape{pl.PP.Schedule, pl.PP.Size, pl.PP.Virtual, pl.Microbatches}
	if e := p.schedules[key]; e != nil {
		return e, nil
	}
	s, err := pl.Schedule()
	if err != nil {
		return nil, err
	}
	if s.Virtual > maxTurns {
		return nil, diag.New(diag.NotSupported, "%d virtual stages on a rank", s.Virtual).
			Try("at most %d", maxTurns)
	}
	e := &events{ranks: make([][]event, s.Ranks), of: make([][]int, s.Ranks),
		turn: make([]int, s.Stages())}
	for k := range e.turn {
		rank := s.Rank(k)
		e.turn[k] = len(e.of[rank])
		e.of[rank] = append(e.of[rank], k)
	}
	for rank, list := range s.Lists {
		seen := map[event]bool{}
		var now event
		for _, a := range list {
			now.kind, now.stage = a.Kind, a.Stage
			if !seen[now] {
				seen[now] = true
				e.ranks[rank] = append(e.ranks[rank], now)
			}
			t := e.turn[a.Stage]
			switch a.Kind {
			case schedule.Forward:
				now.forward[t]++
			case schedule.Backward:
				now.forward[t]--
			case schedule.Input:
				now.forward[t]--
				now.input[t]++
				e.split = true
			case schedule.Weight:
				now.input[t]--
			}
		}
	}
	p.schedules[key] = e
	return e, nil
}

// A stage is what one virtual stage has: bytes of a microbatch between its actions, and programs.
type stage struct {
	part
	params                           []holding
	taken, kept, handed, seeds       int64
	forward, backward, input, weight need
}

// pipeline predicts a plan with stages.
func (p *Predictor) pipeline(pl *plan.Plan) (Footprint, error) {
	e, err := p.walk(pl)
	if err != nil {
		return Footprint{}, err
	}
	s := p.sizes(pl)
	w := p.way(pl, &s)
	stages := p.stages(pl, &s, &w, e)
	f := Footprint{make([]Rank, len(e.ranks)), make([]Stage, len(stages))}
	var all []holding
	for rank := range f.Ranks {
		all = all[:0]
		for _, k := range e.of[rank] {
			st := &stages[k]
			var own Rank
			own.resident(&w, st.params)
			f.Stages[k] = Stage{own.State + own.Copies, own.Grads, st.kept, st.most()}
			all = join(all, st.params)
		}
		r := &f.Ranks[rank]
		r.resident(&w, all)
		r.worst(0, p.reduce("reduce", &w, all))
		r.worst(0, p.update("adamw", &w, all, false))
		for i := range e.ranks[rank] {
			e.happen(&e.ranks[rank][i], r, stages, e.of[rank])
		}
	}
	return f, nil
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

// happen adds up what is held when an action is at work.
func (e *events) happen(v *event, r *Rank, stages []stage, of []int) {
	held := int64(0)
	for _, k := range of {
		t := e.turn[k]
		held += int64(v.forward[t])*stages[k].kept + int64(v.input[t])*stages[k].handed
	}
	k := &stages[v.stage]
	switch v.kind {
	case schedule.Forward:
		r.worst(held+k.taken, k.forward)
	case schedule.Backward:
		r.worst(held+k.seeds, k.backward)
	case schedule.Input:
		if k.input.name != "" {
			r.worst(held+k.seeds, k.input)
		}
	case schedule.Weight:
		r.worst(held, k.weight)
	}
}

// most is what a stage needs at most while it is at work on a microbatch, beside what that keeps.
func (st *stage) most() (n int64) {
	n = st.taken + st.forward.temp + st.forward.results - st.kept
	for _, one := range []need{st.backward, st.input, st.weight} {
		n = max(n, st.seeds+one.temp+one.results)
	}
	return n
}

// reduce is the program that adds gradients up over the mesh of a rank.
func (p *Predictor) reduce(name string, w *way, list []holding) need {
	n := need{name: name}
	var all int64
	for i := range list {
		h := &list[i]
		if !w.spread && (h.cut && w.zero >= 2 || !h.cut && !w.sharded) {
			continue // it takes the place of its only term
		}
		n.results += h.stored() * w.grad
		if h.cut && w.zero < 2 {
			n.temp = max(n.temp, 2*h.whole()*w.sum) // one is sent, one got ready
		} else {
			all += h.stored() * w.sum
		}
	}
	if !p.cpu { // half of what is rounded waits
		n.temp = max(n.temp, all/2)
	}
	return n
}

// stages sizes the virtual stages.
func (p *Predictor) stages(pl *plan.Plan, s *sizes, w *way, e *events) []stage {
	list := make([]stage, len(e.turn))
	each, more := p.rounds/int64(len(list)), p.rounds%int64(len(list))
	flow := s.values(s.piece, s.embed)
	ids := s.tokens * 4
	for k := range list {
		st := &list[k]
		st.part = part{each, k == 0, k == len(list)-1}
		if int64(k) < more { // as plan.Plan.Stages deals them
			st.rounds++
		}
		if k > 0 && st.part == list[k-1].part {
			*st = list[k-1]
			continue
		}
		st.params = p.held(s, st.part)
		places := ids // positions
		if p.cpu {
			places += ids // documents
		}
		if p.config.Learned && !st.first {
			places -= ids
		}
		g := gradient{p: p, s: s, w: w, again: againOf(pl.Recompute), part: st.part, params: st.params,
			plan: pl, onto: true}
		st.kept = sum(s.kept(g.again))*st.rounds*s.layers + places
		st.taken = places
		results := sum(s.kept(g.again)) * st.rounds * s.layers
		if st.first {
			st.kept += ids
			st.taken += ids
		} else {
			st.taken += flow
		}
		if st.last {
			last := flow + s.tokens*s.vocab*s.elem + 4*s.tokens
			if !g.again.norm {
				last += flow
			}
			st.kept += last + ids
			st.taken += ids
			results += last
		} else {
			results += flow
			st.seeds = flow
		}
		if w.gather == "micro" { // what was gathered for the pass forward stays for the one back
			for i := range st.params {
				h := &st.params[i]
				if h.cut && (h.stack || st.last && (h.name != "embed" || p.config.Tied)) {
					st.kept += h.whole() * w.elem
					results += h.whole() * w.elem
				}
			}
		}
		g.forward = true
		st.forward = need{"forward", g.temp(), results}
		g.forward, g.backward = false, true
		given := flow
		if st.first {
			given = 0
		}
		if !e.split {
			st.backward = need{"backward", g.temp(), given}
			continue
		}
		if st.first { // there is no input to have a gradient
			st.handed = st.kept
			st.weight = need{"weight", g.temp(), 0}
			continue
		}
		var new int64
		st.handed, new = g.handed()
		g.half = ofInput
		st.input = need{"input", g.temp(), given + new}
		g.half = ofWeights
		st.weight = need{"weight", g.temp(), 0}
	}
	return list
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
	part(a.mlp, mlp, 2*mlp)
	part(a.norm, 2*flow, 2*whole)
	part(a.attn, heads, heads)
	rounds := g.part.rounds * s.layers
	made, kept = made*rounds, kept*rounds
	if g.part.last {
		made += s.values(s.tokens, s.vocab) + 8*s.piece*s.embed
		kept += flow
	}
	return made + kept, made
}

// stageNeeds lists the programs of all stages and ranks.
func (p *Predictor) stageNeeds(pl *plan.Plan, s *sizes, w *way, e *events) (list []need) {
	stages := p.stages(pl, s, w, e)
	for k := range stages {
		st := &stages[k]
		for _, n := range []need{st.forward, st.backward, st.input, st.weight} {
			n.name = fmt.Sprintf("stage%d.%s", k, n.name)
			list = append(list, n)
		}
	}
	for rank := range e.ranks {
		var all []holding
		for _, k := range e.of[rank] {
			all = join(all, stages[k].params)
		}
		name := fmt.Sprintf("rank%d.", rank)
		list = append(list, p.reduce(name+"reduce", w, all), p.update(name+"adamw", w, all, false))
	}
	return list
}
