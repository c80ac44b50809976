// Command step times a whole training step of one GPT, forward, backward and AdamW, in Deepwell, in
// JAX and in PyTorch, in turns in one run, and prints tokens per second and their ratios.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/abtest"
	"github.com/deepwell/deepwell/internal/malloc"
)

var sizes = []abtest.Size{
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
	if err := malloc.Exec(); err != nil {
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

// compare lets all sides of one size take turns.
func compare(ctx context.Context, e *engine.Engine, s abtest.Size, o options) error {
	w, err := abtest.NewWeights(s)
	if err != nil {
		return err
	}
	defer w.Remove()
	rows, err := sides(ctx, e, s, w, o)
	defer func() {
		for _, r := range rows {
			r.Side.Stop()
		}
	}()
	if err != nil {
		return err
	}
	return abtest.Compare(os.Stdout, s, rows, o.turns, o.steps)
}
