package train

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/flat"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/precision/monitor"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

// patience is how many steps run in bf16 after a GEMM fell back, while the programs of the new
// policy are compiled. It is a number of steps and not the compiler's time, so that a run is
// reproducible: the same steps run in the same precision on any host.
const patience = 8

// ahead is how many steps before an inspection its programs begin to be compiled. The first 50
// steps are never inspected; shorter runs do not compile these programs at all.
const ahead = 50

// A precisionController monitors quantized GEMMs and switches them to a wider format, and back, by
// swapping compiled programs.
//
// After each step it shows the statistics of all ranks to the [monitor.Monitor] and follows its
// decisions. A GEMM that falls back takes effect at once: the next step runs in bf16 throughout,
// with programs that were compiled when the run began, until programs of the new policy are ready
// in the background. All processes see the same statistics and so decide alike.
//
// All methods may be called on nil: a run without quantized GEMMs has no controller.
type precisionController struct {
	t       *Trainer
	exec    *executor
	monitor *monitor.Monitor
	reader  *statsReader
	// policy is the one to reach. The programs at work have another while next is being compiled.
	policy *precision.Policy
	bf16   *alternate // quantizes nothing
	next   *alternate // has policy; nil if policy is at work
	from   int        // next is adopted after this step
	// probes are programs of the policy at work that also measure rounding errors; nil until they are
	// needed.
	probes *alternate
	final  bool // policy is the one of the final BF16 phase

	ctx       context.Context
	cancel    func()
	abandoned sync.WaitGroup // alternates that are freed once compiled
}

// An alternate is the run's programs under another policy, compiled in the background.
type alternate struct {
	x        *compiled
	err      error
	ready    chan struct{}
	reported bool // a warning says that it could not be compiled
}

// newPrecisionController starts monitoring, and compiles the bf16 programs. It returns nil if no
// GEMM is quantized.
func newPrecisionController(ctx context.Context, t *Trainer) *precisionController {
	p := t.programs
	if !p.Policy.Quantizes() {
		return nil
	}
	// Statistics of the warmup say nothing about the rest of the run.
	o := monitor.Defaults()
	if t.opts.Monitor != nil {
		o = *t.opts.Monitor
	} else {
		o.Settle = max(o.Settle, t.opts.Recipe.Optimizer.Warmup)
	}
	s := &precisionController{t: t, exec: t.exec, monitor: monitor.New(o), reader: newReader(p),
		policy: p.Policy}
	s.ctx, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	s.bf16 = s.compile(s.allBF16(), false)
	return s
}

// allBF16 is the policy that quantizes nothing.
func (s *precisionController) allBF16() *precision.Policy {
	return &precision.Policy{Layers: s.t.programs.Policy.Layers}
}

// compile builds and compiles an alternate in the background.
func (s *precisionController) compile(policy *precision.Policy, inspect bool) *alternate {
	v := &alternate{ready: make(chan struct{})}
	// Built from the Spec of the present programs; the engine's cache makes unchanged ones cheap.
	now := s.t.programs
	go func() {
		defer close(v.ready)
		programs, err := now.Again(policy, inspect)
		if err == nil {
			v.x, err = s.exec.compile(s.ctx, programs)
		}
		if err == nil {
			err = v.x.join(s.exec)
		}
		v.err = err
	}()
	return v
}

// wait returns when the alternate is compiled, or has failed.
func (v *alternate) wait() error {
	<-v.ready
	return v.err
}

// ready waits until all processes have compiled an alternate. They use it all or not at all: bad is
// why not.
func (s *precisionController) ready(ctx context.Context, v *alternate) (bad, err error) {
	bad = v.wait()
	failed, err := s.exec.peers.any(ctx, bad != nil)
	if failed && bad == nil {
		bad = errors.New("another process could not")
	}
	return bad, err
}

// switchTo compiles the programs of a policy, to be adopted after a step. A switch that is still
// being prepared is abandoned. In the final BF16 phase nothing changes before that phase begins.
func (s *precisionController) switchTo(policy *precision.Policy, from int) {
	s.giveUp(s.next)
	if s.final {
		from = max(from, s.finalFrom())
	}
	s.policy, s.next, s.from = policy, s.compile(policy, false), from
}

