package event

import (
	"fmt"
	"strings"

	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
)

// Busy says what a command does from now on, until it says something else. It is for the live line
// of a terminal only: logs have no use for it.
type Busy struct {
	Task string `json:"task"` // such as "compiling gradient"
}

// Run says, as a run starts, what is trained on what. Counts that are not known are 0.
type Run struct {
	Model      string   `json:"model"`
	Parameters int64    `json:"parameters"`
	Data       []string `json:"data"` // sources, as the recipe names them
	// DataTokens is how many tokens an epoch has, and DataSequences how many sequences.
	DataTokens    int64   `json:"data_tokens,omitempty"`
	DataSequences int64   `json:"data_sequences,omitempty"`
	Steps         int     `json:"steps"`
	Seq           int     `json:"seq"`
	Batch         int     `json:"batch"`      // sequences of a step, over all devices
	Microbatch    int     `json:"microbatch"` // sequences computed at a time, over all devices
	Epochs        float64 `json:"epochs,omitempty"`
	Precision     string  `json:"precision"`
	Plan          string  `json:"plan,omitempty"` // the sizes of its axes; "" is one device
	Devices       int     `json:"devices"`
	Device        string  `json:"device"` // CPU, or the name of a GPU
	Folder        string  `json:"folder"`
}

// Finished says that a run has come to its end, or to where it was asked to stop.
type Finished struct {
	Step    int      `json:"step"`
	Steps   int      `json:"steps"`
	Loss    Figure   `json:"loss"` // of the last step
	Eval    *Figure  `json:"eval,omitempty"`
	Tokens  int64    `json:"tokens"`  // that this process has trained on
	Seconds float64  `json:"seconds"` // that this process has trained for
	Next    []string `json:"next"`    // commands that make sense now
}

// Line implements Event: what goes on belongs on the live line.
func (b Busy) Line() string { return "" }

// Line implements Event, with a row for each thing that decides a run.
func (r Run) Line() string {
	data := strings.Join(r.Data[:min(3, len(r.Data))], ", ")
	if more := len(r.Data) - 3; more > 0 {
		data += fmt.Sprintf(" and %d more", more)
	}
	if r.DataTokens > 0 {
		data += fmt.Sprintf(" · %s tokens in %s sequences", human.Amount(float64(r.DataTokens)),
			human.Thousands(r.DataSequences))
	}
	batch := fmt.Sprintf("%s × %s tokens = %s a step · %s steps", human.Thousands(int64(r.Batch)),
		human.Thousands(int64(r.Seq)), human.Thousands(int64(r.Batch)*int64(r.Seq)),
		human.Thousands(int64(r.Steps)))
	if r.Epochs > 0 {
		batch += fmt.Sprintf(" · %s of the data", times(r.Epochs))
	}
	runs := r.Precision
	if r.Plan != "" {
		runs += " · " + r.Plan
	}
	runs += fmt.Sprintf(" · %s × %s", human.Thousands(int64(r.Devices)), r.Device)
	rows := [][2]string{
		{"model", fmt.Sprintf("%s · %s parameters", r.Model, human.Parameters(r.Parameters, 1))},
		{"data", data}, {"batch", batch}, {"runs in", runs}, {"folder", r.Folder}}
	return strings.Join(lists.Map(rows, func(row [2]string) string {
		return fmt.Sprintf("%-9s %s", row[0], row[1])
	}), "\n")
}

// times says how often a run goes through its data.
func times(epochs float64) string {
	switch {
	case epochs < 0.095:
		return fmt.Sprintf("%.2g %%", 100*epochs)
	case epochs < 0.995:
		return fmt.Sprintf("%.0f %%", 100*epochs)
	}
	return fmt.Sprintf("%.3g times all", epochs)
}

// Line implements Event.
func (f Finished) Line() string {
	step := human.Thousands(int64(f.Step))
	head := fmt.Sprintf("done: %s steps", step)
	if f.Step < f.Steps {
		head = fmt.Sprintf("paused after step %s of %s", step, human.Thousands(int64(f.Steps)))
	}
	took := remaining(f.Seconds)
	if f.Seconds < 60 {
		took = human.Seconds(f.Seconds)
	}
	parts := []string{head + " in " + took,
		"loss " + strings.TrimSpace(loss(f.Loss))}
	if f.Eval != nil {
		parts = append(parts, "eval "+strings.TrimSpace(loss(*f.Eval)))
	}
	if f.Seconds > 0 && f.Tokens > 0 {
		parts = append(parts, human.Thousands(int64(float64(f.Tokens)/f.Seconds))+" tok/s")
	}
	return strings.Join(append([]string{strings.Join(parts, " · ")},
		lists.Map(f.Next, func(s string) string { return "next: " + s })...), "\n")
}
