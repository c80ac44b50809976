package deepwell

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/autoplan"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dryrun"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/estimate"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/price"
	"github.com/deepwell/deepwell/program"
)

// A DryRunJob is a plan to be run without a machine.
type DryRunJob struct {
	Plan      string        // its file
	Precision string        // of linear layers; "" is the plan's
	Stack     string        // whose software is simulated; "" is our own
	Tokens    float64       // to train on, for the bill; 0 is no bill
	Price     float64       // dollars per device-hour
	WhatIf    dryrun.WhatIf // what goes wrong; the zero value is nothing
	Report    string        // where a page goes; "" is nowhere
	Trace     string        // where a trace goes; "" is nowhere
	// Calibrate are calibrations, or folders of runs, by which predictions are corrected.
	Calibrate []string
}

// A DryRunResult is what a plan would do.
type DryRunResult struct {
	Model     string              `json:"model"`
	Cluster   string              `json:"cluster"`
	Mesh      string              `json:"mesh,omitempty"` // as [plan.Plan.Label] writes it
	Stack     string              `json:"stack"`
	Source    string              `json:"source"` // as in [PlanResult]
	Low       float64             `json:"low"`    // 90 % prediction interval of Step, in seconds
	High      float64             `json:"high"`
	Rate      float64             `json:"rate"`          // tokens per second and device
	MFU       float64             `json:"mfu,omitempty"` // see [autoplan.Job.MFU]
	Peak      int64               `json:"peak"`          // bytes of the worst rank
	Capacity  int64               `json:"capacity"`
	Parts     []dryrun.Part       `json:"parts"`
	Helps     []dryrun.Suggestion `json:"helps"`     // changes that make the step shorter
	Scenarios []dryrun.Suggestion `json:"scenarios"` // what goes wrong, and what it costs
	Memory    program.Memory      `json:"memory"`    // of the worst rank at its peak, by cause
	Budget    dryrun.Budget       `json:"budget"`
	Bill      dryrun.Bill         `json:"bill"`
	// Calibrated is how many runs corrected the prediction.
	Calibrated int `json:"calibrated,omitempty"`
	// Wrote are the files that were written.
	Wrote []string `json:"wrote,omitempty"`
	// Warnings name what the prediction does not know.
	Warnings []event.Warning `json:"warnings,omitempty"`
	*dryrun.Timeline
}

// DryRun predicts the time of a plan's programs, runs its schedule through the simulator, and
// reports where time and memory go. If the plan does not fit, there is a result beside the error.
func (e *Env) DryRun(ctx context.Context, job DryRunJob) (*DryRunResult, error) {
	v := e.begin(ctx, "dryrun")
	r := &dryRunner{job: job, done: &DryRunResult{}}
	v.pass("read the plan", r.read)
	v.pass("price it", r.price)
	v.pass("simulate", r.simulate)
	v.pass("look for what would help", func() error { return r.improve(ctx) })
	v.pass("write report and trace", r.write)
	for _, w := range r.done.Warnings {
		e.Events.Emit(w)
	}
	v.pass("compare with the GPU's memory", r.fits)
	return r.done, v.err
}

// A dryRunner has the state of a dry run between its passes.
type dryRunner struct {
	job    DryRunJob
	done   *DryRunResult
	plan   *plan.Plan
	search autoplan.Job
	priced estimate.Estimate
	// estimator prices plans of the search's model on its cluster.
	estimator *estimate.Estimator
	step      *dryrun.Step
}

func (r *dryRunner) read() (err error) {
	if r.plan, err = readPlan(r.job.Plan); err != nil {
		return err
	}
	s := &r.search
	s.Model, s.Seq, s.Batch = r.plan.Model, r.plan.Seq, r.plan.Batch
	if s.Config, err = configOf(s.Model); err != nil {
		return at(err, r.job.Plan)
	}
	if s.Cluster, err = machine.ParseCluster(r.plan.Cluster); err != nil {
		return at(err, r.job.Plan)
	}
	if s.Profile, err = price.Find(cmp.Or(r.job.Stack, price.Own)); err != nil {
		return err
	}
	word := cmp.Or(r.job.Precision, r.plan.Precision, r.plan.Types.Params.String())
	if err := addPrecisions(s, []string{word}); err != nil {
		return err
	}
	r.prepare()
	if !(r.job.Price >= 0) {
		return diag.New(diag.BadUsage, "a device costs nothing or more an hour, not %v", r.job.Price).
			Try("--price 3.00")
	}
	if w := &r.job.WhatIf; w.Jitter > 0 && w.Random == nil {
		w.Random = rand.New(rand.NewPCG(usualSeed, 0))
	}
	r.done.Calibrated, err = calibrate(r.job.Calibrate, s)
	return err
}

