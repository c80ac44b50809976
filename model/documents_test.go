package model_test

import (
	"math"
	"path/filepath"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/model"
)

// Documents that share a row do not see each other: the loss of a row of two documents equals the loss of
// the two documents in rows of their own.
func TestDocumentsInOneRow(t *testing.T) {
	for _, name := range []string{"llama3", "gemma2", "gpt2"} {
		f := readFixture(t, filepath.Join("testdata", name))
		f.want = nil // the rows below are their own
		const first, seq = 4, 11
		loss := func(rows int64, fill func(set func(name string, row, at int, x int))) float64 {
			g, err := f.c.Graph(model.Shape{Batch: rows, Seq: seq, Elem: dtype.F32, Documents: 8})
			if err != nil {
				t.Fatal(err)
			}
			inputs := f.load(t, g)
			inputs[model.InputShare][0].Data[0] = 1
			for i := range inputs[model.InputLabels][0].Data {
				inputs[model.InputLabels][0].Data[i] = -1
			}
			fill(func(name string, row, at, x int) {
				inputs[name][0].Data[row*seq+at] = float64(x)
			})
			out, err := eval.Run(g, inputs)
			if err != nil {
				t.Fatal(err)
			}
			return out[0][0].Data[0]
		}
		token := func(i int) int { return 3 + 5*i%17 }
		packed := loss(1, func(set func(string, int, int, int)) {
			for i := range seq {
				set(model.InputIDs, 0, i, token(i))
				set(model.InputLabels, 0, i, token(i+1))
				set(model.InputPositions, 0, i, i)
				if i >= first {
					set(model.InputPositions, 0, i, i-first)
					set(model.InputSegments, 0, i, 1)
				}
			}
		})
		apart := loss(2, func(set func(string, int, int, int)) {
			for i := range seq {
				row, at := 0, i
				if i >= first {
					row, at = 1, i-first
				}
				set(model.InputIDs, row, at, token(i))
				set(model.InputLabels, row, at, token(i+1))
			}
		})
		if math.Abs(packed-apart) > 1e-9*apart {
			t.Errorf("%s: the loss of the row is %v, of its documents %v", name, packed, apart)
		}
	}
}

// The inputs of an unrolled graph are the layers of the parameters, by name, type and order.
func TestLayersAreTheUnrolledInputs(t *testing.T) {
	for _, name := range []string{"llama3", "gemma3", "phi3", "gpt2"} {
		c := parseFile(t, filepath.Join("testdata", name, "config.json"))
		g, err := c.Graph(model.Shape{Batch: 1, Seq: 4, Elem: dtype.F32})
		if err != nil {
			t.Fatal(err)
		}
		flat, err := ir.Unroll(g)
		if err != nil {
			t.Fatal(err)
		}
		var want []model.Param
		for _, p := range c.Params() {
			want = append(want, p.Layers()...)
		}
		got := flat.Params()
		if len(got) != len(want) {
			t.Fatalf("%s: %d inputs, %d layers", name, len(got), len(want))
		}
		for i, v := range got {
			if typ := (ir.Type{Elem: dtype.F32, Dims: want[i].Dims}); v.Name != want[i].Name ||
				!v.Type.Equal(typ) {
				t.Errorf("%s: input %s %s is layer %s %s", name, v, v.Type, want[i].Name, typ)
			}
			if want[i].Stacked() || len(want[i].Tensors()) != 1 {
				t.Errorf("%s: %s is still a stack", name, want[i].Name)
			}
		}
	}
}
