package schedule

import (
	"fmt"
	"slices"
	"sync"
	"testing"

	"pgregory.net/rapid"
)

// pair is a channel from one rank to another.
type pair struct{ from, to int }

// play runs steps on blocking channels of that capacity, with the times of costs, and returns the
// time of the last step, or an error that names who is stuck. A negative capacity is unbounded.
func play(s *Schedule, steps [][]Step, capacity int, c Costs) (int64, error) {
	prices, err := c.prices(s.Shape)
	if err != nil {
		return 0, err
	}
	type message struct {
		action Action
		sent   int64
	}
	sent, received := make(map[pair][]message), make(map[pair][]int64)
	now, place := make([]int64, s.Ranks), make([]int, s.Ranks)
	// step does the next step of a rank, if it can be done.
	step := func(rank int) (bool, error) {
		x := steps[rank][place[rank]]
		switch x.Op {
		case Compute:
			now[rank] += prices[x.Action.Kind][x.Action.Stage]
		case Send:
			link := pair{rank, x.Peer}
			n := len(sent[link])
			switch {
			case capacity == 0: // both ends must meet
				if place[x.Peer] == len(steps[x.Peer]) {
					return false, fmt.Errorf("rank %d sends %s to a rank that is done", rank, x.Action)
				}
				if y := steps[x.Peer][place[x.Peer]]; y.Op != Receive || y.Peer != rank {
					return false, nil
				}
				now[rank] = max(now[rank], now[x.Peer])
			case capacity > 0 && n >= capacity:
				if len(received[link]) <= n-capacity {
					return false, nil
				}
				now[rank] = max(now[rank], received[link][n-capacity])
			}
			sent[link] = append(sent[link], message{x.Action, now[rank]})
		case Receive:
			link := pair{x.Peer, rank}
			n := len(received[link])
			if n >= len(sent[link]) {
				return false, nil
			}
			m := sent[link][n]
			if m.action != x.Action {
				return false, fmt.Errorf("rank %d receives %s, not %s", rank, m.action, x.Action)
			}
			now[rank] = max(now[rank], m.sent+c.Send)
			received[link] = append(received[link], now[rank])
		}
		place[rank]++
		return true, nil
	}
	for moved := true; moved; {
		moved = false
		for rank := range steps {
			for place[rank] < len(steps[rank]) {
				ok, err := step(rank)
				if err != nil {
					return 0, err
				}
				if !ok {
					break
				}
				moved = true
			}
		}
	}
	for rank := range steps {
		if place[rank] < len(steps[rank]) {
			return 0, fmt.Errorf("rank %d is stuck at %s", rank, steps[rank][place[rank]])
		}
	}
	return slices.Max(now), nil
}

func mustSteps(t failer, s *Schedule, c Costs, capacity int) [][]Step {
	t.Helper()
	steps, err := s.Steps(c, capacity)
	if err != nil {
		t.Fatal(err)
	}
	return steps
}

// Steps cannot deadlock on channels of the capacity that they were made for, or a larger one, even
// if the actions take other times than expected; and they hold exactly the schedule.
func TestStepsCannotDeadlock(t *testing.T) {
	limit := Shape{16, 4, 64}
	if testing.Short() {
		limit = small
	}
	rapid.Check(t, func(t *rapid.T) {
		s := draw(t, limit)
		expected, real := drawCosts(t, s.Stages()), drawCosts(t, s.Stages())
		capacity := rapid.IntRange(0, 3).Draw(t, "capacity")
		steps := mustSteps(t, s, expected, capacity)
		for _, actual := range []int{capacity, capacity + 1, -1} {
			if _, err := play(s, steps, actual, real); err != nil {
				t.Fatalf("made for %d, run with %d: %v", capacity, actual, err)
			}
		}
		for rank, list := range steps {
			var computed []Action
			has := make(map[Action]bool)
			for _, x := range list {
				switch x.Op {
				case Receive:
					has[x.Action] = true
				case Compute:
					if from, ok := s.needs(x.Action); ok && s.Rank(from.Stage) != rank {
						if alt := (Action{Backward, from.Stage, from.Microbatch}); !has[from] && !has[alt] {
							t.Fatalf("rank %d runs %s before %s is there", rank, x.Action, from)
						}
					}
					computed = append(computed, x.Action)
				}
			}
			if !slices.Equal(computed, s.Lists[rank]) {
				t.Fatalf("rank %d computes %v", rank, computed)
			}
		}
	})
}

