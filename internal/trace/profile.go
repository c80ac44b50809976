package trace

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/plainfile"
)

// Options say what a profile is of.
type Options struct {
	// Path is the file to write. "" is a process that does not lead its run: it keeps its spans for
	// [Profile.Mine].
	Path     string
	From, To int        // the steps, counted from 1
	Events   event.Sink // gets an event when the profile is complete
	Now      func() time.Time
	// Record starts the profiler of the devices, whose XSpace the returned function gives. It fails
	// with fs.ErrNotExist where the engine has none; nil is the same.
	Record func() (stop func() ([]byte, error), err error)
	// About is shown when the track of the steps is selected: versions, variables.
	About []Arg
}

// A Profile writes a trace of some steps of a run: what the host of each process does and how long
// it waits for each program, and what the devices of the first process do, where the engine tells.
type Profile struct {
	o      Options
	file   *os.File
	buffer *bufio.Writer
	trace  *Writer
	mine   []hostSpan // of a process that does not lead
	stop   func() ([]byte, error)
	note   string // why there are no lanes of devices
	done   bool
	began  bool // a step of the profile has
	err    error
}

// maxSpans bounds what a process sends of its spans: thousands of processes share one message.
const maxSpans = 256

// A hostSpan is a span of another process, on its way to the one that leads.
type hostSpan struct {
	Name   string `json:"name"`
	Step   int    `json:"step"`
	Start  int64  `json:"start"`  // nanoseconds since 1970, by the clock of its host
	Length int64  `json:"length"` // nanoseconds
}

// Create begins a profile.
func Create(o Options) (*Profile, error) {
	p := &Profile{o: o}
	if o.Path == "" {
		p.buffer = bufio.NewWriter(io.Discard)
		p.trace = New(p.buffer, o.Now)
		return p, nil
	}
	f, err := plainfile.Create(o.Path, 0o666)
	if e, ok := errors.AsType[*diag.Error](err); ok {
		return nil, e
	}
	if err != nil {
		return nil, diag.New(diag.FileError, "cannot write the profile").At("%s", o.Path).Wrap(err)
	}
	p.file, p.buffer = f, bufio.NewWriter(f)
	p.trace = New(p.buffer, o.Now)
	if len(o.About) > 0 {
		p.trace.Track("host", "steps").Add("versions", o.Now(), o.Now(), o.About...)
	}
	return p, nil
}

// Begin begins a span of a step, if the step is one of the profile; the function that it returns
// ends it.
func (p *Profile) Begin(step int, name string) func() {
	if step > p.o.To {
		p.err = errors.Join(p.err, p.Close()) // the trace can be looked at while the run goes on
	}
	if step < p.o.From || step > p.o.To {
		return func() {}
	}
	if !p.began {
		p.began = true
		p.record()
	}
	start := p.o.Now()
	return func() {
		end := p.o.Now()
		if p.o.Path == "" {
			if len(p.mine) == maxSpans {
				return
			}
			p.mine = append(p.mine, hostSpan{name, step, start.UnixNano(), end.Sub(start).Nanoseconds()})
			return
		}
		p.trace.Track("host", "steps").Add(name, start, end, Arg{Name: "step", Value: step})
	}
}

// record starts the profiler of the devices.
func (p *Profile) record() {
	if p.o.Path == "" { // lanes of the first process's devices stand for all
		return
	}
	err := fs.ErrNotExist
	if p.o.Record != nil {
		p.stop, err = p.o.Record()
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		p.note = "this engine has no profiler"
	case err != nil:
		p.note = err.Error()
	}
}

// recorded writes what the devices did.
func (p *Profile) recorded() {
	if p.stop == nil {
		return
	}
	space, err := p.stop()
	p.stop = nil
	lanes := 0
	if err == nil {
		lanes, err = p.trace.addXSpace(space)
	}
	switch {
	case err != nil:
		p.note = err.Error()
	case lanes == 0:
		p.note = "the plugin's profiler saw no device: CUPTI does not open here"
	}
}

// Last is the step after which the processes of a run join their spans.
func (p *Profile) Last() int { return p.o.To }

// Mine gives the spans of a process that does not lead its run, for [Profile.Join] in the one that
// does.
func (p *Profile) Mine() ([]byte, error) { return json.Marshal(p.mine) }

// Join adds the spans of another process. They stand where the clocks of their hosts put them.
func (p *Profile) Join(process int, spans []byte) error {
	if p.done || p.o.Path == "" {
		return nil
	}
	var list []hostSpan
	d := json.NewDecoder(bytes.NewReader(spans))
	d.DisallowUnknownFields()
	if err := d.Decode(&list); err != nil {
		return diag.New(diag.LinkShape, "process %d sends no spans", process).Wrap(err)
	}
	track := p.trace.Track(fmt.Sprintf("host of process %d", process), "steps")
	for _, s := range list {
		start := time.Unix(0, s.Start)
		track.Add(s.Name, start, start.Add(time.Duration(s.Length)), Arg{Name: "step", Value: s.Step})
	}
	return nil
}

// Emit implements event.Sink: the memory of the steps becomes a curve.
func (p *Profile) Emit(e event.Event) {
	if s, ok := e.(event.Step); ok && !p.done && s.Step >= p.o.From && s.Step <= p.o.To {
		p.trace.Count("device 0", "memory", float64(s.MemoryBytes))
	}
}

// Close ends the profile.
func (p *Profile) Close() error {
	if p.done {
		return p.err
	}
	p.done = true
	p.recorded()
	err := errors.Join(p.trace.Close(), p.buffer.Flush())
	if p.file == nil {
		return err
	}
	err = errors.Join(err, p.file.Close())
	if !p.began && err == nil {
		p.o.Events.Emit(event.Warning{Text: fmt.Sprintf(
			"no step of %d:%d was run, so there is no profile", p.o.From, p.o.To),
			Fix: "--profile FROM:TO with steps that are still to come"})
		return os.Remove(p.o.Path)
	}
	if err != nil {
		return diag.New(diag.FileError, "cannot write the profile").At("%s", p.o.Path).Wrap(err)
	}
	p.o.Events.Emit(event.Profiled{Path: p.o.Path, HostOnly: p.note})
	return nil
}
