package estimate

import "github.com/deepwell/deepwell/price"

// Under gives an estimator of the same model on the same cluster, with the same options, under
// another profile. Lists of schedules, which have no prices in them, are shared.
func (e *Estimator) Under(prof *price.Profile) *Estimator {
	n := *e
	n.profile = prof
	n.appraise()
	n.forget()
	return &n
}

// appraise takes the prices of the profile for what is estimated.
func (e *Estimator) appraise() {
	e.prices = price.New(e.cluster, e.profile.For(e.run()))
	e.sigma = e.doubt()
}

// run is what the constants of a stack may depend on.
func (e *Estimator) run() price.Run {
	r := price.Run{Card: e.cluster.Card.Name, Precision: e.options.Precision, Head: e.config.HeadDim}
	if m := e.config.MoE; m != nil {
		r.Experts, r.Bias = true, m.Bias
	}
	return r
}
