package ir_test

import (
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/dtype/block"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
)

// exactly bounds what two orders of summation in float64 differ by, relative to the largest.
const exactly = 1e-12

// narrowly marks every linear of a graph, numbered in the order in which they stand.
func narrowly(g *ir.Graph, f ir.Format) {
	slot := int64(0)
	for _, op := range allOps(g) {
		if op.Kind != "linear" {
			continue
		}
		for _, product := range []string{"fprop", "dgrad", "wgrad"} {
			op.Attrs = op.Attrs.With(product, string(f))
		}
		op.Attrs = op.Attrs.With("slot", slot)
		slot++
	}
}

// expanded takes the gradient of a loss and lowers its quantized GEMMs.
func expanded(t *testing.T, g *ir.Graph, o ir.GradPlan) (*ir.Graph, []ir.QuantizedParam) {
	t.Helper()
	gr, err := ir.Grad(g, o)
	if err != nil {
		t.Fatal(err)
	}
	joint, err := gr.Joint()
	if err != nil {
		t.Fatal(err)
	}
	copies, _, err := ir.LowerQuantized(joint, func(param string) string { return "c." + param }, nil,
		ir.ReportNothing)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := ir.Parse(joint.String()); err != nil || again.String() != joint.String() {
		t.Errorf("the text does not come back: %v\n%s", err, joint)
	}
	return joint, copies
}

// copied makes the copies of weights, as an update does.
func copied(t *testing.T, copies []ir.QuantizedParam, inputs map[string][]*eval.Array) {
	t.Helper()
	for _, c := range copies {
		b := ir.NewBuilder("copies")
		w := b.Input(c.Param, ir.Param, inputs[c.Param][0].Type, "")
		g, err := b.Graph(b.QuantizeAll(w, c.Quantize)...)
		if err != nil {
			t.Fatal(err)
		}
		out, err := eval.Run(g, inputs)
		if err != nil {
			t.Fatal(err)
		}
		for i, name := range c.Names {
			inputs[name] = out[i]
		}
	}
}

// A hand quantizes and multiplies without a graph.
type hand struct {
	t      *testing.T
	format ir.Format
}

// A handful is a matrix quantized along its rows, all to be multiplied by scale.
type handful struct {
	x     []float32
	cols  int
	scale float64
}

func (h *hand) must(err error) {
	h.t.Helper()
	if err != nil {
		h.t.Fatal(err)
	}
}

// quantized rounds the rows of a matrix. draw gives the random bits of four elements by the place of
// the first in the matrix; nil rounds to the nearest.
func (h *hand) quantized(x []float32, cols int, tile bool, draw func(row, col int) uint32) handful {
	out, scales := make([]float32, len(x)), make([]byte, len(x)/int(h.format.Block()))
	if h.format == ir.MXFP8 {
		q := make([]byte, len(x))
		h.must(block.MXFP8(q, scales, x))
		h.must(block.FromMXFP8(out, q, scales))
		return handful{out, cols, 1}
	}
	q, amax := make([]byte, len(x)/2), block.Amax(x)
	if tile {
		h.must(block.NVFP4Tiles(q, scales, x, len(x)/cols, cols, amax))
	} else {
		h.must(block.NVFP4(q, scales, x, amax))
	}
	h.must(block.FromNVFP4(out, q, scales, 1))
	_, back := block.Global(amax)
	if draw != nil {
		for i, v := range x {
			scale := dtype.F32FromE4M3(scales[i/16])
			v *= min(1/(scale*back), math.MaxFloat32)
			bits := draw(i/cols, i%cols/4*4) >> []uint32{0, 16, 8, 24}[i%4] & 0xff
			out[i] = chance(v, float64(bits)/256) * scale
		}
	}
	return handful{out, cols, float64(back)}
}

// chance takes the number of E2M1 above or below.
func chance(v float32, u float64) float32 {
	grid := []float32{0, 0.5, 1, 1.5, 2, 3, 4, 6}
	a := min(float32(math.Abs(float64(v))), 6)
	i, _ := slices.BinarySearch(grid, a)
	if grid[i] != a {
		if i--; float64((a-grid[i])/(grid[i+1]-grid[i]))+u >= 1 {
			i++
		}
	}
	return float32(math.Copysign(float64(grid[i]), float64(v)))
}

