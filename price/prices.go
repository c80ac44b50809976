package price

import (
	"cmp"
	"math"
	"strings"
	"sync"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/machine"
)

// Prices is the cost model of one cluster under one profile.
type Prices struct {
	cluster machine.Cluster
	profile *Profile

	reach     machine.Reach
	sustained float64  // sustained FLOP/s of large BF16 GEMMs
	bandwidth float64  // bytes a second
	reached   float64  // bytes a second of a kernel that only moves them
	tables    [2]*grid // measured GEMM shapes in BF16 and FP8; nil without a table
	above     float64  // speed of the GPU relative to the tables' GPU
	links     [kinds][groups]*curve
	scale     float64 // bandwidth ratio, if the link curves are another GPU's
	slower    float64 // how many times as long every transfer between devices takes
	// uneven keeps the spreads of groups that do not come out even with NVLink domains. Estimators
	// that run beside each other share prices.
	uneven *sync.Map
}

// New works out what the prices of a cluster start from.
func New(cl machine.Cluster, prof *Profile) *Prices {
	p := &Prices{cluster: cl, profile: prof, bandwidth: float64(cl.GPU.MemoryBandwidth), scale: 1,
		slower: 1, uneven: new(sync.Map)}
	c := cl.GPU
	p.reach = c.Reach()
	p.sustained = p.reach.BF16 * c.Peak.BF16
	if cl.CPU() {
		p.sustained, p.bandwidth = cpuRate, cpuBandwidth
	}
	p.reached = p.bandwidth * p.reach.Memory
	arch := c.Arch
	p.above = 1
	if strings.HasPrefix(arch, "sm_10") { // the tables are b200's
		arch = "sm_100"
		p.above = max(1, p.sustained/(b200Reach*b200Peak))
	}
	p.tables[0] = times(arch, "bf16", c.Peak.BF16)
	p.tables[1] = times(arch, "fp8", c.Peak.FP8)
	p.connect()
	return p
}

// Slower returns a cost model in which every transfer between devices, inside and between NVLink
// domains, takes links times as long. Overlapped computation stays the same, so the hidden shares
// are divided.
func (p *Prices) Slower(links float64) *Prices {
	n := *p
	n.slower = p.slower * links
	n.profile = p.profile.Clone()
	for _, share := range []*float64{&n.profile.HideTensor, &n.profile.HideContext,
		&n.profile.HideExpert} {
		*share = min(1, *share/links)
	}
	return &n
}

// One virtual device of a processor: what one of two cores of the machine at hand does in a step of
// a small model (measured: 13M parameters, 5,730 tokens a second on two
// cores in bf16, which is 6 * 13e6 * 5730 / 2 operations). A probe that measures replaces both.
const (
	cpuRate      = 2.2e11
	cpuBandwidth = 1e10
)

// b200Peak is the BF16 FLOP/s of the GPU that the tables were measured on.
const b200Peak = 2250e12

// b200Reach is the share of it that large products reach.
var b200Reach = machine.GPUModel{Name: "b200"}.Reach().BF16

// faster is how many times the rate of BF16 a precision reaches in large products.
func (p *Prices) faster(prec dtype.Format) float64 {
	switch {
	case prec == dtype.FormatF32 && !p.cluster.CPU():
		return 0.5 // TF32
	case prec == dtype.FormatFP8 || prec.Quantized():
		return cmp.Or(p.reach.Of(prec), 1) // without tensor cores for it the operands are dequantized
	}
	return 1
}

// GEMM is the seconds of [m,k]·[k,n]: at least what the table of small shapes, the sustained
// FLOP/s, and the memory bandwidth give.
func (p *Prices) GEMM(prec dtype.Format, m, k, n float64) float64 {
	work := 2 * m * k * n
	if work == 0 {
		return 0
	}
	faster := p.faster(prec)
	t := p.profile.GEMM * work / (p.sustained * faster)
	at := 0
	if faster > 1 {
		at = 1
	}
	if table := p.tables[at]; table != nil {
		small := table.seconds(m, n, k) / p.above
		if prec.TensorScale() && at == 1 { // no table has it: the shape of FP8 at its own rate
			small *= p.faster(dtype.FormatFP8) / faster
		}
		t = max(t, small)
	}
	return max(t, (m*k+k*n+m*n)*2/p.bandwidth)
}

