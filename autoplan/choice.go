package autoplan

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dryrun"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/estimate"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/price"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
)

// A Choice is a simulated plan, with what it trades.
type Choice struct {
	Plan      *plan.Plan     `json:"plan"`
	Precision dtype.Format   `json:"precision"`
	Devices   int            `json:"devices"` // devices in use
	Paid      int            `json:"paid"`    // devices on the bill, in use or idle
	Step      float64        `json:"step"`    // simulated seconds
	Low       float64        `json:"low"`     // 90 % of steps fall between Low and High
	High      float64        `json:"high"`
	Rate      float64        `json:"rate"`          // tokens per second and paid device
	MFU       float64        `json:"mfu,omitempty"` // see [Job.MFU]
	Peak      int64          `json:"peak"`
	Memory    program.Memory `json:"memory"` // of the worst rank at its peak
	Bubble    float64        `json:"bubble"` // idle share of the step
	Why       string         `json:"why"`
	// Policy describes in a line which GEMMs are quantized and the cost of quantization; empty if
	// none are.
	Policy string `json:"policy,omitempty"`

	exchange string // how rows go to experts, and why; empty without expert parallelism

	// Estimate is the closed-form estimate.
	Estimate estimate.Estimate `json:"-"`
}

// StepOf combines a plan's schedule and the times of its stages for the simulator.
func StepOf(p *plan.Plan, e estimate.Estimate) (*dryrun.Step, error) {
	list, err := p.Schedule()
	if err != nil {
		return nil, err
	}
	return stepOf(p, e, list)
}

// stepOf is StepOf with the schedule at hand. Reduce is the exposed part of gradient reduction and
// parameter gathers after the last microbatch, in seconds.
func stepOf(p *plan.Plan, e estimate.Estimate, list *schedule.Schedule) (*dryrun.Step, error) {
	if len(e.Stages) != list.Stages() {
		return nil, diag.New(diag.Internal, "%d stages have prices; the plan has %d",
			len(e.Stages), list.Stages())
	}
	replicas := p.DataParallelSize()
	s := &dryrun.Step{Schedule: list, Replicas: int(replicas),
		Rows:   p.MicrobatchSequences() / max(replicas, 1),
		Reduce: max(0, e.Tail-e.Parts.Optimizer-e.Parts.Host), Update: e.Parts.Optimizer,
		Host: e.Parts.Host, Policy: e.QuantizedLine(), Ranks: e.Ranks}
	for i, x := range e.Stages {
		s.Stages = append(s.Stages, dryrun.Stage{Forward: x.Forward, Input: x.Input, Weight: x.Weight,
			Send: x.Send, Load: e.Loads[i]})
	}
	return s, nil
}

// simulate runs the best candidates in the simulator and returns the best of each mesh, up to
// Job.Top.
func (s *searcher) simulate(ctx context.Context, found []candidate) ([]Choice, error) {
	choices := make([]Choice, len(found))
	errs := make([]error, len(s.workers))
	var wg sync.WaitGroup
	for k, w := range s.workers {
		wg.Go(func() {
			for i := k; i < len(found) && errs[k] == nil; i += len(s.workers) {
				if errs[k] = ctx.Err(); errs[k] == nil {
					choices[i], errs[k] = w.choice(found[i])
				}
			}
		})
	}
	wg.Wait()
	if err := cmp.Or(errs...); err != nil {
		return nil, err
	}
	order := make([]int, len(found))
	for i := range order {
		order[i] = i
	}
	value := func(i int) float64 {
		if s.job.Goal == Memory {
			return float64(choices[i].Peak)
		}
		return s.perToken(found[i].meshOption, choices[i].Step)
	}
	if s.lowBubbleOnly { // the closed form was slightly below
		order = slices.DeleteFunc(order, func(i int) bool { return choices[i].Bubble >= muchBubble })
	}
	slices.SortFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(value(a), value(b)), cmp.Compare(a, b))
	})
	var shown []Choice
	for len(order) > 0 && len(shown) < s.job.Top {
		// Of plans closer together than any prediction can resolve, the simplest is listed: among all
		// plans for the first place, among equivalent ones for the others.
		first := order[0]
		for _, i := range order[1:] {
			if value(i) > value(order[0])*same || s.job.Goal == Memory {
				break
			}
			other := len(shown) > 0 && found[i].label() != found[order[0]].label()
			if !other && found[i].simpler(&found[first]) {
				first = i
			}
		}
		shown = append(shown, choices[first])
		order = slices.DeleteFunc(order, func(i int) bool {
			return found[i].key() == found[first].key() || found[i].label() == found[first].label()
		})
	}
	return shown, nil
}

