package machine

import "slices"

// A device is what XLA is told of a chip, where it is not already in the Card.
type device struct {
	name           string  // as the driver gives it
	major, minor   int     // compute capability
	cores          int     // streaming multiprocessors
	fpus           int     // f32 units of one
	threads        int     // resident in one
	blocks         int     // resident in one
	shared         int     // bytes of shared memory in one
	sharedOptin    int     // bytes of it that a block may ask for
	l2             int64   // bytes
	bandwidth      int64   // bytes a second, from clock and bus width as XLA reckons it
	clock          float32 // GHz
	tensorClock    float32 // GHz under tensor-core load; 0 where not known
	memoryClock    float32 // GHz; 0 where not known
	ecc            bool
	links          int   // active NVLinks
	pcie           int64 // bytes a second
	scalar, matrix []rate
}

// A rate is how many units of one core do how many operations a clock on one XLA PrimitiveType.
type rate struct{ primitive, units, ops int }

// float64Type is F64 of XLA's PrimitiveType: its products run at the base clock on every chip here.
const float64Type = 12

const (
	gib  = int64(1) << 30
	mib  = int64(1) << 20
	tera = 1e12
	giga = int64(1e9)
)

// catalogue is the only table of cards. Where the numbers come from:
//
//   - Peaks, memory, NVLink, NIC and TDP: NVIDIA/dgxc-benchmarking README.md (peak table and
//     reference architectures, 841f5466cd86) for h100, b200, b300, gb200, gb300; lamonoai/gpumap
//     nvidia/GPU.md (8d5e174f6f25) and MLPerf inference v4.1's system description for h200;
//     calculon-ai/calculon systems/a100_80g.json for a100; a reseller's data sheet (hmc-tech.com,
//     f32 accumulation) for rtx6000pro. MXFP8 runs at the rate of FP8 on Blackwell. GB200's NIC
//     and TDP are not in these sources. Memory is counted in GiB: 180 "GB" are 180 * 2^30 bytes.
//   - The device: openxla/xla e5d008bb03d9, xla/backends/gpu/target_config/specs/*.txtpb.
//   - UsableBytes: device_memory_size of the same files, which is CUDA's totalGlobalMem. The files
//     of b300, h200 and rtx6000pro were not written by a device and promise more than the cards
//     have (276.6, 141 and 96 GiB); the figure here is what PyTorch reports as the total capacity
//     on them (267.69, 139.80 and 94.97 GiB; nvidia-smi: 275040, 143771 and 97887 MiB).
//   - b300's file also has 158 multiprocessors; cards report 148, 126.5 MiB of L2 and a bus of
//     7,680 bits at 3.996 GHz, like a b200.
//   - NVLinkDomain 72: NVIDIA-NeMo/Megatron-Bridge deepseek_v3.py perf recipes (067f987df03b).
func catalogue() []Card {
	return []Card{b200(), gb200(), b300(), gb300(), rtx6000pro(), h100(), h200(), a100()}
}

func b200() Card {
	return Card{
		Name: "b200", Title: "B200", ComputeCapability: "10.0a", Arch: "sm_100",
		MemoryBytes: 180 * gib, UsableBytes: 191514411008, MemoryBandwidth: 7700 * giga,
		Peak:  Peaks{BF16: 2250 * tera, FP8: 4500 * tera, MXFP8: 4500 * tera, NVFP4: 9000 * tera},
		MXFP8: true, NVFP4: true,
		NVLink: 900 * giga, NVLinkDomain: 8, GPUsPerHost: 8, NIC: 50 * giga,
		PCIeGen: 5, PCIeLanes: 16, TDPWatts: 1000,
		aliases: []string{"b200sxm", "b200sxm6", "hgxb200", "dgxb200"},
		device: blackwell(device{
			name: "NVIDIA B200", major: 10, cores: 148, l2: 132644864, bandwidth: 7672320000000,
			clock: 1.965, tensorClock: 1.8353101, pcie: 68719476736,
		}),
	}
}

