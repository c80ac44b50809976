// Command moe times a mixture of experts and its gradient on one CPU device against the same block
// in JAX, written with ragged_dot and with batched dots, in turns in one run. With -wire it prints
// what a plan's experts send instead.
package main

import (
	"context"
	_ "embed"
	"encoding/binary"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"time"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/abtest"
	"github.com/deepwell/deepwell/internal/stat"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/program"
)

//go:embed jax_side.py
var jaxSide string

// size is the block that both sides compute. Slots are a capacity of 1.5 times the mean.
var size = struct {
	Tokens  int64 `json:"tokens"`
	Embed   int64 `json:"embed"`
	MLP     int64 `json:"mlp"`
	Experts int64 `json:"experts"`
	Top     int64 `json:"top"`
	Slots   int64 `json:"slots"`
}{2048, 256, 512, 8, 2, 768}

func main() {
	python := flag.String("jax", "python3", "a Python that has jax")
	turns := flag.Int("turns", 7, "turns of each side")
	count := flag.Int("count", 3, "executions in a turn")
	planned := flag.String("wire", "", "a plan.json: print what its experts send, and run nothing")
	flag.Parse()
	var err error
	if *planned != "" {
		err = wire(os.Stdout, *planned)
	} else {
		err = run(*python, *turns, *count)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "moe:", err)
		os.Exit(1)
	}
}

func run(python string, turns, count int) error {
	ctx := context.Background()
	e, err := engine.Open(ctx, "cpu", engine.Options{})
	if err != nil {
		return err
	}
	defer e.Close()
	sizes, err := json.Marshal(size)
	if err != nil {
		return err
	}
	jax, err := abtest.Python(exec.Command(python, "-c", jaxSide, string(sizes)),
		"bench/requirements.txt")
	if err != nil {
		return err
	}
	defer jax.Stop()
	fmt.Printf("%-5s %-8s %10s %10s %14s   (medians of %d turns of %d, JAX %s)\n", "type", "jax",
		"deepwell", "jax", "jax/deepwell", turns, count, jax.Version)
	for _, d := range []dtype.DType{dtype.F32, dtype.BF16} {
		s, err := newSide(ctx, e, d)
		if err != nil {
			return err
		}
		for _, form := range []string{"ragged", "batched"} {
			if err := compare(ctx, s, jax, form, d, turns, count); err != nil {
				return err
			}
		}
		s.free()
	}
	return nil
}

// compare lets both sides take turns, so that a loaded machine loads both.
func compare(ctx context.Context, s *side, jax *abtest.Process, form string, d dtype.DType, turns,
	count int) error {
	var ours, theirs, ratios []float64
	for turn := range turns + 1 {
		a, err := s.time(ctx, count)
		if err != nil {
			return err
		}
		b, err := jax.Ask(1, form, d, count)
		if err != nil {
			return err
		}
		if turn > 0 { // the first turn warms up
			ours, theirs, ratios = append(ours, a), append(theirs, b[0]), append(ratios, b[0]/a)
		}
	}
	fmt.Printf("%-5s %-8s %7.1f ms %7.1f ms %14.2f\n", d, form, stat.Median(ours)*1e3,
		stat.Median(theirs)*1e3, stat.Median(ratios))
	return nil
}

// A side is Deepwell's program with its arguments.
type side struct {
	x    *engine.Executable
	args []*engine.Array
}

// graph is the mean square of the block's result and its gradient, by weights and tokens. The
// GEMMs of a bf16 model are in bf16.
func graph(d dtype.DType) (*ir.Graph, error) {
	b := ir.NewBuilder("moe")
	dim := func(name string, n int64) ir.Dim { return ir.Dim{Name: name, Size: n} }
	of := func(t dtype.DType, dims ...ir.Dim) ir.Type { return ir.Type{Elem: t, Dims: dims} }
	embed, mlp := dim(ir.EmbedDim, size.Embed), dim(ir.MLPDim, size.MLP)
	x := b.Input("x", ir.Param, of(d, dim(ir.Batch, 8), dim(ir.Seq, size.Tokens/8), embed), "")
	weights := map[string]*ir.Value{
		"router": b.Input("router", ir.Param, of(dtype.F32, embed, dim(ir.RouterDim, size.Experts)), ""),
	}
	for _, name := range []string{"expert_gate", "expert_up", "expert_down"} {
		t := of(d, dim(ir.ExpertDim, size.Experts), embed, mlp)
		weights[name] = b.Input(name, ir.Param, t, "")
	}
	moe := &model.MoE{Experts: size.Experts, TopK: size.Top, MLP: size.MLP, Score: "softmax",
		Normalize: true, Scale: 1}
	mean := float64(size.Tokens*size.Top) / float64(size.Experts)
	y, _ := moe.Layer(b, x, weights, model.ExpertShape{Slots: float64(size.Slots) / mean})
	y = b.Convert(y, dtype.F32)
	n := float64(size.Tokens * size.Embed)
	g, err := b.Graph(b.Scale(b.Sum(b.Mul(y, y), ir.Batch, ir.Seq, ir.EmbedDim), 1/n))
	if err != nil {
		return nil, err
	}
	gr, err := ir.Grad(g, ir.GradPlan{})
	if err != nil {
		return nil, err
	}
	return gr.Joint()
}

func newSide(ctx context.Context, e *engine.Engine, d dtype.DType) (*side, error) {
	g, err := graph(d)
	if err != nil {
		return nil, err
	}
	text, err := lower.StableHLO(g, lower.Options{Kernels: kernels.For("cpu")})
	if err != nil {
		return nil, err
	}
	x, err := e.Compile(ctx, &program.FromText("moe", text, 1).Modules[0])
	if err != nil {
		return nil, err
	}
	s := &side{x: x}
	r := rand.New(rand.NewPCG(1, 1))
	for i, v := range g.Inputs {
		scale := 0.05
		if v.Name == "x" {
			scale = 1
		}
		bytes := random(r, v.Type, scale)
		a, err := e.Place(x.Module(), x.Module().Args[i], engine.Copied,
			func(int) ([]byte, error) { return bytes, nil })
		if err != nil {
			s.free()
			return nil, err
		}
		s.args = append(s.args, a)
	}
	return s, nil
}

// random is an array of normal numbers as engines take it.
func random(r *rand.Rand, t ir.Type, scale float64) (b []byte) {
	for range t.Shape().Elements() {
		bits := math.Float32bits(float32(scale * r.NormFloat64()))
		if t.Elem == dtype.BF16 {
			b = binary.LittleEndian.AppendUint16(b, uint16(bits>>16))
		} else {
			b = binary.LittleEndian.AppendUint32(b, bits)
		}
	}
	return b
}

func (s *side) free() {
	for _, a := range s.args {
		a.Free()
	}
	s.x.Free()
}

func (s *side) time(ctx context.Context, count int) (float64, error) {
	start := time.Now()
	for range count {
		run, err := s.x.Run(ctx, s.args...)
		if err != nil {
			return 0, err
		}
		err = run.Wait(ctx)
		run.Free()
		if err != nil {
			return 0, err
		}
	}
	return time.Since(start).Seconds() / float64(count), nil
}