// same is the ratio of metrics below which the simpler plan wins.
const same = 1.005

// simpler reports whether c has a smaller cp, or else fewer axes, than o.
func (c *candidate) simpler(o *candidate) bool {
	axes := func(m mesh) (n int) {
		for _, size := range []int64{m.tp, m.ep, m.pp, m.data} {
			if size > 1 {
				n++
			}
		}
		return n
	}
	return cmp.Or(cmp.Compare(c.cp, o.cp), cmp.Compare(axes(c.mesh), axes(o.mesh))) < 0
}

// choice prices a candidate without limits and simulates it.
func (w *worker) choice(c candidate) (Choice, error) {
	s := w.searcher
	e, _, err := w.within(c.meshOption, c.layoutOption, s.recomputes[c.recompute], estimate.Limits{})
	if err != nil {
		return Choice{}, err
	}
	p := *w.plans[c.count]
	e = e.Clone()
	s.job.Correction.Apply(&e)
	o, err := s.schedule(&p)
	if err != nil {
		return Choice{}, err
	}
	step, err := stepOf(&p, e, o.list)
	if err != nil {
		return Choice{}, err
	}
	step.Order = o.order
	line, err := step.Time()
	if err != nil {
		return Choice{}, err
	}
	n := s.counts[c.count]
	paid := s.job.paid(n)
	p.Precision = precisionName(s.job.Precisions[c.precision])
	x := Choice{Plan: &p, Precision: s.job.Precisions[c.precision], Devices: n, Paid: paid,
		Step: line.Step, Low: e.Low, High: e.High, Peak: e.Peak, Memory: e.Memory,
		Rate:   s.job.tokens(c.rows) / line.Step / float64(paid),
		MFU:    s.job.MFU(c.rows, n, line.Step),
		Bubble: line.Bubble, Policy: line.Policy, Estimate: e, exchange: c.exchange.why}
	if e.Step > 0 { // the closed form's interval, scaled
		x.Low, x.High = e.Low*line.Step/e.Step, e.High*line.Step/e.Step
	}
	return x, nil
}

// A listed is the key of a schedule.
type listed struct {
	plan.PP
	micros int64
}

// An ordered is a schedule with the topological order of its actions.
type ordered struct {
	list  *schedule.Schedule
	order *schedule.Order
}

// schedule returns the schedule of a plan, which plans often share.
func (s *searcher) schedule(p *plan.Plan) (o ordered, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := listed{p.PP, p.Microbatches}
	if found, ok := s.lists[key]; ok {
		return found, nil
	}
	if o.list, err = p.Schedule(); err != nil {
		return o, err
	}
	if o.order, err = o.list.Order(); err == nil {
		s.lists[key] = o
	}
	return o, err
}

// precisionName is a format as a plan spells it; "" is the parameters' own type.
func precisionName(p dtype.Format) string {
	if p == dtype.FormatF32 || p == dtype.FormatBF16 {
		return ""
	}
	return string(p)
}

// noticed is the smallest share of a step, or of memory, that is mentioned.
const noticed = 0.01

// explain writes the trade-offs of each plan in a sentence: the first plan's own costs, and how
// the others differ from it.
func explain(list []Choice, j Job) {
	least := lists.Most(list, func(c Choice) int64 { return -c.Peak })
	for i := range list {
		c := &list[i]
		var words []string
		if i > 0 {
			words = append(words, c.against(&list[0], j.Goal))
		}
		words = append(words, c.costs(i == 0, j.Profile)...)
		if len(c.Plan.Recompute) == 0 && len(list[0].Plan.Recompute) > 0 {
			words = append(words, "no recomputation")
		}
		if i == least && len(list) > 1 {
			words = append(words, "least memory")
		}
		if idle := j.Cluster.Count - c.Devices; idle > 0 {
			words = append(words, fmt.Sprintf("leaves %d idle", idle))
		}
		words = slices.DeleteFunc(words, func(w string) bool { return w == "" })
		c.Why = strings.Join(words[:min(len(words), 4)], ", ")
		if i == 0 && c.exchange != "" {
			c.Why += "; " + c.exchange
		}
		if c.Policy != "" && (i == 0 || len(j.Precisions) > 1) {
			c.Why += "; " + c.Policy
		} else if len(j.Precisions) > 1 {
			c.Why += "; " + string(c.Precision)
		}
	}
}

