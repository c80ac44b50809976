package dtype

import (
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func TestBF16RoundsToNearestEven(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := math.Float32frombits(rapid.Uint32().Draw(t, "bits"))
		got := F32FromBF16(BF16FromF32(f))
		if f != f {
			if got == got {
				t.Fatalf("NaN became %g", got)
			}
			return
		}
		// No bfloat16 neighbour may be nearer than the one chosen.
		for _, n := range []uint16{BF16FromF32(f) - 1, BF16FromF32(f) + 1} {
			near := float64(F32FromBF16(n))
			if !math.IsInf(float64(got), 0) && !math.IsNaN(near) && !math.IsInf(near, 0) &&
				math.Abs(near-float64(f)) < math.Abs(float64(got)-float64(f)) {
				t.Fatalf("%g rounds to %g, but %g is nearer", f, got, near)
			}
		}
	})
}

// All halves widen and come back; numbers between two of them go to the nearest, ties to even.
func TestHalf(t *testing.T) {
	for h := range 1 << 16 {
		h := uint16(h)
		f := F32FromF16(h)
		if h&0x7c00 == 0x7c00 && h&0x3ff != 0 {
			if f == f || F16FromF32(f)&0x7c00 != 0x7c00 || F16FromF32(f)&0x3ff == 0 {
				t.Errorf("%04x is %v and comes back as %04x", h, f, F16FromF32(f))
			}
			continue
		}
		if back := F16FromF32(f); back != h {
			t.Fatalf("%04x is %v and comes back as %04x", h, f, back)
		}
		exp, frac := int(h>>10&0x1f), float64(h&0x3ff)
		want := math.Ldexp(1024+frac, exp-25)
		if exp == 0 {
			want = math.Ldexp(frac, -24)
		}
		if exp < 31 && math.Abs(float64(f)) != want {
			t.Fatalf("%04x is %v, not %v", h, f, want)
		}
		if h&0x7fff >= 0x7bff {
			continue
		}
		next := F32FromF16(h + 1)
		middle := (f + next) / 2
		even := h + h&1
		for _, c := range []struct {
			f    float32
			want uint16
		}{
			{middle, even}, {math.Nextafter32(middle, f), h}, {math.Nextafter32(middle, next), h + 1},
		} {
			if got := F16FromF32(c.f); got != c.want {
				t.Fatalf("%v goes to %04x, not %04x", c.f, got, c.want)
			}
		}
	}
	if F32FromF16(0x7c00) != float32(math.Inf(1)) || F32FromF16(0xfc00) != float32(math.Inf(-1)) {
		t.Error("an infinity is not infinite")
	}
	for f, want := range map[float32]uint16{65519: 0x7bff, 65520: 0x7c00, 1e30: 0x7c00, -1e30: 0xfc00, 1e-30: 0} {
		if got := F16FromF32(f); got != want {
			t.Errorf("%v goes to %04x, not %04x", f, got, want)
		}
	}
}

// What Append writes is what Values reads; types that Go cannot represent stay unwritten.
func TestNumbersComeBack(t *testing.T) {
	for _, d := range All() {
		list := []float64{0, 1, 3}
		if d.Kind() == Bool {
			list = list[:2]
		}
		if d.Kind() == Signed || d.Kind() == Float {
			list = append(list, -2)
		}
		b := d.Append(nil, list...)
		if d.Bits() < 8 || d.Kind() == Complex || d.Kind() == Scale || d.Kind() == Float && d.Bits() == 8 {
			if len(b) > 0 {
				t.Errorf("%s: %d bytes were written", d, len(b))
			}
			continue
		}
		if got := d.Values(b); !slices.Equal(got, list) || int64(len(b)) != d.Bytes(int64(len(list))) {
			t.Errorf("%s: %v came back as %v", d, list, got)
		}
	}
	if got := F8E5M2.Values([]byte{0x3c, 0xc2}); !slices.Equal(got, []float64{1, -3}) {
		t.Errorf("f8e5m2: %v", got)
	}
	for _, d := range []DType{F4E2M1FN, C64, F8E8M0FNU} {
		if v := d.Value(make([]byte, 8)); !math.IsNaN(v) {
			t.Errorf("%s: %v", d, v)
		}
	}
}
