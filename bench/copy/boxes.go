package main

import (
	"fmt"
	"time"

	"github.com/deepwell/deepwell/internal/stat"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/spmd"
)

// boxes times how state is sharded for a device: its box of a stack of weights in f32, against a
// plain copy of as many bytes. The stack has 256 MB, and the device's part 64 MB.
func boxes() {
	whole := []ir.Dim{{Name: "layer", Size: 4}, {Name: "embed", Size: 4096}, {Name: "mlp", Size: 4096}}
	mesh := []ir.Axis{{Name: "fsdp", Size: 4}}
	part := func(cut int, order ...int) ir.Type {
		var t ir.Type
		for _, i := range order {
			d := whole[i]
			if i == cut {
				d.Size /= 4
			}
			t.Dims = append(t.Dims, d)
		}
		t.Place = t.Place.With("fsdp", whole[cut].Name)
		return t
	}
	ways := []struct {
		name string
		part ir.Type
	}{
		{"rows", part(1, 0, 1, 2)}, {"columns", part(2, 0, 1, 2)},
		{"rows, transposed", part(1, 0, 2, 1)}, {"columns, transposed", part(2, 0, 2, 1)},
	}
	src, dst := make([]byte, size), make([]byte, size/4)
	for i := range src {
		src[i] = byte(i)
	}
	times := map[string][]time.Duration{}
	timed := func(turn int, name string, run func()) {
		start := time.Now()
		if run(); turn > 0 { // the first turn touches the memory
			times[name] = append(times[name], time.Since(start))
		}
	}
	for turn := range turns + 1 {
		timed(turn, "plain copy", func() { copy(dst, src[turn%4*(size/4):]) })
		for _, w := range ways {
			timed(turn, w.name, func() { spmd.TakeShardBytes(dst, src, mesh, whole, w.part, turn%4) })
			timed(turn, w.name+", joined", func() {
				spmd.PutShardBytes(src, dst, mesh, whole, w.part, turn%4)
			})
		}
	}
	plain := stat.Median(times["plain copy"])
	fmt.Printf("\na device's quarter of a stack of weights, f32, against a plain copy of %d MB\n",
		size/4>>20)
	for _, w := range ways {
		for _, name := range []string{w.name, w.name + ", joined"} {
			m := stat.Median(times[name])
			fmt.Printf("%-28s %8.2f ms  %6.1f GB/s  %4.0f %% of a plain copy\n", name, m.Seconds()*1e3,
				size/4/m.Seconds()/1e9, 100*plain.Seconds()/m.Seconds())
		}
	}
}
