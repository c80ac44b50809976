package trace

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/internal/golden"
)

func clock() func() time.Time {
	at := time.Date(2026, 11, 15, 12, 0, 0, 0, time.UTC)
	return func() time.Time { at = at.Add(1234567 * time.Nanosecond); return at }
}

// steps traces a few steps as the loop does.
func steps(w *Writer, now func() time.Time) {
	loop := w.Track("host", "loop")
	for step := range 2 {
		whole := loop.Span("step")
		for _, phase := range []string{"data", "place", "gradient", "update", "read"} {
			end := loop.Span(phase)
			if phase == "gradient" {
				from := now()
				w.Track("device 0", "runs").Add("grad", from, now(), Arg{"microbatch", 0})
			}
			end()
		}
		w.Count("device 0", "memory", float64(1<<30+step))
		whole(Arg{"step", step + 10}, Arg{"loss", math.NaN()})
	}
}

func TestGolden(t *testing.T) {
	var b bytes.Buffer
	now := clock()
	w := New(&b, now)
	steps(w, now)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, filepath.Join("testdata", "steps.json"), b.Bytes())
	check(t, b.Bytes())
}

// check holds a trace to the rules of the format.
func check(t interface{ Fatalf(string, ...any) }, text []byte) {
	var events []struct {
		Name string         `json:"name"`
		Ph   string         `json:"ph"`
		Ts   *float64       `json:"ts"`
		Dur  *float64       `json:"dur"`
		PID  *int           `json:"pid"`
		TID  *int           `json:"tid"`
		Args map[string]any `json:"args"`
	}
	if err := json.Unmarshal(text, &events); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	named := map[[2]int]bool{}
	type span struct{ from, to float64 }
	tracks := map[[2]int][]span{}
	for i, e := range events {
		if e.Name == "" || e.Ts == nil || *e.Ts < 0 || e.PID == nil || e.TID == nil {
			t.Fatalf("event %d lacks a field: %+v", i, e)
		}
		at := [2]int{*e.PID, *e.TID}
		if (e.Dur != nil) != (e.Ph == "X") || e.Dur != nil && *e.Dur < 0 {
			t.Fatalf("event %d: only a complete span has a length: %+v", i, e)
		}
		switch e.Ph {
		case "M":
			switch e.Name {
			case "process_name", "thread_name":
				if _, ok := e.Args["name"].(string); !ok {
					t.Fatalf("event %d names nothing", i)
				}
				named[at] = true
			case "process_sort_index", "thread_sort_index":
			default:
				t.Fatalf("event %d: there is no metadata %q", i, e.Name)
			}
		case "X":
			if !named[at] {
				t.Fatalf("event %d is on a track without a name", i)
			}
			s := span{*e.Ts, *e.Ts + *e.Dur}
			for _, o := range tracks[at] { // spans of a track nest or follow each other
				const tick = 0.0015 // times are rounded to a nanosecond
				apart := s.from >= o.to-tick || o.from >= s.to-tick
				inside := s.from <= o.from+tick && o.to <= s.to+tick
				if !apart && !inside {
					t.Fatalf("event %d overlaps an earlier one of its track", i)
				}
			}
			tracks[at] = append(tracks[at], s)
		case "C":
			if _, ok := e.Args["value"].(float64); !ok {
				t.Fatalf("event %d counts nothing", i)
			}
		default:
			t.Fatalf("event %d: there is no phase %q", i, e.Ph)
		}
	}
}

// Whatever a kill leaves behind opens, once the bracket that the format lets be missing is put
// back; a write is a whole event, so that a kill falls between two of them.
func TestKilledAtAnyWrite(t *testing.T) {
	now := clock()
	var writes []string
	steps(New(writer(func(b []byte) (int, error) { writes = append(writes, string(b)); return len(b), nil }), now), now)
	for n := 1; n <= len(writes); n++ {
		text := strings.Join(writes[:n], "")
		if strings.HasSuffix(text, ",") {
			t.Fatalf("a comma without an event: %q", text)
		}
		check(t, []byte(text+"]"))
	}
}

type writer func([]byte) (int, error)

func (w writer) Write(b []byte) (int, error) { return w(b) }

func TestManyGoroutines(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var b bytes.Buffer
		w := New(&b, time.Now)
		names := rapid.SliceOfN(rapid.String(), 1, 5).Draw(t, "names")
		var wg sync.WaitGroup
		for i, name := range names {
			wg.Go(func() {
				track := w.Track("device", string(rune('a'+i)))
				for range 3 {
					end := track.Span("x" + name)
					w.Count("host", "n", 1)
					end(Arg{name, name})
				}
			})
		}
		wg.Wait()
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		check(t, b.Bytes())
	})
}

func TestNobodyAsked(t *testing.T) {
	var w *Writer
	steps(w, clock())
	if err := w.Close(); err != nil {
		t.Error(err)
	}
}

func TestErrorsAreKept(t *testing.T) {
	full := errors.New("disk full")
	now := clock()
	w := New(writer(func([]byte) (int, error) { return 0, full }), now)
	steps(w, now)
	if err := w.Close(); !errors.Is(err, full) {
		t.Errorf("Close says %v", err)
	}
	var b bytes.Buffer
	w = New(&b, now)
	w.Close()
	size := b.Len()
	steps(w, now)
	if b.Len() != size {
		t.Error("events were written behind the end")
	}
}
