package aten

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
)

// banded is a mask [len(slopes), 4, 4]: a query sees as many keys as a window, its own the last, or
// all if that is 0, with a bias of a head's slope by distance.
func banded(windows []int64, slopes ...float64) *tensor {
	var list []float64
	for h, slope := range slopes {
		for q := range int64(4) {
			for k := range int64(4) {
				v := slope * float64(k-q)
				if w := windows[h]; w > 0 && (k > q || q-k >= w) {
					v = math.Inf(-1)
				}
				list = append(list, v)
			}
		}
	}
	return constant(dtype.F32, []int64{int64(len(slopes)), 4, 4}, list)
}

// Masks are one operation with attention only if all heads agree, but for slopes; two windows are
// the smaller one, and a bound of scores does not cover slopes.
func TestMasksOfHeads(t *testing.T) {
	q := constant(dtype.F32, []int64{1, 2, 4, 8}, nil)
	for _, c := range []struct {
		mask   *tensor
		have   ir.Attention
		window int64 // -1 for none of these masks
		slopes []float64
	}{
		{mask: banded([]int64{4, 4}, 0, 0)},
		{mask: banded([]int64{2, 2}, 0, 0), window: 2},
		{mask: banded([]int64{3, 3}, 0, 0), have: ir.Attention{Causal: true, Window: 2}, window: 2},
		{mask: banded([]int64{4, 4}, .5, 0), slopes: []float64{.5, 0}},
		{mask: banded([]int64{4, 4}, 0, .5), slopes: []float64{0, .5}},
		{mask: banded([]int64{4}, .5), slopes: []float64{.5, .5}},
		{mask: banded([]int64{4, 4}, .5, .5), have: ir.Attention{SoftCap: 2}, window: -1},
		{mask: banded([]int64{4, 0}, 0, 0), window: -1},
		{mask: banded([]int64{0, 4}, 0, 0), window: -1},
		{mask: banded([]int64{2, 3}, 0, 0), window: -1},
	} {
		s := (&scores{q: q, how: c.have}).masked(nil, c.mask)
		switch {
		case s == nil:
			if c.window >= 0 {
				t.Errorf("%v is no mask", c.mask.known)
			}
		case c.window < 0:
			t.Errorf("%v is %+v", c.mask.known, s.how)
		case !s.how.Causal || s.how.Window != c.window || !slices.Equal(s.slopes, c.slopes):
			t.Errorf("%v is %+v with slopes %v", c.mask.known, s.how, s.slopes)
		}
	}
	if scaledBy(-2)(&scores{stage: capped}) {
		t.Error("scores are bound by -2")
	}
}

// Programs that torch would not write, or that it broadcasts, end with a graph or with the list of
// what is not supported.
func TestHostileCalls(t *testing.T) {
	x := pt2.Ref("x")
	count := func(end int64) []pt2.Arg { return named("end", end) }
	for _, c := range []struct {
		target string
		args   []pt2.Arg
		sizes  []int64 // of the result, as the program says
		want   string  // "" for a graph
	}{
		{"aten.arange.default", count(8), []int64{8}, ""},
		{"aten.arange.default", count(8), []int64{-5}, "a result of size -5"},
		{"aten.arange.default", count(8), []int64{7}, "8 numbers where the program says [7]"},
		{"aten.arange.default", count(8), nil, "8 numbers where the program says []"},
		{"aten.arange.default", count(1e10), []int64{1e10}, "numbers that are known"},
		{"aten.arange.default", count(1e18), []int64{1e18}, "numbers that are known"},
		{"aten.arange.default", count(math.MaxInt64), []int64{math.MaxInt64}, "numbers that are known"},
		{"aten.conv2d.default", named("input", x, "weight", x), []int64{4}, "conv2d"},
		{"aten.relu.default", named("self", x), []int64{2, 2, 1e12}, "a result of [2 2 3] where"},
		{"aten.relu.default", named("self", x), []int64{2, 2, 0}, "a result of [2 2 3] where"},
		{"aten.relu.default", named("self", x), []int64{2, 2, -3}, "a result of size -3"},
		{"aten.einsum.default", named("equation", "iij,ikl->jkl", "tensors", []pt2.Ref{x, x}),
			[]int64{3, 2, 3}, "einsum of a diagonal"},
		{"aten.einsum.default", named("equation", "ijk,klm->ij", "tensors", []pt2.Ref{x, x}),
			[]int64{2, 2}, "axes of 3 and 2 elements"},
		{"aten.einsum.default", named("equation", "ij,jk->ik", "tensors", []pt2.Ref{x, x}),
			[]int64{2, 2}, "einsum ij,jk->ik"},
		{"aten.slice.Tensor", named("self", x, "dim", int64(1), "start", int64(1), "end", int64(1)),
			[]int64{2, 0, 3}, "a tensor without elements"},
	} {
		w := &writer{g: &pt2.Graph{Inputs: []pt2.Argument{x}, Values: map[string]pt2.Value{
			"x": {Type: dtype.F32, Dims: []pt2.Expr{{Op: "Integer", Int: 2}, {Op: "Integer", Int: 2},
				{Op: "Integer", Int: 3}}}}}}
		w.add(c.target, c.args, &strided{sizes: c.sizes})
		m := &Model{elem: dtype.F32, archive: &pt2.Archive{Program: &pt2.Program{Graph: w.g,
			Inputs: []pt2.Spec{{Kind: pt2.UserInput, Name: "x", Arg: x}}}}}
		_, err := m.build(model.Shape{Batch: 5, Seq: 7, Elem: dtype.F32}, w.names[0])
		if c.want == "" && err == nil {
			continue
		}
		if err == nil || diag.From(err).Code != diag.NotSupported || c.want == "" ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%s of %v gives %v, not %q", c.target, c.sizes, err, c.want)
		}
	}
}