// prepare fills in the parts of the result that need no prediction.
func (r *dryRunner) prepare() {
	s := &r.search
	r.done.Model, r.done.Cluster = s.Model, s.Cluster.String()
	r.done.Stack, r.done.Source = s.Profile.Name, s.Profile.Source
	r.done.Mesh = r.plan.Label()
	r.done.Capacity = s.Cluster.GPU.UsableBytes
	r.done.Budget = dryrun.Budget{Tokens: r.job.Tokens, Price: r.job.Price,
		Devices: s.Cluster.Count, Batch: float64(r.plan.Batch * r.plan.Seq)}
}

func (r *dryRunner) price() error {
	if n := r.plan.Devices(); n != int64(r.search.Cluster.Count) {
		return diag.New(diag.PlanMisfit, "the axes make %d devices; the cluster has %d", n,
			r.search.Cluster.Count).At("%s", r.job.Plan).
			Try("sizes whose product is %d, or --cluster %dx%s", r.search.Cluster.Count, n,
				r.search.Cluster.GPU.Name)
	}
	if r.plan.EP > 1 && r.search.Config.MoE == nil {
		return diag.New(diag.PlanMisfit, "ep %d needs a model with experts; %s has none", r.plan.EP,
			r.search.Model).At("%s", r.job.Plan).Try(`"dp" instead of "ep"`)
	}
	if err := r.plan.CheckShards(r.search.Config, r.formats()...); err != nil {
		return at(err, r.job.Plan)
	}
	if _, err := r.plan.Schedule(); err != nil { // before lists as long as it has stages are made
		return at(err, r.job.Plan)
	}
	var err error
	if r.estimator, err = estimate.New(r.search.Config, r.search.Cluster,
		r.search.Profile); err != nil {
		return err
	}
	if r.priced, err = r.estimate(1); err != nil {
		return at(err, r.job.Plan)
	}
	r.done.Warnings = r.search.Warnings(r.plan, &r.priced)
	r.done.Peak, r.done.Memory, r.done.Parts = r.priced.Peak, r.priced.Memory, partsOf(r.priced)
	return nil
}

// formats lists the formats of GEMMs in our own programs, which pad nothing.
func (r *dryRunner) formats() []dtype.Format {
	if r.search.Profile.Name != price.Own || len(r.search.Precisions) == 0 {
		return nil
	}
	f := r.search.Precisions[0]
	if policy := r.search.Policies[f]; policy != nil {
		return lists.Filter(dtype.Formats(), policy.Has)
	}
	return []dtype.Format{f}
}

// estimate predicts the step with transfers slowed down by the factor links.
func (r *dryRunner) estimate(links float64) (estimate.Estimate, error) {
	o := estimate.Options{Links: links}
	if len(r.search.Precisions) > 0 {
		o.Precision = r.search.Precisions[0]
		o.Policy = r.search.Policies[o.Precision]
	}
	if s := r.plan.Slots; len(s) > 0 && r.search.Profile.Name != price.Own {
		o.Imbalance = s[0] // our own programs compute all slots, whatever is in them
	}
	priced, err := r.estimator.With(o).Price(r.plan)
	r.search.Correction.Apply(&priced)
	return priced, err
}

// slower returns the step with transfers slowed down by the factor links.
func (r *dryRunner) slower(links float64) (*dryrun.Step, error) {
	priced, err := r.estimate(links)
	if err != nil {
		return nil, err
	}
	return autoplan.StepOf(r.plan, priced)
}

