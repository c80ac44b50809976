package deepwell

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/replay"
	"github.com/deepwell/deepwell/step"
)

// A VerifyJob is a plan whose programs are replayed.
type VerifyJob struct {
	Source    string // a plan, or the name of a model, which is sharded by FSDP over its cluster
	Cluster   string // NxGPU of a model; "" is 1xb200
	Precision string // of linear layers: a format; "" is the plan's, or bf16
	// Quick leaves out the compile of the full plan.
	Quick bool
}

// A VerifyResult is what the replay of a small sibling of a plan showed.
type VerifyResult struct {
	Model     string `json:"model"`
	Cluster   string `json:"cluster"`
	Mesh      string `json:"mesh,omitempty"` // as [plan.Plan.Label] writes it
	Precision string `json:"precision"`
	// Small is what was replayed: cluster, mesh, and every size that is not the full plan's.
	Small struct {
		Cluster string          `json:"cluster"`
		Mesh    string          `json:"mesh,omitempty"`
		Changes []replay.Change `json:"changes"`
	} `json:"small"`
	Programs []*replay.Outcome `json:"programs"`
	// Conventions are the readings of libraries that the replay trusts ([replay.Conventions]).
	Conventions []string `json:"conventions"`
	// Full compares the compiled programs of the full plan with those that were replayed; nil if that
	// was left out.
	Full    *FullCompile `json:"full,omitempty"`
	Seconds float64      `json:"seconds"`
}

// Worst is the program whose worst array is nearest to its bound, or beyond it; nil without
// programs.
func (r *VerifyResult) Worst() *replay.Outcome {
	if len(r.Programs) == 0 {
		return nil
	}
	near := func(o *replay.Outcome) float64 {
		if o.Bound == 0 {
			return float64(len(o.Beyond)) * 1e9
		}
		return o.Apart / o.Bound
	}
	return slices.MaxFunc(r.Programs, func(a, b *replay.Outcome) int {
		return cmp.Compare(near(a), near(b))
	})
}

// A FullCompile is how the programs of a full plan, as XLA made them, differ in kind from the
// small ones that were replayed.
type FullCompile struct {
	Programs int     `json:"programs"` // with different texts
	Seconds  float64 `json:"seconds"`
	// OnlyFull and OnlySmall list opcodes, kinds of fusion, custom calls and collectives that only the
	// programs of one side have, by the kind of program.
	OnlyFull  map[step.Kind][]string `json:"only_full,omitempty"`
	OnlySmall map[step.Kind][]string `json:"only_small,omitempty"`
}

// Verify makes a plan and its model small, compiles the programs for the plan's GPU, replays them
// on CPU devices, and compares every result array with a reference without special kernels. Then
// it compiles the full plan, and compares what both compiles are made of. If a bound is broken,
// there is a result beside the error.
func (e *Env) Verify(ctx context.Context, job VerifyJob) (*VerifyResult, error) {
	start := time.Now()
	v := e.begin(ctx, "verify")
	r := &verifier{job: job, done: &VerifyResult{}}
	v.pass("read the plan", r.read)
	v.pass("make it small", r.shrink)
	pairs := get(v, "build the programs", r.build)
	runner := replay.NewRunner(replay.RunOptions{Child: e.Child, Environ: e.Environ,
		Engines: e.Engines, Cache: e.Cache, WithoutCuDNN: true, Seed: usualSeed})
	defer runner.Close()
	list, twins := distinct(pairs)
	for i, p := range list {
		v.pass(fmt.Sprintf("replay %s, %d of %d", p.GPU.Name, i+1, len(list)), func() error {
			out, err := runner.Verify(ctx, p)
			if err != nil {
				return err
			}
			out.Twins = twins[i]
			r.done.Programs = append(r.done.Programs, out)
			return nil
		})
	}
	v.pass("compare with the bounds", r.judge)
	if !job.Quick {
		r.compareFull(ctx, v, runner)
	}
	r.done.Seconds = time.Since(start).Seconds()
	return r.done, v.err
}

// A verifier has the state of a verification between its passes.
type verifier struct {
	job   VerifyJob
	done  *VerifyResult
	model *model.Config
	plan  *plan.Plan
	small *replay.Small
}

// read reads the plan, or makes the one that stands for a model.
func (r *verifier) read() (err error) {
	if isPlan(r.job.Source) || looksLikeFile(r.job.Source) {
		if r.job.Cluster != "" {
			return diag.New(diag.BadUsage, "%s names its own cluster", r.job.Source).
				Try("leave --cluster out")
		}
		if r.plan, err = readPlan(r.job.Source); err != nil {
			return err
		}
	} else if r.plan, err = planOf(r.job); err != nil {
		return err
	}
	if r.model, err = configOf(r.plan.Model); err != nil {
		return at(err, r.job.Source)
	}
	r.plan.Precision = cmp.Or(r.job.Precision, r.plan.Precision)
	d := r.done
	d.Model, d.Cluster, d.Mesh = r.plan.Model, r.plan.Cluster, r.plan.Label()
	d.Precision = cmp.Or(r.plan.Precision, r.plan.Types.Params.String())
	return nil
}

