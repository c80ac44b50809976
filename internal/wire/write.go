package wire

import (
	"math"

	"google.golang.org/protobuf/encoding/protowire"
)

// A Msg is a message under construction.
type Msg []byte

// Int adds a field that is a whole number.
func (m Msg) Int(num protowire.Number, v int64) Msg {
	return protowire.AppendVarint(protowire.AppendTag(m, num, protowire.VarintType), uint64(v))
}

// Float adds a field of 32 bits.
func (m Msg) Float(num protowire.Number, v float32) Msg {
	m = protowire.AppendTag(m, num, protowire.Fixed32Type)
	return protowire.AppendFixed32(m, math.Float32bits(v))
}

// Double adds a field of 64 bits.
func (m Msg) Double(num protowire.Number, v float64) Msg {
	m = protowire.AppendTag(m, num, protowire.Fixed64Type)
	return protowire.AppendFixed64(m, math.Float64bits(v))
}

// Bytes adds a field of bytes: a message, most often.
func (m Msg) Bytes(num protowire.Number, b []byte) Msg {
	return protowire.AppendBytes(protowire.AppendTag(m, num, protowire.BytesType), b)
}

// Text adds a field that is a text.
func (m Msg) Text(num protowire.Number, s string) Msg { return m.Bytes(num, []byte(s)) }

// Packed adds a list of whole numbers.
func (m Msg) Packed(num protowire.Number, list ...int64) Msg {
	var b []byte
	for _, v := range list {
		b = protowire.AppendVarint(b, uint64(v))
	}
	return m.Bytes(num, b)
}