// drawn gives the random bits of elements: by token and feature, whichever are the rows.
func drawn(tensor uint32, first int, transposed bool) func(row, col int) uint32 {
	mix := func(h uint32) uint32 {
		h = (h ^ h>>16) * 0x85ebca6b
		h = (h ^ h>>13) * 0xc2b2ae35
		return h ^ h>>16
	}
	key := block.NewKey(noiseSeed, noiseStep, tensor)
	return func(row, col int) uint32 {
		if transposed {
			row, col = col, row
		}
		return mix(mix(uint32(first+row)^key.A) ^ uint32(col) ^ key.B)
	}
}

// transposed is the transpose, spread by Hadamard's matrix where the format wants it.
func (h *hand) transposed(x []float32, rows, cols int) []float32 {
	out := make([]float32, len(x))
	h.must(block.Transpose(out, x, rows, cols))
	if h.format == ir.MXFP8 {
		return out
	}
	bits := make([]uint16, len(out))
	for i, v := range out {
		bits[i] = dtype.BF16FromF32(v)
	}
	h.must(block.Hadamard(bits, bits))
	for i, b := range bits {
		out[i] = dtype.F32FromBF16(b)
	}
	return out
}

// times multiplies rows with rows.
func (a handful) times(b handful) []float64 {
	var out []float64
	for i := 0; i < len(a.x); i += a.cols {
		for k := 0; k < len(b.x); k += b.cols {
			sum := 0.0
			for n := range a.cols {
				sum += float64(a.x[i+n]) * float64(b.x[k+n])
			}
			out = append(out, sum*a.scale*b.scale)
		}
	}
	return out
}

const noiseSeed, noiseStep, firstRow = 11, 5, 640

// alike holds numbers to those that should be there.
func alike(t *testing.T, what string, got, want []float64) {
	t.Helper()
	most := 0.0
	for _, x := range want {
		most = math.Max(most, math.Abs(x))
	}
	for i, x := range want {
		if !(math.Abs(got[i]-x) <= exactly*most) || len(got) != len(want) {
			t.Fatalf("%s[%d] of %d is %v, want %v", what, i, len(got), got[i], x)
		}
	}
}

// The three GEMMs of a linear layer equal GEMMs of operands that package block quantized: each
// along the summed dimension, from its unrounded source, in either orientation.
func TestLoweredGEMMsByHand(t *testing.T) {
	const batch, seq, in, out, tokens = 2, 32, 64, 32, 64
	for _, f := range []ir.Format{ir.MXFP8, ir.NVFP4} {
		t.Run(string(f), func(t *testing.T) {
			f32 := func(dims ...ir.Dim) ir.Type { return ir.Type{Elem: dtype.F32, Dims: dims} }
			b := ir.NewBuilder("one")
			x := b.Input("x", ir.Data, f32(ir.Dim{Name: "batch", Size: batch}, ir.Dim{Name: ir.Seq, Size: seq},
				ir.Dim{Name: "embed", Size: in}), "")
			w := b.Input("w", ir.Param, f32(ir.Dim{Name: "embed", Size: in}, ir.Dim{Name: "mlp", Size: out}), "")
			y := b.Linear(x, w)
			c := b.Input("c", ir.Data, y.Type, "")
			loss := b.Sum(b.Mul(y, c), "batch", ir.Seq, "mlp")
			g, err := b.Graph(loss)
			if err != nil {
				t.Fatal(err)
			}
			narrowly(g, f)
			g.Ops[0].Attrs = g.Ops[0].Attrs.With("slot", int64(3)).With("layer", int64(2))
			joint, copies := expanded(t, g, ir.GradPlan{Wrt: []string{"x", "w"}})
			inputs := map[string][]*eval.Array{}
			r := rand.New(rand.NewPCG(1, 2))
			numbers := map[string][]float32{}
			for _, v := range []*ir.Value{x, w, c} {
				a := eval.New(v.Type)
				for i := range a.Data {
					one := float32(r.NormFloat64() * math.Exp2(float64(r.IntN(6)-3)))
					a.Data[i], numbers[v.Name] = float64(one), append(numbers[v.Name], one)
				}
				inputs[v.Name] = []*eval.Array{a}
			}
			inputs[ir.InputNoise] = []*eval.Array{{Data: []float64{noiseSeed, noiseStep}}}
			rows := eval.New(ir.Type{Dims: x.Type.Dims[:2]})
			for i := range rows.Data {
				rows.Data[i] = float64(firstRow + i)
			}
			inputs[ir.InputRows] = []*eval.Array{rows}
			copied(t, copies, inputs)
			got, err := eval.Run(joint, inputs)
			if err != nil {
				t.Fatalf("%v\n%s", err, joint)
			}
			h := &hand{t, f}
			xs, ws, dy := numbers["x"], numbers["w"], numbers["c"]
			wt := make([]float32, len(ws))
			h.must(block.Transpose(wt, ws, in, out))
			layer := uint32(2 * 64) // of which each has room for 64 tensors
			product := h.quantized(xs, in, false, nil).times(h.quantized(wt, in, true, nil))
			sum := 0.0
			for i, v := range product {
				sum += v * float64(dy[i])
			}
			alike(t, "loss", got[0][0].Data, []float64{sum})
			alike(t, "dx", got[1][0].Data, h.quantized(dy, out, false, drawn(layer+6, firstRow, false)).
				times(h.quantized(ws, out, true, nil)))
			alike(t, "dw", got[2][0].Data, h.quantized(h.transposed(xs, tokens, in), tokens, false, nil).
				times(h.quantized(h.transposed(dy, tokens, out), tokens, false, drawn(layer+7, firstRow, true))))
		})
	}
}

