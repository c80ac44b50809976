package lists_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/internal/lists"
)

func TestLists(t *testing.T) {
	even := func(n int) bool { return n%2 == 0 }
	if got := lists.Map([]int{1, 2}, func(n int) string { return fmt.Sprint(n) }); !slices.Equal(got,
		[]string{"1", "2"}) || lists.Map([]int(nil), even) != nil {
		t.Errorf("Map gives %v", got)
	}
	if got := lists.Filter([]int{1, 2, 3, 4}, even); !slices.Equal(got, []int{2, 4}) ||
		lists.Filter([]int{1}, even) != nil {
		t.Errorf("Filter gives %v", got)
	}
	if got := lists.Find([]int{1, 2, 4}, even); got != 2 || lists.Find([]int{1}, even) != 0 {
		t.Errorf("Find gives %d", got)
	}
	if got := lists.Sum([]int{1, 2, 4}, func(n int) int64 { return int64(n) }); got != 7 {
		t.Errorf("Sum gives %d", got)
	}
}
