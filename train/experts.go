package train

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

// A slotLadder runs steps whose experts have more tokens than slots again with more slots. Programs
// have fixed shapes: the plan has a few sizes, the first of which steps begin with, and the
// programs of the others are compiled in the background. Nothing is updated before all choices of
// all microbatches had a slot on every device, and all processes take the same size.
//
// A nil ladder is a model's without experts.
type slotLadder struct {
	c     *executor
	of    *compiled    // whose gradient programs the rungs replace
	rungs []*alternate // by size, from 1 on; the first is nil
	// rung is the size that steps begin with. A step that needed a larger one leaves it for those
	// that follow, until slotSteps have passed.
	rung int
}

// slotSteps is after how many steps the smallest slots are tried again: a step that overflows is
// computed twice, which should cost less than a percent.
const slotSteps = 128

// newLadder begins to compile the programs with more slots.
func newLadder(ctx context.Context, c *executor) *slotLadder {
	if c.t.programs.Spec().Model.Facts().MoE == nil {
		return nil
	}
	l := &slotLadder{c: c}
	l.compile(ctx)
	return l
}

// compile compiles the rungs of the programs at work, one after the other.
func (l *slotLadder) compile(ctx context.Context) {
	l.free()
	now := l.c.x
	l.of, l.rungs = now, make([]*alternate, now.programs.Rungs())
	before := make(chan struct{})
	close(before)
	for n := range l.rungs[1:] {
		v, last := &alternate{ready: make(chan struct{})}, before
		l.rungs[n+1], before = v, v.ready
		go func() {
			defer close(v.ready)
			<-last
			programs, err := now.programs.Rung(n + 1)
			if err == nil { // what is done around the microbatches is the same
				v.x, err = l.c.compile(ctx, programs.Without(step.Zero, step.Reduce, step.Square,
					step.Update, step.Quantize, step.Inspect))
			}
			if err == nil {
				err = v.x.join(l.c)
			}
			v.err = err
		}()
	}
}

// free waits for the compiler and releases the rungs.
func (l *slotLadder) free() {
	if l == nil {
		return
	}
	for _, v := range l.rungs {
		if v != nil {
			<-v.ready
			v.x.free()
		}
	}
	l.rungs = nil
}

// largest lists the programs with the most slots, for which memory is planned: on GPUs, whose
// memory is short, a run waits for their compile before it begins.
func (l *slotLadder) largest(wait bool) ([]*engine.Executable, error) {
	if l == nil || !wait || len(l.rungs) < 2 || l.of != l.c.x {
		return nil, nil
	}
	last := l.rungs[len(l.rungs)-1]
	if err := last.wait(); err != nil {
		return nil, err
	}
	return last.x.list(), nil
}

// begin gives the size that a step begins with.
func (l *slotLadder) begin(step int) int {
	if l == nil {
		return 0
	}
	if step%slotSteps == 0 {
		l.rung = 0
	}
	return l.rung
}

// at gives the programs with the slots of a rung; base has the first.
func (l *slotLadder) at(ctx context.Context, rung int, base *compiled) (*compiled, error) {
	if rung == 0 {
		return base, nil
	}
	defer l.c.t.phase(phaseCompile)() // which may take longer than a step
	if l.of != l.c.x {                // another precision
		l.compile(context.WithoutCancel(ctx))
	}
	if err := l.rungs[rung].wait(); err != nil {
		return nil, diag.From(err).Because("programs with more slots for experts are compiled")
	}
	return l.rungs[rung].x, nil
}

// climb gives the next rung if choices had no slot in any process.
func (l *slotLadder) climb(ctx context.Context, rung int, overflow float64) (next int, again bool,
	err error) {
	if l == nil {
		return rung, false, nil
	}
	again, err = l.c.peers.any(ctx, overflow > 0)
	if err != nil || !again {
		return rung, false, err
	}
	slots, facts := l.c.t.programs.Plan.ExpertSlots(), l.c.t.programs.Spec().Model.Facts().MoE
	all := float64(facts.Experts) / float64(facts.TopK) // with which every token has a slot
	if rung+1 == len(slots) {
		return rung, false, diag.New(diag.ExpertsOverflow, "experts have more tokens than %g times "+
			"their mean load, the plan's last number of slots", slots[rung]).
			At("step %d, plan slots", l.c.t.step+1).
			Try(`"slots": [%g, %g] in the plan: with the last nothing overflows; or experts.capacity, `+
				"to drop tokens, or experts.aux_loss, to balance the load", slots[0], all)
	}
	l.c.t.opts.Events.Emit(event.Note{Text: fmt.Sprintf("step %d: %.0f tokens of experts have no "+
		"slot at %g times the mean load; it runs again at %g times", l.c.t.step+1, overflow, slots[rung],
		min(slots[rung+1], all))})
	return rung + 1, true, nil
}

// addLoad adds up the loads of a microbatch, by program and name.
func (r *report) addLoad(program, name string, b []byte) {
	if r.Loads == nil {
		r.Loads = map[string][]float32{}
	}
	key := program + " " + name
	now := decode[float32](b)
	for i, x := range r.Loads[key] {
		now[i] += x
	}
	r.Loads[key] = now
}

