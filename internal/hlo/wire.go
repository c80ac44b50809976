package hlo

import (
	"errors"
	"iter"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
)

// errWire is the cause of every error about bytes that are no protocol buffer.
var errWire = errors.New("the bytes are not a well-formed protocol buffer")

// A field is one field of a message. Like the generated readers, the accessors give the zero
// value when the field has another wire type than the one asked for.
type field struct {
	num protowire.Number
	typ protowire.Type
	u   uint64 // the value of a varint
	b   []byte // the value of a string, bytes, message or packed list
}

// fields walks through the fields of a message in the order of the bytes. It ends early, with err
// set, where the bytes are not well formed, and after whoever walks has set err.
func fields(msg []byte, err *error) iter.Seq[field] {
	return func(yield func(field) bool) {
		for len(msg) > 0 {
			f, n := consume(msg)
			if n < 0 {
				*err = errWire
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
func consume(msg []byte) (field, int) {
	num, typ, head := protowire.ConsumeTag(msg)
	if head < 0 {
		return field{}, head
	}
	f := field{num: num, typ: typ}
	var n int
	switch typ {
	case protowire.VarintType:
		f.u, n = protowire.ConsumeVarint(msg[head:])
	case protowire.BytesType:
		f.b, n = protowire.ConsumeBytes(msg[head:])
	default:
		n = protowire.ConsumeFieldValue(num, typ, msg[head:])
	}
	if n < 0 {
		return field{}, n
	}
	return f, head + n
}

func (f field) int() int64 { return int64(f.u) }

// text gives a string field; a name with broken UTF-8 must not break the JSON it ends up in.
func (f field) text() string { return strings.ToValidUTF8(string(f.b), "\uFFFD") }

// ints walks through a list of integers, which one field holds packed or many fields hold one
// by one. It sets err as fields does.
func (f field) ints(err *error) iter.Seq[int64] {
	return func(yield func(int64) bool) {
		if f.typ == protowire.VarintType {
			yield(f.int())
			return
		}
		for rest := f.b; len(rest) > 0; {
			u, n := protowire.ConsumeVarint(rest)
			if n < 0 {
				*err = errWire
				return
			}
			if !yield(int64(u)) {
				return
			}
			rest = rest[n:]
		}
	}
}

// addTo adds the integers of f to list.
func (f field) addTo(list *[]int64, err *error) {
	for v := range f.ints(err) {
		*list = append(*list, v)
	}
}
