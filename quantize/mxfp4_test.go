package quantize

import (
	"bytes"
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/dtype/block"
)

// Elements of MXFP4 are the same numbers in NVFP4 while scales are at most 17 powers of two apart.
func TestMXFP4ToNVFP4(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		n := rapid.IntRange(1, 6).Draw(r, "blocks")
		low := rapid.IntRange(0, 254-17).Draw(r, "low")
		q := rapid.SliceOfN(rapid.Byte(), 16*n, 16*n).Draw(r, "q")
		scales := make([]byte, n)
		for j := range scales {
			scales[j] = byte(low + rapid.IntRange(0, 17).Draw(r, "scale"))
		}
		most := largestExponent(q, scales)
		kept, dst := bytes.Clone(q), make([]byte, 2*n)
		if _, err := rescale(q, dst, scales, most); err != nil {
			r.Fatal(err)
		}
		if !bytes.Equal(q, kept) {
			r.Fatal("elements changed")
		}
		got := make([]float32, 32*n)
		if err := block.FromNVFP4(got, q, dst, float32(math.Ldexp(1, most-127-8))); err != nil {
			r.Fatal(err)
		}
		for i, f := range got {
			elem := float64(dtype.F32FromE2M1(q[i/2] >> (i % 2 * 4)))
			// float32 ends below 2¹²⁸; MXFP4 reaches further, with its largest scales.
			want := float32(math.Ldexp(elem, int(scales[i/32])-127))
			if f != want {
				r.Fatalf("element %d of %v: %v, not %v", i, scales, f, want)
			}
		}
	})
	q := make([]byte, 32)
	q[0], q[16] = 1, 0x88 // zeros, of which the scale does not matter
	if most := largestExponent(q, []byte{100, 0xff}); most != 100 {
		t.Errorf("a block of zeros counts: %d", most)
	}
	if _, err := rescale(q, make([]byte, 4), []byte{100, 0xff}, 100); err != nil {
		t.Errorf("a block of zeros: %v", err)
	}
	if most := largestExponent(make([]byte, 32), []byte{1, 200}); most != 127 {
		t.Errorf("zeros alone: %d", most)
	}
}
