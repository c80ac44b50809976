package hlotest

import (
	"fmt"

	"github.com/deepwell/deepwell/internal/wire"
)

// A Msg is a protocol buffer message under construction.
type Msg = wire.Msg

// Element types as XLA numbers them.
const (
	S32   = 4
	F32   = 11
	BF16  = 16
	Token = 17
	tuple = 13
)

// Array is the shape of an array.
func Array(typ int64, dims ...int64) Msg { return Msg(nil).Int(2, typ).Packed(3, dims...) }

// Tuple is the shape of a tuple.
func Tuple(elems ...Msg) Msg {
	m := Msg(nil).Int(2, tuple)
	for _, e := range elems {
		m = m.Bytes(4, e)
	}
	return m
}

// Inst begins an instruction; its name is its opcode and number.
func Inst(id int64, opcode string, shape Msg, operands ...int64) Msg {
	return Msg(nil).Text(1, fmt.Sprintf("%s.%d", opcode, id)).Text(2, opcode).Bytes(3, shape).
		Int(35, id).Packed(36, operands...)
}

// Comp is a computation.
func Comp(id int64, name string, root int64, list ...Msg) Msg {
	m := Msg(nil).Text(1, name).Int(5, id).Int(6, root)
	for _, i := range list {
		m = m.Bytes(2, i)
	}
	return m
}

// Module is a program.
func Module(name string, entry int64, comps ...Msg) Msg {
	m := Msg(nil).Text(1, name).Int(6, entry)
	for _, c := range comps {
		m = m.Bytes(3, c)
	}
	return m
}
