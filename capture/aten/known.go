package aten

import (
	"fmt"
	"math"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// maxListed bounds a vector that is written number by number.
const maxListed = 1024

// constant is a tensor of known numbers.
func constant(elem dtype.DType, sizes []int64, data []float64) *tensor {
	t := &tensor{known: data, elem: elem, axes: make([]axis, len(sizes))}
	for i, n := range sizes {
		t.axes[i].size = n
	}
	return t
}

// maxKnown bounds the elements of known numbers: a mask of 8192 by 8192.
const maxKnown = 1 << 26

// count gives the elements of known numbers of the given sizes.
func count(sizes []int64) int64 {
	total := int64(1)
	for _, n := range sizes {
		if n < 0 || n > 0 && total > maxKnown/n {
			panic(refusal(fmt.Sprintf("%v numbers that are known", sizes)))
		}
		total *= n
	}
	return total
}

// index computes, for each element of an array of the given sizes, a place in another.
func index(sizes []int64, place func(at []int64) int64) []int64 {
	out := make([]int64, count(sizes))
	at := make([]int64, len(sizes))
	for i := range out {
		out[i] = place(at)
		for k := len(at) - 1; k >= 0; k-- {
			if at[k]++; at[k] < sizes[k] {
				break
			}
			at[k] = 0
		}
	}
	return out
}

// strides gives the strides of a dense array.
func strides(sizes []int64) []int64 {
	out := make([]int64, len(sizes))
	n := int64(1)
	for i := len(sizes) - 1; i >= 0; i-- {
		out[i] = n
		n *= sizes[i]
	}
	return out
}

// picked gives the numbers of a known tensor in another shape.
func (t *tensor) picked(sizes []int64, place func(at []int64) int64) *tensor {
	where := index(sizes, place)
	data := make([]float64, len(where))
	for i, j := range where {
		data[i] = t.known[j]
	}
	return constant(t.elem, sizes, data)
}

// real writes known numbers as operations that count.
func (m *maker) real(t *tensor) *tensor {
	if slices.ContainsFunc(t.axes, func(a axis) bool { return a.size == 0 }) {
		panic(refusal("a tensor without elements"))
	}
	if t.v != nil {
		return t
	}
	return m.written(t, "k")
}

// written writes known numbers: repeated axes have no dimension; a sum or product of vectors is
// written as such; what is left is a vector, or a mask of what stands below a diagonal.
func (m *maker) written(t *tensor, key string) *tensor {
	sizes, elem := t.sizes(), m.elem(t.elem)
	step := strides(sizes)
	var live []int
	for i := range sizes {
		if sizes[i] > 1 && !repeats(t.known, sizes[i], step[i]) {
			live = append(live, i)
		}
	}
	switch len(live) {
	case 0:
		return m.tensor(m.b.Fill(ir.Type{Elem: elem}, t.known[0]), nil, t.axes...)
	case 1:
		i := live[0]
		vector := make([]float64, sizes[i])
		for k := range vector {
			vector[k] = t.known[int64(k)*step[i]]
		}
		d := m.extent(key, i, sizes[i])
		axes := slices.Clone(t.axes)
		axes[i].dims = []dim{d}
		return m.tensor(m.vector(vector, d, elem), nil, axes...)
	case 2:
		if t.elem == dtype.Pred {
			return m.triangle(t, live, key)
		}
	}
	if t.elem == dtype.Pred {
		panic(refusal("a mask that is not a triangle"))
	}
	return m.factored(t, live, key)
}

// extent is the dimension of axis i of known numbers. A node may write several, and axis i of one
// need not have the size of axis i of another.
func (m *maker) extent(key string, i int, size int64) dim {
	return m.fresh(fmt.Sprintf("%s%d.%d", key, i, size), size, -1)
}

// repeats reports whether an array does not change along an axis.
func repeats(data []float64, n, step int64) bool {
	for i, x := range data {
		if at := (int64(i) / step) % n; at > 0 && x != data[int64(i)-at*step] {
			return false
		}
	}
	return true
}

// vector writes numbers along a dimension: a progression if they are one, or one by one.
func (m *maker) vector(x []float64, d dim, elem dtype.DType) *ir.Value {
	n := int64(len(x))
	along := ir.Type{Elem: elem, Dims: []ir.Dim{{Name: m.name(d), Size: n}}}
	count := func() *ir.Value { return m.b.Iota(along, m.name(d)) }
	first, step := x[0], x[1]-x[0]
	arithmetic, geometric := true, x[0] > 0 && x[1] > 0 && elem.Kind() == dtype.Float
	ratio := 1.0
	if geometric {
		ratio = math.Pow(x[n-1]/x[0], 1/float64(n-1))
		geometric = ratio > 0
	}
	for i, have := range x {
		arithmetic = arithmetic && have == first+step*float64(i)
		if geometric {
			want := first * math.Pow(ratio, float64(i))
			geometric = math.Abs(have-want) <= 2e-7*math.Abs(want)
		}
	}
	switch {
	case arithmetic && first == 0 && step == 1:
		return count()
	case arithmetic && elem.Kind() == dtype.Float:
		return m.b.Shift(m.b.Scale(count(), step), first)
	case arithmetic:
		return m.b.Add(m.b.Scale(count(), step), m.b.Fill(ir.Type{Elem: elem}, first))
	case geometric && n > 2:
		return m.b.Scale(m.b.Exp(m.b.Scale(count(), math.Log(ratio))), first)
	case n > maxListed:
		panic(refusal(fmt.Sprintf("a buffer of %d numbers that are no progression", n)))
	}
	along.Dims[0].Size = 1
	var list []*ir.Value
	for _, one := range x {
		list = append(list, m.b.Fill(along, one))
	}
	return m.b.Concat(m.name(d), list...)
}

// triangle writes a mask that is true at and below a diagonal, or above it.
func (m *maker) triangle(t *tensor, live []int, key string) *tensor {
	sizes := t.sizes()
	step := strides(sizes)
	rows, cols := sizes[live[0]], sizes[live[1]]
	at := func(r, c int64) bool { return t.known[r*step[live[0]]+c*step[live[1]]] != 0 }
	edge := int64(0) // the first element of row 0 that differs from element 0
	for edge < cols && at(0, edge) == at(0, 0) {
		edge++
	}
	low := at(0, 0)
	if edge == cols { // row 0 is all of one kind: the diagonal begins above the corner
		panic(refusal("a mask that is not a triangle"))
	}
	for r := range rows {
		for c := range cols {
			if at(r, c) != ((c-r < edge) == low) {
				panic(refusal("a mask that is not a triangle"))
			}
		}
	}
	r, c := m.extent(key, live[0], rows), m.extent(key, live[1], cols)
	whole := ir.Type{Elem: dtype.S32, Dims: []ir.Dim{{Name: m.name(r), Size: rows},
		{Name: m.name(c), Size: cols}}}
	left := m.b.Sub(m.b.Iota(whole, m.name(c)), m.b.Iota(whole, m.name(r)))
	how := map[bool]string{true: "lt", false: "ge"}[low]
	v := m.b.Compare(how, left, m.b.Fill(ir.Type{Elem: dtype.S32}, float64(edge)))
	axes := slices.Clone(t.axes)
	axes[live[0]].dims, axes[live[1]].dims = []dim{r}, []dim{c}
	return m.tensor(v, nil, axes...)
}

// factored writes an array as the sum or product of a vector along its first axis that is not
// repeated and of what is left.
func (m *maker) factored(t *tensor, live []int, key string) *tensor {
	sizes := t.sizes()
	step := strides(sizes)
	i := live[0]
	pivot := slices.IndexFunc(t.known, func(x float64) bool { return x != 0 })
	for _, product := range []bool{false, true} {
		base := int64(pivot)
		base -= (base / step[i]) % sizes[i] * step[i] // its place with index 0 along i
		if product && t.known[base] == 0 {
			base = int64(pivot)
		}
		row := (base / step[i]) % sizes[i]
		origin := base - row*step[i]
		along, rest := slices.Clone(t.known), slices.Clone(t.known)
		fits := true
		for k := range t.known {
			r := (int64(k) / step[i]) % sizes[i]
			u, w := t.known[origin+r*step[i]], t.known[int64(k)+(row-r)*step[i]]
			if product {
				along[k], rest[k] = u/t.known[base], w
				fits = fits && near(along[k]*w, t.known[k])
			} else {
				along[k], rest[k] = u-t.known[base], w
				fits = fits && near(along[k]+w, t.known[k])
			}
		}
		if !fits {
			continue
		}
		x := m.written(constant(t.elem, sizes, along), key+"u")
		y := m.written(constant(t.elem, sizes, rest), key+"w")
		return m.binary(x, y, func(x, y *ir.Value) *ir.Value {
			if product {
				return m.b.Mul(x, y)
			}
			return m.b.Add(x, y)
		})
	}
	panic(refusal("a buffer that is no sum or product of vectors"))
}

// isTable reports whether known numbers may be too many to write: fractions along several axes, or
// along one that is long. Two numbers are a mask, which is read for where they stand.
func isTable(t *tensor) bool {
	if t.elem.Kind() != dtype.Float {
		return false
	}
	sizes := t.sizes()
	step := strides(sizes)
	live := 0
	for i := range sizes {
		if sizes[i] > 1 && !repeats(t.known, sizes[i], step[i]) {
			live++
		}
	}
	values := map[float64]bool{}
	for _, x := range t.known {
		if values[x] = true; len(values) > 2 {
			return live > 1 || len(t.known) > maxListed
		}
	}
	return false
}

func near(a, b float64) bool { return math.Abs(a-b) <= 1e-6*(math.Abs(a)+math.Abs(b))/2 }

// exact bounds the whole numbers of 64 bits that a constant may have, which is a float64.
const exact = 1 << 53

// within gives a constant of a type. A [Model] computes whole numbers of 64 bits in 32.
func within(elem dtype.DType, x float64) float64 {
	switch {
	case elem.Kind() == dtype.Float:
	case elem == dtype.S64 && math.Abs(x) > exact:
		panic(refusal(fmt.Sprintf("the number %g, which may not be exact", x)))
	case elem != dtype.S64 && (x < math.MinInt32 || x > math.MaxInt32):
		panic(refusal(fmt.Sprintf("the number %g, which 32 bits do not hold", x)))
	}
	return x
}
