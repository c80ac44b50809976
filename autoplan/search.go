package autoplan

import (
	"cmp"
	"context"
	"math"
	"runtime"
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

// A Result is what a search found, the best first.
type Result struct {
	Choices []Choice `json:"plans"`
	Space   int64    `json:"space"`  // plans that there are
	Priced  int64    `json:"priced"` // those that had to be priced, not counting any twice
	// Weighed counts those that were priced or that a bound left out, of nodes that were gone
	// through: plans of nodes whose own bound was too high, and of a second walk, are not in it.
	Weighed int64 `json:"-"`
	// Warnings are what to know of the first plan.
	Warnings []event.Warning `json:"warnings,omitempty"`
}

// Search finds the plans that serve a job's goal best. An error of code PlanNoFit tells the
// smallest change with which one fits.
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
	calm, err := s.lowBubble(ctx, choices, found[0].metric)
	if err != nil {
		return nil, err
	}
	explain(calm, j)
	explainBubble(calm, choices[0], s.calm)
	choices = calm
	best := &choices[0]
	return &Result{Choices: choices, Space: s.space, Priced: s.most, Weighed: s.weighed,
		Warnings: j.Warnings(best.Plan, &best.Estimate)}, nil
}

// enough is the smallest of the largest batch, its half, its quarter and so on, whose best plan has
// no more than a hundredth less of the goal than that of the largest: beyond a size a larger batch
// buys no rate, and costs quality.
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

// A pricer is the estimator, or in tests what stands for it.
type pricer interface {
	Within(*plan.Plan, estimate.Limits) (e estimate.Estimate, whole bool, err error)
	Exceeds(p *plan.Plan, tags [][]ir.Tag, which uint32, most int64) (bool, error)
}

// A searcher is a search on its way.
type searcher struct {
	job      Job
	counts   []int
	variants []variant
	tags     [][]ir.Tag // of the variants
	workers  []*worker
	nodes    []node
	space    int64
	most     int64 // plans that were priced in a walk over the nodes
	weighed  int64 // plans that were priced or left out by a bound in it
	// limit is the time for a token beyond which plans are of no use, where the goal is another.
	limit float64
	calm  bool             // only plans with little bubble are of use
	cap   float64          // a metric that none of use exceeds; 0 if it is not known
	homes map[[4]int64]int // the worker that knows nodes of a kind
	mu    sync.Mutex
	lists map[listed]ordered // schedules of plans that were simulated
}

// A worker prices plans. Each has estimators of its own, which keep what they worked out.
type worker struct {
	searcher *searcher
	base     []*estimate.Estimator // by precision
	pricers  [][]pricer            // by number of devices and precision
	plans    []*plan.Plan
	priced   int64
	left     int64 // plans that a bound left out
	// floors bound the plans of one cut of a node by variant; 0 is not worked out yet.
	floors []float64
	// nearest is the least that a plan has needed which did not fit.
	nearest int64
	reason  error // of a plan that has no price
}

// A candidate is a plan that fits, with what the goal makes of it.
type candidate struct {
	node
	layoutOption
	variant int
	metric  float64
	step    float64
	high    float64 // that nine in ten steps do not exceed, as low is not fallen short of
	peak    int64
	stays   int64 // bytes that no recomputation and no offload takes off
	part    bool  // too large or too slow, so that step and metric are what it takes at least
}

// compare puts the better plan first, and gives equal ones an order that never changes.
func (c candidate) compare(o candidate) int {
	return cmp.Or(cmp.Compare(c.metric, o.metric), cmp.Compare(c.step, o.step),
		cmp.Compare(c.peak, o.peak), cmp.Compare(c.count, o.count),
		cmp.Compare(c.precision, o.precision), c.mesh.compare(o.mesh), cmp.Compare(c.micro, o.micro),
		cmp.Compare(c.zero, o.zero), cmp.Compare(c.fsdp, o.fsdp), cmp.Compare(c.gather, o.gather),
		cmp.Compare(c.name, o.name), cmp.Compare(c.virtual, o.virtual),
		cmp.Compare(c.variant, o.variant))
}

