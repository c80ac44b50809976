package block

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/slowtest"
)

// kinds of random numbers: what training has, what only bits can be, and what lies near the edges.
var kinds = map[string]func(*rand.Rand) float32{
	"normal": func(r *rand.Rand) float32 { return float32(r.NormFloat64()) },
	"bits":   func(r *rand.Rand) float32 { return math.Float32frombits(r.Uint32()) },
	"wide": func(r *rand.Rand) float32 {
		return float32(r.NormFloat64() * math.Exp2(float64(r.IntN(60)-30)))
	},
	"small": func(r *rand.Rand) float32 { return math.Float32frombits(r.Uint32() & 0x87ffffff) },
	"zeros": func(r *rand.Rand) float32 {
		return math.Float32frombits(r.Uint32() & 0x80000000)
	},
	// Few fraction bits make ties, and a greatest magnitude of exactly 1.75.
	"ties": func(r *rand.Rand) float32 {
		return math.Float32frombits(r.Uint32()&0x83f80000 | 0x3c000000)
	},
}

// Every level gives the bytes of Go, whatever the numbers.
func TestKernelsAgree(t *testing.T) {
	n := 20_000
	if testing.Short() {
		n = 2_000
	}
	compareKernels(t, n)
}

func TestKernelsAgreeOnTenMillionBlocks(t *testing.T) {
	slowtest.Only(t)
	compareKernels(t, 10_000_000/len(kinds)+1)
}

func compareKernels(t *testing.T, blocks int) {
	const part = 512 // blocks of 32 at once
	for name, kind := range kinds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(1, 2))
			wide := make([]float32, part*32)
			half := make([]uint16, len(wide))
			for done := 0; done < blocks; done += part {
				for i := range wide {
					wide[i] = kind(r)
					half[i] = uint16(math.Float32bits(wide[i]) >> 16)
				}
				compare(t, wide)
				compare(t, half)
				if t.Failed() {
					return
				}
			}
		})
	}
}

// compare runs every kernel of this processor on the numbers, of which there are whole blocks.
func compare[T Number](t testing.TB, src []T) {
	n := len(src)
	most := amax(plain, src)
	want8, want4 := make([]byte, n+n/32), make([]byte, n/2+n/16)
	mxfp8(plain, want8[:n], want8[n:], src)
	nvfp4(plain, want4[:n/2], want4[n/2:], src, newGrid(most))
	got8, got4 := make([]byte, n+n/32), make([]byte, n/2+n/16)
	for on := avx2; on <= best; on++ {
		if got := amax(on, src); math.Float32bits(got) != math.Float32bits(most) {
			t.Errorf("level %d: amax is %v, not %v", on, got, most)
		}
		mxfp8(on, got8[:n], got8[n:], src)
		differ(t, fmt.Sprintf("MXFP8 of %T at level %d", src, on), got8, want8)
		nvfp4(on, got4[:n/2], got4[n/2:], src, newGrid(most))
		differ(t, fmt.Sprintf("NVFP4 of %T at level %d", src, on), got4, want4)
	}
}

func differ(t testing.TB, what string, got, want []byte) {
	if bytes.Equal(got, want) {
		return
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("%s: byte %d of %d is %#x, not %#x", what, i, len(want), got[i], want[i])
			return
		}
	}
}

func FuzzKernels(f *testing.F) {
	f.Add([]byte{0, 0, 0xe0, 0x3f}, uint32(3))
	f.Add([]byte{0, 0, 0x80, 0x7f, 1, 0, 0x80, 0x7f, 0xff, 0xff, 0x7f, 0x7f}, uint32(9))
	f.Fuzz(func(t *testing.T, data []byte, seed uint32) {
		r := rand.New(rand.NewPCG(uint64(seed), 0))
		src := make([]float32, (len(data)/4+31)/32*32)
		half := make([]uint16, len(src))
		for i := range src {
			src[i] = float32(r.NormFloat64())
			if len(data) >= 4*i+4 {
				src[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
			}
			half[i] = dtype.BF16FromF32(src[i])
		}
		compare(t, src)
		compare(t, half)
	})
}

func benchmark[T Number](b *testing.B, src []T, width int) {
	n := len(src)
	q, scales := make([]byte, n), make([]byte, n/16)
	for on := plain; on <= best; on++ {
		b.Run(fmt.Sprintf("mxfp8/%d", on), func(b *testing.B) {
			b.SetBytes(int64(n*width + n + n/32))
			for b.Loop() {
				mxfp8(on, q, scales[:n/32], src)
			}
		})
		b.Run(fmt.Sprintf("nvfp4/%d", on), func(b *testing.B) {
			b.SetBytes(int64(n*width + n/2 + n/16))
			g := newGrid(4)
			for b.Loop() {
				nvfp4(on, q[:n/2], scales, src, g)
			}
		})
		b.Run(fmt.Sprintf("amax/%d", on), func(b *testing.B) {
			b.SetBytes(int64(n * width))
			for b.Loop() {
				amax(on, src)
			}
		})
	}
}

func BenchmarkF32(b *testing.B)  { benchmark(b, random(1<<16), 4) }
func BenchmarkBF16(b *testing.B) { benchmark(b, halves(random(1<<16)), 2) }

func random(n int) []float32 {
	r := rand.New(rand.NewPCG(3, 4))
	list := make([]float32, n)
	for i := range list {
		list[i] = float32(r.NormFloat64())
	}
	return list
}

func halves(list []float32) []uint16 {
	out := make([]uint16, len(list))
	for i, f := range list {
		out[i] = dtype.BF16FromF32(f)
	}
	return out
}
