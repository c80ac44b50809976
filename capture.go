package deepwell

import (
	"context"

	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/model"
)

// A CaptureJob is which model to look at, and how closely.
type CaptureJob struct {
	Source string // a preset, folder, config.json, *.pt2, or hf:ORG/NAME
	// Seq and Batch are tokens in a sequence, and sequences, of the graph; work is counted for
	// sequences of that length. 0 are 8,192, or the context if that is shorter, and 1.
	Seq, Batch int64
	Graph      string // file that the graph is written to; "" for none
	// Scan looks for numbers that are not finite in weights of any size; without it, only in those
	// that are read in some seconds.
	Scan   bool
	Getenv func(string) string
}

// Capture finds a model and counts it; what is in its checkpoint is compared with what the
// configuration asks for.
func (e *Env) Capture(ctx context.Context, job CaptureJob) (*capture.Summary, error) {
	v := e.begin(ctx, "capture")
	var s *capture.Summary
	m := get(v, "find the model", func() (*capture.Model, error) {
		return capture.Open(job.Source, capture.Options{Getenv: job.Getenv})
	})
	if v.err != nil {
		return nil, v.err
	}
	defer m.Close() //nolint:errcheck // files that were read only
	if lack := m.Lack(); lack != nil {
		d := diag.From(lack)
		e.Events.Emit(event.Warning{Code: string(d.Code), Text: d.What, Fix: d.Fix})
	}
	v.pass("compare the checkpoint with the configuration", func() error {
		if m.Contents() == nil {
			return nil
		}
		return m.Check()
	})
	v.pass("count", func() error { s = m.Summary(job.Seq); return nil })
	if f := m.Contents(); m.HasWeights() && f != nil && (job.Scan || f.Bytes <= quickScan) {
		v.pass("look for numbers that are not finite", func() (err error) {
			s.Files.Scanned = true
			s.Files.NotFinite, err = m.NotFinite(ctx)
			for _, d := range s.Files.NotFinite {
				e.Events.Emit(event.Warning{Code: string(diag.WeightNotFinite), Text: d.String() +
					" not finite"})
			}
			return err
		})
	}
	if job.Graph != "" {
		v.pass("write the graph", func() error { return writeGraph(m.Trained(), s.Seq, job) })
	}
	return s, v.err
}

// quickScan is how many bytes of weights are read without being asked: some seconds from a disk.
const quickScan = 4 << 30

// writeGraph writes the forward pass and loss as text, which reads as mathematics.
func writeGraph(c model.Model, seq int64, job CaptureJob) error {
	g, err := c.Graph(model.Shape{Batch: max(1, job.Batch), Seq: seq, Elem: dtype.BF16})
	if err != nil {
		return err
	}
	if err := atomicfile.Write(job.Graph, []byte(g.String()), 0o644); err != nil {
		return diag.New(diag.FileError, "cannot write %s", job.Graph).Wrap(err)
	}
	return nil
}
