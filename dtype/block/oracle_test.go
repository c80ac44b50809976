package block

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"testing"

	"github.com/deepwell/deepwell/dtype"
)

// What torchao, JAX and numpy gave: see testdata/make.py.
type fixture struct {
	Shown struct {
		Source, MXFP8, NVFP4 string
		Scales8              string `json:"mxfp8_scales"`
		Scales4              string `json:"nvfp4_scales"`
	}
	Cases []struct {
		Seed                                              uint32
		Rows, Cols, Spread                                int
		BF16                                              bool
		Source, MXFP8, NVFP4, Tiles, Stochastic, Hadamard string
	}
	Swizzle []struct {
		Rows, Cols int
		Tiled      string
	}
}

func readFixture(t *testing.T) fixture {
	t.Helper()
	text, err := os.ReadFile("testdata/blocks.json")
	if err != nil {
		t.Fatal(err)
	}
	var f fixture
	if err := json.Unmarshal(text, &f); err != nil {
		t.Fatal(err)
	}
	return f
}

// source makes the numbers that make.py makes.
func source(seed uint32, n, spread int, bf16 bool) []float32 {
	list := make([]float32, n)
	for i := range list {
		a := mix(uint32(i) ^ mix(seed))
		b := mix(a ^ 0x9e3779b9)
		pick := min(b>>8%uint32(spread), b>>20%uint32(spread))
		bits := a&0x807fffff | (uint32(127-spread/2)+pick)<<23
		if bf16 {
			bits &= 0xffff0000
		}
		list[i] = math.Float32frombits(bits)
	}
	return list
}

func digest(parts ...[]byte) string {
	h := sha256.New()
	for _, p := range parts {
		h.Write(p)
	}
	return hex.EncodeToString(h.Sum(nil))
}

func words(list []float32) []byte {
	b := make([]byte, 0, 4*len(list))
	for _, f := range list {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(f))
	}
	return b
}

func TestBlocksAreThoseOfTorchaoAndJAX(t *testing.T) {
	for _, c := range readFixture(t).Cases {
		name := fmt.Sprintf("%d/%d/%v", c.Seed, c.Spread, c.BF16)
		t.Run(name, func(t *testing.T) {
			n := c.Rows * c.Cols
			x := source(c.Seed, n, c.Spread, c.BF16)
			if digest(words(x)) != c.Source {
				t.Fatal("the source differs")
			}
			want := map[string]string{"mxfp8": c.MXFP8, "nvfp4": c.NVFP4, "tiles": c.Tiles, "stochastic": c.Stochastic}
			got := quantized(t, x, c.Rows, c.Cols, c.Seed)
			for what := range want {
				if got[what] != want[what] {
					t.Errorf("%s differs", what)
				}
			}
			if !c.BF16 {
				return
			}
			for what, sum := range quantized(t, halves(x), c.Rows, c.Cols, c.Seed) {
				if want[what] != sum {
					t.Errorf("%s of bfloat16 differs", what)
				}
			}
			if c.Hadamard != "" && hadamardDigest(t, x, c.Rows, c.Cols) != c.Hadamard {
				t.Error("hadamard differs")
			}
		})
	}
}

// quantized gives the digest of each format.
func quantized[T Number](t *testing.T, x []T, rows, cols int, seed uint32) map[string]string {
	n := len(x)
	got := map[string]string{}
	most := Amax(x)
	q, scales := make([]byte, n), make([]byte, n/32)
	must(t, MXFP8(q, scales, x))
	got["mxfp8"] = digest(q, scales)
	q, scales = q[:n/2], make([]byte, n/16)
	must(t, NVFP4(q, scales, x, most))
	got["nvfp4"] = digest(q, scales)
	must(t, NVFP4Tiles(q, scales, x, rows, cols, most))
	got["tiles"] = digest(q, scales)
	must(t, Stochastic(q, scales, x, most, NewKey(seed, 7, 3), Window{Row: 5, Col: 32, Cols: cols}))
	got["stochastic"] = digest(q, scales)
	return got
}

