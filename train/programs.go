package train

import (
	"context"
	"crypto/sha256"
	"encoding/hex"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/spmd"
)

// Programs are what a run computes: graphs, and the stages that they become on one kind of device.
type Programs struct {
	Step   *spmd.Step
	Params []model.Param // as the graphs take them, stacked or layer by layer
	Shape  model.Shape

	Gradient, Accumulate, Update, Evaluate *program.Stage // Accumulate is nil without parts
	Notes                                  []string       // what was chosen, and why

	optimizer optim.Optimizer
}

// Write writes the programs of a recipe for devices of an architecture.
func Write(c *model.Config, r *recipe.Recipe, arch string) (*Programs, error) {
	set := kernels.For(arch)
	p := &Programs{Params: c.Params()}
	p.Shape = model.Shape{Batch: int64(r.Micro), Seq: int64(r.Seq), Documents: true}
	p.Shape.Elem, p.Shape.Products = set.Types(r.Precision)
	p.optimizer = optimizerOf(r, p.Shape.Elem)
	g, err := c.Graph(p.Shape)
	if err != nil {
		return nil, err
	}
	unrolled, why := set.Unroll(c.Layers)
	if unrolled {
		if g, err = ir.Unroll(g); err != nil {
			return nil, err
		}
		var layers []model.Param
		for _, one := range p.Params {
			layers = append(layers, one.Layers()...)
		}
		p.Params = layers
		p.Notes = append(p.Notes, "layers: unrolled, "+why)
	} else {
		p.Notes = append(p.Notes, "layers: a loop, "+why)
	}
	o := spmd.Options{Optimizer: p.optimizer, Recompute: r.Recompute, Parts: r.Batch / r.Micro,
		Params: map[string]optim.Param{}}
	for _, one := range p.Params {
		o.Params[one.Name] = optim.Param{Tag: one.Tag, Decay: len(one.Shape) > 1}
	}
	if p.Step, err = spmd.Train(g, o); err != nil {
		return nil, err
	}
	if err := p.lower(set); err != nil {
		return nil, err
	}
	for _, choice := range set.Choices() {
		p.Notes = append(p.Notes, choice.Kind+": "+choice.Kernel+", "+choice.Why)
	}
	return p, nil
}

// lower writes the graphs as stages.
func (p *Programs) lower(set *kernels.Set) error {
	for _, one := range []struct {
		graph *ir.Graph
		stage **program.Stage
	}{
		{p.Step.Gradient, &p.Gradient}, {p.Step.Accumulate, &p.Accumulate},
		{p.Step.Update, &p.Update}, {p.Step.Evaluate, &p.Evaluate},
	} {
		if one.graph == nil {
			continue
		}
		s, err := lower.Stage(one.graph.Name, one.graph,
			lower.Options{Donate: p.Step.Donations(one.graph), Kernels: set})
		if err != nil {
			return err
		}
		*one.stage = s
	}
	return nil
}

// optimizerOf reads the section [optimizer] for a model that keeps its values in elem.
func optimizerOf(r *recipe.Recipe, elem dtype.DType) optim.Optimizer {
	o := r.Optimizer
	adam := optim.AdamW{Beta1: o.Beta1, Beta2: o.Beta2, Eps: AdamEps, Decay: o.Decay,
		ClipNorm: o.Clip, Moments: o.Moments, Compute: elem}
	if o.Name == "muon" {
		return optim.Muon{AdamW: adam, Momentum: o.Beta1}
	}
	return adam
}

// AdamEps is what is added to the root of the second moment: PyTorch's and Megatron's.
const AdamEps = 1e-8

// Rate is the learning rate of a step, counted from 0.
func Rate(r *recipe.Recipe, step int) float64 { return scheduleOf(r).Rate(step) }

// scheduleOf gives the rate by step.
func scheduleOf(r *recipe.Recipe) optim.Schedule {
	o := r.Optimizer
	switch o.Schedule {
	case "wsd":
		return optim.WSD{Peak: o.Rate, Floor: o.Floor, Warmup: o.Warmup, Decay: r.Steps / 5,
			Steps: r.Steps}
	case "constant":
		return optim.WSD{Peak: o.Rate, Floor: o.Rate, Warmup: o.Warmup, Steps: r.Steps}
	}
	return optim.WarmupCosine{Peak: o.Rate, Floor: o.Floor, Warmup: o.Warmup, Steps: r.Steps}
}

// Fingerprints name the texts of the programs, for checkpoints.
func (p *Programs) Fingerprints() map[string]string {
	list := map[string]string{}
	for _, s := range p.stages() {
		sum := sha256.Sum256([]byte(s.Text))
		list[s.Name] = hex.EncodeToString(sum[:])
	}
	return list
}

func (p *Programs) stages() []*program.Stage {
	list := []*program.Stage{p.Gradient, p.Update, p.Evaluate}
	if p.Accumulate != nil {
		list = append(list, p.Accumulate)
	}
	return list
}

// executables are the programs on an engine.
type executables struct {
	gradient, accumulate, update, evaluate *engine.Executable
}

func (p *Programs) compile(ctx context.Context, e *engine.Engine) (*executables, error) {
	x := &executables{}
	for _, one := range []struct {
		stage *program.Stage
		into  **engine.Executable
	}{
		{p.Gradient, &x.gradient}, {p.Accumulate, &x.accumulate}, {p.Update, &x.update},
		{p.Evaluate, &x.evaluate},
	} {
		if one.stage == nil {
			continue
		}
		var err error
		if *one.into, err = e.Compile(ctx, one.stage); err != nil {
			x.free()
			return nil, err
		}
	}
	return x, nil
}

func (x *executables) free() {
	for _, one := range []*engine.Executable{x.gradient, x.accumulate, x.update, x.evaluate} {
		if one != nil {
			one.Free()
		}
	}
}
