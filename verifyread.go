package deepwell

import (
	"cmp"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/step"
)

// replayable are the precisions of GEMMs that a replay has bounds for.
var replayable = []string{"bf16", "mxfp8", "nvfp4"}

// read reads the plan, or makes the one that stands for a model.
func (r *verifier) read() (err error) {
	if err := checkReplayable(r.job.Precision); err != nil {
		return err
	}
	if isPlan(r.job.Source) || looksLikeFile(r.job.Source) && !isFolder(r.job.Source) &&
		filepath.Ext(r.job.Source) != ".pt2" {
		r.plan, err = planIn(r.job)
	} else {
		r.plan, err = planOf(r.job)
	}
	if err != nil {
		return err
	}
	if filepath.Ext(r.plan.Model) == ".pt2" {
		return diag.New(diag.NotSupported, "verify replays models with a configuration, and %s is a "+
			"program", r.plan.Model).At("%s", r.job.Source).
			Because("a replay needs a smaller model of the same form").
			Try("deepwell.check(model, example) compares it with PyTorch; deepwell compile compiles it")
	}
	if r.model, err = configOf(r.plan.Model); err != nil {
		return at(err, r.job.Source)
	}
	r.plan.Precision = cmp.Or(r.job.Precision, r.plan.Precision)
	d, p := r.done, r.plan
	d.Model, d.Cluster, d.Mesh = p.Model, p.Cluster, p.Label()
	d.Precision = cmp.Or(p.Precision, p.Types.Params.String())
	d.Seq, d.Batch, d.Recompute = p.Seq, p.Batch, append([]ir.Tag{}, p.Recompute...)
	return nil
}

func isFolder(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// checkReplayable refuses precisions that other commands take: policy files and unscaled fp8.
func checkReplayable(name string) error {
	switch {
	case name == "" || slices.Contains(replayable, name):
		return nil
	case precision.IsFile(name):
		return diag.New(diag.BadUsage, "verify takes no policy file, and %s is one", name).
			Try("--precision %s; compile and train take policies", strings.Join(replayable, ", "))
	}
	return diag.New(diag.BadUsage, "verify knows no precision %q", name).
		Meant(name, replayable, "did you mean %q?", "one of "+strings.Join(replayable, ", "))
}

// planIn reads a plan's file, for its own cluster, or for another one of the same size.
func planIn(job VerifyJob) (*plan.Plan, error) {
	if _, err := os.Stat(job.Source); os.IsNotExist(err) {
		return nil, diag.New(diag.FileError, "there is no file %s", job.Source).Wrap(err).
			Try("deepwell plan MODEL --cluster 8xb200 -o plan.json writes a plan; or name a model")
	}
	if !isPlan(job.Source) && !strings.HasSuffix(job.Source, ".json") {
		return nil, diag.New(diag.BadUsage, "%s is no plan: verify replays plans and models",
			job.Source).Try("deepwell compile takes modules and program files")
	}
	p, err := readPlan(job.Source)
	if err != nil || job.Cluster == "" {
		return p, err
	}
	c, err := machine.ParseCluster(job.Cluster)
	if err != nil {
		return nil, err
	}
	if n := p.Devices(); n != int64(c.Count) {
		return nil, diag.New(diag.PlanMisfit, "the plan is for %d devices; the cluster %s has %d", n, c,
			c.Count).At("%s", job.Source).
			Try("leave --cluster out, or name a cluster of %d devices", n)
	}
	p.Cluster = c.String()
	return p, nil
}

// planOf is the plan of a model that is named: FSDP (ZeRO-3) over the whole cluster, without
// recomputation.
func planOf(job VerifyJob) (*plan.Plan, error) {
	config, err := configOf(job.Source)
	if err != nil {
		return nil, err
	}
	c, err := machine.ParseCluster(cmp.Or(job.Cluster, "1xb200"))
	if err != nil {
		return nil, err
	}
	p := plan.Default()
	p.Model, p.Cluster, p.Seq = job.Source, c.String(), seqOf(config)
	p.Microbatches, p.Batch = 1, 2*int64(c.Count)
	p.FSDP.Size = int64(c.Count)
	p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
	return p, nil
}

// seqOf is the sequence length of a model's step if none is given: no longer than its context.
func seqOf(m model.Model) int64 {
	if context := m.Facts().Context; context > 0 {
		return min(usualSeq, context)
	}
	return usualSeq
}

// buildFull builds the programs of the plan as it is, so that what compile refuses is refused here,
// too, though the small plan might pass.
func (r *verifier) buildFull() error {
	if err := r.plan.Check(r.model); err != nil {
		return at(err, r.job.Source)
	}
	c, err := machine.ParseCluster(r.plan.Cluster)
	if err != nil {
		return err
	}
	if c.CPU() {
		return nil // refused below, by name
	}
	r.full, err = step.Build(step.Spec{Model: r.model, Recipe: step.RecipeOf(r.plan), Plan: r.plan,
		Arch: c.Arch()})
	if err != nil {
		return at(err, r.job.Source)
	}
	r.done.Notes = slices.Concat(r.full.Warnings, unscaled(r.full.Notes, r.done.Precision))
	return nil
}

// unscaled are the notes on block-scaled products that a GPU has no tensor cores for.
func unscaled(notes []string, format string) (list []string) {
	for _, note := range notes {
		if why, ok := strings.CutPrefix(note, "block_dot: plain, "); ok {
			list = append(list, format+": "+why+"; GEMMs of dequantized operands are replayed")
		}
	}
	return list
}
