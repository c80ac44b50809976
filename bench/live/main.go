// Command live predicts the step times of plans on eight CPU devices from what a probe measured,
// then runs the plans and tells how well the order was foreseen.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"

	"github.com/deepwell/deepwell"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/malloc"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/price"
)

// options are what a person can choose.
type options struct {
	seed         uint64
	plans        int
	turns, steps int
	machine      string
}

func main() {
	// Before anything else: the process begins again with memory that stays.
	if err := malloc.Exec(); err != nil {
		fmt.Fprintln(os.Stderr, "live: memory is not kept between runs:", err)
	}
	var o options
	flag.Uint64Var(&o.seed, "seed", 2, "of the plans; the cost model was tried out on seed 1")
	flag.StringVar(&o.machine, "machine", "", "what probe --measure wrote; else it is measured now")
	flag.IntVar(&o.plans, "plans", 20, "how many")
	flag.IntVar(&o.turns, "turns", 2, "turns of each plan; the fastest step counts")
	flag.IntVar(&o.steps, "steps", 3, "steps of a turn after one that warms up")
	flag.Parse()
	if err := run(context.Background(), os.Stdout, o); err != nil {
		fmt.Fprintln(os.Stderr, "live:", err)
		os.Exit(1)
	}
}

// A row is a plan with what was foreseen and what came.
type row struct {
	plan      *plan.Plan
	predicted float64 // seconds
	*runner
}

func run(ctx context.Context, w io.Writer, o options) error {
	m, err := measured(ctx, o.machine)
	if err != nil {
		return err
	}
	c := config()
	host := price.NewShared(*m.Measured, runtime.NumCPU())
	var rows []*row
	for _, p := range draw(rand.New(rand.NewPCG(o.seed, 0)), c, o.plans) {
		rows = append(rows, &row{plan: p, predicted: host.Seconds(shared(c, p))})
	}
	e, err := engine.Open(ctx, "cpu", engine.Options{Devices: devices})
	if err != nil {
		return err
	}
	defer e.Close()
	for turn := range o.turns {
		for _, r := range rows {
			if turn == 0 {
				if r.runner, err = newRunner(ctx, e, c, r.plan); err != nil {
					return fmt.Errorf("%s: %w", words(r.plan), err)
				}
				defer r.stop()
			}
			if err := r.turn(ctx, o.steps+1); err != nil {
				return fmt.Errorf("%s: %w", words(r.plan), err)
			}
			fmt.Fprintf(os.Stderr, "%-60s %.3f s, %.3f of processors\n", words(r.plan), r.wall, r.cpu)
		}
	}
	return report(w, o, m.Measured, rows)
}

// measured reads what deepwell probe --measure wrote, or measures.
func measured(ctx context.Context, path string) (*machine.Machine, error) {
	if path != "" {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		m, err := machine.Parse(text)
		if err == nil && m.Measured == nil {
			err = errors.New("nothing was measured: deepwell probe --measure")
		}
		return m, err
	}
	env, err := deepwell.NewEnv(os.Getenv, event.Discard)
	if err != nil {
		return nil, err
	}
	return env.Probe(ctx, machine.Options{NoGPU: true}, true)
}

// report writes the table, the fastest plan first.
func report(w io.Writer, o options, m *machine.Measured, rows []*row) error {
	slices.SortFunc(rows, func(a, b *row) int { return cmp.Compare(a.wall, b.wall) })
	fmt.Fprintf(w, "go run ./bench/live -seed %d -plans %d -turns %d -steps %d\n", o.seed, o.plans,
		o.turns, o.steps)
	fmt.Fprintf(w, "measured before: f32 %.1f GFLOP/s, copy %.2f GB/s; %d devices share %d cores\n",
		float64(m.MatmulF32)/1e9, float64(m.DeviceCopy)/1e9, devices, runtime.NumCPU())
	fmt.Fprintf(w, "%d rows of %d tokens a step, 5.2M parameters; the fastest of %d steps after %d"+
		"\n\n", batch, seq, o.turns*o.steps, o.turns)
	fmt.Fprintf(w, "%-62s %9s %9s %9s\n", "plan", "predicted", "step", "cpu")
	var predicted, wall, cpu []float64
	for _, r := range rows {
		fmt.Fprintf(w, "%-62s %7.3f s %7.3f s %7.3f s\n", words(r.plan), r.predicted, r.wall, r.cpu)
		predicted, wall, cpu = append(predicted, r.predicted), append(wall, r.wall), append(cpu, r.cpu)
		if first := rows[0].loss; !(math.Abs(r.loss-first) <= 1e-4*first) { // orders of sums in f32
			return fmt.Errorf("%s begins at a loss of %v, others at %v", words(r.plan), r.loss, first)
		}
	}
	fmt.Fprintf(w, "\nKendall's tau of predicted and measured: %.2f by time, %.2f by processor time "+
		"(of the two: %.2f)\n", kendall(predicted, wall), kendall(predicted, cpu), kendall(wall, cpu))
	return nil
}

// kendall is tau: of all pairs, the share in the same order less the share in the other.
func kendall(x, y []float64) float64 {
	sum, pairs := 0, 0
	for i := range x {
		for j := range i {
			sum += cmp.Compare(x[i], x[j]) * cmp.Compare(y[i], y[j])
			pairs++
		}
	}
	return float64(sum) / float64(max(pairs, 1))
}
