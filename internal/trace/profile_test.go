package trace

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/wire"
)

// A profile has the spans and the memory of its own steps, and is whole before the run ends.
func TestProfile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "profile.json")
	heard := &event.Recorder{}
	p, err := Create(Options{Path: path, From: 2, To: 3, Events: heard,
		Now: func() time.Time { return time.Unix(0, 0) }})
	if err != nil {
		t.Fatal(err)
	}
	for step := 1; step <= 4; step++ {
		p.Begin(step, "gradient")()
		p.Emit(event.Step{Step: step, MemoryBytes: 7})
	}
	if got := heard.Events(); len(got) != 1 || got[0] != (event.Profiled{Path: path, HostOnly: "this engine has no profiler"}) {
		t.Errorf("heard %v", got)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var events []struct {
		Phase string `json:"ph"`
	}
	if err := json.Unmarshal(text, &events); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	phases := map[string]int{}
	for _, e := range events {
		phases[e.Phase]++
	}
	if phases["X"] != 2 || phases["C"] != 2 {
		t.Errorf("spans and counters: %v\n%s", phases, text)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

// A profile of steps that were not run leaves no file behind, and says why: stranger A17.
func TestProfileOfNoStepIsNone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "profile.json")
	heard := &event.Recorder{}
	p, err := Create(Options{Path: path, From: 20, To: 30, Events: heard,
		Now: func() time.Time { return time.Unix(0, 0) }})
	if err != nil {
		t.Fatal(err)
	}
	p.Begin(1, "gradient")()
	p.Emit(event.Step{Step: 1})
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("it left %s: %v", path, err)
	}
	if w, ok := heard.Events()[0].(event.Warning); !ok || !strings.Contains(w.Text, "no step of 20:30") {
		t.Errorf("heard %v", heard.Events())
	}
}

// Spans of other processes and lanes of devices stand in the trace of the first process.
func TestProfileOfProcessesAndDevices(t *testing.T) {
	path := filepath.Join(t.TempDir(), "profile.json")
	now := func() time.Time { return time.Unix(7, 0) }
	heard := &event.Recorder{}
	space := wire.Msg{}.Bytes(1, wire.Msg{}.Text(2, "/device:GPU:0 (NVIDIA B200)").
		Bytes(4, wire.Msg{}.Int(1, 3).Bytes(2, wire.Msg{}.Int(1, 3).Text(2, "gemm_fusion"))).
		Bytes(3, wire.Msg{}.Text(2, "Stream #13").Int(3, 7e9).
			Bytes(4, wire.Msg{}.Int(1, 3).Int(2, 2e6).Int(3, 5e6)))).
		Bytes(1, wire.Msg{}.Text(2, "/host:CUPTI"))
	leads, err := Create(Options{Path: path, From: 1, To: 1, Events: heard, Now: now,
		About: []Arg{{"NCCL_ALGO", "Tree"}},
		Record: func() (func() ([]byte, error), error) {
			return func() ([]byte, error) { return space, nil }, nil
		}})
	if err != nil {
		t.Fatal(err)
	}
	other, err := Create(Options{From: 1, To: 1, Events: heard, Now: now})
	if err != nil {
		t.Fatal(err)
	}
	leads.Begin(1, "gradient")()
	other.Begin(1, "update")()
	mine, err := other.Mine()
	if err := errors.Join(err, leads.Join(1, mine), other.Close(), leads.Close()); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil || !json.Valid(text) {
		t.Fatalf("%v\n%s", err, text)
	}
	for _, want := range []string{`"name":"host of process 1"`, `"name":"update","ph":"X","ts":0.000`,
		`"name":"GPU:0 (NVIDIA B200)"`, `"name":"gemm_fusion","ph":"X","ts":2.000,"dur":5.000`,
		`"NCCL_ALGO":"Tree"`} {
		if !strings.Contains(string(text), want) {
			t.Errorf("no %s in\n%s", want, text)
		}
	}
	if got := heard.Events(); len(got) != 1 || got[0] != (event.Profiled{Path: path}) {
		t.Errorf("heard %v", got)
	}
	if err := leads.Join(1, []byte("[{")); err != nil {
		t.Errorf("spans behind the end are not dropped: %v", err)
	}
}

// A profiler that fails, sees nothing or gives garbage leaves the lanes of the host, and says so.
func TestProfileWithoutDevices(t *testing.T) {
	for want, row := range map[string]struct {
		space []byte
		err   error
	}{
		"CUPTI does not open":        {nil, nil},
		"CUPTI_ERROR_NOT_SUPPORTED":  {nil, errors.New("CUPTI_ERROR_NOT_SUPPORTED")},
		"profile cannot be read":     {[]byte{0xff, 0xff}, nil},
		"plugin's profiler saw no d": {wire.Msg{}.Bytes(1, wire.Msg{}.Text(2, "/device:GPU:0")), nil},
	} {
		heard := &event.Recorder{}
		p, err := Create(Options{Path: filepath.Join(t.TempDir(), "p.json"), From: 1, To: 1,
			Events: heard, Now: time.Now, Record: func() (func() ([]byte, error), error) {
				return func() ([]byte, error) { return row.space, row.err }, nil
			}})
		if err != nil {
			t.Fatal(err)
		}
		p.Begin(1, "gradient")()
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if got := heard.Events()[0].Line(); !strings.Contains(got, want) {
			t.Errorf("%q is not in %q", want, got)
		}
	}
}

// No bytes make the reader of profiles panic.
func FuzzXSpace(f *testing.F) {
	f.Add([]byte(wire.Msg{}.Bytes(1, wire.Msg{}.Text(2, "/device:GPU:0").
		Bytes(3, wire.Msg{}.Bytes(4, wire.Msg{}.Int(1, 3))))))
	f.Fuzz(func(_ *testing.T, space []byte) {
		_, _ = New(io.Discard, time.Now).addXSpace(space)
	})
}
