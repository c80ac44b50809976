package autoplan

import (
	"cmp"
	"context"
	"math"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/estimate"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/plan"
)

// A Result is the outcome of a search, the best plan first.
type Result struct {
	Choices []Choice `json:"plans"`
	Space   int64    `json:"space"`  // all plans
	Priced  int64    `json:"priced"` // plans that were priced, each counted once
	// Weighed counts plans that were priced or pruned by a bound, in mesh options that were visited.
	// Plans of options whose own bound was too high, and of a second pass, are not counted.
	Weighed int64 `json:"-"`
	// Warnings concern the first plan.
	Warnings []event.Warning `json:"warnings,omitempty"`
}

// Search finds the plans that serve a job's goal best. An error with code PlanNoFit names the
// smallest change of the job with which a plan fits.
func Search(ctx context.Context, job Job) (*Result, error) {
	j, err := job.filled()
	if err != nil {
		return nil, err
	}
	j.pool = pool{}
	if job.MaxBatch > 0 && j.Batch == 0 && j.Goal != Memory {
		j.MaxBatch = j.enough(ctx)
	}
	s, err := newSearcher(j)
	if err != nil {
		return nil, err
	}
	found, err := s.run(ctx)
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, s.noFit(ctx)
	}
	choices, err := s.simulate(ctx, found)
	if err != nil {
		return nil, err
	}
	lowBubble, err := s.lowBubble(ctx, choices, found[0].metric)
	if err != nil {
		return nil, err
	}
	explain(lowBubble, j)
	explainBubble(lowBubble, choices[0], s.lowBubbleOnly)
	choices = lowBubble
	best := &choices[0]
	return &Result{Choices: choices, Space: s.space, Priced: s.most, Weighed: s.weighed,
		Warnings: j.Warnings(best.Plan, &best.Estimate)}, nil
}

// enough halves the largest batch for as long as the best plan's metric stays within 1 % of the
// largest batch's. Beyond some size a larger batch is no faster per token, and it costs sample
// efficiency.
func (j Job) enough(ctx context.Context) int64 {
	best, rows := 0.0, j.MaxBatch
	for most := j.MaxBatch; most >= 1 && j.MaxBatch/most <= 16; most /= 2 {
		c := j
		c.MaxBatch = most
		found := c.try(ctx)
		if found == nil || best > 0 && found.metric > best*halved {
			break
		}
		if best == 0 {
			best = found.metric
		}
		rows = most
	}
	return rows
}

// A pricer is an estimate.Estimator, or a stand-in for one in tests.
type pricer interface {
	Within(*plan.Plan, estimate.Limits) (e estimate.Estimate, whole bool, err error)
	Exceeds(p *plan.Plan, tags [][]ir.Tag, which uint32, most int64) (bool, error)
}

// A searcher is the state of one search.
type searcher struct {
	job         Job
	counts      []int
	domains     []int64 // devices of an NVLink domain, by count
	recomputes  []recomputeOption
	tags        [][]ir.Tag // of the recompute options
	workers     []*worker
	meshOptions []meshOption
	space       int64
	most        int64 // plans priced in one pass
	weighed     int64 // plans priced or pruned in one pass
	// limit is the largest time per token of a plan if the goal is memory.
	limit         float64
	lowBubbleOnly bool
	cap           float64          // upper bound on the metric of plans to list; 0 means unknown
	homes         map[[4]int64]int // the worker that has cached such options
	mu            sync.Mutex
	lists         map[listed]ordered // schedules of simulated plans
}

// A worker prices plans in one goroutine. Estimators cache results and are not safe for concurrent
// use, so each worker has its own.
type worker struct {
	searcher *searcher
	base     []*estimate.Estimator // by format
	pricers  [][]pricer            // by number of devices and format
	plans    []*plan.Plan
	priced   int64
	left     int64 // plans pruned by a bound
	// floors are lower bounds on the plans of one shardOption, by recomputeOption; 0 is not computed
	// yet.
	floors []float64
	// nearest is the smallest peak among plans that did not fit, in bytes.
	nearest int64
	reason  error // the first error of a plan without a price
}

