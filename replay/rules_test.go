package replay

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"

	"github.com/deepwell/deepwell/dtype"
)

// physicalOrder lists the row-major places of a shape's elements in the order of its memory.
func physicalOrder(s *shape) []int64 {
	strides := make([]int64, len(s.dims))
	stride := int64(1)
	for i, d := range slices.Backward(s.dims) {
		strides[i] = stride
		stride *= d
	}
	order := []int64{0}
	for _, d := range s.physical() {
		var next []int64
		for _, at := range order {
			for k := range s.dims[d] {
				next = append(next, at+k*strides[d])
			}
		}
		order = next
	}
	return order
}

// memory gives the bits of an array as the GPU has it, one for each place.
func memory(s *shape, values []float64) (bits []byte) {
	for _, at := range physicalOrder(s) {
		v := uint64(int64(values[at]))
		switch s.typ {
		case typeF32:
			v = uint64(math.Float32bits(float32(values[at])))
		case typeBF16:
			v = uint64(math.Float32bits(float32(values[at])) >> 16)
		}
		for k := range s.typ.bits() {
			bits = append(bits, byte(v>>k&1))
		}
	}
	return bits
}

// fromMemory is the way back.
func fromMemory(s *shape, bits []byte) []float64 {
	order := physicalOrder(s)
	values := make([]float64, len(order))
	for i, at := range order {
		var v uint64
		for k := range s.typ.bits() {
			v |= uint64(bits[int64(i)*s.typ.bits()+k]) << k
		}
		switch s.typ {
		case typeF32:
			values[at] = float64(math.Float32frombits(uint32(v)))
		case typeBF16:
			values[at] = float64(math.Float32frombits(uint32(v) << 16))
		default:
			values[at] = float64(v)
		}
	}
	return values
}

// bitcastExamples view memory in other shapes, layouts and types.
func bitcastExamples() (list []example) {
	for _, row := range []struct {
		name     string
		from, to *shape
	}{
		{"layout", arr(typeF32, []int64{2, 3, 4}, 0, 2, 1), arr(typeF32, []int64{4, 6}, 1, 0)},
		{"both layouts", arr(typeF32, []int64{4, 6}, 0, 1), arr(typeF32, []int64{2, 3, 4}, 1, 0, 2)},
		{"bf16 to u16", arr(typeBF16, []int64{3, 4}, 0, 1), arr(typeU16, []int64{2, 6})},
		{"u16 to bf16", arr(typeU16, []int64{3, 4}), arr(typeBF16, []int64{4, 3}, 0, 1)},
		{"f32 to u32", arr(typeF32, []int64{6}), arr(typeU32, []int64{2, 3}, 0, 1)},
		{"u8 to u32", arr(typeU8, []int64{2, 8}, 0, 1), arr(typeU32, []int64{2, 2}, 0, 1)},
		{"u64 to u8", arr(typeU64, []int64{2, 2}, 0, 1), arr(typeU8, []int64{4, 8})},
	} {
		b := newBuilder("bitcast " + row.name)
		values := counts(elements(row.from.dims))
		for i := range values {
			if values[i] *= 3; row.from.typ == typeU16 {
				values[i] += 0x3f80 // a bf16 number near 1
			}
		}
		code := b.returns(b.op("bitcast", row.to, nil, b.param(0, row.from)))
		list = append(list, example{name: b.name, code: code, args: one(values),
			want: one(fromMemory(row.to, memory(row.from, values)))})
	}
	return append(list, halfBytes("u8", typeU8), halfBytes("u64", typeU64))
}

// halfBytes unpacks words into codes of four bits, transposes these and packs them again.
func halfBytes(name string, word elemType) example {
	per := word.bits() / 4
	from, codes := arr(word, []int64{4, 3}), arr(typeE2M1, []int64{4, 3 * per})
	transposed := arr(typeE2M1, []int64{3 * per, 4})
	to := arr(typeU8, []int64{3 * per, 2})
	b := newBuilder("codes in " + name)
	x := b.op("bitcast", codes, nil, b.param(0, from))
	x = b.op("transpose", transposed, msg(nil).Packed(14, 1, 0), x)
	code := b.returns(b.op("bitcast", to, nil, x))
	values := counts(12)
	for i := range values {
		values[i] = math.Mod(values[i]*0x1234567+11, 251)
	}
	unpacked, flipped := fromMemory(codes, memory(from, values)), make([]float64, 12*per)
	for i := range int64(4) {
		for j := range 3 * per {
			flipped[j*4+i] = unpacked[i*3*per+j]
		}
	}
	return example{name: b.name, code: code, args: one(values),
		want: one(fromMemory(to, memory(transposed, flipped)))}
}

// literalExample has a constant whose elements are in another order than its dimensions.
func literalExample() example {
	b := newBuilder("literal")
	s := arr(typeBF16, []int64{2, 3}, 0, 1)
	values := []float64{1, 2, 3, 4, 5, 6}
	var data []byte
	for _, at := range physicalOrder(s) {
		data = dtype.BF16.Append(data, values[at])
	}
	x := b.op("constant", s, msg(nil).Bytes(8, msg(nil).Bytes(1, s.proto()).Bytes(13, data)))
	sum := b.op("add", s, nil, x, b.param(0, s))
	return example{name: b.name, code: b.returns(sum), args: one([]float64{10, 20, 30, 40, 50, 60}),
		want: one([]float64{11, 22, 33, 44, 55, 66})}
}

