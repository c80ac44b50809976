package estimate

import (
	"github.com/deepwell/deepwell/estimate/footprint"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/price"
)

// ownStack is the name of the profile of our own programs.
const ownStack = "deepwell"

// compiled gives the memory of an estimate, where the stack is our own and the plan is one that it
// has programs for, as the compiler is expected to say it of these programs. It reports whether
// that is so.
func (e *Estimator) compiled(p *plan.Plan, est *Estimate) (bool, error) {
	o := e.options
	o.Precision = ""
	plain := e.options.Precision == "" || e.options.Precision == price.BF16
	if e.profile.Name != ownStack || e.config.MoE != nil || e.config.MLA != nil || !plain ||
		len(p.Offload) > 0 || p.EP > 1 || o.Layers != nil || o.Ulysses || o.Plain || o.Predict > 0 {
		return false, nil
	}
	if e.own == nil {
		arch := e.cluster.Card.Arch
		if e.cluster.CPU() {
			arch = "cpu"
		}
		var err error
		if e.own, err = footprint.New(e.config, arch); err != nil {
			return false, err
		}
		e.own.Share(&e.replays.walks)
	}
	f, err := e.own.Predict(p)
	if err != nil {
		return false, err
	}
	r := f.Peak()
	m := Memory{Params: r.Copies, Grads: r.Grads, Optimizer: r.State, Activations: r.Residuals,
		Temp: r.Program, Runtime: int64(e.prices.Profile().Reserve)}
	if m.Params == 0 { // the masters are what the model computes with
		m.Params, m.Optimizer = r.State/3, r.State-r.State/3
	}
	est.Memory, est.Peak = m, m.Sum()
	for i := range est.Stages {
		s, one := &est.Stages[i], &f.Stages[i]
		s.State, s.Grads, s.Residual, s.Transient = one.State, one.Grads, one.Residual, one.Transient
	}
	return true, nil
}