func gb200() Card {
	return Card{
		Name: "gb200", Title: "GB200", ComputeCapability: "10.0a", Arch: "sm_100",
		MemoryBytes: 186 * gib, UsableBytes: 197897748480, MemoryBandwidth: 8000 * giga,
		Peak:  Peaks{BF16: 2450 * tera, FP8: 4900 * tera, MXFP8: 4900 * tera, NVFP4: 9800 * tera},
		MXFP8: true, NVFP4: true,
		NVLink: 900 * giga, NVLinkDomain: 72, GPUsPerHost: 4,
		aliases: []string{"gb200nvl72", "gb200nvl", "dgxgb200"},
		device: blackwell(device{
			name: "NVIDIA GB200", major: 10, cores: 152, l2: 135528448, bandwidth: 7928064000000,
			clock: 2.062, tensorClock: 1.9259081,
		}),
	}
}

func b300() Card {
	return Card{
		Name: "b300", Title: "B300", ComputeCapability: "10.3a", Arch: "sm_103",
		MemoryBytes: 270 * gib, UsableBytes: 274114 * mib, MemoryBandwidth: 7700 * giga,
		Peak:  Peaks{BF16: 2250 * tera, FP8: 4500 * tera, MXFP8: 4500 * tera, NVFP4: 13500 * tera},
		MXFP8: true, NVFP4: true,
		NVLink: 900 * giga, NVLinkDomain: 8, GPUsPerHost: 8, NIC: 100 * giga, TDPWatts: 1100,
		aliases: []string{"b300sxm", "b300sxm6", "b300sxm6ac", "hgxb300", "dgxb300"},
		device: blackwell(device{
			name: "NVIDIA B300 SXM6 AC", major: 10, minor: 3, cores: 148, l2: 132644864,
			bandwidth: 7672320000000, clock: 1.965, tensorClock: 1.8353101,
		}),
	}
}

func gb300() Card {
	return Card{
		Name: "gb300", Title: "GB300", ComputeCapability: "10.3a", Arch: "sm_103",
		MemoryBytes: 279 * gib, UsableBytes: 297021079552, MemoryBandwidth: 8000 * giga,
		Peak:  Peaks{BF16: 2450 * tera, FP8: 4900 * tera, MXFP8: 4900 * tera, NVFP4: 14700 * tera},
		MXFP8: true, NVFP4: true,
		NVLink: 900 * giga, NVLinkDomain: 72, GPUsPerHost: 4, NIC: 100 * giga, TDPWatts: 1400,
		aliases: []string{"gb300nvl72", "gb300nvl", "dgxgb300"},
		device: blackwell(device{
			name: "NVIDIA GB300", major: 10, minor: 3, cores: 152, l2: 135528448,
			bandwidth: 7928064000000, clock: 2.07, tensorClock: 1.93338,
		}),
	}
}

// rtx6000pro has the block formats but not the tensor memory of sm_100, and no NVLink. Servers of
// NVIDIA's own design for it hold eight.
func rtx6000pro() Card {
	return Card{
		Name: "rtx6000pro", Title: "RTX PRO 6000", ComputeCapability: "12.0a", Arch: "sm_120",
		MemoryBytes: 96 * gib, UsableBytes: 97249 * mib, MemoryBandwidth: 1792 * giga,
		Peak:  Peaks{BF16: 503.8 * tera, FP8: 1010 * tera, MXFP8: 1010 * tera, NVFP4: 2020 * tera},
		MXFP8: true, NVFP4: true,
		NVLinkDomain: 1, GPUsPerHost: 8, PCIeGen: 5, PCIeLanes: 16, TDPWatts: 600,
		aliases: []string{"rtxpro6000", "rtxpro6000blackwell", "rtx6000problackwell",
			"rtxpro6000blackwellserveredition", "rtxpro6000blackwellworkstationedition"},
		device: device{
			name: "NVIDIA RTX PRO 6000 Blackwell", major: 12, cores: 188, fpus: 128,
			threads: 1536, blocks: 24, shared: 131072, sharedOptin: 101376, l2: 134217728,
			bandwidth: 1792000000000, clock: 2.6, pcie: 68719476736,
		},
	}
}

func h100() Card {
	return Card{
		Name: "h100", Title: "H100", ComputeCapability: "9.0a", Arch: "sm_90",
		MemoryBytes: 80 * gib, UsableBytes: 84942979072, MemoryBandwidth: 3352 * giga,
		Peak:   Peaks{BF16: 989 * tera, FP8: 1979 * tera},
		NVLink: 450 * giga, NVLinkDomain: 8, GPUsPerHost: 8, NIC: 50 * giga,
		PCIeGen: 5, PCIeLanes: 16, TDPWatts: 700,
		aliases: []string{"h100sxm", "h100sxm5", "h100sxm80gb", "h10080gbhbm3", "dgxh100"},
		device: hopper(device{
			name: "NVIDIA H100 80GB HBM3", bandwidth: 3352320000000, memoryClock: 2.619,
		}),
	}
}

