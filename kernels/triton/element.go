package triton

import (
	"fmt"
	"math"
	"slices"
	"strconv"
)

// constant is a number of a type and shape, printed once, before everything else.
func (b *Builder) constant(n any, e Elem, shape []int) Value {
	var text string
	switch n := n.(type) {
	case int:
		if e == I32 && n != int(int32(n)) {
			return b.Fail("%d is no i32", n)
		}
		text = strconv.Itoa(n)
		if e.float() {
			text = strconv.FormatFloat(float64(n), 'e', -1, 32)
		}
	case float64:
		if !e.float() {
			return b.Fail("%v is no %s", n, e)
		}
		text = floatText(n, e)
	case bool:
		text = strconv.FormatBool(n)
	default:
		return b.Fail("a constant of type %T", n)
	}
	if e.float() {
		text = decimal(text)
	}
	t := spell(e, false, shape)
	if shape != nil {
		text = "dense<" + text + ">"
	}
	key := text + t
	if v, ok := b.known[key]; ok {
		return v
	}
	v := &Block{b: b, name: fmt.Sprintf("%%c%d", len(b.known)), elem: e, shape: shape}
	b.known[key] = v
	if e == I1 && shape == nil {
		fmt.Fprintf(&b.constants, "    %s = arith.constant %s\n", v.name, text)
		return v
	}
	fmt.Fprintf(&b.constants, "    %s = arith.constant %s : %s\n", v.name, text, t)
	return v
}

// floatText spells a float. What is too large for its type is an infinity, which MLIR takes as
// bits, as it takes a NaN.
func floatText(n float64, e Elem) string {
	f := float32(n)
	switch odd := math.IsInf(float64(f), 0) || math.IsNaN(n); {
	case odd && e == BF16:
		return fmt.Sprintf("0x%04X", math.Float32bits(f)>>16)
	case odd:
		return fmt.Sprintf("0x%08X", math.Float32bits(f))
	case e == F32:
		return strconv.FormatFloat(n, 'e', -1, 32)
	}
	return strconv.FormatFloat(n, 'e', -1, 64)
}

// decimal gives a float literal the point that MLIR wants: 1e+00 becomes 1.0e+00.
func decimal(text string) string {
	at := slices.Index([]byte(text), 'e')
	if at < 0 || slices.Contains([]byte(text[:at]), '.') {
		return text
	}
	return text[:at] + ".0" + text[at:]
}

// Const is a number of v's type and shape.
func (v Value) Const(n any) Value { return v.b.constant(n, v.elem, v.shape) }

// like makes a number or value an operand beside v: numbers become constants of its type.
func (v Value) like(x any) Value {
	if o, ok := x.(Value); ok {
		if o.elem != v.elem || o.ptr || v.ptr {
			return v.b.Fail("operands are %s and %s", v.typ(), o.typ())
		}
		return o
	}
	return v.b.constant(x, v.elem, v.shape)
}

// match gives both operands one shape: a scalar takes the other's, and so does a dimension of 1.
func match(x, y Value) (a, c Value) {
	switch {
	case slices.Equal(x.shape, y.shape):
		return x, y
	case x.shape == nil:
		return x.Broadcast(y.shape...), y
	case y.shape == nil:
		return x, y.Broadcast(x.shape...)
	case len(x.shape) != len(y.shape):
		e := x.b.Fail("shapes are %v and %v", x.shape, y.shape)
		return e, e
	}
	shape := slices.Clone(x.shape)
	for i, n := range y.shape {
		shape[i] = max(shape[i], n)
	}
	return x.Broadcast(shape...), y.Broadcast(shape...)
}

// binary prints an instruction of two operands: one name for integers and one for floats.
func (v Value) binary(integer, float string, x any) Value {
	a, c := match(v, v.like(x))
	how := integer
	if a.elem.float() {
		how = float
	}
	if how == "" {
		return v.b.Fail("there is no %s%s for %s", integer, float, v.elem)
	}
	return v.b.emit(a.elem, false, a.shape, "arith.%s %s, %s : %s", how, a.name, c.name, a.typ())
}

