package deepwell

import (
	"cmp"
	"context"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/deepwell/deepwell/autoplan"
	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dryrun"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/safedir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/price"
)

// A PlanJob is what to plan for.
type PlanJob struct {
	Source    string // a model, as capture takes it
	Cluster   string // NxCARD
	Seq       int64  // tokens in a row; 0 is 8,192, or the model's context if that is less
	Batch     string // rows, or tokens as in 4Mtok, or at most so many as in max=16Mtok; "" is free
	Precision string // of linear layers, several with commas between; "" is bf16
	Goal      string // time, money or memory
	Fix       string // what the plan must have, such as tp=8,recompute=none, and devices=512
	Stack     string // whose software runs it; "" is that of From or Emit, or our own
	From      string // STACK=FILE, the configuration that is run today
	Emit      string // a stack that the best plan is written for
	Top       int    // plans to tell
	Calibrate string // calibrations, or folders of runs, to correct predictions by
	Output    string // where the best plan goes; "" is nowhere
}

// A Planned is what a search found.
type Planned struct {
	Model      string  `json:"model"`
	Parameters int64   `json:"parameters"`
	Cluster    string  `json:"cluster"`
	Stack      string  `json:"stack"`
	Seconds    float64 `json:"-"` // that the search took
	*autoplan.Result
	// Bill is what a trillion tokens cost with the best plan at 3 dollars for a device and hour.
	Bill    dryrun.Bill   `json:"bill"`
	Output  string        `json:"output,omitempty"`
	Next    string        `json:"next,omitempty"` // the command that goes on with the plan
	Current *CurrentSetup `json:"today,omitempty"`
	// Calibrated is how many runs corrected the predictions.
	Calibrated int    `json:"calibrated,omitempty"`
	Emit       string `json:"emit,omitempty"` // the best plan as another stack takes it
}

// A CurrentSetup is what a person runs, and what changes would bring.
type CurrentSetup struct {
	File    string              `json:"file"`
	Choice  *DryRan             `json:"figures"`
	Plan    *plan.Plan          `json:"plan"`
	Changes []dryrun.Suggestion `json:"changes"`
	Notes   []string            `json:"notes,omitempty"`
}

// The budget that a plan is told for when nobody names one.
const (
	usualTokens = 1e12
	usualPrice  = 3.00
)

// AutoPlan searches the plans of a model on a cluster and writes the best.
func (e *Env) AutoPlan(ctx context.Context, job PlanJob) (*Planned, error) {
	v := e.begin(ctx, "plan")
	done := &Planned{Output: job.Output}
	search := get(v, "read the model and the cluster", job.read)
	done.Calibrated = get(v, "calibrate", func() (int, error) {
		return calibrate(job.Calibrate, &search)
	})
	if job.From != "" {
		done.Current = get(v, "price what is run today", func() (*CurrentSetup, error) {
			return job.currentSetup(ctx, &search)
		})
	}
	v.pass("search", func() (err error) {
		start := time.Now()
		done.Result, err = autoplan.Search(ctx, search)
		done.Seconds = time.Since(start).Seconds()
		return err
	})
	if v.err != nil {
		return nil, v.err
	}
	best := done.Choices[0]
	if apart, why := kernels.For(search.Cluster.Arch()).Documents(); !apart &&
		search.Profile.Name == price.Own {
		done.Warnings = append([]event.Warning{{Text: why}}, done.Warnings...)
	}
	for _, w := range done.Warnings {
		e.Events.Emit(w)
	}
	done.Model, done.Cluster, done.Stack = search.Model, search.Cluster.String(), search.Profile.Name
	done.Parameters = search.Config.Count().Total
	done.Bill = dryrun.Budget{Tokens: usualTokens, Price: usualPrice, Devices: best.Paid,
		Batch: float64(best.Plan.Batch * best.Plan.Seq)}.Bill(best.Step)
	if job.Emit != "" {
		done.Emit = get(v, "write it for "+job.Emit, func() (string, error) {
			return autoplan.Emit(job.Emit, best.Plan, best.Precision, best.Estimate.Stages)
		})
	}
	if job.Output != "" {
		done.Next = job.next(best, &search)
		v.pass("write the plan", func() error {
			text, err := best.Plan.Marshal()
			if err == nil {
				err = unwritten(atomicfile.Write(job.Output, text, 0o644), "the plan", job.Output)
			}
			return err
		})
	}
	return done, v.err
}

