package deepwell

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/parity"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/train"
)

// A ParityJob is precisions to compare by the loss that a recipe reaches with them.
type ParityJob struct {
	Path       string   // of run.toml
	Set        []string // KEY=VALUE, on top of it
	Precisions []string // bf16, mxfp8, nvfp4, or files of policies
	Pairs      int      // of runs, each with a seed of its own
	Branch     int      // steps that branches make from a trained state; 0 starts from scratch
	From       string   // the folder of the run that branches come from; "" trains one
	Matched    bool     // runs BF16 with noise on its gradients as well
	// Bounds are percent of the BF16 loss, by precision, if they differ from the defaults.
	Bounds map[string]float64
	Report string // where a page goes; "" is nowhere
}

// Parity trains the same in several precisions and tells by how much their loss is worse than in
// BF16. It is an error if one is beyond its bound, or if the runs do not show that it is not; the
// result is there all the same.
func (e *Env) Parity(ctx context.Context, job ParityJob) (*parity.Result, error) {
	v := e.begin(ctx, "parity")
	p := &pairing{runner: runner{env: e, job: TrainJob{Path: job.Path, Set: job.Set}}, job: job}
	defer p.end()
	v.pass("read the recipe", p.readRecipe)
	v.pass("find the model", p.findModel)
	v.pass("read the policies", p.readPolicies)
	v.pass("read the data", func() error { return p.readData(ctx) })
	v.pass("open the engine", func() error { return p.openEngine(ctx) })
	if job.Branch > 0 {
		v.pass("train what branches come from", func() error { return p.trunk(ctx) })
	}
	v.pass("run the pairs", func() error { return p.run(ctx) })
	v.pass("write the report", p.write)
	v.pass("hold the gaps to their bounds", p.verdict)
	return p.result, v.err
}

// A pairing is a comparison while it is put together.
type pairing struct {
	runner
	job    ParityJob
	work   parity.Job
	orders map[int]*data.Loader // by seed
	result *parity.Result
}

func (p *pairing) readPolicies() error {
	if p.job.Pairs < 1 {
		return diag.New(diag.BadUsage, "%d pairs cannot be run", p.job.Pairs).Try("--pairs 3")
	}
	for name, bound := range p.job.Bounds {
		if !(bound > 0) || !slices.Contains(p.job.Precisions, name) {
			return diag.New(diag.BadUsage, "%s=%v is not a bound of a precision", name, bound).
				Try("--bound nvfp4=0.5, in percent, of one of %s", strings.Join(p.job.Precisions, ", "))
		}
	}
	for _, name := range p.job.Precisions {
		if name == string(dtype.FormatBF16) {
			continue // always runs
		}
		f := parity.Candidate{Name: name}
		var err error
		if f.Policy, err = precision.Load(p.model.Trained(), name); err != nil {
			return err
		}
		if f.Bound = p.job.Bounds[name]; f.Bound == 0 {
			f.Bound = parity.Bound(p.model.Trained(), f.Policy, p.job.Branch > 0)
		}
		p.work.Formats = append(p.work.Formats, f)
	}
	return nil
}

// rowsOf opens the data in the order of a seed, once.
func (p *pairing) rowsOf(ctx context.Context, seed int) (train.Dataset, error) {
	if seed == p.recipe.Seed {
		return p.rows, nil
	}
	if l := p.orders[seed]; l != nil {
		return l, nil
	}
	other, recipe := p.runner, *p.recipe
	other.recipe, recipe.Seed, recipe.Eval.Path = &recipe, seed, ""
	if err := other.readData(ctx); err != nil {
		return nil, err
	}
	p.orders[seed] = other.rows
	return other.rows, nil
}

// prepare fills in what runs share.
func (p *pairing) prepare(ctx context.Context) {
	p.orders = map[int]*data.Loader{}
	w := &p.work
	recipe := *p.recipe
	recipe.Out = filepath.Join(recipe.Out, "parity")
	w.Engine, w.Model, w.Recipe = p.engine, p.model.Trained(), &recipe
	w.Pairs, w.Branch, w.Matched = p.job.Pairs, p.job.Branch, p.job.Matched
	w.Rows = func(seed int) (train.Dataset, error) { return p.rowsOf(ctx, seed) }
	w.Init = func(seed int, one *model.Param, dst []float32) error {
		if p.random {
			return p.model.Config.Init(one, uint64(seed), dst)
		}
		return p.model.Read(one, dst)
	}
	w.Events, w.Now = p.env.Events, time.Now
}

// trunk finds or trains the state that branches come from.
func (p *pairing) trunk(ctx context.Context) (err error) {
	p.prepare(ctx)
	out := p.job.From
	if out == "" {
		if err := parity.Trunk(ctx, p.work); err != nil {
			return err
		}
		out = p.work.Recipe.Out
	}
	p.work.From, err = ckpt.Latest(ctx, filepath.Join(out, "checkpoints"), p.env.Events)
	return err
}

func (p *pairing) run(ctx context.Context) (err error) {
	if p.work.Engine == nil {
		p.prepare(ctx)
	}
	p.result, err = parity.Run(ctx, p.work)
	if err == nil {
		p.result.Model = p.recipe.Model
	}
	return err
}

func (p *pairing) write() error {
	if p.job.Report == "" {
		return nil
	}
	err := atomicfile.Write(p.job.Report, p.result.HTML(), 0o644)
	return unwritten(err, "the report", p.job.Report)
}

// verdict is an error where a bound is not met.
func (p *pairing) verdict() error {
	var unproven error
	for _, c := range p.result.Formats {
		switch {
		case c.Is == parity.Missed:
			return diag.New(diag.ParityMissed, "the loss in %s is %.3g %% worse than in bf16, and %g %% "+
				"is the bound", c.Name, c.Mean, c.Bound).
				Because("with 95 %% confidence it is at least %.3g %%", c.Limits.Lower).
				Try("keep more layers in bf16: a policy of precision says which")
		case c.Is == parity.NotResolved && unproven == nil:
			fix := "more --pairs, or --branch 120, which resolves smaller gaps"
			if p.job.Branch > 0 {
				fix = "more --pairs, or a lower optimizer.lr"
			}
			unproven = diag.New(diag.ParityUnproven, "%s is not resolved: %s", c.Name, c.Why).
				Because("the gap is %s", gapText(c)).Try("%s", fix)
		}
	}
	return unproven
}

func gapText(c parity.Comparison) string {
	if c.Limits == nil {
		return fmt.Sprintf("%.3g %% of one pair; the bound is %g %%", c.Mean, c.Bound)
	}
	return fmt.Sprintf("%.3g %% (%.3g to %.3g) of %d pairs; the bound is %g %%", c.Mean,
		c.Limits.Lower, c.Limits.Upper, len(c.Gaps), c.Bound)
}

// end closes what the comparison opened.
func (p *pairing) end() {
	if p.work.From != nil {
		_ = p.work.From.Close()
	}
	for _, l := range p.orders {
		_ = l.Close()
	}
	p.close()
}
