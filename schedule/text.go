package schedule

import (
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
	return strconv.AppendInt(b, int64(a.Micro), 10)
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
	stage, micro, ok := strings.Cut(text[1:], ".")
	a := Action{Kind: Kind(max(kind, 0))}
	var okStage, okMicro bool
	a.Stage, okStage = number(stage)
	a.Micro, okMicro = number(micro)
	if kind < 0 || !ok || !okStage || !okMicro {
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
//	schedule 1f1b: 2 ranks, 1 virtual, 3 micros, loop
//	0: F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
//	1: F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
func (s *Schedule) String() string {
	b := fmt.Appendf(nil, "schedule %s: %d ranks, %d virtual, %d micros, %s\n",
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
