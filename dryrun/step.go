package dryrun

import (
	"math"
	"math/rand/v2"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
)

// A Stage is the cost of one virtual stage on the devices of its rank: seconds of one microbatch,
// with exposed communication inside the stage.
type Stage struct {
	Forward float64 `json:"forward"`
	Input   float64 `json:"input"`  // dgrad, and recomputation
	Weight  float64 `json:"weight"` // gradient of the weights
	// Send is the time that a result of the stage takes to another rank.
	Send float64 `json:"send,omitempty"`

	// Load is what its microbatches hold on a device.
	schedule.Load
}

// A Step is a schedule with prices.
type Step struct {
	Schedule *schedule.Schedule
	Order    *schedule.Order // of Schedule; nil if nobody has made it yet
	Stages   []Stage         // one for each virtual stage
	// Ranks is what each rank holds on a device when no microbatch is there, at the end of its list:
	// all but Activations, and as Temp what its last programs need. Empty is nothing.
	Ranks []program.Memory
	// Reduce, Update and Host follow a rank's last action, in seconds: what nothing hides of adding
	// gradients up and gathering parameters, the optimizer, and what the host takes.
	Reduce, Update, Host float64
	// Replicas is how many copies of the pipeline reduce their gradients together, and so wait for
	// the slowest of them; 0 is one.
	Replicas int
	// Slower returns the step with every transfer between devices taking links times as long. Stage
	// times include collectives, so only the cost model can do this; nil without one.
	Slower func(links float64) (*Step, error)
	// Rows is the sequences of a microbatch on a device; 0 is not known. One cannot be halved.
	Rows int64
	// Policy is a line on what the products are computed in, and what that costs; it is passed on.
	Policy string
}

// A WhatIf is what a run meets. The zero value is a day on which nothing goes wrong.
type WhatIf struct {
	// Slow multiplies the times of rank Straggler; 0 means 1.
	Slow      float64 `json:"slow,omitempty"`
	Straggler int     `json:"straggler,omitempty"`
	// Links multiplies the time of every transfer between devices; 0 means 1. It needs Step.Slower.
	Links float64 `json:"links,omitempty"`
	// Jitter is the deviation of the time of an action from its mean, as a share: 0.02 is 2 %.
	// Times follow a log-normal distribution whose mean is the price. Random must be given then.
	Jitter float64    `json:"jitter,omitempty"`
	Random *rand.Rand `json:"-"`
}

// Uneven reports whether some device takes longer than others, which then wait for it.
func (w WhatIf) Uneven() bool { return w.Slow > 0 && w.Slow != 1 || w.Jitter > 0 }

// maxReplicas bounds the replicas that a run with jitter draws. The slowest of n grows with √(log
// n), so the slowest of a thousand is about a quarter further out than the slowest of 64.
const maxReplicas = 64

