package price

import (
	"math"
	"testing"
)

// Quantization moves the bytes that compiled programs were seen to move, at the card's bandwidth.
func TestBlocks(t *testing.T) {
	p := New(cluster(t, "8xb200"), find(t, "deepwell"))
	const n = 1 << 26
	for _, row := range []struct {
		precision   Precision
		wide, sides float64
		bytes       float64 // of an element
	}{
		{MXFP8, 2, 2, 1.54 * (2 + 2*33.0/32)},
		{MXFP8, 2, 1, 1.54 * (2 + 33.0/32)},
		{MXFP8, 4, 2, 1.54 * (4 + 2*33.0/32)},
		{NVFP4, 2, 2, 1.47 * (2*2 + 2*9.0/16)},
		{NVFP4, 2, 0, 0}, {BF16, 2, 2, 0}, {F32, 4, 2, 0},
	} {
		want := row.bytes * n / p.reached
		if got := p.Blocks(row.precision, n, row.wide, row.sides); math.Abs(got-want) > 1e-12 {
			t.Errorf("%+v: %v s, not %v", row, got, want)
		}
	}
}

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
