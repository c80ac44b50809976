package lower

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
)

// A writer prints one module. Lines refer to values by MLIR names; the first error is kept.
type writer struct {
	b       strings.Builder
	mesh    []ir.Axis
	groups  []string // of devices that meet in collectives, each written once
	rules   map[string]rule
	table   []kernel
	kernels *kernels.Selector
	at      map[*ir.Value]string
	holds   []string       // the types of what is held
	known   map[string]val // what was written once, of the function or body that is being written
	next    int
	indent  int
	err     error
}

func (w *writer) line(format string, args ...any) {
	w.b.WriteString(strings.Repeat("  ", w.indent))
	fmt.Fprintf(&w.b, format, args...)
	w.b.WriteByte('\n')
}

func (w *writer) fail(format string, args ...any) {
	if w.err == nil {
		w.err = fmt.Errorf(format, args...)
	}
}

// fresh gives a new MLIR name.
func (w *writer) fresh() string {
	w.next++
	return fmt.Sprintf("%%%d", w.next)
}

// A val is an MLIR value with its type, while an operation is being written.
type val struct {
	name string
	t    ir.Type
}

func tensor(t ir.Type) string { return t.Shape().MLIR() }

// use gives the MLIR value of a graph value.
func (w *writer) use(v *ir.Value) val {
	name, ok := w.at[v]
	if !ok {
		w.fail("%s was not lowered", v)
	}
	return val{name, v.Type}
}

// once writes something the first time, and gives it again where the same is asked for in the same
// function or body.
func (w *writer) once(key string, write func() val) val {
	v, ok := w.known[key]
	if !ok {
		v = write()
		w.known[key] = v
	}
	return v
}

// emit writes one instruction with one result.
func (w *writer) emit(t ir.Type, format string, args ...any) val {
	v := val{w.fresh(), t}
	w.line("%s = %s", v.name, fmt.Sprintf(format, args...))
	return v
}

// apply writes an instruction on values: what stands before and after their names, then the types.
func (w *writer) apply(t ir.Type, before, after string, in ...val) val {
	names, types := spelled(in)
	return w.emit(t, "%s%s%s : (%s) -> %s", before, names, after, types, tensor(t))
}

// spelled lists the names of values, and their types.
func spelled(in []val) (names, types string) {
	n, t := make([]string, len(in)), make([]string, len(in))
	for i, v := range in {
		n[i], t[i] = v.name, tensor(v.t)
	}
	return strings.Join(n, ", "), strings.Join(t, ", ")
}

// list spells things with commas between, as MLIR has them in brackets.
func list[T any](things []T) string {
	texts := lists.Map(things, func(x T) string { return fmt.Sprint(x) })
	return strings.Join(texts, ", ")
}

// elementwise writes an instruction whose arguments and result all have one type.
func (w *writer) elementwise(op string, args ...val) val {
	names, _ := spelled(args)
	return w.emit(args[0].t, "stablehlo.%s %s : %s", op, names, tensor(args[0].t))
}

// constant writes a number, as many times as a type has elements.
func (w *writer) constant(t ir.Type, value float64) val {
	return w.emit(t, "stablehlo.constant dense<%s> : %s", number(t.Elem, value), tensor(t))
}

// number spells a constant of an element type. Floats are written with enough digits to come back,
// infinities by their bits, since MLIR has no word for them.
func number(d dtype.DType, value float64) string {
	switch {
	case d == dtype.Pred:
		return fmt.Sprint(value != 0)
	case d.Kind() != dtype.Float:
		return fmt.Sprintf("%d", int64(value))
	case value < -1e300:
		return map[dtype.DType]string{dtype.F32: "0xFF800000", dtype.BF16: "0xFF80",
			dtype.F64: "0xFFF0000000000000", dtype.F16: "0xFC00"}[d]
	}
	return fmt.Sprintf("%.17e", value)
}

// as repeats a value along the dimensions that a wider type has, matching dimensions by name.
func (w *writer) as(v val, t ir.Type) val {
	t = ir.Type{Elem: v.t.Elem, Dims: t.Dims}
	if slices.Equal(v.t.Dims, t.Dims) {
		return v
	}
	dims := lists.Map(v.t.Dims, func(d ir.Dim) int { return t.Index(d.Name) })
	if !slices.IsSorted(dims) { // as broadcast_in_dim wants them
		order := lists.Filter(ir.Names(t.Dims), func(name string) bool { return v.t.Index(name) >= 0 })
		return w.as(w.transpose(v, order), t)
	}
	return w.apply(t, "stablehlo.broadcast_in_dim ", ", dims = ["+list(dims)+"]", v)
}

