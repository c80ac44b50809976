// Command aot times the compile of an MXFP8 program for 65,536 devices against 8, and shows what
// cuDNN's plans add to the memory of attention. No GPU is used.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/selftest"
	"github.com/deepwell/deepwell/internal/stat"
	"github.com/deepwell/deepwell/machine"
)

const turns = 5

var gpus = []string{"b200", "gb200", "b300", "gb300", "rtx6000pro"}

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "aot:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	with, err := engine.OpenCompiler(ctx, engine.Options{})
	if err != nil {
		return err
	}
	defer with.Close()
	without, err := engine.OpenCompiler(ctx, engine.Options{WithoutCuDNN: true})
	if err != nil {
		return err
	}
	defer without.Close()
	fmt.Printf("MXFP8 product and all-reduce, cuDNN plans compiled, seconds, medians of %d in turns\n",
		turns)
	fmt.Printf("%-11s %8s %8s %8s %14s\n", "GPU", "8", "1,024", "65,536", "65,536 / 8")
	worst := 0.0
	for _, gpu := range gpus {
		seconds := map[int][]float64{}
		for turn := range turns + 1 {
			for _, n := range []int{8, 1024, 65536} {
				r, err := compileMXFP8(ctx, with, gpu, n)
				if err != nil {
					return err
				}
				if turn > 0 {
					seconds[n] = append(seconds[n], r.Seconds)
				}
			}
		}
		ratio := stat.Median(seconds[65536]) / stat.Median(seconds[8])
		worst = max(worst, ratio)
		fmt.Printf("%-11s %8.2f %8.2f %8.2f %14.2f\n", gpu, stat.Median(seconds[8]),
			stat.Median(seconds[1024]), stat.Median(seconds[65536]), ratio)
	}
	fmt.Printf("worst ratio %.2f\n\nattention forward and backward on 8 devices, temp bytes\n", worst)
	fmt.Printf("%-11s %14s %14s\n", "GPU", "with cuDNN", "without")
	for _, gpu := range gpus {
		c, err := machine.ParseCluster("8x" + gpu)
		if err != nil {
			return err
		}
		real, err := with.Compile(ctx, selftest.Attention(8), c)
		if err != nil {
			return err
		}
		bare, err := without.Compile(ctx, selftest.Attention(8), c)
		if err != nil {
			return err
		}
		fmt.Printf("%-11s %14d %14d\n", gpu, real.Memory.Temp, bare.Memory.Temp)
	}
	return nil
}

func compileMXFP8(ctx context.Context, c *engine.Compiler, gpu string, n int) (*engine.Report,
	error) {
	cluster, err := machine.ParseCluster(fmt.Sprintf("%dx%s", n, gpu))
	if err != nil {
		return nil, err
	}
	return c.Compile(ctx, selftest.MXFP8(n), cluster)
}
