// Command step times a whole training step of one GPT, forward, backward and AdamW, in Deepwell, in
// JAX and in PyTorch, in turns in one run, and prints tokens per second and their ratios.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/resident"
)

// A size is a model and a batch of it.
type size struct {
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

var sizes = []size{
	{Name: "13M", Vocab: 4096, Hidden: 384, Layers: 6, Heads: 6, Batch: 8, Seq: 256},
	{Name: "60M", Vocab: 8192, Hidden: 768, Layers: 8, Heads: 12, Batch: 4, Seq: 256},
	{Name: "tiny", Vocab: 512, Hidden: 128, Layers: 2, Heads: 2, Batch: 2, Seq: 128},
}

// options are what a person can choose.
type options struct {
	jax, torch   string
	sizes, types string
	turns, steps int
	dump, also   string
}

func main() {
	// Before anything else: the process begins again with memory that stays.
	if err := resident.Exec(); err != nil {
		fmt.Fprintln(os.Stderr, "step: memory is not kept between runs:", err)
	}
	var o options
	flag.StringVar(&o.jax, "jax", "", "a Python that has jax")
	flag.StringVar(&o.torch, "torch", "", "a Python that has torch")
	flag.StringVar(&o.sizes, "sizes", "13M,60M", "models")
	flag.StringVar(&o.types, "types", "f32,bf16", "types of the products")
	flag.IntVar(&o.turns, "turns", 7, "turns of each side")
	flag.IntVar(&o.steps, "steps", 3, "steps in a turn")
	flag.StringVar(&o.dump, "dump", "", "write the lowered programs to this folder")
	flag.StringVar(&o.also, "also", "", "NAME=FOLDER,...: programs of earlier -dump, as more rows")
	flag.Parse()
	if err := run(context.Background(), o); err != nil {
		fmt.Fprintln(os.Stderr, "step:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	e, err := engine.Open(ctx, "cpu", engine.Options{Devices: 1})
	if err != nil {
		return err
	}
	defer e.Close()
	for _, s := range sizes {
		for d := range strings.SplitSeq(o.types, ",") {
			if !slices.Contains(strings.Split(o.sizes, ","), s.Name) {
				continue
			}
			s.DType = d
			if err := compare(ctx, e, s, o); err != nil {
				return err
			}
		}
	}
	return nil
}

// A turn is what one side did in its turn: seconds and processor seconds of a step, and the losses.
type turn struct {
	wall, cpu float64
	losses    []float64
}

// A side trains the model, some steps at a time.
type side interface {
	turn(steps int) (turn, error)
	stop()
}

// A row is one side with its turns.
type row struct {
	name  string
	side  side
	turns []turn
}

// compare lets all sides take turns, so that a loaded machine loads them all.
func compare(ctx context.Context, e *engine.Engine, s size, o options) error {
	w, err := newWeights(s)
	if err != nil {
		return err
	}
	defer w.remove()
	rows, err := sides(ctx, e, s, w, o)
	defer func() {
		for _, r := range rows {
			r.side.stop()
		}
	}()
	if err != nil {
		return err
	}
	for n := range o.turns + 1 {
		for _, r := range rows {
			t, err := r.side.turn(o.steps)
			if err != nil {
				return fmt.Errorf("%s: %w", r.name, err)
			}
			r.turns = append(r.turns, t)
			if n == 0 {
				fmt.Fprintf(os.Stderr, "%s %s %s: first losses %.6f\n", s.Name, s.DType, r.name, t.losses)
			}
		}
	}
	table(s, rows, o)
	return agree(s, rows)
}

// sides starts everyone who takes part; those that were started are returned with an error, too.
func sides(ctx context.Context, e *engine.Engine, s size, w *weights, o options) ([]*row, error) {
	var rows []*row
	add := func(name string, make func() (side, error)) error {
		x, err := make()
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		rows = append(rows, &row{name: name, side: x})
		return nil
	}
	err := add("deepwell", func() (side, error) { return newTrainer(ctx, e, s, w, o.dump) })
	for also := range strings.SplitSeq(o.also, ",") {
		if name, dir, ok := strings.Cut(also, "="); ok && err == nil {
			err = add(name, func() (side, error) { return oldTrainer(ctx, e, s, w, dir) })
		}
	}
	for _, p := range []struct{ name, python, script, mode string }{
		{"jax", o.jax, jaxSide, ""},
		{"torch eager", o.torch, torchSide, "eager"}, {"torch compile", o.torch, torchSide, "compile"},
	} {
		for _, kept := range []bool{false, true} {
			name := p.name
			if kept {
				name += ", memory kept"
			}
			if p.python == "" || err != nil {
				continue
			}
			s.Mode = p.mode
			err = add(name, func() (side, error) { return start(p.python, p.script, s, w, kept) })
		}
	}
	return rows, err
}

// table prints the rows. The first turn warms up. Ratios are of turns that stood side by side.
func table(s size, rows []*row, o options) {
	fmt.Printf("\n%s %s: vocabulary %d, width %d, %d layers, %d heads, batch %d of %d tokens; "+
		"%d turns of %d steps\n", s.Name, s.DType, s.Vocab, s.Hidden, s.Layers, s.Heads, s.Batch,
		s.Seq, o.turns, o.steps)
	fmt.Printf("%-28s %12s %10s %12s %14s %14s\n", "", "tok/s median", "tok/s best", "cpu s/step",
		"deepwell wall", "deepwell cpu")
	tokens := float64(s.Batch * s.Seq)
	for _, r := range rows {
		var wall, cpu, ratio []float64
		for i, t := range r.turns[1:] {
			wall, cpu = append(wall, t.wall), append(cpu, t.cpu)
			ratio = append(ratio, t.wall/rows[0].turns[1+i].wall)
		}
		base := rows[0].least()
		fmt.Printf("%-28s %12.0f %10.0f %12.3f %13.2fx %13.2fx\n", r.name, tokens/median(wall),
			tokens/slices.Min(wall), slices.Min(cpu), median(ratio), slices.Min(cpu)/base)
	}
}

// least is the least processor time of a step.
func (r *row) least() float64 {
	least := math.Inf(1)
	for _, t := range r.turns[1:] {
		least = min(least, t.cpu)
	}
	return least
}

// agree holds everyone to the losses of the first steps, which all began from the same weights.
// f32 differs by the order of sums; bf16 by what is rounded where: JAX rounds parameters and
// residual stream, the others the products.
func agree(s size, rows []*row) error {
	bound := map[string]float64{"f32": 2e-4, "bf16": 5e-3}[s.DType]
	var wrong []error
	for _, r := range rows[1:] {
		for i, want := range rows[0].turns[0].losses {
			got := r.turns[0].losses[i]
			if !(math.Abs(got-want) <= bound*want) {
				wrong = append(wrong, fmt.Errorf("%s: loss %d is %v, ours %v", r.name, i, got, want))
			}
		}
	}
	return errors.Join(wrong...)
}

func median(v []float64) float64 {
	v = slices.Clone(v)
	slices.Sort(v)
	return v[len(v)/2]
}
