package dtype

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

var saturating = map[DType]func(float32) byte{
	F8E4M3FN: E4M3FromF32, F8E5M2: E5M2FromF32, F4E2M1FN: E2M1FromF32,
}

// The fixture is what ml_dtypes does: see testdata/make.py.
func TestSmallTypesMatchMLDtypes(t *testing.T) {
	text, err := os.ReadFile("testdata/small.json")
	if err != nil {
		t.Fatal(err)
	}
	var fixture map[string]struct {
		Decode    string
		BF16, F16 string
		Middles   [2]any
	}
	if err := json.Unmarshal(text, &fixture); err != nil {
		t.Fatal(err)
	}
	var bf16, f16 []float32
	for i := range 1 << 16 {
		bf16 = append(bf16, F32FromBF16(uint16(i)))
		f16 = append(f16, F32FromF16(uint16(i)))
	}
	for name, want := range fixture {
		d, err := Parse(name)
		if err != nil {
			t.Fatal(err)
		}
		var finite []float32
		for code, word := range strings.Fields(want.Decode) {
			var got [1]float32
			d.Decode(got[:], []byte{byte(code)})
			if word == "nan" {
				if got[0] == got[0] {
					t.Errorf("%s: %#x is %v, not NaN", name, code, got[0])
				}
				continue
			}
			bits, err := strconv.ParseUint(word, 16, 32)
			if err != nil {
				t.Fatal(err)
			}
			if math.Float32bits(got[0]) != uint32(bits) {
				t.Errorf("%s: %#x is %x, not %x", name, code, math.Float32bits(got[0]), bits)
			}
			if !math.IsInf(float64(got[0]), 0) {
				finite = append(finite, got[0])
			}
		}
		mid := middles(finite)
		if float64(len(mid)) != want.Middles[0] {
			t.Errorf("%s: %d middles, not %v", name, len(mid), want.Middles[0])
		}
		for what, c := range map[string]struct {
			list []float32
			want any
		}{"bf16": {bf16, want.BF16}, "f16": {f16, want.F16}, "middles": {mid, want.Middles[1]}} {
			if got := codes(d, c.list); got != c.want {
				t.Errorf("%s: the codes of %s differ from ml_dtypes", name, what)
			}
		}
	}
}

// middles gives the numbers halfway between neighbours and one ulp to either side.
func middles(list []float32) []float32 {
	slices.Sort(list)
	list = slices.CompactFunc(list, func(a, b float32) bool { return cmp.Compare(a, b) == 0 })
	var out []float32
	for i, f := range list[1:] {
		m := float32((float64(list[i]) + float64(f)) / 2)
		out = append(out, math.Nextafter32(m, float32(math.Inf(-1))), m,
			math.Nextafter32(m, float32(math.Inf(1))))
	}
	return out
}

func codes(d DType, list []float32) string {
	h := sha256.New()
	for _, f := range list {
		if d != F4E2M1FN || f == f {
			h.Write([]byte{asXLA(d, f)})
		}
	}
	return hex.EncodeToString(h.Sum(nil))
}

// asXLA converts as XLA and ml_dtypes do: to the nearest, ties to even, and what is too large
// becomes NaN in F8E4M3FN, infinity in F8E5M2, 6 in F4E2M1FN and NaN in F8E8M0FNU, which has no
// zero either. What a NaN becomes in F4E2M1FN is left open there; here it is 6. It gives 0 for
// other types.
func asXLA(d DType, f float32) byte {
	bits := math.Float32bits(f)
	sign, magnitude := byte(bits>>24)&0x80, bits&0x7fffffff
	switch d {
	case F8E4M3FN:
		if magnitude > 0x43e80000 { // 464, halfway to the number that the NaN took away
			return sign | 0x7f
		}
		return E4M3FromF32(f)
	case F8E5M2:
		if magnitude >= 0x47700000 && f == f { // 61440, halfway to 2¹⁶
			return sign | 0x7c
		}
		return E5M2FromF32(f)
	case F4E2M1FN:
		return E2M1FromF32(f)
	case F8E8M0FNU:
		return roundE8M0(f)
	}
	return 0
}

// roundE8M0 rounds to the nearest power of two, and up from the middle: 3 becomes 4. Only what is
// subnormal always goes up from 2⁻¹²⁷. Zero has no code and becomes NaN.
func roundE8M0(f float32) byte {
	switch bits := math.Float32bits(f); {
	case f != f || f <= 0 || bits >= 0x7f400000: // 1.5·2¹²⁷, halfway to what is NaN
		return 0xff
	case bits <= 0x400000:
		return 0
	default:
		return byte((bits + 0x400000) >> 23)
	}
}

// The two rules differ only in what is too large.
func TestSaturationIsTheOnlyDifference(t *testing.T) {
	largest := map[DType]byte{F8E4M3FN: 0x7e, F8E5M2: 0x7b, F4E2M1FN: 7}
	rapid.Check(t, func(t *rapid.T) {
		f := math.Float32frombits(rapid.Uint32().Draw(t, "bits"))
		for d, encode := range saturating {
			got, other := encode(f), asXLA(d, f)
			if f != f {
				continue
			}
			var limit [1]float32
			d.Decode(limit[:], []byte{largest[d]})
			if math.Abs(float64(f)) > float64(limit[0]) {
				sign := byte(math.Float32bits(f)>>31) << (min(d.Bits(), 8) - 1)
				if got != largest[d]|sign {
					t.Fatalf("%s: %v is %#x", d, f, got)
				}
			} else if got != other {
				t.Fatalf("%s: %v is %#x saturating and %#x else", d, f, got, other)
			}
		}
	})
}

// A scale is the smallest power of two that is not below the number.
func TestScalesRoundUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := math.Float32frombits(rapid.Uint32Range(0, 0x7f000000).Draw(t, "bits"))
		b := E8M0FromF32(f)
		if up := F32FromE8M0(b); up < f {
			t.Fatalf("%v became %v", f, up)
		}
		if b > 0 && F32FromE8M0(b-1) >= f {
			t.Fatalf("%v became %v, though %v is enough", f, F32FromE8M0(b), F32FromE8M0(b-1))
		}
	})
	inf := float32(math.Inf(1))
	for f, want := range map[float32]byte{
		0: 0, 0x1p-127: 0, 0x1.000004p-127: 1, 0x1p127: 0xfe, 0x1.8p127: 0xfe, inf: 0xfe, -1: 0xff, -inf: 0xff,
		float32(math.NaN()): 0xff,
	} {
		if got := E8M0FromF32(f); got != want {
			t.Errorf("%v is %#x, not %#x", f, got, want)
		}
	}
}
