// Command copy times 256 MB to a CPU device and back, and cutting state for a device, against a
// plain copy, in turns in one run.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/stat"
	"github.com/deepwell/deepwell/program"
)

const (
	size  = 256 << 20
	turns = 11
)

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "copy:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	e, err := engine.Open(ctx, "cpu", engine.Options{Devices: 1})
	if err != nil {
		return err
	}
	defer e.Close()
	stage := &program.Module{Name: "copy", Devices: program.Range(0, 1), Text: "-"}
	spec := program.Array{Name: "x", Global: dtype.Shape{Type: dtype.U8, Dims: []int64{size}}}
	src, dst := engine.Aligned(size), engine.Aligned(size)
	for i := range src {
		src[i], dst[i] = byte(i), 1
	}
	upload := func(from engine.Source) (time.Duration, *engine.Array, error) {
		start := time.Now()
		a, err := e.Place(stage, spec, from, func(int) ([]byte, error) { return src, nil })
		if err == nil {
			err = a.Await(ctx)
		}
		return time.Since(start), a, err
	}
	times := map[string][]time.Duration{}
	for turn := range turns + 1 {
		row := map[string]time.Duration{}
		start := time.Now()
		copy(dst, src)
		row["plain copy"] = time.Since(start)
		for _, way := range []struct {
			name string
			from engine.Source
		}{{"to device, copied", engine.Copied}, {"to device, lent", engine.Lent}} {
			took, a, err := upload(way.from)
			if err != nil {
				return err
			}
			row[way.name] = took
			if way.from == engine.Copied {
				start := time.Now()
				if err := a.ReadInto(ctx, 0, dst); err != nil {
					return err
				}
				row["to host"] = time.Since(start)
			}
			a.Free()
		}
		if turn > 0 { // the first turn touches the memory
			for name, took := range row {
				times[name] = append(times[name], took)
			}
		}
	}
	plain := stat.Median(times["plain copy"])
	for _, name := range []string{"plain copy", "to device, copied", "to device, lent", "to host"} {
		m := stat.Median(times[name])
		fmt.Printf("%-18s %8.2f ms  %6.1f GB/s  %4.0f %% of a plain copy\n", name, m.Seconds()*1e3,
			size/m.Seconds()/1e9, 100*plain.Seconds()/m.Seconds())
	}
	boxes()
	return nil
}
