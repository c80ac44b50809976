package fused_test

import (
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
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

// Elements beyond 2^31 are counted by 64 bits, in a stack of layers as in one matrix; what 32 bits
// do not count otherwise is refused.
func TestManyElements(t *testing.T) {
	for text, wide := range map[string]string{
		"mxfp8 1x262143x8192 along swizzled: bf16 -> 0":                          "i32",
		"mxfp8 1x262144x8192 along across swizzled: bf16 -> 0":                   "i64",
		"mxfp8 126x8192x53248 along across swizzled: bf16 -> 0":                  "i64",
		"mxfp8 1x8192x53248 along swizzled rounds=126 from=0 saved=0: bf16 -> 0": "i32", // of one round
		"nvfp4 126x8192x53248 along across amax: bf16 -> 0":                      "i64",
		"nvfp4 126x8192x53248 along across swizzled: bf16 -> 0":                  "i64",
		"nvfp4 126x8192x53248 along across: bf16 -> 0":                           "i64",
		"mxfp8 1x4x1099511627776 along: bf16 -> 0":                               "refused",
		"mxfp8 65536x32x128 along: bf16 -> 0":                                    "refused", // a grid's z
		"mxfp8 1x2147483648x32 along: bf16 -> 0":                                 "refused",
	} {
		s, err := fused.ParseSpec(text)
		if err != nil {
			t.Fatal(err)
		}
		k, err := s.Kernel()
		if (err != nil) != (wide == "refused") {
			t.Errorf("%s: %v", text, err)
		}
		if err != nil {
			continue
		}
		for line := range strings.Lines(k.Text) {
			line = strings.TrimSpace(line)
			switch matrix := strings.Contains(line, "tensor<32x256x!tt.ptr<bf16>>"); {
			case !strings.Contains(line, "tt.addptr"):
			case matrix && !strings.HasSuffix(line, "x"+wide+">"):
				t.Errorf("%s: %s", text, line)
			case s.Batch > 1 && s.Format == dtype.NVFP4 && strings.Contains(line, "x!tt.ptr<f8E4M3FN>>") &&
				!strings.HasSuffix(line, "xi64>"): // 3.4e9 scales
				t.Errorf("%s: %s", text, line)
			case strings.Contains(line, ": !tt.ptr<bf16>") && !strings.HasSuffix(line, "i64"): // to a round
				t.Errorf("%s: %s", text, line)
			}
		}
	}
}
