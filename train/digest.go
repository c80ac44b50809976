package train

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/program"
)

// digestModule is the program that makes a number of 32 bits of an array. Each element is mixed
// with its place, one to one, and the results are added modulo 2³²: one element that differs
// changes the number for certain, several but for a chance of 2⁻³², and the order of the additions
// does not matter.
func digestModule(local dtype.Shape, devices program.Devices) *program.Module {
	// As a matrix, whose rows are added first: a sum of all in one would be written in two by XLA.
	columns := int64(1)
	if last := len(local.Dims) - 1; last >= 0 {
		columns = max(local.Dims[last], 1)
	}
	rows := local.Elements() / columns
	bits, dims := dtype.Shape{Type: dtype.U32, Dims: local.Dims}, []int64{rows, columns}
	text := strings.NewReplacer("SHARD", local.MLIR(), "BITS", bits.MLIR(),
		"MATRIX", dtype.Shape{Type: dtype.U32, Dims: dims}.MLIR(),
		"ROWS", dtype.Shape{Type: dtype.U32, Dims: dims[:1]}.MLIR(),
		"REPLICAS", strconv.Itoa(len(devices)), "INTO_BITS", intoBits(local)).Replace(digestText)
	return &program.Module{Name: "digest", Devices: devices, Text: text,
		Args:    []program.Array{{Name: "x", Global: local}},
		Results: []program.Array{{Name: "digest", Global: dtype.Shape{Type: dtype.U32}}}}
}

const digestText = `module @digest attributes {mhlo.num_replicas = REPLICAS : i32} {
  func.func @main(%x: SHARD) -> tensor<ui32> {
    %zero = stablehlo.constant dense<0> : tensor<ui32>
    %k0 = stablehlo.constant dense<0x9E3779B1> : MATRIX
    %k1 = stablehlo.constant dense<0x85EBCA6B> : MATRIX
    %k2 = stablehlo.constant dense<0xC2B2AE35> : MATRIX
    %half = stablehlo.constant dense<15> : MATRIX
INTO_BITS
    %m = stablehlo.reshape %u : (BITS) -> MATRIX
    %i0 = stablehlo.iota dim = 0 : MATRIX
    %i1 = stablehlo.iota dim = 1 : MATRIX
    %p0 = stablehlo.multiply %i0, %k0 : MATRIX
    %p1 = stablehlo.multiply %i1, %k1 : MATRIX
    %place = stablehlo.add %p0, %p1 : MATRIX
    %a = stablehlo.xor %m, %place : MATRIX
    %b = stablehlo.multiply %a, %k2 : MATRIX
    %c = stablehlo.shift_right_logical %b, %half : MATRIX
    %d = stablehlo.xor %b, %c : MATRIX
    %e = stablehlo.multiply %d, %k1 : MATRIX
    %f = stablehlo.shift_right_logical %e, %half : MATRIX
    %g = stablehlo.xor %e, %f : MATRIX
    %r = stablehlo.reduce(%g init: %zero) applies stablehlo.add across dimensions = [1]
      : (MATRIX, tensor<ui32>) -> ROWS
    %s = stablehlo.reduce(%r init: %zero) applies stablehlo.add across dimensions = [0]
      : (ROWS, tensor<ui32>) -> tensor<ui32>
    return %s : tensor<ui32>
  }
}
`

// intoBits makes %u of %x: the bits of each element in 32.
func intoBits(local dtype.Shape) string {
	op := func(to, name, from string, a, b dtype.DType) string {
		return fmt.Sprintf("    %s = stablehlo.%s %s : (%s) -> %s", to, name, from,
			dtype.Shape{Type: a, Dims: local.Dims}.MLIR(), dtype.Shape{Type: b, Dims: local.Dims}.MLIR())
	}
	switch t := local.Type; {
	case t == dtype.U32:
		return op("%u", "convert", "%x", t, t)
	case t.Bits() == 32:
		return op("%u", "bitcast_convert", "%x", t, dtype.U32)
	case t.Kind() == dtype.Bool || t.Kind() == dtype.Signed || t.Kind() == dtype.Unsigned:
		return op("%u", "convert", "%x", t, dtype.U32)
	case t.Bits() == 4: // every value of four bits is one of f32
		return op("%y", "convert", "%x", t, dtype.F32) + "\n" +
			op("%u", "bitcast_convert", "%y", dtype.F32, dtype.U32)
	default:
		whole := map[int]dtype.DType{8: dtype.U8, 16: dtype.U16}[t.Bits()]
		return op("%y", "bitcast_convert", "%x", t, whole) + "\n" +
			op("%u", "convert", "%y", whole, dtype.U32)
	}
}
