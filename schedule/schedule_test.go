package schedule

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/diag"
)

// A failer is a test, a benchmark or a property.
type failer interface {
	Helper()
	Fatal(args ...any)
}

func mustNew(t failer, name string, shape Shape) *Schedule {
	t.Helper()
	s, err := New(name, shape)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func mustSimulate(t failer, s *Schedule, c Costs) *Timeline {
	t.Helper()
	line, err := s.Simulate(c)
	if err != nil {
		t.Fatal(err)
	}
	return line
}

// most bounds random pipelines, as the issue asks; -short makes them smaller.
func most() Shape {
	if testing.Short() {
		return Shape{12, 4, 48}
	}
	return Shape{64, 8, 512}
}

// draw gives a random schedule of the table.
func draw(t *rapid.T, limit Shape) *Schedule {
	name := rapid.SampledFrom(Names()).Draw(t, "name")
	f, _ := lookup(name)
	shape := Shape{
		Ranks:  rapid.IntRange(1, limit.Ranks).Draw(t, "ranks"),
		Micros: rapid.IntRange(1, limit.Micros).Draw(t, "micros"),
	}
	widest := limit.Virtual
	if f.most > 0 {
		widest = f.most
	}
	shape.Virtual = rapid.IntRange(f.least, max(f.least, widest)).Draw(t, "virtual")
	if f.check != nil { // interleaved wants groups
		shape.Micros = max(1, shape.Micros/shape.Ranks) * shape.Ranks
	}
	return mustNew(t, name, shape)
}

// drawCosts gives random costs, of each stage its own.
func drawCosts(t *rapid.T, stages int) Costs {
	// One draw seeds them all: rapid takes longer to draw 1,536 numbers than the simulation runs.
	source := rand.New(rand.NewPCG(1, rapid.Uint64().Draw(t, "seed")))
	most := rapid.Int64Range(0, 1000).Draw(t, "longest")
	list := func() []int64 {
		costs := make([]int64, stages)
		for i := range costs {
			costs[i] = source.Int64N(most + 1)
		}
		return costs
	}
	return Costs{list(), list(), list(), rapid.Int64Range(0, 500).Draw(t, "send")}
}

// The simulation equals the closed forms for every shape up to 9 ranks and 20 microbatches, and on
// the corner of 64 ranks and 512 microbatches.
func TestClosedForms(t *testing.T) {
	times := [][3]int64{{1, 1, 1}, {2, 3, 1}, {4, 3, 2}, {1, 2, 2}, {2, 1, 2}, {2, 2, 3}, {1, 1, 3}, {3, 0, 1}}
	proven := make(map[string]int)
	check := func(name string, shape Shape) {
		s := mustNew(t, name, shape)
		for _, c := range times {
			costs := Even(c[0], c[1], c[2])
			want, ok := s.Bubble(costs)
			if !ok {
				continue
			}
			proven[name]++
			line := mustSimulate(t, s, costs)
			work := int64(shape.Virtual*shape.Micros) * (c[0] + c[1] + c[2])
			if got := line.Makespan - work; got != want {
				t.Errorf("%s %v with %v: bubble of %d, want %d", name, shape, c, got, want)
			}
			idle, total := line.Bubble()
			if n := int64(shape.Ranks); idle != n*want || total != n*(work+want) {
				t.Errorf("%s %v with %v: %d idle of %d", name, shape, c, idle, total)
			}
		}
	}
	for _, f := range kinds {
		for ranks := 1; ranks <= 9; ranks++ {
			for micros := 1; micros <= 20; micros++ {
				for virtual := f.least; virtual <= max(f.least, min(f.most, 3)); virtual++ {
					if shape := (Shape{ranks, virtual, micros}); f.fits(shape) == nil {
						check(f.name, shape)
					}
				}
			}
		}
		if !testing.Short() {
			check(f.name, Shape{64, f.least, 512})
		}
	}
	for _, name := range Names() {
		if proven[name] < 100 {
			t.Errorf("%s: only %d closed forms were looked at", name, proven[name])
		}
	}
}

// GPipe's share is the paper's (P-1)/(M+P-1), and interleaving divides the bubble by V.
func TestShares(t *testing.T) {
	line := mustSimulate(t, mustNew(t, "gpipe", Shape{4, 1, 8}), Even(1, 1, 1))
	if idle, total := line.Bubble(); idle*(8+4-1) != total*(4-1) {
		t.Errorf("gpipe: %d of %d is not 3/11", idle, total)
	}
	for _, virtual := range []int{2, 4, 8} {
		v := int64(virtual)
		whole := mustSimulate(t, mustNew(t, "1f1b", Shape{8, 1, 32}), Even(8, 16, 8))
		parts := mustSimulate(t, mustNew(t, "interleaved", Shape{8, virtual, 32}), Even(8/v, 16/v, 8/v))
		if a, b := whole.Idle(0), v*parts.Idle(0); a != b {
			t.Errorf("with %d virtual stages the bubble is %d, not 1/%[1]d of %d", virtual, parts.Idle(0), a)
		}
	}
}

// In zb-v with equal times, no rank has a gap from 2P-1 microbatches on, and ranks begin one after
// the other.
func TestZeroBubbleVHasNoGap(t *testing.T) {
	for ranks := 1; ranks <= 16; ranks++ {
		for micros := 2*ranks - 1; micros < 2*ranks+8; micros++ {
			line := mustSimulate(t, mustNew(t, "zb-v", Shape{ranks, 2, micros}), Even(1, 1, 1))
			for rank := range ranks {
				if gap := line.Stalled(rank); gap != 0 {
					t.Errorf("%d ranks, %d microbatches: rank %d has gaps of %d", ranks, micros, rank, gap)
				}
				if first := line.Spans[rank][0].Start; first != int64(rank) {
					t.Errorf("%d ranks, %d microbatches: rank %d begins at %d", ranks, micros, rank, first)
				}
			}
		}
	}
	// The closed form holds from 2P-2 on, where the first rank's gap does not matter yet, and not
	// from 2P-3.
	s := mustNew(t, "zb-v", Shape{8, 2, 13})
	if _, ok := s.Bubble(Even(1, 1, 1)); ok || mustSimulate(t, s, Even(1, 1, 1)).Makespan == 6*13+7 {
		t.Error("zb-v needs fewer microbatches than its closed form says")
	}
}

// What ranks hold is exactly what the closed forms say, where there are enough microbatches.
func TestHolds(t *testing.T) {
	untilWeight, untilInput := Hold{[]int64{1}, []int64{1}}, Hold{[]int64{1}, []int64{0}}
	for _, name := range Names() {
		for _, shape := range []Shape{{1, 0, 1}, {1, 0, 4}, {2, 0, 8}, {4, 0, 8}, {8, 0, 16}, {8, 0, 32}} {
			s := mustNew(t, name, shape)
			for rank := range s.Ranks {
				peak, err := s.Peak(rank, untilWeight)
				if err != nil {
					t.Fatal(err)
				}
				if want, _ := s.Holds(rank); peak.Total != int64(want) {
					t.Errorf("%s %v: rank %d holds %d, want %d", name, shape, rank, peak.Total, want)
				}
				sum := 0
				for turn := range s.Virtual {
					sum += peak.Forward[turn] + peak.Input[turn]
				}
				if int64(sum) != peak.Total {
					t.Errorf("%s %v: rank %d counts %d of %d", name, shape, rank, sum, peak.Total)
				}
				if peak, err = s.Peak(rank, untilInput); err != nil {
					t.Fatal(err)
				}
				if want := min(s.Micros, s.Ranks-rank); name == "zb-h1" && peak.Total != int64(want) {
					t.Errorf("zb-h1 %v: rank %d holds %d until the input gradient, 1f1b %d",
						shape, rank, peak.Total, want)
				}
			}
		}
	}
}

// Peak adds up what each stage holds.
func TestPeakInBytes(t *testing.T) {
	s := mustNew(t, "zb-v", Shape{2, 2, 4})
	peak, err := s.Peak(0, Hold{Forward: []int64{100, 10, 10, 7}, Input: []int64{50, 5, 5, 3}})
	if err != nil {
		t.Fatal(err)
	}
	// Rank 0 has stages 0 and 3. F0.0 F0.1 F0.2 F3.0 holds three times 100 and once 7, but two
	// gradients of stage 3 later F0.3 holds four times 100.
	if peak.Total != 400 || s.Lists[0][peak.Place] != (Action{Forward, 0, 3}) ||
		!slices.Equal(peak.Forward, []int{4, 0}) || !slices.Equal(peak.Input, []int{0, 0}) {
		t.Errorf("got %+v", peak)
	}
	if _, err := s.Peak(0, Hold{}); !errors.Is(err, diag.ScheduleCosts) {
		t.Errorf("an empty Hold gives %v", err)
	}
}

// least is a time that no order of the schedule's actions can beat: a rank cannot begin before the
// first microbatch has come to it, must do its work, and, where its last action is one that others
// wait for, cannot be the last to end; and one microbatch must go through all stages and back.
func least(s *Schedule, c Costs) int64 {
	p, _ := c.prices(s.Shape)
	between := func(stage int) int64 { // the time of a transfer between stages
		if stage+1 < s.Stages() && s.Rank(stage) != s.Rank(stage+1) {
			return c.Send
		}
		return 0
	}
	split := slices.ContainsFunc(s.Lists[0], func(a Action) bool { return a.Kind == Weight })
	back := p[Backward]
	if split {
		back = p[Input]
	}
	var there, andBack, bound int64 // sums over the stages before
	for stage := range s.Stages() {
		if stage < s.Ranks { // the first stage of its rank
			var work int64
			for turn := range s.Virtual {
				of := s.Stage(s.Rank(stage), turn)
				work += int64(s.Micros) * (p[Forward][of] + p[Backward][of])
			}
			if split {
				bound = max(bound, there+work)
			} else {
				bound = max(bound, there+work+andBack)
			}
		}
		there += p[Forward][stage] + between(stage)
		andBack += back[stage] + between(stage)
	}
	last := p[Backward][0] - back[0]
	return max(bound, there+andBack+last)
}

// Every schedule up to 64 ranks, 8 virtual stages and 512 microbatches is valid, holds no more than
// it promises, and takes no less than is possible, whatever the costs.
func TestProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := draw(t, most())
		if err := s.Validate(); err != nil {
			t.Fatal(err)
		}
		costs := drawCosts(t, s.Stages())
		line := mustSimulate(t, s, costs)
		if bound := least(s, costs); line.Makespan < bound {
			t.Fatalf("takes %d, less than the %d that are possible", line.Makespan, bound)
		}
		each := rapid.Int64Range(0, 50)
		even := Even(each.Draw(t, "f"), each.Draw(t, "i"), each.Draw(t, "w"))
		if want, ok := s.Bubble(even); ok {
			if got := mustSimulate(t, s, even).Idle(0); got != want {
				t.Fatalf("with %v the bubble is %d, not %d", even, got, want)
			}
		}
		p, _ := costs.prices(s.Shape)
		for rank, list := range s.Lists {
			var now, busy int64
			for place, a := range list {
				span := line.Spans[rank][place]
				if span.Start < now || span.End-span.Start != p[a.Kind][a.Stage] {
					t.Fatalf("rank %d, place %d: %s runs from %d to %d", rank, place, a, span.Start, span.End)
				}
				now = span.End
				busy += span.End - span.Start
			}
			if busy != line.Busy[rank] || line.Stalled(rank) > line.Idle(rank) {
				t.Fatalf("rank %d: busy %d, stalled %d, idle %d", rank, line.Busy[rank],
					line.Stalled(rank), line.Idle(rank))
			}
		}
	})
}

