// Command depth times the compile of a training step with 126 layers against one with few: for a
// B200 that is not here against 4 layers, and for this machine's processor against the fewest that
// are written as a loop. Neither may take more than 1.3 times as long. A captured program of 64
// layers may take 1.4 times as long as one of 4, with the time in which it is read.
package main

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/stat"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/step"
)

const (
	turns = 3
	deep  = 126
	bound = 1.3
	// capturedDeep and capturedBound are of programs that torch.export saved.
	capturedDeep, capturedShallow = 64, 4
	capturedBound                 = 1.4
)

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "depth:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	gpu, err := engine.OpenCompiler(ctx, engine.Options{})
	if err != nil {
		return err
	}
	defer gpu.Close()
	cluster, err := machine.ParseCluster("1xb200")
	if err != nil {
		return err
	}
	big, err := model.Find("llama3.1-8b")
	if err != nil {
		return err
	}
	err = compare(
		"b200, layers of llama3.1-8b, bf16, 8,192 tokens, all recomputed", 4, big.Config, "sm_100", 8192,
		func(s *program.Module) error { _, err := gpu.Compile(ctx, s, cluster); return err })
	if err != nil {
		return err
	}
	if err := captured(func(s *program.Module) error {
		_, err := gpu.Compile(ctx, s, cluster)
		return err
	}); err != nil {
		return err
	}
	cpu, err := engine.Open(ctx, "cpu", engine.Options{Devices: 1})
	if err != nil {
		return err
	}
	defer cpu.Close()
	small := *big.Config
	small.Hidden, small.HeadDim, small.Rotary, small.MLP, small.Vocab = 256, 8, 8, 512, 512
	shallow := int64(1)
	for unrolled := true; unrolled; shallow++ {
		unrolled, _ = kernels.For("cpu").Unroll(shallow + 1)
	}
	return compare("cpu, layers of width 256, f32, 128 tokens", shallow, &small, "cpu", 128,
		func(s *program.Module) error {
			x, err := cpu.Compile(ctx, s)
			if err == nil {
				x.Free()
			}
			return err
		})
}

// compare compiles both depths in turns.
func compare(what string, shallow int64, c *model.Config, arch string, seq int,
	compile func(*program.Module) error) error {
	seconds := map[int64][]float64{}
	for range turns {
		for _, layers := range []int64{shallow, deep} {
			s, err := gradient(c, layers, arch, seq)
			if err != nil {
				return err
			}
			start := time.Now()
			if err := compile(s); err != nil {
				return err
			}
			seconds[layers] = append(seconds[layers], time.Since(start).Seconds())
		}
	}
	ratio := stat.Median(seconds[deep]) / stat.Median(seconds[shallow])
	fmt.Printf("%s: %d layers %.2f s, %d layers %.2f s, ratio %.2f (at most %.1f)\n", what, shallow,
		stat.Median(seconds[shallow]), deep, stat.Median(seconds[deep]), ratio, bound)
	return nil
}

func gradient(c *model.Config, layers int64, arch string, seq int) (*program.Module, error) {
	deep := *c
	deep.Layers = layers
	return gradientOf(&deep, arch, seq)
}

func gradientOf(m model.Model, arch string, seq int) (*program.Module, error) {
	r := recipe.Default()
	r.Batch, r.Microbatch, r.Seq = 1, 1, seq
	if arch == "cpu" {
		r.Precision = dtype.F32
	} else {
		r.Recompute = []ir.Tag{ir.Norm, ir.Attn, ir.MLP}
	}
	p, err := step.Build(step.Spec{Model: m, Recipe: r, Arch: arch})
	if err != nil {
		return nil, err
	}
	return p.Find(step.Gradient, 0).Module, nil
}

// captured compiles two programs of torch.export in turns: fixtures of package pt2, a GPT of width
// 32. Reading one finds its layers to be equal.
func captured(compile func(*program.Module) error) error {
	files := map[int64]string{}
	for _, layers := range []int64{capturedShallow, capturedDeep} {
		path, err := unpack(layers)
		if err != nil {
			return err
		}
		defer os.Remove(path) //nolint:errcheck // a temporary file
		files[layers] = path
	}
	whole, read := map[int64][]float64{}, map[int64][]float64{}
	for range turns {
		for layers, path := range files {
			start := time.Now()
			m, err := capture.Open(path, capture.Options{})
			if err != nil {
				return err
			}
			s, err := gradientOf(m.Trained(), "sm_100", 31)
			if err != nil {
				return err
			}
			read[layers] = append(read[layers], time.Since(start).Seconds())
			if err := compile(s); err != nil {
				return err
			}
			whole[layers] = append(whole[layers], time.Since(start).Seconds())
			if err := m.Close(); err != nil {
				return err
			}
		}
	}
	low, high := stat.Median(whole[capturedShallow]), stat.Median(whole[capturedDeep])
	fmt.Printf("b200, a captured GPT of width 32, bf16, 31 tokens, all recomputed: %d layers %.2f s "+
		"(%.2f read), %d layers %.2f s (%.2f read), ratio %.2f (at most %.1f)\n", capturedShallow, low,
		stat.Median(read[capturedShallow]), capturedDeep, high, stat.Median(read[capturedDeep]),
		high/low, capturedBound)
	return nil
}

// unpack writes a fixture to a temporary file.
func unpack(layers int64) (string, error) {
	in, err := os.Open(fmt.Sprintf("capture/pt2/testdata/deep%d.pt2.gz", layers))
	if err != nil {
		return "", err
	}
	defer in.Close()
	z, err := gzip.NewReader(in)
	if err != nil {
		return "", err
	}
	out, err := os.CreateTemp("", "deep*.pt2")
	if err != nil {
		return "", err
	}
	_, err = io.Copy(out, z) //nolint:gosec // our own fixture
	return out.Name(), errors.Join(err, out.Close())
}
