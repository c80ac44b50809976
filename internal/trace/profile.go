package trace

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/plainfile"
)

// A Profile writes a trace of some steps of a run: what the host does, and how long it waits for
// each program. The CPU engine has no profiler of its own that it could be asked for more.
type Profile struct {
	path     string
	from, to int
	file     *os.File
	buffer   *bufio.Writer
	trace    *Writer
	events   event.Sink
	done     bool
	began    bool // a step of the profile has
	err      error
}

// Create creates the file of a profile of the steps from to to, which count from 1. events gets an
// event when the profile is complete.
func Create(path string, from, to int, events event.Sink, now func() time.Time) (*Profile,
	error) {
	f, err := plainfile.Create(path, 0o666)
	if e, ok := errors.AsType[*diag.Error](err); ok {
		return nil, e
	}
	if err != nil {
		return nil, diag.New(diag.FileError, "cannot write the profile").At("%s", path).Wrap(err)
	}
	b := bufio.NewWriter(f)
	return &Profile{path: path, from: from, to: to, file: f, buffer: b, trace: New(b, now),
		events: events}, nil
}

// Begin begins a span of a step, if the step is one of the profile; the function that it returns
// ends it.
func (p *Profile) Begin(step int, name string) func() {
	if step > p.to {
		p.err = errors.Join(p.err, p.Close()) // the trace can be looked at while the run goes on
	}
	if step < p.from || step > p.to {
		return func() {}
	}
	p.began = true
	end := p.trace.Track("host", "steps").Span(name)
	return func() { end(Arg{Name: "step", Value: step}) }
}

// Emit implements event.Sink: the memory of the steps becomes a curve.
func (p *Profile) Emit(e event.Event) {
	if s, ok := e.(event.Step); ok && !p.done && s.Step >= p.from && s.Step <= p.to {
		p.trace.Count("device 0", "memory", float64(s.MemoryBytes))
	}
}

// Close ends the profile.
func (p *Profile) Close() error {
	if p.done {
		return p.err
	}
	p.done = true
	err := errors.Join(p.trace.Close(), p.buffer.Flush(), p.file.Close())
	if !p.began && err == nil {
		p.events.Emit(event.Warning{Text: fmt.Sprintf("no step of %d:%d was run, so there is no profile",
			p.from, p.to), Fix: "--profile FROM:TO with steps that are still to come"})
		return os.Remove(p.path)
	}
	if err != nil {
		return diag.New(diag.FileError, "cannot write the profile").At("%s", p.path).Wrap(err)
	}
	p.events.Emit(event.Profiled{Path: p.path})
	return nil
}
