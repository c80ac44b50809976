package price

import "testing"

// Devices agree on a number in the time that a collective takes at least, and in no less if more of
// them do.
func TestAgree(t *testing.T) {
	p := New(cluster(t, "1024xb200"), find(t, "deepwell"))
	if p.Agree(Group{1, 1}) != 0 {
		t.Error("one device waits for itself")
	}
	last := 0.0
	for size := int64(2); size <= 1024; size *= 2 {
		got := p.Agree(Group{size, 1})
		if got < last*0.9 || got > p.Collective(AllReduce, 1<<20, Group{size, 1}) {
			t.Errorf("%d devices: %v s, half of them %v", size, got, last)
		}
		last = got
	}
	if last > 200e-6 {
		t.Errorf("1,024 devices take %v s", last)
	}
}
