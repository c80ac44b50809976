package parity

import (
	"context"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/step"
	"github.com/deepwell/deepwell/train"
)

// A Job is what to compare.
type Job struct {
	Engine *engine.Engine
	Model  model.Model
	Recipe *recipe.Recipe
	// Formats are what is compared with BF16, which need not be among them.
	Formats []Candidate
	// Pairs is how many runs each has.
	Pairs int
	// Branch is how many steps branches make from the state From; 0 starts from scratch and makes the
	// steps of the recipe.
	Branch int
	From   *ckpt.Checkpoint
	// Matched adds runs in BF16 with random gradient errors of the size that the formats cause.
	Matched bool

	// Rows gives the data in the order of a seed, and Init parameters before training.
	Rows func(seed int) (train.Dataset, error)
	Init func(seed int, p *model.Param, dst []float32) error

	Events event.Sink
	Now    event.Clock
}

// parameters counts what is learned.
func (j *Job) parameters() int64 {
	return lists.Sum(j.Model.Params(), func(p model.Param) int64 {
		if p.Buffer {
			return 0
		}
		return p.Size()
	})
}

// A Candidate is a precision policy to compare with BF16. Bound is the percentage by which its loss
// may be worse.
type Candidate struct {
	Name   string
	Policy *precision.Policy
	Bound  float64
}

// The bounds, in percent, are those that MXFP8 and NVFP4 are held to: a branch resolves gaps that a
// run from scratch does not (docs/precision.md).
var bounds = map[dtype.Format]struct{ branch, scratch float64 }{
	dtype.MXFP8: {0.05, 0.25},
	dtype.NVFP4: {0.25, 1},
}

// Bound is the bound of a policy: the bound of its format with the fewest bits.
func Bound(m model.Model, p *precision.Policy, branch bool) float64 {
	bound := 0.0
	for f := range p.Share(m) {
		one := bounds[f].scratch
		if branch {
			one = bounds[f].branch
		}
		bound = max(bound, one)
	}
	return bound
}

const (
	// tail is how many steps at the end of a run a gap is the mean of.
	tail = 50
	// shift is by how much of themselves the weights of the null differ.
	shift = 1e-5
)

// noises are the errors of weight gradients that MXFP8 and NVFP4 make, as shares of their norms
// (docs/precision.md).
var noises = []struct {
	name  string
	share float64
}{{"bf16, dW noise 2.8 %", 0.028}, {"bf16, dW noise 13 %", 0.13}}

// Trunk trains the state that branches come from, in BF16 and at the recipe's rate, which stays
// when it has risen, and leaves it in the recipe's folder. What is there already is gone on with.
func Trunk(ctx context.Context, j Job) error {
	r := *j.Recipe
	r.GEMMs, r.Optimizer.Schedule, r.Optimizer.MinLR = "", "constant", r.Optimizer.LR
	r.Save.Every, r.Save.Keep = 0, 1
	p, err := step.Build(step.Spec{Model: j.Model, Recipe: &r, Arch: "cpu"})
	if err != nil {
		return err
	}
	rows, err := j.Rows(r.Seed)
	if err != nil {
		return err
	}
	t, err := train.New(ctx, train.Options{Engine: j.Engine, Model: j.Model, Recipe: &r,
		Programs: p, Data: rows, Events: j.Events, Now: j.Now,
		Init: func(p *model.Param, dst []float32) error { return j.Init(r.Seed, p, dst) }})
	if err != nil {
		return err
	}
	defer t.Close()
	return t.Run(ctx)
}

// Run makes all runs, one after the other, and compares them.
func Run(ctx context.Context, j Job) (*Result, error) {
	if j.Recipe.Precision != dtype.BF16 {
		return nil, diag.New(diag.NotSupported, "a model in %s is not compared", j.Recipe.Precision).
			Because("quantized formats apply to the GEMMs of a model in bf16").
			Try("--set precision=bf16")
	}
	r := &Result{Parameters: j.parameters(), Pairs: j.Pairs, Batch: j.Recipe.Batch,
		Seq: j.Recipe.Seq, Rate: j.Recipe.Optimizer.LR, Seed: j.Recipe.Seed, Steps: j.Recipe.Steps}
	if j.Branch > 0 {
		r.Branch, r.Steps, r.From = true, j.Branch, j.From.Step
	}
	r.Tail = min(tail, (r.Steps+1)/2)
	if err := j.reference(ctx, r); err != nil {
		return nil, err
	}
	for _, f := range j.Formats {
		c := Comparison{Name: f.Name, Bound: f.Bound,
			Share: 1 - f.Policy.Share(j.Model)[dtype.FormatBF16]}
		t, err := j.trainer(ctx, f.Policy)
		if err != nil {
			return nil, err
		}
		c.Curves, err = j.curves(ctx, t, f.Name, train.Branch{})
		t.Close()
		if err != nil {
			return nil, err
		}
		r.Formats = append(r.Formats, c)
	}
	r.judge()
	return r, nil
}

