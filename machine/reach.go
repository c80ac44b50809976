package machine

import "strings"

// A Reach is what programs reach of a card's peaks: the one table for whoever turns work into
// seconds.
type Reach struct {
	BF16 float64 // share of its peak that large products keep up
	// FP8, MXFP8 and NVFP4 are how many times the rate of BF16 large products of these reach; 1 where
	// the card has none of them.
	FP8, MXFP8, NVFP4 float64
	Memory            float64 // share of the bandwidth that kernels reach that only move bytes
}

// Reach gives what programs reach of the card.
//
// BF16, for longer than a moment:
//
//   - b200: 1,090 of 2,250 TFLOP/s, the median of 515 shapes of SimuMax's table; smaller shapes
//     reach 1,450 for a moment, as XLA's table has it, and the card then lowers its clock.
//   - gb200, b300, gb300: times the ratios of equal plans in Megatron-Bridge's summary, 1.11 for
//     b300 over b200 and 1.23 for gb300 over gb200.
//   - others: what large products of cuBLAS reach; XLA's table has 0.70 for 4096³ on h100.
//
// XLA's table has 1.97 for FP8 (median of large shapes); blocks with scales lose a little of the
// rate of their type, and FP4 is bound by what surrounds the product before it is twice FP8.
// Memory is 5.3 of 7.7 TB/s on b200 (hbm:default of SimuMax's table); older cards have less to
// reach.
func (c Card) Reach() Reach {
	r := Reach{BF16: 0.70, FP8: 1, MXFP8: 1, NVFP4: 1, Memory: 0.85}
	switch c.Name {
	case "b200", "gb200":
		r.BF16 = 0.485
	case "b300":
		r.BF16 = 0.485 * 1.11
	case "gb300":
		r.BF16 = 0.485 * 1.23
	case "a100":
		r.BF16 = 0.80
	case "rtx6000pro":
		r.BF16 = 0.60
	}
	if c.Peak.FP8 > 0 {
		r.FP8 = 1.97
	}
	if c.MXFP8 {
		r.MXFP8 = 1.90
	}
	if c.NVFP4 {
		r.NVFP4 = 1.90 * min(1.8, c.Peak.NVFP4/c.Peak.MXFP8)
	}
	if strings.HasPrefix(c.Arch, "sm_1") {
		r.Memory = 0.69
	}
	return r
}
