package aten

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/model"
)

var seed = flag.Uint64("seed", 0, "of random programs; 0 for the usual one")

// A strided is a tensor as torch has it: a window on memory.
type strided struct {
	data          []float64
	offset        int64
	sizes, stride []int64
	wide          bool // an axis is repeated: nothing may be written
}

// at lists the places of all elements, row by row.
func (s *strided) at() []int64 {
	return index(s.sizes, func(at []int64) int64 {
		k := s.offset
		for i, x := range at {
			k += x * s.stride[i]
		}
		return k
	})
}

func (s *strided) values() []float64 {
	out := make([]float64, 0, len(s.data))
	for _, k := range s.at() {
		out = append(out, s.data[k])
	}
	return out
}

func dense(data []float64, sizes []int64) *strided {
	return &strided{data: data, sizes: sizes, stride: strides(sizes)}
}

func (s *strided) change(to func(i int, old float64) float64) {
	for i, k := range s.at() {
		s.data[k] = to(i, s.data[k])
	}
}

// A writer writes a random program, and computes it as it goes.
type writer struct {
	r     *rand.Rand
	g     *pt2.Graph
	have  []*strided
	names []pt2.Ref
}

// add adds a node; outputs are what it gives.
func (w *writer) add(target string, args []pt2.Arg, outputs ...*strided) {
	n := pt2.Node{Target: target, Args: args}
	for _, s := range outputs {
		ref := pt2.Ref(fmt.Sprint("v", len(w.have)))
		v := pt2.Value{Type: dtype.F32}
		for _, size := range s.sizes {
			v.Dims = append(v.Dims, pt2.Expr{Op: "Integer", Int: size})
		}
		w.g.Values[string(ref)] = v
		w.have, w.names = append(w.have, s), append(w.names, ref)
		n.Outputs = append(n.Outputs, ref)
	}
	w.g.Nodes = append(w.g.Nodes, n)
}

// named lists arguments as name and value in turn.
func named(list ...any) (args []pt2.Arg) {
	for i := 0; i < len(list); i += 2 {
		args = append(args, pt2.Arg{Name: list[i].(string), Value: list[i+1]})
	}
	return args
}

// view adds a random view of a variable.
func (w *writer) view(k int) {
	s, self := w.have[k], w.names[k]
	rank := len(s.sizes)
	out := *s
	out.sizes, out.stride = slices.Clone(s.sizes), slices.Clone(s.stride)
	if rank == 0 {
		w.add("aten.alias.default", named("self", self), &out)
		return
	}
	i := w.r.IntN(rank)
	switch n := s.sizes[i]; w.r.IntN(9) {
	case 0:
		step := int64(1 + w.r.IntN(2))
		from := w.r.Int64N(n)
		to := from + 1 + w.r.Int64N(n-from)
		if step == 2 { // every second of all
			from, to = w.r.Int64N(2), n
			if n%2 != 0 {
				step, from = 1, 0
			}
		}
		out.offset += from * s.stride[i]
		out.sizes[i], out.stride[i] = (to-from+step-1)/step, s.stride[i]*step
		w.add("aten.slice.Tensor", named("self", self, "dim", int64(i), "start", from, "end", to,
			"step", step), &out)
	case 1:
		at := w.r.Int64N(n)
		out.offset += at * s.stride[i]
		out.sizes, out.stride = slices.Delete(out.sizes, i, i+1), slices.Delete(out.stride, i, i+1)
		w.add("aten.select.int", named("self", self, "dim", int64(i), "index", at-n), &out)
	case 2:
		j := w.r.IntN(rank)
		out.sizes[i], out.sizes[j] = out.sizes[j], out.sizes[i]
		out.stride[i], out.stride[j] = out.stride[j], out.stride[i]
		w.add("aten.transpose.int", named("self", self, "dim0", int64(i), "dim1", int64(j)), &out)
	case 3:
		if rank > 3 {
			return
		}
		out.sizes, out.stride = slices.Insert(out.sizes, i, 1), slices.Insert(out.stride, i, 1)
		w.add("aten.unsqueeze.default", named("self", self, "dim", int64(i)), &out)
	case 4, 5:
		w.regroup(s, self, i)
	case 6:
		if n%2 == 0 {
			low, high := out, out
			low.sizes, high.sizes = slices.Clone(out.sizes), slices.Clone(out.sizes)
			low.sizes[i], high.sizes[i], high.offset = n/2, n/2, out.offset+n/2*out.stride[i]
			w.add("aten.chunk.default", named("self", self, "chunks", int64(2), "dim", int64(i)), &low,
				&high)
		}
	case 7:
		if n == 1 {
			out.sizes[i], out.stride[i], out.wide = 3, 0, true
			w.add("aten.expand.default", named("self", self, "size", slices.Clone(out.sizes)), &out)
		}
	case 8:
		w.add("aten.to.dtype", named("self", self, "dtype", dtype.F32), &out)
	}
}

// regroup adds a view that joins an axis with the next, or a reshape, which copies if it must.
func (w *writer) regroup(s *strided, self pt2.Ref, i int) {
	if i+1 >= len(s.sizes) {
		return
	}
	sizes := slices.Delete(slices.Clone(s.sizes), i+1, i+2)
	sizes[i] *= s.sizes[i+1]
	out := &strided{data: s.data, offset: s.offset, sizes: sizes, wide: s.wide,
		stride: slices.Delete(slices.Clone(s.stride), i, i+1)}
	can := s.stride[i] == s.stride[i+1]*s.sizes[i+1]
	if w.r.IntN(6) == 0 || !can && w.r.IntN(3) == 0 {
		if !can {
			out = dense(s.values(), sizes)
		}
		w.add("aten.reshape.default", named("self", self, "shape", sizes), out)
		return
	}
	if can {
		w.add("aten.view.default", named("self", self, "size", sizes), out)
	}
}

