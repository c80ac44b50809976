package schedule

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/diag"
)

// small bounds pipelines that are looked at many times.
var small = Shape{6, 3, 12}

// clone copies a schedule, under another name if one is given.
func clone(s *Schedule, name string) *Schedule {
	c := *s
	if name != "" {
		c.Name = name
	}
	c.Lists = slices.Clone(s.Lists)
	for rank := range c.Lists {
		c.Lists[rank] = slices.Clone(c.Lists[rank])
	}
	return &c
}

// sound is the validator's oracle, as simple as can be: what an action needs must have been done,
// anywhere, and ranks take turns until nothing moves.
func sound(s *Schedule) bool {
	done := make(map[Action]bool)
	place := make([]int, s.Ranks)
	may := func(a Action) bool {
		gradient := func(stage int) bool {
			return done[Action{Backward, stage, a.Microbatch}] || done[Action{Input, stage, a.Microbatch}]
		}
		forward := done[Action{Forward, a.Stage, a.Microbatch}]
		switch a.Kind {
		case Forward:
			return !forward && (a.Stage == 0 || done[Action{Forward, a.Stage - 1, a.Microbatch}])
		case Weight:
			return !done[a] && done[Action{Input, a.Stage, a.Microbatch}]
		default:
			return forward && !gradient(a.Stage) && (a.Stage == s.Stages()-1 || gradient(a.Stage+1))
		}
	}
	for moved := true; moved; {
		moved = false
		for rank, list := range s.Lists {
			for place[rank] < len(list) && may(list[place[rank]]) {
				done[list[place[rank]]] = true
				place[rank]++
				moved = true
			}
		}
	}
	work := 0
	for a := range done {
		work++
		if a.Kind == Backward {
			work++ // it counts as two
		}
	}
	for rank, list := range s.Lists {
		if place[rank] < len(list) {
			return false
		}
	}
	return work == 3*s.Stages()*s.Micros
}

// An action that is dropped or doubled is always found, and two that change places are found if it
// matters; under the name of a published schedule, also if it does not.
func TestFaultsAreFound(t *testing.T) {
	fails := func(t *rapid.T, s *Schedule, fault string) {
		err := s.Validate()
		if !errors.Is(err, diag.ScheduleInvalid) {
			t.Fatalf("%s is not found in\n%s%v", fault, s, err)
		}
		if e := diag.From(err); e.Fix == "" {
			t.Fatalf("%s: no fix in %v", fault, err)
		}
	}
	harmless, harmful := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		s := draw(t, small)
		rank := rapid.IntRange(0, s.Ranks-1).Draw(t, "rank")
		n := len(s.Lists[rank])
		i := rapid.IntRange(0, n-1).Draw(t, "i")
		j := rapid.IntRange(0, n-1).Draw(t, "j")
		for _, name := range []string{"", "changed"} {
			c := clone(s, name)
			c.Lists[rank] = slices.Delete(c.Lists[rank], i, i+1)
			fails(t, c, "a dropped action")

			c = clone(s, name)
			c.Lists[rank] = slices.Insert(c.Lists[rank], j, c.Lists[rank][i])
			fails(t, c, "a doubled action")

			c = clone(s, name)
			c.Lists[rank][i].Microbatch = (c.Lists[rank][i].Microbatch + 1) % (s.Micros + 1)
			fails(t, c, "another microbatch")

			c = clone(s, name)
			list := c.Lists[rank]
			list[i], list[j] = list[j], list[i]
			switch ok := sound(c); {
			case i == j:
			case name == "" || !ok:
				fails(t, c, "a swap")
				harmful++
			default:
				harmless++
				if err := c.Validate(); err != nil {
					t.Fatalf("a swap that does not matter is an error: %v", err)
				}
			}
		}
	})
	if harmful == 0 || harmless == 0 {
		t.Errorf("%d swaps mattered and %d did not: one side was not looked at", harmful, harmless)
	}
}

