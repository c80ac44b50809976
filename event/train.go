package event

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
)

// Step says that a step of training was taken. Figures that are not known are 0.
type Step struct {
	Step            int     `json:"step"` // counted from 1: how many steps have been taken
	Steps           int     `json:"steps"`
	Rate            float64 `json:"rate"`
	Tokens          int64   `json:"tokens"` // of the whole run so far
	TokensPerSecond float64 `json:"tokens_per_second"`
	Seconds         float64 `json:"seconds"` // that the step took
	MemoryBytes     int64   `json:"memory_bytes,omitempty"`
	MFU             float64 `json:"mfu,omitempty"` // share of the machine's peak, from 0 to 1
	ETASeconds      float64 `json:"eta_seconds,omitempty"`
	Loss            Figure  `json:"loss"`
	GradNorm        Figure  `json:"grad_norm"`
}

// Eval says what the loss is on text that is not trained on.
type Eval struct {
	Step   int    `json:"step"`
	Tokens int64  `json:"tokens"` // that the loss is the mean of
	Loss   Figure `json:"loss"`
}

// Rejected says that a guard refused a step: the state is what it was before. Replay is the file
// that holds what is needed to take the step again and look at it.
type Rejected struct {
	Step     int    `json:"step"`
	Why      string `json:"why"`
	Replay   string `json:"replay,omitempty"`
	Loss     Figure `json:"loss"`
	GradNorm Figure `json:"grad_norm"`
}

// Precision says that a product of a layer is computed in another format from now on, or that
// something about its numbers is worth knowing: the figure that led to it, what is usual for it,
// and the bound that it crossed.
type Precision struct {
	Step    int     `json:"step"`
	What    string  `json:"what"`  // fall, return, refuse, warn or final-bf16
	Layer   int     `json:"layer"` // -1 if none is known to be the cause
	Linear  string  `json:"linear,omitempty"`
	Product string  `json:"product,omitempty"`
	From    string  `json:"from,omitempty"`
	To      string  `json:"to,omitempty"`
	Signal  string  `json:"signal"`
	Value   float64 `json:"value"`
	Usual   float64 `json:"usual"`
	Bound   float64 `json:"bound"`
	Text    string  `json:"text"`
}

// Saved says that a checkpoint is complete on disk.
type Saved struct {
	Step    int     `json:"step"`
	Path    string  `json:"path"`
	Bytes   int64   `json:"bytes"`
	Seconds float64 `json:"seconds"`
}

// Resumed says that a run goes on from a checkpoint. Records of later steps that stand before it
// in a file are of steps that are taken again; [Curve] leaves them out.
type Resumed struct {
	Step int    `json:"step"`
	Path string `json:"path"`
}

// Weights says what a run, as it starts, has as its weights.
type Weights struct {
	From string `json:"from"` // FromFiles, FromRandom or FromCheckpoint
	// Path is the model whose files they are read from, or the folder of checkpoints.
	Path string `json:"path,omitempty"`
	// Tensors and DType tell what the files hold: bf16, or 24 bf16, 2 f32 where there are several.
	Tensors int    `json:"tensors,omitempty"`
	DType   string `json:"dtype,omitempty"`
	Bytes   int64  `json:"bytes,omitempty"` // of the files
	Seed    int    `json:"seed"`            // of the run; it decides random weights
	Step    int    `json:"step,omitempty"`  // of the checkpoint
}

// Where weights come from.
const (
	FromFiles      = "files"
	FromRandom     = "random"
	FromCheckpoint = "checkpoint"
)

// Memory says at the end of a run what was planned of a GPU's memory, and what XLA's allocator
// counted on the GPU with the highest peak: in use, at most, and its limit.
type Memory struct {
	PlannedBytes int64 `json:"planned_bytes"`
	InUseBytes   int64 `json:"in_use_bytes"`
	PeakBytes    int64 `json:"peak_bytes"`
	PoolBytes    int64 `json:"pool_bytes"`
}

// Profiled says that a trace was written.
type Profiled struct {
	Path string `json:"path"`
	// HostOnly is why there are no lanes of devices; "" if there are.
	HostOnly string `json:"host_only,omitempty"`
}

// Line implements Event.
func (p Precision) Line() string { return p.Text }

// Line implements Event.
func (w Weights) Line() string {
	switch w.From {
	case FromFiles:
		return fmt.Sprintf("weights: %s, %s tensors %s", w.Path,
			human.Thousands(int64(w.Tensors)), w.DType)
	case FromCheckpoint:
		return fmt.Sprintf("weights: %s, step %s", w.Path, human.Thousands(int64(w.Step)))
	}
	return fmt.Sprintf("weights: random, seed %d", w.Seed)
}

// Line implements Event.
func (s Step) Line() string { return s.text(course{}, math.MaxInt) }

// Line implements Event.
func (e Eval) Line() string {
	return fmt.Sprintf("step %s  eval %s on %s tokens", human.Thousands(int64(e.Step)),
		strings.TrimSpace(loss(e.Loss)), human.Thousands(e.Tokens))
}

// Line implements Event.
func (r Rejected) Line() string {
	line := fmt.Sprintf("step %s  rejected: %s  loss %s  grad norm %s", human.Thousands(int64(r.Step)),
		r.Why, strings.TrimSpace(loss(r.Loss)), strings.TrimSpace(significant(r.GradNorm)))
	if r.Replay != "" {
		line += "  replay " + r.Replay
	}
	return line
}

