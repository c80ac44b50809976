package report

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"io"
	"maps"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
)

var pages = flag.String("pages", "", "folder to write pages to, to look at them")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// folder makes the folder of a run with hostile names and figures.
func folder(t *testing.T, name string, steps int, more ...event.Event) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), name)
	if err := os.Mkdir(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	write(t, dir, event.Run{Model: "<script>alert(1)</script>", Parameters: 12_600_000, Steps: 2 * steps, Seq: 128,
		Batch: 8, Precision: "mxfp8", Devices: 8, Device: "B200", Plan: "fsdp 8 zero 3", Folder: dir})
	for i := range steps {
		x := float64(i + 1)
		write(t, dir, event.Step{Step: i + 1, Steps: 2 * steps, Loss: event.Figure(2 + 6/math.Sqrt(x)),
			GradNorm: event.Figure(1 / x), Rate: 3e-4, Tokens: int64(i+1) * 1024, TokensPerSecond: 4000, Seconds: 0.25,
			MemoryBytes: 1 << 30, MFU: 0.4})
		if (i+1)%10 == 0 {
			write(t, dir, event.Eval{Step: i + 1, Tokens: 100, Loss: event.Figure(2.2 + 6/math.Sqrt(x))})
		}
	}
	write(t, dir, more...)
	return dir
}

