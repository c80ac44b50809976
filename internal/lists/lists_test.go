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
	if got := lists.Pick([]int{1, 2, 4}, func(n int) (int, bool) { return -n, even(n) }); !slices.Equal(
		got, []int{-2, -4}) {
		t.Errorf("Pick gives %v", got)
	}
	if got := lists.Set([]int{1, 2, 1}); len(got) != 2 || !got[1] || !got[2] {
		t.Errorf("Set gives %v", got)
	}
	if got := lists.Find([]int{1, 2, 4}, even); got != 2 || lists.Find([]int{1}, even) != 0 {
		t.Errorf("Find gives %d", got)
	}
	same := func(n int) int { return n }
	if p, at, most := lists.Product([]int{2, 3}, same), lists.Most([]int{1, 5, 2, 5}, same),
		lists.Max([]int{1, 5, 2}, 3, same); p != 6 || at != 1 || most != 5 {
		t.Errorf("Product, Most and Max give %d, %d and %d", p, at, most)
	}
	calls := 0
	if at := lists.Most([]int{-2, -1}, func(n int) int { calls++; return n }); at != 1 || calls != 2 ||
		lists.Most(nil, same) != 0 {
		t.Errorf("Most gives %d after %d calls", at, calls)
	}
	if got := lists.Sum([]int{1, 2, 4}, func(n int) int64 { return int64(n) }); got != 7 {
		t.Errorf("Sum gives %d", got)
	}
}

func TestResize(t *testing.T) {
	buf := make([]byte, 3, 8)
	if got := lists.Resize(buf, 5); len(got) != 5 || &got[0] != &buf[0] {
		t.Error("Resize does not reuse its buffer")
	}
	if got := lists.Resize(buf, 9001); len(got) != 9001 || cap(got) != 9001 {
		t.Errorf("Resize allocates %d elements for 9001", cap(got))
	}
}

// Equal elements keep their order.
func TestSort(t *testing.T) {
	list := []string{"b1", "a1", "b2", "a2"}
	lists.Sort(list, func(a, b string) int { return int(a[0]) - int(b[0]) })
	if want := []string{"a1", "a2", "b1", "b2"}; !slices.Equal(list, want) {
		t.Errorf("%v", list)
	}
}