func (r *dryRunner) simulate() (err error) {
	if r.step, err = autoplan.StepOf(r.plan, r.priced); err != nil {
		return err
	}
	r.step.Slower = r.slower
	if f := r.job.WhatIf.Links; f > 0 && f != 1 { // the parts of the step show the slow links
		priced, err := r.estimate(f)
		if err != nil {
			return err
		}
		r.done.Parts = partsOf(priced)
	}
	d := r.done
	if d.Timeline, err = r.step.Run(r.job.WhatIf); err != nil {
		return err
	}
	// The 90 % interval of the closed form, scaled to the simulated step.
	d.Low, d.High = r.priced.Low*d.Step/r.priced.Step, r.priced.High*d.Step/r.priced.Step
	d.Rate = d.Budget.Batch / d.Step / float64(d.Budget.Devices)
	d.MFU = r.search.MFU(r.plan.Batch, d.Budget.Devices, d.Step)
	d.Bill = d.Budget.Bill(d.Step)
	d.Parts = settle(d.Parts, d.Step)
	if r.plan.Size(plan.PipelineAxis) == 1 && r.job.WhatIf.Uneven() {
		rename(d.Parts, "bubble", "waiting for the straggler") // no pipeline, so no bubble
	}
	seed := func() *rand.Rand { return rand.New(rand.NewPCG(usualSeed, 0)) }
	d.Scenarios, err = r.step.Scenarios(seed)
	return err
}

// usualSeed is the seed of jitter if none is given.
const usualSeed = 1

// settle adds the difference between the simulated step and the closed form to the bubble.
func settle(parts []dryrun.Part, step float64) []dryrun.Part {
	sum := lists.Sum(parts, func(p dryrun.Part) float64 { return p.Seconds })
	for i := range parts {
		if parts[i].Name == "bubble" {
			parts[i].Seconds = max(0, parts[i].Seconds+step-sum)
		}
	}
	return parts
}

// rename gives a part another name.
func rename(parts []dryrun.Part, from, to string) {
	for i := range parts {
		if parts[i].Name == from {
			parts[i].Name = to
		}
	}
}

// partsOf lists the parts of a step in the order of the waterfall chart.
func partsOf(e estimate.Estimate) []dryrun.Part {
	p := e.Parts
	return []dryrun.Part{
		{Name: "linear layers", Seconds: p.Compute}, {Name: "attention", Seconds: p.Attention},
		{Name: "norms and activations", Seconds: p.Memory}, {Name: "quantization", Seconds: p.Quantize},
		{Name: "recomputation", Seconds: p.Recompute}, {Name: "launches", Seconds: p.Launch},
		{Name: "tensor-parallel communication", Seconds: p.Tensor},
		{Name: "context-parallel communication", Seconds: p.Context},
		{Name: "expert-parallel communication", Seconds: p.Expert}, {Name: "offload", Seconds: p.Offload},
		{Name: "pipeline communication", Seconds: p.Pipeline}, {Name: "bubble", Seconds: p.Bubble},
		{Name: "FSDP communication", Seconds: p.Data}, {Name: "optimizer", Seconds: p.Optimizer},
		{Name: "host", Seconds: p.Host},
	}
}

// improve finds changes that would make the step shorter, by simulator and search. Not under a
// what-if: the search has no slow links or ranks.
func (r *dryRunner) improve(ctx context.Context) error {
	if r.job.WhatIf != (dryrun.WhatIf{}) || r.search.Cluster.CPU() {
		return nil // CPU devices stand in for others: no plan is searched for them
	}
	now, err := r.step.Run(dryrun.WhatIf{})
	if err != nil {
		return err
	}
	helps, err := r.step.Helps()
	if err != nil {
		return err
	}
	plans, err := autoplan.Improve(ctx, r.search, r.plan, now.Step)
	if err != nil {
		return err
	}
	lower, err := r.lowerPrecision(now)
	if err != nil {
		return err
	}
	r.done.Helps = slices.Concat(plans, helps, lower)
	lists.Sort(r.done.Helps, func(a, b dryrun.Suggestion) int {
		return cmp.Compare(a.Step, b.Step)
	})
	return nil
}

// worthwhile: a suggested change must save at least 0.5 % of the step, as in the search.
const worthwhile = 0.995

