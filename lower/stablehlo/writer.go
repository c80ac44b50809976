package stablehlo

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
)

// A Writer prints one module. Lines refer to values by MLIR names; the first error is remembered.
// Its state is text, names and symbols of the module: nothing that is decided while printing one
// operation changes how another is printed, but for [Writer.Once].
type Writer struct {
	// Target chooses kernels and their shapes; nil stands for every target.
	Target *kernels.Selector

	b      strings.Builder
	mesh   []ir.Axis
	table  Table
	at     map[*ir.Value]string // MLIR names
	next   int                  // number of the last fresh name
	indent int
	err    error
	name   string // of the operation that is printed, for its instructions; "" if they have none

	// Symbols of the module: lists of devices, printed before it, and types that have an identity
	// function ([Writer.Materialize]), printed at its end.
	groups, outlined []string
	// cse has what Once printed in the current function or loop body, by key.
	cse map[string]Val
	// slices has what a loop's body takes from stacks, by name; places are the stacks that the body's
	// results go into.
	slices map[string]Slice
	places map[*ir.Value]*Slot
}

// A Slice is a round's part of a stack [rounds, ...].
type Slice struct{ Stack, At Val }

// A Slot is the place of a loop's result in its stack. A kernel that writes there itself sets After
// to the stack that it returns.
type Slot struct {
	Slice
	Alone bool // nothing in the body reads the result
	// Fused: what reads it in the body computes element by element, and can read it in its stack.
	Fused bool
	After Val
}

// Written gives the result of a slot as what the stack has there, once a kernel has written it.
func (w *Writer) Written(s *Slot, t ir.Type) Val {
	v := w.Reshape(w.dynamicSlice(s.After, s.After.Type.Dims[0].Name, s.At, 1), t)
	w.slices[v.Name] = Slice{s.After, s.At}
	return v
}

// SliceOf tells which part of which stack a value is, if it is one.
func (w *Writer) SliceOf(v Val) (Slice, bool) {
	s, ok := w.slices[v.Name]
	return s, ok
}

// SlotOf gives the place of a result of the loop's body that is being printed, or nil.
func (w *Writer) SlotOf(v *ir.Value) *Slot { return w.places[v] }

// Line prints one line, indented.
func (w *Writer) Line(format string, args ...any) {
	w.b.WriteString(strings.Repeat("  ", w.indent))
	text := fmt.Sprintf(format, args...)
	w.b.WriteString(text)
	// An instruction is one line, or ends with its regions.
	if w.name != "" && (strings.HasPrefix(text, "%") && !strings.HasSuffix(text, "{") ||
		strings.HasPrefix(text, "})")) {
		fmt.Fprintf(&w.b, " loc(%q)", w.name)
	}
	w.b.WriteByte('\n')
}

// Fail remembers the first error.
func (w *Writer) Fail(format string, args ...any) {
	if w.err == nil {
		w.err = fmt.Errorf(format, args...)
	}
}

// Fresh gives a new MLIR name.
func (w *Writer) Fresh() string {
	w.next++
	return fmt.Sprintf("%%%d", w.next)
}

// A Value is an MLIR value with its type, while an operation is being printed. Its type may have
// dimensions that the graph does not know. It is never changed.
type Value struct {
	Name string
	Type ir.Type
}

// A Val is what rules pass around: a pointer makes programs of thousands of calls a tenth smaller.
type Val = *Value

// Tensor spells a type: tensor<2x4xf32>.
func Tensor(t ir.Type) string { return t.Shape().MLIR() }

// Use gives the MLIR value of a graph value.
func (w *Writer) Use(v *ir.Value) Val {
	name, ok := w.at[v]
	if !ok {
		w.Fail("%s was not lowered", v)
	}
	return &Value{name, v.Type}
}

// Once prints something the first time, and gives it again where the same is asked for in the same
// function or loop body: common subexpressions such as mask tables.
func (w *Writer) Once(key string, write func() Val) Val {
	v, ok := w.cse[key]
	if !ok {
		v = write()
		w.cse[key] = v
	}
	return v
}

// Emit prints one instruction with one result, to which it gives a fresh name.
func (w *Writer) Emit(t ir.Type, format string, args ...any) Val {
	v := &Value{w.Fresh(), t}
	w.Line("%s = %s", v.Name, fmt.Sprintf(format, args...))
	return v
}

