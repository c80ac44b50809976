package dryrun

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
)

// made gives a schedule that must exist.
func made(t interface{ Fatalf(string, ...any) }, name string, shape schedule.Shape) *schedule.Schedule {
	s, err := schedule.New(name, shape)
	if err != nil {
		t.Fatalf("%v", err)
	}
	return s
}

// sends has a step's sends and reductions follow the links, as prices of whole stages do.
func sends(s *Step) *Step {
	s.Slower = func(links float64) (*Step, error) {
		x := *s
		x.Reduce *= links
		x.Stages = slices.Clone(s.Stages)
		for i := range x.Stages {
			x.Stages[i].Send *= links
		}
		return &x, nil
	}
	return s
}

// even gives a step whose stages all cost the same.
func even(s *schedule.Schedule, stage Stage) *Step {
	stages := make([]Stage, s.Stages())
	for i := range stages {
		stages[i] = stage
	}
	return &Step{Schedule: s, Stages: stages}
}

// drawn gives any schedule that there is, of a small shape.
func drawn(t *rapid.T) *schedule.Schedule {
	name := rapid.SampledFrom(schedule.Names()).Draw(t, "name")
	shape := schedule.Shape{Ranks: rapid.IntRange(1, 6).Draw(t, "ranks"),
		Micros: rapid.IntRange(1, 12).Draw(t, "micros")}
	if name == "interleaved" {
		shape.Micros *= shape.Ranks
		shape.Virtual = rapid.IntRange(2, 4).Draw(t, "virtual")
	}
	return made(t, name, shape)
}

// With whole nanoseconds, one send time for all and sends that do not crowd a link, the simulator
// equals package schedule's.
func TestAgreesWithSchedule(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawn(t)
		send := rapid.Int64Range(0, 5).Draw(t, "send")
		cost := rapid.Int64Range(5, 90)
		var costs schedule.Costs
		step := &Step{Schedule: s}
		for range s.Stages() {
			f, i, w := cost.Draw(t, "f"), cost.Draw(t, "i"), cost.Draw(t, "w")
			costs.Forward, costs.Input, costs.Weight = append(costs.Forward, f), append(costs.Input, i), append(costs.Weight, w)
			step.Stages = append(step.Stages, Stage{Forward: seconds(f), Input: seconds(i), Weight: seconds(w), Send: seconds(send)})
		}
		costs.Send = send
		want, err := s.Simulate(costs)
		if err != nil {
			t.Fatal(err)
		}
		got, err := step.Run(WhatIf{})
		if err != nil {
			t.Fatal(err)
		}
		if got.ticks != want.Makespan {
			t.Fatalf("%d ns, schedule says %d", got.ticks, want.Makespan)
		}
		for rank := range got.Spans {
			for place, span := range got.Spans[rank] {
				if span != want.Spans[rank][place] {
					t.Fatalf("rank %d place %d: %v, schedule says %v", rank, place, span, want.Spans[rank][place])
				}
			}
		}
	})
}

// Whatever the prices, the times of a rank sum up to the step, none is negative, and slower parts
// never make a step faster.
func TestTimesSumUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawn(t)
		cost := rapid.Float64Range(0, 0.1)
		step := &Step{Schedule: s, Reduce: cost.Draw(t, "reduce"), Update: cost.Draw(t, "update"), Host: cost.Draw(t, "host")}
		for range s.Stages() {
			step.Stages = append(step.Stages, Stage{Forward: cost.Draw(t, "f"), Input: cost.Draw(t, "i"),
				Weight: cost.Draw(t, "w"), Send: cost.Draw(t, "send")})
		}
		line, err := step.Run(WhatIf{})
		if err != nil {
			t.Fatal(err)
		}
		for rank, r := range line.Ranks {
			sum := r.Busy + r.Update + r.Links + r.Reduce + r.Host + r.Waiting
			if math.Abs(sum-line.Step) > sumTolerance {
				t.Fatalf("rank %d sums up to %v of %v", rank, sum, line.Step)
			}
			if min(r.Busy, r.Update, r.Links, r.Reduce, r.Waiting) < 0 {
				t.Fatalf("rank %d: %+v", rank, r)
			}
		}
		for _, w := range []WhatIf{{Slow: 1.5, Straggler: s.Ranks - 1}, {Links: 3}} {
			worse, err := sends(step).Run(w)
			if err != nil {
				t.Fatal(err)
			}
			if worse.ticks < line.ticks {
				t.Fatalf("%+v makes %v of %v", w, worse.Step, line.Step)
			}
		}
	})
}

// sumTolerance is for seven sums of seconds that are whole nanoseconds.
const sumTolerance = 1e-9

