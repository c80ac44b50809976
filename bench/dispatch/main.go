// Command dispatch times an execution of a small 8-device program in Deepwell against the same
// program jitted in JAX, in turns in one run, and prints the median of the ratios.
package main

import (
	"context"
	_ "embed"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime/pprof"
	"time"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/abtest"
	"github.com/deepwell/deepwell/internal/stat"
	"github.com/deepwell/deepwell/program"
)

//go:embed jax_side.py
var jaxSide string

const devices = 8

// bodies are programs on 128 floats a device; the JAX side has the same two. A queue of psums is
// not compared: JAX 0.10.2 lets them take each other's threads, and XLA ends its process after
// 40 s; Deepwell lets each wait for the one before.
var bodies = []struct {
	name  string
	modes []string
	text  string
}{
	{"element-wise", []string{"wait", "queue"}, `%two = stablehlo.constant dense<2.0> : tensor<128xf32>
%one = stablehlo.constant dense<1.0> : tensor<128xf32>
%z = stablehlo.multiply %x, %two : tensor<128xf32>
%r = stablehlo.add %z, %one : tensor<128xf32>`},
	{"psum", []string{"wait"}, `%s = "stablehlo.all_reduce"(%x) ({
^bb0(%a: tensor<f32>, %b: tensor<f32>):
%c = stablehlo.add %a, %b : tensor<f32>
stablehlo.return %c : tensor<f32>
}) {replica_groups = dense<[[0,1,2,3,4,5,6,7]]> : tensor<1x8xi64>}
  : (tensor<128xf32>) -> tensor<128xf32>
%k = stablehlo.constant dense<0.125> : tensor<128xf32>
%r = stablehlo.multiply %s, %k : tensor<128xf32>`},
}

func main() {
	python := flag.String("python", "python3", "a Python that has jax")
	count := flag.Int("count", 2000, "executions in a turn")
	turns := flag.Int("turns", 11, "turns of each side")
	profile := flag.String("profile", "", "write a CPU profile of the Go side to this file")
	flag.Parse()
	if err := run(*python, *count, *turns, *profile); err != nil {
		fmt.Fprintln(os.Stderr, "dispatch:", err)
		os.Exit(1)
	}
}

func run(python string, count, turns int, profile string) error {
	ctx := context.Background()
	e, err := engine.Open(ctx, "cpu", engine.Options{Devices: devices})
	if err != nil {
		return err
	}
	defer e.Close()
	jax, err := abtest.Python(exec.Command(python, "-c", jaxSide), "bench/requirements.txt")
	if err != nil {
		return err
	}
	defer jax.Stop()
	if profile != "" {
		f, err := os.Create(profile)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := pprof.StartCPUProfile(f); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	fmt.Printf("%-13s %-6s %12s %12s %8s   (medians of %d turns of %d, JAX %s)\n", "program", "mode",
		"deepwell", "jax", "ratio", turns, count, jax.Version)
	worst := 0.0
	for _, b := range bodies {
		s, err := newSide(ctx, e, b.text)
		if err != nil {
			return err
		}
		for _, mode := range b.modes {
			ratio, err := compare(ctx, s, jax, b.name, mode, count, turns)
			if err != nil {
				return err
			}
			worst = max(worst, ratio)
		}
		s.free()
	}
	fmt.Printf("worst ratio %.2f\n", worst)
	return nil
}

// compare lets both sides take turns, so that a loaded machine loads both.
func compare(ctx context.Context, s *side, jax *abtest.Process, name, mode string,
	count, turns int) (float64, error) {
	var ours, theirs, ratios []float64
	for turn := range turns + 1 {
		a, err := s.time(ctx, mode, count)
		if err != nil {
			return 0, err
		}
		b, err := jax.Ask(1, name, mode, count)
		if err != nil {
			return 0, err
		}
		if turn > 0 { // the first turn warms up
			ours, theirs, ratios = append(ours, a), append(theirs, b[0]), append(ratios, a/b[0])
		}
	}
	ratio := stat.Median(ratios)
	fmt.Printf("%-13s %-6s %9.1f µs %9.1f µs %8.2f\n", name, mode, stat.Median(ours)*1e6,
		stat.Median(theirs)*1e6, ratio)
	return ratio, nil
}

// A side is Deepwell's program with its argument.
type side struct {
	x   *engine.Executable
	arg *engine.Array
}

func newSide(ctx context.Context, e *engine.Engine, body string) (*side, error) {
	text := fmt.Sprintf("module @m attributes {mhlo.num_replicas = %d : i32} {\n"+
		"func.func @main(%%x: tensor<128xf32>) -> tensor<128xf32> {\n%s\n"+
		"return %%r : tensor<128xf32>\n}\n}\n", devices, body)
	x, err := e.Compile(ctx, &program.FromText("m", text, devices).Modules[0])
	if err != nil {
		return nil, err
	}
	arg, err := e.Place(x.Module(), x.Module().Args[0], engine.Copied,
		func(int) ([]byte, error) { return make([]byte, 512), nil })
	return &side{x, arg}, err
}

func (s *side) free() {
	s.arg.Free()
	s.x.Free()
}

func (s *side) time(ctx context.Context, mode string, count int) (float64, error) {
	at := s.arg
	var last *engine.Run
	start := time.Now()
	for range count {
		run, err := s.x.Run(ctx, at)
		if err != nil {
			return 0, err
		}
		if mode == "wait" {
			if err := run.Wait(ctx); err != nil {
				return 0, err
			}
		}
		if last != nil {
			// The run before is done or queued before this one; waiting gives its events back.
			if err := last.Wait(ctx); err != nil {
				return 0, err
			}
			last.Free()
		}
		at, last = run.Results[0], run
	}
	if err := last.Wait(ctx); err != nil {
		return 0, err
	}
	took := time.Since(start).Seconds() / float64(count)
	last.Free()
	return took, nil
}