// lowerPrecision predicts the same plan with its linear layers in MXFP8 and NVFP4, if the GPU has
// them and the plan is BF16.
func (r *dryRunner) lowerPrecision(now *dryrun.Timeline) (list []dryrun.Suggestion, err error) {
	if list := r.search.Precisions; len(list) != 1 || list[0] != dtype.FormatBF16 {
		return nil, nil
	}
	for _, p := range dtype.Formats() {
		if has(r.search.Cluster.GPU, p) != nil || r.plan.CheckShards(r.search.Config, p) != nil {
			continue
		}
		priced, err := r.estimator.With(estimate.Options{Precision: p}).Price(r.plan)
		if err != nil {
			return nil, err
		}
		r.search.Correction.Apply(&priced)
		step, err := autoplan.StepOf(r.plan, priced)
		if err != nil {
			return nil, err
		}
		t, err := step.Run(dryrun.WhatIf{})
		if err != nil {
			return nil, err
		}
		if t.Step < worthwhile*now.Step {
			list = append(list, dryrun.Suggestion{Step: t.Step, Peak: priced.Peak,
				Change: fmt.Sprintf("--precision %s; compare the losses with deepwell parity", p)})
		}
	}
	return list, nil
}

func (r *dryRunner) write() error {
	for _, file := range []struct {
		name, path string
		write      func(io.Writer) error
	}{{"report", r.job.Report, r.page}, {"trace", r.job.Trace, r.done.Trace}} {
		if file.path == "" {
			continue
		}
		if err := atomicfile.WriteFunc(file.path, 0o644, file.write); err != nil {
			return diag.New(diag.FileError, "cannot write the %s", file.name).At("%s", file.path).Wrap(err).
				Try("--%s FILE in a folder that is there and can be written", file.name)
		}
		r.done.Wrote = append(r.done.Wrote, file.path)
	}
	return nil
}

// page writes the HTML report.
func (r *dryRunner) page(w io.Writer) error {
	d := r.done
	gpu := r.search.Cluster.GPU
	text, _ := r.plan.Marshal() // it was read from a text
	page := &dryrun.Report{
		Title: fmt.Sprintf("%s on %d %s", d.Model, r.search.Cluster.Count, gpu.Title),
		Line: fmt.Sprintf("%d sequences of %d tokens per step, cost model of %s", r.plan.Batch,
			r.plan.Seq, d.Stack),
		Timeline: d.Timeline, Low: d.Low, High: d.High, Capacity: d.Capacity, Parts: d.Parts,
		Helps: d.Helps, WhatIfs: d.Scenarios, Plan: string(text),
		Facts: []dryrun.Fact{{Name: "tokens per second per GPU", Value: fmt.Sprintf("%.0f", d.Rate)}},
		Notes: []string{"Predicted, not measured: nothing was run."},
	}
	if d.MFU > 0 {
		page.Facts = append(page.Facts, dryrun.Fact{Value: human.Percent(d.MFU),
			Name: "MFU at the BF16 peak, causal attention counted at half"})
	}
	if d.Budget.Tokens > 0 {
		page.Facts = append(page.Facts, dryrun.Fact{Value: fmt.Sprintf("%.3g days", d.Bill.Days),
			Name: fmt.Sprintf("%s tokens: $%s at $%.2f an hour", human.Amount(d.Budget.Tokens),
				human.Amount(d.Bill.Money), d.Budget.Price)})
	}
	_, err := w.Write(page.HTML())
	return err
}

// fits returns an error if a device has too little memory; files that were written stay.
func (r *dryRunner) fits() error {
	if r.done.Capacity == 0 || r.done.Peak <= r.done.Capacity {
		return nil
	}
	causes := lists.Map(r.done.Memory.Causes(), func(c program.Cause) string {
		return fmt.Sprintf("%s %.1f", c.Name, human.InGiB(c.Bytes))
	})
	return diag.New(diag.PlanNoFit, "the plan needs %.1f GiB on a device, which has %.1f",
		human.InGiB(r.done.Peak), human.InGiB(r.done.Capacity)).At("%s", r.job.Plan).
		Because("%s GiB", strings.Join(causes, " · ")).
		Try("deepwell plan %s --cluster %s", r.done.Model, r.done.Cluster)
}
