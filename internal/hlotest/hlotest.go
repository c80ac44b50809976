package hlotest

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
)

// A Msg is a protocol buffer message under construction.
type Msg []byte

// Int adds a field that is a whole number.
func (m Msg) Int(num protowire.Number, v int64) Msg {
	return protowire.AppendVarint(protowire.AppendTag(m, num, protowire.VarintType), uint64(v))
}

// Bytes adds a field that is bytes, or another message.
func (m Msg) Bytes(num protowire.Number, b []byte) Msg {
	return protowire.AppendBytes(protowire.AppendTag(m, num, protowire.BytesType), b)
}

// Text adds a field that is a string.
func (m Msg) Text(num protowire.Number, s string) Msg { return m.Bytes(num, []byte(s)) }

// Packed adds a field that is a list of whole numbers.
func (m Msg) Packed(num protowire.Number, list ...int64) Msg {
	var b []byte
	for _, v := range list {
		b = protowire.AppendVarint(b, uint64(v))
	}
	return m.Bytes(num, b)
}

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
