package overlap

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/deepwell/deepwell/internal/hlo"
)

// A msg is a protocol buffer message under construction.
type msg []byte

func (m msg) int(num protowire.Number, v int64) msg {
	return protowire.AppendVarint(protowire.AppendTag(m, num, protowire.VarintType), uint64(v))
}

func (m msg) bytes(num protowire.Number, b []byte) msg {
	return protowire.AppendBytes(protowire.AppendTag(m, num, protowire.BytesType), b)
}

func (m msg) text(num protowire.Number, s string) msg { return m.bytes(num, []byte(s)) }

func (m msg) packed(num protowire.Number, list ...int64) msg {
	var b []byte
	for _, v := range list {
		b = protowire.AppendVarint(b, uint64(v))
	}
	return m.bytes(num, b)
}

// Element types as XLA numbers them.
const (
	s32, tuple, bf16 = 4, 13, 16
)

func array(typ int64, dims ...int64) msg { return msg(nil).int(2, typ).packed(3, dims...) }

func tupleOf(elems ...msg) msg {
	m := msg(nil).int(2, tuple)
	for _, e := range elems {
		m = m.bytes(4, e)
	}
	return m
}

// A builder writes a scheduled program by hand: instructions run in the order in which they are
// added. Numbers are those of the whole program.
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
	i := msg(nil).text(1, fmt.Sprintf("%s.%d", opcode, l.last)).text(2, opcode).bytes(3, shape).
		int(35, l.last).packed(36, operands...)
	l.all = append(l.all, append(i, more...))
	return l.last
}

// end closes the computation; its last instruction is its result.
func (l *list) end() int64 {
	m := msg(nil).text(1, l.name).int(5, l.id).int(6, l.last)
	for _, i := range l.all {
		m = m.bytes(2, i)
	}
	l.b.comps = append(l.b.comps, m)
	return l.id
}

// read gives the program whose entry is a computation.
func (b *builder) read(t testing.TB, entry int64, replicas int64) *hlo.Module {
	t.Helper()
	m := msg(nil).text(1, "hand").int(6, entry)
	for _, c := range b.comps {
		m = m.bytes(3, c)
	}
	config := msg(nil).int(4, replicas).int(5, 1)
	out, err := hlo.Read("hlo_with_config", msg(nil).bytes(1, m).bytes(2, config))
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// The tensors of all programs here: a square of bf16, 32 MiB, whose product with another is
// 2·4096³ operations; an eighth of its rows.
const side = 4096

func whole() msg { return array(bf16, side, side) }
func piece() msg { return array(bf16, side/8, side) }

// param adds the parameter of that number.
func (l *list) param(n int64, shape msg) int64 { return l.with("parameter", shape, msg(nil).int(9, n)) }

func (l *list) element(n int64, shape msg, of int64) int64 {
	return l.with("get-tuple-element", shape, msg(nil).int(13, n), of)
}

// product multiplies two squares as XLA:GPU writes it.
func (l *list) product(x, y int64) int64 {
	config := `{"gemm_backend_config":{"dot_dimension_numbers":` +
		`{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}`
	more := msg(nil).text(28, "__cublas$lt$matmul").text(43, config)
	return l.element(0, whole(), l.with("custom-call", tupleOf(whole(), array(2, 1024)), more, x, y))
}

// group is the replica groups of a collective: count of size, and the distance of neighbours.
func group(count, size, stride int64) msg {
	if stride == 1 {
		return msg(nil).bytes(92, msg(nil).int(1, count).int(2, size).packed(3, count*size).packed(4, 0))
	}
	return msg(nil).bytes(92, msg(nil).int(1, count).int(2, size).packed(3, size, stride).packed(4, 1, 0))
}

// start begins a gather of pieces, as XLA:GPU wraps it; config is that of the wrapper.
func (l *list) start(kind string, g msg, config string, x int64) int64 {
	from, to := piece(), whole()
	if kind == "reduce-scatter" {
		from, to = to, from
	}
	inner := l.b.list("async_" + kind)
	p := inner.param(0, from)
	inner.with(kind, to, g, p)
	id := inner.end()
	more := msg(nil).packed(38, id).text(43, config)
	return l.with("async-start", tupleOf(tupleOf(from), to, array(s32)), more, x)
}

func (l *list) done(kind string, start int64) int64 {
	to := whole()
	if kind == "reduce-scatter" {
		to = piece()
	}
	return l.add("async-done", to, start)
}

// repeat runs a body a number of times.
func (l *list) repeat(body int64, times int, shape msg, x int64) int64 {
	cond := l.b.list("cond")
	cond.param(0, shape)
	cond.add("constant", array(1))
	more := msg(nil).packed(38, body, cond.end()).
		text(43, strings.ReplaceAll(`{"known_trip_count":{"n":"N"}}`, "N", fmt.Sprint(times)))
	return l.with("while", shape, more, x)
}
