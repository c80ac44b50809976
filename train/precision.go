package train

import (
	"bytes"
	"context"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/precision/monitor"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

// patience is how many steps a run computes everything in bf16 after a product fell, while the
// programs of its new policy are compiled. It is a number of steps and not the time that a compiler
// takes, so that the same run does the same.
const patience = 8

// ahead is how many steps before a step that is inspected the programs that do it begin to be
// compiled, unless they are there from the one before: the first 50 of a run are never inspected.
// Runs that end sooner do not compile them at all.
const ahead = 50

// A precisionController watches the products in few bits of a run, and changes what they are
// computed in.
//
// Programs of a policy are compiled while the run goes on. Until they are there, those that compute
// everything in bf16 take their place: they are compiled when the run begins.
type precisionController struct {
	t       *Trainer
	exec    *executor
	monitor *monitor.Monitor
	reader  *reader
	policy  *precision.Policy // that is aimed at; the programs at work may be another's
	safe    *variant
	next    *variant // to be adopted
	from    int      // before the step after this one
	// probes measures the errors of rounding of the policy at work; nil if it is not needed yet.
	probes *variant
	mends  bool // the policy that is aimed at is that of the last part of the run

	ctx     context.Context
	cancel  func()
	useless sync.WaitGroup // variants that nobody waits for any more
}

// A variant is the programs of a run under another policy.
type variant struct {
	x        *compiled
	err      error
	ready    chan struct{}
	reported bool // that it could not be compiled
}

// newPrecisionController begins to watch; nil if nothing is in few bits.
func newPrecisionController(ctx context.Context, t *Trainer) *precisionController {
	p := t.programs
	if !p.Policy.Quantizes() {
		return nil
	}
	o := monitor.Defaults()
	if t.opts.Monitor != nil {
		o = *t.opts.Monitor
	} else {
		o.Settle = max(o.Settle, t.opts.Recipe.Optimizer.Warmup)
	}
	s := &precisionController{t: t, exec: t.exec, monitor: monitor.New(o), reader: newReader(p),
		policy: p.Policy}
	s.ctx, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	s.safe = s.compile(s.wide(), false)
	return s
}

// wide is the policy that computes everything in bf16.
func (s *precisionController) wide() *precision.Policy {
	return &precision.Policy{Layers: s.t.programs.Policy.Layers}
}

// compile makes a variant in the background.
func (s *precisionController) compile(policy *precision.Policy, inspect bool) *variant {
	v := &variant{ready: make(chan struct{})}
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

// wait gives a variant when it is ready.
func (v *variant) wait() error {
	<-v.ready
	return v.err
}

// ready waits for a variant in all processes, which all use it or all do not: bad tells why not.
func (s *precisionController) ready(ctx context.Context, v *variant) (bad, err error) {
	bad = v.wait()
	failed, err := s.exec.peers.some(ctx, bad != nil)
	if failed && bad == nil {
		bad = errors.New("another process could not")
	}
	return bad, err
}

// aim has the programs of the policy compiled, to be adopted before a step; what was aimed at
// before is given up.
func (s *precisionController) aim(policy *precision.Policy, from int) {
	s.giveUp(s.next)
	if s.mends {
		from = max(from, s.lastPart())
	}
	s.policy, s.next, s.from = policy, s.compile(policy, false), from
}

// lastPart is the step before which the last part of a run begins, if the recipe has one repaired:
// its forward products are in bf16.
func (s *precisionController) lastPart() int {
	r := s.t.opts.Recipe
	return r.Steps - int(math.Round(r.FinalBF16*float64(r.Steps)))
}

// finalBF16 turns to the last part of the run. Its programs are compiled while the steps before go
// on. What falls meanwhile waits for it in bf16, and what returns as it is.
func (s *precisionController) finalBF16() {
	from := s.lastPart()
	if s.mends || from == s.t.opts.Recipe.Steps || s.t.step < from-ahead {
		return
	}
	s.mends = true
	policy := s.policy.FinalBF16()
	if policy == s.policy {
		return
	}
	s.aim(policy, from)
	share := s.t.opts.Recipe.FinalBF16
	s.t.opts.Events.Emit(event.Precision{Step: s.t.step + 1, What: "repair", Layer: -1,
		Product: precision.Fprop, To: string(dtype.FormatBF16), Signal: "recipe",
		Value: share, Text: fmt.Sprintf("step %d: forward GEMMs are in bf16 from step %d on, the last"+
			" %g %% of the run", s.t.step+1, s.from+1, 100*share)})
}

// giveUp frees a variant when it is there.
func (s *precisionController) giveUp(v *variant) {
	if v == nil {
		return
	}
	s.useless.Go(func() {
		if v.wait() == nil {
			v.x.free()
		}
	})
}

// begin puts the variant to work whose turn it is, before a step.
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

// inspect has the errors of rounding measured in the step to come, if it is that one's turn. The
// step then waits for the programs that do it, as one waits for those of a new policy: what a run
// measures, and so what it decides, must not depend on how long a compiler takes. It hardly ever
// waits, for they are compiled in the background of the steps before.
func (s *precisionController) inspect(ctx context.Context) error {
	s.exec.probes = nil
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

// warn says that something could not be compiled.
func (s *precisionController) warn(what string, err error) {
	step := s.t.step + 1
	s.t.opts.Events.Emit(event.Precision{Step: step, What: string(monitor.Warn), Layer: -1,
		Signal: "compiler", Text: fmt.Sprintf("step %d: warning: %s: %v", step, what, err)})
}

// adopt computes with other programs from now on. If they could not be compiled, the run goes on
// with those that it has, and says so.
func (s *precisionController) adopt(ctx context.Context, v *variant) error {
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
	c, old := s.exec, s.t.programs
	if c.x == v.x {
		return nil
	}
	if c.x != s.safe.x {
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
		r.told = report{}
	}
	c.x, s.t.programs, s.reader = v.x, v.x.programs, newReader(v.x.programs)
	if !slices.EqualFunc(old.Params, s.t.programs.Params, func(a, b model.Param) bool {
		return a.Name == b.Name && slices.Equal(a.Dims, b.Dims)
	}) {
		return s.t.reshardState(old)
	}
	return c.quantize()
}

// reshardState moves the state from the arrays of other programs, whose loops have other layers, to
// those of the programs at work.
func (t *Trainer) reshardState(old *step.Programs) error {
	homes := t.exec.homes()
	tensors := map[string][]byte{}
	for _, pc := range pieces(old) {
		h := homes[pc.rank]
		if h == nil {
			continue
		}
		data, err := gather(context.Background(), h.state.Get(pc.name), &pc, h.mesh)
		if err != nil {
			return err
		}
		for _, one := range pc.tensors {
			tensors[one.Name], data = data[:one.Bytes()], data[one.Bytes():]
		}
		h.state.Drop(pc.name)
	}
	return t.fill(t.computed(func(name string, _ *model.Param, dst []byte) error {
		copy(dst, tensors[name])
		return nil
	}))
}

// phase is what the watchdog takes a step for.
func (s *precisionController) phase() string {
	if s != nil && s.exec.probes != nil {
		return phaseInspect
	}
	return phaseStep
}

// sound tells whether the scales that the GEMMs of all processes read are those that were made.
func (s *precisionController) sound(ctx context.Context) (bool, error) {
	if s == nil {
		return true, nil
	}
	bad, err := s.exec.peers.some(ctx, !s.reader.sound(s.exec.reports()))
	return !bad, err
}

// reports gives the reports of the ranks; those of other processes are empty.
func (c *executor) reports() []*report {
	list := make([]*report, len(c.ranks))
	for n, r := range c.ranks {
		if list[n] = new(report); r != nil {
			list[n] = &r.told
		}
	}
	return list
}

// allReports gives the reports of the ranks of all processes, so that all decide alike.
func (c *executor) allReports(ctx context.Context) ([]*report, error) {
	list := c.reports()
	if c.peers == nil {
		return list, nil
	}
	var b bytes.Buffer
	if err := gob.NewEncoder(&b).Encode(list); err != nil {
		return nil, err
	}
	all, err := c.peers.blobs(ctx, "reports", b.Bytes())
	if err != nil {
		return nil, err
	}
	for process, text := range all {
		var theirs []*report
		if err := gob.NewDecoder(bytes.NewReader(text)).Decode(&theirs); err != nil {
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

// limits are the largest loss and norm that are no spikes.
func (t *Trainer) limits() (loss, norm float64) {
	loss, norm = t.guard.limits()
	if t.controller != nil {
		l, n := t.controller.monitor.Limits()
		loss, norm = min(loss, l), min(norm, n)
	}
	return loss, norm
}

// look judges a step by what its products told, and acts on it. It gives the reason why an update
// was refused, if there is one.
func (s *precisionController) look(ctx context.Context, loss, norm float64) (why string,
	err error) {
	if s == nil {
		return "", nil
	}
	policy, falls, returns := s.policy, false, false
	told, err := s.exec.allReports(ctx)
	if err != nil {
		return "", err
	}
	sample := s.reader.sample(s.t.step+1, loss, norm, told)
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
	if falls {
		err = s.adopt(ctx, s.safe)
	}
	if falls || returns {
		s.aim(policy, s.t.step+patience)
	}
	return why, err
}

// fallen gives the policy after a fall: to bf16 where the model has no room for what was asked for.
func (s *precisionController) fallen(from *precision.Policy, d monitor.Decision) *precision.Policy {
	p := from.Fall(d.Layer, d.Linear, d.GEMM, dtype.Format(d.To), d.String())
	if p.Check(s.t.opts.Model) != nil {
		p = from.Fall(d.Layer, d.Linear, d.GEMM, dtype.FormatBF16, d.String())
	}
	return p
}

// free gives up what is being compiled, and frees the rest but for the programs at work.
func (s *precisionController) free() {
	if s == nil {
		return
	}
	s.cancel()
	for _, v := range []*variant{s.safe, s.next, s.probes} {
		if v != nil && v.wait() == nil && v.x != s.exec.x {
			v.x.free()
		}
	}
	s.useless.Wait()
}

// A shift is where a run stands between policies, so that one that is resumed does the same.
type shift struct {
	Monitor *monitor.Monitor `json:"watch"`
	Works   json.RawMessage  `json:"works"` // the policy of the programs at work
	Aim     json.RawMessage  `json:"aim"`   // the policy of those to be adopted
	From    int              `json:"from"`  // before the step after this one
}

// shift tells where the run stands.
func (s *precisionController) shift() ([]byte, error) {
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

// resume goes on where a run stood. The policy that the run was begun with is that of the recipe,
// and both have it.
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
	s.next, s.mends = nil, false
	switch {
	case !works.Quantizes():
		err = s.adopt(ctx, s.safe)
	case works.String() != s.t.programs.Policy.String():
		err = s.adopt(ctx, s.compile(works, false))
	}
	if s.policy = aim; works.String() != aim.String() {
		s.aim(aim, old.From)
	}
	return err
}
