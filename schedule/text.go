package schedule

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
)

// String gives an action as F1.3: its letter, its stage, its microbatch.
func (a Action) String() string { return string(a.append(nil)) }

func (a Action) append(b []byte) []byte {
	b = append(b, a.Kind.String()...)
	b = strconv.AppendInt(b, int64(a.Stage), 10)
	b = append(b, '.')
	return strconv.AppendInt(b, int64(a.Microbatch), 10)
}

// MarshalText gives the action as [Action.String] does.
func (a Action) MarshalText() ([]byte, error) { return a.append(nil), nil }

// UnmarshalText reads what MarshalText gives.
func (a *Action) UnmarshalText(text []byte) error {
	read, err := parseAction(string(text))
	if err == nil {
		*a = read
	}
	return err
}

func parseAction(text string) (Action, error) {
	bad := diag.New(diag.ScheduleText, "%q is no action", text).
		Try("write F, B, I or W, the stage, a point and the microbatch, as in F1.3")
	if text == "" {
		return Action{}, bad
	}
	kind := strings.IndexByte(letters, text[0])
	stage, microbatch, ok := strings.Cut(text[1:], ".")
	a := Action{Kind: Kind(max(kind, 0))}
	var okStage, okMicrobatch bool
	a.Stage, okStage = number(stage)
	a.Microbatch, okMicrobatch = number(microbatch)
	if kind < 0 || !ok || !okStage || !okMicrobatch {
		return Action{}, bad
	}
	return a, nil
}

// number reads a number as String writes it: no sign, no leading zeros, and small enough.
func number(text string) (int, bool) {
	n, err := strconv.Atoi(text)
	return n, err == nil && n >= 0 && n <= maxActions && strconv.Itoa(n) == text
}

// String prints the schedule: a line with its name and shape, and a line for each rank.
//
//	schedule 1f1b: 2 ranks, 1 virtual, 3 microbatches, loop
//	0: F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
//	1: F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
func (s *Schedule) String() string {
	b := fmt.Appendf(nil, "schedule %s: %d ranks, %d virtual, %d microbatches, %s\n",
		s.Name, s.Ranks, s.Virtual, s.Micros, s.Layout)
	for rank, list := range s.Lists {
		b = strconv.AppendInt(b, int64(rank), 10)
		b = append(b, ':')
		for _, a := range list {
			b = append(b, ' ')
			b = a.append(b)
		}
		b = append(b, '\n')
	}
	return string(b)
}

// Parse reads what [Schedule.String] prints. Lines that are empty or begin with # are passed over.
// The schedule is well formed, but may contradict itself: see [Schedule.Validate].
func Parse(text []byte) (*Schedule, error) {
	var s *Schedule
	line := 0
	for raw := range bytes.Lines(text) {
		line++
		fields := strings.Fields(string(raw))
		if len(fields) == 0 || strings.HasPrefix(fields[0], "#") {
			continue
		}
		var err error
		if s == nil {
			s, err = parseHeader(fields)
		} else {
			err = s.parseList(fields)
		}
		if err != nil {
			return nil, diag.From(err).At("line %d", line)
		}
	}
	if s == nil {
		return nil, diag.New(diag.ScheduleText, "the text holds no schedule").
			Try("begin with a line such as: schedule 1f1b: 4 ranks, 1 virtual, 8 microbatches, loop")
	}
	if len(s.Lists) != s.Ranks {
		return nil, diag.New(diag.ScheduleText, "there are %d lists for %d ranks",
			len(s.Lists), s.Ranks).Try("give each rank its line")
	}
	return s, nil
}

// parseHeader reads the words of the first line.
func parseHeader(words []string) (*Schedule, error) {
	bad := diag.New(diag.ScheduleText, "%q is no head of a schedule", strings.Join(words, " ")).
		Try("write it as in: schedule 1f1b: 4 ranks, 1 virtual, 8 microbatches, loop")
	if len(words) != 9 || words[0] != "schedule" {
		return nil, bad
	}
	name, colon := strings.CutSuffix(words[1], ":")
	s := &Schedule{Name: name, Layout: Layout(words[8])}
	ok := colon && name != "" && words[3] == "ranks," && words[5] == "virtual," &&
		(words[7] == "microbatches," || words[7] == "micros,") && (s.Layout == Loop || s.Layout == Vee)
	for i, n := range []*int{&s.Ranks, &s.Virtual, &s.Micros} {
		var isNumber bool
		*n, isNumber = number(words[2+2*i])
		ok = ok && isNumber
	}
	if !ok {
		return nil, bad
	}
	if err := s.check(); err != nil {
		return nil, err
	}
	return s, nil
}

// parseList reads the words of the next rank's line.
func (s *Schedule) parseList(words []string) error {
	if want := fmt.Sprintf("%d:", len(s.Lists)); words[0] != want || len(s.Lists) >= s.Ranks {
		return diag.New(diag.ScheduleText, "%q is no list of the next rank", words[0]).
			Try("begin the line of each rank, in order, with its number and a colon")
	}
	list := make([]Action, 0, len(words)-1)
	for _, word := range words[1:] {
		a, err := parseAction(word)
		if err != nil {
			return err
		}
		list = append(list, a)
	}
	s.Lists = append(s.Lists, list)
	return nil
}
