package block

import (
	"testing"

	"github.com/deepwell/deepwell/dtype"
)

// The kernels' blocks are those that dtype says, which all others take sizes from.
func TestBlocksAreThoseOfFormats(t *testing.T) {
	for f, want := range map[dtype.Format]struct {
		size  int64
		bytes float64
	}{dtype.MXFP8: {MXFP8Size, 33.0 / 32}, dtype.NVFP4: {NVFP4Size, 18.0 / 32}} {
		if f.Block() != want.size || f.Bytes() != want.bytes {
			t.Errorf("%s: %d to a block, %v bytes an element; want %+v", f, f.Block(), f.Bytes(), want)
		}
	}
	if none := dtype.Format("bf16"); none.Block() != 1 {
		t.Errorf("%s has blocks of %d", none, none.Block())
	}
}
