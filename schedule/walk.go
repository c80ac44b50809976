package schedule

import (
	"iter"
	"math"
	"slices"
	"sync"

	"github.com/deepwell/deepwell/internal/lists"
)

// actions counts the actions of all lists.
func (s *Schedule) actions() int {
	return lists.Sum(s.Lists, func(l []Action) int { return len(l) })
}

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
	o := &Order{Ranks: s.Ranks, Visits: make([]Visit, 0, s.actions())}
	at := results[int32](s) // where they stand in the order, from 1 on; 0 is not yet
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
				needs := *at(from)
				if needs == 0 {
					waits[rank] = true
					break
				}
				v.Needs, v.Far = needs-1, rankOf[from.Stage] != rank
			}
			o.Visits = append(o.Visits, v)
			if a.Kind == Weight {
				continue
			}
			*at(a) = int32(len(o.Visits))
			if to := s.feeds(a); to >= 0 {
				o.Visits[len(o.Visits)-1].Sends = rankOf[to] != rank
				if waits[rankOf[to]] {
					waits[rankOf[to]] = false
					ready = append(ready, rankOf[to])
				}
			}
		}
	}
	for rank, at := range place {
		if at < len(s.Lists[rank]) {
			return nil, s.stuck(rank, place)
		}
	}
	return o, nil
}

// Times are the start and the end of one visit.
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
	p.reset(o)
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

// Makespan is Play when only the end is wanted. An action takes cost[kind][stage], and a result
// takes send to reach another rank.
func (p *Player[T]) Makespan(o *Order, cost *[len(letters)][]T, send T) (makespan T) {
	p.reset(o)
	for i := range o.Visits {
		v := &o.Visits[i]
		end := p.free[v.Rank]
		if v.Needs >= 0 {
			arrived := p.done[v.Needs]
			if v.Far {
				arrived += send
			}
			end = max(end, arrived)
		}
		end += cost[v.Kind][v.Stage]
		p.free[v.Rank], p.done[i] = end, end
		makespan = max(makespan, end)
	}
	return makespan
}

// reset makes room for an order.
func (p *Player[T]) reset(o *Order) {
	if n := len(o.Visits); len(p.done) < n {
		p.done, p.arrived = make([]T, n), make([]T, n)
	}
	if len(p.free) < o.Ranks {
		p.free = make([]T, o.Ranks)
	}
	clear(p.free)
}

// InFlight counts the microbatches that a rank holds for their gradients, by its turns: those
// between forward and input gradient, and those between input gradient and weight gradient.
type InFlight struct{ Forward, Input []int }

// InFlight walks the list of a rank: for every index, what the rank has in flight before the
// action. It depends only on the order of actions, not on their times. The counts are valid until
// the next index, and after the loop they are the final ones. The schedule must be valid.
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

// A Load is what the microbatches of one virtual stage hold on each of its devices, in bytes.
type Load struct {
	Residuals int64 // by one microbatch, from its forward pass to the gradient of its input
	Handed    int64 // bytes of one microbatch that dgrad passes to wgrad
	// Passing is, by kind of action, what arrives for the action, or leaves it, and is in neither of
	// the two while the action runs; Temp is what its program needs besides.
	Passing, Temp [len(letters)]int64
}

// Steady is the load of a stage whose microbatches hold the same from the start of their forward
// pass until all their gradients are there, and whose programs all need as much besides.
func Steady(kept, temp int64) Load {
	l := Load{Residuals: kept, Handed: kept, Temp: [...]int64{temp, temp, temp, temp}}
	l.Passing[Forward] = kept
	return l
}

// Most is a load that no other exceeds.
func Most() (l Load) {
	l.Residuals, l.Handed = math.MaxInt64, math.MaxInt64
	for i := range l.Passing {
		l.Passing[i], l.Temp[i] = math.MaxInt64, math.MaxInt64
	}
	return l
}

// Lower takes the minimum of two loads, item by item.
func (l *Load) Lower(o *Load) {
	l.Residuals, l.Handed = min(l.Residuals, o.Residuals), min(l.Handed, o.Handed)
	for i := range l.Passing {
		l.Passing[i], l.Temp[i] = min(l.Passing[i], o.Passing[i]), min(l.Temp[i], o.Temp[i])
	}
}

// Bytes adds up the microbatches in flight. stages are the rank's, loads their loads; kind maps a
// stage to its load, and is nil if each has its own.
func (h *InFlight) Bytes(stages, kind []int, loads []Load) (n int64) {
	for turn := range h.Forward {
		at := stages[turn]
		if kind != nil {
			at = kind[at]
		}
		n += int64(h.Forward[turn])*loads[at].Residuals + int64(h.Input[turn])*loads[at].Handed
	}
	return n
}

// Of lists the virtual stages of a rank.
func (s *Schedule) Of(rank int) []int {
	list := make([]int, s.Virtual)
	for turn := range list {
		list[turn] = s.Stage(rank, turn)
	}
	return list
}

// A Moment is an action of a rank, and what the rank holds before it.
type Moment struct {
	Kind  Kind
	Stage int
	InFlight
}

// A Walk is the moments of each rank at which it may hold most, whatever its loads are: for each
// program of a rank, those at which it holds no less of anything than at any other.
type Walk struct {
	Stages [][]int // of each rank, in order
	Split  bool    // gradients of inputs and weights are apart
	ranks  [][]Moment
	// even are the moments of a rank whose stages are alike: then it does not matter which of them
	// holds a microbatch, and all are counted as the first.
	even [][]Moment
	less []bool // of a rank: it holds no more than the one before it
}

