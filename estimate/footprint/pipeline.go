package footprint

import (
	"fmt"

	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/schedule"
)

// A shape is a schedule and its size.
type shape struct {
	name                   string
	ranks, virtual, micros int64
}

// An event is an action of a rank with what it holds then: by turn, microbatches between forward and
// the input's gradient, and between that and the weights'.
type event struct {
	kind    schedule.Kind
	stage   int
	forward [maxTurns]int16
	input   [maxTurns]int16
}

// maxTurns bounds the stages of a rank.
const maxTurns = 16

// events are those of each rank that differ, and where each stage lies.
type events struct {
	ranks [][]event
	at    []int // rank of a stage
	turn  []int
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
	e := &events{ranks: make([][]event, s.Ranks), at: make([]int, s.Stages()),
		turn: make([]int, s.Stages())}
	turns := make([]int, s.Ranks)
	for k := range e.at {
		e.at[k] = s.Rank(k)
		e.turn[k] = turns[e.at[k]]
		turns[e.at[k]]++
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
func (p *Predictor) pipeline(pl *plan.Plan) ([]Rank, error) {
	e, err := p.walk(pl)
	if err != nil {
		return nil, err
	}
	s := p.sizes(pl)
	w := p.way(pl, &s)
	stages := p.stages(pl, &s, &w, e)
	out := make([]Rank, len(e.ranks))
	for rank := range out {
		r := &out[rank]
		var all []holding
		for k := range stages {
			if e.at[k] == rank {
				all = append(all, stages[k].params...)
			}
		}
		p.resident(r, &w, all)
		r.worst(0, p.reduce(rank, &w, all))
		r.worst(0, p.update(fmt.Sprintf("rank%d.adamw", rank), &w, all, false))
		for _, v := range e.ranks[rank] {
			held := int64(0)
			for k := range stages {
				if e.at[k] == rank {
					held += int64(v.forward[e.turn[k]])*stages[k].kept +
						int64(v.input[e.turn[k]])*stages[k].handed
				}
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
	}
	return out, nil
}

// reduce is the program that adds gradients up over the mesh of a rank.
func (p *Predictor) reduce(rank int, w *way, list []holding) need {
	n := need{name: fmt.Sprintf("rank%d.reduce", rank)}
	for i := range list {
		if h := &list[i]; h.cut && w.zero < 2 {
			n.results += h.stored() * w.grad
			n.temp = max(n.temp, 2*h.whole()*w.sum) // one is sent, one got ready
		}
	}
	return n
}

// stages sizes the virtual stages.
func (p *Predictor) stages(pl *plan.Plan, s *sizes, w *way, e *events) []stage {
	counts := pl.Stages(p.rounds)
	list := make([]stage, len(counts))
	laid := p.lay(pl)
	flow := s.values(s.piece, s.embed)
	ids := s.tokens * 4
	for k := range list {
		st := &list[k]
		st.part = part{counts[k], k == 0, k == len(list)-1}
		st.params = p.held(laid, st.part)
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
		name := fmt.Sprintf("stage%d.", k)
		g.forward = true
		st.forward = need{name + "forward", g.temp(), results}
		g.forward, g.backward = false, true
		given := flow
		if st.first {
			given = 0
		}
		if !e.split {
			st.backward = need{name + "backward", g.temp(), given}
			continue
		}
		if st.first { // there is no input to have a gradient
			st.handed = st.kept
			st.weight = need{name + "weight", g.temp(), 0}
			continue
		}
		var new int64
		st.handed, new = g.handed()
		g.half = ofInput
		st.input = need{name + "input", g.temp(), given + new}
		g.half = ofWeights
		st.weight = need{name + "weight", g.temp(), 0}
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
func (p *Predictor) stageNeeds(pl *plan.Plan) (list []need) {
	e, err := p.walk(pl)
	if err != nil {
		return nil
	}
	s := p.sizes(pl)
	w := p.way(pl, &s)
	stages := p.stages(pl, &s, &w, e)
	for k := range stages {
		st := &stages[k]
		list = append(list, st.forward, st.backward, st.input, st.weight)
	}
	for rank := range e.ranks {
		var all []holding
		for k := range stages {
			if e.at[k] == rank {
				all = append(all, stages[k].params...)
			}
		}
		list = append(list, p.reduce(rank, &w, all),
			p.update(fmt.Sprintf("rank%d.adamw", rank), &w, all, false))
	}
	return list
}
