package deepwell

import (
	"cmp"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/deepwell/deepwell/autoplan"
	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dryrun"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/lists"
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
	Source  string // a model, as capture takes it
	Cluster string // NxGPU, as machine.ParseCluster takes it
	Seq     int64  // tokens in a sequence; 0 is 8,192, or the model's context if that is less
	Batch   Batch  // of a step
	// Precisions are the formats of linear layers that are searched, or policy files; none is bf16.
	Precisions []string
	Goal       autoplan.Goal  // "" is time
	Fixed      autoplan.Fixed // what the plan must have
	// Devices is how many devices the plan must use; 0 leaves some idle if that is better.
	Devices int
	// Stack is whose software runs the plan: deepwell, megatron, torchtitan or maxtext. "" is Emit,
	// FromStack or our own.
	Stack string
	// FromFile is the configuration that is run today, of the stack FromStack; "" means none.
	FromStack, FromFile string
	Emit                string // a stack that the best plan is written for; "" for no stack
	Top                 int    // plans in the result
	// Calibrate are calibrations, or folders of runs, by which predictions are corrected.
	Calibrate []string
	Output    string // where the best plan goes; "" is nowhere
}

// A Batch is the size of a step, in sequences or in tokens. The zero value leaves it to the search.
type Batch struct {
	Sequences int64
	Tokens    int64 // if Sequences is 0
	AtMost    bool  // a bound: the search may take fewer
}

// in counts a batch in sequences of seq tokens: how many, or at most how many.
func (b Batch) in(seq int64) (batch, most int64, err error) {
	n := b.Sequences
	if n == 0 {
		n = b.Tokens / seq
	}
	switch whole := max(1, (b.Tokens+seq/2)/seq); {
	case b.Sequences == 0 && b.Tokens == 0:
		return 0, 0, nil
	case b.AtMost && n < 1:
		return 0, 0, diag.New(diag.BadUsage, "a batch of %d tokens is less than a sequence of %d",
			b.Tokens, seq).Try("--batch max=1, or a smaller --seq")
	case b.AtMost:
		return 0, n, nil
	case n < 1 || b.Sequences == 0 && b.Tokens%seq != 0:
		return 0, 0, diag.New(diag.BadUsage, "%d tokens are not a number of sequences of %d tokens",
			b.Tokens, seq).Try("--batch %d, which is %d tokens", whole, whole*seq)
	}
	return n, 0, nil
}

// A PlanResult is what a search found.
type PlanResult struct {
	Model      string  `json:"model"`
	Parameters int64   `json:"parameters"`
	Cluster    string  `json:"cluster"`
	Stack      string  `json:"stack"`
	Source     string  `json:"source"` // where the constants of the stack's cost model come from
	Seconds    float64 `json:"-"`      // that the search took
	*autoplan.Result
	// Bill is the cost of a trillion tokens with the best plan, at 3 dollars per device-hour.
	Bill    dryrun.Bill   `json:"bill"`
	Output  string        `json:"output,omitempty"`
	Next    string        `json:"next,omitempty"` // the command that goes on with the plan
	Current *CurrentSetup `json:"current,omitempty"`
	// Calibrated is how many runs corrected the predictions.
	Calibrated int    `json:"calibrated,omitempty"`
	Emit       string `json:"emit,omitempty"` // the best plan as another stack takes it
}

// A CurrentSetup is the configuration that is run today, its prediction, and what changes would
// save.
type CurrentSetup struct {
	File    string              `json:"file"`
	Choice  *DryRunResult       `json:"figures"`
	Plan    *plan.Plan          `json:"plan"`
	Changes []dryrun.Suggestion `json:"changes"`
	Notes   []string            `json:"notes,omitempty"`
}

// The budget of the bill: a trillion tokens at 3 dollars per device-hour.
const (
	usualTokens = 1e12
	usualPrice  = 3.00
)

