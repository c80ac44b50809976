package deepwell

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/spmd"
	"github.com/deepwell/deepwell/train"
)

// A Footprint is what one device holds while a plan trains, by cause.
type Footprint struct {
	State    int64  `json:"state"`    // masters and what the optimizer keeps
	Copies   int64  `json:"copies"`   // that the model computes with
	Grads    int64  `json:"grads"`    // kept between programs
	Program  int64  `json:"program"`  // the most that one program adds while it runs
	Largest  string `json:"largest"`  // which one
	Capacity int64  `json:"capacity"` // of the card; 0 if it is not known
}

// Total is the sum of all causes.
func (f *Footprint) Total() int64 { return f.State + f.Copies + f.Grads + f.Program }

// String writes the footprint for people.
func (f *Footprint) String() string {
	verdict := ""
	if f.Capacity > 0 {
		verdict = fmt.Sprintf(" of %s   fits", event.Size(f.Capacity))
		if f.Fits() != nil {
			verdict = fmt.Sprintf(" of %s   does not fit", event.Size(f.Capacity))
		}
	}
	return fmt.Sprintf("step        %s%s\n            state %s · copies %s · gradients %s · %s %s\n",
		event.Size(f.Total()), verdict, event.Size(f.State), event.Size(f.Copies), event.Size(f.Grads),
		f.Largest, event.Size(f.Program))
}

// Fits reports whether a device can hold the step.
func (f *Footprint) Fits() error {
	if f.Capacity == 0 || f.Total() <= f.Capacity {
		return nil
	}
	return diag.New(diag.TooLarge, "a step needs %s on each device, which has %s",
		event.Size(f.Total()), event.Size(f.Capacity)).
		Because("state %s · copies %s · gradients %s · %s %s", event.Size(f.State),
			event.Size(f.Copies), event.Size(f.Grads), f.Largest, event.Size(f.Program)).
		Try("more devices along fsdp or tp, more microbatches, or recompute")
}

// isPlan tells a plan from other files by its members.
func isPlan(source string) bool {
	text, err := os.ReadFile(source)
	if err != nil || !strings.HasSuffix(source, ".json") {
		return false
	}
	var members map[string]json.RawMessage
	if json.Unmarshal(text, &members) != nil {
		return false
	}
	return members["microbatches"] != nil || members["cluster"] != nil || members["fsdp"] != nil
}

// programOf writes the programs of a plan for its cluster, or for another one of the same size.
func programOf(source string, c machine.Cluster) (*program.Program, []string, error) {
	text, err := os.ReadFile(source)
	if err != nil {
		return nil, nil, err
	}
	p, err := plan.Parse(text, source)
	if err != nil {
		return nil, nil, err
	}
	m, err := capture.Open(p.Model, capture.Options{})
	if err != nil {
		return nil, nil, at(err, source)
	}
	defer func() { _ = m.Close() }()
	r := recipe.Default()
	r.Batch, r.Micro, r.Seq = int(p.Batch), int(p.Rows()), int(p.Seq)
	r.Precision, r.Recompute = p.Types.Params, p.Recompute
	w, err := train.Write(m.Config, r, archOf(c), p)
	if err != nil {
		return nil, nil, at(err, source)
	}
	out := &program.Program{Name: stageNameOf(source)}
	for _, s := range []*program.Stage{w.Gradient, w.Accumulate, w.Update} {
		if s != nil {
			out.Stages = append(out.Stages, *s)
		}
	}
	return out, w.Notes, out.Validate()
}

// stepOf writes the gradient step of a preset for one device: loss and the gradient of every
// parameter in bf16, with every block computed again in the backward pass.
func stepOf(p *model.Preset, c machine.Cluster, seq, batch int64) (*program.Program, []string,
	error) {
	if p.Config == nil {
		return nil, nil, diag.New(diag.NotSupported, "the sizes of %s are not public", p.Name)
	}
	if c.Count != 1 {
		return nil, nil, diag.New(diag.NotSupported, "a model is compiled for one device; %s has %d",
			c, c.Count).Because("for several devices write a plan, as in examples/plans").
			Try("--cluster 1x%s", c.Card.Name)
	}
	r := recipe.Default()
	r.Batch, r.Micro, r.Seq = int(batch), int(batch), int(seq)
	r.Recompute = []ir.Tag{ir.Norm, ir.Attn, ir.MLP}
	w, err := train.Write(p.Config, r, archOf(c), nil)
	if err != nil {
		return nil, nil, err
	}
	s := *w.Gradient
	s.Name = stageNameOf(p.Name + ".step")
	return &program.Program{Name: s.Name, Stages: []program.Stage{s}}, w.Notes, nil
}

func archOf(c machine.Cluster) string {
	if c.Target().CPU() {
		return "cpu"
	}
	return c.Card.Arch
}

// footprint adds up what the stages of a plan hold on one device, by the names of their arguments,
// and what the hungriest of them adds.
func footprint(p *program.Program, reports []*engine.Report) (*Footprint, error) {
	f := &Footprint{}
	seen := map[string]bool{}
	for i := range p.Stages {
		s := &p.Stages[i]
		for _, a := range s.Args {
			local, err := s.Local(a)
			if err != nil {
				return nil, err
			}
			if seen[a.Name] {
				continue
			}
			seen[a.Name] = true
			switch {
			case strings.HasPrefix(a.Name, spmd.GradientOf("")):
				f.Grads += local.Bytes()
			case strings.HasPrefix(a.Name, spmd.CopyOf("")):
				f.Copies += local.Bytes()
			case a.Into != "":
				f.State += local.Bytes()
			}
		}
	}
	for _, r := range reports {
		f.Capacity = r.CapacityBytes
		m := r.Memory
		// The gradients that a program gives are counted with those that are kept.
		if n := m.Temp + max(0, m.Output-m.Alias-f.Grads); n > f.Program || f.Largest == "" {
			f.Program, f.Largest = n, r.Stage
		}
	}
	return f, nil
}
