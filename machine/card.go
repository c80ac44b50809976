package machine

import (
	"cmp"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
)

// A GPUModel is one kind of accelerator, as the catalogue knows it. Zero values mean "not known",
// except where a field says otherwise.
type GPUModel struct {
	Name  string // as the command line spells it: gb200
	Title string // as people write it: GB200

	// ComputeCapability has the letter of the instructions that only this chip has, which XLA
	// compiles for: 10.0a. Arch is the same without it: sm_100.
	ComputeCapability string
	Arch              string

	MemoryBytes     int64 // what the package has
	UsableBytes     int64 // what CUDA gives to a program
	MemoryBandwidth int64 // bytes a second

	Peak  Peaks
	MXFP8 bool // has tensor-core products with a scale for each block of 32
	NVFP4 bool // has them for FP4 with a scale for each block of 16

	NVLink       int64 // bytes a second in one direction; 0 means that it has none
	NVLinkDomain int   // GPUs that reach each other by NVLink
	GPUsPerHost  int
	NIC          int64 // bytes a second in one direction that each GPU has of the network

	PCIeGen   int // of the link to the host
	PCIeLanes int
	TDPWatts  int

	aliases []string
	device  device
}

// Peaks are the dense rates in FLOP/s, without structured sparsity. A format that the GPU lacks,
// or whose rate nobody published, is 0.
type Peaks struct {
	BF16, FP8, MXFP8, NVFP4 float64
}

// Of is the rate of a format; 0 if the GPU has no tensor cores for it.
func (p Peaks) Of(f dtype.Format) float64 {
	return map[dtype.Format]float64{dtype.FormatBF16: p.BF16, dtype.FormatFP8: p.FP8,
		dtype.MXFP8: p.MXFP8, dtype.NVFP4: p.NVFP4}[f]
}

// GPUModels lists the catalogue, newest chips first.
func GPUModels() []GPUModel { return slices.Clone(catalogue()) }

// FindGPUModel finds a GPU by its name or any other spelling in use: "b200", "B200-SXM" and the
// driver's "NVIDIA B200" are one.
func FindGPUModel(name string) (GPUModel, error) {
	catalogue := catalogue()
	wanted := fold(name)
	for _, c := range catalogue {
		if wanted == c.Name || slices.Contains(c.aliases, wanted) {
			return c, nil
		}
	}
	names := lists.Map(catalogue, func(c GPUModel) string { return c.Name })
	err := diag.New(diag.GPUUnknown, "no GPU is called %q", name).
		Try("take one of %s", strings.Join(names, ", "))
	if near := nearestModel(wanted, catalogue); near != "" {
		err.What += "; did you mean \"" + near + "\"?"
	}
	return GPUModel{}, err
}

func nearestModel(wanted string, catalogue []GPUModel) string {
	owner := map[string]string{}
	var spellings []string
	for _, c := range catalogue {
		for _, s := range append([]string{c.Name}, c.aliases...) {
			owner[s] = c.Name
			spellings = append(spellings, s)
		}
	}
	return owner[diag.Nearest(wanted, spellings)]
}

// fold brings a spelling to the form of the catalogue: small letters and digits only, without the
// maker's name.
func fold(name string) string {
	name = strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return -1
	}, strings.ToLower(name))
	return strings.TrimPrefix(name, "nvidia")
}

// A Reach is the share of a GPU's peaks that programs reach. It is the only such table; the cost
// model and the overlap report both use it.
type Reach struct {
	BF16 float64 // share of its peak that large products keep up
	// FP8, MXFP8 and NVFP4 are the speed of large GEMMs relative to BF16; 1 if the GPU lacks the
	// format.
	FP8, MXFP8, NVFP4 float64
	Memory            float64 // share of the bandwidth that kernels reach that only move bytes
}

// Of is how many times the rate of BF16 large GEMMs of a format reach; 0 if it is not known.
func (r Reach) Of(f dtype.Format) float64 {
	switch f {
	case dtype.FormatFP8:
		return r.FP8
	case dtype.MXFP8:
		return r.MXFP8
	case dtype.NVFP4:
		return r.NVFP4
	}
	return 0
}

// Reach returns the share of its peaks that programs reach on the GPU.
//
// BF16, sustained:
//
//   - b200: 1,090 of 2,250 TFLOP/s, the median of 515 shapes of SimuMax's table; smaller shapes
//     reach 1,450 for a moment, as XLA's table has it, before the GPU lowers its clock.
//   - gb200, b300, gb300: times the ratios of equal plans in Megatron-Bridge's summary, 1.11 for
//     b300 over b200 and 1.23 for gb300 over gb200.
//   - others: what large GEMMs of cuBLAS reach; XLA's table has 0.70 for 4096³ on h100.
//
// XLA's table has 1.97 for FP8 (median of large shapes); block scales cost a
// little of that rate, and FP4 is bound by the work around a GEMM before it is twice FP8.
// Memory is 5.3 of 7.7 TB/s on b200 (hbm:default of SimuMax's table); older
// GPUs have less to reach.
func (c GPUModel) Reach() Reach {
	sustained := map[string]float64{"b200": 0.485, "gb200": 0.485, "b300": 0.485 * 1.11,
		"gb300": 0.485 * 1.23, "a100": 0.80, "rtx6000pro": 0.60}[c.Name]
	r := Reach{BF16: cmp.Or(sustained, 0.70), FP8: 1, MXFP8: 1, NVFP4: 1, Memory: 0.85}
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

// Network is the bytes a second that each GPU sends to the network: its NIC's, or 400 Gb/s where no
// source has it (GB200), as machines of its generation have.
func (c GPUModel) Network() float64 { return float64(cmp.Or(c.NIC, 50*giga)) }
