package lower_test

import (
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
)

// cpuTime is what the process has used of all processors.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkLinear is the three GEMMs of a linear: in bf16, and quantized.
func BenchmarkLinear(b *testing.B) {
	const rows, in, out = 2048, 384, 1536
	d := irtest.D
	plain := func() *ir.Graph {
		g := ir.NewBuilder("linear")
		x := g.Input("x", ir.Param, irtest.F32(d("rows", rows), d("embed", in)), "")
		w := g.Input("w", ir.Param, irtest.F32(d("mlp", out), d("embed", in)), "")
		dy := g.Input("dy", ir.Data, irtest.F32(d("rows", rows), d("mlp", out)), "")
		all, err := g.Graph(g.LinearIn(x, w, dtype.BF16), g.LinearIn(dy, w, dtype.BF16),
			g.LinearIn(dy, x, dtype.BF16))
		if err != nil {
			b.Fatal(err)
		}
		return all
	}
	for _, row := range []struct {
		name  string
		graph *ir.Graph
	}{
		{"bf16", plain()},
		{"mxfp8", quantizedGEMMs(b, ir.MXFP8, dtype.F32, rows, in, out)},
		{"nvfp4", quantizedGEMMs(b, ir.NVFP4, dtype.F32, rows, in, out)},
	} {
		b.Run(row.name, func(b *testing.B) { measure(b, row.graph) })
	}
}

// BenchmarkQuantize is each way to write 2048 by 1536 numbers.
func BenchmarkQuantize(b *testing.B) {
	d := irtest.D
	for _, f := range []ir.Format{ir.MXFP8, ir.NVFP4} {
		for _, row := range []struct {
			name, along           string
			tile, hadamard, noisy bool
		}{
			{"rows", "cols", false, false, false}, {"columns", "rows", false, false, false},
			{"tiles", "cols", true, false, false}, {"tiles of columns", "rows", true, false, false},
			{"hadamard", "rows", false, true, false}, {"stochastic", "cols", false, false, true},
			{"stochastic hadamard", "rows", false, true, true},
		} {
			if f == ir.MXFP8 && (row.tile || row.hadamard || row.noisy) {
				continue
			}
			b.Run(string(f)+" "+row.name, func(b *testing.B) {
				q := quantizing{elem: dtype.F32, dims: []ir.Dim{d("rows", 2048), d("cols", 1536)},
					how: ir.Quantize{Format: f, Along: []string{row.along}, Tile: row.tile,
						Hadamard: row.hadamard}, noisy: row.noisy}
				measure(b, q.graph(b))
			})
		}
	}
	for _, hadamard := range []bool{false, true} {
		b.Run(fmt.Sprintf("amax %v", hadamard), func(b *testing.B) {
			g := ir.NewBuilder("amax")
			x := g.Input("x", ir.Data, irtest.F32(d("rows", 2048), d("cols", 1536)), "")
			all, err := g.Graph(g.Amax(x, []string{"rows"}, hadamard))
			if err != nil {
				b.Fatal(err)
			}
			measure(b, all)
		})
	}
}

func measure(b *testing.B, g *ir.Graph) {
	r := enginetest.Open(b, engine.Options{Devices: 1})
	r.Flags = kernels.For("cpu").Exact(nil)
	p := r.Compile(b, g, lower.Options{Kernels: kernels.For("cpu")})
	data := randomInputs(rand.New(rand.NewPCG(1, 2)), g)
	var args []*engine.Array
	for _, v := range g.Inputs {
		args = append(args, p.Put(b, v.Name, data[v.Name][0].Data))
	}
	step := func() {
		run, err := p.Executable.Run(b.Context(), args...)
		if err != nil {
			b.Fatal(err)
		}
		if err := run.Wait(b.Context()); err != nil {
			b.Fatal(err)
		}
		run.Free()
	}
	step()
	b.ResetTimer()
	start := cpuTime()
	for b.Loop() {
		step()
	}
	b.ReportMetric(float64((cpuTime()-start).Microseconds())/1000/float64(b.N), "cpu-ms/op")
}