// A candidate is a plan with its closed-form estimate.
type candidate struct {
	meshOption
	layoutOption
	recompute int
	metric    float64
	step      float64
	high      float64 // upper end of the 90 % interval, in seconds
	peak      int64
	stays     int64 // bytes that neither recomputation nor offload can save
	part      bool  // too large or too slow: step and metric are lower bounds
}

// compare orders candidates, the better one first. Ties are broken by size and name, so that
// results do not depend on the number of workers.
func (c candidate) compare(o candidate) int {
	return cmp.Or(cmp.Compare(c.metric, o.metric), cmp.Compare(c.step, o.step),
		cmp.Compare(c.peak, o.peak), cmp.Compare(c.count, o.count),
		cmp.Compare(c.precision, o.precision), c.mesh.compare(o.mesh),
		cmp.Compare(c.microbatch, o.microbatch),
		cmp.Compare(c.zero, o.zero), cmp.Compare(c.fsdp, o.fsdp), cmp.Compare(c.gather, o.gather),
		cmp.Compare(c.name, o.name), cmp.Compare(c.virtual, o.virtual),
		cmp.Compare(c.recompute, o.recompute))
}

// newSearcher prepares a search of a job whose defaults are filled in.
func newSearcher(j Job) (*searcher, error) {
	s := &searcher{job: j, counts: j.counts(), limit: math.Inf(1), homes: map[[4]int64]int{},
		lists: map[listed]ordered{}}
	s.recomputes = s.job.recomputeOptions()
	s.tags = lists.Map(s.recomputes, func(v recomputeOption) []ir.Tag { return v.tags })
	if len(s.recomputes) == 0 {
		return nil, diag.New(diag.BadUsage, "the model has nothing to recompute that is called %s",
			j.Fixed["recompute"]).Try("--fix recompute=none")
	}
	for range max(1, runtime.GOMAXPROCS(0)) {
		s.workers = append(s.workers, &worker{searcher: s, nearest: math.MaxInt64,
			floors: make([]float64, len(s.recomputes))})
	}
	for _, n := range s.counts {
		if err := s.add(n); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// A pool keeps pricers by cluster, worker and format for consecutive searches of one job, which
// reuse what is cached in them.
type pool map[string][][]pricer

// add creates the pricers for n devices.
func (s *searcher) add(n int) error {
	j := &s.job
	cluster, err := j.clusterOf(n)
	if err != nil {
		return err
	}
	s.domains = append(s.domains, cluster.Domain())
	if kept := j.pool[cluster.String()]; kept != nil {
		for i, w := range s.workers {
			w.pricers = append(w.pricers, kept[i])
			w.plans = append(w.plans, j.blank(cluster.String()))
		}
		return nil
	}
	if s.workers[0].base == nil {
		if err := s.base(cluster); err != nil {
			return err
		}
	}
	for _, w := range s.workers {
		list := lists.Map(w.base, func(e *estimate.Estimator) pricer { return e.On(cluster) })
		w.pricers = append(w.pricers, list)
		w.plans = append(w.plans, j.blank(cluster.String()))
		if j.pool != nil {
			j.pool[cluster.String()] = append(j.pool[cluster.String()], list)
		}
	}
	return nil
}

// base makes an estimator of each format for each worker. Estimators for other numbers of devices
// derive from it, so that graphs are built once.
func (s *searcher) base(cluster machine.Cluster) error {
	e, err := estimate.New(s.job.Config, cluster, s.job.Profile)
	if err != nil {
		return err
	}
	for _, p := range s.job.Precisions {
		one := e.With(estimate.Options{Precision: p, Policy: s.job.Policies[p],
			Imbalance: s.job.imbalance()})
		for _, w := range s.workers {
			w.base = append(w.base, one.Beside())
		}
	}
	return nil
}

// collector is how often Go collects garbage while searches run.
var collector struct {
	sync.Mutex
	searches, before int
}

// collectLess lets garbage grow to four times what is in use until the returned function is called.
// A search builds graphs and keeps little of them: at Go's usual 100 % collections were a third of
// its processor time (deepseek-v3 on 1,024 GB200: 1.5 to 1.8 s, 1.1 to 1.3 s with 400 %).
func collectLess() func() {
	const percent = 400
	c := &collector
	c.Lock()
	defer c.Unlock()
	if c.searches++; c.searches == 1 {
		if c.before = debug.SetGCPercent(percent); c.before < 0 || c.before > percent {
			debug.SetGCPercent(c.before) // somebody wants even less
		}
	}
	return func() {
		c.Lock()
		defer c.Unlock()
		if c.searches--; c.searches == 0 {
			debug.SetGCPercent(c.before)
		}
	}
}

// run visits the mesh options. The goal of memory needs the fastest plan first.
func (s *searcher) run(ctx context.Context) ([]candidate, error) {
	defer collectLess()()
	if s.job.Goal == Memory {
		s.job.Goal = Time
		found, err := s.run(ctx)
		s.job.Goal = Memory
		if err != nil || len(found) == 0 {
			return nil, err
		}
		s.limit = slowest * found[0].metric
	}
	if s.meshOptions == nil {
		s.expand()
	}
	defer func() {
		priced, left := int64(0), int64(0)
		for _, w := range s.workers {
			priced, left = priced+w.priced, left+w.left
			w.priced, w.left = 0, 0
		}
		s.most, s.weighed = max(s.most, priced), max(s.weighed, priced+left)
	}()
	return s.explore(ctx)
}

// expand lists the mesh options, sorted by their bounds.
func (s *searcher) expand() {
	w := s.workers[0]
	type part struct {
		tp, cp, ep, microbatch int64
		kind                   string
		precision, count       int
	}
	work, chosen := map[part]float64{}, map[exchangeKey]exchange{}
	for at, n := range s.counts {
		for _, m := range s.job.meshes(int64(n)) {
			cuts := int64(len(s.job.shardOptions(m)))
			for _, b := range s.job.batches(m) {
				for precision, prec := range s.job.Precisions {
					if !s.job.divides(m, prec) {
						continue
					}
					nd := meshOption{mesh: m, count: at, precision: precision, microbatch: b[0], rows: b[1],
						micros: b[1] / b[0] / m.rowRanks()}
					ways := s.job.exchanges(nd, s.domains[at])
					orders := int64(len(s.job.scheduleOptions(nd)))
					s.space += cuts * orders * int64(len(s.recomputes)*len(ways))
					key := part{m.tp, m.cp, m.ep, b[0], m.kind, precision, at}
					nd.exchange = w.exchange(nd, ways, chosen)
					each, known := work[key]
					if !known {
						each = w.work(nd)
						work[key] = each
					}
					nd.bound = s.perToken(nd, float64(nd.micros)*each/float64(m.pp))
					if cuts*orders > 0 && len(ways) > 0 {
						s.meshOptions = append(s.meshOptions, nd)
					}
				}
			}
		}
	}
	lists.Sort(s.meshOptions, func(a, b meshOption) int {
		return cmp.Or(cmp.Compare(a.bound, b.bound), cmp.Compare(a.count, b.count),
			cmp.Compare(a.precision, b.precision), a.compare(b.mesh),
			cmp.Compare(a.microbatch, b.microbatch))
	})
}

// perToken converts the seconds of a step to the metric of the goals time and money: seconds, or
// weighted device-seconds, per token.
func (s *searcher) perToken(n meshOption, step float64) float64 {
	x := step / s.job.tokens(n.rows)
	if s.job.Goal == Money {
		x *= s.money(n)
	}
	return x
}

// halved is the factor by which a plan on half the devices must be cheaper: predictions are no
// better than 1 %, and a run that takes twice as long costs its owner, too.
const halved = 1.01

// money is the weight of a second on the option's devices.
func (s *searcher) money(n meshOption) float64 {
	used, all := float64(s.counts[n.count]), float64(s.job.Cluster.Count)
	return used * math.Pow(halved, math.Log2(all/used))
}

// work is a lower bound on the seconds of one microbatch over all stages: a pipeline of one stage,
// with nothing recomputed and FSDP communication hidden. A deeper pipeline has the same work, so
// its ranks have this divided by pp on average.
func (w *worker) work(n meshOption) float64 {
	devices := int64(w.searcher.counts[n.count])
	n.pp, n.data = 1, devices/n.tp/n.cp/n.ep
	n.micros, n.rows = 1, n.rowRanks()*n.microbatch
	f := layoutOption{shardOption{n.data, 1, 3, "layer"}, scheduleOption{"1f1b", 0}}
	e, _, err := w.within(n, f, recomputeOption{}, estimate.Limits{Timed: true})
	if err != nil {
		return 0 // no bound
	}
	p := e.Parts
	return max(0, p.Sum()-p.Bubble-p.Pipeline-p.Data-p.Offload-p.Optimizer-p.Host-p.Recompute)
}

// within prices a plan, up to the limits beyond which it is of no use.
func (w *worker) within(n meshOption, f layoutOption, v recomputeOption,
	most estimate.Limits) (e estimate.Estimate, whole bool, err error) {
	p := w.plans[n.count]
	w.searcher.job.fill(p, n, f, v)
	e, whole, err = w.pricers[n.count][n.precision].Within(p, most)
	if err != nil && w.reason == nil {
		w.reason = err
	}
	return e, whole, err
}

// The mesh options of a round: few at first, because a good plan found early prunes the later
// rounds. Rounds do not depend on the number of workers, so the same plans are priced on every
// machine.
const (
	firstRound = 2
	lastRound  = 64
)

// explore visits the mesh options in the order of their bounds until none can contain a better
// plan.
func (s *searcher) explore(ctx context.Context) ([]candidate, error) {
	b := &best{top: s.job.Top, meshes: map[meshKey]candidate{}}
	size := firstRound
	meshOptions := s.meshOptions
	if s.job.Goal == Memory {
		at, _ := slices.BinarySearchFunc(meshOptions, s.limit, func(n meshOption, limit float64) int {
			return cmp.Compare(n.bound, limit)
		})
		meshOptions = meshOptions[:at]
	}
	for len(meshOptions) > 0 {
		if err := ctx.Err(); err != nil {
			return nil, diag.New(diag.Canceled, "stopped while searching").Wrap(err)
		}
		limit := b.limit()
		if s.cap > 0 {
			limit = min(limit, s.cap)
		}
		n := 0
		for n < min(size, len(meshOptions)) && (s.job.Goal == Memory || meshOptions[n].bound <= limit) {
			n++
		}
		if n == 0 {
			break
		}
		for _, list := range s.round(meshOptions[:n], limit) {
			b.add(list)
		}
		meshOptions, size = meshOptions[n:], min(2*size, lastRound)
	}
	lists.Sort(b.found, candidate.compare)
	return b.found[:min(simulated, len(b.found))], nil
}

// round explores some mesh options concurrently. The result of each depends on the limit alone.
func (s *searcher) round(meshOptions []meshOption, limit float64) [][]candidate {
	found := make([][]candidate, len(meshOptions))
	var wg sync.WaitGroup
	for k, mine := range s.dealt(meshOptions) {
		wg.Go(func() {
			for _, i := range mine {
				found[i] = s.workers[k].explore(meshOptions[i], limit)
			}
		})
	}
	wg.Wait()
	return found
}

// dealt assigns mesh options to workers. Options with equal tp, cp, microbatch and format share
// cached graphs and prices, so they go to the same worker, unless it has its share already.
func (s *searcher) dealt(meshOptions []meshOption) [][]int {
	dealt := make([][]int, len(s.workers))
	for i, n := range meshOptions {
		key := [4]int64{n.tp, n.cp, n.microbatch, int64(n.precision)}
		k, known := s.homes[key]
		if !known || len(dealt[k]) > len(meshOptions)/len(dealt) {
			k = lists.Most(dealt, func(l []int) int { return -len(l) })
		}
		if !known {
			s.homes[key] = k
		}
		dealt[k] = append(dealt[k], i)
	}
	return dealt
}

// perMesh is the number of plans kept per mesh option: several that differ little, because the
// simulator may prefer another one than the closed form.
const perMesh = 8

// explore returns the best plans of a mesh option that are no worse than the limit.
func (w *worker) explore(n meshOption, limit float64) []candidate {
	s := w.searcher
	var list []candidate
	orders := s.job.scheduleOptions(n)
	for _, c := range s.job.shardOptions(n.mesh) {
		clear(w.floors)
		if w.slow(n, c, 0, limit) {
			w.left += int64(len(orders) * len(s.recomputes))
			continue
		}
		for _, o := range orders {
			if o.name == "1f1b" && s.job.Goal != Memory && n.filled() > limit {
				w.left += int64(len(s.recomputes))
				continue
			}
			for _, found := range w.priceOption(n, layoutOption{c, o}, limit) {
				list = append(list, found)
				limit = min(limit, found.metric*Margin)
			}
		}
	}
	lists.Sort(list, candidate.compare)
	return list[:min(len(list), perMesh)]
}

// slow reports whether all plans with one shardOption and one recomputeOption are too slow, for
// every schedule.
func (w *worker) slow(n meshOption, c shardOption, v int, limit float64) bool {
	if w.searcher.job.Goal == Memory {
		return false
	}
	if w.floors[v] == 0 {
		w.floors[v] = w.least(n, c, v) * (1 - reordered)
	}
	return w.floors[v] > limit
}

// least is a lower bound on all plans with one shardOption and one recomputeOption: the mean work
// of the pipeline's ranks. More virtual stages only split the same work further.
func (w *worker) least(n meshOption, c shardOption, v int) float64 {
	if n.pp == 1 {
		return n.bound // one schedule only: pricing the plan says as much
	}
	e, _, err := w.within(n, layoutOption{c, scheduleOption{"1f1b", 1}}, w.searcher.recomputes[v],
		estimate.Limits{Step: 1e-9, Brief: true}) // only stage times are needed
	if err != nil {
		return n.bound
	}
	sum := lists.Sum(e.Stages, estimate.Stage.Both)
	return w.searcher.perToken(n, sum*float64(n.micros)/float64(n.pp))
}

// filled is the option's bound with 1F1B's bubble: the first microbatch passes through all pp
// stages before the others follow at the pace of the slowest stage, which is no faster than the
// mean.
func (n meshOption) filled() float64 {
	return n.bound * float64(n.micros+n.pp-1) / float64(n.micros)
}

// priceOption prices the plans of a layout option that can be among the best.
func (w *worker) priceOption(n meshOption, f layoutOption, limit float64) []candidate {
	s := w.searcher
	fastest, ok := w.candidate(n, f, 0, limit)
	before := w.priced
	defer func() { w.left += int64(len(s.recomputes)-1) - (w.priced - before) }()
	switch {
	case !ok || s.beyond(fastest, limit) || fastest.part && fastest.peak <= s.job.Capacity:
		return nil
	case fastest.peak <= s.job.Capacity && s.job.Goal != Memory:
		return []candidate{fastest}
	}
	if fastest.stays > s.job.Capacity || s.job.Goal == Memory && float64(fastest.stays) > limit {
		return nil
	}
	if fastest.peak > s.job.Capacity && w.exceeds(n, f, limit) {
		return nil
	}
	var list []candidate
	var ruled []uint8 // option sets whose supersets cannot be better
	for v := range s.recomputes {
		set := s.recomputes[v].set
		if slices.ContainsFunc(ruled, func(r uint8) bool { return r&set == r }) {
			continue
		}
		c := fastest
		if v > 0 {
			if w.slow(n, f.shardOption, v, limit) {
				ruled = append(ruled, set)
				continue
			}
			if w.over(n, f, v, 0) {
				continue
			}
			if c, ok = w.candidate(n, f, v, limit); !ok {
				continue
			}
		}
		fits := c.peak <= s.job.Capacity
		slow := s.beyond(c, limit) || fits && c.part
		if slow || fits && s.job.Goal != Memory {
			ruled = append(ruled, set)
		}
		if fits && !slow && c.metric <= limit {
			list = append(list, c)
		}
	}
	return list
}

// exceeds reports whether no recomputeOption fits that is fast enough, given that the first does
// not fit.
func (w *worker) exceeds(n meshOption, f layoutOption, limit float64) bool {
	s := w.searcher
	all := uint32(1)<<len(s.recomputes) - 2
	if all == 0 || w.over(n, f, 0, all) {
		return true
	}
	which := all
	for v := 1; v < len(s.recomputes); v++ {
		if w.slow(n, f.shardOption, v, limit) {
			which &^= 1 << v
		}
	}
	return which == 0 || which != all && w.over(n, f, 0, which)
}

// over reports whether a lower bound on its memory already shows that a plan does not fit; with a
// bit set of recompute options, whether none of these does.
func (w *worker) over(n meshOption, f layoutOption, v int, which uint32) bool {
	s, p := w.searcher, w.plans[n.count]
	s.job.fill(p, n, f, s.recomputes[v])
	over, err := w.pricers[n.count][n.precision].Exceeds(p, s.tags, which, s.job.Capacity)
	return over && err == nil
}

// beyond reports whether a plan, and all slower ones, are too slow to be listed.
func (s *searcher) beyond(c candidate, limit float64) bool {
	if s.job.Goal == Memory {
		return c.step/s.job.tokens(c.rows) > s.limit
	}
	return c.metric > limit
}

// limits converts a limit on the metric to limits on a plan's step and memory. A search for
// low-bubble plans also limits the bubble.
func (s *searcher) limits(n meshOption, limit float64) (most estimate.Limits) {
	if s.lowBubbleOnly {
		most.Waits = muchBubble * nearBubble
	}
	if s.job.Goal == Memory {
		limit = s.limit
	}
	if s.job.Goal == Money {
		limit /= s.money(n)
	}
	if step := limit * s.job.tokens(n.rows); !math.IsInf(step, 1) {
		most.Step, most.Brief = step*(1+edge), true
	}
	most.Peak = s.job.Capacity
	return most
}

// edge exceeds the rounding error of a limit, reordered the rounding error of a reordered sum.
const (
	edge      = 1e-12
	reordered = 1e-9
)

// candidate prices a plan; ok is false if it has no price, or too much bubble.
func (w *worker) candidate(n meshOption, f layoutOption, v int, limit float64) (candidate, bool) {
	s := w.searcher
	w.priced++
	e, whole, err := w.within(n, f, s.recomputes[v], s.limits(n, limit))
	if err != nil {
		return candidate{}, false
	}
	if e.Peak > s.job.Capacity {
		w.nearest = min(w.nearest, e.Peak)
	}
	c := candidate{meshOption: n, layoutOption: f, recompute: v, step: e.Step, high: e.High,
		peak: e.Peak, stays: e.Peak - e.Memory.Activations - e.Memory.Temp, part: !whole}
	c.metric = s.perToken(n, c.step)
	if s.job.Goal == Memory {
		c.metric = float64(e.Peak)
	}
	if s.lowBubbleOnly && e.Waits > muchBubble*nearBubble {
		return candidate{}, false
	}
	return c, true
}
