package stat

import (
	"math"
	"testing"
)

// The points come from printed tables.
func TestStudent(t *testing.T) {
	for freedom, want := range map[int]float64{
		1: 6.3138, 2: 2.9200, 3: 2.3534, 4: 2.1318, 5: 2.0150, 9: 1.8331, 30: 1.6973, 120: 1.6577,
	} {
		if got := Student95(freedom); math.Abs(got-want) > 1e-4 { // the tables have four digits
			t.Errorf("%d degrees of freedom: %.5f, want %.4f", freedom, got, want)
		}
	}
}

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		list []float64
		want float64
	}{{nil, 0}, {[]float64{3}, 3}, {[]float64{9, 1, 2}, 2}, {[]float64{4, 1, 2, 9}, 3}} {
		if got := Median(c.list); got != c.want {
			t.Errorf("the median of %v is %v, want %v", c.list, got, c.want)
		}
	}
}
