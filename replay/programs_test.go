package replay

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/hlotest"
	"github.com/deepwell/deepwell/program"
)

type msg = hlotest.Msg

// arr is an array with its layout, dimensions from minor to major; none is row-major.
func arr(t elemType, dims []int64, layout ...int64) *shape {
	s := &shape{typ: t, dims: dims, layout: layout}
	if err := s.check(); err != nil {
		panic(err)
	}
	return s
}

func tup(elems ...*shape) *shape { return &shape{typ: typeTuple, elems: elems} }

// proto writes a shape with its layout, as optimized programs have it.
func (s *shape) proto() msg {
	if s.isTuple() {
		m := msg(nil).Int(2, int64(typeTuple))
		for _, e := range s.elems {
			m = m.Bytes(4, e.proto())
		}
		return m
	}
	return hlotest.Array(int64(s.typ), s.dims...).Bytes(5, msg(nil).Packed(1, s.layout...).
		Int(8, s.space))
}

// A builder writes an optimized program by hand.
type builder struct {
	name string
	id   int64 // of the computation
	next int64
	list []msg
	of   map[int64]*shape
	all  *[]msg // finished computations
}

func newBuilder(name string) *builder {
	return &builder{name: name, id: 1, of: map[int64]*shape{}, all: &[]msg{}}
}

// computation begins a computation that the program calls.
func (b *builder) computation(name string) *builder {
	return &builder{name: name, id: int64(100 + len(*b.all)), of: map[int64]*shape{}, all: b.all}
}

// op adds an instruction; attrs are further fields.
func (b *builder) op(opcode string, s *shape, attrs msg, operands ...int64) int64 {
	b.next++
	b.list = append(b.list, append(hlotest.Inst(b.next, opcode, s.proto(), operands...), attrs...))
	b.of[b.next] = s
	return b.next
}

func (b *builder) param(n int64, s *shape) int64 {
	return b.op("parameter", s, msg(nil).Int(9, n))
}

func (b *builder) scalar(v int64) int64 {
	s := arr(typeS32, nil)
	return b.op("constant", s, msg(nil).Bytes(8, msg(nil).Bytes(1, s.proto()).Packed(4, v)))
}

func (b *builder) element(of, index int64) int64 {
	return b.op("get-tuple-element", b.of[of].elems[index], msg(nil).Int(13, index), of)
}

func (b *builder) call(target, config string, s *shape, operands ...int64) int64 {
	return b.op("custom-call", s, msg(nil).Text(28, target).Text(43, config), operands...)
}

// done ends a computation, and gives its number.
func (b *builder) done(root int64) int64 {
	*b.all = append(*b.all, hlotest.Comp(b.id, b.name, root, b.list...))
	return b.id
}

// returns ends the program: its result is a tuple.
func (b *builder) returns(values ...int64) []byte {
	t := tup()
	for _, v := range values {
		t.elems = append(t.elems, b.of[v])
	}
	b.done(b.op("tuple", t, nil, values...))
	return hlotest.Module(b.name, 1, *b.all...)
}

// An example is a program written by hand, inputs for it, and what it computes by other means than
// the rewriter's.
type example struct {
	name    string
	code    []byte
	devices int           // 0 is 1
	args    [][][]float64 // by argument and device; one for all devices is enough
	want    [][][]float64 // by result and device, likewise
	bound   float64       // on the relative difference; 0 is equal numbers
}

// cpuEngine is the CPU engine of all tests, with eight devices.
var cpuEngine = sync.OnceValues(func() (*engine.Engine, error) {
	return engine.Open(context.Background(), "cpu", engine.Options{Devices: 8,
		Cache: enginetest.Cache()})
})

// execute runs a rewritten program.
func execute(t *testing.T, m *Module, x example) [][][]float64 {
	t.Helper()
	e, err := cpuEngine()
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	run, err := e.CompileHLO(t.Context(), &program.Module{Name: "example",
		Devices: program.Range(0, max(1, x.devices))}, m.Code)
	if err != nil {
		t.Fatal(err)
	}
	defer run.Free()
	module := run.Module()
	var args []*engine.Array
	for i, spec := range module.Args {
		a, err := e.Place(module, spec, engine.Copied, func(device int) ([]byte, error) {
			return spec.Global.Type.Append(nil, x.args[i][min(device, len(x.args[i])-1)]...), nil
		})
		if err != nil {
			t.Fatal(err)
		}
		args = append(args, a)
	}
	r, err := run.Run(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Free()
	out := make([][][]float64, len(r.Results))
	for i, a := range r.Results {
		for device := range a.Parts() {
			out[i] = append(out[i], enginetest.Read(t, a, device))
		}
	}
	return out
}

// distance is the largest relative Frobenius norm of the differences of results.
func (x example) distance(got [][][]float64) (worst float64, where string) {
	if len(got) < len(x.want) {
		return math.Inf(1), "the number of results"
	}
	for i, devices := range x.want {
		for d, g := range got[i] {
			want := devices[min(d, len(devices)-1)]
			rel := math.Inf(1)
			if len(want) == len(g) {
				rel = relative(g, want)
			}
			if rel > worst || math.IsNaN(rel) {
				worst, where = rel, fmt.Sprintf("result %d of device %d", i, d)
			}
		}
	}
	return worst, where
}

// relative is the Frobenius norm of a difference over the norm of what is wanted; NaN is NaN.
func relative(got, want []float64) float64 {
	var d, n float64
	for i := range want {
		if math.IsNaN(got[i]) && math.IsNaN(want[i]) {
			continue // what is not computed
		}
		d += (got[i] - want[i]) * (got[i] - want[i])
		n += want[i] * want[i]
	}
	if d == 0 {
		return 0
	}
	return math.Sqrt(d / max(n, 1e-30))
}

// randoms gives multiples of 1/32 between -1 and 1, which bf16 holds exactly.
func randoms(seed uint64, n int64) []float64 {
	rnd := rand.New(rand.NewPCG(seed, 17))
	list := make([]float64, n)
	for i := range list {
		list[i] = float64(rnd.IntN(65)-32) / 32
	}
	return list
}

// counts gives the numbers from 0.
func counts(n int64) []float64 {
	list := make([]float64, n)
	for i := range list {
		list[i] = float64(i)
	}
	return list
}

func one(values ...[]float64) [][][]float64 {
	var list [][][]float64
	for _, v := range values {
		list = append(list, [][]float64{v})
	}
	return list
}
