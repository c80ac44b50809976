package schedule

// The closed forms that authors of schedules give, and the figures of a simulation that they are
// held against. Nothing but tests asks for them.

// bubbles returns, by schedule, the time of a step less the work of one rank, and whether a closed
// form exists for these times. For interleaved the times are of a virtual stage, 1/V of a rank's.
var bubbles = map[string]func(shape Shape, c unit) (int64, bool){"gpipe": flush, "1f1b": flush,
	"interleaved": flush, "zb-h1": zeroBubbleH1Bubble, "zb-v": zeroBubbleVBubble}

// A unit is the costs of one stage where all cost the same.
type unit struct{ forward, input, weight int64 }

func (c Costs) unit() (unit, bool) {
	if c.Send != 0 {
		return unit{}, false
	}
	for _, list := range [][]int64{c.Forward, c.Input, c.Weight} {
		if len(list) == 0 {
			return unit{}, false
		}
		for _, t := range list {
			if t != list[0] {
				return unit{}, false
			}
		}
	}
	return unit{c.Forward[0], c.Input[0], c.Weight[0]}, true
}

// Bubble is the time that ranks are idle in the step, as an exact share: idle of total ticks,
// summed over ranks.
func (t *Timeline) Bubble() (idle, total int64) {
	total = t.Makespan * int64(len(t.Busy))
	idle = total
	for _, busy := range t.Busy {
		idle -= busy
	}
	return idle, total
}

// Share is [Timeline.Bubble] as a number from 0 to 1.
func (t *Timeline) Share() float64 {
	idle, total := t.Bubble()
	if total == 0 {
		return 0
	}
	return float64(idle) / float64(total)
}

// Idle is the time that a rank is idle in the step.
func (t *Timeline) Idle(rank int) int64 { return t.Makespan - t.Busy[rank] }

// Stalled is the time that a rank is idle between its own first and last action. The papers on
// zero bubbles count this and not [Timeline.Idle]: they let a rank begin the next step while others
// are still in this one.
func (t *Timeline) Stalled(rank int) int64 {
	spans := t.Spans[rank]
	if len(spans) == 0 {
		return 0
	}
	return spans[len(spans)-1].End - spans[0].Start - t.Busy[rank]
}

// Holds is the closed form of the most microbatches that the rank holds between forward and weight
// gradient, counted for each virtual stage, and whether the schedule's name has one.
// [Schedule.Validate] holds the lists to it.
func (s *Schedule) Holds(rank int) (int, bool) {
	f, ok := lookup(s.Name)
	if !ok {
		return 0, false
	}
	return f.inFlight(s.Shape, rank), true
}

// Bubble is the closed form of what one step takes longer than the work of one rank, in ticks, and
// whether the authors of the schedule give one that holds for these costs: sending must be free and
// all stages must cost the same.
func (s *Schedule) Bubble(c Costs) (int64, bool) {
	f, ok := lookup(s.Name)
	u, even := c.unit()
	if !ok || !even {
		return 0, false
	}
	return bubbles[f.name](s.Shape, u)
}

// flush is the bubble of GPipe and of 1F1B: the first microbatch must pass the other ranks before
// the last rank can begin, and the last one's gradient must pass them back. GPipe (section 2.3)
// writes it as a share, (P-1)/(M+P-1).
func flush(shape Shape, c unit) (int64, bool) {
	return int64(shape.Ranks-1) * (c.forward + c.input + c.weight), true
}

// zeroBubbleH1Bubble is (P-1)(F+I-W), table 2 of the paper, if the weight gradient is not the
// longest part and there are at least as many microbatches as ranks. A longer weight gradient does
// not help further, and with M < P microbatches only M-1 weight gradients can fill the bubble.
func zeroBubbleH1Bubble(shape Shape, c unit) (int64, bool) {
	ranks, micros := int64(shape.Ranks), int64(shape.Micros)
	if micros < ranks {
		return (ranks-1)*(c.forward+c.input) - (micros-1)*c.weight, c.weight <= min(c.forward, c.input)
	}
	return (ranks - 1) * max(c.forward, c.input, c.forward+c.input-c.weight), true
}

// zeroBubbleVBubble is the time until the first microbatch has come to the last rank. The paper
// calls the bubble zero because it counts from each rank's own first action ([Timeline.Stalled]);
// counted from the first action of all, the last rank must wait that long. We found that this needs
// 2P-2 microbatches, and that there is no gap on any rank from 2P-1 on.
func zeroBubbleVBubble(shape Shape, c unit) (int64, bool) {
	equal := c.forward == c.input && c.input == c.weight
	return int64(shape.Ranks-1) * c.forward, equal && shape.Micros >= 2*shape.Ranks-2
}
