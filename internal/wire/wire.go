// Package wire turns the bytes of a protocol buffer into Go values and back, by the numbers of its
// fields.
package wire

import (
	"errors"
	"iter"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
)

// Err is the cause of every error about bytes that are no protocol buffer.
var Err = errors.New("the bytes are not a well-formed protocol buffer")

// A Field is one field of a message. Like the generated readers, the accessors give the zero
// value when the field has another wire type than the one asked for.
type Field struct {
	Num protowire.Number
	typ protowire.Type
	U   uint64 // the value of a varint, or the bits of a fixed32
	B   []byte // the value of a string, bytes, message or packed list
	Raw []byte // the field as it stands in the message, with its tag
}

// Fields walks through the fields of a message in the order of the bytes. It ends early, with err
// set, where the bytes are not well formed, and after whoever walks has set err.
func Fields(msg []byte, err *error) iter.Seq[Field] {
	return func(yield func(Field) bool) {
		for len(msg) > 0 {
			f, n := consume(msg)
			if n < 0 {
				*err = Err
				return
			}
			if !yield(f) || *err != nil {
				return
			}
			msg = msg[n:]
		}
	}
}

// consume reads the field at the start of msg and its length, which is negative on error.
func consume(msg []byte) (Field, int) {
	num, typ, head := protowire.ConsumeTag(msg)
	if head < 0 {
		return Field{}, head
	}
	f := Field{Num: num, typ: typ}
	var n int
	switch typ {
	case protowire.VarintType:
		f.U, n = protowire.ConsumeVarint(msg[head:])
	case protowire.BytesType:
		f.B, n = protowire.ConsumeBytes(msg[head:])
	case protowire.Fixed32Type:
		var bits uint32
		bits, n = protowire.ConsumeFixed32(msg[head:])
		f.U = uint64(bits)
	default:
		n = protowire.ConsumeFieldValue(num, typ, msg[head:])
	}
	if n < 0 {
		return Field{}, n
	}
	f.Raw = msg[:head+n]
	return f, head + n
}

// Int gives an integer field.
func (f Field) Int() int64 { return int64(f.U) }

// Text gives a string field; a name with broken UTF-8 must not break the JSON it ends up in.
func (f Field) Text() string { return strings.ToValidUTF8(string(f.B), "\uFFFD") }

// Ints walks through a list of integers, which one field holds packed or many fields hold one
// by one. It sets err as Fields does.
func (f Field) Ints(err *error) iter.Seq[int64] {
	return func(yield func(int64) bool) {
		if f.typ == protowire.VarintType {
			yield(f.Int())
			return
		}
		for rest := f.B; len(rest) > 0; {
			u, n := protowire.ConsumeVarint(rest)
			if n < 0 {
				*err = Err
				return
			}
			if !yield(int64(u)) {
				return
			}
			rest = rest[n:]
		}
	}
}

// AddTo adds the integers of f to list.
func (f Field) AddTo(list *[]int64, err *error) {
	for v := range f.Ints(err) {
		*list = append(*list, v)
	}
}

// Into says where the fields of a message go, by their numbers: to a number, a flag, a text, bytes
// or a list of numbers, a message to another Into or to a function.
type Into map[protowire.Number]any

// Read reads a message. Fields that are not named are passed over.
func (to Into) Read(msg []byte) (err error) {
	for f := range Fields(msg, &err) {
		switch at := to[f.Num].(type) {
		case *int64:
			*at = f.Int()
		case *bool:
			*at = f.U != 0
		case *string:
			*at = f.Text()
		case *[]byte:
			*at = f.B
		case *[]int64:
			f.AddTo(at, &err)
		case Into:
			err = at.Read(f.B)
		case func([]byte) error:
			err = at(f.B)
		}
	}
	return err
}
