package event

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"math"
	"reflect"
	"slices"
	"sync"
	"time"
)

// A Record is an event with the time it was emitted at.
type Record struct {
	Time  time.Time
	Event Event
}

// header is what every JSON line begins with.
type header struct {
	Version int       `json:"v"`
	Time    time.Time `json:"t"`
	Kind    string    `json:"kind"`
}

const version = 1

// NewJSON returns a Sink that writes one JSON object a line: {"v":1,"t":…,"kind":…, fields…}.
func NewJSON(w io.Writer, now Clock) Sink {
	return &lines{w: w, render: func(e Event) (string, error) { return encode(e, now()) }}
}

// NewPlain returns a Sink that writes the line of every event that has one. Of the steps of a
// training run it writes the first, the last and one now and then.
func NewPlain(w io.Writer) Sink {
	var run course
	return &lines{w: w, render: func(e Event) (string, error) {
		run.note(e)
		if s, ok := e.(Step); ok {
			return run.line(s, math.MaxInt, plainSeconds), nil
		}
		return e.Line(), nil
	}}
}

// A course is what a stream of steps has shown so far.
type course struct {
	eval    *Eval
	average float64 // of the losses: of all, then of about the last averaged
	losses  int
	shown   bool
	seconds float64 // that the steps since the last line took
}

// A run leaves plainLines lines of steps behind, on a terminal and in a log; a log gets one every
// plainSeconds, too. averaged is how many losses the average remembers: one batch says little.
const (
	plainSeconds = 10
	plainLines   = 20
	averaged     = 16
)

func (c *course) note(e Event) {
	switch e := e.(type) {
	case Eval:
		c.eval = &e
	case Step:
		c.seconds += e.Seconds
		if x := float64(e.Loss); !math.IsNaN(x) && !math.IsInf(x, 0) {
			c.losses++
			c.average += (x - c.average) / float64(min(c.losses, averaged))
		}
	}
}

// line is the text of a step, or "" if it is not yet time for one. Time is the sum of the
// steps' own seconds, so that the same run always prints the same lines.
func (c *course) line(s Step, width int, every float64) string {
	often := max(1, s.Steps/plainLines)
	if c.shown && s.Step%often != 0 && s.Step != s.Steps && c.seconds < every {
		return ""
	}
	c.shown, c.seconds = true, 0
	return s.text(*c, width)
}

// A Recorder is a Sink that keeps what it hears. The zero value is ready.
type Recorder struct {
	mu   sync.Mutex
	list []Event
}

// Emit keeps an event.
func (r *Recorder) Emit(e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.list = append(r.list, e)
}

// Events gives what was heard so far.
func (r *Recorder) Events() []Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.list)
}

// lines is a Sink that writes one line an event. A sink has no one to return an error to; a
// broken pipe must not stop a training step, so write errors are dropped.
type lines struct {
	mu     sync.Mutex
	w      io.Writer
	render func(Event) (string, error)
}

func (l *lines) Emit(e Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	text, err := l.render(e)
	if err != nil || text == "" {
		return
	}
	_, _ = io.WriteString(l.w, text+"\n")
}

// encode joins the header and the event's own fields into one object.
func encode(e Event, at time.Time) (string, error) {
	e = pointed(e)
	if u, ok := e.(Unknown); ok {
		return string(u.Raw), nil
	}
	kind := Kind(e)
	if kind == "" { // a line without one would make the file unreadable
		return "", fmt.Errorf("event: %T is not a kind of event", e)
	}
	head, err := json.Marshal(header{version, at.UTC(), kind})
	if err != nil {
		return "", err
	}
	body, err := json.Marshal(e)
	if err != nil {
		return "", err
	}
	if bytes.Equal(body, []byte("{}")) {
		return string(head), nil
	}
	return string(head[:len(head)-1]) + "," + string(body[1:]), nil
}

// Read yields the records of a JSON-lines stream. A line that is truncated at the end of the
// stream, as a kill leaves it, ends the sequence without an error; any other bad line is an error.
func Read(r io.Reader) iter.Seq2[Record, error] {
	return func(yield func(Record, error) bool) {
		in := bufio.NewReader(r)
		for n := 1; ; n++ {
			line, readErr := in.ReadBytes('\n')
			whole := readErr == nil
			if len(bytes.TrimSpace(line)) > 0 {
				rec, err := decode(line)
				switch {
				case err != nil && !whole:
					return
				case err != nil:
					yield(Record{}, fmt.Errorf("event: line %d: %w", n, err))
					return
				case !yield(rec, nil):
					return
				}
			}
			if readErr == io.EOF {
				return
			}
			if readErr != nil {
				yield(Record{}, readErr)
				return
			}
		}
	}
}

func decode(line []byte) (Record, error) {
	var h header
	if err := json.Unmarshal(line, &h); err != nil {
		return Record{}, err
	}
	if h.Kind == "" {
		return Record{}, fmt.Errorf("no kind")
	}
	if h.Version > version {
		return Record{}, fmt.Errorf("version %d is newer than %d", h.Version, version)
	}
	t, known := kinds[h.Kind]
	if !known {
		return Record{h.Time, Unknown{h.Kind, bytes.TrimSpace(line)}}, nil
	}
	v := reflect.New(t)
	err := json.Unmarshal(line, v.Interface())
	return Record{h.Time, v.Elem().Interface().(Event)}, err
}
