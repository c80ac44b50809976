package footprint

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
)

// A stage is one virtual stage: bytes of a microbatch between its actions, and its programs.
type stage struct {
	part
	params []resident
	stays  program.Memory // state of its parameters, from step to step
	bound  int64          // upper bound on the temp of end-of-step programs
	load   schedule.Load  // without temp until complete is called

	programs [len(programNames)]need // by kind of action; unnamed if the stage has none
	complete bool
}

// stages are the virtual stages of a plan. Most are equal, so each kind is computed once.
type stages struct {
	*layerSplit
	kinds []*stage
	loads []schedule.Load // of each kind
}

// at returns virtual stage k.
func (l *stages) at(k int) *stage { return l.kinds[l.of[k]] }

// A layerSplit is the assignment of the model's layers to the stages of a schedule.
type layerSplit struct {
	parts []part // stages that differ
	of    []int  // index into parts, by stage
	// leads are the ranks that can be the worst; each other rank has no more than one of them.
	leads []int
}

// split assigns layers to stages, cached by walk.
func (p *Predictor) split(w *schedule.Walk) *layerSplit {
	if d := p.splits[w]; d != nil {
		return d
	}
	d := &layerSplit{}
	n, at := int64(len(w.Stages)*len(w.Stages[0])), int64(0)
	for k := range n {
		rounds := plan.LayersOf(p.rounds, k, n)
		t := p.part(at, rounds, k == 0, k == n-1)
		at += rounds
		if last := len(d.parts) - 1; last < 0 || d.parts[last] != t {
			d.parts = append(d.parts, t)
		}
		d.of = append(d.of, len(d.parts)-1)
	}
	for rank := range w.Stages {
		if !w.Follows(rank, d.of) {
			d.leads = append(d.leads, rank)
		}
	}
	p.splits[w] = d
	return d
}

// walk returns the liveness of the plan's schedule.
func (p *Predictor) walk(pl *plan.Plan) (*schedule.Walk, error) {
	return p.walks.Of(pl.PP.Schedule, schedule.Shape{Ranks: int(pl.PP.Size),
		Virtual: int(pl.PP.Virtual), Micros: int(pl.Microbatches)})
}

// pipeline predicts a plan with stages.
func (p *Predictor) pipeline(pl *plan.Plan) (Footprint, error) {
	q, err := p.piped(pl)
	if err != nil {
		return Footprint{}, err
	}
	q.complete()
	f := &p.result
	f.Ranks, f.Loads = f.Ranks[:0], f.Loads[:0]
	for rank := range q.walk.Stages {
		r, _ := q.rank(rank, 0)
		f.Ranks = append(f.Ranks, r)
	}
	for _, kind := range q.of {
		f.Loads = append(f.Loads, q.loads[kind])
	}
	return *f, nil
}

// leads predicts the ranks that can be the worst, in order of increasing cost.
func (p *Predictor) leads(pl *plan.Plan, most int64) (Footprint, error) {
	q, err := p.piped(pl)
	if err != nil {
		return Footprint{}, err
	}
	f := &p.result
	f.Ranks, f.Loads = f.Ranks[:0], nil
	if most > 0 {
		if r, over := q.exceeds(most); over {
			f.Ranks = append(f.Ranks, r)
			return *f, nil
		}
	}
	q.complete()
	for _, rank := range q.leads {
		r, over := q.rank(rank, most)
		if over {
			f.Ranks = append(f.Ranks[:0], r)
			break
		}
		f.Ranks = append(f.Ranks, r)
	}
	return *f, nil
}

// exceeds finds a rank that exceeds most bytes even without the temp of its programs.
func (q *piped) exceeds(most int64) (r Rank, over bool) {
	for _, rank := range q.leads {
		r, _ = q.owned(rank)
		if r.Sum() <= most { // activations of live microbatches
			_, r.Activations, r.Temp = q.walk.Peak(rank, q.of, q.loads)
		}
		if r.Sum() > most {
			return r, true
		}
	}
	return Rank{}, false
}

