package footprint

import (
	"fmt"
	"slices"
	"sync"

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

// events are those of each rank that differ, and which stages it has.
type events struct {
	ranks [][]event
	// even are those of a rank whose stages are alike: then it does not matter which of them holds a
	// microbatch, and all are counted in the first turn.
	even  [][]event
	of    [][]int // stages of a rank
	split bool
}

// Walks are schedules that were gone through. Predictors may share them.
type Walks struct {
	mu   sync.Mutex
	made map[shape]*events
}

// enough is how many microbatches for each rank show what is held at most: what comes after
// repeats. GPipe holds all that there are.
const enough = 4

// walk goes through a schedule, once for each shape.
func (p *Predictor) walk(pl *plan.Plan) (*events, error) {
	key := shape{pl.PP.Schedule, pl.PP.Size, pl.PP.Virtual, pl.Microbatches}
	if key.name != "gpipe" {
		key.micros = min(key.micros, enough*key.ranks)
	}
	w := p.walks
	w.mu.Lock()
	defer w.mu.Unlock()
	if e := w.made[key]; e != nil {
		return e, nil
	}
	short := *pl
	short.Microbatches = key.micros
	s, err := short.Schedule()
	if err != nil {
		return nil, err
	}
	if s.Virtual > maxTurns {
		return nil, diag.New(diag.NotSupported, "%d virtual stages on a rank", s.Virtual).
			Try("at most %d", maxTurns)
	}
	if w.made == nil {
		w.made = map[shape]*events{}
	}
	w.made[key] = eventsOf(s)
	return w.made[key], nil
}

// eventsOf goes through the lists of a schedule.
func eventsOf(s *schedule.Schedule) *events {
	e := &events{ranks: make([][]event, s.Ranks), even: make([][]event, s.Ranks),
		of: make([][]int, s.Ranks)}
	for rank, list := range s.Lists {
		for turn := range s.Virtual {
			e.of[rank] = append(e.of[rank], s.Stage(rank, turn))
		}
		for place, held := range s.InFlight(rank) {
			now := event{kind: list[place].Kind, stage: list[place].Stage}
			for turn := range s.Virtual {
				now.forward[turn], now.input[turn] = int16(held.Forward[turn]), int16(held.Input[turn])
			}
			e.split = e.split || now.kind == schedule.Input
			e.ranks[rank] = most(e.ranks[rank], &now, s.Virtual)
			e.even[rank] = most(e.even[rank], now.joined(s.Virtual, e.of[rank][0]), 1)
		}
	}
	return e
}

// most adds an event to those of a rank, of which it keeps only what may need most: an action at
// which no less of anything is held stands for all others of the same program.
func most(list []event, v *event, turns int) []event {
	for i := range list {
		if list[i].covers(v, turns) {
			return list
		}
	}
	kept := list[:0]
	for i := range list {
		if !v.covers(&list[i], turns) {
			kept = append(kept, list[i])
		}
	}
	return append(kept, *v)
}

// joined counts all turns as the first, whose stage is given.
func (v *event) joined(turns, stage int) *event {
	out := &event{kind: v.kind, stage: stage}
	for t := range turns {
		out.forward[0] += v.forward[t]
		out.input[0] += v.input[t]
	}
	return out
}

// covers tells whether an event needs no less than another, whatever microbatches keep.
func (v *event) covers(w *event, turns int) bool {
	if v.kind != w.kind || v.stage != w.stage {
		return false
	}
	for t := range turns {
		if v.forward[t] < w.forward[t] || v.input[t] < w.input[t] {
			return false
		}
	}
	return true
}

// A stage is what one virtual stage has: bytes of a microbatch between its actions, and programs.
type stage struct {
	part
	params                           []holding
	taken, kept, handed, seeds       int64
	forward, backward, input, weight need
}

// stages are the virtual stages of a plan. Most are alike, so that each kind is sized once.
type stages struct {
	kinds []stage
	of    []int // the kind of each
}

func (l *stages) at(k int) *stage { return &l.kinds[l.of[k]] }

// even tells whether some stages are all alike.
func (l *stages) even(some []int) bool {
	for _, k := range some[1:] {
		if l.of[k] != l.of[some[0]] {
			return false
		}
	}
	return true
}

// pipeline predicts a plan with stages.
func (p *Predictor) pipeline(pl *plan.Plan) (Footprint, error) {
	e, err := p.walk(pl)
	if err != nil {
		return Footprint{}, err
	}
	s := p.sizes(pl)
	w := p.way(pl, &s)
	list := p.stages(pl, &s, &w, e)
	f := &p.result
	f.Ranks = slices.Grow(f.Ranks[:0], len(e.ranks))[:len(e.ranks)]
	f.Stages = slices.Grow(f.Stages[:0], len(list.of))[:len(list.of)]
	for k, kind := range list.of {
		if k > 0 && kind == list.of[k-1] {
			f.Stages[k] = f.Stages[k-1]
			continue
		}
		st := &list.kinds[kind]
		var own Rank
		own.resident(&w, st.params)
		f.Stages[k] = Stage{own.State + own.Copies, own.Grads, st.kept, st.most()}
	}
	var still Rank // of the rank before, as long as no microbatch is there
	var bound int64
	for rank := range f.Ranks {
		r := &f.Ranks[rank]
		if rank == 0 || !e.alike(rank, list) {
			p.all = p.all[:0]
			for _, k := range e.of[rank] {
				p.all = join(p.all, list.at(k).params)
			}
			still = Rank{}
			still.resident(&w, p.all)
			bound = w.updateBound(p.all)
		}
		*r = still
		happened, of := e.ranks[rank], e.of[rank]
		if list.even(of) {
			happened, of = e.even[rank], of[:1]
		}
		for i := range happened {
			happened[i].happen(r, list, of)
		}
		if bound > r.Residuals+r.Program { // else it is not worth asking
			r.worst(0, p.reduce("reduce", &w, &s, p.all))
			r.worst(0, p.update("adamw", &w, &s, p.all, false))
		}
	}
	return *f, nil
}

// alike tells whether a rank has the same parts of the model as the one before it.
func (e *events) alike(rank int, list *stages) bool {
	for i, k := range e.of[rank] {
		if list.of[k] != list.of[e.of[rank-1][i]] {
			return false
		}
	}
	return true
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

// happen adds up what the stages of a rank hold when an action is at work.
func (v *event) happen(r *Rank, list *stages, of []int) {
	held := int64(0)
	for t, k := range of {
		st := list.at(k)
		held += int64(v.forward[t])*st.kept + int64(v.input[t])*st.handed
	}
	k := list.at(v.stage)
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
func (p *Predictor) stages(pl *plan.Plan, s *sizes, w *way, e *events) *stages {
	list := &p.list
	list.kinds, list.of = list.kinds[:0], list.of[:0]
	n := len(e.of) * len(e.of[0])
	each, more, at := p.rounds/int64(n), p.rounds%int64(n), int64(0)
	for k := range n {
		rounds := each
		if int64(k) < more { // as plan.Plan.Stages deals them
			rounds++
		}
		t := p.part(at, rounds, k == 0, k == n-1)
		at += rounds
		if last := len(list.kinds) - 1; last < 0 || list.kinds[last].part != t {
			list.kinds = append(list.kinds, *p.stage(pl, s, w, t, e.split))
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

// size works out what the stage takes, keeps and hands on, and its programs.
func (st *stage) size(g *gradient, split bool) {
	p, s, w := g.p, g.s, g.w
	flow, ids := s.values(s.piece, s.embed), s.tokens*4
	places := ids // positions
	if p.cpu {
		places += ids // documents
	}
	if p.config.Learned && !st.first {
		places -= ids
	}
	results := sum(g.kept())
	st.kept, st.taken = results+places, places
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
	if g.stays() {
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
	st.back(g, flow, split)
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
		st.handed = st.kept
		st.weight = need{"weight", g.temp(), 0}
	default:
		var made int64
		st.handed, made = g.handed()
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
	if g.part.last {
		made += s.values(s.tokens, s.vocab) + 8*s.piece*s.embed
		kept += flow
	}
	return made + kept, made
}

// stageNeeds lists the programs of all stages and ranks.
func (p *Predictor) stageNeeds(pl *plan.Plan, s *sizes, w *way, e *events) (list []need) {
	stages := p.stages(pl, s, w, e)
	for k := range stages.of {
		st := stages.at(k)
		for _, n := range []need{st.forward, st.backward, st.input, st.weight} {
			n.name = fmt.Sprintf("stage%d.%s", k, n.name)
			list = append(list, n)
		}
	}
	for rank := range e.ranks {
		var all []holding
		for _, k := range e.of[rank] {
			all = join(all, stages.at(k).params)
		}
		name := fmt.Sprintf("rank%d.", rank)
		list = append(list, p.reduce(name+"reduce", w, s, all),
			p.update(name+"adamw", w, s, all, false))
	}
	return list
}
