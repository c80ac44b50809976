package schedule

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
)

// An Op is what a step does.
type Op uint8

// The ops.
const (
	Compute Op = iota // run the action
	Send              // give the action's result to the peer
	Receive           // take the action's result from the peer, which has run it
)

// A Step is an action, or one end of a transfer: the activation that a forward gives to the next
// stage, or the gradient that a backward or an input gradient gives to the stage before.
type Step struct {
	Op     Op
	Action Action
	Peer   int // the rank at the other end of a transfer
}

// String gives a step as F0.1, or as F0.1>2 if it is sent to rank 2, or F0.1<2 if it comes from it.
func (s Step) String() string {
	switch s.Op {
	case Send:
		return fmt.Sprintf("%s>%d", s.Action, s.Peer)
	case Receive:
		return fmt.Sprintf("%s<%d", s.Action, s.Peer)
	default:
		return s.Action.String()
	}
}

// Steps puts the transfers between the actions, for each rank. Stages on one rank need none.
//
// The steps cannot deadlock, whatever the actions really take, if for each ordered pair of ranks
// there is a channel that keeps the order and has room for capacity results that were sent and not
// received; with a capacity of 0 both ends must meet, as in a collective. Costs tell when a result
// is expected: each is sent at once, and received as late as the channel allows, so that a rank
// does not wait for what it does not need yet. All ranks must be given the same costs and capacity.
//
// Why there is no deadlock: each step has a moment in one imagined run, in which every action takes
// at least one tick. A step comes after all that it needs: an action after its own receive, a
// receive after its send, and the n-th send on a channel after the receive that makes room for it.
// Each rank's steps are in the order of these moments. So, of all steps that are not done, the
// earliest can always be done.
func (s *Schedule) Steps(c Costs, capacity int) ([][]Step, error) {
	if capacity < 0 {
		return nil, diag.New(diag.ScheduleCosts, "a channel cannot hold %d results", capacity).
			Try("give 0 if both ends must meet, or more")
	}
	t, err := s.Simulate(c.atLeastOne())
	if err != nil {
		return nil, err
	}
	arriving := s.transfers(t, capacity)
	steps := make([][]Step, s.Ranks)
	for rank := range steps {
		steps[rank] = s.merge(rank, t.Spans[rank], arriving[rank])
	}
	return steps, nil
}

// atLeastOne replaces costs of nothing, so that no two actions of a rank begin at the same moment.
func (c Costs) atLeastOne() Costs {
	for _, list := range []*[]int64{&c.Forward, &c.Input, &c.Weight} {
		*list = slices.Clone(*list)
		for i, t := range *list {
			if t == 0 {
				(*list)[i] = 1
			}
		}
	}
	return c
}

// A moment orders steps in the imagined run. There are four to a tick: sends come first, then
// receives, then the actions that begin at the tick; the last is for receives that must make room
// for a send of the next tick.
type moment int64

func sendAt(end int64) moment       { return moment(4 * end) }
func receiveFor(start int64) moment { return moment(4*start + 1) }
func beginAt(start int64) moment    { return moment(4*start + 2) }
func makeRoom(send moment) moment   { return send - 1 }

// A transfer is the result of an action on its way to another rank.
type transfer struct {
	action  Action
	from    int
	sent    moment
	receive moment
}

// transfers gives, by receiving rank, what it receives, in the order in which it should.
func (s *Schedule) transfers(t *Timeline, capacity int) [][]transfer {
	starts := results[int64](s)
	for rank, list := range s.Lists {
		for place, a := range list {
			if a.Kind != Weight {
				*starts(a) = t.Spans[rank][place].Start
			}
		}
	}
	arriving := make([][]transfer, s.Ranks)
	channels := make(map[int][]transfer) // by receiver, for one sender at a time
	for from, list := range s.Lists {
		clear(channels)
		for place, a := range list {
			stage := s.feeds(a)
			if stage < 0 || s.Rank(stage) == from {
				continue
			}
			to := s.Rank(stage)
			user := Action{a.Kind, stage, a.Microbatch}
			channels[to] = append(channels[to], transfer{a, from,
				sendAt(t.Spans[from][place].End), receiveFor(*starts(user))})
		}
		for to, channel := range channels {
			hurry(channel, capacity)
			arriving[to] = append(arriving[to], channel...)
		}
	}
	for _, list := range arriving {
		lists.Sort(list, func(a, b transfer) int {
			return cmp.Or(cmp.Compare(a.receive, b.receive), cmp.Compare(a.from, b.from),
				cmp.Compare(a.sent, b.sent))
		})
	}
	return arriving
}

// hurry moves the receives of one channel forward until they are in the order of the sends and the
// channel never holds more than it can.
func hurry(channel []transfer, capacity int) {
	next := moment(math.MaxInt64)
	for i := len(channel) - 1; i >= 0; i-- {
		x := &channel[i]
		x.receive = min(x.receive, next)
		switch full := i + capacity; {
		case capacity == 0:
			x.receive = x.sent
		case full < len(channel):
			x.receive = min(x.receive, makeRoom(channel[full].sent))
		}
		next = x.receive
	}
}

// merge puts a rank's receives between its actions and their sends.
func (s *Schedule) merge(rank int, spans []Span, arriving []transfer) []Step {
	list := s.Lists[rank]
	steps := make([]Step, 0, 2*len(list)+len(arriving))
	// receive adds what comes before one of the rank's own steps. Only where both ends meet can two
	// transfers have the same moment; then the lower sender goes first on both ranks.
	receive := func(until moment) {
		for len(arriving) > 0 {
			x := arriving[0]
			if cmp.Or(cmp.Compare(x.receive, until), cmp.Compare(x.from, rank)) > 0 {
				return
			}
			steps = append(steps, Step{Receive, x.action, x.from})
			arriving = arriving[1:]
		}
	}
	for place, a := range list {
		receive(beginAt(spans[place].Start))
		steps = append(steps, Step{Compute, a, rank})
		if to := s.feeds(a); to >= 0 && s.Rank(to) != rank {
			receive(sendAt(spans[place].End))
			steps = append(steps, Step{Send, a, s.Rank(to)})
		}
	}
	return steps
}
