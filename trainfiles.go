package deepwell

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/trace"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/train"
)

// A profile writes a trace of some steps of a run: what the host does, and how long it waits for
// each program. The CPU engine has no profiler of its own that it could be asked for more.
type profile struct {
	path     string
	from, to int
	file     *os.File
	buffer   *bufio.Writer
	trace    *trace.Writer
	events   event.Sink
	done     bool
	err      error
}

// newProfile opens a trace of the steps "from:to".
func newProfile(path, steps string, events event.Sink) (*profile, error) {
	from, to, err := trace.ParseSteps(steps)
	if err != nil {
		return nil, err
	}
	f, err := os.Create(path)
	if err != nil {
		return nil, diag.New(diag.FileError, "cannot write the profile").At("%s", path).Wrap(err)
	}
	b := bufio.NewWriter(f)
	return &profile{path: path, from: from, to: to, file: f, buffer: b, trace: trace.New(b, time.Now),
		events: events}, nil
}

// Begin implements train.Spans.
func (p *profile) Begin(step int, name string) func() {
	if step > p.to {
		p.err = errors.Join(p.err, p.Close()) // the trace can be looked at while the run goes on
	}
	if step < p.from || step > p.to {
		return func() {}
	}
	end := p.trace.Track("host", "steps").Span(name)
	return func() { end(trace.Arg{Name: "step", Value: step}) }
}

// Emit implements event.Sink: the memory of the steps becomes a curve.
func (p *profile) Emit(e event.Event) {
	if s, ok := e.(event.Step); ok && !p.done && s.Step >= p.from && s.Step <= p.to {
		p.trace.Count("device 0", "memory", float64(s.MemoryBytes))
	}
}

// Close ends the trace.
func (p *profile) Close() error {
	if p.done {
		return p.err
	}
	p.done = true
	err := errors.Join(p.trace.Close(), p.buffer.Flush(), p.file.Close())
	if err != nil {
		return diag.New(diag.FileError, "cannot write the profile").At("%s", p.path).Wrap(err)
	}
	p.events.Emit(event.Profiled{Path: p.path})
	return nil
}

// A handover is what another program must know to make the same run, beside its weights and
// batches; bench/curve/torch_run.py reads it.
type handover struct {
	Steps int       `json:"steps"`
	Batch int       `json:"batch"`
	Seq   int       `json:"seq"`
	Rates []float64 `json:"rates"`
	Beta1 float64   `json:"beta1"`
	Beta2 float64   `json:"beta2"`
	Eps   float64   `json:"eps"`
	Decay float64   `json:"decay"`
	Clip  float64   `json:"clip"`
}

// handOver writes init, a Hugging Face folder; run.json; and batches.bin: for each step ids,
// labels, positions and segments as whole numbers of 32 bits.
func (r *runner) handOver() error {
	if r.recipe.Optimizer.Name != "adamw" {
		return diag.New(diag.NotSupported, "only runs with AdamW can be handed over").
			At("%s: optimizer.name", r.job.Path)
	}
	dir := r.job.Handover
	read := func(p *model.Param, dst []float32) error { return r.init(p, dst) }
	_, err := capture.Export(filepath.Join(dir, "init"), r.model.Config,
		capture.ExportOptions{Type: dtype.F32}, read)
	if err != nil {
		return err
	}
	o := r.recipe.Optimizer
	h := handover{Steps: r.recipe.Steps, Batch: r.recipe.Batch, Seq: r.recipe.Seq, Beta1: o.Beta1,
		Beta2: o.Beta2, Eps: train.AdamEps, Decay: o.Decay, Clip: o.Clip}
	for step := range h.Steps {
		h.Rates = append(h.Rates, train.Rate(r.recipe, step))
	}
	text, err := json.Marshal(h)
	if err == nil {
		err = atomicfile.Write(filepath.Join(dir, "run.json"), text, 0o666)
	}
	if err == nil {
		err = atomicfile.WriteFunc(filepath.Join(dir, "batches.bin"), 0o666, r.writeBatches)
	}
	if err != nil {
		return diag.New(diag.FileError, "cannot write the handover").At("%s", dir).Wrap(err)
	}
	return nil
}

func (r *runner) writeBatches(w io.Writer) error {
	out := bufio.NewWriter(w)
	at := data.Position{}
	for range r.recipe.Steps {
		b, after, err := r.rows.Take(at, r.recipe.Batch, 0, 1)
		if err != nil {
			return err
		}
		at = after
		for _, list := range [][]int32{b.IDs, b.Labels, b.Positions, b.Segments} {
			if err := binary.Write(out, binary.LittleEndian, list); err != nil {
				return err
			}
		}
	}
	return out.Flush()
}