// hadamardDigest does what a product of weight gradients needs: transpose, transform, quantize.
func hadamardDigest(t *testing.T, x []float32, rows, cols int) string {
	n := len(x)
	transposed := make([]uint16, n)
	must(t, Transpose(transposed, halves(x), rows, cols))
	must(t, Hadamard(transposed, transposed))
	q, scales := make([]byte, n/2), make([]byte, n/16)
	must(t, NVFP4(q, scales, transposed, Amax(transposed)))
	wide := make([]float32, n)
	Widen(wide, transposed)
	return digest(words(wide), q, scales)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// One block of each format in full, so that a difference can be read.
func TestShownBlock(t *testing.T) {
	shown := readFixture(t).Shown
	raw, err := hex.DecodeString(shown.Source)
	must(t, err)
	var x []uint16
	for i := 0; i < len(raw); i += 2 {
		x = append(x, binary.BigEndian.Uint16(raw[i:]))
	}
	q, s := make([]byte, 32), make([]byte, 2)
	must(t, MXFP8(q, s[:1], x))
	if got := fmt.Sprintf("%x %x", q, s[:1]); got != shown.MXFP8+" "+shown.Scales8 {
		t.Errorf("MXFP8 is\n%s, not\n%s %s", got, shown.MXFP8, shown.Scales8)
	}
	must(t, NVFP4(q[:16], s, x, Amax(x)))
	if got := fmt.Sprintf("%x %x", q[:16], s); got != shown.NVFP4+" "+shown.Scales4 {
		t.Errorf("NVFP4 is\n%s, not\n%s %s", got, shown.NVFP4, shown.Scales4)
	}
}

func TestSwizzleIsThatOfTorchao(t *testing.T) {
	for _, c := range readFixture(t).Swizzle {
		scales := make([]byte, c.Rows*c.Cols)
		for i := range scales {
			scales[i] = byte(mix(uint32(i)))
		}
		tiled := make([]byte, SwizzledLen(c.Rows, c.Cols))
		must(t, Swizzle(tiled, scales, c.Rows, c.Cols))
		if digest(tiled) != c.Tiled {
			t.Errorf("%d×%d differs", c.Rows, c.Cols)
		}
		back := make([]byte, len(scales))
		must(t, Unswizzle(back, tiled, c.Rows, c.Cols))
		differ(t, "unswizzled", back, scales)
	}
}

// A number is never farther from its block's than half a step of the format allows.
func TestWayBack(t *testing.T) {
	x := source(9, 32*64, 12, false)
	n := len(x)
	q, scales, back := make([]byte, n), make([]byte, n/16), make([]float32, n)
	must(t, MXFP8(q, scales[:n/32], x))
	must(t, FromMXFP8(back, q, scales[:n/32]))
	for i := range x {
		scale := dtype.F32FromE8M0(scales[i/32])
		// Half of the last of 3 fraction bits, or half of the smallest element.
		limit := max(math.Abs(float64(x[i]))/16, float64(scale)*0x1p-10)
		if math.Abs(float64(back[i]-x[i])) > limit {
			t.Fatalf("MXFP8: %v came back as %v", x[i], back[i])
		}
	}
	most := Amax(x)
	_, out := Global(most)
	must(t, NVFP4(q[:n/2], scales, x, most))
	must(t, FromNVFP4(back, q[:n/2], scales, out))
	for i := range x {
		step := float64(dtype.F32FromE4M3(scales[i/16]) * out)
		// A scale that rounds down by 1/16 leaves numbers up to 6.4 for the element 6; a step is 2
		// there and 0.5 at the least. The last term is for float32's own rounding.
		limit := max(math.Abs(float64(x[i]))/5, step*.25) * 1.0001
		if math.Abs(float64(back[i]-x[i])) > limit {
			t.Fatalf("NVFP4: %v came back as %v, block scale %v", x[i], back[i], step)
		}
	}
}