// Exceeds reports whether a plan with stages needs more than most bytes with every set of
// recompute tags whose bit in which is set; with which 0, with its own tags. Each stage is taken
// with its smallest memory over these sets, so the result is exact only if true.
func (p *Predictor) Exceeds(pl *plan.Plan, tags [][]ir.Tag, which uint32,
	most int64) (bool, error) {
	if pl.PP.Size <= 1 {
		return false, nil
	}
	q, err := p.piped(pl)
	if err != nil {
		return false, err
	}
	for i, t := range q.parts {
		if which == 0 {
			break
		}
		if q.loads[i], err = q.leanest(t, q.kinds[i].params, tags, which); err != nil {
			return false, err
		}
	}
	_, over := q.exceeds(most)
	return over, nil
}

// A lean is the cache key of leanest: all that a stage's load depends on, a list of tag sets by
// its address, and the selected sets.
type lean struct {
	s              *sizes // under the plan's own tags
	part           part
	split, offload bool
	fsdp           int64 // 0 unless gathered parameters stay
	list           *[]ir.Tag
	which          uint32
}

// leanest is a lower bound on the load of a stage over the selected sets.
func (q *piped) leanest(t part, params []resident, tags [][]ir.Tag,
	which uint32) (least schedule.Load, err error) {
	p := q.p
	key := lean{s: q.s, part: t, split: q.walk.Split, offload: q.w.offload, list: &tags[0],
		which: which}
	if q.w.gather == "microbatch" {
		key.fsdp = q.w.fsdp
	}
	if found, ok := p.leans[key]; ok {
		return found, nil
	}
	least = schedule.Most()
	own := *q.plan
	for i := range tags {
		if which&(1<<i) == 0 {
			continue
		}
		own.Recompute = tags[i]
		s, err := p.sizes(&own)
		if err != nil {
			return least, err
		}
		w := p.way(&own, s)
		st := stage{part: t, params: params}
		st.size(&gradient{p: p, s: s, w: &w, part: t, plan: &own, onto: true, params: params},
			key.split)
		least.Lower(&st.load)
	}
	p.leans[key] = least
	return least, nil
}

// A piped is what all ranks of a plan with stages share.
type piped struct {
	p *Predictor
	s *sizes
	w way
	*stages
	plan *plan.Plan
	walk *schedule.Walk
}

// piped collects what all ranks of a plan share.
func (p *Predictor) piped(pl *plan.Plan) (q piped, err error) {
	q = piped{p: p, plan: pl}
	if q.walk, err = p.walk(pl); err != nil {
		return q, err
	}
	if q.s, err = p.sizes(pl); err != nil {
		return q, err
	}
	q.w = p.way(pl, q.s)
	q.stages = p.stages(pl, q.s, &q.w, q.walk)
	return q, nil
}

// owned returns the state of a rank that lives from step to step, and an upper bound on the temp
// of the programs at the end of a step.
func (q *piped) owned(rank int) (r Rank, bound int64) {
	var first, last bool
	for _, k := range q.walk.Stages[rank] {
		st := q.at(k)
		first, last = first || st.first, last || st.last
		r.Params += st.stays.Params
		r.Optimizer += st.stays.Optimizer
		r.Host += st.stays.Host
		r.Grads += st.stays.Grads
		bound += st.bound
	}
	if first && last && q.p.config.Tied { // a tied table counts once
		list := q.params(rank)
		r.Memory, bound = q.w.resident(list), q.w.updateBound(list)
	}
	return r, bound
}

// params lists the parameters of a rank, stage by stage.
func (q *piped) params(rank int) (list []resident) {
	for _, k := range q.walk.Stages[rank] {
		list = join(list, q.at(k).params)
	}
	return list
}