// currentSetup reads and prices what is run today. The search goes on with its rows and its
// precision, unless the job names others.
func (job PlanJob) currentSetup(ctx context.Context, s *autoplan.Job) (*CurrentSetup, error) {
	stack, path, ok := strings.Cut(job.From, "=")
	if !ok {
		return nil, diag.New(diag.BadUsage, "--from takes STACK=FILE, not %q", job.From).
			Try("--from megatron=args.txt")
	}
	text, err := safedir.ReadPlain(path, maxText)
	if err != nil {
		return nil, diag.New(diag.FileError, "cannot read what is run today").At("%s", path).Wrap(err)
	}
	f, err := autoplan.ReadForeign(stack, text, path, *s)
	if err != nil {
		return nil, err
	}
	if job.Seq == 0 {
		s.Seq = f.Plan.Seq
	}
	if job.Batch == "" {
		s.Batch = f.Plan.Batch * f.Plan.Seq / s.Seq
	}
	if job.Precision == "" {
		s.Precisions = []price.Precision{f.Precision}
	}
	r := &dryRunner{job: DryRunJob{Plan: path}, done: &DryRan{}, plan: f.Plan, search: *s}
	r.search.Precisions, r.search.Policies = []price.Precision{f.Precision}, nil
	r.search.Seq, r.search.Batch = f.Plan.Seq, f.Plan.Batch
	r.prepare()
	if err := r.price(); err != nil {
		return nil, err
	}
	if err := r.simulate(); err != nil {
		return nil, err
	}
	t := &CurrentSetup{File: path, Choice: r.done, Plan: f.Plan, Notes: f.Notes}
	t.Changes, err = autoplan.Improve(ctx, r.search, f.Plan, r.done.Step)
	return t, err
}

// next is the command that goes on with a plan: the compiler, or where no program can be made of it
// yet the simulator.
func (job PlanJob) next(c autoplan.Choice, s *autoplan.Job) string {
	verb, with := "deepwell compile ", ""
	if c.Plan.Check(s.Config) != nil {
		verb = "deepwell dryrun "
	}
	for i, name := range commas(job.Precision) {
		// A plan has a word for its precision, not what the word was made to stand for.
		if precision.IsFile(name) && s.Precisions[i] == c.Precision {
			with = " --precision " + name
		}
	}
	return verb + job.Output + with
}

// read makes a search of the job.
func (job PlanJob) read() (autoplan.Job, error) {
	var s autoplan.Job
	config, err := configOf(job.Source)
	if err != nil {
		return s, err
	}
	s = autoplan.Job{Model: job.Source, Config: config, Seq: job.Seq, Goal: autoplan.Goal(job.Goal),
		Top: job.Top}
	if s.Seq == 0 {
		s.Seq = min(8192, config.Context)
	}
	if s.Cluster, err = machine.ParseCluster(job.Cluster); err != nil {
		return s, err
	}
	from, _, _ := strings.Cut(job.From, "=")
	if s.Profile, err = price.Find(cmp.Or(job.Stack, job.Emit, from, price.Own)); err != nil {
		return s, err
	}
	if err := addPrecisions(&s, job.Precision); err != nil {
		return s, err
	}
	if s.Batch, s.MaxBatch, err = parseBatch(job.Batch, s.Seq); err != nil {
		return s, err
	}
	rest, devices, err := cutDevices(job.Fix)
	if err != nil {
		return s, err
	}
	s.Devices = devices
	s.Fixed, err = autoplan.ParseFixed(rest)
	return s, err
}

// configOf finds the sizes of a model; weights are not needed.
func configOf(source string) (*model.Config, error) {
	if p, err := model.Find(source); err == nil {
		if p.Config == nil {
			return nil, diag.New(diag.ModelUnknown, "the sizes of %s are not public", p.Name).
				Try("deepwell models lists what is known; or give the folder of a config.json")
		}
		return p.Config, nil
	}
	m, err := capture.Open(source, capture.Options{})
	if err != nil {
		return nil, err
	}
	defer func() { _ = m.Close() }()
	return m.Config, nil
}