// With equal times zero-bubble schedules are never slower than 1F1B, and with as many microbatches
// as ranks zb-h1 is not slower with any even times.
func TestZeroBubbleIsNoWorse(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := most()
		ranks := rapid.IntRange(1, limit.Ranks).Draw(t, "ranks")
		micros := rapid.IntRange(1, limit.Micros).Draw(t, "micros")
		time := func(name string, c Costs) int64 {
			return mustSimulate(t, mustNew(t, name, Shape{ranks, 0, micros}), c).Makespan
		}
		base := time("1f1b", Even(2, 2, 2))
		h1, v := time("zb-h1", Even(2, 2, 2)), time("zb-v", Even(1, 1, 1))
		if h1 > base || v > base {
			t.Fatalf("1f1b takes %d, zb-h1 %d, zb-v %d", base, h1, v)
		}
		if ranks > 1 && micros >= ranks && (h1 >= base || v >= h1) {
			t.Fatalf("1f1b takes %d, zb-h1 %d, zb-v %d: not in falling order", base, h1, v)
		}
		each := rapid.Int64Range(1, 9)
		c := Even(each.Draw(t, "forward"), each.Draw(t, "input"), each.Draw(t, "weight"))
		if a, b := time("1f1b", c), time("zb-h1", c); micros >= ranks && b > a {
			t.Fatalf("with %v, 1f1b takes %d and zb-h1 %d", c, a, b)
		}
	})
}

