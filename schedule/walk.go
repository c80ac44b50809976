package schedule

import "iter"

// A Visit is one action of an [Order].
type Visit struct {
	Rank, Place int32 // the action is Lists[Rank][Place]
	Stage       int32
	Needs       int32 // the visit in another stage whose result it waits for; -1 if none
	Kind        Kind
	Far         bool // that one runs on another rank
	Sends       bool // its own result goes to another rank
}

// An Order is every action of a schedule, each after all that it waits for. It is made once for a
// shape; [Player.Play] then gives it times in one pass. Where results travel and what ranks wait
// for is known here and in the runtime, and nowhere else.
type Order struct {
	Ranks  int
	Visits []Visit
}

// Order puts the actions in order: each rank in the order of its list, and the first rank that can
// go on goes first. There is an error if the lists are not well formed, or if ranks wait for each
// other. An action is looked at once, and once more if its rank had to wait, so that the work grows
// with the number of actions alone.
func (s *Schedule) Order() (*Order, error) {
	if err := s.wellFormed(); err != nil {
		return nil, err
	}
	rankOf := make([]int, s.Stages())
	for stage := range rankOf {
		rankOf[stage] = s.Rank(stage)
	}
	total := 0
	for _, list := range s.Lists {
		total += len(list)
	}
	o := &Order{Ranks: s.Ranks, Visits: make([]Visit, 0, total)}
	at := s.newClock() // where results stand in the order
	place := make([]int, s.Ranks)
	waits := make([]bool, s.Ranks)
	ready := make([]int, s.Ranks)
	for i := range ready {
		ready[i] = s.Ranks - 1 - i // a stack, so that the first rank goes first
	}
	for len(ready) > 0 {
		rank := ready[len(ready)-1]
		ready = ready[:len(ready)-1]
		for list := s.Lists[rank]; place[rank] < len(list); place[rank]++ {
			a := list[place[rank]]
			v := Visit{Rank: int32(rank), Place: int32(place[rank]), Stage: int32(a.Stage), Needs: -1,
				Kind: a.Kind}
			if from, ok := s.needs(a); ok {
				needs := *at.of(from)
				if needs < 0 {
					waits[rank] = true
					break
				}
				v.Needs, v.Far = int32(needs), rankOf[from.Stage] != rank
			}
			if a.Kind != Weight {
				*at.of(a) = int64(len(o.Visits))
			}
			if to := s.feeds(a); to >= 0 {
				v.Sends = rankOf[to] != rank
				if waits[rankOf[to]] {
					waits[rankOf[to]] = false
					ready = append(ready, rankOf[to])
				}
			}
			o.Visits = append(o.Visits, v)
		}
	}
	for rank, at := range place {
		if at < len(s.Lists[rank]) {
			return nil, s.stuck(rank, place)
		}
	}
	return o, nil
}

// Times are those of one visit.
type Times[T int64 | float64] struct {
	Free       T // when the rank could work again
	Done       T // when what the action waits for was computed; 0 if it waits for nothing
	Arrived    T // when that was on the action's rank
	Start, End T
}

// A Player gives the actions of an order their times: each starts as soon as its rank is free and
// what it waits for has arrived. It keeps its memory from one Play to the next.
type Player[T int64 | float64] struct{ done, arrived, free []T }

// Play goes through an order and returns when the last action ends. Cost is how long an action
// takes; sent is when the result of an action that ended is on the other rank that waits for it;
// tell, if it is not nil, hears of every action in the order's turn.
func (p *Player[T]) Play(o *Order, cost func(*Visit) T, sent func(v *Visit, end T) T,
	tell func(*Visit, Times[T])) (makespan T) {
	if n := len(o.Visits); len(p.done) < n {
		p.done, p.arrived = make([]T, n), make([]T, n)
	}
	if len(p.free) < o.Ranks {
		p.free = make([]T, o.Ranks)
	}
	clear(p.free)
	for i := range o.Visits {
		v := &o.Visits[i]
		t := Times[T]{Free: p.free[v.Rank]}
		if v.Needs >= 0 {
			t.Done = p.done[v.Needs]
			t.Arrived = t.Done
			if v.Far {
				t.Arrived = p.arrived[v.Needs]
			}
		}
		t.Start = max(t.Free, t.Arrived)
		t.End = t.Start + cost(v)
		p.free[v.Rank], p.done[i] = t.End, t.End
		if v.Sends {
			p.arrived[i] = sent(v, t.End)
		}
		makespan = max(makespan, t.End)
		if tell != nil {
			tell(v, t)
		}
	}
	return makespan
}

// InFlight counts the microbatches that a rank holds for their gradients, by its turns: those
// between forward and input gradient, and those between input gradient and weight gradient.
type InFlight struct{ Forward, Input []int }

// InFlight goes through the list of a rank: for every place, what the rank holds before the action.
// It depends on the order of the actions alone, not on their times. The counts are valid until the
// next place, and after the loop they are those of the end. The schedule must be valid.
func (s *Schedule) InFlight(rank int) iter.Seq2[int, *InFlight] {
	return func(yield func(int, *InFlight) bool) {
		held := &InFlight{make([]int, s.Virtual), make([]int, s.Virtual)}
		for place, a := range s.Lists[rank] {
			if !yield(place, held) {
				return
			}
			held.after(a.Kind, a.Stage/s.Ranks)
		}
	}
}

// after is the one place that says what an action takes and leaves.
func (h *InFlight) after(k Kind, turn int) {
	switch k {
	case Forward:
		h.Forward[turn]++
	case Backward:
		h.Forward[turn]--
	case Input:
		h.Forward[turn]--
		h.Input[turn]++
	case Weight:
		h.Input[turn]--
	}
}

// A Hold is what a microbatch keeps on its rank for the gradients, by virtual stage: one entry for
// each, or a single one for all. The unit is the caller's, for instance bytes.
type Hold struct {
	Forward []int64 // from the forward to the input gradient
	Input   []int64 // from the input gradient to the weight gradient
}

// A Peak is the moment at which a rank holds most.
type Peak struct {
	Total int64 // what it holds then
	Place int   // the place in its list at which it comes to hold that much
	// Forward and Input count the microbatches that are held, by the rank's turns: those that wait
	// for their input gradient, and those that only wait for their weight gradient.
	Forward, Input []int
}

// Peak finds the moment at which a rank holds most. The schedule must be valid.
func (s *Schedule) Peak(rank int, h Hold) (Peak, error) {
	forward, err := spread("what is held after the forward", h.Forward, s.Stages())
	if err != nil {
		return Peak{}, err
	}
	input, err := spread("what is held after the input gradient", h.Input, s.Stages())
	if err != nil {
		return Peak{}, err
	}
	peak := Peak{Forward: make([]int, s.Virtual), Input: make([]int, s.Virtual)}
	// A rank that has done its last action holds nothing, so that looking before actions is enough.
	for place, held := range s.InFlight(rank) {
		total := int64(0)
		for turn := range s.Virtual {
			stage := s.Stage(rank, turn)
			total += int64(held.Forward[turn])*forward[stage] + int64(held.Input[turn])*input[stage]
		}
		if total > peak.Total {
			peak.Total, peak.Place = total, place-1
			copy(peak.Forward, held.Forward)
			copy(peak.Input, held.Input)
		}
	}
	return peak, nil
}