// cutDevices takes devices=N out of a list of what is fixed.
func cutDevices(fix string) (rest string, devices int, err error) {
	var others []string
	for item := range strings.SplitSeq(fix, ",") {
		value, ok := strings.CutPrefix(strings.TrimSpace(item), "devices=")
		if !ok {
			others = append(others, item)
			continue
		}
		if devices, err = strconv.Atoi(value); err != nil || devices < 1 {
			return "", 0, diag.New(diag.BadUsage, "%q is no number of devices", value).
				Try("--fix devices=512")
		}
	}
	return strings.Join(others, ","), devices, nil
}

// commas cuts a list at its commas.
func commas(text string) (list []string) {
	for name := range strings.SplitSeq(text, ",") {
		if name = strings.TrimSpace(name); name != "" {
			list = append(list, name)
		}
	}
	return list
}

// addPrecisions reads a list of precisions that a card has: words, and files of policies, which
// take the place of what the word for the fewest of their bits stands for.
func addPrecisions(s *autoplan.Job, text string) error {
	for _, name := range commas(text) {
		p := price.Precision(name)
		if precision.IsFile(name) {
			policy, err := precision.Load(s.Config, name)
			switch {
			case err != nil:
				return err
			case s.Profile.Name != price.Own:
				return diag.New(diag.BadUsage, "%s has no policies by layer", s.Profile.Name).At("%s", name).
					Try("--precision %s, or --stack %s", policy.Narrowest(), price.Own)
			case s.Policies == nil:
				s.Policies = map[price.Precision]*precision.Policy{}
			}
			p = price.Precision(policy.Narrowest())
			s.Policies[p] = policy
		}
		if slices.Contains(s.Precisions, p) {
			return diag.New(diag.BadUsage, "%s is there twice", p).
				Because("a plan says which precision it has by that word").Try("one of them at a time")
		}
		if err := has(s.Cluster.Card, p); err != nil {
			return err
		}
		s.Precisions = append(s.Precisions, p)
	}
	return nil
}

// has tells whether a card has products in a precision.
func has(card machine.Card, p price.Precision) error {
	rates := map[price.Precision]float64{price.F32: 1, price.BF16: 1, price.FP8: card.Peak.FP8,
		price.MXFP8: card.Peak.MXFP8, price.NVFP4: card.Peak.NVFP4}
	switch rate, known := rates[p]; {
	case !known:
		return diag.New(diag.BadUsage, "there is no precision %q", p).
			Try("--precision bf16, fp8, mxfp8, nvfp4, f32 or the file of a policy")
	case rate == 0:
		return diag.New(diag.BadUsage, "%s has no products in %s", card.Title, p).
			Try("--precision bf16")
	}
	return nil
}

// units of a batch: tokens are counted in powers of two, since batches are.
var batchUnits = []struct {
	suffix string
	tokens int64
}{{"Gtok", 1 << 30}, {"Mtok", 1 << 20}, {"Ktok", 1 << 10}, {"tok", 1}}

// parseBatch reads the rows of a step.
func parseBatch(text string, seq int64) (rows, most int64, err error) {
	if text == "" {
		return 0, 0, nil
	}
	number, limited := strings.CutPrefix(text, "max=")
	unit := int64(0) // rows
	for _, u := range batchUnits {
		if rest, ok := strings.CutSuffix(number, u.suffix); ok {
			number, unit = rest, u.tokens
			break
		}
	}
	n, err := strconv.ParseFloat(number, 64)
	if err != nil || !(n > 0) || n > 1<<40 {
		return 0, 0, diag.New(diag.BadUsage, "%q is no batch", text).
			Try("give rows, tokens as in 4Mtok, or at most so many as in max=16Mtok")
	}
	if unit > 0 {
		n = n * float64(unit) / float64(seq)
	}
	switch {
	case limited && n < 1:
		return 0, 0, diag.New(diag.BadUsage, "%s is less than a row of %d tokens", text, seq)
	case limited:
		return 0, int64(n), nil
	case n != math.Trunc(n) || n < 1:
		whole := int64(max(1, math.Round(n)))
		return 0, 0, diag.New(diag.BadUsage, "%s is not a number of rows of %d tokens", text, seq).
			Try("--batch %d, which is %d tokens", whole, whole*seq)
	}
	return int64(n), 0, nil
}