func TestShapesThatAreNot(t *testing.T) {
	for _, c := range []struct {
		name  string
		shape Shape
		code  diag.Code
		says  []string
	}{
		{"1f1p", Shape{2, 1, 2}, diag.ScheduleUnknown, []string{`"1f1p"`, `write "1f1b"`}},
		{"something", Shape{2, 1, 2}, diag.ScheduleUnknown, []string{"gpipe, 1f1b, interleaved, zb-h1, zb-v"}},
		{"1f1b", Shape{0, 1, 2}, diag.ScheduleShape, []string{"0 ranks", "at least 1"}},
		{"1f1b", Shape{2, 1, -1}, diag.ScheduleShape, []string{"-1 microbatches"}},
		{"1f1b", Shape{2, 2, 2}, diag.ScheduleShape, []string{"at most 1 virtual", "take interleaved"}},
		{"interleaved", Shape{4, 1, 8}, diag.ScheduleShape, []string{"at least 2 virtual", "take 1f1b"}},
		{"interleaved", Shape{4, 2, 6}, diag.ScheduleShape, []string{"groups of 4", "set 4 or 8 microbatches"}},
		{"interleaved", Shape{4, 2, 3}, diag.ScheduleShape, []string{"set 4 microbatches"}},
		{"zb-v", Shape{4, 3, 8}, diag.ScheduleShape, []string{"at most 2"}},
		{"1f1b", Shape{1 << 20, 1, 1 << 20}, diag.ScheduleShape, []string{"more than a schedule can hold"}},
		{"interleaved", Shape{1 << 26, 1 << 26, 1 << 26}, diag.ScheduleShape, []string{"more than"}},
	} {
		_, err := New(c.name, c.shape)
		if !errors.Is(err, c.code) {
			t.Errorf("%s %v: got %v, want %s", c.name, c.shape, err, c.code)
			continue
		}
		for _, text := range c.says {
			if !strings.Contains(err.Error(), text) {
				t.Errorf("%s %v: %q does not say %q", c.name, c.shape, err, text)
			}
		}
		if diag.From(err).Fix == "" {
			t.Errorf("%s %v: %q gives no fix", c.name, c.shape, err)
		}
	}
}

