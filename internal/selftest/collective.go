package selftest

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/program"
)

// A collective is one row of the table: how the op is written, and what it must give.
type collective struct {
	name string
	// sums says that the op adds, so that it is tried on numbers only.
	sums bool
	// in and out are the rows of each device's shard, for groups of n; one row is rowLen elements.
	in, out func(n int) int
	// text writes the op on %x; group is the replica_groups attribute.
	text func(n int, group, from, to, elem string) string
	// want gives the rows of member m of a group, from the rows of all members.
	want func(m int, all [][]row) []row
}

// A row is some elements that travel together, as numbers.
type row []float64

const rowLen = 4

func whole(n int) int { return 2 * n }
func one(int) int     { return 2 }

var collectives = []collective{
	{"all_gather", false, one, whole,
		func(_ int, group, from, to, _ string) string {
			return fmt.Sprintf(`"stablehlo.all_gather"(%%x) {all_gather_dim = 0 : i64, %s} : (%s) -> %s`,
				group, from, to)
		},
		func(_ int, all [][]row) []row { return slices.Concat(all...) },
	},
	{"all_reduce", true, whole, whole,
		func(_ int, group, from, to, elem string) string {
			return fmt.Sprintf(`"stablehlo.all_reduce"(%%x) (%s) {%s} : (%s) -> %s`,
				adder(elem), group, from, to)
		},
		func(_ int, all [][]row) []row { return sum(all) },
	},
	{"reduce_scatter", true, whole, one,
		func(_ int, group, from, to, elem string) string {
			return fmt.Sprintf(
				`"stablehlo.reduce_scatter"(%%x) (%s) {scatter_dimension = 0 : i64, %s} : (%s) -> %s`,
				adder(elem), group, from, to)
		},
		func(m int, all [][]row) []row { return sum(all)[2*m : 2*m+2] },
	},
	{"all_to_all", false, whole, whole,
		func(n int, group, from, to, _ string) string {
			return fmt.Sprintf(`"stablehlo.all_to_all"(%%x) {split_dimension = 0 : i64, `+
				`concat_dimension = 0 : i64, split_count = %d : i64, %s} : (%s) -> %s`, n, group, from, to)
		},
		func(m int, all [][]row) []row {
			var got []row
			for _, from := range all {
				got = append(got, from[2*m:2*m+2]...)
			}
			return got
		},
	},
	{"collective_permute", false, one, one,
		nil, // written by ring: it has pairs instead of groups
		func(m int, all [][]row) []row { return all[(m+len(all)-1)%len(all)] },
	},
}

func adder(elem string) string {
	return fmt.Sprintf("{\n^bb0(%%a: tensor<%[1]s>, %%b: tensor<%[1]s>):\n"+
		"%%c = stablehlo.add %%a, %%b : tensor<%[1]s>\nstablehlo.return %%c : tensor<%[1]s>\n}", elem)
}

func sum(all [][]row) []row {
	total := make([]row, len(all[0]))
	for r := range total {
		total[r] = make(row, rowLen)
		for _, from := range all {
			for i, v := range from[r] {
				total[r][i] += v
			}
		}
	}
	return total
}

// A payload is what a collective carries. Bytes of FP8 and FP4 travel as unsigned integers: the
// program converts them by bits before and after, since XLA:CPU would widen them on the way.
type payload struct {
	typ   dtype.DType
	value func(k int) float64
}

var payloads = []payload{
	{dtype.F32, small},
	{dtype.BF16, small},
	{dtype.U8, small},
	{dtype.F8E4M3FN, pattern},
	{dtype.F8E8M0FNU, pattern},
	{dtype.F4E2M1FN, pattern},
}

// small gives whole numbers whose sum over 8 devices is exact in bf16 and below 256.
func small(k int) float64 { return float64(k % 13) }

// pattern goes through all byte patterns, NaNs and infinities included.
func pattern(k int) float64 { return float64(k * 37 % 256) }

func (p payload) asBytes() bool { return p.wire() != p.typ }

// wire is the type on the way, which the numbers of a row are of.
func (p payload) wire() dtype.DType {
	if p.typ.Bits() <= 8 {
		return dtype.U8
	}
	return p.typ
}

// shape is the shape of a shard of some rows; FP4 has a last dimension of two, one byte together.
func (p payload) shape(rows int) dtype.Shape {
	s := dtype.Shape{Type: p.typ, Dims: []int64{int64(rows), rowLen}}
	if p.typ.Bits() == 4 {
		s.Dims = append(s.Dims, 2)
	}
	return s
}