func TestWaitsHaveTheirCause(t *testing.T) {
	// Two ranks, one microbatch: rank 0 waits for its result to go there and come back.
	s := made(t, "1f1b", schedule.Shape{Ranks: 2, Micros: 1})
	line, err := even(s, Stage{Forward: 1, Input: 1, Weight: 1, Send: 0.25}).Run(WhatIf{})
	if err != nil {
		t.Fatal(err)
	}
	if line.Step != 6.5 {
		t.Fatalf("%v s", line.Step)
	}
	want := []Rank{{Busy: 3, Links: 0.25, Waiting: 3.25}, {Busy: 3, Links: 0.25, Waiting: 3.25}}
	for rank, r := range line.Ranks {
		if r != want[rank] {
			t.Errorf("rank %d: %+v, want %+v", rank, r, want[rank])
		}
	}
	if want := 0.5; line.Bubble != want {
		t.Errorf("a bubble of %v, want %v", line.Bubble, want)
	}
}

// A link carries one result at a time: where a result takes longer than a stage, it sets the pace.
func TestLinksCrowd(t *testing.T) {
	s := made(t, "gpipe", schedule.Shape{Ranks: 2, Micros: 10})
	line, err := even(s, Stage{Forward: 1, Input: 0.5, Weight: 0.5, Send: 3}).Run(WhatIf{})
	if err != nil {
		t.Fatal(err)
	}
	// Down: 1 + 10·3 + 1; up: the first gradient leaves a second later and all take 3 each.
	if want := 1.0 + 30 + 1 + 1 + 30 + 1; line.Step != want {
		t.Errorf("%v s, want %v", line.Step, want)
	}
}

// A straggler sets the pace of a long pipeline.
func TestStraggler(t *testing.T) {
	s := made(t, "1f1b", schedule.Shape{Ranks: 4, Micros: 100})
	step := even(s, Stage{Forward: 1, Input: 1, Weight: 1})
	line, err := step.Run(WhatIf{Slow: 1.1, Straggler: 2})
	if err != nil {
		t.Fatal(err)
	}
	// The slow rank's 100 microbatches, and at most the others' fill and drain.
	if most := 100*3.3 + 3*3; line.Step > most || line.Step < most-1 {
		t.Errorf("%v s, want a little less than %v", line.Step, most)
	}
}

func TestJitterIsSeeded(t *testing.T) {
	s := made(t, "1f1b", schedule.Shape{Ranks: 8, Micros: 64})
	step := even(s, Stage{Forward: 1e-3, Input: 1e-3, Weight: 1e-3})
	run := func(seed uint64, jitter float64, replicas int) float64 {
		step.Replicas = replicas
		line, err := step.Run(WhatIf{Jitter: jitter, Random: rand.New(rand.NewPCG(seed, 0))})
		if err != nil {
			t.Fatal(err)
		}
		return line.Step
	}
	lowBubble, err := step.Run(WhatIf{})
	if err != nil {
		t.Fatal(err)
	}
	if a, b := run(1, 0.1, 1), run(1, 0.1, 1); a != b {
		t.Errorf("the same seed gave %v and %v", a, b)
	}
	if a, b := run(1, 0.1, 1), run(2, 0.1, 1); a == b {
		t.Error("two seeds gave the same step")
	}
	one, many := run(1, 0.1, 1), run(1, 0.1, 32)
	if !(lowBubble.Step < one && one < many && many < 1.5*lowBubble.Step) {
		t.Errorf("no jitter %v, jitter %v, slowest of 32 %v", lowBubble.Step, one, many)
	}
}

// The peak is the schedule's own where one microbatch is one byte, and 1F1B's closed form.
func TestMemory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawn(t)
		step := even(s, Stage{Forward: 1, Input: 1, Weight: 1, Load: schedule.Steady(1, 0)})
		step.Ranks = slices.Repeat([]program.Memory{{Params: 1000, Grads: 100, Host: 3}}, s.Ranks)
		line, err := step.Run(WhatIf{})
		if err != nil {
			t.Fatal(err)
		}
		for rank, r := range line.Ranks {
			want, err := s.Peak(rank, schedule.Hold{Forward: []int64{1}, Input: []int64{1}})
			if err != nil {
				t.Fatal(err)
			}
			all := program.Memory{Params: 1000, Grads: 100, Host: 3, Activations: want.Total}
			if r.Peak != all {
				t.Fatalf("rank %d: %+v, want activations of %d", rank, r.Peak, want.Total)
			}
			samples := line.Memory(rank)
			if samples[0].At != 0 || samples[len(samples)-1].Activations != 0 {
				t.Fatalf("rank %d begins or ends with what is not empty: %v", rank, samples)
			}
			for i := 1; i < len(samples); i++ {
				if samples[i].At <= samples[i-1].At {
					t.Fatalf("time goes back at %d", i)
				}
			}
		}
	})
}

