package price

import (
	"math"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/overlap"
)

// Cost model and overlap report use the same rates of a GPU, for large GEMMs and for memory-bound
// kernels.
func TestOverlapReachesWhatIsPriced(t *testing.T) {
	prof, err := Find(Own)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range machine.GPUModels() {
		r, err := overlap.RatesOf(c)
		if err != nil {
			t.Fatal(err)
		}
		p := New(machine.Cluster{GPU: c, Count: 8}, prof)
		same := func(what string, got, want float64) {
			if want > 0 && math.Abs(got/want-1) > 1e-12 {
				t.Errorf("%s, %s: overlap reaches %.4g, priced are %.4g", c.Name, what, got, want)
			}
		}
		same("bf16", r.BF16, p.sustained)
		same("memory", r.Memory, p.reached)
		if c.MXFP8 {
			same("mxfp8", r.FP8, p.sustained*p.faster(dtype.MXFP8))
		} else if c.Peak.FP8 > 0 {
			same("fp8", r.FP8, p.sustained*p.faster(dtype.FormatFP8))
		}
		if c.NVFP4 {
			same("nvfp4", r.FP4, p.sustained*p.faster(dtype.NVFP4))
		}
	}
}
