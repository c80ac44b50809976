package train

import (
	"context"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/spmd"
	"github.com/deepwell/deepwell/watch"
)

// patience is how many steps a run computes everything in bf16 after a product fell, while the
// programs of its new policy are compiled. It is a number of steps and not the time that a compiler
// takes, so that the same run does the same.
const patience = 8

// A sentry watches the products in few bits of a run, and changes what they are computed in.
//
// Programs of a policy are compiled while the run goes on. Until they are there, those that compute
// everything in bf16 take their place: they are compiled when the run begins.
type sentry struct {
	t      *Trainer
	mesh   *mesh
	watch  *watch.Watch
	reader *reader
	policy *precision.Policy // that is aimed at; the programs at work may be another's
	safe   *variant
	next   *variant // to be adopted
	from   int      // with this step
}

// A variant is the programs of a run under another policy.
type variant struct {
	programs *Programs
	x        *executables
	err      error
	ready    chan struct{}
}

// newSentry begins to watch; nil if nothing is in few bits.
func newSentry(ctx context.Context, t *Trainer) *sentry {
	p := t.Programs
	m, ok := t.crew.(*mesh)
	if !ok || !p.Policy.Quantizes() {
		return nil
	}
	o := watch.Defaults()
	if t.Watch != nil {
		o = *t.Watch
	} else {
		o.Settle = max(o.Settle, t.Recipe.Optimizer.Warmup)
	}
	s := &sentry{t: t, mesh: m, watch: watch.New(o), reader: newReader(p), policy: p.Policy}
	wide := &precision.Policy{Layers: p.Policy.Layers}
	s.safe = s.compile(ctx, wide)
	return s
}

// compile makes a variant in the background.
func (s *sentry) compile(ctx context.Context, policy *precision.Policy) *variant {
	v := &variant{ready: make(chan struct{})}
	again, engine := s.t.Programs.again, s.t.Engine
	go func() {
		defer close(v.ready)
		if v.programs, v.err = again(policy); v.err == nil {
			v.x, v.err = v.programs.compile(ctx, engine)
		}
	}()
	return v
}

// wait gives a variant when it is ready.
func (v *variant) wait() error {
	<-v.ready
	return v.err
}

// begin puts the variant to work whose turn it is, before a step.
func (s *sentry) begin() error {
	if s == nil || s.next == nil || s.t.step < s.from {
		return nil
	}
	v := s.next
	s.next = nil
	return s.adopt(v)
}

// adopt computes with other programs from now on.
func (s *sentry) adopt(v *variant) error {
	if err := v.wait(); err != nil {
		return err
	}
	m := s.mesh
	if m.x == v.x {
		return nil
	}
	if m.x != s.safe.x {
		m.x.free()
	}
	for _, name := range m.state.Names() {
		if strings.HasPrefix(name, spmd.CopyOf("")) {
			m.state.Drop(name)
		}
	}
	old := s.t.Programs
	m.x, s.t.Programs, s.reader = v.x, v.programs, newReader(v.programs)
	m.told = report{}
	if !slices.EqualFunc(old.Params, v.programs.Params, func(a, b model.Param) bool {
		return a.Name == b.Name && slices.Equal(a.Dims, b.Dims)
	}) {
		return s.t.rehouse(old)
	}
	return m.quantize()
}

// rehouse moves the state from the arrays of other programs, whose loops have other layers, to
// those of the programs at work.
func (t *Trainer) rehouse(old *Programs) error {
	h := t.crew.homes()[0]
	tensors := map[string][]byte{}
	for _, pc := range old.pieces() {
		data, err := gather(context.Background(), h.state.Get(pc.name), &pc, h.mesh)
		if err != nil {
			return err
		}
		for _, one := range pc.tensors {
			tensors[one.Name], data = data[:one.Bytes()], data[one.Bytes():]
		}
		h.state.Drop(pc.name)
	}
	return t.fill(func(pc *piece, dst []byte) error {
		for _, one := range pc.tensors {
			dst = dst[copy(dst, tensors[one.Name]):]
		}
		return nil
	})
}

// sound tells whether the scales that the products read are those that were made.
func (s *sentry) sound() bool {
	if s == nil {
		return true
	}
	told := &s.mesh.told
	for _, l := range s.reader.sample(s.t.step+1, 0, 0, told).Linears {
		for _, o := range l.Operands {
			if o.Made != o.Used {
				return false
			}
		}
	}
	return true
}

// limits are the largest loss and norm that are no spikes.
func (t *Trainer) limits() (loss, norm float64) {
	loss, norm = t.guard.limits()
	if t.sentry != nil {
		l, n := t.sentry.watch.Limits()
		loss, norm = min(loss, l), min(norm, n)
	}
	return loss, norm
}

// look judges a step by what its products told, and acts on it. It gives the reason why an update
// was refused, if there is one.
func (s *sentry) look(ctx context.Context, loss, norm float64) (why string, err error) {
	if s == nil {
		return "", nil
	}
	told := &s.mesh.told
	falls, returns := false, false
	for _, d := range s.watch.Observe(s.reader.sample(s.t.step+1, loss, norm, told)) {
		s.t.Events.Emit(event.Precision{Step: d.Step, What: string(d.Kind), Layer: d.Layer,
			Linear: d.Linear, Product: d.Product, From: d.From, To: d.To, Signal: d.Signal,
			Value: d.Value, Usual: d.Usual, Bound: d.Bound, Text: d.String()})
		switch d.Kind {
		case watch.Fall:
			s.policy, falls = s.fallen(d), true
		case watch.Return:
			if p, ok := s.policy.Return(d.Layer, d.Linear, d.Product); ok {
				s.policy, returns = p, true
			}
		case watch.Refuse:
			why = d.String()
		}
	}
	if falls {
		if err := s.adopt(s.safe); err != nil {
			return why, err
		}
	}
	if falls || returns {
		s.next, s.from = s.compile(context.WithoutCancel(ctx), s.policy), s.t.step+patience
	}
	return why, nil
}

// fallen gives the policy after a fall: to bf16 where the model has no room for what was asked for.
func (s *sentry) fallen(d watch.Decision) *precision.Policy {
	p := s.policy.Fall(d.Layer, d.Linear, d.Product, precision.Format(d.To), d.String())
	if p.Check(s.t.Config) != nil {
		p = s.policy.Fall(d.Layer, d.Linear, d.Product, precision.BF16, d.String())
	}
	return p
}

// free waits for what is being compiled, and frees it.
func (s *sentry) free() {
	if s == nil {
		return
	}
	at := s.mesh.x
	for _, v := range []*variant{s.safe, s.next} {
		if v != nil && v.wait() == nil && v.x != at {
			v.x.free()
		}
	}
}

// resumed puts back what had fallen when the run was saved.
func (s *sentry) resumed(ctx context.Context) {
	if s == nil {
		return
	}
	falls := s.watch.Fallen()
	for _, d := range falls {
		s.policy = s.fallen(d)
	}
	if len(falls) > 0 {
		s.next, s.from = s.compile(ctx, s.policy), s.t.step
	}
}
