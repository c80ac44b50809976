package dryrun

import (
	"encoding/json"
	"testing"

	"github.com/deepwell/deepwell/program"
)

// checkTrace holds a trace to the timeline: every action once, tracks whose spans follow each
// other, and counters that never go back in time.
func checkTrace(t *testing.T, text string, line *Timeline) {
	t.Helper()
	var events []struct {
		Name, Ph string
		Ts, Dur  float64
		Pid, Tid int
		Args     map[string]any
	}
	if err := json.Unmarshal([]byte(text), &events); err != nil {
		t.Fatal(err)
	}
	actions, want := 0, 0
	for _, list := range line.Schedule.Lists {
		want += len(list)
	}
	end := map[[2]int]float64{}
	counters := map[string]float64{}
	for _, e := range events {
		switch e.Ph {
		case "X":
			at := [2]int{e.Pid, e.Tid}
			if e.Ts < end[at] {
				t.Errorf("%s begins before the one before it ends", e.Name)
			}
			end[at] = e.Ts + e.Dur - 0.001 // of a microsecond: times are whole nanoseconds
			if _, ok := e.Args["microbatch"]; ok {
				actions++
			}
		case "C":
			key := string(rune(e.Pid)) + e.Name
			if e.Ts < counters[key] {
				t.Errorf("counter %s goes back in time", e.Name)
			}
			counters[key] = e.Ts
		}
	}
	if actions != want {
		t.Errorf("%d actions, want %d", actions, want)
	}
	if len(counters) != len(shown(program.Memory{}))*len(line.Ranks) {
		t.Errorf("%d counters", len(counters))
	}
}
