package deepwell

import (
	"bufio"
	"errors"
	"os"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/trace"
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
