package expr_test

import (
	"testing"

	"github.com/deepwell/deepwell/kernels/expr"
)

func TestTextIsRead(t *testing.T) {
	for _, text := range []string{
		"bf16 -> 0",
		"bf16, bf16; sigmoid 0; mul 0 2; mul 3 1 -> 4",
		"bf16, f32 rows, bf16 cols, f32 scalar; mul 0 1; mul 4 2; add 5 3; shift 6 0.044715 -> 7 6",
		"bf16; fill 0; gt 0 1; select 2 0 1 -> 3",
	} {
		e, err := expr.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		if got := e.String(); got != text {
			t.Errorf("%s is printed as %s", text, got)
		}
	}
}

func TestWrongText(t *testing.T) {
	for _, text := range []string{"", "bf16", "bf16 ->", "bf16 -> 1", "s8 -> 0", "bf16 planes -> 0",
		"bf16; mul 0 1 -> 1", "bf16; mul 0 -> 1", "bf16; what 0 -> 1", "bf16; scale 0 x -> 1",
		"bf16; scale 0 NaN -> 1", "bf16; gt 0 0 -> 1", "bf16; gt 0 0; neg 1 -> 2", "bf16; select 0 0 0 -> 1",
		"bf16; neg -1 -> 1", "bf16; neg 0 -> x"} {
		if e, err := expr.Parse(text); err == nil {
			t.Errorf("%q is read as %s", text, e)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("bf16, f32 rows; mul 0 1; scale 2 0.5; gt 0 2; select 4 0 3 -> 5")
	f.Fuzz(func(t *testing.T, text string) {
		e, err := expr.Parse(text)
		if err != nil {
			return
		}
		again, err := expr.Parse(e.String())
		if err != nil || again.String() != e.String() {
			t.Errorf("%q: %v, %v", text, e, err)
		}
	})
}