// Apply prints an instruction on values: the text before and after their names, then the types in
// MLIR's functional form, (operands) -> result.
func (w *Writer) Apply(t ir.Type, before, after string, in ...Val) Val {
	names, types := Spell(in)
	return w.Emit(t, "%s%s%s : (%s) -> %s", before, names, after, types, Tensor(t))
}

// Spell lists the names of values, and their types.
func Spell(in []Val) (names, types string) {
	n, t := make([]string, len(in)), make([]string, len(in))
	for i, v := range in {
		n[i], t[i] = v.Name, Tensor(v.Type)
	}
	return strings.Join(n, ", "), strings.Join(t, ", ")
}

// List spells things with commas between, as MLIR has them in brackets.
func List[T any](things []T) string {
	texts := lists.Map(things, func(x T) string { return fmt.Sprint(x) })
	return strings.Join(texts, ", ")
}

// Elementwise prints an instruction whose arguments and result all have one type.
func (w *Writer) Elementwise(op string, args ...Val) Val {
	names, _ := Spell(args)
	return w.Emit(args[0].Type, "stablehlo.%s %s : %s", op, names, Tensor(args[0].Type))
}

// Constant fills a type with one number.
func (w *Writer) Constant(t ir.Type, value float64) Val {
	return w.Emit(t, "stablehlo.constant dense<%s> : %s", w.Number(t.Elem, value), Tensor(t))
}

// Number spells a constant of an element type: floats with enough digits to come back, minus
// infinity by its bits, since MLIR has no word for it; of an integer type, minus infinity is the
// smallest number. NaN and +infinity fail: no program has them as constants.
func (w *Writer) Number(d dtype.DType, value float64) string {
	lowest := math.IsInf(value, -1)
	switch {
	case math.IsNaN(value) || math.IsInf(value, 1):
		w.Fail("%v is not a constant that a program may have", value)
		return "0"
	case d == dtype.Pred:
		return strconv.FormatBool(value != 0)
	case d.Kind() != dtype.Float && !lowest:
		return strconv.FormatInt(int64(value), 10)
	case !lowest:
		return fmt.Sprintf("%.17e", value)
	case d.Kind() == dtype.Signed:
		return strconv.FormatInt(math.MinInt64>>(64-d.Bits()), 10)
	case d.Kind() != dtype.Float:
		return "0"
	}
	bits := map[dtype.DType]string{dtype.F32: "0xFF800000", dtype.BF16: "0xFF80",
		dtype.F64: "0xFFF0000000000000", dtype.F16: "0xFC00"}[d]
	if bits == "" {
		w.Fail("%s has no infinity", d)
	}
	return bits
}

// BroadcastTo repeats a value along the dimensions that a wider type has: [seq] to [batch, seq,
// embed], say. Dimensions are matched by name, and transposed first if their order differs. The
// element type stays.
func (w *Writer) BroadcastTo(v Val, t ir.Type) Val {
	t = ir.Type{Elem: v.Type.Elem, Dims: t.Dims}
	if slices.Equal(v.Type.Dims, t.Dims) {
		return v
	}
	dims := lists.Map(v.Type.Dims, func(d ir.Dim) int { return t.Index(d.Name) })
	if !slices.IsSorted(dims) { // as broadcast_in_dim wants them
		order := lists.Filter(ir.Names(t.Dims), func(name string) bool { return v.Type.Index(name) >= 0 })
		return w.BroadcastTo(w.Transpose(v, order), t)
	}
	return w.Apply(t, "stablehlo.broadcast_in_dim ", ", dims = ["+List(dims)+"]", v)
}

// Transpose puts dimensions into an order, outermost first: [a, b] with order b, a becomes [b, a].
// Nothing is printed if they have it.
func (w *Writer) Transpose(v Val, order []string) Val {
	t := ir.Type{Elem: v.Type.Elem}
	perm := make([]int, len(order))
	for i, name := range order {
		perm[i] = v.Type.Index(name)
		t.Dims = append(t.Dims, v.Type.Dims[perm[i]])
	}
	if slices.IsSorted(perm) {
		return v
	}
	return w.Apply(t, "stablehlo.transpose ", ", dims = ["+List(perm)+"]", v)
}

