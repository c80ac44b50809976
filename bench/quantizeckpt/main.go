// Command quantizeckpt times the quantization of a checkpoint against a plain copy of the same
// files to the same disk, in turns in one run: bytes read and written a second, until all is on the
// disk.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/stat"
	"github.com/deepwell/deepwell/quantize"
	"github.com/deepwell/deepwell/safetensors"
)

func main() {
	size := flag.Float64("gb", 4, "size of the checkpoint in GB, in bf16")
	turns := flag.Int("turns", 3, "how often each is timed")
	dir := flag.String("dir", os.TempDir(), "a folder on the disk to measure")
	flag.Parse()
	if err := run(context.Background(), *dir, *size, *turns); err != nil {
		fmt.Fprintln(os.Stderr, "quantizeckpt:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, dir string, size float64, turns int) error {
	base, err := os.MkdirTemp(dir, "quantizeckpt")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(base) }()
	source, out := filepath.Join(base, "source"), filepath.Join(base, "out")
	if err := checkpoint(source, size); err != nil {
		return err
	}
	ways := []struct {
		name string
		do   func() (int64, error)
	}{
		{"plain copy", func() (int64, error) { return clone(out, source) }},
		{"mxfp8", func() (int64, error) { return timed(ctx, source, out, dtype.MXFP8) }},
		{"nvfp4", func() (int64, error) { return timed(ctx, source, out, dtype.NVFP4) }},
	}
	rates := map[string][]float64{}
	for range turns {
		for _, w := range ways {
			// What was written before must not be in the way, nor what is read in memory already.
			if err := errors.Join(os.RemoveAll(out), evict(source)); err != nil {
				return err
			}
			start := time.Now()
			bytes, err := w.do()
			if err != nil {
				return err
			}
			rates[w.name] = append(rates[w.name], float64(bytes)/time.Since(start).Seconds()/1e9)
		}
	}
	fmt.Printf("%.1f GB of bf16 on %d processors, the median of %d turns\n", size,
		runtime.NumCPU(), turns)
	plain := stat.Median(rates["plain copy"])
	for _, w := range ways {
		r := stat.Median(rates[w.name])
		fmt.Printf("%-12s %6.2f GB/s read and written  %4.0f %% of a plain copy  %.2f\n", w.name, r,
			100*r/plain, rates[w.name])
	}
	fmt.Printf("memory at most %s\n", peak())
	return nil
}

// checkpoint writes random layers of the shapes of an 8B Llama, as many as make the size, and an
// embedding.
func checkpoint(dir string, gb float64) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var items []safetensors.Item
	add := func(name string, rows, cols int64) {
		shape := dtype.Shape{Type: dtype.BF16, Dims: []int64{rows, cols}}
		items = append(items, safetensors.Item{Name: name, Shape: shape,
			Data: func(w io.Writer) error { return weights(w, shape.Elements(), uint64(len(items))) }})
	}
	add("model.embed_tokens.weight", 32000, 4096)
	for i := 0; total(items) < int64(gb*1e9); i++ {
		p := fmt.Sprintf("model.layers.%d.", i)
		add(p+"self_attn.q_proj.weight", 4096, 4096)
		add(p+"self_attn.k_proj.weight", 1024, 4096)
		add(p+"self_attn.v_proj.weight", 1024, 4096)
		add(p+"self_attn.o_proj.weight", 4096, 4096)
		add(p+"mlp.gate_proj.weight", 14336, 4096)
		add(p+"mlp.up_proj.weight", 14336, 4096)
		add(p+"mlp.down_proj.weight", 4096, 14336)
	}
	if _, err := safetensors.WriteFolder(dir, items, safetensors.Options{MaxBytes: 5e9}); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "config.json"), []byte(`{"model_type": "llama"}`), 0o644)
}

func total(items []safetensors.Item) (n int64) {
	for _, it := range items {
		n += it.Shape.Bytes()
	}
	return n
}

// weights writes normal numbers: a megabyte of them, over and over from other places.
func weights(w io.Writer, n int64, seed uint64) error {
	rng := rand.New(rand.NewPCG(seed, 1))
	const many = 1 << 20
	x := make([]float32, many)
	for i := range x {
		x[i] = float32(rng.NormFloat64() * 0.02)
	}
	buf := make([]byte, 2*many)
	dtype.BF16.Encode(buf, x)
	for left := 2 * n; left > 0; {
		at := 2 * rng.Int64N(many/2)
		some := buf[at:min(int64(len(buf)), at+left)]
		if _, err := w.Write(some); err != nil {
			return err
		}
		left -= int64(len(some))
	}
	return nil
}

// clone copies the files of a folder, one after the other, and waits for the disk.
func clone(to, from string) (bytes int64, err error) {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return 0, err
	}
	entries, err := os.ReadDir(from)
	if err != nil {
		return 0, err
	}
	buf := make([]byte, 4<<20)
	for _, e := range entries {
		in, err := os.Open(filepath.Join(from, e.Name()))
		if err != nil {
			return 0, err
		}
		out, err := os.Create(filepath.Join(to, e.Name()))
		if err != nil {
			return 0, err
		}
		// Hidden behind plain interfaces, the files are really read and written.
		n, err := io.CopyBuffer(struct{ io.Writer }{out}, struct{ io.Reader }{in}, buf)
		if err := errors.Join(err, out.Sync(), out.Close(), in.Close()); err != nil {
			return 0, err
		}
		bytes += 2 * n
	}
	return bytes, nil
}

func timed(ctx context.Context, from, to string, f dtype.Format) (int64, error) {
	r, err := quantize.Quantize(ctx, from, to, quantize.Options{To: f})
	if err != nil {
		return 0, err
	}
	return r.BytesIn + r.BytesOut, nil
}

// evict takes the files of a folder out of memory.
func evict(dir string) error {
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		return err
	}
	for _, path := range files {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		err = errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED), f.Close())
		if err != nil {
			return err
		}
	}
	return nil
}

// peak is the most memory that the process ever had, as Linux counts it.
func peak() string {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return "unknown"
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			return strings.Join(strings.Fields(rest), " ")
		}
	}
	return "unknown"
}
