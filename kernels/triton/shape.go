package triton

import (
	"fmt"
	"slices"
	"strings"
)

func join(list []string) string { return strings.Join(list, ", ") }

// Program is the program's place in the grid: 0 is x, 1 is y, 2 is z.
func (b *Builder) Program(axis int) Value {
	return b.emit(I32, false, nil, "tt.get_program_id %c : i32", "xyz"[axis])
}

// Range is 0, 1, … n−1; n is a power of two, as all sizes of blocks.
func (b *Builder) Range(n int) Value {
	if n&(n-1) != 0 {
		return b.Fail("a block of %d, which is no power of two", n)
	}
	return b.emit(I32, false, []int{n}, "tt.make_range {end = %d : i32, start = 0 : i32} : %s", n,
		spell(I32, false, []int{n}))
}

// Full is a block of one number.
func (b *Builder) Full(n any, e Elem, shape ...int) Value { return b.constant(n, e, shape) }

// Broadcast repeats dimensions of size 1, and scalars.
func (v Value) Broadcast(shape ...int) Value {
	if slices.Equal(v.shape, shape) {
		return v
	}
	how := "broadcast"
	if v.shape == nil {
		how = "splat"
	}
	for i, n := range v.shape {
		if len(shape) != len(v.shape) || n != shape[i] && n != 1 {
			return v.b.Fail("%s cannot become %v", v.typ(), shape)
		}
	}
	return v.b.emit(v.elem, v.ptr, shape, "tt.%s %s : %s -> %s", how, v.name, v.typ(),
		spell(v.elem, v.ptr, shape))
}

// Expand inserts a dimension of size 1: [n] becomes [n, 1] with axis 1, and [1, n] with axis 0.
func (v Value) Expand(axis int) Value {
	shape := slices.Insert(slices.Clone(v.shape), axis, 1)
	return v.b.emit(v.elem, v.ptr, shape, "tt.expand_dims %s {axis = %d : i32} : %s -> %s", v.name,
		axis, v.typ(), spell(v.elem, v.ptr, shape))
}

// Reshape keeps the order of elements, the last dimension fastest.
func (v Value) Reshape(shape ...int) Value { return v.reshape("", shape...) }

// reshape is Reshape with a word for the compiler.
func (v Value) reshape(word string, shape ...int) Value {
	if count(shape) != count(v.shape) {
		return v.b.Fail("%s cannot become %v", v.typ(), shape)
	}
	return v.b.emit(v.elem, v.ptr, shape, "tt.reshape %s%s : %s -> %s", v.name, word, v.typ(),
		spell(v.elem, v.ptr, shape))
}

func count(shape []int) int {
	n := 1
	for _, k := range shape {
		n *= k
	}
	return n
}

// Trans puts dimensions in another order.
func (v Value) Trans(order ...int) Value {
	shape := make([]int, len(order))
	for i, k := range order {
		shape[i] = v.shape[k]
	}
	list := strings.Trim(strings.ReplaceAll(fmt.Sprint(order), " ", ", "), "[]")
	return v.b.emit(v.elem, v.ptr, shape, "tt.trans %s {order = array<i32: %s>} : %s -> %s", v.name,
		list, v.typ(), spell(v.elem, v.ptr, shape))
}

// Split takes a last dimension of 2 apart.
func (v Value) Split() (first, second Value) {
	n := len(v.shape) - 1
	if n < 1 || v.shape[n] != 2 {
		e := v.b.Fail("%s has no pairs", v.typ())
		return e, e
	}
	x, y := v.b.fresh(v.elem, false, v.shape[:n]), v.b.fresh(v.elem, false, v.shape[:n])
	v.b.line("%s, %s = tt.split %s : %s -> %s", x.name, y.name, v.name, v.typ(), x.typ())
	return x, y
}

// Join makes pairs of two values' elements, in a new last dimension.
func (v Value) Join(x Value) Value {
	shape := append(slices.Clone(v.shape), 2)
	return v.b.emit(v.elem, false, shape, "tt.join %s, %s : %s -> %s", v.name, v.like(x).name, v.typ(),
		spell(v.elem, false, shape))
}

// Reduce combines all elements along an axis, in an order that the compiler chooses.
func (v Value) Reduce(axis int, f func(x, y Value) Value) Value {
	b := v.b
	shape := slices.Delete(slices.Clone(v.shape), axis, axis+1)
	if len(shape) == 0 {
		shape = nil
	}
	out := b.fresh(v.elem, false, shape)
	x, y := b.fresh(v.elem, false, nil), b.fresh(v.elem, false, nil)
	b.line(`%s = "tt.reduce"(%s) <{axis = %d : i32}> ({`, out.name, v.name, axis)
	b.line("^bb0(%s: %s, %s: %s):", x.name, v.elem, y.name, v.elem)
	b.depth++
	r := f(x, y)
	b.line("tt.reduce.return %s : %s", r.name, r.elem)
	b.depth--
	b.line("}) : (%s) -> %s", v.typ(), out.typ())
	return out
}

// Largest is the largest element along an axis.
func (v Value) Largest(axis int) Value {
	return v.Reduce(axis, func(x, y Value) Value { return x.Max(y) })
}

// Sum adds all elements along an axis.
func (v Value) Sum(axis int) Value {
	return v.Reduce(axis, func(x, y Value) Value { return x.Add(y) })
}

// For counts from one number up to another, which it does not reach. Body gets what the round
// before gave, at first carried, and gives the same number of values of the same types.
func (b *Builder) For(from, to, step Value, carried []Value,
	body func(i Value, carried []Value) []Value) []Value {
	i := b.fresh(from.elem, false, nil)
	in, out := make([]Value, len(carried)), make([]Value, len(carried))
	names, pairs, types := make([]string, len(carried)), make([]string, len(carried)), []string(nil)
	for k, v := range carried {
		in[k], out[k] = b.fresh(v.elem, v.ptr, v.shape), &Block{b, "", v.elem, v.shape, v.ptr}
		pairs[k] = in[k].name + " = " + v.name
		types = append(types, v.typ())
	}
	var head, tail string
	if len(carried) > 0 {
		b.names++
		group := fmt.Sprintf("%%%d", b.names)
		for k := range out {
			out[k].name = group
			if len(out) > 1 {
				out[k].name = fmt.Sprintf("%s#%d", group, k)
			}
		}
		if head = group + " = "; len(out) > 1 {
			head = fmt.Sprintf("%s:%d = ", group, len(out))
		}
		tail = " iter_args(" + join(pairs) + ") -> (" + join(types) + ")"
	}
	b.line("%sscf.for %s = %s to %s step %s%s : %s {", head, i.name, from.name, to.name, step.name,
		tail, from.elem)
	b.depth++
	got := body(i, in)
	if len(got) != len(carried) {
		b.Fail("the loop carries %d values and gives %d", len(carried), len(got))
		return out
	}
	for k, v := range got {
		if names[k] = v.name; v.typ() != types[k] {
			b.Fail("value %d of the loop is %s, and %s behind a round", k, types[k], v.typ())
		}
	}
	if len(got) > 0 {
		b.line("scf.yield %s : %s", join(names), join(types))
	}
	b.depth--
	b.line("}")
	return out
}
