package overlap

import (
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/machine"
)

// Rates are what a device reaches in practice: operations and bytes a second.
type Rates struct {
	// BF16, FP8 and FP4 are GEMMs by operand type, in FLOP/s. F32 GEMMs run at half the BF16 rate, as
	// TF32 on tensor cores.
	BF16 float64 `json:"bf16"`
	FP8  float64 `json:"fp8,omitzero"`
	FP4  float64 `json:"fp4,omitzero"`

	Attention float64 `json:"attention"`
	Memory    float64 `json:"memory"`
	NVLink    float64 `json:"nvlink"`  // that a device sends inside its domain
	Network   float64 `json:"network"` // that it sends to other domains
}

// The share of peak that programs reach, beyond what the catalogue's Reach has. Attention, NVLink
// and network were measured on a B200 (1.12 PFLOP/s, 650 and 45 GB/s per GPU; the reference on
// overlap), over the catalogue's 2.25 PFLOP/s, 900 and 50 GB/s. Other GPUs are assumed to reach the
// same shares.
const (
	attentionShare = 1.12 / 2.25
	nvlinkShare    = 650.0 / 900
	networkShare   = 45.0 / 50
)

// pcieLane is what one lane of generation 1 carries, and each generation doubles, in bytes a
// second: 5.0 makes 64 GB/s of 16. It replaces NVLink on GPUs that have none.
const pcieLane = 250e6

// RatesOf returns the rates to expect of a GPU: the catalogue's peaks times the share of peak that
// programs reach.
func RatesOf(c machine.GPUModel) (Rates, error) {
	reach := c.Reach()
	r := Rates{
		BF16: c.Peak.BF16 * reach.BF16, Attention: c.Peak.BF16 * attentionShare,
		Memory:  float64(c.MemoryBandwidth) * reach.Memory,
		NVLink:  float64(c.NVLink) * nvlinkShare,
		Network: c.Network() * networkShare,
	}
	switch {
	case c.MXFP8:
		r.FP8 = r.BF16 * reach.MXFP8
	case c.Peak.FP8 > 0:
		r.FP8 = r.BF16 * reach.FP8
	}
	if c.NVFP4 {
		r.FP4 = r.BF16 * reach.NVFP4
	}
	if r.NVLink == 0 && c.PCIeGen > 0 {
		r.NVLink = pcieLane * float64(int64(1)<<(c.PCIeGen-1)) * float64(c.PCIeLanes) * nvlinkShare
	}
	if err := r.check(); err != nil {
		return Rates{}, diag.From(err).Because("the catalogue does not have all of %s", c.Name)
	}
	return r, nil
}

// check finds a missing rate. A single device needs no wire.
func (r Rates) check() error {
	if r.BF16 > 0 && r.Attention > 0 && r.Memory > 0 && r.NVLink >= 0 && r.Network >= 0 {
		return nil
	}
	return diag.New(diag.BadInput, "the rates of the device are not known: %+v", r).
		Try("name a GPU of the catalogue, such as b200, or give the rates")
}

// gemm is the FLOP rate of a GEMM with operands of that many bits. A GPU that lacks a type computes
// it as the next wider one.
func (r Rates) gemm(bits int) float64 {
	switch {
	case bits <= 4 && r.FP4 > 0:
		return r.FP4
	case bits <= 8 && r.FP8 > 0:
		return r.FP8
	case bits >= 32:
		return r.BF16 / 2
	}
	return r.BF16
}
