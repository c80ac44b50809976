package triton

import (
	"fmt"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
)

// An Elem is the type of one element of a block. Integers have no sign of their own: operations do.
type Elem string

// The types of elements.
const (
	I1   Elem = "i1"
	I8   Elem = "i8"
	I16  Elem = "i16"
	I32  Elem = "i32"
	I64  Elem = "i64"
	F32  Elem = "f32"
	BF16 Elem = "bf16"
	E4M3 Elem = "f8E4M3FN"
	E5M2 Elem = "f8E5M2"
)

func (e Elem) float() bool { return e[0] == 'f' || e[0] == 'b' }

// Bits is the size of an element.
func (e Elem) Bits() int {
	switch e {
	case BF16:
		return 16
	case E4M3, E5M2:
		return 8
	}
	n, _ := strconv.Atoi(string(e[1:]))
	return n
}

// A Block is a small tensor, or a scalar, which has no shape. Its elements may be pointers.
type Block struct {
	b     *Builder
	name  string
	elem  Elem // of what pointers point to
	shape []int
	ptr   bool
}

// A Value is what operations take and give. It is never changed.
type Value = *Block

// Shape is the size of each dimension; nil for a scalar.
func (v Value) Shape() []int { return v.shape }

// Elem is the type of elements, or of what they point to.
func (v Value) Elem() Elem { return v.elem }

// typ is the type as the text spells it.
func (v Value) typ() string { return spell(v.elem, v.ptr, v.shape) }

func spell(e Elem, ptr bool, shape []int) string {
	text := string(e)
	if ptr {
		text = "!tt.ptr<" + text + ">"
	}
	if shape == nil {
		return text
	}
	return "tensor<" + sizes(shape) + "x" + text + ">"
}

// sizes spells a shape as 32x256.
func sizes(shape []int) string {
	list := make([]string, len(shape))
	for i, n := range shape {
		list[i] = strconv.Itoa(n)
	}
	return strings.Join(list, "x")
}

// A Builder prints the body of one kernel.
type Builder struct {
	name      string
	args      []Arg
	constants strings.Builder
	body      strings.Builder
	known     map[string]Value // constants by their text
	names     int
	depth     int // of regions
	scratch   int // bytes of descriptors that each program makes
	err       error
}

// An Arg is an array of the kernel: a pointer to its first element, and what it points to. Operands
// of the call come before its results.
type Arg struct {
	Name   string
	Elem   Elem
	Shape  []int
	Result bool
	// InPlace names the operand whose memory a result takes: what is not written stays.
	InPlace string
}

// New begins a kernel. The values are pointers to the arrays, in their order.
func New(name string, args ...Arg) (*Builder, []Value) {
	b := &Builder{name: name, args: args, known: map[string]Value{}}
	list := make([]Value, len(args))
	results := false
	for i, a := range args {
		if results && !a.Result {
			b.Fail("operand %s comes behind a result", a.Name)
		}
		results = a.Result
		list[i] = &Block{b: b, name: "%" + a.Name, elem: a.Elem, ptr: true}
	}
	return b, list
}

// Fail keeps the first mistake.
func (b *Builder) Fail(format string, args ...any) Value {
	if b.err == nil {
		b.err = fmt.Errorf("kernel %s: "+format+" (%s)", append(append([]any{b.name}, args...),
			caller())...)
	}
	return &Block{b: b, name: "%error", elem: I32}
}

// line prints one line of the body.
func (b *Builder) line(format string, args ...any) {
	if b.err == nil {
		fmt.Fprintf(&b.body, "%s"+format+"\n", append([]any{strings.Repeat("  ", b.depth+2)}, args...)...)
	}
}

// fresh names a new value.
func (b *Builder) fresh(e Elem, ptr bool, shape []int) Value {
	b.names++
	return &Block{b: b, name: fmt.Sprintf("%%%d", b.names), elem: e, ptr: ptr, shape: shape}
}

// emit prints an operation with one result; the format ends before the types.
func (b *Builder) emit(e Elem, ptr bool, shape []int, format string, args ...any) Value {
	v := b.fresh(e, ptr, shape)
	b.line("%s = "+format, append([]any{v.name}, args...)...)
	return v
}

// caller is the place in a kernel's source: the nearest that is no method of a Builder or Value.
func caller() string {
	pcs := make([]uintptr, 16)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(3, pcs)])
	for {
		f, more := frames.Next()
		method := strings.Contains(f.Function, "triton.(*Builder).") ||
			strings.Contains(f.Function, "triton.Value.")
		if !method || !more {
			return fmt.Sprintf("%s:%d", filepath.Base(f.File), f.Line)
		}
	}
}