// blocky is a model of layers with two products each, small enough for the interpreter and large
// enough for blocks.
func blocky(t *testing.T, layers int64) *ir.Graph {
	t.Helper()
	f32 := func(dims ...ir.Dim) ir.Type { return ir.Type{Elem: dtype.F32, Dims: dims} }
	embed, mlp := ir.Dim{Name: "embed", Size: 32}, ir.Dim{Name: "mlp", Size: 64}
	flow := f32(ir.Dim{Name: "batch", Size: 2}, ir.Dim{Name: ir.Seq, Size: 32}, embed)
	body := ir.NewBuilder("block")
	x := body.Input("x", ir.Data, flow, "")
	up := body.Input("up", ir.Param, f32(embed, mlp), "")
	down := body.Input("down", ir.Param, f32(mlp, embed), "")
	var y *ir.Value
	body.Tagged(ir.MLP, func() {
		h := body.Linear(x, up)
		y = body.Add(x, body.Linear(body.Mul(h, body.Sigmoid(h)), down))
	})
	inner, err := body.Graph(y)
	if err != nil {
		t.Fatal(err)
	}
	b := ir.NewBuilder("blocky")
	layer := ir.Dim{Name: ir.Layer, Size: layers}
	in := []*ir.Value{b.Input("x", ir.Data, flow, "")}
	stacks := []*ir.Value{b.Input("up", ir.Param, f32(layer, embed, mlp), ""),
		b.Input("down", ir.Param, f32(layer, mlp, embed), "")}
	z := b.Repeat(layers, inner, in, stacks, nil)[0]
	g, err := b.Graph(b.Sum(b.Mul(z, z), "batch", ir.Seq, "embed"))
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// bigFill gives a graph of blocky numbers; unrolled layers get the slices of the stacks.
func bigFill(g *ir.Graph, layers int) map[string][]*eval.Array {
	inputs := map[string][]*eval.Array{}
	r := rand.New(rand.NewPCG(3, 4))
	for _, v := range g.Inputs {
		a := eval.New(v.Type)
		for i := range a.Data {
			a.Data[i] = float64(float32(0.3 * r.NormFloat64()))
		}
		inputs[v.Name] = []*eval.Array{a}
		for k := range layers {
			if v.Type.Dims[0].Name == ir.Layer {
				one := eval.New(ir.Type{Elem: v.Type.Elem, Dims: v.Type.Dims[1:]})
				copy(one.Data, a.Data[k*len(one.Data):])
				inputs[ir.LayerName(v.Name, k)] = []*eval.Array{one}
			}
		}
	}
	inputs[ir.InputNoise] = []*eval.Array{{Data: []float64{noiseSeed, noiseStep}}}
	rows := eval.New(ir.Type{Dims: g.Inputs[0].Type.Dims[:2]})
	for i := range rows.Data {
		rows.Data[i] = float64(i)
	}
	inputs[ir.InputRows] = []*eval.Array{rows}
	return inputs
}

// A loop, the same loop split in two, one that recomputes its layers in the backward pass, and
// its layers one by one round alike: losses and gradients are the same to the last bit.
func TestLoweredLoopsRoundAlike(t *testing.T) {
	const layers = 3
	for _, f := range []ir.Format{ir.MXFP8, ir.NVFP4} {
		g := blocky(t, layers)
		inputs := bigFill(g, layers)
		narrowly(g, f)
		run := func(g *ir.Graph, o ir.GradPlan) (loss float64, grads map[string][]float64) {
			in, wrt := maps.Clone(inputs), g.Params()
			for _, v := range wrt {
				in[v.Name] = layersOf(inputs, v)
			}
			joint, copies := expanded(t, g, o)
			copied(t, copies, in)
			out, err := eval.Run(joint, in)
			if err != nil {
				t.Fatalf("%v\n%s", err, joint)
			}
			grads = map[string][]float64{}
			for i, v := range wrt {
				stem, _, _ := strings.Cut(v.Name, ".")
				grads[stem] = append(grads[stem], out[1+i][0].Data...)
			}
			return out[0][0].Data[0], grads
		}
		wantLoss, want := run(g.Clone(), ir.GradPlan{})
		flat, err := ir.Unroll(g)
		if err != nil {
			t.Fatal(err)
		}
		for i, op := range slices.DeleteFunc(allOps(flat), func(op *ir.Op) bool { return op.Kind != "linear" }) {
			op.Attrs = op.Attrs.With("layer", int64(i/2))
		}
		halves, err := ir.Segment(g, []int64{1})
		if err != nil {
			t.Fatal(err)
		}
		for _, other := range []struct {
			name string
			g    *ir.Graph
			o    ir.GradPlan
		}{
			{"unrolled", flat, ir.GradPlan{}}, {"split", halves, ir.GradPlan{}},
			{"recomputed", g.Clone(), ir.GradPlan{Recompute: []ir.Tag{ir.MLP}}},
			{"offloaded", g.Clone(), ir.GradPlan{Offload: true}},
		} {
			loss, grads := run(other.g, other.o)
			if loss != wantLoss {
				t.Errorf("%s, %s: the loss is %v, want %v", f, other.name, loss, wantLoss)
			}
			for name, list := range want {
				if !slices.Equal(grads[name], list) {
					t.Errorf("%s, %s: the gradient of %s differs", f, other.name, name)
				}
			}
		}
	}
}

// layersOf gives a parameter of a graph that was unrolled or split.
func layersOf(inputs map[string][]*eval.Array, v *ir.Value) []*eval.Array {
	if v.Type.Dims[0].Name != ir.Layer {
		return inputs[v.Name]
	}
	stem, number, _ := strings.Cut(v.Name, ".from")
	from, _ := strconv.Atoi(number) // the first has none
	n := int(v.Type.Shape().Elements() / v.Type.Dims[0].Size)
	return []*eval.Array{{Type: v.Type, Data: inputs[stem][0].Data[from*n:][:n*int(v.Type.Dims[0].Size)]}}
}

// The copy of a weight that a GEMM contracts along the dimension that devices shard is sharded by
// its first dimension, in whole parts; in the other orientation it stays as it is.
func TestCopiesAreGatheredInOrder(t *testing.T) {
	for _, c := range []struct {
		format ir.Format
		mlp    int64
		want   string // the dimension that the forward GEMM's codes are gathered along
	}{{ir.MXFP8, 96, "mlp"}, {ir.MXFP8, 33, "embed"}, {ir.NVFP4, 96, "embed"}} {
		b := ir.NewBuilder("order", ir.Axis{Name: "fsdp", Size: 2})
		d := func(name string, n int64) ir.Dim { return ir.Dim{Name: name, Size: n} }
		x := b.Input("x", ir.Data, ir.Type{Elem: dtype.BF16, Dims: []ir.Dim{d("seq", 32), d("embed", 64)},
			Place: ir.Placement{}.With("fsdp", "seq")}, "")
		w := b.Input("w", ir.Param, ir.Type{Elem: dtype.BF16, Dims: []ir.Dim{d("embed", 32), d("mlp", c.mlp)},
			Place: ir.Placement{}.With("fsdp", "embed")}, "")
		var y *ir.Value
		b.Tagged(ir.Gather, func() { y = b.AllGather(w, "fsdp", "embed") })
		g, err := b.Graph(b.Linear(x, y))
		if err != nil {
			t.Fatal(err)
		}
		for _, op := range g.Ops {
			if op.Kind == "linear" {
				op.Attrs = op.Attrs.With("fprop", string(c.format))
			}
		}
		copies, _, err := ir.LowerQuantized(g, func(p string) string { return p }, nil, ir.ReportNothing)
		if err != nil {
			t.Fatal(err)
		}
		for _, op := range g.Ops {
			if op.Kind == "all_gather" && op.Attrs.Text("dim") != c.want {
				t.Errorf("%s, %d: gathered along %s", c.format, c.mlp, op.Attrs.Text("dim"))
			}
		}
		want := ir.Reshard{}
		if c.want == "mlp" {
			want = ir.Reshard{Axis: "fsdp", From: "embed", To: "mlp"}
		}
		if len(copies) != 1 || copies[0].Moved != want {
			t.Errorf("%s, %d: %+v", c.format, c.mlp, copies)
		}
	}
}
