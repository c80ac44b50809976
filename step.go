package deepwell

import (
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/program"
)

// stepOf writes the gradient step of a preset for one device: loss and the gradient of every
// parameter in bf16, with every block computed again in the backward pass. It tells what became of
// operations that a target has kernels for.
func stepOf(p *model.Preset, c machine.Cluster, seq, batch int64) (*program.Program, []string,
	error) {
	if p.Config == nil {
		return nil, nil, diag.New(diag.NotSupported, "the sizes of %s are not public", p.Name)
	}
	if c.Count != 1 {
		return nil, nil, diag.New(diag.NotSupported, "a model is compiled for one device; %s has %d",
			c, c.Count).Because("plans that spread a model over devices are not built yet").
			Try("--cluster 1x%s", c.Card.Name)
	}
	g, err := p.Config.Graph(model.Shape{Batch: batch, Seq: seq, Elem: dtype.BF16})
	if err != nil {
		return nil, nil, err
	}
	gr, err := ir.Grad(g, ir.GradPlan{Recompute: []ir.Tag{ir.Norm, ir.Attn, ir.MLP}})
	if err != nil {
		return nil, nil, err
	}
	step, err := gr.Joint()
	if err != nil {
		return nil, nil, err
	}
	set := kernels.For(c.Card.Arch)
	text, err := lower.Module(step, lower.Options{Kernels: set})
	if err != nil {
		return nil, nil, err
	}
	var notes []string
	for _, choice := range set.Choices() {
		notes = append(notes, choice.Kind+": "+choice.Kernel+", "+choice.Why)
	}
	return program.FromText(stageNameOf(p.Name+".step"), text, 1), notes, nil
}