// Line implements Event.
func (s Saved) Line() string {
	return fmt.Sprintf("step %s  saved %s  %s in %.1f s", human.Thousands(int64(s.Step)), s.Path,
		Size(s.Bytes), s.Seconds)
}

// Line implements Event.
func (r Resumed) Line() string {
	return fmt.Sprintf("step %s  resumed from %s", human.Thousands(int64(r.Step)), r.Path)
}

// Line implements Event.
func (m Memory) Line() string {
	return fmt.Sprintf("memory of a GPU: %s planned, %s at XLA's peak of a pool of %s, %s in use",
		Size(m.PlannedBytes), Size(m.PeakBytes), Size(m.PoolBytes), Size(m.InUseBytes))
}

// Line implements Event.
func (p Profiled) Line() string {
	line := fmt.Sprintf("profile %s  open it at ui.perfetto.dev", p.Path)
	if p.HostOnly != "" {
		line += "  (only the host: " + p.HostOnly + ")"
	}
	return line
}

// text is the line of a step, with what the run has shown before it. Every figure has a fixed
// width, so that a line that is rewritten in place does not jump. Where the line is wider than a
// terminal, what matters least is left out.
func (s Step) text(run course, width int) string {
	total := human.Thousands(int64(s.Steps))
	part := func(known bool, format string, args ...any) string {
		if !known {
			return ""
		}
		return fmt.Sprintf(format, args...)
	}
	eval := Eval{}
	if run.eval != nil {
		eval = *run.eval
	}
	parts := []string{
		fmt.Sprintf("step %*s/%s", len(total), human.Thousands(int64(s.Step)), total),
		"loss " + loss(s.Loss),
		part(run.losses > 1, "avg %s", loss(Figure(run.average))),
		part(run.eval != nil, "eval %s", loss(eval.Loss)),
		part(s.Rate > 0, "lr %.1e", s.Rate),
		"grad norm " + significant(s.GradNorm),
		part(s.TokensPerSecond > 0, "%7s tok/s", human.Thousands(int64(math.Round(s.TokensPerSecond)))),
		part(s.MFU > 0, "MFU %2.0f %%", 100*s.MFU),
		part(s.MemoryBytes > 0, "%8s", memory(s.MemoryBytes)),
		part(s.ETASeconds > 0, "eta %-6s", remaining(s.ETASeconds)),
	}
	for _, least := range []int{8, 4, 5, 7, 2, 3, 6} {
		if len([]rune(joined(parts))) <= width {
			break
		}
		parts[least] = ""
	}
	return strings.TrimRight(joined(parts), " ")
}

func joined(parts []string) string {
	return strings.Join(lists.Filter(parts, func(p string) bool { return p != "" }), "  ")
}

// loss writes a loss in six columns, enough for the logarithm of any vocabulary.
func loss(f Figure) string { return fmt.Sprintf("%6.3f", f) }

// significant writes a norm in five columns: 0.041, 0.410, 41.2, 4120.
func significant(f Figure) string {
	switch a := math.Abs(float64(f)); {
	case math.IsNaN(a) || math.IsInf(a, 0):
		return fmt.Sprintf("%5.0f", f)
	case a >= 1e5 || a < 5e-4 && a > 0:
		return fmt.Sprintf("%5.0e", f)
	case a >= 1000:
		return fmt.Sprintf("%5.0f", f)
	case a >= 10:
		return fmt.Sprintf("%5.1f", f)
	case a >= 1:
		return fmt.Sprintf("%5.2f", f)
	}
	return fmt.Sprintf("%5.3f", f)
}

// memory writes bytes with three digits: 134 GiB, 13.4 GiB.
func memory(n int64) string {
	text := Size(n)
	number, unit, _ := strings.Cut(text, " ")
	if whole, _, ok := strings.Cut(number, "."); ok && len(whole) >= 3 {
		number = whole
	}
	return number + " " + unit
}

// remaining writes a time with its two largest units: 9d4h, 3h12m, 12m30s, 45s.
func remaining(seconds float64) string {
	const century = 100 * 365 * 24 * 3600 // beyond it, the figure is noise
	left := time.Duration(min(seconds, century) * float64(time.Second)).Round(time.Second)
	d, h := left/(24*time.Hour), left%(24*time.Hour)/time.Hour
	m, s := left%time.Hour/time.Minute, left%time.Minute/time.Second
	switch {
	case d > 0:
		return fmt.Sprintf("%dd%dh", d, h)
	case h > 0:
		return fmt.Sprintf("%dh%02dm", h, m)
	case m > 0:
		return fmt.Sprintf("%dm%02ds", m, s)
	}
	return fmt.Sprintf("%ds", s)
}

// A Figure is a number that JSON may not be able to write: a loss that is not finite is exactly
// what a reader looks for, and becomes "NaN", "+Inf" or "-Inf".
type Figure float64

// MarshalJSON implements json.Marshaler.
func (f Figure) MarshalJSON() ([]byte, error) {
	if v := float64(f); math.IsNaN(v) || math.IsInf(v, 0) {
		return strconv.AppendQuote(nil, strconv.FormatFloat(v, 'g', -1, 64)), nil
	}
	return json.Marshal(float64(f))
}

// UnmarshalJSON implements json.Unmarshaler.
func (f *Figure) UnmarshalJSON(b []byte) error {
	v, err := strconv.ParseFloat(strings.Trim(string(b), `"`), 64)
	if string(b) != "null" {
		*f = Figure(v)
		return err
	}
	return nil
}