// With room for everything, blocking sends and receives cost nothing: the steps take exactly the
// time of the simulation, as long as the costs are those that were expected.
func TestStepsTakeTheTimeOfTheSimulation(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := draw(t, small)
		costs := drawCosts(t, s.Stages()).atLeastOne()
		steps := mustSteps(t, s, costs, maxActions)
		want := mustSimulate(t, s, costs).Makespan
		if got, err := play(s, steps, -1, costs); err != nil || got != want {
			t.Fatalf("takes %d, want %d (%v)", got, want, err)
		}
	})
}

// One result in flight on each channel is enough: with equal times, for which zb-v is made,
// published schedules then take the time of the simulation too.
func TestOneInFlightIsEnough(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := draw(t, small)
		costs := Even(3, 3, 3)
		costs.Send = rapid.Int64Range(0, 2).Draw(t, "send")
		want := mustSimulate(t, s, costs).Makespan
		if got, err := play(s, mustSteps(t, s, costs, 1), 1, costs); err != nil || got != want {
			t.Fatalf("%s%v takes %d, want %d (%v)", s, costs, got, want, err)
		}
	})
}

// The player finds deadlocks: received as late as can be, 1F1B stops where both ends must meet.
func TestLateReceivesDeadlock(t *testing.T) {
	s := mustNew(t, "1f1b", Shape{4, 1, 8})
	late := mustSteps(t, s, Even(1, 1, 1), maxActions)
	if _, err := play(s, late, 0, Even(1, 1, 1)); err == nil {
		t.Error("steps made for large channels run without any")
	}
	swapped := mustSteps(t, s, Even(1, 1, 1), 1)
	i := slices.IndexFunc(swapped[0], func(x Step) bool { return x.Op == Send })
	swapped[0][i], swapped[0][i+1] = swapped[0][i+1], swapped[0][i]
	swapped[0][i], swapped[0][i+2] = swapped[0][i+2], swapped[0][i]
	if _, err := play(s, swapped, 1, Even(1, 1, 1)); err == nil {
		t.Error("two sends in the wrong order are not found")
	}
}

// What the runtime does with steps, with goroutines for ranks and Go's channels for links.
func TestStepsOnGoroutines(t *testing.T) {
	for _, name := range Names() {
		for capacity := range 3 {
			s := mustNew(t, name, Shape{4, 0, 8})
			steps := mustSteps(t, s, Even(1, 1, 1), capacity)
			links := make(map[pair]chan Action)
			for rank, list := range steps {
				for _, x := range list {
					if link := (pair{rank, x.Peer}); x.Op == Send && links[link] == nil {
						links[link] = make(chan Action, capacity)
					}
				}
			}
			var ranks sync.WaitGroup
			for rank, list := range steps {
				ranks.Go(func() {
					for _, x := range list {
						switch x.Op {
						case Send:
							links[pair{rank, x.Peer}] <- x.Action
						case Receive:
							if got := <-links[pair{x.Peer, rank}]; got != x.Action {
								t.Errorf("%s: rank %d got %s, not %s", name, rank, got, x.Action)
							}
						}
					}
				})
			}
			ranks.Wait()
		}
	}
}

func TestStepsOfOneRank(t *testing.T) {
	s := mustNew(t, "zb-v", Shape{1, 2, 2})
	for _, x := range mustSteps(t, s, Even(0, 0, 0), 0)[0] {
		if x.Op != Compute {
			t.Errorf("%s between stages of one rank", x)
		}
	}
	if _, err := s.Steps(Even(1, 1, 1), -1); err == nil {
		t.Error("a negative capacity is taken")
	}
}

func ExampleSchedule_Steps() {
	s, err := New("1f1b", Shape{Ranks: 2, Micros: 2})
	if err != nil {
		fmt.Println(err)
		return
	}
	steps, err := s.Steps(Even(1, 1, 1), 1)
	if err != nil {
		fmt.Println(err)
		return
	}
	for rank, list := range steps {
		fmt.Println(rank, list)
	}
	// Output:
	// 0 [F0.0 F0.0>1 F0.1 F0.1>1 B1.0<1 B0.0 B1.1<1 B0.1]
	// 1 [F0.0<0 F1.0 B1.0 B1.0>0 F0.1<0 F1.1 B1.1 B1.1>0]
}