// Add is v + x, of which x is a value or a number, as in the methods that follow.
func (v Value) Add(x any) Value {
	if x == 0 {
		return v
	}
	return v.binary("addi", "addf", x)
}

// Sub is v − x.
func (v Value) Sub(x any) Value { return v.binary("subi", "subf", x) }

// Mul is v · x.
func (v Value) Mul(x any) Value { return v.binary("muli", "mulf", x) }

// Div is v / x, of integers towards zero.
func (v Value) Div(x any) Value { return v.binary("divsi", "divf", x) }

// DivExact is v / x of float32, rounded to the nearest as IEEE 754 says; Div is off by 2 units in
// the last place there.
func (v Value) DivExact(x any) Value {
	a, c := match(v, v.like(x))
	return v.b.emit(a.elem, false, a.shape, "tt.precise_divf %s, %s : %s", a.name, c.name, a.typ())
}

// Rem is what integers leave when divided, with the sign of v.
func (v Value) Rem(x any) Value { return v.binary("remsi", "", x) }

// And is bitwise, as Or and Xor.
func (v Value) And(x any) Value { return v.binary("andi", "", x) }

// Or is bitwise.
func (v Value) Or(x any) Value { return v.binary("ori", "", x) }

// Xor is bitwise.
func (v Value) Xor(x any) Value { return v.binary("xori", "", x) }

// Shl shifts to the left.
func (v Value) Shl(x any) Value { return v.binary("shli", "", x) }

// Shr shifts to the right and keeps the sign.
func (v Value) Shr(x any) Value { return v.binary("shrsi", "", x) }

// ShrU shifts to the right and fills with zeros.
func (v Value) ShrU(x any) Value { return v.binary("shrui", "", x) }

// Max is the larger, of integers with signs; of a NaN and a number it is the number.
func (v Value) Max(x any) Value { return v.binary("maxsi", "maxnumf", x) }

// Min is the smaller, as Max.
func (v Value) Min(x any) Value { return v.binary("minsi", "minnumf", x) }

// MulHi is the upper half of the product of 32-bit integers without signs.
func (v Value) MulHi(x any) Value {
	a, c := match(v, v.like(x))
	return v.b.emit(a.elem, false, a.shape, "tt.mulhiui %s, %s : %s", a.name, c.name, a.typ())
}

// Is compares: "lt", "le", "gt", "ge", "eq", "ne". Comparisons with a NaN are false, but for ne.
func (v Value) Is(how string, x any) Value {
	a, c := match(v, v.like(x))
	op, sign := "cmpi", "s"
	switch {
	case a.elem.float() && how == "ne":
		op, sign = "cmpf", "u"
	case a.elem.float():
		op, sign = "cmpf", "o"
	case how == "eq" || how == "ne":
		sign = ""
	}
	return v.b.emit(I1, false, a.shape, "arith.%s %s%s, %s, %s : %s", op, sign, how, a.name, c.name,
		a.typ())
}

// Select takes v's elements where the condition holds, and x's elsewhere.
func (v Value) Select(cond Value, x any) Value {
	a, c := match(v, v.like(x))
	if cond.elem != I1 {
		return v.b.Fail("a condition of %s", cond.typ())
	}
	cond, a = match(cond, a)
	_, c = match(cond, c)
	t := cond.typ() + ", " + a.typ()
	if cond.shape == nil {
		t = a.typ()
	}
	return v.b.emit(a.elem, false, a.shape, "arith.select %s, %s, %s : %s", cond.name,
		a.name, c.name, t)
}

