package quantize

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/deepwell/deepwell/dtype"
)

// BenchmarkEncode quantizes and compares a chunk, in bytes of bf16 per second on one processor.
func BenchmarkEncode(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 2))
	raw := make([]byte, 0, 2*band)
	for range band {
		raw = binary.LittleEndian.AppendUint16(raw, dtype.BF16FromF32(float32(rng.NormFloat64())))
	}
	var buf buffers
	for _, f := range []dtype.Format{dtype.MXFP8, dtype.NVFP4} {
		b.Run(string(f), func(b *testing.B) {
			q, scale := make([]byte, band*f.Codes().Bits()/8), make([]byte, band/f.Block())
			b.SetBytes(int64(len(raw)))
			for b.Loop() {
				if _, err := (coder{f, 17, 5, 0x20}).encode(q, scale, dtype.BF16, raw, &buf); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
