// Command mesh times a whole training step of one GPT on eight CPU devices, FSDP 8 and TP 2 x
// FSDP 4, in Deepwell and in JAX with explicit sharding, in turns in one run, and prints tokens per
// second and their ratios.
package main

import (
	"context"
	_ "embed"
	"flag"
	"fmt"
	"os"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/abtest"
	"github.com/deepwell/deepwell/internal/malloc"
	"github.com/deepwell/deepwell/plan"
)

//go:embed jax_side.py
var jaxSide string

// devices is the number of CPU devices of everyone.
const devices = 8

// size is the smaller model of bench/step.
var size = abtest.Size{Name: "13M", Vocab: 4096, Hidden: 384, Layers: 6, Heads: 6, Batch: 8,
	Seq: 256}

// A layout is how the model is spread: by a plan in Deepwell, by a mesh in JAX.
type layout struct {
	name     string
	fsdp, tp int64
}

var layouts = []layout{{"fsdp8", 8, 1}, {"tp2fsdp4", 4, 2}}

// options are what a person can choose.
type options struct {
	jax            string
	layouts, types string
	ours, ways     string
	turns, steps   int
	kept           bool
}

func main() {
	// Before anything else: the process begins again with memory that stays.
	if err := malloc.Exec(); err != nil {
		fmt.Fprintln(os.Stderr, "mesh: memory is not kept between runs:", err)
	}
	var o options
	flag.StringVar(&o.jax, "jax", "", "a Python that has jax")
	flag.StringVar(&o.layouts, "layouts", "fsdp8,tp2fsdp4", "how the model is spread")
	flag.StringVar(&o.types, "types", "f32,bf16", "types of the products")
	flag.StringVar(&o.ways, "ways", "explicit+loop,shard_map+loop,explicit",
		"how JAX spreads the model, the first lines of jax_side.py say more")
	flag.StringVar(&o.ours, "ours", "layer", "for how long Deepwell's weights are whole, each with "+
		"+seq to shard the sequence between layers, too; the first is what the others are held to")
	flag.BoolVar(&o.kept, "kept", true, "let JAX keep the memory that it frees, as Deepwell does")
	flag.IntVar(&o.turns, "turns", 5, "turns of each side")
	flag.IntVar(&o.steps, "steps", 2, "steps in a turn")
	flag.Parse()
	if err := run(context.Background(), o); err != nil {
		fmt.Fprintln(os.Stderr, "mesh:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	e, err := engine.Open(ctx, "cpu", engine.Options{Devices: devices})
	if err != nil {
		return err
	}
	defer e.Close()
	for name := range strings.SplitSeq(o.types, ",") {
		for _, l := range layouts {
			s := size
			s.DType = name
			if !strings.Contains(","+o.layouts+",", ","+l.name+",") {
				continue
			}
			if err := compare(ctx, e, s, l, o); err != nil {
				return err
			}
		}
	}
	return nil
}

// planOf is the plan of a layout. The types stay f32: a CPU only multiplies in bf16.
func planOf(s abtest.Size, l layout, way string) *plan.Plan {
	gather, more, _ := strings.Cut(way, "+")
	p := plan.Default()
	p.Cluster = fmt.Sprintf("%dxcpu", devices)
	p.Seq, p.Batch = s.Seq, s.Batch
	p.FSDP = plan.FSDP{Size: l.fsdp, Zero: 3, Gather: gather}
	p.TP = plan.TP{Size: l.tp, Sequence: strings.Contains(more, "seq") && l.tp > 1}
	p.Types = plan.Types{Params: dtype.F32, Grads: dtype.F32, Collectives: dtype.F32}
	return p
}

// compare lets the sides of one layout take turns.
func compare(ctx context.Context, e *engine.Engine, s abtest.Size, l layout, o options) error {
	w, err := abtest.NewWeights(s)
	if err != nil {
		return err
	}
	defer w.Remove()
	var rows []*abtest.Row
	defer func() {
		for _, r := range rows {
			r.Side.Stop()
		}
	}()
	for way := range strings.SplitSeq(o.ours, ",") {
		p, err := newTrainer(ctx, e, s, w, planOf(s, l, way))
		if err != nil {
			return err
		}
		rows = append(rows, &abtest.Row{Name: l.name + " deepwell " + way, Side: p})
	}
	for way := range strings.SplitSeq(o.ways, ",") {
		if o.jax == "" || way == "" {
			continue
		}
		s.Mode = fmt.Sprintf("%s %d %d", way, l.fsdp, l.tp)
		p, err := abtest.Start(o.jax, jaxSide, s, w, o.kept,
			fmt.Sprintf("XLA_FLAGS=--xla_force_host_platform_device_count=%d", devices))
		if err != nil {
			return err
		}
		rows = append(rows, &abtest.Row{Name: l.name + " jax " + way, Side: p})
	}
	return abtest.Compare(os.Stdout, s, rows, o.turns, o.steps)
}
