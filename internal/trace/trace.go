package trace

import (
	"encoding/json"
	"errors"
	"io"
	"strconv"
	"sync"
	"time"
)

// A Writer writes one trace. It is safe for use by several goroutines, and its methods may be
// called on nil.
type Writer struct {
	mu        sync.Mutex
	w         io.Writer
	now       func() time.Time
	start     time.Time
	processes map[string]int
	threads   map[[2]string]*Track
	written   bool // an event, so that the next one needs a comma
	err       error
}

// A Track is a row of the trace: things that happen one after the other, or inside each other.
type Track struct {
	w        *Writer
	pid, tid int
}

// An Arg is a fact that is shown when a span is selected.
type Arg struct {
	Name  string
	Value any // what encoding/json can write
}

// New begins a trace; its time starts at 0 now.
func New(w io.Writer, now func() time.Time) *Writer {
	t := &Writer{w: w, now: now, start: now(), processes: map[string]int{},
		threads: map[[2]string]*Track{}}
	_, t.err = io.WriteString(w, "[")
	return t
}

// Track gives the track of a name in a group, such as "loop" of "host" or "runs" of "device 0".
// Groups and tracks are shown in the order in which they are first asked for.
func (w *Writer) Track(group, name string) *Track {
	if w == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	key := [2]string{group, name}
	if t := w.threads[key]; t != nil {
		return t
	}
	t := &Track{w: w, pid: w.process(group), tid: len(w.threads) + 1}
	w.threads[key] = t
	w.describe("thread_name", t, Arg{"name", name})
	w.describe("thread_sort_index", t, Arg{"sort_index", t.tid})
	return t
}

// process gives the number of a group, which has a name and a place of its own.
func (w *Writer) process(group string) int {
	pid, known := w.processes[group]
	if !known {
		pid = len(w.processes) + 1
		w.processes[group] = pid
		t := &Track{w: w, pid: pid}
		w.describe("process_name", t, Arg{"name", group})
		w.describe("process_sort_index", t, Arg{"sort_index", pid})
	}
	return pid
}

// Span begins a span that lasts until the function that it returns is called.
func (t *Track) Span(name string) (end func(...Arg)) {
	if t == nil {
		return func(...Arg) {}
	}
	from := t.w.now()
	return func(args ...Arg) { t.Add(name, from, t.w.now(), args...) }
}

// Add writes a span whose times are known, such as a run on a device.
func (t *Track) Add(name string, from, to time.Time, args ...Arg) {
	if t == nil {
		return
	}
	t.w.mu.Lock()
	defer t.w.mu.Unlock()
	length := micros(max(0, to.Sub(from)))
	t.w.write(traceEvent{Phase: "X", Name: name, PID: t.pid, TID: t.tid,
		Time: t.w.since(from), Length: &length, Args: args})
}

// Count writes the value that a counter of a group has from now on.
func (w *Writer) Count(group, name string, value float64) {
	if w == nil {
		return
	}
	at := w.now()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.write(traceEvent{Phase: "C", Name: name, PID: w.process(group), Time: w.since(at),
		Args: []Arg{{"value", value}}})
}

// Close ends the array and gives the first error that was met. It does not close the file.
func (w *Writer) Close() error {
	if w == nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return w.err
	}
	_, err := io.WriteString(w.w, "\n]\n")
	w.err = errors.New("trace: written after Close")
	return err
}

// A traceEvent has the fields of Chrome's format, in the order in which its documents show them.
type traceEvent struct {
	Name   string  `json:"name"`
	Phase  string  `json:"ph"` // X: complete span, C: counter, M: metadata
	Time   micros  `json:"ts"`
	Length *micros `json:"dur,omitempty"`
	PID    int     `json:"pid"`
	TID    int     `json:"tid"`
	Args   args    `json:"args,omitempty"`
}

// micros is a time as the format has it, in microseconds; three decimals keep the nanoseconds.
type micros time.Duration

func (m micros) MarshalJSON() ([]byte, error) {
	return strconv.AppendFloat(nil, float64(m)/1e3, 'f', 3, 64), nil
}

// args is an object whose members keep their order.
type args []Arg

func (a args) MarshalJSON() ([]byte, error) {
	b := []byte{'{'}
	for i, arg := range a {
		if i > 0 {
			b = append(b, ',')
		}
		name, err := json.Marshal(arg.Name)
		if err != nil {
			return nil, err
		}
		value, err := json.Marshal(arg.Value)
		if err != nil { // not finite, most likely: say so rather than lose the span
			value = strconv.AppendQuote(nil, err.Error())
		}
		b = append(append(append(b, name...), ':'), value...)
	}
	return append(b, '}'), nil
}

func (w *Writer) since(at time.Time) micros { return micros(max(0, at.Sub(w.start))) }

func (w *Writer) describe(what string, t *Track, arg Arg) {
	w.write(traceEvent{Phase: "M", Name: what, PID: t.pid, TID: t.tid, Args: []Arg{arg}})
}

// write adds an event in one write. Work that is traced must not fail for the trace, so an error is
// kept for Close.
func (w *Writer) write(e traceEvent) {
	if w.err != nil {
		return
	}
	b, err := json.Marshal(e)
	if err != nil {
		w.err = err
		return
	}
	comma := ",\n"
	if !w.written {
		comma, w.written = "\n", true
	}
	_, w.err = w.w.Write(append([]byte(comma), b...))
}
