package overlap

import (
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/machine"
)

// Rates are what a device reaches in practice: operations and bytes a second.
type Rates struct {
	// BF16, FP8 and FP4 are of matrix products, by the type of the operands; products of f32 run at
	// half the rate of BF16, as the tensor cores do them.
	BF16 float64 `json:"bf16"`
	FP8  float64 `json:"fp8,omitzero"`
	FP4  float64 `json:"fp4,omitzero"`

	Attention float64 `json:"attention"`
	Memory    float64 `json:"memory"`
	NVLink    float64 `json:"nvlink"`  // that a device sends inside its domain
	Network   float64 `json:"network"` // that it sends to other domains
}

// The part of a card's peak that programs reach in what [machine.Card.Reach] does not have:
// attention, NVLink and network are the rates that overlap was measured with on a B200 (1.12
// PFLOP/s, 650 and 45 GB/s per GPU; the reference on overlap), over the catalogue's 2.25 PFLOP/s,
// 900 and 50 GB/s. Other cards are taken to reach the same parts.
const (
	attentionShare = 1.12 / 2.25
	nvlinkShare    = 650.0 / 900
	networkShare   = 45.0 / 50
)

// pcieLane is what one lane of generation 1 carries, and each generation doubles, in bytes a
// second: 5.0 makes 64 GB/s of 16. It stands in for NVLink on cards that have none.
const pcieLane = 250e6

// RatesOf gives the rates to expect of a card: the catalogue's peaks, each times the part of it
// that programs reach.
func RatesOf(c machine.Card) (Rates, error) {
	reach := c.Reach()
	r := Rates{
		BF16: c.Peak.BF16 * reach.BF16, Attention: c.Peak.BF16 * attentionShare,
		Memory:  float64(c.MemoryBandwidth) * reach.Memory,
		NVLink:  float64(c.NVLink) * nvlinkShare,
		Network: float64(c.NIC) * networkShare,
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

// check finds a rate without which no time can be told. A single device needs no wire.
func (r Rates) check() error {
	if r.BF16 > 0 && r.Attention > 0 && r.Memory > 0 && r.NVLink >= 0 && r.Network >= 0 {
		return nil
	}
	return diag.New(diag.BadInput, "the rates of the device are not known: %+v", r).
		Try("name a card of the catalogue, such as b200, or give the rates")
}

// product is the rate of a product whose operands have that many bits. A card that lacks a type
// computes it as the next wider one.
func (r Rates) product(bits int) float64 {
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