func TestCostsThatAreNot(t *testing.T) {
	s := mustNew(t, "1f1b", Shape{4, 1, 8})
	for name, c := range map[string]Costs{
		"no forward":    {Input: []int64{1}, Weight: []int64{1}},
		"three stages":  {Forward: []int64{1, 1, 1}, Input: []int64{1}, Weight: []int64{1}},
		"negative":      {Forward: []int64{1}, Input: []int64{1, 1, -1, 1}, Weight: []int64{1}},
		"negative send": {Forward: []int64{1}, Input: []int64{1}, Weight: []int64{1}, Send: -1},
		"too large":     Even(1<<60, 1, 1),
	} {
		if _, err := s.Simulate(c); !errors.Is(err, diag.ScheduleCosts) {
			t.Errorf("%s: got %v", name, err)
		}
		if _, err := s.Steps(c, 1); !errors.Is(err, diag.ScheduleCosts) {
			t.Errorf("%s: steps: got %v", name, err)
		}
	}
	if _, ok := s.Bubble(Costs{Forward: []int64{1, 2, 1, 1}, Input: []int64{1}, Weight: []int64{1}}); ok {
		t.Error("there is a closed form for uneven stages")
	}
	if _, ok := s.Bubble(Costs{}); ok {
		t.Error("there is a closed form for no costs")
	}
}

