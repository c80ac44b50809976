package deepwell

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/replay"
	"github.com/deepwell/deepwell/step"
)

// A VerifyJob is a plan whose programs are replayed.
type VerifyJob struct {
	Source    string // a plan, or the name of a model, which is sharded by FSDP over its cluster
	Cluster   string // NxGPU; "" is the plan's, or 1xb200 for a model. A plan needs N devices
	Precision string // of linear layers: a format; "" is the plan's, or bf16
	Seed      uint64 // of the inputs; 0 is 1
	// Quick leaves out the compile of the full plan.
	Quick bool
	// Progress, if there is one, gets the result so far: when it is known what will be replayed, and
	// after each program.
	Progress func(*VerifyResult)
}

// A VerifyResult is what the replay of a small sibling of a plan showed.
type VerifyResult struct {
	Model     string `json:"model"`
	Cluster   string `json:"cluster"`
	Mesh      string `json:"mesh,omitempty"` // as [plan.Plan.Label] writes it
	Precision string `json:"precision"`
	Seq       int64  `json:"seq_tokens"`
	Batch     int64  `json:"batch_sequences"`
	// Recompute lists the parts of a block that the backward pass recomputes.
	Recompute []ir.Tag `json:"recompute"`
	Seed      uint64   `json:"seed"` // of the inputs
	// Small is what was replayed: cluster, mesh, and every size that is not the full plan's. Windowed
	// and Full count its layers by the reach of attention.
	Small struct {
		Cluster  string          `json:"cluster"`
		Mesh     string          `json:"mesh,omitempty"`
		Changes  []replay.Change `json:"changes"`
		Windowed int64           `json:"windowed_layers"`
		Full     int64           `json:"full_layers"`
	} `json:"small"`
	// Verdict is "ok", "beyond" if a result is beyond its bound, or "stopped" if a program was not
	// replayed.
	Verdict  string            `json:"verdict"`
	Programs []*replay.Outcome `json:"programs"`
	// Missing are the programs that were not replayed, in their order.
	Missing []Unreplayed `json:"missing"`
	// Conventions are the readings of libraries that the replay trusts ([replay.Conventions]).
	Conventions []string `json:"conventions"`
	// Notes say what the GPU or its kernels do otherwise than one may expect.
	Notes []string `json:"notes,omitempty"`
	// Full compares the compiled programs of the full plan with those that were replayed; nil if that
	// was left out.
	Full    *FullCompile `json:"full,omitempty"`
	Seconds float64      `json:"seconds"`
}

// An Unreplayed is a program that is still to be replayed, and those with the same text.
type Unreplayed struct {
	Program string   `json:"program"`
	Twins   []string `json:"twins,omitempty"`
}

// The verdicts of a [VerifyResult].
const (
	VerdictOK      = "ok"
	VerdictBeyond  = "beyond"
	VerdictStopped = "stopped"
)

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

// Verify makes a plan and its model small, compiles the programs for the plan's GPU, replays them
// on CPU devices, and compares every result array with a reference without special kernels. Then
// it compiles the full plan, and compares what both compiles are made of. If a bound is broken,
// there is a result beside the error.
func (e *Env) Verify(ctx context.Context, job VerifyJob) (*VerifyResult, error) {
	start := time.Now()
	v := e.begin(ctx, "verify")
	r := &verifier{job: job, done: &VerifyResult{Verdict: VerdictStopped,
		Seed: cmp.Or(job.Seed, usualSeed), Programs: []*replay.Outcome{},
		Missing: []Unreplayed{}, Conventions: []string{}}}
	v.pass("read the plan", r.read)
	v.pass("build the full plan's programs", r.buildFull)
	v.pass("make it small", r.shrink)
	pairs := get(v, "build the programs", r.build)
	runner := replay.NewRunner(replay.RunOptions{Child: e.Child, Environ: e.Environ,
		Engines: e.Engines, Cache: e.Cache, WithoutCuDNN: true, Seed: r.done.Seed})
	defer runner.Close()
	list, twins := distinct(pairs)
	for i, p := range list {
		r.done.Missing = append(r.done.Missing, Unreplayed{p.GPU.Name, twins[i]})
	}
	r.progress(v)
	for i, p := range list {
		v.pass(fmt.Sprintf("replay %s, %d of %d", p.GPU.Name, i+1, len(list)), func() error {
			out, err := runner.Verify(ctx, p)
			if err != nil {
				return err
			}
			out.Twins = twins[i]
			r.add(out)
			return nil
		})
		r.progress(v)
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
	full  *step.Programs // of the plan as it is
	small *replay.Small
}

// progress tells the caller what is done so far, unless something failed.
func (r *verifier) progress(v *verb) {
	if r.job.Progress != nil && v.err == nil {
		r.job.Progress(r.done)
	}
}

// add takes the outcome of the first program that is missing.
func (r *verifier) add(o *replay.Outcome) {
	d := r.done
	d.Programs, d.Missing = append(d.Programs, o), d.Missing[1:]
	d.Conventions = append(d.Conventions, o.Conventions...)
	slices.Sort(d.Conventions)
	d.Conventions = slices.Compact(d.Conventions)
	switch {
	case len(o.Beyond) > 0:
		d.Verdict = VerdictBeyond
	case d.Verdict == VerdictStopped && len(d.Missing) == 0:
		d.Verdict = VerdictOK
	}
}

func (r *verifier) shrink() (err error) {
	if r.small, err = replay.Shrink(r.model, r.plan); err != nil {
		return at(err, r.job.Source)
	}
	d := &r.done.Small
	d.Cluster, d.Mesh, d.Changes = r.small.Plan.Cluster, r.small.Plan.Label(), r.small.Changes
	m := r.small.Model
	for i := range m.Layers {
		if m.Windowed != nil && m.Windowed[i] || m.Windowed == nil && m.Window > 0 {
			d.Windowed++
		}
	}
	d.Full = m.Layers - d.Windowed
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
	broken := 0
	for _, o := range r.done.Programs {
		if len(o.Beyond) > 0 {
			broken++
		}
	}
	if broken == 0 {
		return nil
	}
	o := r.done.Worst()
	cause := "a pass of XLA, a kernel that Deepwell chose, or a rule of the replay may be wrong"
	if dtype.Format(r.done.Precision).Quantized() {
		cause += "; in " + r.done.Precision + " a sum in another order can also flip codes that far"
	}
	return diag.New(diag.ReplayBeyond, "%d of %d programs differ from their references: %s of %s by "+
		"%s, and %s is the bound", broken, len(r.done.Programs), o.Worst, o.Program,
		human.Small(o.Apart), human.Small(o.Bound)).
		At("%s, made small", r.job.Source).Because("%s", cause).
		Try("--seed %d draws other inputs; if it stays, do not train with this engine and plan, and "+
			"report it with what --json prints; docs/verify.md says more", r.done.Seed+1)
}