// Grouped is the seconds of the experts' grouped GEMMs, each [m,k]·[k,n]; weight marks wgrad,
// which accumulates in f32. The constants are fitted to the 108 grouped GEMMs of SimuMax's b200
// table, with mean errors of 9 % and, for wgrad, 6 %.
func (p *Prices) Grouped(prec dtype.Format, experts, m, k, n float64, weight bool) float64 {
	work, bytes := 2*m*k*n/(p.sustained*p.faster(prec)), (m*n+m*k+n*k)*2
	t := 0.85*work + 0.59*bytes/p.bandwidth + 4.3e-6
	if weight {
		t = 0.91*work + 1.10*(bytes+6*m*n)/p.bandwidth
	}
	return p.profile.GEMM * p.profile.Grouped * experts * t
}

// attentionShares is the share of peak that attention reaches on b200, from SimuMax's table, by
// heads × tokens / 4,096 in powers of two from 4 to 128. FLOPs are counted without the causal
// mask, and the shares are capped at 131,072 tokens, where the GPU throttles.
var attentionShares = [2][2][6]float64{
	{{0.167, 0.312, 0.577, 0.728, 0.853, 0.97}, {0.345, 0.643, 0.746, 0.791, 0.80, 0.83}},
	{{0.17, 0.33, 0.637, 0.786, 0.83, 0.83}, {0.30, 0.50, 0.593, 0.611, 0.625, 0.643}},
}

// Attention is the time of scores and weighted values: of queries tokens that see a mean of keys
// others, in heads of the two sizes.
func (p *Prices) Attention(tokens, keys, heads, score, value float64, backward bool) float64 {
	wide, pass, mult := 0, 0, 1.0
	if score >= 160 {
		wide = 1
	}
	if backward {
		pass, mult = 1, 2.5
	}
	work := mult * 4 * tokens * keys * heads * (score + value)
	shares := &attentionShares[wide][pass]
	x := math.Log2(heads*tokens/4096) - 2
	last := float64(len(shares) - 1)
	share := shares[0] * math.Exp2(min(x, 0)) // fewer heads leave more SMs idle
	if x = min(x, last); x > 0 {
		i := min(int(x), len(shares)-2)
		w := x - float64(i)
		share = shares[i] * math.Pow(shares[i+1]/shares[i], w)
	}
	// The table is of b200; other GPUs scale with their sustained GEMM rate.
	rate := share * p.sustained / b200Reach
	return p.profile.Attention * work / max(rate, 1)
}

// Stream is the time of bytes read from and written to memory by simple kernels.
func (p *Prices) Stream(bytes float64) float64 { return p.profile.Stream * bytes / p.reached }

// Quantize is the seconds to cast elements to a quantized format: read in bf16, written once, or
// twice if GEMMs read both orientations (sides).
func (p *Prices) Quantize(prec dtype.Format, elements, sides float64) float64 {
	var width float64
	switch {
	case prec == dtype.FormatFP8:
		width = 1
	case prec.Quantized():
		width = float64(prec.Codes().Bits()) / 8
	default:
		return 0
	}
	return p.profile.Quantize * elements * (2 + sides*width) / p.reached
}

// Optimizer is the time of the bytes that the optimizer's step reads and writes.
func (p *Prices) Optimizer(bytes float64) float64 {
	return p.profile.Optimizer * bytes / p.reached
}

// Offload is the seconds to move bytes between GPU and host. NVIDIA's Grace reaches the GPU over
// NVLink-C2C at 450 GB/s per direction; others use PCIe.
func (p *Prices) Offload(bytes float64) float64 {
	c := p.cluster.GPU
	rate := 1e9 * float64(max(c.PCIeLanes, 16)) * math.Exp2(float64(max(c.PCIeGen, 4)-3)) * 0.8
	if strings.HasPrefix(c.Name, "gb") {
		rate = 450e9 * 0.8
	}
	return bytes / rate
}

// Operations is the time in which the host starts a number of operations.
func (p *Prices) Operations(n float64) float64 { return p.profile.Operation * n }

// Profile is the profile that the prices are under.
func (p *Prices) Profile() *Profile { return p.profile }