// To converts between floats, or between integers with signs, or from one to the other; to E4M3 and
// E5M2 to the nearest, saturating.
func (v Value) To(e Elem) Value {
	var how string
	switch from := v.elem; {
	case from == e:
		return v
	case from.float() && e.float() && e.Bits() == 8:
		return v.b.emit(e, false, v.shape, "tt.fp_to_fp %s, rounding = rtne : %s -> %s", v.name, v.typ(),
			spell(e, false, v.shape))
	case from.float() && from.Bits() == 8:
		return v.b.emit(e, false, v.shape, "tt.fp_to_fp %s : %s -> %s", v.name, v.typ(),
			spell(e, false, v.shape))
	case from.float() && e.float() && e.Bits() > from.Bits():
		how = "extf"
	case from.float() && e.float():
		how = "truncf"
	case from.float():
		how = "fptosi"
	case e.float():
		how = "sitofp"
	case from == I1:
		how = "extui"
	case e.Bits() > from.Bits():
		how = "extsi"
	default:
		how = "trunci"
	}
	return v.b.emit(e, false, v.shape, "arith.%s %s : %s to %s", how, v.name, v.typ(),
		spell(e, false, v.shape))
}

// Bits views elements as another type of the same size.
func (v Value) Bits(e Elem) Value {
	if e.Bits() != v.elem.Bits() {
		return v.b.Fail("%s has not the size of %s", e, v.elem)
	}
	return v.b.emit(e, false, v.shape, "tt.bitcast %s : %s -> %s", v.name, v.typ(),
		spell(e, false, v.shape))
}

// math prints a function of one float.
func (v Value) math(name string) Value {
	return v.b.emit(v.elem, false, v.shape, "math.%s %s : %s", name, v.name, v.typ())
}

// Exp2 is 2 to the power of v.
func (v Value) Exp2() Value { return v.math("exp2") }

// Log2 is the logarithm to the base of 2.
func (v Value) Log2() Value { return v.math("log2") }

// Rsqrt is one over the square root.
func (v Value) Rsqrt() Value { return v.math("rsqrt") }

// Sqrt is the square root.
func (v Value) Sqrt() Value { return v.math("sqrt") }

// Abs is the magnitude of floats.
func (v Value) Abs() Value { return v.math("absf") }

// FastExp2 is Exp2 in one instruction, whose error is 2^-22.5 (PTX ISA, ex2.approx.ftz.f32).
func (v Value) FastExp2() Value { return v.Asm("ex2.approx.ftz.f32 $0, $1;", "=f,f") }

// FastReciprocal is 1 / v in one instruction, whose error is 1 unit in the last place (PTX ISA,
// rcp.approx.ftz); a division by Div takes about ten.
func (v Value) FastReciprocal() Value { return v.Asm("rcp.approx.ftz.f32 $0, $1;", "=f,f") }

// Asm is inline PTX with the result $0 and the operands $1 and on, for one element at a time. All
// operands have one shape, and the result has their type.
func (v Value) Asm(ptx, constraints string, more ...Value) Value {
	return v.b.asm(ptx, constraints, 1, v.elem, append([]Value{v}, more...))
}

// Pack is inline PTX of two float32 numbers whose result $0 has 32 bits.
func (v Value) Pack(ptx string, x Value) Value {
	return v.b.asm(ptx, "=r,f,f", 1, I32, []Value{v, x})
}

// PackFour is inline PTX of four float32 numbers and 32 random bits, whose result $0 has 32 bits.
func (v Value) PackFour(ptx string, x, y, z, random Value) Value {
	return v.b.asm(ptx, "=r,f,f,f,f,r", 1, I32, []Value{v, x, y, z, random})
}

// asm is inline PTX; pack elements of each operand are packed into registers of 32 bits.
func (b *Builder) asm(ptx, constraints string, pack int, e Elem, in []Value) Value {
	list, types := make([]string, len(in)), make([]string, len(in))
	for i, v := range in {
		list[i], types[i] = v.name, v.typ()
	}
	return b.emit(e, false, in[0].shape, "tt.elementwise_inline_asm %q "+
		"{constraints = %q, packed_element = %d : i32, pure = true} %s : %s -> %s", ptx, constraints,
		pack, join(list), join(types), spell(e, false, in[0].shape))
}