// Rank and stage are inverse in both layouts, and neighbours in a vee share a rank at its turns.
func TestLayouts(t *testing.T) {
	for _, layout := range []Layout{Loop, Vee} {
		s := &Schedule{Layout: layout, Shape: Shape{5, 4, 1}}
		for rank := range s.Ranks {
			for turn := range s.Virtual {
				if got := s.Rank(s.Stage(rank, turn)); got != rank {
					t.Errorf("%s: turn %d of rank %d is on rank %d", layout, turn, rank, got)
				}
			}
		}
		if same := s.Rank(4) == s.Rank(5); same != (layout == Vee) {
			t.Errorf("%s: stages 4 and 5 are on ranks %d and %d", layout, s.Rank(4), s.Rank(5))
		}
	}
}

func ExampleNew() {
	s, err := New("1f1b", Shape{Ranks: 2, Micros: 3})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Print(s)
	// Output:
	// schedule 1f1b: 2 ranks, 1 virtual, 3 microbatches, loop
	// 0: F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
	// 1: F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
}

// A rank costs the same in every row, 24 ticks per microbatch, however its layers are split.
func ExampleSchedule_Simulate() {
	for _, name := range Names() {
		s, err := New(name, Shape{Ranks: 8, Micros: 32})
		if err != nil {
			fmt.Println(err)
			return
		}
		part := int64(8 / s.Virtual)
		line, err := s.Simulate(Even(part, part, part))
		if err != nil {
			fmt.Println(err)
			return
		}
		peak, _ := s.Peak(0, Hold{Forward: []int64{part}, Input: []int64{part}})
		fmt.Printf("%-12s %3d ticks, %4.1f %% idle, first rank holds %4.1f microbatches\n",
			name, line.Makespan, 100*line.Share(), float64(peak.Total)/8)
	}
	// Output:
	// gpipe        936 ticks, 17.9 % idle, first rank holds 32.0 microbatches
	// 1f1b         936 ticks, 17.9 % idle, first rank holds  8.0 microbatches
	// interleaved  852 ticks,  9.9 % idle, first rank holds 11.5 microbatches
	// zb-h1        824 ticks,  6.8 % idle, first rank holds  8.0 microbatches
	// zb-v         796 ticks,  3.5 % idle, first rank holds  8.0 microbatches
}

func BenchmarkPipeline(b *testing.B) {
	for _, name := range Names() {
		shape := Shape{64, 0, 512}
		if name == "interleaved" {
			shape.Virtual = 8
		}
		b.Run(name, func(b *testing.B) {
			b.Run("new", func(b *testing.B) {
				for b.Loop() {
					mustNew(b, name, shape)
				}
			})
			s := mustNew(b, name, shape)
			b.Run("validate", func(b *testing.B) {
				for b.Loop() {
					if err := s.Validate(); err != nil {
						b.Fatal(err)
					}
				}
			})
			b.Run("simulate", func(b *testing.B) {
				for b.Loop() {
					mustSimulate(b, s, Even(1, 1, 1))
				}
			})
			b.Run("steps", func(b *testing.B) {
				for b.Loop() {
					mustSteps(b, s, Even(1, 1, 1), 1)
				}
			})
		})
	}
}