// reference makes the runs in BF16.
func (j *Job) reference(ctx context.Context, r *Result) error {
	policy, err := precision.Default(j.Model, string(dtype.FormatBF16))
	if err != nil {
		return err
	}
	t, err := j.trainer(ctx, policy)
	if err != nil {
		return err
	}
	defer t.Close()
	if r.BF16, err = j.curves(ctx, t, "bf16", train.Branch{}); err != nil {
		return err
	}
	r.Null.Name = "bf16, weights · (1 ± 1e-5)"
	r.Null.Curves, err = j.curves(ctx, t, "null", train.Branch{Shift: nudge})
	if err != nil || !j.Matched {
		return err
	}
	quantized, err := precision.Default(j.Model, string(dtype.MXFP8))
	if err != nil {
		return err
	}
	for _, n := range noises {
		c := Comparison{Name: n.name}
		c.Curves, err = j.curves(ctx, t, n.name, train.Branch{
			Noise: func(step int, param string, grad []float32) {
				if quantized.Of(0, param, precision.Wgrad) != dtype.FormatBF16 {
					shake(step, param, grad, n.share)
				}
			}})
		if err != nil {
			return err
		}
		r.Matched = append(r.Matched, c)
	}
	return nil
}

// trainer compiles the programs of a policy.
func (j *Job) trainer(ctx context.Context, policy *precision.Policy) (*train.Branches, error) {
	p, err := step.Build(step.Spec{Model: j.Model, Recipe: j.Recipe, Arch: "cpu", Policy: policy})
	if err != nil {
		return nil, err
	}
	return train.NewBranches(ctx, train.Options{Engine: j.Engine, Model: j.Model, Recipe: j.Recipe,
		Programs: p, Events: j.Events, Now: j.Now})
}

// curves makes the runs of all pairs.
func (j *Job) curves(ctx context.Context, t *train.Branches, name string,
	b train.Branch) ([][]float64, error) {
	var all [][]float64
	for pair := range j.Pairs {
		// A branch must not repeat the order of the trunk, whose seed is the recipe's.
		seed := j.Recipe.Seed + pair
		b.Steps, b.Rate = j.Recipe.Steps, step.Rates(j.Recipe)
		if j.Branch > 0 {
			seed++
			b.From, b.Steps = j.From, j.Branch
			b.Rate = optim.WSD{Peak: j.Recipe.Optimizer.LR, Decay: j.Branch, Steps: j.Branch}
		}
		rows, err := j.Rows(seed)
		if err != nil {
			return nil, err
		}
		b.Seed, b.Data = seed, rows
		b.Init = func(p *model.Param, dst []float32) error { return j.Init(seed, p, dst) }
		var curve []float64
		b.Done = func(step int, loss float64) {
			curve = append(curve, loss)
			j.Events.Emit(event.Progress{Task: fmt.Sprintf("%s, pair %d of %d", name, pair+1, j.Pairs),
				Done: int64(step), Total: int64(b.Steps), Unit: "steps"})
		}
		if err := t.Run(ctx, b); err != nil {
			return nil, diag.From(err).At("%s, pair %d", name, pair+1)
		}
		all = append(all, curve)
	}
	return all, nil
}

// nudge changes weights by a hundred-thousandth of themselves, up or down by chance.
func nudge(param string, x []float32) {
	random := rand.New(rand.NewPCG(nameSeed(param), 0))
	for i := range x {
		if random.Uint32()&1 == 0 {
			x[i] *= 1 + shift
		} else {
			x[i] *= 1 - shift
		}
	}
}

// shake adds an error of a share of its norm to the gradient of a linear layer's weight.
func shake(step int, param string, grad []float32, share float64) {
	sum := lists.Sum(grad, func(g float32) float64 { return float64(g) * float64(g) })
	size := share * math.Sqrt(sum/float64(len(grad)))
	random := rand.New(rand.NewPCG(nameSeed(param), uint64(step)))
	for i := range grad {
		grad[i] += float32(size * random.NormFloat64())
	}
}

func nameSeed(name string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(name))
	return h.Sum64()
}