// module writes the whole program for groups of n out of devices.
func (c collective) module(p payload, devices, n int) string {
	tensor := func(rows int) string {
		return dtype.Shape{Type: p.wire(), Dims: []int64{int64(rows), rowLen}}.MLIR()
	}
	in, out := c.in(n), c.out(n)
	var op string
	if c.text == nil {
		op = ring(devices, n, tensor(in))
	} else {
		op = c.text(n, groups(devices, n), tensor(in), tensor(out), p.wire().MLIR())
	}
	argument, result := p.shape(in).MLIR(), p.shape(out).MLIR()
	var b strings.Builder
	fmt.Fprintf(&b, "module @%s attributes {mhlo.num_replicas = %d : i32} {\n", c.name, devices)
	fmt.Fprintf(&b, "func.func @main(%%arg: %s) -> %s {\n", argument, result)
	if p.asBytes() {
		fmt.Fprintf(&b, "%%x = stablehlo.bitcast_convert %%arg : (%s) -> %s\n", argument, tensor(in))
		fmt.Fprintf(&b, "%%y = %s\n", op)
		fmt.Fprintf(&b, "%%r = stablehlo.bitcast_convert %%y : (%s) -> %s\n", tensor(out), result)
	} else {
		fmt.Fprintf(&b, "%%r = %s\n", strings.ReplaceAll(op, "%x", "%arg"))
	}
	fmt.Fprintf(&b, "return %%r : %s\n}\n}\n", result)
	return b.String()
}

// groups writes devices in groups of n neighbours.
func groups(devices, n int) string {
	var rows []string
	for g := 0; g < devices; g += n {
		var ids []string
		for i := range n {
			ids = append(ids, fmt.Sprint(g+i))
		}
		rows = append(rows, "["+strings.Join(ids, ",")+"]")
	}
	return fmt.Sprintf("replica_groups = dense<[%s]> : tensor<%dx%dxi64>",
		strings.Join(rows, ","), devices/n, n)
}

// ring writes a permute in which every device sends to the next of its group.
func ring(devices, n int, tensor string) string {
	var pairs []string
	for d := range devices {
		pairs = append(pairs, fmt.Sprintf("[%d,%d]", d, d/n*n+(d%n+1)%n))
	}
	return fmt.Sprintf(`"stablehlo.collective_permute"(%%x) {source_target_pairs = dense<[%s]> : `+
		`tensor<%dx2xi64>} : (%s) -> %[3]s`, strings.Join(pairs, ","), devices, tensor)
}

// CollectiveNames are the collectives' names, in the order in which they run.
func CollectiveNames() []string {
	return lists.Map(collectives, func(c collective) string { return c.name })
}

// Collectives runs every collective, or those with one of the names, on every payload it can carry,
// over all devices and over two halves, and compares each element. It returns the number of
// programs that were right.
func Collectives(ctx context.Context, e *engine.Engine, devices int, names ...string) (int, error) {
	right := 0
	for _, c := range collectives {
		if len(names) > 0 && !slices.Contains(names, c.name) {
			continue
		}
		for _, p := range payloads {
			if c.sums && p.asBytes() {
				continue
			}
			for _, n := range []int{devices, devices / 2} {
				if n < 2 {
					continue
				}
				if err := c.run(ctx, e, p, devices, n); err != nil {
					return right, diag.From(err).At("%s of %s in groups of %d", c.name, p.typ, n)
				}
				right++
			}
		}
	}
	return right, nil
}

func (c collective) run(ctx context.Context, e *engine.Engine, p payload, devices, n int) error {
	module := &program.FromText(c.name, c.module(p, devices, n), devices).Modules[0]
	x, err := e.Compile(ctx, module)
	if err != nil {
		return err
	}
	defer x.Free()
	shards := make([][]row, devices)
	for d := range shards {
		for r := range c.in(n) {
			v := make(row, rowLen)
			for i := range v {
				v[i] = p.value(29*d + 5*r + i)
			}
			shards[d] = append(shards[d], v)
		}
	}
	spec := x.Module().Args[0]
	arg, err := e.Place(x.Module(), spec, engine.Copied, func(d int) ([]byte, error) {
		return p.wire().Append(nil, slices.Concat(shards[d]...)...), nil
	})
	if err != nil {
		return err
	}
	defer arg.Free()
	run, err := x.Run(ctx, arg)
	if err != nil {
		return err
	}
	defer run.Free()
	if err := run.Wait(ctx); err != nil {
		return err
	}
	for d := range devices {
		group := shards[d/n*n : d/n*n+n]
		want := slices.Concat(c.want(d%n, group)...)
		data, err := run.Results[0].Read(ctx, d)
		if err != nil {
			return err
		}
		if got := p.wire().Values(data); !slices.Equal(got, want) {
			return diag.New(diag.RuntimeFailed, "device %d got %v, want %v", d, got, want)
		}
	}
	return nil
}
