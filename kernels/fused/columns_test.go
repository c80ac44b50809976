package fused_test

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/kernels/triton/run"
)

// A part that is quantized along columns alone has two results, others have four, and all are the
// codec's.
func TestColumnsAlone(t *testing.T) {
	const rows, cols = 96, 160
	s, err := fused.ParseSpec("mxfp8 1x96x160 along across columns=0: bf16, bf16; scale 0 1; scale 1 1 -> 2 3")
	if err != nil {
		t.Fatal(err)
	}
	k, err := s.Kernel()
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(22, 3))
	first, second := hostile(r, rows, cols), hostile(r, rows, cols)
	all := arrays(k, words(first), words(second))
	if err := run.Kernel(k, all); err != nil {
		t.Fatal(err)
	}
	a, b := mxfp8(t, first, rows, cols), mxfp8(t, second, rows, cols)
	want := append(a[2:], b[:]...)
	if len(all)-2 != len(want) {
		t.Fatalf("%d results", len(all)-2)
	}
	for i, w := range want {
		if !bytes.Equal(all[2+i], w) {
			t.Errorf("result %d differs from the codec's", i)
		}
	}
	if got := s.Bytes(); got != 2*2*rows*cols+3*rows*cols*33/32 {
		t.Errorf("the kernel moves %d bytes", got)
	}
	for _, text := range []string{
		"mxfp8 1x96x160 along columns=0: bf16 -> 0",
		"mxfp8 1x96x160 along across columns=1: bf16 -> 0",
		"nvfp4 1x96x160 along across columns=0: bf16 -> 0",
	} {
		if _, err := fused.ParseSpec(text); err == nil {
			t.Errorf("%s is taken", text)
		}
	}
}
