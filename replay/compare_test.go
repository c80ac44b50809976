package replay

import (
	"math"
	"testing"

	"github.com/deepwell/deepwell/dtype"
)

// An infinity that both programs give does not hide what else differs.
func TestInfinityHidesNothing(t *testing.T) {
	inf := math.Inf(1)
	for _, row := range []struct {
		got, want []float64
		relative  float64
		infinite  int64
	}{
		{[]float64{inf, 6, 8}, []float64{inf, 3, 4}, 1, 1},
		{[]float64{inf, 3, 4}, []float64{inf, 3, 4}, 0, 1},
		{[]float64{-inf, 3, 4}, []float64{inf, 3, 4}, inf, 0},
		{[]float64{5, 3, 4}, []float64{inf, 3, 4}, inf, 0},
		{[]float64{inf, 3, 4}, []float64{5, 3, 4}, inf, 0},
	} {
		d := compare("x", dtype.F32, [][]byte{dtype.F32.Append(nil, row.got...)},
			[][]byte{dtype.F32.Append(nil, row.want...)})
		if d.Relative != row.relative || d.Infinite != row.infinite {
			t.Errorf("%v and %v: %+v", row.got, row.want, d)
		}
	}
}
