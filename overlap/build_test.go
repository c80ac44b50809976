package overlap

import (
	"fmt"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/hlotest"
)

type msg = hlotest.Msg

const s32, bf16 = hlotest.S32, hlotest.BF16

var array, tupleOf = hlotest.Array, hlotest.Tuple

// A builder writes a scheduled program by hand: instructions run in the order in which they are
// added. Numbers count through the whole program.
type builder struct {
	next  int64
	comps []msg
}

// A list is a computation under construction.
type list struct {
	b    *builder
	name string
	id   int64
	all  []msg
	last int64
}

func (b *builder) list(name string) *list {
	b.next++
	return &list{b: b, name: name, id: b.next}
}

// add appends an instruction and gives its number.
func (l *list) add(opcode string, shape msg, operands ...int64) int64 {
	return l.with(opcode, shape, nil, operands...)
}

// with appends an instruction with more fields.
func (l *list) with(opcode string, shape, more msg, operands ...int64) int64 {
	l.b.next++
	l.last = l.b.next
	l.all = append(l.all, append(hlotest.Inst(l.last, opcode, shape, operands...), more...))
	return l.last
}

// end closes the computation; its last instruction is its result.
func (l *list) end() int64 {
	l.b.comps = append(l.b.comps, hlotest.Comp(l.id, l.name, l.last, l.all...))
	return l.id
}

// read gives the program whose entry is a computation.
func (b *builder) read(t testing.TB, entry int64, replicas int64) *hlo.Module {
	t.Helper()
	m := hlotest.Module("hand", entry, b.comps...)
	config := msg(nil).Int(4, replicas).Int(5, 1)
	out, err := hlo.Read("hlo_with_config", msg(nil).Bytes(1, m).Bytes(2, config))
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// The tensors of all programs here: a square of bf16, 32 MiB, whose GEMM with another is
// 2·4096³ operations; an eighth of its rows.
const side = 4096

func whole() msg { return array(bf16, side, side) }
func shard() msg { return array(bf16, side/8, side) }

// param adds the parameter of that number.
func (l *list) param(n int64, shape msg) int64 { return l.with("parameter", shape, msg(nil).Int(9, n)) }

func (l *list) element(n int64, shape msg, of int64) int64 {
	return l.with("get-tuple-element", shape, msg(nil).Int(13, n), of)
}

// gemm multiplies two squares as XLA:GPU writes it.
func (l *list) gemm(x, y int64) int64 {
	config := `{"gemm_backend_config":{"dot_dimension_numbers":` +
		`{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}`
	more := msg(nil).Text(28, "__cublas$lt$matmul").Text(43, config)
	return l.element(0, whole(), l.with("custom-call", tupleOf(whole(), array(2, 1024)), more, x, y))
}

// group is the replica groups of a collective: count of size, and the distance of neighbours.
func group(count, size, stride int64) msg {
	if stride == 1 {
		return msg(nil).Bytes(92, msg(nil).Int(1, count).Int(2, size).Packed(3, count*size).Packed(4, 0))
	}
	return msg(nil).Bytes(92, msg(nil).Int(1, count).Int(2, size).Packed(3, size, stride).Packed(4, 1, 0))
}

// start begins an all-gather of shards, as XLA:GPU wraps it; config is the wrapper's.
func (l *list) start(kind string, g msg, config string, x int64) int64 {
	from, to := shard(), whole()
	if kind == "reduce-scatter" {
		from, to = to, from
	}
	inner := l.b.list("async_" + kind)
	p := inner.param(0, from)
	inner.with(kind, to, g, p)
	id := inner.end()
	more := msg(nil).Packed(38, id).Text(43, config)
	return l.with("async-start", tupleOf(tupleOf(from), to, array(s32)), more, x)
}

func (l *list) done(kind string, start int64) int64 {
	to := whole()
	if kind == "reduce-scatter" {
		to = shard()
	}
	return l.add("async-done", to, start)
}

// repeat runs a body a number of times.
func (l *list) repeat(body int64, times int, shape msg, x int64) int64 {
	cond := l.b.list("cond")
	cond.param(0, shape)
	cond.add("constant", array(1))
	more := msg(nil).Packed(38, body, cond.end()).
		Text(43, strings.ReplaceAll(`{"known_trip_count":{"n":"N"}}`, "N", fmt.Sprint(times)))
	return l.with("while", shape, more, x)
}