// loopConfigText is what XLA:GPU writes beside a loop.
func loopConfigText(trips, init, step int) string {
	return fmt.Sprintf(`{"known_trip_count":{"n":"%d"},"dynamic_variables":[`+
		`{"tuple_index":"0","init":"%d","step":"%d"}]}`, trips, init, step)
}

// sliceConfigText is what XLA:GPU writes beside a slice in a loop.
func sliceConfigText(offset, stride int) string {
	return fmt.Sprintf(`{"dynamic_slice_config":{"loop_index":"0","byte_offset":"0",`+
		`"byte_stride":"0","linear":{"byte_offset":"%d","byte_stride":"%d"}}}`, offset, stride)
}

// loopProgram adds the rows of a matrix [4, 3], the last one first, with a fusion that slices, in a
// loop. Its result is a copy by way of host memory.
func loopProgram(loop, slice string) []byte {
	b := newBuilder("loop")
	count, matrix, row := arr(typeS32, nil), arr(typeF32, []int64{4, 3}), arr(typeF32, []int64{3})
	state := tup(count, matrix, row)

	f := b.computation("dynamic-slice-fusion")
	data, i := f.param(0, matrix), f.param(1, count)
	at := f.op("subtract", count, nil, f.scalar(3), i)
	x := f.op("dynamic-slice", arr(typeF32, []int64{1, 3}), msg(nil).Packed(20, 1, 3).
		Text(43, slice), data, at, f.scalar(0))
	fused := f.done(f.op("bitcast", row, nil, x))

	body := b.computation("body")
	p := body.param(0, state)
	n, m := body.element(p, 0), body.element(p, 1)
	part := body.op("fusion", row, msg(nil).Packed(38, fused).Text(11, "kCustom"), m, n)
	sum := body.op("add", row, nil, body.element(p, 2), part)
	bodyID := body.done(body.op("tuple", state, nil, body.op("add", count, nil, n, body.scalar(1)), m,
		sum))

	c := b.computation("condition")
	less := c.op("compare", arr(typePred, nil), msg(nil).Text(63, "LT").Text(102, "TOTAL"),
		c.element(c.param(0, state), 0), c.scalar(4))
	conditionID := c.done(less)

	input := b.param(0, matrix)
	zero := b.op("broadcast", row, nil, b.op("convert", arr(typeF32, nil), nil, b.scalar(0)))
	start := b.op("tuple", state, nil, b.scalar(0), input, zero)
	result := b.element(b.op("while", state, msg(nil).Packed(38, bodyID, conditionID).Text(43, loop),
		start), 2)
	host := arr(typeF32, []int64{3})
	host.space = 5
	moving := b.op("copy-start", tup(host, row, arr(typeU32, nil)), nil, result)
	return b.returns(b.op("copy-done", host, nil, moving))
}

func loopExample() example {
	return example{name: "loop", code: loopProgram(loopConfigText(4, 0, 1), sliceConfigText(36, -12)),
		args: one(counts(12)), want: one([]float64{18, 22, 26})}
}

// asyncExample wraps a computation into an asynchronous pair.
func asyncExample() example {
	b := newBuilder("async")
	s := arr(typeF32, []int64{2, 2}, 0, 1)
	c := b.computation("wrapped")
	wrapped := c.done(c.op("negate", s, nil, c.param(0, s)))
	start := b.op("async-start", tup(tup(s), s), msg(nil).Packed(38, wrapped), b.param(0, s))
	return example{name: b.name, code: b.returns(b.op("async-done", s, nil, start)),
		args: one([]float64{1, 2, 3, 4}), want: one([]float64{-1, -2, -3, -4})}
}

// Every example computes what it should, as it is and with bf16 held as f32.
func TestRules(t *testing.T) {
	for _, x := range examples() {
		t.Run(x.name, func(t *testing.T) {
			for _, wide := range []bool{false, true} {
				m, err := Rewrite("hlo", x.code, Options{Wide: wide})
				if err != nil {
					t.Fatal(err)
				}
				if d, where := x.distance(execute(t, m, x)); !(d <= x.bound) {
					t.Errorf("wide %v: %s differs by %.1e, more than %.1e", wide, where, d, x.bound)
				}
			}
		})
	}
}

// examples are all programs, with what they compute.
var examples = sync.OnceValue(func() []example {
	return slices.Concat(bitcastExamples(), []example{literalExample(), loopExample(), asyncExample()},
		collectiveExamples(), gemmExamples(), blockDotExamples(), attentionExamples())
})

// Uninitialized memory has what the options say.
func TestFill(t *testing.T) {
	for _, typ := range []elemType{typeF32, typeBF16, typeS32, typeU8, typeU64} {
		for _, fill := range []Fill{Zeros, NaNs, RandomBits} {
			b := newBuilder(fmt.Sprintf("%s %d", typ, fill))
			waits := b.scalar(1) // for this operand, which it does not read
			code := b.returns(b.call("AllocateBuffer", "", arr(typ, []int64{5, 3}), waits))
			m, err := Rewrite("hlo", code, Options{Fill: fill})
			if err != nil {
				t.Fatal(err)
			}
			values := execute(t, m, example{name: b.name})[0][0]
			distinct := map[uint64]bool{}
			for _, v := range values {
				distinct[math.Float64bits(v)] = true
				if fill == Zeros && v != 0 || fill == NaNs && (v == 0 || elemRows[typ].float && v == v) {
					t.Errorf("%s has %v", b.name, v)
				}
			}
			if fill == RandomBits && len(distinct) < 10 || fill != RandomBits && len(distinct) != 1 {
				t.Errorf("%s has %d different numbers", b.name, len(distinct))
			}
		}
	}
}
