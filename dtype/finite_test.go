package dtype

import (
	"math"
	"math/rand/v2"
	"testing"
)

// NotFinite counts what a look at every element counts, at every length and place.
func TestNotFinite(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, d := range []DType{F64, F32, BF16, F16} {
		size := d.Bits() / 8
		for range 2000 {
			n := r.IntN(100)
			src := make([]byte, n*size)
			for i := range src {
				src[i] = byte(r.Uint32())
			}
			for range r.IntN(3) { // all bits of an exponent, and more, are rare by chance
				if n > 0 {
					at := r.IntN(n) * size
					for i := range size {
						src[at+i] = 0xff
					}
				}
			}
			want := int64(0)
			for i := range n {
				if v := d.Value(src[i*size:][:size]); math.IsNaN(v) || math.IsInf(v, 0) {
					want++
				}
			}
			if got := d.NotFinite(src); got != want {
				t.Fatalf("%s: %d of %d elements are not finite, not %d", d, got, n, want)
			}
		}
	}
	if n := U8.NotFinite([]byte{0xff, 0xff}); n != 0 {
		t.Errorf("%d bytes are not finite", n)
	}
}

func BenchmarkNotFinite(b *testing.B) {
	for _, d := range []DType{BF16, F32} {
		src := make([]byte, 256<<20) // larger than caches: what counts is memory
		b.Run(d.String(), func(b *testing.B) {
			b.SetBytes(int64(len(src)))
			for b.Loop() {
				if d.NotFinite(src) != 0 {
					b.Fatal("zero is not finite")
				}
			}
		})
	}
}
