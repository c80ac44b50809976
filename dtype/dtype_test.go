package dtype

import (
	"encoding/json"
	"fmt"
	"testing"

	"pgregory.net/rapid"
)

func TestEveryTypeParsesInBothSpellings(t *testing.T) {
	for _, d := range All() {
		for _, name := range []string{d.String(), d.MLIR()} {
			if got, err := Parse(name); err != nil || got != d {
				t.Errorf("Parse(%q) = %v, %v", name, got, err)
			}
		}
		if d.Bits() == 0 || d.Kind() == 0 {
			t.Errorf("%v lacks bits or kind", d)
		}
	}
	for _, bad := range []string{"", "invalid", "f99"} {
		if _, err := Parse(bad); err == nil {
			t.Errorf("Parse(%q) was taken", bad)
		}
	}
	if DType(200).Valid() || DType(200).String() != "invalid" {
		t.Error("a number outside the table is a type")
	}
}

func TestFourBitElementsShareBytes(t *testing.T) {
	if got := F4E2M1FN.Bytes(3); got != 2 {
		t.Errorf("3 FP4 elements take %d bytes", got)
	}
	if got := (Shape{F8E8M0FNU, []int64{4, 8}}).Bytes(); got != 32 {
		t.Errorf("32 scales take %d bytes", got)
	}
}

func TestShapeRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := Shape{Type: rapid.SampledFrom(All()).Draw(t, "type")}
		s.Dims = rapid.SliceOfN(rapid.Int64Range(0, 1<<40), 0, 5).Draw(t, "dims")
		js, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		var back Shape
		if err := json.Unmarshal(js, &back); err != nil || back.String() != s.String() {
			t.Fatalf("%s came back as %v: %v", js, back, err)
		}
		kind := s.Type
		if s.UnmarshalText([]byte("f32[")) == nil || kind.UnmarshalText([]byte("no")) == nil ||
			s.String() != back.String() || kind != back.Type {
			t.Fatalf("an error leaves %v and %v of %v", s, kind, back)
		}
	})
}

func FuzzParseShape(f *testing.F) {
	for _, s := range []string{"f32[8,128]", "pred[]", "f4e2m1fn[0]", "f32", "[", "f32[,]", "f32[-1]"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var s, again Shape
		if s.UnmarshalText([]byte(text)) != nil {
			return
		}
		if err := again.UnmarshalText([]byte(s.String())); err != nil || !again.Equal(s) {
			t.Errorf("%q printed as %q, which reads as %v, %v", text, s, again, err)
		}
	})
}

func ExampleShape() {
	s := Shape{BF16, []int64{8, 128}}
	fmt.Println(s, s.MLIR(), s.Bytes())
	// Output: bf16[8,128] tensor<8x128xbf16> 2048
}
