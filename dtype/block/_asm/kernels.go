package main

import (
	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// A loop over blocks. It ends before a block whose greatest magnitude is not below the limit, and
// returns how many it did.
type loop struct {
	q, scales, src, n, done reg.GPVirtual
}

func (v vectors) open() loop {
	l := loop{GP64(), GP64(), GP64(), GP64(), GP64()}
	Load(Param("q"), l.q)
	Load(Param("scales"), l.scales)
	Load(Param("src"), l.src)
	Load(Param("n"), l.n)
	XORQ(l.done, l.done)
	return l
}

func (l loop) begin() {
	Label("next")
	CMPQ(l.done, l.n)
	JE(operand.LabelRef("end"))
}

func (l loop) finish(v vectors, size, bytes int) {
	l.step(v, size, bytes)
	l.end()
}

func (l loop) step(v vectors, size, bytes int) {
	width := 4
	if v.bf16 {
		width = 2
	}
	ADDQ(operand.U32(uint32(size*width)), l.src)
	ADDQ(operand.U32(uint32(bytes)), l.q)
	INCQ(l.scales)
	INCQ(l.done)
	JMP(operand.LabelRef("next"))
}

func (l loop) end() {
	Label("end")
	VZEROUPPER()
	Store(l.done, ReturnIndex(0))
	RET()
}

const mxfp8Doc = "quantizes up to n blocks and stops before one that is not finite."

// mxfp8 writes 32 bytes and a scale for each block.
func (v vectors) mxfp8() {
	v.function("mxfp8", "func(q, scales *byte, src *%s, n int) int", mxfp8Doc)
	l := v.open()
	k := v.constants(e4m3)
	l.begin()
	list := v.block(l)
	amax := GP32()
	VMOVD(v.reduce(v.magnitudes(list, k.signless)), amax)
	CMPL(amax, operand.U32(0x7f800000))
	JAE(operand.LabelRef("end"))
	ADDL(operand.U32(0x1fffff), amax)
	SHRL(operand.U8(23), amax)
	floor(amax)
	v.elements(l, k, list, amax)
	l.finish(v, 32, 32)
}

// block loads 32 numbers.
func (v vectors) block(l loop) []reg.VecVirtual {
	list := make([]reg.VecVirtual, 32/v.lanes())
	for i := range list {
		list[i] = v.load(l.src, i)
	}
	return list
}

// floor makes a scale, which is 8 too large, at least 8.
func floor(scale reg.GPVirtual) {
	least := GP32()
	MOVL(operand.U32(8), least)
	CMPL(scale, least)
	CMOVLCS(least, scale)
}

// elements writes a block, and its scale, which comes 8 too large.
func (v vectors) elements(l loop, k constants, list []reg.VecVirtual, scale reg.GPVirtual) {
	factor := GP32()
	MOVL(operand.U32(262), factor)
	SUBL(scale, factor) // 254 less the scale
	SHLL(operand.U8(23), factor)
	SUBL(operand.U8(8), scale)
	MOVB(scale.As8(), operand.Mem{Base: l.scales})
	f := v.spread(factor)
	for i, x := range list {
		list[i] = v.encode(e4m3, k, x, f, false)
	}
	v.bytes(list, l.q)
}

// words is mxfp8 for bfloat16 with AVX-512, where 32 numbers are one register of 16-bit words. An
// E4M3 that is normal is the bfloat16 with another bias and 4 bits less of fraction, so whole
// numbers do. A block that also has zeros or subnormal elements takes the way of mxfp8.
func words() {
	v := vectors{wide: true, bf16: true}
	v.function("mxfp8", "func(q, scales *byte, src *%s, n int) int", mxfp8Doc)
	l := v.open()
	k := v.constants(e4m3)
	sign, one, bit := v.all(0x80008000), v.all(0x00010001), v.all(0x00800080)
	l.begin()
	// The greatest magnitude is the least of the complements, for which there is an instruction.
	x, not := ZMM(), ZMM()
	VMOVDQU64(operand.Mem{Base: l.src}, x)
	VMOVDQA64(x, not)
	VPTERNLOGD(operand.U8(0xbb), sign, not, not) // ^x | sign
	y, z := YMM(), XMM()
	VEXTRACTI64X4(operand.U8(1), not, y)
	VPMINUW(not.AsY(), y, y)
	VEXTRACTI128(operand.U8(1), y, z)
	VPMINUW(y.AsX(), z, z)
	VPHMINPOSUW(z, z)
	scale := GP32()
	VMOVD(z, scale)
	XORL(operand.I8(-1), scale)
	MOVWLZX(scale.As16(), scale)
	CMPL(scale, operand.U32(0x7f80))
	JAE(operand.LabelRef("end"))
	ADDL(operand.U8(0x1f), scale)
	SHRL(operand.U8(7), scale)
	// With a scale of 16 or more, here 8 too large, the whole numbers below stay in their words.
	CMPL(scale, operand.U8(24))
	JCS(operand.LabelRef("floats"))
	limit, add, small := GP32(), GP32(), K()
	// A number is subnormal as an E4M3 if its exponent is less than 6 below the scale's.
	MOVL(scale, limit)
	SUBL(operand.U8(14), limit)
	SHLL(operand.U8(7), limit)
	MOVL(operand.U32(128+7), add) // and 7 to round up from the middle
	SUBL(limit, add)
	NOTL(limit)
	limits, adds := ZMM(), ZMM()
	VPBROADCASTW(limit, limits)
	VPBROADCASTW(add, adds)
	VPCMPUW(operand.U8(6), limits, not, small) // not > limits
	KORTESTD(small, small)
	JNE(operand.LabelRef("floats"))
	odd := ZMM()
	VPSRLW(operand.U8(4), x, odd)
	VPANDD(one, odd, odd)
	VPADDW(adds, x, x)
	VPADDW(odd, x, x)
	VPSRLW(operand.U8(4), x, odd)
	VPSRLW(operand.U8(8), x, x)
	VPTERNLOGD(operand.U8(0xd8), bit, x, odd) // the sign from x, the rest from odd
	VPMOVWB(odd, operand.Mem{Base: l.q})
	SUBL(operand.U8(8), scale)
	MOVB(scale.As8(), operand.Mem{Base: l.scales})
	Label("done")
	l.step(v, 32, 32)
	Label("floats")
	floor(scale)
	v.elements(l, k, v.block(l), scale)
	JMP(operand.LabelRef("done"))
	l.end()
}

// spread fills a register with a word.
func (v vectors) spread(word reg.GPVirtual) reg.VecVirtual {
	r, x := v.reg(), XMM()
	if v.wide {
		VPBROADCASTD(word, r)
		return r
	}
	VMOVD(word, x)
	VPBROADCASTD(x, r)
	return r
}

// bytes stores the last byte of every lane of 32.
func (v vectors) bytes(list []reg.VecVirtual, to reg.Register) {
	if v.wide {
		for i, r := range list {
			VPMOVDB(r, operand.Mem{Base: to, Disp: i * 16})
		}
		return
	}
	VPACKUSDW(list[1], list[0], list[0])
	VPACKUSDW(list[3], list[2], list[2])
	VPACKUSWB(list[2], list[0], list[0])
	// Packing works in halves of 128 bits; the permutation brings the bytes in order.
	order := YMM()
	VMOVDQU(data("order", 0, 4, 1, 5, 2, 6, 3, 7), order)
	VPERMD(list[0], order, list[0])
	VMOVDQU(list[0], operand.Mem{Base: to})
}

// memory holds words that are read where they are needed: AVX2 has only 16 registers.
var memory = map[string]operand.Mem{}

func data(name string, words ...uint32) operand.Mem {
	m, ok := memory[name]
	if !ok {
		m = GLOBL(name, attr.RODATA|attr.NOPTR)
		for i, w := range words {
			DATA(4*i, operand.U32(w))
		}
		memory[name] = m
	}
	return m
}

// four is a word in all lanes of 128 bits.
func four(name string, w uint32) operand.Mem { return data(name, w, w, w, w) }

// nvfp4 writes 8 bytes and a scale for each block.
func (v vectors) nvfp4() {
	v.function("nvfp4", "func(q, scales *byte, src *%s, n int, sixth, out float32) int",
		"quantizes up to n blocks and stops before one that holds a NaN.")
	l := v.open()
	k := v.constants(e2m1)
	l.begin()
	list := make([]reg.VecVirtual, 16/v.lanes())
	for i := range list {
		list[i] = v.load(l.src, i)
	}
	amax := v.reduce(v.magnitudes(list, k.signless))
	g := GP32()
	VMOVD(amax, g)
	CMPL(g, operand.U32(0x7f800000))
	JHI(operand.LabelRef("end"))
	VMULSS(argument("sixth"), amax, amax)
	code, value := scale(amax)
	VMOVD(code, g)
	MOVB(g.As8(), operand.Mem{Base: l.scales})
	VMULSS(argument("out"), value, value)
	one := XMM()
	VMOVSS(four("one", 0x3f800000), one)
	VDIVSS(value, one, value)
	VMINSS(four("huge", 0x7f7fffff), value, value)
	factor := v.reg()
	VBROADCASTSS(value, factor)
	for i, x := range list {
		list[i] = v.encode(e2m1, k, x, factor, true)
	}
	v.nibbles(list, l.q)
	l.finish(v, 16, 8)
}

func argument(name string) operand.Mem {
	b, err := Param(name).Resolve()
	if err != nil {
		panic(err)
	}
	return b.Addr
}

// scale rounds a block's scale to E4M3. It gives the code in the last byte, and the number that the
// code stands for.
func scale(a reg.VecVirtual) (code, value reg.VecVirtual) {
	c, sum, value := XMM(), XMM(), XMM()
	VPMINUD(four("most", e4m3.most), a, a)
	VPMAXUD(four("least", e4m3.least), a, c)
	VPAND(four("exponent", 0x7f800000), c, c)
	VPADDD(four("add", e4m3.add()), c, c)
	VADDSS(a, c, sum)
	VSUBSS(c, sum, value)
	VPSRLD(operand.U8(e4m3.shift), c, c)
	VPADDD(sum, c, c)
	return c, value
}

// nibbles stores 16 lanes as 8 bytes, the first of a pair in the low half.
func (v vectors) nibbles(list []reg.VecVirtual, to reg.Register) {
	x := XMM()
	if v.wide {
		VPMOVDB(list[0], x)
	} else {
		high := XMM()
		VPACKUSDW(list[1], list[0], list[0])
		VPERMQ(operand.U8(0xd8), list[0], list[0])
		VEXTRACTI128(operand.U8(1), list[0], high)
		VPACKUSWB(high, list[0].AsX(), x)
	}
	VPMADDUBSW(four("pairs", 0x10011001), x, x) // low + 16·high
	VPACKUSWB(x, x, x)
	VMOVQ(x, operand.Mem{Base: to})
}

// amax reads 32 numbers at a time.
func (v vectors) amax() {
	v.function("amax", "func(src *%s, n int) uint32",
		"gives the greatest magnitude of n times 32 numbers as bits of a float32.")
	src, n := GP64(), GP64()
	Load(Param("src"), src)
	Load(Param("n"), n)
	signless := v.all(0x7fffffff)
	lanes := 32 / v.lanes()
	most := make([]reg.VecVirtual, lanes)
	for i := range most {
		most[i] = v.reg()
		VPXOR(most[i].AsX(), most[i].AsX(), most[i].AsX())
	}
	Label("next")
	TESTQ(n, n)
	JE(operand.LabelRef("end"))
	for i := range most {
		x := v.load(src, i)
		v.and(x, signless, x)
		VPMAXUD(x, most[i], most[i])
	}
	width := 4
	if v.bf16 {
		width = 2
	}
	ADDQ(operand.U32(uint32(32*width)), src)
	DECQ(n)
	JMP(operand.LabelRef("next"))
	Label("end")
	for _, m := range most[1:] {
		VPMAXUD(m, most[0], most[0])
	}
	g := GP32()
	VMOVD(v.reduce(most[0]), g)
	VZEROUPPER()
	Store(g, ReturnIndex(0))
	RET()
}