// finalFrom is the step after which the final BF16 phase begins: its forward GEMMs are in bf16.
// Without one it is the last step.
func (s *precisionController) finalFrom() int {
	r := s.t.opts.Recipe
	return r.Steps - int(math.Round(r.FinalBF16*float64(r.Steps)))
}

// finalBF16 prepares the final BF16 phase, whose programs are compiled during the steps before it.
// What falls back meanwhile stays in bf16 until then, and what would return waits for it.
func (s *precisionController) finalBF16() {
	from := s.finalFrom()
	if s.final || from == s.t.opts.Recipe.Steps || s.t.step < from-ahead {
		return
	}
	s.final = true
	policy := s.policy.FinalBF16()
	if policy == s.policy {
		return
	}
	s.switchTo(policy, from)
	share := s.t.opts.Recipe.FinalBF16
	s.t.opts.Events.Emit(event.Precision{Step: s.t.step + 1, What: "final-bf16", Layer: -1,
		Product: precision.Fprop, To: string(dtype.FormatBF16), Signal: "recipe",
		Value: share, Text: fmt.Sprintf("step %d: forward GEMMs are in bf16 from step %d on, the last"+
			" %g %% of the run", s.t.step+1, s.from+1, 100*share)})
}

// giveUp frees an alternate as soon as it is compiled; nil is ignored.
func (s *precisionController) giveUp(v *alternate) {
	if v == nil {
		return
	}
	s.abandoned.Go(func() {
		if v.wait() == nil {
			v.x.free()
		}
	})
}

// begin adopts the programs whose turn it is, before a step, and decides whether the step is
// inspected.
func (s *precisionController) begin(ctx context.Context) error {
	if s == nil {
		return nil
	}
	s.finalBF16()
	if s.next != nil && s.t.step >= s.from {
		v := s.next
		s.next = nil
		if err := s.adopt(ctx, v); err != nil {
			return err
		}
	}
	return s.inspect(ctx)
}

// inspect lets the next step measure rounding errors, if it is its turn. The step waits for the
// programs that do: what a run measures, and so what it decides, must not depend on the time that a
// compiler takes. The wait is rare, since they are compiled during the steps before.
func (s *precisionController) inspect(ctx context.Context) error {
	s.exec.probes = nil
	// Inspections follow a schedule of steps, and come at once after a suspicious one.
	step, policy := s.t.step+1, s.t.programs.Policy
	if !policy.Quantizes() {
		return nil
	}
	turn := s.monitor.Inspects(step)
	next := s.monitor.NextInspection(step)
	soon := next >= step && next-step < ahead && next <= s.t.end()
	if s.probes == nil && (turn || soon) {
		s.probes = s.compile(policy, true)
	}
	if !turn {
		return nil
	}
	end := s.t.phase(phaseCompile)
	bad, err := s.ready(ctx, s.probes)
	end()
	switch {
	case err != nil:
	case bad == nil:
		s.exec.probes, s.reader.probes = s.probes.x, s.probes.x.programs
	case !s.probes.reported:
		s.warn("what rounding does is not measured: the programs that do could not be compiled", bad)
		s.probes.reported = true
	}
	return err
}

// warn emits an event for programs that could not be compiled.
func (s *precisionController) warn(what string, err error) {
	step := s.t.step + 1
	s.t.opts.Events.Emit(event.Precision{Step: step, What: string(monitor.Warn), Layer: -1,
		Signal: "compiler", Text: fmt.Sprintf("step %d: warning: %s: %v", step, what, err)})
}