// check says what no step can have.
func (s *Step) check(w WhatIf) error {
	if s.Schedule == nil || len(s.Stages) != s.Schedule.Stages() {
		n := 0
		if s.Schedule != nil {
			n = s.Schedule.Stages()
		}
		return diag.New(diag.ScheduleCosts, "there are prices for %d stages; the schedule has %d",
			len(s.Stages), n).Try("give each virtual stage its price")
	}
	for _, x := range []float64{s.Reduce, s.Update, s.Host} {
		if !(x >= 0) || x > maxSeconds {
			return diag.New(diag.ScheduleCosts, "what follows the pipeline takes %v s", x).
				Try("give a time from 0 to %g s", maxSeconds)
		}
	}
	for i, t := range s.Stages {
		for _, x := range []float64{t.Forward, t.Input, t.Weight, t.Send} {
			if !(x >= 0) || x > maxSeconds {
				return diag.New(diag.ScheduleCosts, "stage %d has a time of %v s", i, x).
					Try("give a time from 0 to %g s", maxSeconds)
			}
		}
		if min(t.Residuals, t.Handed, slices.Min(t.Passing[:]), slices.Min(t.Temp[:])) < 0 {
			return diag.New(diag.ScheduleCosts, "stage %d holds less than nothing", i)
		}
	}
	if len(s.Ranks) > 0 && len(s.Ranks) != s.Schedule.Ranks {
		return diag.New(diag.ScheduleCosts, "there is the memory of %d ranks; the schedule has %d",
			len(s.Ranks), s.Schedule.Ranks).Try("give each rank what it holds, or none")
	}
	switch {
	case !(w.Slow >= 0) || !(w.Links >= 0) || max(w.Slow, w.Links) > maxFactor:
		return diag.New(diag.BadInput, "a factor is outside 0 to %g", maxFactor).
			Try("--what-if links=2, which takes twice as long")
	case w.Links != 0 && w.Links != 1 && s.Slower == nil:
		return diag.New(diag.BadInput, "nothing is known of what this step sends").
			Try("leave links out of the what-if")
	case w.Straggler < 0 || w.Straggler >= s.Schedule.Ranks:
		return diag.New(diag.BadInput, "there is no pipeline rank %d; the last is %d", w.Straggler,
			s.Schedule.Ranks-1).Because("slow=FACTOR@RANK slows one of pp.size pipeline ranks").
			Try("slow=%g@%d", w.Slow, s.Schedule.Ranks-1)
	case !(w.Jitter >= 0) || w.Jitter > 1:
		return diag.New(diag.BadInput, "a jitter of %v is outside 0 to 1", w.Jitter).
			Try("--what-if jitter=0.05")
	case w.Jitter > 0 && w.Random == nil:
		return diag.New(diag.BadInput, "jitter needs a source of random numbers").
			Try("set WhatIf.Random")
	case s.sum()*max(1, w.Slow) > maxStep:
		return diag.New(diag.ScheduleCosts, "these times are too large to add up")
	}
	return nil
}

// sum is the seconds of a step in which nothing overlaps.
func (s *Step) sum() float64 {
	total := s.Reduce + s.Update + s.Host
	for _, t := range s.Stages {
		total += (t.Forward + t.Input + t.Weight + 2*t.Send) * float64(s.Schedule.Micros)
	}
	return total
}

// Bounds of one time and of one factor. A step in which nothing overlaps must also be a number of
// nanoseconds that an int64 holds, with room for jitter.
const (
	maxSeconds = 600.0
	maxFactor  = 1000.0
	maxStep    = math.MaxInt64 / 1e9 / 64 // 4.5 years
)

// ticks are whole nanoseconds, so that sums are exact and the same on every machine.
func ticks(seconds float64) int64 { return int64(math.Round(seconds * 1e9)) }

func seconds(t int64) float64 { return float64(t) / 1e9 }

// prices are the stages in ticks under a WhatIf, by kind and stage.
type prices struct {
	action [4][]int64
	send   []int64
	// reduce and host are the same for every rank; update is by rank.
	reduce, host int64
	update       []int64
}

func (s *Step) prices(w WhatIf) prices {
	n := len(s.Stages)
	p := prices{send: make([]int64, n), host: ticks(s.Host),
		update: make([]int64, s.Schedule.Ranks)}
	for k := range p.action {
		p.action[k] = make([]int64, n)
	}
	factor := func(rank int) float64 {
		if w.Slow > 0 && rank == w.Straggler {
			return w.Slow
		}
		return 1
	}
	p.reduce = ticks(s.Reduce)
	for rank := range p.update {
		p.update[rank] = ticks(factor(rank) * s.Update)
	}
	for i, t := range s.Stages {
		slow := factor(s.Schedule.Rank(i))
		p.action[schedule.Forward][i] = ticks(slow * t.Forward)
		p.action[schedule.Input][i] = ticks(slow * t.Input)
		p.action[schedule.Weight][i] = ticks(slow * t.Weight)
		p.action[schedule.Backward][i] = p.action[schedule.Input][i] + p.action[schedule.Weight][i]
		p.send[i] = ticks(t.Send)
	}
	return p
}