// Sizes of inputs that cannot be computed end with an error; they used to end the program.
func TestHostileSizes(t *testing.T) {
	x, s0 := pt2.Ref("x"), pt2.Expr{Op: "Symbol", Name: "s0"}
	for _, size := range []pt2.Expr{{Op: "Mod", Args: []pt2.Expr{s0, {Op: "Integer"}}},
		{Op: "Add", Args: []pt2.Expr{s0, s0}}, {Op: "Mod", Args: []pt2.Expr{s0}}, {Op: "Odd"}} {
		w := &writer{g: &pt2.Graph{Inputs: []pt2.Argument{x}, Values: map[string]pt2.Value{
			"x": {Type: dtype.F32, Dims: []pt2.Expr{size}}}}}
		w.add("aten.relu.default", named("self", x), dense(nil, []int64{2}))
		m := &Model{elem: dtype.F32, archive: &pt2.Archive{Program: &pt2.Program{Graph: w.g,
			Inputs: []pt2.Spec{{Kind: pt2.UserInput, Name: "x", Arg: x}}}}}
		_, err := m.build(model.Shape{Batch: 5, Seq: 7, Elem: dtype.F32}, w.names[0])
		if err == nil || diag.From(err).Code != diag.NotSupported ||
			!strings.Contains(err.Error(), "input x has the size") {
			t.Errorf("the size %v gives %v", size, err)
		}
		f := &Function{model: m, specs: m.archive.Program.Inputs}
		if _, err := f.Read([][]int64{{2}}, nil); err == nil || diag.From(err).Code != diag.BadInput {
			t.Errorf("the size %v of a function gives %v", size, err)
		}
	}
}

// Queries of one row are repeated along the batch of the keys.
func TestAttentionBroadcasts(t *testing.T) {
	x := pt2.Ref("x")
	size := func(list ...int64) (dims []pt2.Expr) {
		for _, n := range list {
			dims = append(dims, pt2.Expr{Op: "Integer", Int: n})
		}
		return dims
	}
	w := &writer{g: &pt2.Graph{Inputs: []pt2.Argument{x}, Values: map[string]pt2.Value{
		"x": {Type: dtype.F32, Dims: size(2, 3, 5, 4)}}}}
	w.add("aten.slice.Tensor", named("self", x, "dim", int64(0), "start", int64(0), "end", int64(1)),
		dense(nil, []int64{1, 3, 5, 4}))
	w.add("aten.scaled_dot_product_attention.default", named("query", w.names[0], "key", x,
		"value", x), dense(nil, []int64{2, 3, 5, 4}))
	m := &Model{elem: dtype.F32, archive: &pt2.Archive{Program: &pt2.Program{Graph: w.g,
		Inputs: []pt2.Spec{{Kind: pt2.UserInput, Name: "x", Arg: x}}}}}
	g, err := m.build(model.Shape{Batch: 9, Seq: 7, Elem: dtype.F32}, w.names[1])
	if err != nil {
		t.Fatal(err)
	}
	if d := g.Results[0].Type.Dims; len(d) != 4 || d[0].Size != 2 || d[1].Size != 3 {
		t.Errorf("attention gives %v", d)
	}
}