func write(t *testing.T, dir string, events ...event.Event) {
	t.Helper()
	f, err := event.Open(filepath.Join(dir, eventsName), func() time.Time { return time.Unix(1e9, 0) })
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range events {
		f.Emit(e)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T, dirs ...string) (runs []*Run) {
	t.Helper()
	for _, dir := range dirs {
		r, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		r.Name = filepath.Base(dir)
		runs = append(runs, r)
	}
	return runs
}

// eventful is what may happen in a run.
var eventful = []event.Event{
	event.Rejected{Step: 41, Why: "the gradient is not finite", Loss: event.Figure(math.NaN()), GradNorm: event.Figure(math.Inf(1))},
	event.Precision{Step: 30, What: "fall", Layer: 3, Text: "layer 3 down fprop: nvfp4 falls to mxfp8 <b>"},
	event.Experts{Step: 10, Layers: []event.ExpertLoad{{Busiest: 1.5, Idlest: 0.5}, {Layer: 1, Busiest: 2, Idlest: 0.4}}},
	event.Experts{Step: 20, Layers: []event.ExpertLoad{{Busiest: 1.2, Idlest: 0.8}}},
	event.Warning{Code: "DW2605", Text: "another engine", Fix: "none is needed"},
}

func TestPages(t *testing.T) {
	for name, runs := range map[string][]*Run{
		"one":   open(t, folder(t, "one", 200, eventful...)),
		"two":   open(t, folder(t, "a", 100, eventful...), folder(t, "b", 60)),
		"short": open(t, folder(t, "short", 1)),
		"empty": open(t, folder(t, "empty", 0)),
		"flat":  open(t, folder(t, "flat", 0, event.Step{Step: 1, Steps: 1, Loss: event.Figure(math.NaN())})),
	} {
		t.Run(name, func(t *testing.T) {
			page := Page(runs)
			if !bytes.Equal(page, Page(runs)) {
				t.Error("two pages of the same runs differ")
			}
			elsewhere := regexp.MustCompile(`(?i)https?://|<script|<link|@import|url\(|src=`)
			if m := elsewhere.Find(page); m != nil {
				t.Errorf("the page asks for something: %s", m)
			}
			for _, bad := range []string{"NaN", "Inf", "<b>\"", "e+"} {
				if at := bytes.Index(page, []byte(bad)); at >= 0 {
					t.Errorf("the page has %s: %s", bad, page[max(0, at-80):at+20])
				}
			}
			want := []string{"Loss"}
			if name == "one" || name == "two" {
				want = append(want, "Gradient norm", "MFU", "Load of experts", "Rejected steps", "not finite",
					"Decisions about precision", "nvfp4 falls to mxfp8", "DW2605")
			}
			for _, w := range want {
				if !bytes.Contains(page, []byte(w)) {
					t.Errorf("the page lacks %q", w)
				}
			}
			if *pages != "" {
				if err := os.WriteFile(filepath.Join(*pages, name+".html"), page, 0o644); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// A page of a long run is small, and its spikes are there.
func TestLongRun(t *testing.T) {
	r := &Run{Name: "long"}
	for i := range 1_000_000 {
		s := event.Step{Step: i + 1, Steps: 1_000_000, Loss: 2, GradNorm: 1, TokensPerSecond: 1, Seconds: 1}
		if i == 654_321 {
			s.Loss = 9
		}
		r.Add(event.Record{Event: s})
	}
	page := Page([]*Run{r})
	if len(page) > 200_000 {
		t.Errorf("the page has %d bytes", len(page))
	}
	if !bytes.Contains(page, []byte(">8<")) { // a line of the grid below the spike
		t.Error("the spike is lost")
	}
}

// A run that goes on is read from where it was, and a new one in its place from its beginning.
func TestUpdate(t *testing.T) {
	dir := folder(t, "run", 5)
	r := open(t, dir)[0]
	path := filepath.Join(dir, eventsName)
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	line := `{"v":1,"t":"2026-11-15T12:00:00Z","kind":"step","step":6,"steps":10,"loss":1}` + "\n"
	for _, part := range []string{line[:20], line[20:]} {
		if _, err := f.WriteString(part); err != nil {
			t.Fatal(err)
		}
		if err := r.Update(); err != nil {
			t.Fatal(err)
		}
	}
	_ = f.Close()
	if r.last().Step != 6 || len(r.Steps) != 6 {
		t.Errorf("%d steps, the last is %d", len(r.Steps), r.last().Step)
	}
	write(t, dir, event.Resumed{Step: 3}, event.Step{Step: 4, Steps: 10})
	if err := r.Update(); err != nil || len(r.Steps) != 4 || r.Resumes != 1 {
		t.Errorf("%v, %d steps after a resume", err, len(r.Steps))
	}
	if err := os.WriteFile(path, []byte(line), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := r.Update(); err != nil || len(r.Steps) != 1 {
		t.Errorf("%v, %d steps of a new log", err, len(r.Steps))
	}
}

func TestErrors(t *testing.T) {
	dir := folder(t, "run", 1)
	path := filepath.Join(dir, eventsName)
	for name, c := range map[string]struct {
		folder string
		change func() error
		code   diag.Code
	}{
		"no folder": {filepath.Join(dir, "none"), func() error { return nil }, diag.FileError},
		"a file":    {path, func() error { return nil }, diag.BadInput},
		"damaged":   {dir, func() error { return os.WriteFile(path, []byte("{\n{}\n"), 0o644) }, diag.BadInput},
		"a folder":  {filepath.Dir(dir), func() error { return os.Mkdir(filepath.Join(filepath.Dir(dir), eventsName), 0o777) }, diag.NotPlain},
	} {
		if err := c.change(); err != nil {
			t.Fatal(err)
		}
		_, err := Open(c.folder)
		if !errors.Is(err, c.code) || diag.From(err).Fix == "" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Who may look: browsers on this host, by its own names; elsewhere who has the token.
func TestServer(t *testing.T) {
	runs := open(t, folder(t, "run", 30, eventful...))
	s, err := Listen("127.0.0.1:0", runs)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- s.Serve(ctx) }()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Get(s.URL())
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(answer.Body)
	_ = answer.Body.Close()
	if err != nil || answer.StatusCode != 200 || !bytes.Contains(body, []byte("<h2>Loss</h2>")) {
		t.Errorf("%v, %s: %.200s", err, answer.Status, body)
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	open := &Server{runs: runs}
	closed := &Server{runs: runs, token: "secret"}
	for i, c := range []struct {
		s                    *Server
		method, target, host string
		header               http.Header
		status               int
	}{
		{open, "GET", "/", "localhost:8080", nil, 200},
		{open, "GET", "/body", "127.0.0.1:8080", nil, 200},
		{open, "GET", "/body", "[::1]:8080", nil, 200},
		{open, "GET", "/", "evil.example:8080", nil, 403}, // DNS rebinding
		{open, "GET", "/", "localhost.evil.example", nil, 403},
		{open, "GET", "/body", "localhost:8080", http.Header{"Origin": {"http://evil.example"}}, 403},
		{open, "GET", "/body", "localhost:8080", http.Header{"Origin": {"null"}}, 403},
		{open, "GET", "/body", "localhost:8080", http.Header{"Origin": {"http://localhost:8080"}}, 200},
		{open, "POST", "/", "localhost:8080", nil, 405},
		{open, "GET", "/../events.jsonl", "localhost", nil, 404},
		{closed, "GET", "/", "10.0.0.1:8080", nil, 403},
		{closed, "GET", "/?token=secre", "10.0.0.1:8080", nil, 403},
		{closed, "GET", "/?token=secret", "10.0.0.1:8080", nil, 200},
		{closed, "GET", "/body", "10.0.0.1:8080", http.Header{"Cookie": {cookie + "=secret"}}, 200},
		{closed, "GET", "/body", "10.0.0.1:8080", http.Header{"Cookie": {cookie + "=secret"}, "Origin": {"http://evil.example"}}, 403},
	} {
		r := httptest.NewRequest(c.method, c.target, nil)
		r.Host = c.host
		maps.Copy(r.Header, c.header)
		w := httptest.NewRecorder()
		c.s.ServeHTTP(w, r)
		if w.Code != c.status {
			t.Errorf("%d: %s %s of %s: %d, want %d", i, c.method, c.target, c.host, w.Code, c.status)
		}
		if w.Code == 200 && strings.Contains(w.Body.String(), "<script>") {
			t.Error("a name of a model is HTML")
		}
	}
}

func TestListen(t *testing.T) {
	for _, address := range []string{"nowhere", "127.0.0.1:99999999", ":-1"} {
		if _, err := Listen(address, nil); err == nil || diag.From(err).Fix == "" {
			t.Errorf("%s: %v", address, err)
		}
	}
	s, err := Listen("0.0.0.0:0", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.listener.Close() }()
	if !strings.HasPrefix(s.URL(), "http://HOST:") || !strings.Contains(s.URL(), "token="+s.token) || len(s.token) < 20 {
		t.Error(s.URL())
	}
}