// adopt switches to other programs. If they could not be compiled, the run goes on with those that
// it has, and says so. The state stays in place unless the new programs stack layers differently,
// and quantized copies are made anew.
func (s *precisionController) adopt(ctx context.Context, v *alternate) error {
	defer s.t.phase(phaseCompile)()
	bad, err := s.ready(ctx, v)
	if err != nil {
		return err
	}
	if bad != nil {
		s.warn("programs of another precision could not be compiled, and the run goes on with those that"+
			" it has", bad)
		return nil
	}
	// From here on nothing fails half way: programs, their statistics and the copies they read change
	// together.
	c, old := s.exec, s.t.programs
	if c.x == v.x {
		return nil
	}
	if c.x != s.bf16.x {
		c.x.free()
	}
	s.giveUp(s.probes)
	s.probes, c.probes = nil, nil
	for _, r := range c.hosted() {
		for _, row := range old.OfRank(r.number) {
			for _, a := range row.Module.Args {
				if a.Role == program.Copy {
					r.state.Drop(a.Name)
				}
			}
		}
		r.stats = report{}
	}
	c.x, s.t.programs, s.reader = v.x, v.x.programs, newReader(v.x.programs)
	if !slices.EqualFunc(old.Params, s.t.programs.Params, func(a, b model.Param) bool {
		return a.Name == b.Name && slices.Equal(a.Dims, b.Dims)
	}) {
		return s.t.reshardState(ctx, old)
	}
	return c.quantize(ctx)
}

// reshardState moves the state from the arrays of other programs, whose loops stack other layers,
// to the arrays of the programs at work, through host memory.
func (t *Trainer) reshardState(ctx context.Context, old *step.Programs) error {
	shards := t.exec.stateShards()
	tensors := map[string][]byte{}
	for _, pc := range stateTensors(old) {
		h := shards[pc.rank]
		if h == nil {
			continue
		}
		data, err := gather(ctx, h.state.Get(pc.name), &pc, h.mesh)
		if err != nil {
			return err
		}
		for _, one := range pc.tensors {
			tensors[one.Name], data = data[:one.Bytes()], data[one.Bytes():]
		}
		h.state.Drop(pc.name)
	}
	return t.fill(ctx, t.computed(func(name string, _ *model.Param, dst []byte) error {
		copy(dst, tensors[name])
		return nil
	}))
}

// phase is the phase in which the watchdog counts the step.
func (s *precisionController) phase() string {
	if s != nil && s.exec.probes != nil {
		return phaseInspect
	}
	return phaseStep
}

// sound reports whether the scales that the GEMMs of all processes read are the bytes that were
// written: a checksum, so that a flipped bit in a scale is not trained on.
func (s *precisionController) sound(ctx context.Context) (bool, error) {
	if s == nil {
		return true, nil
	}
	bad, err := s.exec.peers.any(ctx, !s.reader.sound(s.exec.reports()))
	return !bad, err
}

// reports returns the statistics of each rank; empty for ranks of other processes.
func (c *executor) reports() []*report {
	list := make([]*report, len(c.ranks))
	for n, r := range c.ranks {
		if list[n] = new(report); r != nil {
			list[n] = &r.stats
		}
	}
	return list
}

// allReports returns the statistics of all ranks of all processes.
func (c *executor) allReports(ctx context.Context) ([]*report, error) {
	// Each process contributes the ranks that it hosts.
	list := c.reports()
	if c.peers == nil {
		return list, nil
	}
	mine, err := flat.Append(nil, list)
	if err != nil {
		return nil, err
	}
	all, err := c.peers.blobs(ctx, "reports", mine)
	if err != nil {
		return nil, err
	}
	for process, text := range all {
		var theirs []*report
		if err := flat.Parse(text, &theirs); err != nil {
			return nil, diag.New(diag.PeersDiffer, "the reports of process %d cannot be read",
				process).Wrap(err)
		}
		for n := range list {
			if c.peers.process(n, len(list)) == process {
				list[n] = theirs[n]
			}
		}
	}
	return list, nil
}

// limits are the largest loss and gradient norm that are not spikes, by the guard and the monitor.
func (t *Trainer) limits() (loss, norm float64) {
	loss, norm = t.guard.limits()
	if t.controller != nil {
		l, n := t.controller.monitor.Limits()
		loss, norm = min(loss, l), min(norm, n)
	}
	return loss, norm
}