// Walk goes through all lists.
func (s *Schedule) Walk() *Walk {
	w := &Walk{Stages: make([][]int, s.Ranks), ranks: make([][]Moment, s.Ranks),
		even: make([][]Moment, s.Ranks)}
	joined := &Moment{InFlight: InFlight{make([]int, 1), make([]int, 1)}}
	each, even := make(frontier, len(letters)*s.Virtual), make(frontier, len(letters))
	for rank := range s.Lists {
		w.Stages[rank] = s.Of(rank)
		for place, held := range s.InFlight(rank) {
			a := s.Lists[rank][place]
			m := &Moment{a.Kind, a.Stage, *held}
			each.add(int(a.Kind)*s.Virtual+a.Stage/s.Ranks, place, m)
			m.join(joined, w.Stages[rank][0])
			even.add(int(a.Kind), place, joined)
			w.Split = w.Split || a.Kind == Input
		}
		w.ranks[rank], w.even[rank] = each.take(), even.take()
		w.less = append(w.less, rank > 0 && w.covers(rank-1, rank))
	}
	return w
}

// Peak gives the moment at which a rank holds most: arrays of microbatches, and what the program
// needs besides that runs then. Loads and kind are as for [InFlight.Bytes].
func (w *Walk) Peak(rank int, kind []int, loads []Load) (at *Moment, activations, temp int64) {
	list, stages := w.ranks[rank], w.Stages[rank]
	if kind != nil && !slices.ContainsFunc(stages, func(k int) bool {
		return kind[k] != kind[stages[0]]
	}) {
		list, stages = w.even[rank], stages[:1]
	}
	for i := range list {
		m := &list[i]
		of := m.Stage
		if kind != nil {
			of = kind[of]
		}
		running := &loads[of]
		a, t := m.Bytes(stages, kind, loads)+running.Passing[m.Kind], running.Temp[m.Kind]
		if at == nil || a+t > activations+temp {
			at, activations, temp = m, a, t
		}
	}
	return at, activations, temp
}

// covers tells whether a rank never needs less than another that has the same parts of a model,
// turn by turn.
func (w *Walk) covers(rank, other int) bool {
	for i := range w.ranks[other] {
		m := w.ranks[other][i]
		m.Stage = w.Stages[rank][slices.Index(w.Stages[other], m.Stage)]
		if !slices.ContainsFunc(w.ranks[rank], func(o Moment) bool { return o.covers(&m) }) {
			return false
		}
	}
	return true
}

// Follows tells whether a rank never needs more than the one before it: the kinds of their stages
// are the same, turn by turn, and so are the moments, with no more microbatches.
func (w *Walk) Follows(rank int, kind []int) bool {
	if rank == 0 || !w.less[rank] {
		return false
	}
	for turn, k := range w.Stages[rank] {
		if kind[k] != kind[w.Stages[rank-1][turn]] {
			return false
		}
	}
	return true
}

// A frontier is the moments of a rank that no other covers, by program, each with its place.
type frontier [][]placed

type placed struct {
	Moment
	place int
}

// add adds a moment of a program, unless one that is there covers it, and takes out those that it
// covers.
func (f frontier) add(program, place int, m *Moment) {
	list := f[program]
	if slices.ContainsFunc(list, func(o placed) bool { return o.covers(m) }) {
		return
	}
	kept := list[:0]
	var room InFlight // of one that is taken out
	for _, o := range list {
		if m.covers(&o.Moment) {
			room = o.InFlight
			continue
		}
		kept = append(kept, o)
	}
	m = &Moment{m.Kind, m.Stage, InFlight{append(room.Forward[:0], m.Forward...),
		append(room.Input[:0], m.Input...)}}
	f[program] = append(kept, placed{*m, place})
}

// take gives all moments in the order of their places, and leaves none.
func (f frontier) take() []Moment {
	all := slices.Concat(f...)
	clear(f)
	lists.Sort(all, func(a, b placed) int { return a.place - b.place })
	return lists.Map(all, func(p placed) Moment { return p.Moment })
}

// join counts all stages of the rank as the one that is given.
func (m *Moment) join(into *Moment, stage int) {
	into.Kind, into.Stage, into.Forward[0], into.Input[0] = m.Kind, stage, 0, 0
	for turn := range m.Forward {
		into.Forward[0] += m.Forward[turn]
		into.Input[0] += m.Input[turn]
	}
}

// covers tells whether a moment of the same program needs no less, whatever microbatches hold.
func (m *Moment) covers(o *Moment) bool {
	if m.Kind != o.Kind || m.Stage != o.Stage {
		return false
	}
	for turn := range m.Forward {
		if m.Forward[turn] < o.Forward[turn] || m.Input[turn] < o.Input[turn] {
			return false
		}
	}
	return true
}

// Walks keeps the walks that were made, each once; many may ask at the same time.
type Walks struct {
	mu   sync.Mutex
	made map[key]*Walk
}

type key struct {
	name string
	Shape
}

// enough is how many microbatches for each rank show what is held at most: what comes after
// repeats. GPipe holds all that there are.
const enough = 2

// Of gives the walk of a schedule.
func (w *Walks) Of(name string, shape Shape) (*Walk, error) {
	if name != "gpipe" {
		shape.Micros = min(shape.Micros, enough*shape.Ranks)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if walk := w.made[key{name, shape}]; walk != nil {
		return walk, nil
	}
	s, err := New(name, shape)
	if err != nil {
		return nil, err
	}
	if w.made == nil {
		w.made = map[key]*Walk{}
	}
	w.made[key{name, shape}] = s.Walk()
	return w.made[key{name, shape}], nil
}
