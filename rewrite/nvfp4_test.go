package rewrite

import (
	"slices"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels/fused"
)

// What NVFP4 reads of one source is one search for largest magnitudes and one quantization, with
// gradients by random bits, and the interpreter sees the same bits.
func TestFourIsQuantizedOnce(t *testing.T) {
	for _, c := range blocks() {
		g := c.graph(t, ir.NVFP4)
		want := run(t, g)
		for _, pass := range []func(*ir.Graph) error{groupQuantizations, quantizeOnce(nil)} {
			if err := pass(g); err != nil {
				t.Fatal(err)
			}
		}
		sources := map[*ir.Value][2]int{}
		for _, op := range g.Ops {
			n := sources[first(op)]
			switch op.Kind {
			case AmaxOnce:
				n[0]++
			case QuantizeOnce:
				n[1]++
				if f, err := NVFP4Of(op); err != nil || !f.Along || !f.Across {
					t.Errorf("%s: %+v, %v", c.name, f, err)
				}
			case "amax", "quantize":
				t.Errorf("%s: %s is left", c.name, op.Kind)
			default:
				continue
			}
			sources[first(op)] = n
		}
		for v, n := range sources {
			if n != [2]int{1, 1} {
				t.Errorf("%s: %s has %v searches and quantizations", c.name, v, n)
			}
		}
		for i, list := range run(t, g) {
			if !slices.Equal(list[0].Data, want[i][0].Data) {
				t.Errorf("%s: result %s differs", c.name, g.Results[i])
			}
		}
	}
}

// Forms that the kernels lack stay as they are; stacks have a magnitude for each layer.
func TestFormsOfFour(t *testing.T) {
	d := irtest.D
	for _, c := range []struct {
		name string
		dims []ir.Dim
		how  ir.Quantize
		want *fused.NVFP4Form // nil if there is no kernel
	}{
		{"rows", []ir.Dim{d("rows", 48), d("embed", 32)}, ir.Quantize{Along: []string{"embed"}},
			&fused.NVFP4Form{Form: fused.Form{Along: true}}},
		{"transformed rows", []ir.Dim{d("rows", 48), d("embed", 32)},
			ir.Quantize{Along: []string{"embed"}, Hadamard: true}, nil},
		{"columns", []ir.Dim{d("rows", 48), d("embed", 32)},
			ir.Quantize{Along: []string{"rows"}, Hadamard: true},
			&fused.NVFP4Form{Form: fused.Form{Across: true}}},
		{"plain columns", []ir.Dim{d("rows", 48), d("embed", 32)}, ir.Quantize{Along: []string{"rows"}}, nil},
		{"layers", []ir.Dim{d(ir.Layer, 3), d("mlp", 48), d("embed", 32)},
			ir.Quantize{Along: []string{"embed"}, Tile: true},
			&fused.NVFP4Form{Form: fused.Form{Along: true}, Tile: true, Layers: 3}},
		{"columns of layers", []ir.Dim{d(ir.Layer, 3), d("mlp", 48), d("embed", 32)},
			ir.Quantize{Along: []string{"mlp"}, Tile: true},
			&fused.NVFP4Form{Form: fused.Form{Across: true}, Tile: true, Layers: 3}},
		{"experts inside tiles", []ir.Dim{d("mlp", 48), d(ir.ExpertDim, 2), d("embed", 32)},
			ir.Quantize{Along: []string{"embed"}, Tile: true}, nil},
	} {
		b := ir.NewBuilder("form")
		c.how.Format = ir.NVFP4
		x := b.Input("x", ir.Data, ir.Type{Elem: dtype.BF16, Dims: c.dims}, "")
		g, err := b.Graph(b.QuantizeAll(x, c.how)...)
		if err != nil {
			t.Fatal(err)
		}
		if err := quantizeOnce(nil)(g); err != nil {
			t.Fatal(err)
		}
		at := slices.IndexFunc(g.Ops, func(op *ir.Op) bool { return op.Kind == QuantizeOnce })
		if at < 0 || c.want == nil {
			if at >= 0 || c.want != nil {
				t.Errorf("%s:\n%s", c.name, g)
			}
			continue
		}
		f, err := NVFP4Of(g.Ops[at])
		if err != nil || f.Along != c.want.Along || f.Across != c.want.Across ||
			f.Tile != c.want.Tile || f.Layers != c.want.Layers {
			t.Errorf("%s: %+v, %v", c.name, f, err)
		}
		if m, err := MatricesOf(g.Ops[at]); err != nil || m.Batch != max(int64(f.Layers), 1) ||
			m.Rows != 48 || m.Cols != 32 {
			t.Errorf("%s: %+v, %v", c.name, m, err)
		}
	}
}

// first is what an operation reads first, or nil.
func first(op *ir.Op) *ir.Value {
	if len(op.In) == 0 {
		return nil
	}
	return op.In[0]
}