// against compares a plan's time, or price, with the first plan's.
func (c *Choice) against(first *Choice, goal Goal) string {
	slow, words := c.slower(first), [3]string{"slower", "faster", "as fast"}
	if goal == Money {
		slow, words = first.Rate/c.Rate, [3]string{"dearer", "cheaper", "as cheap"}
	}
	switch slow--; {
	case slow >= 0.0005:
		return fmt.Sprintf("%.1f %% %s", 100*slow, words[0])
	case slow <= -0.0005:
		return fmt.Sprintf("%.1f %% %s", -100*slow, words[1])
	}
	return words[2]
}

// slower is the ratio of two plans' times per token.
func (c *Choice) slower(than *Choice) float64 {
	return than.Rate * float64(than.Paid) / (c.Rate * float64(c.Paid))
}

// costs lists the two largest overheads; the first plan's also states that it has no bubble or next
// to no exposed FSDP communication, which is hidden only if the stack overlaps it.
func (c *Choice) costs(first bool, stack *price.Profile) []string {
	p, total := c.Estimate.Parts, max(c.Estimate.Parts.Sum(), 1e-12)
	parts := []dryrun.Part{
		{Name: "bubble", Seconds: c.Bubble * c.Step},
		{Name: "recomputation", Seconds: p.Recompute},
		{Name: "tensor-parallel communication", Seconds: p.Tensor},
		{Name: "context-parallel communication", Seconds: p.Context},
		{Name: "expert-parallel communication", Seconds: p.Expert},
		{Name: "FSDP communication", Seconds: p.Data},
		{Name: "pipeline communication", Seconds: p.Pipeline},
		{Name: "offloading", Seconds: p.Offload},
	}
	lists.Sort(parts, func(a, b dryrun.Part) int {
		return cmp.Compare(b.Seconds, a.Seconds)
	})
	var words []string
	for _, x := range parts {
		if x.Seconds >= noticed*total && len(words) < 2 {
			words = append(words, fmt.Sprintf("%.1f %% %s", 100*x.Seconds/total, x.Name))
		}
	}
	if first && c.Bubble < 0.0005 {
		words = append(words, "no bubble")
	}
	switch little := first && p.Data < noticed/2*total && c.Devices > 1; {
	case little && stack.Overlaps():
		words = append(words, "FSDP communication hidden")
	case little:
		words = append(words, fmt.Sprintf("FSDP communication below %g %%", 100*noticed/2))
	}
	return words
}

// best collects the candidates found, and the best one of each mesh.
type best struct {
	top    int
	found  []candidate
	meshes map[meshKey]candidate
}

// A meshKey identifies plans of which only the best is listed.
type meshKey struct {
	mesh
	count, precision int
}

// key identifies the mesh whose best plan is listed.
func (c candidate) key() meshKey { return meshKey{c.mesh, c.count, c.precision} }

// A labelKey identifies plans that are equivalent in work per device: k sequences split over k cp
// ranks are as many tokens per device as one sequence for each of k data-parallel ranks.
type labelKey struct {
	tp, ep, pp, ranks, micros int64
	count, precision          int
}

// label identifies equivalent plans, of which the simplest is listed.
func (c candidate) label() labelKey {
	return labelKey{c.tp, c.ep, c.pp, c.cp * c.data, c.micros, c.count, c.precision}
}

// limit is the largest metric a plan may have to be of use: the metric of the last mesh that would
// be listed, times Margin.
func (b *best) limit() float64 {
	if len(b.meshes) < b.top {
		return math.Inf(1)
	}
	seen := map[labelKey]bool{}
	found := slices.Collect(maps.Values(b.meshes))
	lists.Sort(found, candidate.compare)
	for _, c := range found {
		if seen[c.label()] = true; len(seen) == b.top {
			return c.metric * Margin
		}
	}
	return math.Inf(1)
}

// add records candidates, and the best of each mesh.
func (b *best) add(list []candidate) {
	for _, c := range list {
		b.found = append(b.found, c)
		if x, ok := b.meshes[c.key()]; !ok || c.compare(x) < 0 {
			b.meshes[c.key()] = c
		}
	}
}
