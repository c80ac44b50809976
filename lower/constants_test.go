package lower_test

import (
	"math"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/lower"
)

// Constants are spelled as MLIR reads them; NaN and +infinity, which it has no digits for, fail.
func TestConstants(t *testing.T) {
	for _, row := range []struct {
		elem  dtype.DType
		value float64
		want  string // or the error, if it does not begin a constant
	}{
		{dtype.F32, 1, "dense<1.00000000000000000e+00>"},
		{dtype.F32, math.Inf(-1), "dense<0xFF800000>"},
		{dtype.BF16, math.Inf(-1), "dense<0xFF80>"},
		{dtype.F64, -1e305, "dense<-9.99999999999999939e+304>"},
		{dtype.S32, -7, "dense<-7>"},
		{dtype.S32, math.Inf(-1), "dense<-2147483648>"},
		{dtype.U8, math.Inf(-1), "dense<0>"},
		{dtype.F32, math.Inf(1), "+Inf is not a constant"},
		{dtype.F32, math.NaN(), "NaN is not a constant"},
	} {
		b := ir.NewBuilder("constants")
		typ := ir.Type{Elem: row.elem, Dims: []ir.Dim{{Name: "rows", Size: 2}}}
		g, err := b.Graph(b.Fill(typ, row.value))
		if err != nil {
			t.Fatal(err)
		}
		text, err := lower.StableHLO(g, lower.Options{})
		if err != nil {
			text = err.Error()
		}
		if strings.HasPrefix(row.want, "dense") != (err == nil) || !strings.Contains(text, row.want) {
			t.Errorf("%v as %s: want %q in\n%s", row.value, row.elem, row.want, text)
		}
	}
}
