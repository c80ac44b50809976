package ir_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/dtype/block"
	. "github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/ir"
)

// The rows of a test: two sequences of three tokens with 64 elements, two choices of three experts.
const (
	rowTokens, rowWidth = 6, 64
	rowExperts, rowRoom = 3, 3
)

// routedRows builds a loss of rows that go to experts in a format, ”” for none, and back: the sum of
// each token's result times u, where the rows are multiplied by w at the experts.
func routedRows(t *testing.T, payload string) *ir.Graph {
	t.Helper()
	b := ir.NewBuilder("rows")
	tokens := []ir.Dim{D(ir.Batch, 2), D(ir.Seq, 3)}
	embed := D(ir.EmbedDim, rowWidth)
	x := b.Input("x", ir.Param, F32(append(tokens, embed)...), "")
	w := b.Input("w", ir.Param, F32(D(ir.ExpertDim, rowExperts), D(ir.Slots, rowRoom), embed), "")
	u := b.Input("u", ir.Data, F32(append(tokens, embed)...), "")
	idx := b.Input("idx", ir.Data, S32(append(tokens, D(ir.Choice, 2))...), "")
	pos := b.ExpertPositions(idx, rowExperts, false, ir.Batch, ir.Seq, ir.Choice)
	rows := b.Dispatch(b.Scale(x, 1), idx, pos, rowExperts, rowRoom, false)
	y := b.Combine(b.Mul(rows, w), idx, pos)
	for _, v := range []*ir.Value{rows, y} {
		v.Def().Attrs = v.Def().Attrs.With(ir.Payload, payload)
	}
	g, err := b.Graph(b.Sum(b.Mul(y, u), ir.Batch, ir.Seq, ir.EmbedDim))
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// rowInputs fills them with numbers that MXFP8 does not have. Token 5 has one slot only: expert 2 is
// full.
func rowInputs() map[string][]float64 {
	r := rand.New(rand.NewPCG(3, 5))
	draw := func(n int) []float64 {
		list := make([]float64, n)
		for i := range list {
			list[i] = float64(float32(r.NormFloat64()))
		}
		return list
	}
	return map[string][]float64{"x": draw(rowTokens * rowWidth), "u": draw(rowTokens * rowWidth),
		"w": draw(rowExperts * rowRoom * rowWidth), "idx": {0, 1, 2, 0, 1, 2, 2, 0, 1, -1, 1, 2}}
}

// inMXFP8 gives what blocks of 32 make of numbers.
func inMXFP8(t *testing.T, x []float64) []float64 {
	t.Helper()
	wide := make([]float32, len(x))
	for i, v := range x {
		wide[i] = float32(v)
	}
	codes, scales := make([]byte, len(x)), make([]byte, len(x)/32)
	if err := block.MXFP8(codes, scales, wide); err != nil {
		t.Fatal(err)
	}
	if err := block.FromMXFP8(wide, codes, scales); err != nil {
		t.Fatal(err)
	}
	out := make([]float64, len(x))
	for i, v := range wide {
		out[i] = float64(v)
	}
	return out
}

// A payload rounds the rows of tokens before they are copied, and the rows of gradients on their
// way back, and nothing else: gradients pass straight through the rounding. So the graph is the one
// without payload of rounded tokens and of a rounded gradient of the result. LowerQuantized moves
// codes and scales instead, and what it gives has the same bits.
func TestPayloadRoundsRowsOnce(t *testing.T) {
	joint := func(payload string, lowered bool) *ir.Graph {
		if lowered {
			g, _ := expanded(t, routedRows(t, payload), ir.GradPlan{})
			return g
		}
		gr, err := ir.Grad(routedRows(t, payload), ir.GradPlan{})
		if err != nil {
			t.Fatal(err)
		}
		g, err := gr.Joint()
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	in := rowInputs()
	plain := evaluate(t, joint("", false), in)
	wide := rowInputs()
	wide["x"] = inMXFP8(t, in["x"])
	both := rowInputs()
	both["x"], both["u"] = wide["x"], inMXFP8(t, in["u"])
	loss := evaluate(t, joint("", false), wide)[0]
	grads := evaluate(t, joint("", false), both)[1:]
	for _, lowered := range []bool{false, true} {
		got := evaluate(t, joint("mxfp8", lowered), in)
		for i, want := range append([][]float64{loss}, grads...) {
			if !slices.Equal(got[i], want) {
				t.Errorf("lowered %v: result %d differs from the rounded one", lowered, i)
			}
			if slices.Equal(got[i], plain[i]) {
				t.Errorf("lowered %v: result %d was not rounded", lowered, i)
			}
		}
	}
}

// A dispatch moves the codes and scales of tokens, and a slot that nobody has is zero, as if rows
// were quantized at the experts.
func TestCodesOfSlotsAreCodesOfTokens(t *testing.T) {
	g := routedRows(t, "mxfp8")
	b := ir.ExtendGraph(g)
	rows := g.Ops[2].Out[0]
	codes, scales := b.Quantize(rows, ir.Quantize{Format: ir.MXFP8, Along: []string{ir.EmbedDim}})
	g, err := b.Graph(codes, scales)
	if err != nil {
		t.Fatal(err)
	}
	want := evaluate(t, g, rowInputs())
	if _, _, err := ir.LowerQuantized(g, nil, nil, ir.ReportNothing); err != nil {
		t.Fatal(err)
	}
	if n := g.Count("quantize"); n != 1 || g.Count("dispatch") != 2 || g.Count("dequantize") != 0 {
		t.Errorf("rows are quantized %d times:\n%s", n, g)
	}
	if g.Results[0].Name != codes.Name || g.Results[1].Name != scales.Name {
		t.Errorf("results are %s and %s", g.Results[0], g.Results[1])
	}
	for i, got := range evaluate(t, g, rowInputs()) {
		if !slices.Equal(got, want[i]) {
			t.Errorf("result %d differs", i)
		}
	}
}

// Rows of other blocks, formats with a tensor scale, and scales of something else are refused.
func TestPayloadsAreChecked(t *testing.T) {
	dims := []ir.Dim{D("rows", 2), D(ir.EmbedDim, 64)}
	perRow := []ir.Dim{D("rows", 2), D(ir.EmbedDim, 2)}
	typed := func(elem dtype.DType, dims []ir.Dim) ir.Type { return ir.Type{Elem: elem, Dims: dims} }
	codes, scales := typed(dtype.F8E4M3FN, dims), typed(dtype.F8E8M0FNU, perRow)
	for want, row := range map[string]struct {
		format        string
		to            dtype.DType
		codes, scales ir.Type
	}{
		"":                                  {"mxfp8", dtype.BF16, codes, scales},
		"takes 3 arguments":                 {"nvfp4", dtype.BF16, codes, scales},
		"there is no format":                {"fp9", dtype.BF16, codes, scales},
		"are not codes":                     {"mxfp8", dtype.BF16, typed(dtype.U8, dims), scales},
		"are not the scales":                {"mxfp8", dtype.BF16, codes, typed(dtype.F8E8M0FNU, dims)},
		"codes do not become \"s32\"":       {"mxfp8", dtype.S32, codes, scales},
		"u8[rows=2, embed=2] are not the s": {"mxfp8", dtype.F32, codes, typed(dtype.U8, perRow)},
	} {
		b := ir.NewBuilder("g")
		in := []*ir.Value{b.Input("c", ir.Data, row.codes, ""), b.Input("s", ir.Data, row.scales, "")}
		_, err := b.Graph(b.Dequantize(ir.Format(row.format), in[0], in[1], row.to))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%v, not %q", err, want)
		}
	}
	for payload, width := range map[string]int64{"nvfp4": 64, "mxfp8": 48, "bf16": 64} {
		b := ir.NewBuilder("g")
		idx := b.Input("idx", ir.Data, S32(D("rows", 2), D(ir.Choice, 2)), "")
		x := b.Input("x", ir.Data, F32(D("rows", 2), D(ir.EmbedDim, width)), "")
		b.Op("dispatch", map[string]any{"experts": int64(2), "capacity": int64(2), ir.Payload: payload},
			x, idx, idx)
		if b.Err() == nil {
			t.Errorf("rows of %d go to experts in %s", width, payload)
		}
	}
}

// Where a pipeline splits the backward pass, wgrad inputs that are rows of gradients are codes and
// scales, and the halves give what the whole gives.
func TestSplitRowsAreCodes(t *testing.T) {
	g := routedRows(t, "mxfp8")
	g.Find("x").Role = ir.Data
	gr, err := ir.Grad(g, ir.GradPlan{Wrt: []string{"x", "w"}})
	if err != nil {
		t.Fatal(err)
	}
	early, late, err := gr.Split()
	if err != nil {
		t.Fatal(err)
	}
	known := rowInputs()
	known["d."+g.Results[0].Name] = []float64{1}
	run := func(g *ir.Graph) {
		if _, _, err := ir.LowerQuantized(g, nil, nil, ir.ReportNothing); err != nil {
			t.Fatal(err)
		}
		for i, list := range evaluate(t, g, known) {
			known[g.Results[i].Name] = list
		}
	}
	run(gr.Forward)
	run(gr.Backward)
	want := [][]float64{known[gr.Backward.Results[0].Name], known[gr.Backward.Results[1].Name]}
	run(early)
	codes := 0
	for _, v := range late.Inputs {
		switch v.Type.Elem {
		case dtype.F8E4M3FN:
			codes++
		case dtype.F32:
			if from := early.Find(v.Name); from != nil && from.Def() != nil {
				t.Errorf("%s is a wgrad input in f32", v)
			}
		}
	}
	if codes != 1 {
		t.Errorf("%d wgrad inputs are codes:\n%s", codes, late)
	}
	run(late)
	for i, list := range [][]float64{known[early.Results[0].Name], known[late.Results[0].Name]} {
		if !slices.Equal(list, want[i]) {
			t.Errorf("gradient %d differs from the whole pass", i)
		}
	}
}