// observe shows a step to the monitor and acts on its decisions. why is set if the monitor refused
// the update.
func (s *precisionController) observe(ctx context.Context, loss, norm float64) (why string,
	err error) {
	if s == nil {
		return "", nil
	}
	policy, falls, returns := s.policy, false, false
	reports, err := s.exec.allReports(ctx)
	if err != nil {
		return "", err
	}
	// Decisions come in the order of the layers; several GEMMs may fall in one step, and one switch
	// covers them all.
	sample := s.reader.sample(s.t.step+1, loss, norm, reports)
	for _, d := range s.monitor.Observe(sample) {
		s.t.opts.Events.Emit(event.Precision{Step: d.Step, What: string(d.Kind), Layer: d.Layer,
			Linear: d.Linear, Product: d.GEMM, From: d.From, To: d.To, Signal: d.Signal,
			Value: d.Value, Usual: d.Usual, Bound: d.Bound, Text: d.String()})
		switch d.Kind {
		case monitor.Fall:
			policy, falls = s.fallen(policy, d), true
		case monitor.Return:
			if p, ok := policy.Return(d.Layer, d.Linear, d.GEMM); ok {
				policy, returns = p, true
			}
		case monitor.Refuse:
			why = d.String()
		}
	}
	if falls { // now: the next step must not repeat what went wrong
		err = s.adopt(ctx, s.bf16)
	}
	if falls || returns {
		s.switchTo(policy, s.t.step+patience)
	}
	return why, err
}

// fallen returns the policy after a fallback; it is to bf16 where the model's shapes do not fit the
// format that was asked for.
func (s *precisionController) fallen(from *precision.Policy, d monitor.Decision) *precision.Policy {
	p := from.Fall(d.Layer, d.Linear, d.GEMM, dtype.Format(d.To), d.String())
	if p.Check(s.t.opts.Model) != nil {
		p = from.Fall(d.Layer, d.Linear, d.GEMM, dtype.FormatBF16, d.String())
	}
	return p
}

// free stops compiling and releases all programs but those at work.
func (s *precisionController) free() {
	if s == nil {
		return
	}
	s.cancel()
	for _, v := range []*alternate{s.bf16, s.next, s.probes} {
		if v != nil && v.wait() == nil && v.x != s.exec.x {
			v.x.free()
		}
	}
	s.abandoned.Wait()
}

// A shift is where a run stands between two policies. Checkpoints hold it, so that a resumed run
// switches at the same step. JSON names are part of the format.
type shift struct {
	Monitor *monitor.Monitor `json:"watch"`
	Works   json.RawMessage  `json:"works"` // the policy of the programs at work
	Aim     json.RawMessage  `json:"aim"`   // the policy of those to be adopted
	From    int              `json:"from"`  // before the step after this one
}

// shift returns the present shift as JSON.
func (s *precisionController) shift() ([]byte, error) {
	// Both policies as text: a later binary compares them with what it would build.
	works, err := s.t.programs.Policy.Marshal()
	if err != nil {
		return nil, err
	}
	aim, err := s.policy.Marshal()
	if err != nil {
		return nil, err
	}
	return json.Marshal(&shift{s.monitor, works, aim, s.from})
}

// resume continues with the shift of a checkpoint, which may be of an earlier step than the present
// one. The recipe's policy is the same; the one at work may differ from it.
func (s *precisionController) resume(ctx context.Context, data []byte) error {
	if s == nil || len(data) == 0 {
		return nil
	}
	old := &shift{Monitor: s.monitor}
	if err := json.Unmarshal(data, old); err != nil {
		return err
	}
	works, err := precision.Parse(old.Works, "checkpoint")
	if err != nil {
		return err
	}
	aim, err := precision.Parse(old.Aim, "checkpoint")
	if err != nil {
		return err
	}
	s.giveUp(s.next) // of a later step, if the run goes back to an earlier one
	s.next, s.final = nil, false
	switch {
	case !works.Quantizes():
		err = s.adopt(ctx, s.bf16)
	case works.String() != s.t.programs.Policy.String():
		err = s.adopt(ctx, s.compile(works, false))
	}
	if s.policy = aim; works.String() != aim.String() {
		s.switchTo(aim, old.From)
	}
	return err
}