// Reshape changes the dimensions, not the order of elements; the element type of t is ignored.
func (w *Writer) Reshape(v Val, t ir.Type) Val {
	t = ir.Type{Elem: v.Type.Elem, Dims: t.Dims}
	if v.Type.Shape().Equal(t.Shape()) {
		return &Value{v.Name, t}
	}
	return w.Apply(t, "stablehlo.reshape ", "", v)
}

// Barriers is a barrier on several values at once: none is used before all are computed.
func (w *Writer) Barriers(in ...Val) []Val {
	if len(in) == 1 {
		return []Val{w.Barrier(in[0])}
	}
	names, types := Spell(in)
	name := w.Fresh()
	w.Line("%s:%d = stablehlo.optimization_barrier %s : %s", name, len(in), names, types)
	out := make([]Val, len(in))
	for i, v := range in {
		out[i] = &Value{fmt.Sprintf("%s#%d", name, i), v.Type}
	}
	return out
}

// Barrier gives a value that XLA neither looks through nor recomputes.
func (w *Writer) Barrier(v Val) Val {
	return w.Emit(v.Type, "stablehlo.optimization_barrier %s : %s", v.Name, Tensor(v.Type))
}

// Materialize gives a value that is written to memory once, and that nothing after it recomputes.
// XLA:CPU drops barriers before it fuses, but does not fuse across the result of a function that is
// not inlined.
func (w *Writer) Materialize(v Val) Val {
	t := Tensor(v.Type)
	at := slices.Index(w.outlined, t)
	if at < 0 {
		at = len(w.outlined)
		w.outlined = append(w.outlined, t)
	}
	return w.Emit(v.Type, "func.call @held%d(%s) "+
		`{mhlo.frontend_attributes = {inlineable = "false"}} : (%[3]s) -> %[3]s`, at, v.Name, t)
}

// identities prints the functions that Materialize calls, one per type.
func (w *Writer) identities() {
	for i, t := range w.outlined {
		w.Line("func.func private @held%d(%%v: %[2]s) -> %[2]s {", i, t)
		w.Line("  return %%v : %s", t)
		w.Line("}")
	}
}

// Convert changes the element type.
func (w *Writer) Convert(v Val, to dtype.DType) Val {
	if v.Type.Elem == to {
		return v
	}
	t := ir.Type{Elem: to, Dims: v.Type.Dims}
	return w.Apply(t, "stablehlo.convert ", "", v)
}

// Reduce folds the named dimensions with add, maximum or minimum from a start value; the others
// keep their order.
func (w *Writer) Reduce(v Val, how string, start float64, over ...string) Val {
	t := ir.Type{Elem: v.Type.Elem}
	var dims []int
	for i, d := range v.Type.Dims {
		if slices.Contains(over, d.Name) {
			dims = append(dims, i)
		} else {
			t.Dims = append(t.Dims, d)
		}
	}
	init := w.Constant(ir.Type{Elem: v.Type.Elem}, start)
	return w.Emit(t, "stablehlo.reduce(%s init: %s) applies stablehlo.%s across dimensions = [%s] "+
		": (%s, %s) -> %s", v.Name, init.Name, how, List(dims), Tensor(v.Type), Tensor(init.Type),
		Tensor(t))
}

// Dot multiplies and sums over the named dimensions; others that both have are batch dimensions.
// The result's dimensions come as StableHLO gives them: batch, then a's, then b's.
func (w *Writer) Dot(a, b Val, to dtype.DType, over ...string) Val {
	var batchA, batchB, sumA, sumB []int
	t := ir.Type{Elem: to}
	for i, d := range a.Type.Dims {
		k := b.Type.Index(d.Name)
		if k < 0 {
			continue
		}
		if slices.Contains(over, d.Name) {
			sumA, sumB = append(sumA, i), append(sumB, k)
		} else {
			batchA, batchB = append(batchA, i), append(batchB, k)
			t.Dims = append(t.Dims, d)
		}
	}
	t.Dims = slices.Concat(t.Dims, ir.Without(a.Type.Dims, ir.Names(b.Type.Dims)...),
		ir.Without(b.Type.Dims, ir.Names(a.Type.Dims)...))
	batch := ""
	if len(batchA) > 0 {
		batch = fmt.Sprintf(" batching_dims = [%s] x [%s],", List(batchA), List(batchB))
	}
	return w.Apply(t, "stablehlo.dot_general ", fmt.Sprintf(",%s contracting_dims = [%s] x [%s]",
		batch, List(sumA), List(sumB)), a, b)
}