func newSearcher(j Job) (*searcher, error) {
	s := &searcher{job: j, counts: j.counts(), limit: math.Inf(1), homes: map[[4]int64]int{},
		lists: map[listed]ordered{}}
	s.variants = s.job.variants()
	s.tags = lists.Map(s.variants, func(v variant) []ir.Tag { return v.tags })
	if len(s.variants) == 0 {
		return nil, diag.New(diag.BadUsage, "the model has nothing to recompute that is called %s",
			j.Fixed["recompute"]).Try("--fix recompute=none")
	}
	for range max(1, runtime.GOMAXPROCS(0)) {
		s.workers = append(s.workers, &worker{searcher: s, nearest: math.MaxInt64,
			floors: make([]float64, len(s.variants))})
	}
	for _, n := range s.counts {
		if err := s.add(n); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// A pool has the pricers of searches for one job that follow each other, by cluster, and by worker
// and precision: they keep what they worked out.
type pool map[string][][]pricer

// add gives the workers what they need for a number of devices.
func (s *searcher) add(n int) error {
	j := &s.job
	cluster, err := j.clusterOf(n)
	if err != nil {
		return err
	}
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

// base makes an estimator of each precision for each worker. Those of other numbers of devices come
// from it, so that graphs are built once.
func (s *searcher) base(cluster machine.Cluster) error {
	e, err := estimate.New(s.job.Config, cluster, s.job.Profile)
	if err != nil {
		return err
	}
	for _, p := range s.job.Precisions {
		one := e.With(estimate.Options{Precision: p, Policy: s.job.Policies[p]})
		for _, w := range s.workers {
			w.base = append(w.base, one.Beside())
		}
	}
	return nil
}

// run goes through the nodes. A goal of memory needs to know the fastest plan first.
func (s *searcher) run(ctx context.Context) ([]candidate, error) {
	if s.job.Goal == Memory {
		s.job.Goal = Time
		found, err := s.run(ctx)
		s.job.Goal = Memory
		if err != nil || len(found) == 0 {
			return nil, err
		}
		s.limit = slowest * found[0].metric
	}
	if s.nodes == nil {
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

// expand lists the nodes with their bounds, in order.
func (s *searcher) expand() {
	w := s.workers[0]
	work := map[[6]int64]float64{}
	for at, n := range s.counts {
		for _, m := range s.job.meshes(int64(n)) {
			cuts := int64(len(s.job.cuts(m)))
			for _, b := range s.job.batches(m) {
				for precision, prec := range s.job.Precisions {
					if !s.job.divides(m, prec) {
						continue
					}
					nd := node{mesh: m, count: at, precision: precision, micro: b[0], rows: b[1],
						micros: b[1] / b[0] / m.rowRanks()}
					orders := int64(len(s.job.orders(nd)))
					s.space += cuts * orders * int64(len(s.variants))
					key := [6]int64{m.tp, m.cp, m.ep, b[0], int64(precision), int64(at)}
					each, known := work[key]
					if !known {
						each = w.work(nd)
						work[key] = each
					}
					nd.bound = s.perToken(nd, float64(nd.micros)*each/float64(m.pp))
					if cuts*orders > 0 {
						s.nodes = append(s.nodes, nd)
					}
				}
			}
		}
	}
	slices.SortFunc(s.nodes, func(a, b node) int {
		return cmp.Or(cmp.Compare(a.bound, b.bound), cmp.Compare(a.count, b.count),
			cmp.Compare(a.precision, b.precision), a.compare(b.mesh), cmp.Compare(a.micro, b.micro))
	})
}

// perToken is what a step's seconds come to by the goal, for time and money.
func (s *searcher) perToken(n node, step float64) float64 {
	x := step / s.job.tokens(n.rows)
	if s.job.Goal == Money {
		x *= s.money(n)
	}
	return x
}

// halved is what a plan must save that takes half the devices, and twice the time: a step is not
// known to a hundredth, and time is money too.
const halved = 1.01

// money is what a second of a node's devices counts.
func (s *searcher) money(n node) float64 {
	used, all := float64(s.counts[n.count]), float64(s.job.Cluster.Count)
	return used * math.Pow(halved, math.Log2(all/used))
}

// work is the seconds that one microbatch keeps the devices of a whole pipeline busy that has one
// stage, if nothing is recomputed and the data axes communicate behind it. Deeper pipelines share
// the same work, so that their ranks have this divided by their number in the mean.
func (w *worker) work(n node) float64 {
	devices := int64(w.searcher.counts[n.count])
	n.pp, n.data = 1, devices/n.tp/n.cp/n.ep
	n.micros, n.rows = 1, n.rowRanks()*n.micro
	e, _, err := w.within(n, layoutOption{cut{n.data, 1, 3, "layer"}, order{"1f1b", 0}}, variant{},
		estimate.Limits{Timed: true})
	if err != nil {
		return 0 // bounds nothing
	}
	p := e.Parts
	return max(0, p.Sum()-p.Bubble-p.Pipeline-p.Data-p.Offload-p.Optimizer-p.Host-p.Recompute)
}

// within works out a plan as far as it is of use.
func (w *worker) within(n node, f layoutOption, v variant,
	most estimate.Limits) (e estimate.Estimate, whole bool, err error) {
	p := w.plans[n.count]
	w.searcher.job.fill(p, n, f, v)
	e, whole, err = w.pricers[n.count][n.precision].Within(p, most)
	if err != nil && w.reason == nil {
		w.reason = err
	}
	return e, whole, err
}

// The nodes of a round: few at first, since a good plan makes the rounds after it short. Rounds do
// not depend on the number of workers, so that the same plans are priced everywhere.
const (
	firstRound = 2
	lastRound  = 64
)

// explore takes the nodes in the order of their bounds until none can be of use.
func (s *searcher) explore(ctx context.Context) ([]candidate, error) {
	b := &best{top: s.job.Top, meshes: map[meshKey]candidate{}}
	size := firstRound
	nodes := s.nodes
	if s.job.Goal == Memory {
		at, _ := slices.BinarySearchFunc(nodes, s.limit, func(n node, limit float64) int {
			return cmp.Compare(n.bound, limit)
		})
		nodes = nodes[:at]
	}
	for len(nodes) > 0 {
		if err := ctx.Err(); err != nil {
			return nil, diag.New(diag.Canceled, "stopped while searching").Wrap(err)
		}
		limit := b.limit()
		if s.cap > 0 {
			limit = min(limit, s.cap)
		}
		n := 0
		for n < min(size, len(nodes)) && (s.job.Goal == Memory || nodes[n].bound <= limit) {
			n++
		}
		if n == 0 {
			break
		}
		for _, list := range s.round(nodes[:n], limit) {
			b.add(list)
		}
		nodes, size = nodes[n:], min(2*size, lastRound)
	}
	slices.SortFunc(b.found, candidate.compare)
	return b.found[:min(simulated, len(b.found))], nil
}

// round explores some nodes at once. What a node gives depends on the limit alone.
func (s *searcher) round(nodes []node, limit float64) [][]candidate {
	found := make([][]candidate, len(nodes))
	var wg sync.WaitGroup
	for k, mine := range s.dealt(nodes) {
		wg.Go(func() {
			for _, i := range mine {
				found[i] = s.workers[k].explore(nodes[i], limit)
			}
		})
	}
	wg.Wait()
	return found
}

// dealt gives each worker its nodes. Those whose microbatches are cut alike share bills, prices and
// programs, so that they go to the same worker, unless it has its share already.
func (s *searcher) dealt(nodes []node) [][]int {
	dealt := make([][]int, len(s.workers))
	for i, n := range nodes {
		key := [4]int64{n.tp, n.cp, n.micro, int64(n.precision)}
		k, known := s.homes[key]
		if !known || len(dealt[k]) > len(nodes)/len(dealt) {
			k = lists.Most(dealt, func(l []int) int { return -len(l) })
		}
		if !known {
			s.homes[key] = k
		}
		dealt[k] = append(dealt[k], i)
	}
	return dealt
}

// perNode is how many plans a node gives: some that differ little, since the simulator may prefer
// another one.
const perNode = 8

// explore finds the best plans of a node that are no worse than the limit.
func (w *worker) explore(n node, limit float64) []candidate {
	s := w.searcher
	var list []candidate
	orders := s.job.orders(n)
	for _, c := range s.job.cuts(n.mesh) {
		clear(w.floors)
		if w.slow(n, c, 0, limit) {
			w.left += int64(len(orders) * len(s.variants))
			continue
		}
		for _, o := range orders {
			if o.name == "1f1b" && s.job.Goal != Memory && n.filled() > limit {
				w.left += int64(len(s.variants))
				continue
			}
			for _, found := range w.priceOption(n, layoutOption{c, o}, limit) {
				list = append(list, found)
				limit = min(limit, found.metric*Margin)
			}
		}
	}
	slices.SortFunc(list, candidate.compare)
	return list[:min(len(list), perNode)]
}

// slow tells whether all plans of a node with one cut and one variant are of no use, whatever their
// schedules are.
func (w *worker) slow(n node, c cut, v int, limit float64) bool {
	if w.searcher.job.Goal == Memory {
		return false
	}
	if w.floors[v] == 0 {
		w.floors[v] = w.least(n, c, v) * (1 - reordered)
	}
	return w.floors[v] > limit
}

// least bounds all plans of a node with one cut and one variant: what the ranks of a pipeline have
// to do in the mean. More virtual stages only make more parts of the same work.
func (w *worker) least(n node, c cut, v int) float64 {
	if n.pp == 1 {
		return n.bound // there is one schedule: the plan itself says as much
	}
	e, _, err := w.within(n, layoutOption{c, order{"1f1b", 1}}, w.searcher.variants[v],
		estimate.Limits{Step: 1e-9, Brief: true}) // only the times of its stages are asked for
	if err != nil {
		return n.bound
	}
	sum := lists.Sum(e.Stages, estimate.Stage.Both)
	return w.searcher.perToken(n, sum*float64(n.micros)/float64(n.pp))
}

// filled is the node's bound with the bubble of 1F1B: the first microbatch passes all stages before
// the others follow at the pace of the slowest, which is no faster than the mean.
func (n node) filled() float64 {
	return n.bound * float64(n.micros+n.pp-1) / float64(n.micros)
}

// priceOption prices the plans of a layout option that can be of use.
func (w *worker) priceOption(n node, f layoutOption, limit float64) []candidate {
	s := w.searcher
	fastest, ok := w.candidate(n, f, 0, limit)
	before := w.priced
	defer func() { w.left += int64(len(s.variants)-1) - (w.priced - before) }()
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
	var ruled []uint8 // what no plan with more of the same can better
	for v := range s.variants {
		set := s.variants[v].set
		if slices.ContainsFunc(ruled, func(r uint8) bool { return r&set == r }) {
			continue
		}
		c := fastest
		if v > 0 {
			if w.slow(n, f.cut, v, limit) {
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

// exceeds tells whether no plan of a family fits that is not too slow; the first one does not fit.
func (w *worker) exceeds(n node, f layoutOption, limit float64) bool {
	s := w.searcher
	all := uint32(1)<<len(s.variants) - 2
	if all == 0 || w.over(n, f, 0, all) {
		return true
	}
	which := all
	for v := 1; v < len(s.variants); v++ {
		if w.slow(n, f.cut, v, limit) {
			which &^= 1 << v
		}
	}
	return which == 0 || which != all && w.over(n, f, 0, which)
}

// over tells whether a plan does not fit already by what bounds its memory, or, if some variants
// are named, none of these in its place.
func (w *worker) over(n node, f layoutOption, v int, which uint32) bool {
	s, p := w.searcher, w.plans[n.count]
	s.job.fill(p, n, f, s.variants[v])
	over, err := w.pricers[n.count][n.precision].Exceeds(p, s.tags, which, s.job.Capacity)
	return over && err == nil
}

// beyond reports whether a plan, and all that take longer, are of no use.
func (s *searcher) beyond(c candidate, limit float64) bool {
	if s.job.Goal == Memory {
		return c.step/s.job.tokens(c.rows) > s.limit
	}
	return c.metric > limit
}

// limits are what a plan of a node may need and take, with a limit in the unit of the goal. Where
// only calm plans are of use, it is the step that tells which they are.
func (s *searcher) limits(n node, limit float64) (most estimate.Limits) {
	if s.calm {
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

// edge is more than the rounding of a limit, reordered more than that of sums in another order.
const (
	edge      = 1e-12
	reordered = 1e-9
)

// candidate prices a plan, as far as it can be of use.
func (w *worker) candidate(n node, f layoutOption, v int, limit float64) (candidate, bool) {
	s := w.searcher
	w.priced++
	e, whole, err := w.within(n, f, s.variants[v], s.limits(n, limit))
	if err != nil {
		return candidate{}, false
	}
	if e.Peak > s.job.Capacity {
		w.nearest = min(w.nearest, e.Peak)
	}
	c := candidate{node: n, layoutOption: f, variant: v, step: e.Step, high: e.High, peak: e.Peak,
		stays: e.Peak - e.Memory.Activations - e.Memory.Temp, part: !whole}
	c.metric = s.perToken(n, c.step)
	if s.job.Goal == Memory {
		c.metric = float64(e.Peak)
	}
	if s.calm && e.Waits > muchBubble*nearBubble {
		return candidate{}, false
	}
	return c, true
}
