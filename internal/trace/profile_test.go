package trace

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/deepwell/deepwell/event"
)

// A profile has the spans and the memory of its own steps, and is whole before the run ends.
func TestProfile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "profile.json")
	heard := &event.Recorder{}
	p, err := Create(path, 2, 3, heard, func() time.Time { return time.Unix(0, 0) })
	if err != nil {
		t.Fatal(err)
	}
	for step := 1; step <= 4; step++ {
		p.Begin(step, "gradient")()
		p.Emit(event.Step{Step: step, MemoryBytes: 7})
	}
	if got := heard.Events(); len(got) != 1 || got[0] != (event.Profiled{Path: path}) {
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
	p, err := Create(path, 20, 30, heard, func() time.Time { return time.Unix(0, 0) })
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
