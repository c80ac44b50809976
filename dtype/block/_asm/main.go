package main

import (
	"flag"
	"fmt"
	"os"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

func main() {
	flag.Parse()
	os.Args = os.Args[:1] // the first line of what is written repeats them, and is long enough
	ConstraintExpr("amd64,!purego")
	for _, v := range []vectors{{wide: true}, {wide: false}} {
		for _, bf16 := range []bool{false, true} {
			v := v
			v.bf16 = bf16
			if v.wide && v.bf16 {
				words()
			} else {
				v.mxfp8()
			}
			v.nvfp4()
			v.amax()
		}
	}
	Generate()
}

// vectors is a way to hold numbers in registers: 16 float32 with AVX-512, else 8.
type vectors struct {
	wide, bf16 bool
}

func (v vectors) lanes() int {
	if v.wide {
		return 16
	}
	return 8
}

func (v vectors) reg() reg.VecVirtual {
	if v.wide {
		return ZMM()
	}
	return YMM()
}

// function opens a function of the given name and the signature in Go of its arguments.
func (v vectors) function(name, args, doc string) {
	of, with, elem := "F32", "AVX2", "float32"
	if v.wide {
		with = "AVX512"
	}
	if v.bf16 {
		of, elem = "BF16", "uint16"
	}
	name += of + with
	TEXT(name, NOSPLIT, fmt.Sprintf(args, elem))
	Doc(name + " " + doc)
	Pragma("noescape")
}

// all fills a register with one 32-bit word.
func (v vectors) all(word uint32) reg.VecVirtual {
	r, x, g := v.reg(), XMM(), GP32()
	MOVL(operand.U32(word), g)
	if v.wide {
		VPBROADCASTD(g, r)
		return r
	}
	VMOVD(g, x)
	VPBROADCASTD(x, r)
	return r
}

// load brings the next numbers to float32.
func (v vectors) load(src reg.Register, index int) reg.VecVirtual {
	r := v.reg()
	if !v.bf16 {
		VMOVUPS(operand.Mem{Base: src, Disp: index * v.lanes() * 4}, r)
		return r
	}
	VPMOVZXWD(operand.Mem{Base: src, Disp: index * v.lanes() * 2}, r)
	VPSLLD(operand.U8(16), r, r)
	return r
}

func (v vectors) and(a, b, to reg.VecVirtual) {
	if v.wide {
		VPANDD(a, b, to)
	} else {
		VPAND(a, b, to)
	}
}

// magnitudes gives the greatest bits, lane by lane, without their signs.
func (v vectors) magnitudes(list []reg.VecVirtual, signless reg.VecVirtual) reg.VecVirtual {
	most := v.reg()
	v.and(list[0], signless, most)
	for _, x := range list[1:] {
		a := v.reg()
		v.and(x, signless, a)
		VPMAXUD(a, most, most)
	}
	return most
}

// reduce leaves the greatest 32-bit word of r in the first lane of the result.
func (v vectors) reduce(r reg.VecVirtual) reg.VecVirtual {
	half := r
	if v.wide {
		half = YMM()
		VEXTRACTI64X4(operand.U8(1), r, half)
		VPMAXUD(r.AsY(), half, half)
	}
	x, y := XMM(), XMM()
	VEXTRACTI128(operand.U8(1), half.AsY(), x)
	VPMAXUD(half.AsX(), x, x)
	VPSHUFD(operand.U8(0x4e), x, y)
	VPMAXUD(x, y, x)
	VPSHUFD(operand.U8(0xb1), x, y)
	VPMAXUD(x, y, x)
	return x
}

// constants are registers that hold one word in all lanes.
type constants struct {
	signless, exponent, least, add, sign, code, most reg.VecVirtual
}

// A format has 4 or 8 bits. The code of a magnitude a is found by adding the power of two c
// whose last bit weighs as much as the code's: the sum's last bits are a's rounded fraction, and
// the exponent of c, moved down, is the rest. add is what is added to a's exponent to get c; its
// last bits make up for the biases, so that the code is the last byte of sum + c>>shift.
type format struct {
	shift      uint8  // 23 less the bits of the fraction
	least      uint32 // the smallest normal number
	bias       uint32
	most       uint32 // what larger numbers become
	signShift  uint8
	sign, code uint32 // bits
}

var (
	e4m3 = format{shift: 20, least: 0x3c800000, bias: 141 << 3, most: 0x43e00000, signShift: 24,
		sign: 0x80, code: 0x7f}
	e2m1 = format{shift: 22, least: 0x3f800000, bias: 149 << 1, most: 0x40c00000, signShift: 28,
		sign: 8, code: 7}
)

func (f format) add() uint32 { return uint32(f.shift)<<23 | -f.bias&0xff }

func (v vectors) constants(f format) constants {
	return constants{v.all(0x7fffffff), v.all(0x7f800000), v.all(f.least), v.all(f.add()),
		v.all(f.sign), v.all(f.code), v.all(f.most)}
}

// encode turns the numbers x times factor into codes, one to a 32-bit lane. What is above the code
// is not clean with AVX-512, where the next step drops it.
func (v vectors) encode(
	f format, k constants, x, factor reg.VecVirtual, clamp bool,
) reg.VecVirtual {
	a, c, sum := v.reg(), v.reg(), v.reg()
	VMULPS(factor, x, x)
	v.and(x, k.signless, a)
	if clamp {
		VPMINUD(k.most, a, a)
	}
	VPMAXUD(k.least, a, c)
	v.and(c, k.exponent, c)
	VPADDD(k.add, c, c)
	VADDPS(a, c, sum)
	VPSRLD(operand.U8(f.shift), c, c)
	VPADDD(sum, c, c)
	VPSRLD(operand.U8(f.signShift), x, x)
	if v.wide {
		VPTERNLOGD(operand.U8(0xf8), k.sign, x, c) // c | x&sign
		return c
	}
	VPAND(c, k.code, c)
	VPAND(x, k.sign, x)
	VPOR(x, c, c)
	return c
}