// planOf is the plan of a model that is named: FSDP (ZeRO-3) over the whole cluster.
func planOf(job VerifyJob) (*plan.Plan, error) {
	if _, err := configOf(job.Source); err != nil {
		return nil, err
	}
	c, err := machine.ParseCluster(cmp.Or(job.Cluster, "1xb200"))
	if err != nil {
		return nil, err
	}
	p := plan.Default()
	p.Model, p.Cluster, p.Seq = job.Source, c.String(), usualSeq
	p.Microbatches, p.Batch = 1, 2*int64(c.Count)
	p.FSDP.Size = int64(c.Count)
	p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
	return p, nil
}

func (r *verifier) shrink() (err error) {
	if r.small, err = replay.Shrink(r.model, r.plan); err != nil {
		return at(err, r.job.Source)
	}
	d := &r.done.Small
	d.Cluster, d.Mesh, d.Changes = r.small.Plan.Cluster, r.small.Plan.Label(), r.small.Changes
	return nil
}

func (r *verifier) build() ([]replay.Pair, error) {
	pairs, err := replay.Pairs(step.Spec{Model: r.small.Model, Recipe: step.RecipeOf(r.small.Plan),
		Plan: r.small.Plan})
	if err != nil {
		return nil, at(err, r.job.Source)
	}
	return pairs, nil
}

// distinct lists programs with different texts, the first of each, with the names of the others.
func distinct(pairs []replay.Pair) (list []replay.Pair, twins [][]string) {
	type key struct {
		text    string
		devices int
	}
	at := map[key]int{}
	for _, p := range pairs {
		k := key{p.GPU.Text, len(p.GPU.Devices)}
		if i, ok := at[k]; ok {
			twins[i] = append(twins[i], p.GPU.Name)
			continue
		}
		at[k] = len(list)
		list, twins = append(list, p), append(twins, nil)
	}
	return list, twins
}

// judge reports the programs that are beyond their bounds.
func (r *verifier) judge() error {
	trusted := map[string]bool{}
	broken := 0
	for _, o := range r.done.Programs {
		for _, name := range o.Conventions {
			trusted[name] = true
		}
		if len(o.Beyond) > 0 {
			broken++
		}
	}
	r.done.Conventions = slices.Sorted(maps.Keys(trusted))
	if broken == 0 {
		return nil
	}
	o := r.done.Worst()
	return diag.New(diag.ReplayBeyond, "%d of %d programs differ from their references: %s of %s by "+
		"%.1e, and %.0e is the bound", broken, len(r.done.Programs), o.Worst, o.Program, o.Apart,
		o.Bound).
		At("%s, made small", r.job.Source).
		Because("XLA's passes, a rule of the replay or a kernel that Deepwell chose is wrong").
		Try("do not train with this engine and plan; --json has all programs, please report it")
}

// compareFull compiles the programs of the full plan, and compares what they are made of.
func (r *verifier) compareFull(ctx context.Context, v *verb, runner *replay.Runner) {
	start := time.Now()
	var cluster machine.Cluster
	modules := get(v, "build the full plan's programs", func() ([]*step.Program, error) {
		c, err := machine.ParseCluster(r.plan.Cluster)
		if err != nil {
			return nil, err
		}
		cluster = c
		return fullPrograms(r.model, r.plan, c)
	})
	full := map[step.Kind]replay.Census{}
	for i, p := range modules {
		name := fmt.Sprintf("compile %s of the full plan, %d of %d", p.Module.Name, i+1, len(modules))
		v.pass(name, func() error {
			format, code, err := runner.Compile(ctx, p.Module, cluster)
			if err != nil {
				return at(err, r.job.Source)
			}
			c, err := replay.CensusOf(format, code, p.Module.Mesh)
			full[p.Kind] = full[p.Kind].Union(c)
			return err
		})
	}
	v.pass("compare with the full plan", func() error {
		r.done.Full = &FullCompile{Programs: len(modules), OnlyFull: map[step.Kind][]string{},
			OnlySmall: map[step.Kind][]string{}, Seconds: time.Since(start).Seconds()}
		r.done.Full.compare(full, r.done.Programs)
		return nil
	})
}

// fullPrograms are the programs of a plan, each distinct text once, on the devices of rank 0.
func fullPrograms(c *model.Config, p *plan.Plan, on machine.Cluster) (list []*step.Program,
	err error) {
	built, err := step.Build(step.Spec{Model: c, Recipe: step.RecipeOf(p), Plan: p, Arch: on.Arch()})
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for _, one := range built.List {
		if seen[one.Module.Text] {
			continue
		}
		seen[one.Module.Text] = true
		row, m := *one, *one.Module
		m.Devices = program.Range(0, len(m.Devices))
		row.Module = &m
		list = append(list, &row)
	}
	return list, nil
}

// compare fills in what only one side has.
func (f *FullCompile) compare(full map[step.Kind]replay.Census, replayed []*replay.Outcome) {
	small := map[step.Kind]replay.Census{}
	for _, o := range replayed {
		small[o.Kind] = small[o.Kind].Union(o.Census)
	}
	for kind, census := range full {
		if more := census.Without(small[kind]); len(more) > 0 {
			f.OnlyFull[kind] = more
		}
		if less := small[kind].Without(census); len(less) > 0 {
			f.OnlySmall[kind] = less
		}
	}
}