// overflow is the number of choices without a slot so far.
func (c *executor) overflow() (n float64) {
	for _, r := range c.hosted() {
		for _, x := range r.stats.Loads {
			each := c.experts() + model.LoadExtras
			for i := c.experts() + model.LoadOverflow; i < len(x); i += each {
				n += float64(x[i])
			}
		}
	}
	return n
}

// experts is how many a layer of the model has.
func (c *executor) experts() int { return int(c.t.programs.Spec().Model.Facts().MoE.Experts) }

// loads are what the experts of each layer had to do in a step of some tokens, in the order of
// layers, as far as ranks of this process have them.
func (c *executor) loads(tokens int64) (list []event.ExpertLoad) {
	n := c.experts()
	each := n + model.LoadExtras
	for _, r := range c.hosted() {
		for _, key := range slices.Sorted(maps.Keys(r.stats.Loads)) {
			x := r.stats.Loads[key]
			program, name, _ := strings.Cut(key, " ")
			first, stride := c.t.programs.Layers(program, c.routerOf(name))
			for k := range len(x) / each {
				l := loadOf(x[k*each:(k+1)*each], n, tokens)
				l.Layer = int(first + int64(k)*stride)
				list = append(list, l)
			}
		}
	}
	lists.Sort(list, func(a, b event.ExpertLoad) int { return a.Layer - b.Layer })
	return list
}

// loadOf reads the load of one layer's n experts.
func loadOf(x []float32, n int, tokens int64) event.ExpertLoad {
	mean := lists.Sum(x[:n], func(f float32) float64 { return float64(f) }) / float64(n)
	return event.ExpertLoad{
		Tokens:  lists.Map(x[:n], func(f float32) int64 { return int64(f) }),
		Busiest: float64(slices.Max(x[:n])) / max(mean, 1),
		Idlest:  float64(slices.Min(x[:n])) / max(mean, 1),
		Dropped: float64(x[n+model.LoadDropped]),
		Entropy: float64(x[n+model.LoadEntropy]) / float64(tokens),
	}
}

// routerOf is the router in the layers of a loop, by the name of its load: of block.3,
// block.router.3, or what a captured program calls its own.
func (c *executor) routerOf(load string) string {
	name := strings.TrimPrefix(load, model.LoadPrefix)
	if slices.ContainsFunc(c.t.programs.Params, func(p model.Param) bool { return p.Name == name }) {
		return name
	}
	slot, part, cut := strings.Cut(name, ".")
	if cut {
		return slot + ".router." + part
	}
	return slot + ".router"
}

// readLoad reads the loads among the results of a forward pass, for a validation.
func (r *rank) readLoad(ctx context.Context, a *engine.Array, spec program.Array) error {
	if spec.Role != program.Stat || !strings.HasPrefix(spec.Name, model.LoadPrefix) {
		return nil
	}
	return r.stats.readOne(ctx, "evaluate", a, spec)
}

// reportExperts emits what the experts of a step had to do, and warns of a router that collapsed.
func (t *Trainer) reportExperts(r StepResult) {
	if t.exec.ladder == nil {
		return
	}
	e := event.Experts{Step: r.Step, Layers: t.exec.loads(r.Tokens)}
	t.balance.observe(t.opts.Events, e)
	if len(e.Layers) > 0 && (r.Step%loadSteps == 0 || r.Step == 1 || t.step == t.end()) {
		t.opts.Events.Emit(e)
	}
}

// loadSteps is how often a run says what its experts do.
const loadSteps = 10

// A balance watches the loads of layers for a collapse of the router: a few experts take nearly all
// tokens and the others, which get no gradient, stay what they are.
type balance struct {
	loads  map[int][]float64 // by layer and expert: moving averages, by the mean
	steps  int
	warned map[int]bool
}

// A router has collapsed if, over about loadMemory steps, its busiest expert has collapsedBusiest
// times the mean load, or its idlest less than collapsedIdlest of it. The first steps do not count.
// bench/balance: balanced runs stay between 0.8 and 1.3.
const (
	loadMemory       = 64
	settlingSteps    = 200
	collapsedBusiest = 3.0
	collapsedIdlest  = 0.02
)

// observe follows the loads of a step.
func (b *balance) observe(events event.Sink, e event.Experts) {
	if b.loads == nil {
		b.loads, b.warned = map[int][]float64{}, map[int]bool{}
	}
	b.steps++
	for _, l := range e.Layers {
		mean := lists.Sum(l.Tokens, func(n int64) float64 { return float64(n) }) /
			float64(len(l.Tokens))
		average := b.loads[l.Layer]
		if average == nil {
			average = slices.Repeat([]float64{1}, len(l.Tokens))
			b.loads[l.Layer] = average
		}
		for i, n := range l.Tokens {
			average[i] += (float64(n)/max(mean, 1) - average[i]) / loadMemory
		}
		busiest, idlest := slices.Max(average), slices.Min(average)
		bad := busiest > collapsedBusiest || idlest < collapsedIdlest
		if b.steps < settlingSteps || b.warned[l.Layer] || !bad {
			continue
		}
		b.warned[l.Layer] = true
		events.Emit(event.RouterCollapsed{Step: e.Step, Layer: l.Layer, Busiest: busiest,
			Idlest: idlest})
	}
}