func h200() Card {
	return Card{
		Name: "h200", Title: "H200", ComputeCapability: "9.0a", Arch: "sm_90",
		MemoryBytes: 141 * gib, UsableBytes: 143155 * mib, MemoryBandwidth: 4800 * giga,
		Peak:   Peaks{BF16: 989 * tera, FP8: 1979 * tera},
		NVLink: 450 * giga, NVLinkDomain: 8, GPUsPerHost: 8, NIC: 50 * giga,
		PCIeGen: 5, PCIeLanes: 16, TDPWatts: 700,
		aliases: []string{"h200sxm", "h200sxm5", "h200141gbhbm3e", "dgxh200"},
		device: hopper(device{
			name: "NVIDIA H200", bandwidth: 4800000000000, memoryClock: 3.75,
		}),
	}
}

func a100() Card {
	return Card{
		Name: "a100", Title: "A100", ComputeCapability: "8.0", Arch: "sm_80",
		MemoryBytes: 80 * gib, UsableBytes: 85100068864, MemoryBandwidth: 2039 * giga,
		Peak:   Peaks{BF16: 312 * tera},
		NVLink: 300 * giga, NVLinkDomain: 8, GPUsPerHost: 8, NIC: 25 * giga,
		PCIeGen: 4, PCIeLanes: 16,
		aliases: []string{"a100sxm", "a100sxm80gb", "a100sxm480gb", "a10080gb", "dgxa100"},
		device: device{
			name: "NVIDIA A100-SXM4-80GB", major: 8, cores: 108, fpus: 64, threads: 2048,
			blocks: 32, shared: 167936, sharedOptin: 166912, l2: 41943040,
			bandwidth: 2039040000000, clock: 1.41, tensorClock: 1.41, ecc: true, links: 12,
			scalar: []rate{{4, 64, 1}, {8, 64, 1}, {10, 64, 2},
				{11, 64, 1}, {12, 32, 1}, {16, 64, 2}},
			matrix: []rate{{2, 4, 512}, {6, 4, 512}, {10, 4, 256},
				{11, 4, 128}, {12, 4, 16}, {16, 4, 256}},
		},
	}
}

// blackwell fills in what the chips of sm_100 and sm_103 share.
func blackwell(d device) device {
	d.fpus, d.threads, d.blocks, d.shared, d.sharedOptin = 128, 2048, 32, 233472, 232448
	d.ecc, d.links, d.memoryClock = true, 18, 3.996
	d.scalar = []rate{{4, 64, 1}, {8, 64, 1}, {10, 128, 1},
		{11, 128, 1}, {12, 64, 1}, {16, 128, 1}}
	d.matrix = []rate{{10, 4, 1024}, {11, 4, 512}, {12, 4, 16},
		{16, 4, 1024}, {32, 4, 4096}}
	return d.narrow(2048)
}

// hopper fills in what the chips of sm_90 share.
func hopper(d device) device {
	d.major, d.cores, d.l2, d.clock, d.tensorClock = 9, 132, 52428800, 1.98, 1.8295201
	d.fpus, d.threads, d.blocks, d.shared, d.sharedOptin = 128, 2048, 32, 233472, 232448
	d.ecc, d.links, d.pcie = true, 18, 34359738368
	d.scalar = []rate{{4, 64, 1}, {8, 64, 1}, {10, 128, 2},
		{11, 128, 1}, {12, 64, 1}, {16, 128, 2}}
	d.matrix = []rate{{10, 4, 512}, {11, 4, 256}, {12, 4, 32},
		{16, 4, 512}}
	return d.narrow(1024)
}

// narrow adds the rate of all 8-bit types, and of the 6-bit ones, which run as fast: S8, U8, the
// FP8 family, the E8M0 scale, and FP6.
func (d device) narrow(ops int) device {
	for _, p := range []int{2, 6, 19, 20, 23, 24, 25, 28, 29, 33, 35, 36} {
		d.matrix = append(d.matrix, rate{p, 4, ops})
	}
	slices.SortFunc(d.matrix, func(a, b rate) int { return a.primitive - b.primitive })
	return d
}