// change adds a change in place, or a copy.
func (w *writer) change(k int) {
	s, self := w.have[k], w.names[k]
	other := slices.IndexFunc(w.have, func(o *strided) bool {
		return o != s && slices.Equal(o.sizes, s.sizes) && w.r.IntN(2) == 0
	})
	by := float64(1+w.r.IntN(5)) / 2
	how := w.r.IntN(6)
	switch {
	case how == 5:
		w.add("aten.clone.default", named("self", self), dense(s.values(), s.sizes))
	case s.wide:
	case how == 4 && other >= 0:
		y := w.have[other].values()
		s.change(func(i int, _ float64) float64 { return y[i] })
		w.add("aten.copy_.default", named("self", self, "src", w.names[other]), s)
	case how == 3 && other >= 0:
		y := w.have[other].values()
		s.change(func(i int, x float64) float64 { return x + y[i] })
		w.add("aten.add_.Tensor", named("self", self, "other", w.names[other]), s)
	case how == 2:
		s.change(func(int, float64) float64 { return by })
		w.add("aten.fill_.Scalar", named("self", self, "value", by), s)
	case how == 1:
		s.change(func(_ int, x float64) float64 { return x + by })
		w.add("aten.add_.Tensor", named("self", self, "other", by), s)
	default:
		s.change(func(_ int, x float64) float64 { return x * by })
		w.add("aten.mul_.Tensor", named("self", self, "other", by), s)
	}
}

// Random programs of views and changes in place give what memory with strides gives, or are refused
// where a reshape may be either.
func TestChangesInPlace(t *testing.T) {
	r := rand.New(rand.NewPCG(slowtest.Seed(t, "seed", *seed), 1))
	refused, wrong := 0, 0
	const programs = 1000
	for range programs {
		w := &writer{r: r, g: &pt2.Graph{Inputs: []pt2.Argument{pt2.Ref("x")},
			Values: map[string]pt2.Value{}}}
		sizes := []int64{4, 2, 6}
		data := make([]float64, 48)
		for i := range data {
			data[i] = float64(r.IntN(9) - 4)
		}
		w.g.Values["x"] = pt2.Value{Type: dtype.F32, Dims: []pt2.Expr{{Op: "Integer", Int: 4},
			{Op: "Integer", Int: 2}, {Op: "Integer", Int: 6}}}
		w.add("aten.clone.default", named("self", pt2.Ref("x")), dense(slices.Clone(data), sizes))
		for range 12 {
			k := r.IntN(len(w.have))
			if r.IntN(5) < 3 {
				w.view(k)
			} else {
				w.change(k)
			}
		}
		m := &Model{elem: dtype.F32, archive: &pt2.Archive{Program: &pt2.Program{Graph: w.g,
			Inputs: []pt2.Spec{{Kind: pt2.UserInput, Name: "x", Arg: pt2.Ref("x")}}}}}
		for _, k := range []int{0, r.IntN(len(w.have)), len(w.have) - 1} {
			shape := model.Shape{Batch: 5, Seq: 7, Elem: dtype.F32}
			g, err := m.build(shape, w.names[k])
			if err != nil {
				known := []string{"a copy or a view", "whose step does not divide", "without a common factor"}
				if !slices.ContainsFunc(known, func(s string) bool { return strings.Contains(err.Error(), s) }) {
					t.Fatalf("%v\n%s", err, w.text())
				}
				refused++
				continue
			}
			feed := map[string][]float64{"x": data, model.InputPositions: make([]float64, 35)}
			if d := distance(evaluate(t, g, feed)[0], w.have[k].values()); !(d < 1e-6) {
				if wrong++; wrong < 3 {
					t.Errorf("%s: %v from what it should be, of\n%s", w.names[k], d, w.text())
				}
			}
		}
	}
	t.Logf("%d programs, %d results refused, %d wrong", programs, refused, wrong)
	if refused > programs/2 {
		t.Errorf("%d of %d results were refused", refused, 3*programs)
	}
}

func (w *writer) text() string {
	var s strings.Builder
	for _, n := range w.g.Nodes {
		fmt.Fprintln(&s, n.Outputs, n.Target, n.Args)
	}
	return s.String()
}

// What a program changes and others keep is refused, even if its result does not need the change.
func TestChangesThatLast(t *testing.T) {
	w := &writer{g: &pt2.Graph{Inputs: []pt2.Argument{pt2.Ref("v0")}, Values: map[string]pt2.Value{}}}
	w.add("", nil, dense(make([]float64, 6), []int64{2, 3}))
	w.g.Nodes = nil
	w.add("aten.clone.default", named("self", pt2.Ref("v0")), w.have[0])
	w.add("aten.select.int", named("self", pt2.Ref("v0"), "dim", int64(0), "index", int64(1)),
		dense(nil, []int64{3}))
	w.add("aten.add_.Tensor", named("self", pt2.Ref("v2"), "other", 1.5), dense(nil, []int64{3}))
	m := &Model{elem: dtype.F32, archive: &pt2.Archive{Program: &pt2.Program{Graph: w.g,
		Inputs: []pt2.Spec{{Kind: pt2.UserInput, Name: "x", Arg: pt2.Ref("v0")}}}}}
	_, err := m.build(model.Shape{Batch: 5, Seq: 7, Elem: dtype.F32}, "v1")
	if err == nil || !strings.Contains(err.Error(), "a change of an input, a parameter or a buffer") {
		t.Errorf("a change of an input gives %v", err)
	}
}
