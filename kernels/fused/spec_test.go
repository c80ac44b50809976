package fused_test

import (
	"testing"

	"github.com/deepwell/deepwell/kernels/fused"
)

// What parses prints itself, and what it prints parses to the same.
func FuzzParseSpec(f *testing.F) {
	f.Add("mxfp8 1x8192x14336 along across: bf16, bf16; sigmoid 0; mul 0 2; mul 3 1 -> 4")
	f.Add("mxfp8 1x64x128 along rounds=3 from=0 into=0,1 saved=0: bf16 -> 0")
	f.Add("nvfp4 1x64x128 along across: bf16 -> 0")
	f.Add("loss 8192x128256")
	f.Fuzz(func(t *testing.T, text string) {
		if l, err := fused.ParseLoss(text); err == nil && l.String() != text {
			t.Errorf("%q is printed as %q", text, l)
		}
		s, err := fused.ParseSpec(text)
		if err != nil {
			return
		}
		again, err := fused.ParseSpec(s.String())
		if err != nil || again.String() != s.String() {
			t.Errorf("%q is printed as %q: %v", text, s, err)
		}
		s.Bytes()
	})
}
