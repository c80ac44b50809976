package event

import (
	"fmt"

	"github.com/deepwell/deepwell/internal/human"
)

// Stalled says that a phase of a run takes many times longer than usual, and that the run ends.
type Stalled struct {
	Step    int     `json:"step"`
	Phase   string  `json:"phase"`
	Seconds float64 `json:"seconds"` // that the phase has taken
	Limit   float64 `json:"limit"`   // in seconds
	Waits   string  `json:"waits"`   // what it waits for
	Dump    string  `json:"dump,omitempty"`
}

// Line implements Event.
func (s Stalled) Line() string {
	return fmt.Sprintf("step %s  stalled: %s takes longer than %.3g s, waiting for %s",
		human.Thousands(int64(s.Step)), s.Phase, s.Limit, s.Waits)
}