// An error names the rank, the place and the action.
func TestFaultsAreNamed(t *testing.T) {
	base := mustNew(t, "1f1b", Shape{2, 1, 3})
	// 0: F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
	// 1: F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
	for name, c := range map[string]struct {
		change func(*Schedule)
		says   string
	}{
		"order":    {func(s *Schedule) { swap(s, 1, 0, 1) }, "B1.0 comes before F1.0; at rank 1, place 0"},
		"twice":    {func(s *Schedule) { s.Lists[1][2] = Action{Forward, 1, 0} }, "F1.0 is done twice; at rank 1, place 2"},
		"missing":  {func(s *Schedule) { s.Lists[1][5] = Action{Weight, 1, 2} }, "W1.2 comes before I1.2; at rank 1, place 5"},
		"half":     {func(s *Schedule) { s.Lists[1][5] = Action{Input, 1, 2} }, "W1.2 is missing; at rank 1"},
		"home":     {func(s *Schedule) { s.Lists[0][1].Stage = 1 }, "F1.1 belongs to rank 1; at rank 0, place 1"},
		"range":    {func(s *Schedule) { s.Lists[0][1].Microbatch = 3 }, "F0.3 is outside 2 stages and 3 microbatches; at rank 0, place 1"},
		"negative": {func(s *Schedule) { s.Lists[0][1].Stage = -1 }, "F-1.1 is outside"},
		"kind":     {func(s *Schedule) { s.Lists[0][1].Kind = 9 }, "is no action; at rank 0, place 1"},
		"lists":    {func(s *Schedule) { s.Lists = s.Lists[:1] }, "1 lists for 2 ranks"},
		"few":      {func(s *Schedule) { s.Micros = 4 }, "there are 12 actions; 2 stages and 4 microbatches need at least 16"},
		"layout":   {func(s *Schedule) { s.Layout = "zigzag" }, `no layout "zigzag"`},
		"circle": {func(s *Schedule) { swap(s, 0, 1, 2); swap(s, 1, 1, 2) },
			"can never run: its rank waits for itself; at rank 0, place 1; because rank 0 at place 1 (B0.0) waits for rank 1; " +
				"rank 1 at place 1 (F1.1) waits for rank 0;"},
		"memory": {func(s *Schedule) { swap(s, 0, 2, 3) }, "F0.2 makes the rank hold 3 microbatches, more than the 2 of 1f1b; at rank 0, place 2"},
		"name":   {func(s *Schedule) { s.Name = "gpipe" }, "B0.0 stands where gpipe has F0.2; at rank 0, place 2"},
		"vee":    {func(s *Schedule) { s.Layout = Vee }, "1f1b has the layout loop, not vee"},
		"shape":  {func(s *Schedule) { s.Name = "zb-v" }, "zb-v needs at least 2 virtual stages"},
	} {
		s := clone(base, "")
		c.change(s)
		if err := s.Validate(); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: got %v\nwant %q", name, err, c.says)
		}
	}
}

func swap(s *Schedule, rank, i, j int) {
	list := s.Lists[rank]
	list[i], list[j] = list[j], list[i]
}

// A schedule of one's own may mix gradients in one part with gradients in two.
func TestOwnSchedule(t *testing.T) {
	s, err := Parse([]byte("schedule own: 2 ranks, 1 virtual, 2 microbatches, loop\n" +
		"0: F0.0 F0.1 I0.0 B0.1 W0.0\n1: F1.0 I1.0 W1.0 F1.1 B1.1\n"))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Validate(); err != nil {
		t.Error(err)
	}
	if _, ok := s.Holds(0); ok {
		t.Error("there is a closed form for a schedule of one's own")
	}
	if _, ok := s.Bubble(Even(1, 1, 1)); ok {
		t.Error("there is a closed form for a schedule of one's own")
	}
	if line := mustSimulate(t, s, Even(1, 1, 1)); line.Makespan != 10 {
		t.Errorf("takes %d", line.Makespan)
	}
}