// rank returns the memory of a rank, and whether it exceeds most bytes (0 is no limit); then the
// programs at the end of a step are left out.
func (q *piped) rank(rank int, most int64) (r Rank, over bool) {
	r, bound := q.owned(rank)
	at, activations, temp := q.walk.Peak(rank, q.of, q.loads)
	r.Activations, r.Temp, r.Largest = activations, temp, programNames[at.Kind]
	if most > 0 && r.Sum() > most {
		return r, true
	}
	if bound > activations+temp { // else the update cannot set the peak
		for _, n := range q.p.ending("", q.s, &q.w, q.params(rank)) {
			r.end(n)
		}
	}
	return r, most > 0 && r.Sum() > most
}

// programNames are a stage's programs, by kind of action.
var programNames = [...]string{schedule.Forward: "forward", schedule.Backward: "backward",
	schedule.Input: "input", schedule.Weight: "weight"}

// join appends the parameters of a stage to its rank's. A tied table counts once per rank.
func join(all, more []resident) []resident {
	for _, h := range more {
		if h.stack || !slices.ContainsFunc(all, func(x resident) bool { return x.name == h.name }) {
			all = append(all, h)
		}
	}
	return all
}

// reduces reports whether gradients are still unreduced after the last microbatch.
func (w *way) reduces(list []resident) bool {
	return w.spread || w.sharded && slices.ContainsFunc(list, func(h resident) bool {
		return !h.cut || w.zero < 2
	})
}

// reduce is the program that reduces gradients over the mesh of a rank. The result aliases the
// device's term, unless it is only a shard of it.
func (p *Predictor) reduce(name string, w *way, s *sizes, list []resident) need {
	n := need{name: name}
	for i := range list {
		if h := &list[i]; h.cut && w.zero < 2 {
			n.results += h.stored() * w.grad
		}
	}
	n.temp = p.reduceTemp(w, s, list)
	return n
}

// stages returns the virtual stages. The result belongs to the predictor and is overwritten by the
// next call.
func (p *Predictor) stages(pl *plan.Plan, s *sizes, w *way, e *schedule.Walk) *stages {
	list := &p.list
	list.layerSplit, list.kinds, list.loads = p.split(e), list.kinds[:0], list.loads[:0]
	for _, t := range list.parts {
		st := p.stage(pl, s, w, t, e.Split)
		list.kinds, list.loads = append(list.kinds, st), append(list.loads, st.load)
	}
	return list
}

// stage returns one stage, cached by all it depends on: what its programs do, and whether backward
// is split into dgrad and wgrad.
func (p *Predictor) stage(pl *plan.Plan, s *sizes, w *way, t part, split bool) *stage {
	g := gradient{p: p, s: s, w: w, part: t, plan: pl, onto: true}
	key := g.key()
	if split {
		key.flags |= 1 << splitBit
	}
	st := p.staged[key]
	if st == nil {
		st = &stage{part: t, params: p.residents(pl, t)}
		g.params = st.params
		st.size(&g, split)
		st.stays, st.bound = w.resident(st.params), w.updateBound(st.params)
		p.staged[key] = st
	}
	return st
}

// complete adds the temp of programs to the stages' loads.
func (q *piped) complete() {
	for i, st := range q.kinds {
		if !st.complete {
			g := gradient{p: q.p, s: q.s, w: &q.w, part: st.part, plan: q.plan, onto: true,
				params: st.params}
			st.complete = true
			st.temps(&g)
		}
		q.loads[i] = st.load
	}
}

// temps computes the temp of each program. With a split backward, the first stage's is all in the
// wgrad half: it has no input gradient.
func (st *stage) temps(g *gradient) {
	for k := range st.programs {
		if st.programs[k].name == "" {
			continue
		}
		g.forward, g.backward = k == int(schedule.Forward), k != int(schedule.Forward)
		switch kind := schedule.Kind(k); {
		case st.first:
			g.half = both
		case kind == schedule.Input:
			g.half = ofInput
		case kind == schedule.Weight:
			g.half = ofWeights
		default:
			g.half = both
		}
		st.programs[k].temp = g.temp()
		st.load.Temp[k] = st.programs[k].temp
	}
}