// transpose puts dimensions into another order.
func (w *writer) transpose(v val, order []string) val {
	t := ir.Type{Elem: v.t.Elem}
	perm := make([]int, len(order))
	for i, name := range order {
		perm[i] = v.t.Index(name)
		t.Dims = append(t.Dims, v.t.Dims[perm[i]])
	}
	if slices.IsSorted(perm) {
		return v
	}
	return w.apply(t, "stablehlo.transpose ", ", dims = ["+list(perm)+"]", v)
}

// reshape changes the dimensions, not the order of elements.
func (w *writer) reshape(v val, t ir.Type) val {
	t = ir.Type{Elem: v.t.Elem, Dims: t.Dims}
	if v.t.Shape().Equal(t.Shape()) {
		return val{v.name, t}
	}
	return w.apply(t, "stablehlo.reshape ", "", v)
}

// barriers is a barrier on several values at once.
func (w *writer) barriers(in ...val) []val {
	if len(in) == 1 {
		return []val{w.barrier(in[0])}
	}
	names, types := spelled(in)
	name := w.fresh()
	w.line("%s:%d = stablehlo.optimization_barrier %s : %s", name, len(in), names, types)
	out := slices.Clone(in)
	for i := range out {
		out[i].name = fmt.Sprintf("%s#%d", name, i)
	}
	return out
}

// barrier gives a value that XLA neither looks through nor computes again.
func (w *writer) barrier(v val) val {
	return w.emit(v.t, "stablehlo.optimization_barrier %s : %s", v.name, tensor(v.t))
}

// held gives a value that is written to memory as it is, and that nothing after it computes again.
// XLA:CPU drops barriers before it joins loops, but does not join what a function gives that is not
// inlined.
func (w *writer) held(v val) val {
	t := tensor(v.t)
	at := slices.Index(w.holds, t)
	if at < 0 {
		at = len(w.holds)
		w.holds = append(w.holds, t)
	}
	return w.emit(v.t, "func.call @held%d(%s) "+
		`{mhlo.frontend_attributes = {inlineable = "false"}} : (%[3]s) -> %[3]s`, at, v.name, t)
}

// holders are the functions that held calls.
func (w *writer) holders() {
	for i, t := range w.holds {
		w.line("func.func private @held%d(%%v: %[2]s) -> %[2]s {", i, t)
		w.line("  return %%v : %s", t)
		w.line("}")
	}
}

// convert changes the element type.
func (w *writer) convert(v val, to dtype.DType) val {
	if v.t.Elem == to {
		return v
	}
	t := ir.Type{Elem: to, Dims: v.t.Dims}
	return w.apply(t, "stablehlo.convert ", "", v)
}

// reduce folds dimensions with add or maximum.
func (w *writer) reduce(v val, how string, start float64, over ...string) val {
	t := ir.Type{Elem: v.t.Elem}
	var dims []int
	for i, d := range v.t.Dims {
		if slices.Contains(over, d.Name) {
			dims = append(dims, i)
		} else {
			t.Dims = append(t.Dims, d)
		}
	}
	init := w.constant(ir.Type{Elem: v.t.Elem}, start)
	return w.emit(t, "stablehlo.reduce(%s init: %s) applies stablehlo.%s across dimensions = [%s] "+
		": (%s, %s) -> %s", v.name, init.name, how, list(dims), tensor(v.t), tensor(init.t), tensor(t))
}

// dot multiplies and sums over the named dimensions; other shared ones go side by side. The
// result's dimensions come as StableHLO gives them: shared, then a's, then b's.
func (w *writer) dot(a, b val, to dtype.DType, over ...string) val {
	var batchA, batchB, sumA, sumB []int
	t := ir.Type{Elem: to}
	for i, d := range a.t.Dims {
		k := b.t.Index(d.Name)
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
	t.Dims = slices.Concat(t.Dims, ir.Without(a.t.Dims, ir.Names(b.t.Dims)...),
		ir.Without(b.t.Dims, ir.Names(a.t.Dims)...))
	batch := ""
	if len(batchA) > 0 {
		batch = fmt.Sprintf(" batching_dims = [%s] x [%s],", list(batchA), list(batchB))
	}
	return w.apply(t, "stablehlo.dot_general ", fmt.Sprintf(",%s contracting_dims = [%s] x [%s]",
		batch, list(sumA), list(sumB)), a, b)
}
