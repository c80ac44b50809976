// Command quantize times the block quantizers on all cores against a plain copy and against
// torchao, in turns in one run, and prints bytes read and written per second and their ratios.
package main

import (
	_ "embed"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/dtype/block"
	"github.com/deepwell/deepwell/internal/abtest"
)

//go:embed torch_side.py
var torchSide string

func main() {
	python := flag.String("python", "", "a Python that has torch and torchao")
	rows := flag.Int("rows", 16384, "rows")
	cols := flag.Int("cols", 4096, "columns")
	turns := flag.Int("turns", 11, "turns of each side")
	only := flag.String("only", "", "sides whose names begin so, and the copy")
	flag.Parse()
	if err := run(*python, *only, *rows, *cols, *turns); err != nil {
		fmt.Fprintln(os.Stderr, "quantize:", err)
		os.Exit(1)
	}
}

// A side does its work once and says how long it took.
type side struct {
	name  string
	bytes int // read and written
	run   func() (time.Duration, error)
}

func run(python, only string, rows, cols, turns int) error {
	if rows*cols%64 != 0 {
		return fmt.Errorf("%d×%d are no whole blocks", rows, cols)
	}
	sides, err := goSides(rows, cols)
	if err != nil {
		return err
	}
	if python != "" {
		p, err := abtest.Python(exec.Command(python, "-c", torchSide, strconv.Itoa(rows),
			strconv.Itoa(cols)), ".ci/oracles.txt")
		if err != nil {
			return err
		}
		defer p.Stop()
		fmt.Println(p.Version)
		sides = append(sides, torchSides(p, rows*cols)...)
	}
	sides = slices.DeleteFunc(sides, func(s side) bool {
		return s.name != "copy" && !strings.HasPrefix(s.name, only)
	})
	times := make([][]time.Duration, len(sides))
	for turn := range turns + 1 {
		for i, s := range sides {
			took, err := s.run()
			if err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
			if turn > 0 { // the first turn touches the memory
				times[i] = append(times[i], took)
			}
		}
	}
	fmt.Printf("%d×%d numbers, %d cores, %d turns: the median, and the best\n", rows, cols,
		runtime.GOMAXPROCS(0), turns)
	rate, best := map[string]float64{}, map[string]float64{}
	for i, s := range sides {
		slices.Sort(times[i])
		rate[s.name] = float64(s.bytes) / times[i][turns/2].Seconds() / 1e9
		best[s.name] = float64(s.bytes) / times[i][0].Seconds() / 1e9
		fmt.Printf("%-24s %7.2f GB/s %5.0f %% of a copy, %7.2f GB/s %5.0f %%\n", s.name,
			rate[s.name], 100*rate[s.name]/rate["copy"], best[s.name], 100*best[s.name]/best["copy"])
	}
	for _, format := range []string{"mxfp8", "nvfp4"} {
		for _, way := range []string{"", "-eager"} {
			if theirs := rate["torchao "+format+way]; theirs > 0 {
				fmt.Printf("%s of bf16 is %.1f times as fast as torchao%s\n", format,
					rate[format+" bf16"]/theirs, way)
			}
		}
	}
	return nil
}

// goSides are a copy and our quantizers, each on all cores.
func goSides(rows, cols int) ([]side, error) {
	n := rows * cols
	half, wide := make([]uint16, n), make([]float32, n)
	err := block.Spread(n, 1<<20, func(from, to int) error {
		r := rand.New(rand.NewPCG(1, uint64(from)))
		for i := from; i < to; i++ {
			wide[i] = float32(r.NormFloat64())
			half[i] = dtype.BF16FromF32(wide[i])
		}
		return nil
	})
	dst, q, scales := make([]uint16, n), make([]byte, n), make([]byte, n/16)
	all := func(f func(from, to int) error) func() (time.Duration, error) {
		return func() (time.Duration, error) {
			begin := time.Now()
			err := block.Spread(n, 64, f)
			return time.Since(begin), err
		}
	}
	most := block.Amax(half)
	return []side{
		{"copy", 4 * n, all(func(from, to int) error {
			copy(dst[from:to], half[from:to])
			return nil
		})},
		{"mxfp8 bf16", 2*n + n + n/32, all(func(from, to int) error {
			return block.MXFP8(q[from:to], scales[from/32:to/32], half[from:to])
		})},
		{"mxfp8 f32", 4*n + n + n/32, all(func(from, to int) error {
			return block.MXFP8(q[from:to], scales[from/32:to/32], wide[from:to])
		})},
		{"mxfp8 columns bf16", 2*n + n + n/32, func() (time.Duration, error) {
			begin := time.Now()
			err := block.MXFP8Columns(q, scales[:n/32], half, rows, cols)
			return time.Since(begin), err
		}},
		{"amax bf16", 2 * n, all(func(from, to int) error {
			block.Amax(half[from:to])
			return nil
		})},
		{"nvfp4 bf16", 2*n + n/2 + n/16, all(func(from, to int) error {
			return block.NVFP4(q[from/2:to/2], scales[from/16:to/16], half[from:to], most)
		})},
		{"nvfp4 stochastic bf16", 2*n + n/2 + n/16, all(func(from, to int) error {
			at := block.Window{Row: uint32(from / 64), Cols: 64}
			return block.Stochastic(q[from/2:to/2], scales[from/16:to/16], half[from:to], most,
				block.NewKey(1, 2, 3), at)
		})},
	}, err
}

// torchSides are counted by the same bytes as ours: torchao's NVFP4 finds the amax of the tensor
// too, which is a second reading that no figure here counts.
func torchSides(p *abtest.Process, n int) []side {
	var list []side
	for _, name := range []string{"mxfp8", "nvfp4", "mxfp8-eager", "nvfp4-eager"} {
		bytes := 2*n + n + n/32
		if strings.HasPrefix(name, "nvfp4") {
			bytes = 2*n + n/2 + n/16
		}
		list = append(list, side{"torchao " + name, bytes, func() (time.Duration, error) {
			seconds, err := p.Ask(1, name)
			if err != nil {
				return 0, err
			}
			return time.Duration(seconds[0] * 1e9), nil
		}})
	}
	return list
}