func TestRefusals(t *testing.T) {
	s := made(t, "1f1b", schedule.Shape{Ranks: 2, Micros: 2})
	good := Stage{Forward: 1, Input: 1, Weight: 1}
	bad := func(change func(*Stage)) *Step {
		step := even(s, good)
		change(&step.Stages[1])
		return step
	}
	hand := *s
	hand.Name, hand.Lists = "mine", [][]schedule.Action{s.Lists[0], {{Kind: 9}}}
	stuck := *s
	stuck.Name = "mine"
	stuck.Lists = [][]schedule.Action{s.Lists[0], {s.Lists[1][1], s.Lists[1][0], s.Lists[1][2], s.Lists[1][3]}}
	for name, c := range map[string]struct {
		step *Step
		what WhatIf
		want diag.Code
	}{
		"too few stages": {&Step{Schedule: s, Stages: []Stage{good}}, WhatIf{}, diag.ScheduleCosts},
		"no schedule":    {&Step{}, WhatIf{}, diag.ScheduleCosts},
		"NaN":            {bad(func(t *Stage) { t.Send = math.NaN() }), WhatIf{}, diag.ScheduleCosts},
		"negative time":  {bad(func(t *Stage) { t.Forward = -1 }), WhatIf{}, diag.ScheduleCosts},
		"negative bytes": {bad(func(t *Stage) { t.Residuals = -1 }), WhatIf{}, diag.ScheduleCosts},
		"tail":           {&Step{Schedule: s, Stages: []Stage{good, good}, Host: math.Inf(1)}, WhatIf{}, diag.ScheduleCosts},
		"no such rank":   {even(s, good), WhatIf{Slow: 2, Straggler: 2}, diag.BadInput},
		"no seed":        {even(s, good), WhatIf{Jitter: 0.1}, diag.BadInput},
		"factor":         {even(s, good), WhatIf{Links: math.Inf(1)}, diag.BadInput},
		"links unknown":  {even(s, good), WhatIf{Links: 2}, diag.BadInput},
		"no action":      {&Step{Schedule: &hand, Stages: []Stage{good, good}}, WhatIf{}, diag.ScheduleInvalid},
		"stuck":          {&Step{Schedule: &stuck, Stages: []Stage{good, good}}, WhatIf{}, diag.ScheduleInvalid},
	} {
		_, err := c.step.Run(c.what)
		if e := diag.From(err); e == nil || e.Code != c.want {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestBill(t *testing.T) {
	b := Budget{Tokens: 1e12, Price: 3, Devices: 64, Batch: 4 << 20}
	got := b.Bill(16.2)
	if math.Abs(got.Days-44.70) > 0.01 || math.Abs(got.Money-206_000) > 100 {
		t.Errorf("%+v", got)
	}
	if (Budget{}).Bill(1) != (Bill{}) {
		t.Error("no batch costs something")
	}
}

// large is what the issue asks to be simulated in 50 ms.
func large(t testing.TB) *Step {
	s := made(t, "zb-h1", schedule.Shape{Ranks: 64, Micros: 512})
	return even(s, Stage{Forward: 1e-3, Input: 1.1e-3, Weight: 0.9e-3, Send: 1e-4,
		Load: schedule.Steady(1<<28, 1<<30)})
}

// spent is the processor time of this process.
func spent(t testing.TB) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func TestLargeIsFast(t *testing.T) {
	if testing.Short() {
		t.Skip("takes time")
	}
	step := large(t)
	best := time.Hour
	for range 5 { // other work shares the cores: the best of five, in time of processors
		start := spent(t)
		if _, err := step.Run(WhatIf{}); err != nil {
			t.Fatal(err)
		}
		best = min(best, spent(t)-start)
	}
	t.Logf("64 stages × 512 microbatches, forward, input and weight: %v", best)
	if best > 50*time.Millisecond {
		t.Errorf("64 stages × 512 microbatches take %v", best)
	}
}

func BenchmarkRun(b *testing.B) {
	step := large(b)
	for b.Loop() {
		if _, err := step.Run(WhatIf{}); err != nil {
			b.Fatal(err)
		}
	}
}

func TestTraceIsJSON(t *testing.T) {
	s := made(t, "interleaved", schedule.Shape{Ranks: 2, Virtual: 2, Micros: 4})
	line, err := even(s, Stage{Forward: 1e-3, Input: 1e-3, Weight: 1e-3, Send: 1e-4,
		Load: schedule.Steady(1<<28, 0)}).Run(WhatIf{})
	if err != nil {
		t.Fatal(err)
	}
	var a, b strings.Builder
	if err := line.Trace(&a); err != nil {
		t.Fatal(err)
	}
	if err := line.Trace(&b); err != nil || a.String() != b.String() {
		t.Error("two traces of one timeline differ")
	}
	checkTrace(t, a.String(), line)
}

// A microbatch of one row has no half: planner bug 7.
func TestHalvesOfOneSequenceAreNotOffered(t *testing.T) {
	offered := func(rows int64) bool {
		s := even(made(t, "1f1b", schedule.Shape{Ranks: 4, Micros: 4}),
			Stage{Forward: 1, Input: 1, Weight: 1})
		s.Rows = rows
		helps, err := s.Helps()
		if err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(helps, func(h Suggestion) bool {
			return h.Change == "twice as many microbatches of half the size"
		})
	}
	if offered(1) || offered(3) || !offered(2) {
		t.Errorf("offered for 1, 2 and 3 rows: %v, %v, %v", offered(1), offered(2), offered(3))
	}
}