// Plan searches the plans of a model on a cluster and writes the best.
func (e *Env) Plan(ctx context.Context, job PlanJob) (*PlanResult, error) {
	v := e.begin(ctx, "plan")
	done := &PlanResult{Output: job.Output}
	search := get(v, "read the model and the cluster", job.read)
	done.Calibrated = get(v, "calibrate", func() (int, error) {
		return calibrate(job.Calibrate, &search)
	})
	if job.FromFile != "" {
		done.Current = get(v, "price what is run today", func() (*CurrentSetup, error) {
			return job.currentSetup(ctx, &search)
		})
	}
	v.pass("search", func() (err error) {
		start := time.Now()
		done.Result, err = autoplan.Search(ctx, search)
		done.Seconds = time.Since(start).Seconds()
		if err == nil {
			err = done.suit(job.Source)
		}
		return err
	})
	if v.err != nil {
		return nil, v.err
	}
	best := done.Choices[0]
	facts := search.Config.Facts()
	if apart, why := kernels.For(search.Cluster.Arch()).Documents(0, kernels.Planned(facts,
		facts.Window > 0, best.Plan.Types.Params, best.Plan.CP, best.Plan.Seq,
		best.Plan.PlainAttention())); apart == 0 && search.Profile.Name == price.Own {
		done.Warnings = append([]event.Warning{{Text: why}}, done.Warnings...)
	}
	for _, w := range done.Warnings {
		e.Events.Emit(w)
	}
	done.Model, done.Cluster = search.Model, search.Cluster.String()
	done.Stack, done.Source = search.Profile.Name, search.Profile.Source
	done.Parameters = cmp.Or(done.Parameters, search.Config.Count().Total)
	done.Bill = dryrun.Budget{Tokens: usualTokens, Price: usualPrice, Devices: best.Paid,
		Batch: float64(best.Plan.Batch * best.Plan.Seq)}.Bill(best.Step)
	if job.Emit != "" {
		done.Emit = get(v, "write it for "+job.Emit, func() (string, error) {
			return autoplan.Emit(job.Emit, search, &best)
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

// currentSetup reads the configuration that is run today and predicts it. The search takes over its
// sequence length, batch and precision, unless the job names others.
func (job PlanJob) currentSetup(ctx context.Context, s *autoplan.Job) (*CurrentSetup, error) {
	path := job.FromFile
	text, err := safedir.ReadPlain(path, maxText)
	if err != nil {
		return nil, diag.New(diag.FileError, "cannot read what is run today").At("%s", path).Wrap(err)
	}
	f, err := autoplan.ReadForeign(job.FromStack, text, path, *s)
	if err != nil {
		return nil, err
	}
	if job.Seq == 0 {
		s.Seq = f.Plan.Seq
	}
	if job.Batch == (Batch{}) {
		s.Batch = f.Plan.Batch * f.Plan.Seq / s.Seq
	}
	if len(job.Precisions) == 0 {
		s.Precisions = []dtype.Format{f.Precision}
	}
	r := &dryRunner{job: DryRunJob{Plan: path}, done: &DryRunResult{}, plan: f.Plan, search: *s}
	r.search.Precisions, r.search.Policies = []dtype.Format{f.Precision}, nil
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

// next is the command for the next step: compile, or dryrun for a plan that has no programs yet.
func (job PlanJob) next(c autoplan.Choice, s *autoplan.Job) string {
	verb, with := "deepwell compile ", ""
	if c.Plan.Check(s.Config) != nil {
		verb = "deepwell dryrun "
	}
	for i, name := range job.Precisions {
		// A plan has a word for its precision, not what the word was made to stand for.
		if precision.IsFile(name) && s.Precisions[i] == c.Precision {
			with = " --precision " + name
		}
	}
	return verb + job.Output + with
}

// read turns the job into a search.
func (job PlanJob) read() (autoplan.Job, error) {
	var s autoplan.Job
	config, err := configOf(job.Source)
	if err != nil {
		return s, err
	}
	s = autoplan.Job{Model: job.Source, Config: config, Seq: job.Seq, Goal: job.Goal,
		Top: job.Top, Fixed: job.Fixed, Devices: job.Devices}
	if s.Seq == 0 {
		s.Seq = min(8192, config.Context)
	}
	if s.Cluster, err = machine.ParseCluster(job.Cluster); err != nil {
		return s, err
	}
	stack := cmp.Or(job.Stack, job.Emit, job.FromStack, price.Own)
	if s.Profile, err = price.Find(stack); err != nil {
		return s, err
	}
	if err := addPrecisions(&s, job.Precisions); err != nil {
		return s, err
	}
	s.Batch, s.MaxBatch, err = job.Batch.in(s.Seq)
	return s, err
}

// configOf finds a model's configuration; weights are not needed.
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
	return m.Likeness()
}

// suit drops the choices that the programs of a captured model cannot be built for: the search
// knows the decoder of its sizes alone.
func (done *PlanResult) suit(source string) error {
	if filepath.Ext(source) != ".pt2" {
		return nil
	}
	m, err := capture.Open(source, capture.Options{})
	if err != nil {
		return err
	}
	defer func() { _ = m.Close() }()
	done.Parameters = m.Parameters()
	var last error
	done.Choices = lists.Filter(done.Choices, func(c autoplan.Choice) bool {
		err := c.Plan.Check(m.Trained())
		if err != nil {
			last = err
		}
		return err == nil
	})
	if len(done.Choices) == 0 {
		return last
	}
	return nil
}

// addPrecisions adds the precisions to search: formats that the GPU has, and policy files. A policy
// replaces the default policy of its narrowest format.
func addPrecisions(s *autoplan.Job, names []string) error {
	for _, name := range names {
		p := dtype.Format(name)
		if precision.IsFile(name) {
			policy, err := precision.Load(s.Config, name)
			switch {
			case err != nil:
				return err
			case s.Profile.Name != price.Own:
				return diag.New(diag.BadUsage, "%s has no policies by layer", s.Profile.Name).At("%s", name).
					Try("--precision %s, or --stack %s", policy.Narrowest(), price.Own)
			case s.Policies == nil:
				s.Policies = map[dtype.Format]*precision.Policy{}
			}
			p = policy.Narrowest()
			s.Policies[p] = policy
		}
		if slices.Contains(s.Precisions, p) {
			return diag.New(diag.BadUsage, "%s is there twice", p).
				Because("a plan says which precision it has by that word").Try("one of them at a time")
		}
		if err := has(s.Cluster.GPU, p); err != nil {
			return err
		}
		s.Precisions = append(s.Precisions, p)
	}
	return nil
}

// has returns an error if a GPU has no GEMMs in a format.
func has(gpu machine.GPUModel, p dtype.Format) error {
	wide := p == dtype.FormatF32 || p == dtype.FormatBF16
	switch {
	case !wide && p != dtype.FormatFP8 && !p.Quantized():
		return diag.New(diag.BadUsage, "there is no precision %q", p).
			Try("--precision bf16, fp8, mxfp8, nvfp4, f32 or the file of a policy")
	case !wide && gpu.Peak.Of(p) == 0:
		return diag.New(diag.BadUsage, "%s has no GEMMs in %s", gpu.Title, p).
			Try("--precision bf16")
	}
	return nil
}

// isPlan recognizes a plan by its keys.
func isPlan(source string) bool {
	if !strings.HasSuffix(source, ".json") {
		return false // unread: weights and the like are large
	}
	text, err := safedir.ReadPlain(source, maxText)
	var members map[string]json.RawMessage
	if err != nil || json.Unmarshal(text, &members) != nil {
		return false
	}
	return members["microbatches"] != nil || members["cluster"] != nil || members["fsdp"] != nil
}

// readPlan reads a plan's file.
func readPlan(path string) (*plan.Plan, error) {
	p, _, err := readPlanKeys(path)
	return p, err
}

// readPlanKeys is readPlan, and also returns the keys that the file has at its top level.
func readPlanKeys(path string) (p *plan.Plan, keys map[string]json.RawMessage, err error) {
	text, err := safedir.ReadPlain(path, maxText)
	if err != nil {
		return nil, nil, diag.New(diag.FileError, "cannot read the plan").At("%s", path).Wrap(err)
	}
	if p, err = plan.Parse(text, path); err != nil {
		return nil, nil, err
	}
	if err := json.Unmarshal(text, &keys); err != nil { // Parse is stricter, so this cannot happen
		return nil, nil, diag.New(diag.PlanText, "the plan is not JSON").At("%s", path).Wrap(err)
	}
	// A model that is a file begins at the plan's folder, as in run.toml. What is not there may
	// still be a preset, or begin at the working directory as plan -o writes it.
	_, unknown := model.Find(p.Model)
	if beside := filepath.Join(filepath.Dir(path), p.Model); unknown != nil && p.Model != "" &&
		!filepath.IsAbs(p.Model) {
		if _, err := os.Stat(beside); err == nil {
			p.Model = beside
		}
	}
	return p, keys, nil
}
