package abtest

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/deepwell/deepwell/internal/stat"
)

// A Size is a model and a batch of it. Python sides read it as JSON.
type Size struct {
	Name   string `json:"-"`
	Vocab  int64  `json:"vocab"`
	Hidden int64  `json:"hidden"`
	Layers int64  `json:"layers"`
	Heads  int64  `json:"heads"`
	Batch  int64  `json:"batch"`
	Seq    int64  `json:"seq"`
	DType  string `json:"dtype"`
	Mode   string `json:"mode,omitempty"`
}

// A Turn is what one side did in its turn: seconds and processor seconds of a step, and the losses.
type Turn struct {
	Wall, CPU float64
	Losses    []float64
}

// A Side trains the model, some steps at a time.
type Side interface {
	Turn(steps int) (Turn, error)
	Stop()
}

// A Row is one side with its turns.
type Row struct {
	Name  string
	Side  Side
	turns []Turn
}

// Take times some steps of a side in this process. A step gives its loss.
func Take(steps int, step func() (float64, error)) (Turn, error) {
	var losses []float64
	begin, used := time.Now(), CPUSeconds()
	for range steps {
		loss, err := step()
		if err != nil {
			return Turn{}, err
		}
		losses = append(losses, loss)
	}
	took := time.Since(begin).Seconds()
	n := float64(steps)
	return Turn{took / n, (CPUSeconds() - used) / n, losses}, nil
}

// CPUSeconds is the processor time of the process so far.
func CPUSeconds() float64 {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		return math.NaN()
	}
	return float64(r.Utime.Nano()+r.Stime.Nano()) / 1e9
}

// Compare lets all sides take turns after one that warms up, writes a table and holds everyone to
// the losses of the first row.
func Compare(w io.Writer, s Size, rows []*Row, turns, steps int) error {
	for n := range turns + 1 {
		for _, r := range rows {
			t, err := r.Side.Turn(steps)
			if err != nil {
				return fmt.Errorf("%s: %w", r.Name, err)
			}
			r.turns = append(r.turns, t)
			if n == 0 {
				fmt.Fprintf(os.Stderr, "%s %s %s: first losses %.6f\n", s.Name, s.DType, r.Name, t.Losses)
			}
		}
	}
	table(w, s, rows, turns, steps)
	return agree(s, rows)
}

// table prints the rows. The first turn warms up. Ratios are of turns that stood side by side.
func table(w io.Writer, s Size, rows []*Row, turns, steps int) {
	fmt.Fprintf(w, "\n%s %s: vocabulary %d, width %d, %d layers, %d heads, batch %d of %d tokens; "+
		"%d turns of %d steps\n", s.Name, s.DType, s.Vocab, s.Hidden, s.Layers, s.Heads, s.Batch,
		s.Seq, turns, steps)
	fmt.Fprintf(w, "%-28s %12s %10s %12s %14s %14s\n", "", "tok/s median", "tok/s best", "cpu s/step",
		"deepwell wall", "deepwell cpu")
	tokens := float64(s.Batch * s.Seq)
	for _, r := range rows {
		var wall, cpu, ratio []float64
		for i, t := range r.turns[1:] {
			wall, cpu = append(wall, t.Wall), append(cpu, t.CPU)
			ratio = append(ratio, t.Wall/rows[0].turns[1+i].Wall)
		}
		base := rows[0].least()
		fmt.Fprintf(w, "%-28s %12.0f %10.0f %12.3f %13.2fx %13.2fx\n", r.Name, tokens/stat.Median(wall),
			tokens/slices.Min(wall), slices.Min(cpu), stat.Median(ratio), slices.Min(cpu)/base)
	}
}

// least is the least processor time of a step.
func (r *Row) least() float64 {
	least := math.Inf(1)
	for _, t := range r.turns[1:] {
		least = min(least, t.CPU)
	}
	return least
}

// agree holds everyone to the losses of the first steps, which all began from the same weights.
// f32 differs by the order of sums; bf16 by what is rounded where: JAX rounds parameters and
// residual stream, the others the products.
func agree(s Size, rows []*Row) error {
	bound := map[string]float64{"f32": 2e-4, "bf16": 5e-3}[s.DType]
	var wrong []error
	for _, r := range rows[1:] {
		for i, want := range rows[0].turns[0].Losses {
			got := r.turns[0].Losses[i]
			if !(math.Abs(got-want) <= bound*want) {
				wrong = append(wrong, fmt.Errorf("%s: loss %d is %v, ours %v", r.Name, i, got, want))
			}
		}
	}
	return errors.Join(wrong...)
}
