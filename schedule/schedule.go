package schedule

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
)

// A Kind is what one action computes.
type Kind uint8

// The kinds of action. The papers on zero bubbles write B for what is Input here.
const (
	Forward  Kind = iota // the stage's output
	Backward             // both gradients in one program
	Input                // the gradient of the stage's input, which the stage before waits for
	Weight               // the gradient of the stage's weights, which nobody waits for
)

// letters names each kind in texts, in the order of the constants.
const letters = "FBIW"

// String gives the letter of the kind.
func (k Kind) String() string {
	if int(k) < len(letters) {
		return letters[k : k+1]
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

// An Action is one run of one program: a kind, for one virtual stage and one microbatch.
type Action struct {
	Kind       Kind
	Stage      int // virtual stage, from 0 at the model's input to Shape.Stages()-1 at its loss
	Microbatch int // microbatch, from 0
}

// A Shape is the size of a pipeline.
type Shape struct {
	Ranks   int `json:"ranks"`   // groups of devices, each with its own list
	Virtual int `json:"virtual"` // virtual stages on every rank
	Micros  int `json:"micros"`  // microbatches in a step
}

// Stages is the number of virtual stages.
func (s Shape) Stages() int { return s.Ranks * s.Virtual }

// A Layout says which rank has which virtual stage.
type Layout string

// The layouts.
const (
	// Loop deals the stages out in turns: with 4 ranks, rank 1 has stages 1, 5, 9 and so on.
	Loop Layout = "loop"
	// Vee goes down the ranks and back up: with 4 ranks, rank 1 has stages 1 and 6. The first
	// rank then has both ends of the model, so that a microbatch's gradient starts where it began.
	Vee Layout = "vee"
)

// A Schedule is what every rank of a pipeline does in one step, in order. It is plain data: it
// prints and parses itself, and is read by the simulator and by the runtime alike.
type Schedule struct {
	Name   string `json:"name"`
	Layout Layout `json:"layout"`
	Shape
	Lists [][]Action `json:"lists"` // one list for each rank
}

// Rank is the rank that has a virtual stage.
func (s *Schedule) Rank(stage int) int {
	turn, at := stage/s.Ranks, stage%s.Ranks
	if s.Layout == Vee && turn%2 == 1 {
		return s.Ranks - 1 - at
	}
	return at
}

// Has tells whether some rank has an action of a kind.
func (s *Schedule) Has(k Kind) bool {
	return slices.ContainsFunc(s.Lists, func(list []Action) bool {
		return slices.ContainsFunc(list, func(a Action) bool { return a.Kind == k })
	})
}

// Stage is the virtual stage that a rank has in a turn; the inverse of Rank.
func (s *Schedule) Stage(rank, turn int) int {
	if s.Layout == Vee && turn%2 == 1 {
		rank = s.Ranks - 1 - rank
	}
	return turn*s.Ranks + rank
}

// A kind is one published pipeline schedule, with its authors' closed forms. They hold when every
// virtual stage costs the same and sends are free; times are of one virtual stage.
type kind struct {
	name   string
	layout Layout
	// virtual bounds the virtual stages of a rank; most is 0 where there is no bound.
	least, most int
	// check says what else the shape must satisfy; nil if nothing.
	check func(Shape) error
	// list gives the actions of one rank in order.
	list func(s *Schedule, rank int) []Action
	// inFlight is the most microbatches that a rank holds between forward and weight gradient,
	// counted for each virtual stage.
	inFlight func(shape Shape, rank int) int
}

// kinds is the table of schedules: a new one is a row here and a file.
var kinds = []kind{gpipe(), oneFOneB(), interleaved(), zeroBubbleH1(), zeroBubbleV()}

// Names lists the schedules that New makes.
func Names() []string { return lists.Map(kinds, func(f kind) string { return f.name }) }

// LayoutOf is the layout of a schedule; Loop if no schedule has that name.
func LayoutOf(name string) Layout {
	f, _ := lookup(name)
	return cmp.Or(f.layout, Loop)
}

// MinVirtual is the fewest virtual stages that a schedule gives a rank, which is what a plan has
// that names none.
func MinVirtual(name string) int {
	f, _ := lookup(name)
	return max(1, f.least)
}

// Fits says why a schedule cannot have a shape; nil if it can.
func Fits(name string, shape Shape) error {
	f, ok := lookup(name)
	if !ok {
		return unknown(name)
	}
	return f.fits(shape)
}

func lookup(name string) (kind, bool) {
	f := lists.Find(kinds, func(f kind) bool { return f.name == name })
	return f, f.name != ""
}

// maxActions bounds a schedule: 64 ranks with 8 virtual stages and 512 microbatches in three
// kinds are 0.8 million actions, so that this leaves a factor of 80 and still fits in memory.
const maxActions = 1 << 26

// New makes the schedule of that name for a pipeline. A Virtual of 0 means as few as the schedule
// can have.
func New(name string, shape Shape) (*Schedule, error) {
	f, ok := lookup(name)
	if !ok {
		return nil, unknown(name)
	}
	if shape.Virtual == 0 {
		shape.Virtual = f.least
	}
	if err := f.fits(shape); err != nil {
		return nil, err
	}
	s := &Schedule{Name: name, Layout: f.layout, Shape: shape, Lists: make([][]Action, shape.Ranks)}
	for rank := range s.Lists {
		s.Lists[rank] = f.list(s, rank)
	}
	return s, nil
}

func unknown(name string) error {
	e := diag.New(diag.ScheduleUnknown, "there is no schedule %q", name).
		Try("write one of %s", strings.Join(Names(), ", "))
	if near := diag.Nearest(name, Names()); near != "" {
		e = e.Try("write %q", near)
	}
	return e
}

// fits says why the family has no schedule of that shape.
func (f kind) fits(shape Shape) error {
	if err := shape.check(); err != nil {
		return err
	}
	switch v := shape.Virtual; {
	case v < f.least:
		return diag.New(diag.ScheduleShape, "%s needs at least %d virtual stages on a rank, not %d",
			f.name, f.least, v).Try("set %d virtual stages, or take 1f1b", f.least)
	case f.most > 0 && v > f.most:
		return diag.New(diag.ScheduleShape, "%s has at most %d virtual stages on a rank, not %d",
			f.name, f.most, v).Try("set %d virtual stages, or take interleaved", f.most)
	case f.check != nil:
		return f.check(shape)
	}
	return nil
}

// check says what no schedule can have.
func (s Shape) check() error {
	for _, part := range []struct {
		name string
		n    int
	}{{"ranks", s.Ranks}, {"virtual stages", s.Virtual}, {"microbatches", s.Micros}} {
		if part.n < 1 || part.n > maxActions {
			return diag.New(diag.ScheduleShape, "a pipeline cannot have %d %s", part.n, part.name).
				Try("set at least 1")
		}
	}
	// Each product is of two numbers below 2^26 and 2^52, so that it cannot overflow.
	if n := s.Stages(); n > maxActions || n*s.Micros > maxActions/3 {
		return diag.New(diag.ScheduleShape,
			"%d ranks, %d virtual stages and %d microbatches are more than a schedule can hold",
			s.Ranks, s.Virtual, s.Micros).Try("make larger microbatches")
	}
	return nil
}

// A move is the next microbatch of one kind in one of the rank's turns.
type move struct {
	kind Kind
	turn int
}

func forward(turn int) move  { return move{Forward, turn} }
func backward(turn int) move { return move{Backward, turn} }
func input(turn int) move    { return move{Input, turn} }
func weight(turn int) move   { return move{Weight, turn} }

// A lister writes the list of one rank in phases. It counts what it has written, so that a phase
// says only what is done in turns and how often; a move of which no microbatch is left is passed
// over, and so pipelines with few microbatches need no cases of their own.
type lister struct {
	schedule *Schedule
	rank     int
	next     [len(letters)][2]int // by kind and turn: the microbatch that comes next
	actions  []Action
}

func (s *Schedule) lister(rank, kinds int) *lister {
	n := s.Virtual * s.Micros * kinds
	return &lister{schedule: s, rank: rank, actions: make([]Action, 0, n)}
}

// left reports whether the move has a microbatch left.
func (l *lister) left(m move) bool { return l.next[m.kind][m.turn] < l.schedule.Micros }

// repeat writes the moves in turns, n times.
func (l *lister) repeat(n int, moves ...move) {
	for range n {
		for _, m := range moves {
			l.write(m)
		}
	}
}

// repeatWhile writes the moves in turns, at most n times and only while one move is left.
func (l *lister) repeatWhile(n int, while move, moves ...move) {
	for range n {
		if !l.left(while) {
			return
		}
		l.repeat(1, moves...)
	}
}

func (l *lister) write(m move) {
	if !l.left(m) {
		return
	}
	next := &l.next[m.kind][m.turn]
	l.actions = append(l.actions, Action{m.kind, l.schedule.Stage(l.rank, m.turn), *next})
	*next++
}
