package model_test

import (
	"slices"
	"testing"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"pgregory.net/rapid"
)

// anyParam draws a parameter: a box of rows or columns, all or in steps, transposed or not,
// stacked or not, of one tensor or one for each expert, or with a matrix for each.
func anyParam(t *rapid.T) model.Param {
	size := rapid.OneOf(rapid.Int64Range(1, 6), rapid.Int64Range(60, 70)) // some beyond a tile
	p := model.Param{Name: "p", Source: "layer.{}.w", Shape: []int64{size.Draw(t, "rows")},
		First: rapid.Int64Range(0, 3).Draw(t, "first"), Step: size.Draw(t, "step")}
	if rapid.Bool().Draw(t, "matrix") {
		p.Shape = append(p.Shape, size.Draw(t, "columns"))
		p.Transposed = rapid.Bool().Draw(t, "transposed")
		p.Axis = rapid.IntRange(0, 1).Draw(t, "axis")
	}
	n := p.Shape[p.Axis]
	p.Every = rapid.Int64Range(0, 3).Draw(t, "every")
	p.From = rapid.Int64Range(0, n-1).Draw(t, "from")
	p.To = rapid.Int64Range(p.From+1, n).Draw(t, "to")
	if rapid.Bool().Draw(t, "stacked") {
		p.Dims = []ir.Dim{{Name: ir.Layer, Size: rapid.Int64Range(1, 4).Draw(t, "layers")}}
	}
	elements := (p.To - p.From + max(p.Every, 1) - 1) / max(p.Every, 1)
	for axis, n := range p.Shape {
		if axis != p.Axis {
			elements *= n
		}
	}
	experts := ir.Dim{Name: ir.ExpertDim, Size: rapid.Int64Range(1, 4).Draw(t, "experts")}
	some := true
	switch form := rapid.SampledFrom([]string{"", "apart", "together"}).Draw(t, "form"); {
	case form == "apart":
		p.Dims, p.Source = append(p.Dims, experts), "layer.{}.expert.{expert}.w"
	case form == "together" && len(p.Shape) > 1:
		p.Dims, p.Shape = append(p.Dims, experts), append([]int64{experts.Size}, p.Shape...)
	case form == "together": // a row of a matrix for each
		p.Dims, p.Shape, p.Axis = append(p.Dims, experts), []int64{experts.Size, p.Shape[0]}, 1
	default:
		some = false
	}
	p.Dims = append(p.Dims, ir.Dim{Name: "all", Size: elements})
	if some && rapid.Bool().Draw(t, "some experts") {
		from := rapid.Int64Range(0, experts.Size-1).Draw(t, "first expert")
		return p.SliceExperts(from, rapid.Int64Range(from+1, experts.Size).Draw(t, "last expert"))
	}
	return p
}

// Where an element stands, that element stands; and what Take took, Put puts back.
func TestLayoutIsInvertible(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := anyParam(t)
		whole := int64(1)
		for _, n := range p.Shape {
			whole *= n
		}
		names, hit := p.Tensors(), map[[2]int64]bool{}
		param := make([]int64, p.Size())
		for i := range param {
			tensor, j := p.Forward(int64(i))
			if tensor < 0 || tensor >= len(names) || j < 0 || j >= whole {
				t.Fatalf("element %d stands at %d of tensor %d", i, j, tensor)
			}
			if back, ok := p.Inverse(tensor, j); !ok || back != int64(i) {
				t.Fatalf("element %d stands at %d of %d, where %d stands (%v)", i, j, tensor, back, ok)
			}
			hit[[2]int64{int64(tensor), j}] = true
			param[i] = int64(i) + 1
		}
		got := make([]int64, p.Size())
		for k := range names {
			tensor := make([]int64, whole)
			if err := model.Put(&p, k, tensor, param); err != nil {
				t.Fatal(err)
			}
			for j, v := range tensor {
				i, ok := p.Inverse(k, int64(j))
				if ok != hit[[2]int64{int64(k), int64(j)}] || ok && v != i+1 || !ok && v != 0 {
					t.Fatalf("place %d of tensor %d holds %d; element %d stands there (%v)", j, k, v, i, ok)
				}
			}
			if err := model.Take(&p, k, got, tensor); err != nil {
				t.Fatal(err)
			}
		}
		if !slices.Equal(got, param) {
			t.Fatalf("%v came back as %v", param, got)
		}
	})
}

func TestTakeWantsTheRightSizes(t *testing.T) {
	p := model.Param{Name: "p", Source: "w", Shape: []int64{2, 3}, To: 2,
		Dims: []ir.Dim{{Name: "a", Size: 6}}}
	for _, c := range []struct{ tensor, param, t int }{{5, 6, 0}, {6, 7, 0}, {6, 6, 1}, {6, 6, -1}} {
		if model.Take(&p, c.t, make([]byte, c.param), make([]byte, c.tensor)) == nil {
			t.Errorf("%+v is taken", c)
		}
	}
}

// Every element of every tensor is an element of exactly one parameter, in every preset: checked on
// the edges of the boxes that parameters are, which must lie side by side.
func TestTensorsAreCovered(t *testing.T) {
	for _, preset := range model.Presets() {
		c := preset.Config
		if c == nil {
			continue
		}
		covered, size := map[string]int64{}, map[string]int64{}
		for _, p := range c.Params() {
			n := len(p.Shape)
			for _, name := range p.Tensors() {
				if p.Every > 1 { // columns that take turns
					if p.To != p.Shape[n-1] || p.From >= p.Every {
						t.Errorf("%s: %s has %d to %d of %s", preset.Name, p.Name, p.From, p.To, name)
					}
					covered[name] += (p.To - p.From + p.Every - 1) / p.Every
					size[name] = p.To
					continue
				}
				if p.From != covered[name] {
					t.Errorf("%s: %s begins at %d of %s, not %d", preset.Name, p.Name, p.From, name, covered[name])
				}
				covered[name], size[name] = p.To, p.Shape[max(0, n-2)+p.Axis]
			}
		}
		for name, n := range size {
			if covered[name] != n {
				t.Errorf("%s: %s is covered up to %d of %d", preset.Name, name, covered[name], n)
			}
		}
	}
}

func BenchmarkTake(b *testing.B) {
	const n = 4096
	for _, transposed := range []bool{false, true} {
		p := model.Param{Name: "p", Source: "w", Shape: []int64{n, n}, To: n, Transposed: transposed,
			Dims: []ir.Dim{{Name: "a", Size: n}, {Name: "b", Size: n}}}
		b.Run(map[bool]string{false: "plain", true: "transposed"}[transposed], func(b *testing.B) {
			from, to := make([]uint16, n*n), make([]uint16, n*n)
			b.SetBytes(2 * n * n)
			for b.Loop() {
				if err := model.Take(&p, 0, to, from); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
