package schedule

import (
	"fmt"
	"strings"

	"github.com/deepwell/deepwell/diag"
)

// Validate says what is wrong with a schedule, with the rank, the place in its list and the action:
// whether each stage runs each microbatch forward once and then takes its gradient once, on the
// rank that has the stage; and whether no rank waits for what can never come. A schedule that has a
// name of the table must hold no more than that schedule promises, and be that schedule.
func (s *Schedule) Validate() error {
	if _, err := s.Order(); err != nil {
		return err
	}
	if f, ok := lookup(s.Name); ok {
		return s.checkKind(f)
	}
	return nil
}

// checkKind checks a schedule against the family whose name it has.
func (s *Schedule) checkKind(f kind) error {
	if err := f.fits(s.Shape); err != nil {
		return err
	}
	if f.layout != s.Layout {
		return diag.New(diag.ScheduleInvalid, "%s has the layout %s, not %s", s.Name, f.layout, s.Layout).
			Try("set the layout %s, or give the schedule a name of its own", f.layout)
	}
	for rank, list := range s.Lists {
		peak, err := s.Peak(rank, Hold{[]int64{1}, []int64{1}})
		if err != nil {
			return err
		}
		if most := f.inFlight(s.Shape, rank); peak.Total > int64(most) {
			return s.fault(rank, peak.Place, "makes the rank hold %d microbatches, more than the %d of %s",
				peak.Total, most, s.Name)
		}
		// A valid list has each action once, so that one cannot be the beginning of the other.
		for place, want := range f.list(s, rank) {
			if place >= len(list) || list[place] != want {
				return s.fault(rank, min(place, len(list)-1), "stands where %s has %s", s.Name, want)
			}
		}
	}
	return nil
}

// fault is an error about one action.
func (s *Schedule) fault(rank, place int, format string, args ...any) error {
	return diag.New(diag.ScheduleInvalid, "%s "+format,
		append([]any{s.Lists[rank][place]}, args...)...).
		At("rank %d, place %d", rank, place).
		Try(remedy)
}

// remedy is what helps against a list that is wrong, since lists are seldom written by hand.
const remedy = "make the schedule again, or give one that was changed a name of its own"

// wellFormed checks everything but waiting: the form of the lists, and the order on one rank.
func (s *Schedule) wellFormed() error {
	if err := s.check(); err != nil {
		return err
	}
	if s.Layout != Loop && s.Layout != Vee {
		return diag.New(diag.ScheduleInvalid, "there is no layout %q", s.Layout).
			Try("write %s or %s", Loop, Vee)
	}
	if len(s.Lists) != s.Ranks {
		return diag.New(diag.ScheduleInvalid, "there are %d lists for %d ranks", len(s.Lists), s.Ranks).
			Try("give each rank its list")
	}
	all := s.actions()
	// The lists are counted before memory is taken for them, since a text may promise too much.
	if least := 2 * s.Stages() * s.Micros; all < least {
		return diag.New(diag.ScheduleInvalid, "there are %d actions; %d stages and %d microbatches need "+
			"at least %d", all, s.Stages(), s.Micros, least).Try("give every stage all microbatches")
	}
	seen := make([]uint8, s.Stages()*s.Micros)
	for rank := range s.Lists {
		if err := s.wellOrdered(rank, seen); err != nil {
			return err
		}
	}
	for i, kinds := range seen {
		if kinds&bit(Weight) != 0 {
			continue
		}
		missing := Action{Forward, i / s.Micros, i % s.Micros}
		switch {
		case kinds&bit(Input) != 0:
			missing.Kind = Weight
		case kinds&bit(Forward) != 0:
			missing.Kind = Backward
		}
		return diag.New(diag.ScheduleInvalid, "%s is missing", missing).
			At("rank %d", s.Rank(missing.Stage)).Try("add it to the rank's list")
	}
	return nil
}

func bit(k Kind) uint8 { return 1 << k }

// wellOrdered checks one rank's list and notes in seen, by stage and microbatch, what was done.
// A backward counts as both gradients.
func (s *Schedule) wellOrdered(rank int, seen []uint8) error {
	stages := s.Stages()
	for place, a := range s.Lists[rank] {
		if int(a.Kind) >= len(letters) {
			return s.fault(rank, place, "is no action")
		}
		if a.Stage < 0 || a.Stage >= stages || a.Microbatch < 0 || a.Microbatch >= s.Micros {
			return s.fault(rank, place, "is outside %d stages and %d microbatches", s.Stages(), s.Micros)
		}
		if home := s.Rank(a.Stage); home != rank {
			return s.fault(rank, place, "belongs to rank %d", home)
		}
		done := &seen[a.Stage*s.Micros+a.Microbatch]
		adds, needs := bit(a.Kind), uint8(0)
		switch a.Kind {
		case Backward:
			adds, needs = bit(Input)|bit(Weight), bit(Forward)
		case Input:
			needs = bit(Forward)
		case Weight:
			needs = bit(Input)
		}
		if *done&adds != 0 {
			return s.fault(rank, place, "is done twice")
		}
		if *done&needs != needs {
			before := Action{Forward, a.Stage, a.Microbatch}
			if a.Kind == Weight {
				before.Kind = Input
			}
			return s.fault(rank, place, "comes before %s", before)
		}
		*done |= adds
	}
	return nil
}

// needs is what an action waits for from another stage: the forward of the stage before, or the
// gradient of the stage after. An input gradient stands for a backward too.
func (s *Schedule) needs(a Action) (Action, bool) {
	switch {
	case a.Kind == Forward && a.Stage > 0:
		return Action{Forward, a.Stage - 1, a.Microbatch}, true
	case (a.Kind == Backward || a.Kind == Input) && a.Stage < s.Stages()-1:
		return Action{Input, a.Stage + 1, a.Microbatch}, true
	}
	return Action{}, false
}

// feeds is the stage that waits for an action's result, or -1.
func (s *Schedule) feeds(a Action) int {
	switch {
	case a.Kind == Forward && a.Stage < s.Stages()-1:
		return a.Stage + 1
	case (a.Kind == Backward || a.Kind == Input) && a.Stage > 0:
		return a.Stage - 1
	}
	return -1
}

// results makes room for a number for each forward and each gradient of an input.
func results[T any](s *Schedule) func(Action) *T {
	n := s.Stages() * s.Micros
	list := make([]T, 2*n)
	return func(a Action) *T {
		at := a.Stage*s.Micros + a.Microbatch
		if a.Kind != Forward {
			at += n
		}
		return &list[at]
	}
}

// stuck describes a circle of ranks that wait for each other. Every stuck rank waits for one that
// is stuck, so that going from each to the one it waits for must come back.
func (s *Schedule) stuck(rank int, place []int) error {
	waits := func(rank int) Action {
		from, _ := s.needs(s.Lists[rank][place[rank]])
		return from
	}
	for range s.Ranks { // after as many steps we are in the circle
		rank = s.Rank(waits(rank).Stage)
	}
	var circle []string
	for at := rank; len(circle) == 0 || at != rank; {
		to := s.Rank(waits(at).Stage)
		circle = append(circle, fmt.Sprintf("rank %d at place %d (%s) waits for rank %d",
			at, place[at], s.Lists[at][place[at]], to))
		at = to
	}
	return diag.New(diag.ScheduleInvalid, "%s can never run: its rank waits for itself",
		s.Lists[rank][place[rank]]).
		At("rank %d, place %d", rank, place[rank]).
		Because("%s", strings.Join(circle, "; ")).
		Try(remedy)
}
