package data_test

import (
	"slices"
	"testing"

	"github.com/deepwell/deepwell/data"
)

func TestNewBatch(t *testing.T) {
	b, err := data.NewBatch([][]int32{{1, 2, 3}, {4, 5, data.Ignored}})
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct{ got, want []int32 }{
		{b.IDs, []int32{1, 2, 4, 5}}, {b.Labels, []int32{2, 3, 5, data.Ignored}},
		{b.Positions, []int32{0, 1, 0, 1}}, {b.Segments, make([]int32, 4)},
	} {
		if !slices.Equal(row.got, row.want) {
			t.Errorf("%v, want %v", row.got, row.want)
		}
	}
	if b.Sequences != 2 || b.Seq != 2 || b.Count != 3 || b.Total != 3 {
		t.Errorf("%+v", b)
	}
	for _, bad := range [][][]int32{nil, {{1}}, {{1, 2}, {1, 2, 3}}, {{-1, 2}}} {
		if _, err := data.NewBatch(bad); err == nil {
			t.Errorf("%v is taken", bad)
		}
	}
}