// size computes what the stage receives, saves and sends, in bytes of a microbatch. Offloaded
// activations count nowhere.
func (st *stage) size(g *gradient, split bool) {
	s, l, b := g.s, &st.load, g.s.bill
	taken, seeds, results := s.data(st.part), int64(0), g.residuals()+g.staying()
	l.Residuals = results + taken
	if st.first {
		l.Residuals += b.Embed.Data
		taken += b.Embed.Data
	} else {
		taken += s.flow
	}
	if st.last {
		l.Residuals += b.Head.Data
		taken += b.Head.Data
	} else {
		results += s.flow
		seeds = s.flow
	}
	st.has(schedule.Forward, taken, results)
	st.back(g, s.flow, seeds, split)
}

// has records a program: its inputs besides saved activations, and its outputs.
func (st *stage) has(k schedule.Kind, taken, results int64) {
	st.programs[k] = need{programNames[k], 0, results}
	st.load.Passing[k] = taken + results
}

// residuals is the bytes that backward reads from forward besides parameters and data: stacks over
// layers, unless offloaded, and what the head saves.
func (g *gradient) residuals() (n int64) {
	s := g.s
	for i := range s.bill.Layers {
		if !g.w.offload {
			n += s.rounds(g.part, i) * s.residualBytes[i]
		}
	}
	if g.part.last {
		n += sum(s.bill.Head.Residuals)
		if g.forward && g.backward && s.flow < s.whole { // the head's input stays gathered
			n += s.whole
			if !s.again(ir.Norm) {
				n -= s.flow
			}
		}
	}
	return n
}

// staying is the bytes of gathered parameters that live from a stage's forward to its backward.
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

// back computes the backward programs: one, or dgrad and wgrad.
func (st *stage) back(g *gradient, flow, seeds int64, split bool) {
	given := flow
	if st.first {
		given = 0
	}
	switch {
	case !split:
		st.has(schedule.Backward, seeds, given)
	case st.first: // there is no input to have a gradient
		st.load.Handed = st.load.Residuals
		st.has(schedule.Weight, 0, 0)
	default:
		var made int64
		st.load.Handed, made = g.wgradInputs()
		st.has(schedule.Input, seeds, given+made)
		st.has(schedule.Weight, 0, 0)
	}
}

// wgradInputs is the bytes of a microbatch that wgrad reads, and how many of them dgrad produced.
func (g *gradient) wgradInputs() (all, made int64) {
	var kept int64
	for i := range g.s.bill.Layers {
		l, rounds := &g.s.bill.Layers[i], g.s.rounds(g.part, i)
		made += rounds * sum(l.Made)
		kept += rounds * sum(l.Late)
	}
	if g.w.offload { // forward's stacks are on the host
		kept = 0
	}
	if g.part.last {
		made += sum(g.s.bill.Head.Made)
		kept += sum(g.s.bill.Head.Late)
	}
	return made + kept, made
}

// stageNeeds lists the programs of all stages and ranks.
func (p *Predictor) stageNeeds(pl *plan.Plan, s *sizes, w *way,
	e *schedule.Walk) (list []need) {
	stages := p.stages(pl, s, w, e)
	q := piped{p: p, s: s, w: *w, stages: stages, plan: pl}
	q.complete()
	for k := range stages.of {
		st := stages.at(k)
		for _, n := range st.programs {
			n.name = fmt.Sprintf("stage%d.%s", k, n.name)
			list = append(list, n)
		}
	}
	q.walk = e
	for rank := range e.Stages {
		list = append(list, p.ending(fmt.Sprintf("rank%d.", rank), s, w, q.params(rank))...)
	}
	return list
}
