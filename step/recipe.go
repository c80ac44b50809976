package step

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/recipe"
)

// RecipeOf returns the recipe that a plan alone implies: its sizes and types, and defaults.
func RecipeOf(p *plan.Plan) *recipe.Recipe {
	r := recipe.Default()
	r.Batch, r.Microbatch, r.Seq = int(p.Batch), int(p.MicrobatchSequences()), int(p.Seq)
	r.Precision, r.Recompute = p.Types.Params, p.Recompute
	if p.Precision != "bf16" {
		r.GEMMs = p.Precision
	}
	return r
}

// suits compares a plan with a policy file: the plan must name the policy's narrowest format, and
// its shards must be whole blocks of every format that the policy uses.
func suits(m model.Model, how *plan.Plan, policy *precision.Policy) *diag.Error {
	has := string(policy.Narrowest())
	if p := cmp.Or(how.Precision, string(dtype.FormatBF16)); p != has {
		return diag.New(diag.PlanMisfit, "the plan has GEMMs in %s, the policy in %s at the narrowest", p,
			has).Try(`"precision": "%s" in the plan`, has)
	}
	// Every format of the policy is checked as if it were the plan's: shards must be whole blocks.
	for _, f := range dtype.Formats() {
		p := *how
		if p.Precision = string(f); policy.Has(f) {
			if err := p.Check(m); err != nil {
				return diag.From(err)
			}
		}
	}
	return nil
}

// agree compares a plan with the recipe of its run. Sizes and types stand in both, so that each can
// be read alone.
func agree(m model.Model, r *recipe.Recipe, p *plan.Plan) error {
	if err := p.Check(m); err != nil {
		return err
	}
	bad := func(what string, have, want any, fix string) error {
		return diag.New(diag.PlanMisfit, "the plan has %s %v, the recipe %v", what, have, want).
			Try("%s", fix)
	}
	either := func(key string, have any, inPlan string) string {
		return fmt.Sprintf("--set %s=%v, or in the plan %s", key, have, inPlan)
	}
	// What the command line can set is suggested first, then the line of the plan.
	inPlan, inRecipe := cmp.Or(p.Precision, p.Types.Params.String()),
		cmp.Or(r.GEMMs, r.Precision.String())
	switch {
	case p.Batch != int64(r.Batch):
		return bad("a batch of", p.Batch, r.Batch,
			either("batch", p.Batch, fmt.Sprintf(`"batch": %d`, r.Batch)))
	case p.MicrobatchSequences() != int64(r.Microbatch):
		return bad("microbatches of", p.MicrobatchSequences(), r.Microbatch,
			either("microbatch", p.MicrobatchSequences(),
				fmt.Sprintf(`"microbatches": %d`, max(1, r.Batch/max(1, r.Microbatch)))))
	case !precision.IsFile(r.GEMMs) && inPlan != inRecipe:
		return bad("GEMMs in", inPlan, inRecipe, either("precision", inPlan, inThePlan(r)))
	case p.Types.Params != r.Precision:
		return bad("parameters of", p.Types.Params, r.Precision,
			either("precision", p.Types.Params, inThePlan(r)))
	case p.Seq != int64(r.Seq):
		return bad("sequences of", p.Seq, r.Seq,
			either("seq", p.Seq, fmt.Sprintf(`"seq": %d`, r.Seq)))
	case len(p.Recompute) > 0 && !slices.Equal(p.Recompute, r.Recompute):
		return bad("recompute", p.Recompute, r.Recompute,
			"leave recompute out of the recipe, where the plan has it")
	}
	return nil
}

// inThePlan spells a recipe's precision as a plan does: the parameter type, and the format of
// quantized GEMMs.
func inThePlan(r *recipe.Recipe) string {
	types := `"types": {"params": "bf16", "grads": "f32", "collectives": "bf16"}`
	switch {
	case r.GEMMs != "":
		return fmt.Sprintf(`"precision": %q, %s`, r.GEMMs, types)
	case r.Precision == dtype.BF16:
		return types
	}
	return "no types"
}

// optimizerOf returns the recipe's optimizer, for a model that computes in elem.
func optimizerOf(r *recipe.Recipe, elem dtype.DType) optim.Optimizer {
	// Moments have the type that the recipe says; the update computes in f32 and rounds the compute
	// copy to elem.
	o := r.Optimizer
	adam := optim.AdamW{Beta1: o.Beta1, Beta2: o.Beta2, Eps: AdamEps, Decay: o.WeightDecay,
		ClipNorm: o.MaxGradNorm, Moments: o.Moments, Compute: elem}
	switch o.Name {
	case "muon":
		return optim.Muon{AdamW: adam, Momentum: muonMomentum}
	case "sgd":
		return optim.SGD{Decay: o.WeightDecay, ClipNorm: o.MaxGradNorm, Compute: elem}
	}
	return adam
}

// rounding lets an optimizer that leaves the type of compute copies open make them in elem.
// Otherwise the model would go on with the copies that it began with.
func rounding(o optim.Optimizer, elem dtype.DType) optim.Optimizer {
	switch o := o.(type) {
	case optim.SGD:
		o.Compute = cmp.Or(o.Compute, elem)
		return o
	case optim.AdamW:
		o.Compute = cmp.Or(o.Compute, elem)
		return o
	case optim.Muon:
		o.Compute = cmp.Or(o.Compute, elem)
		return o
	}
	return o
}

// muonMomentum is Jordan's (2024), whatever the betas of the parameters that AdamW updates.
const muonMomentum = 0.95

// AdamEps is added to the root of the second moment: PyTorch's and Megatron's default.
const AdamEps = 1e-8

// Rates returns the recipe's learning-rate schedule, by step from 0.
func Rates(r *recipe.Recipe) optim.Schedule {
	o := r.Optimizer
	switch o.Schedule {
	case "wsd":
		return optim.WSD{Peak: o.LR, Floor: o.FinalLR(), Warmup: o.Warmup, Decay: r.Steps / 5,
			Steps: r.Steps}
	case "constant":
		return optim.WSD{Peak: o.LR, Floor: o.LR, Warmup: o.Warmup, Steps: r.Steps}
	}
	return optim.WarmupCosine{Peak: o.LR, Floor: o.FinalLR(), Warmup: o.Warmup, Steps: r.Steps}
}
