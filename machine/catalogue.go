package machine

import (
	_ "embed"
	"encoding/json"
	"sync"

	"github.com/deepwell/deepwell/internal/strictjson"
)

// A device is what XLA needs to know about a chip beyond the GPUModel.
type device struct {
	Name           string  // as the driver gives it
	Major, Minor   int     // compute capability
	Cores          int     // streaming multiprocessors
	FPUs           int     // f32 units of one
	Threads        int     // resident in one
	Blocks         int     // resident in one
	Shared         int     // bytes of shared memory in one
	SharedOptin    int     // bytes of it that a block may ask for
	L2             int64   // bytes
	Bandwidth      int64   // bytes a second, from clock and bus width as XLA reckons it
	Clock          float32 // GHz
	TensorClock    float32 // GHz under tensor-core load; 0 where not known
	MemoryClock    float32 // GHz; 0 where not known
	ECC            bool
	Links          int   // active NVLinks
	PCIe           int64 // bytes a second
	Scalar, Matrix []rate
}

// A rate is how many units of one core do how many operations a clock on one XLA PrimitiveType.
type rate struct{ Primitive, Units, Ops int }

// UnmarshalJSON reads a list of the three.
func (r *rate) UnmarshalJSON(text []byte) error {
	return json.Unmarshal(text, &[]any{&r.Primitive, &r.Units, &r.Ops})
}

// float64Type is F64 of XLA's PrimitiveType: its products run at the base clock on every chip here.
const float64Type = 12

const giga = int64(1e9)

// gpus.json is the only table of GPUs. Where the numbers come from:
//
//   - Peaks, memory, NVLink, NIC and TDP: NVIDIA/dgxc-benchmarking README.md (peak table and
//     reference architectures, 841f5466cd86) for h100, b200, b300, gb200, gb300; lamonoai/gpumap
//     nvidia/GPU.md (8d5e174f6f25) and MLPerf inference v4.1's system description for h200;
//     calculon-ai/calculon systems/a100_80g.json for a100; a reseller's data sheet (hmc-tech.com,
//     f32 accumulation) for rtx6000pro. MXFP8 runs at the rate of FP8 on Blackwell. GB200's NIC
//     and TDP are not in these sources. Memory is counted in GiB: 180 "GB" are 180 * 2^30 bytes.
//   - The device: openxla/xla e5d008bb03d9, xla/backends/gpu/target_config/specs/*.txtpb.
//   - UsableBytes: device_memory_size of the same files, which is CUDA's totalGlobalMem. The files
//     of b300, h200 and rtx6000pro were not written by a device and promise more than the GPUs
//     have (276.6, 141 and 96 GiB); the figure here is what PyTorch reports as the total capacity
//     on them (267.69, 139.80 and 94.97 GiB; nvidia-smi: 275040, 143771 and 97887 MiB).
//   - b300's file also has 158 multiprocessors; GPUs report 148, 126.5 MiB of L2 and a bus of
//     7,680 bits at 3.996 GHz, like a b200.
//   - NVLinkDomain 72: NVIDIA-NeMo/Megatron-Bridge deepseek_v3.py perf recipes (067f987df03b).
//
// All 8-bit types, and the 6-bit ones, have one rate: S8, U8, the FP8 family, the E8M0 scale, FP6.
// rtx6000pro has the block formats but not the tensor memory of sm_100, and no NVLink; servers of
// NVIDIA's own design for it hold eight.
//
//go:embed gpus.json
var catalogueText []byte

// catalogue parses gpus.json, which is embedded in the binary; tests read every entry.
var catalogue = sync.OnceValue(func() (list []GPUModel) {
	var file struct {
		Chips map[string]json.RawMessage // what devices share, by the name of the chip
		GPUs  []struct {
			GPUModel
			Chip                          string
			Device                        json.RawMessage
			Aliases                       []string
			MemoryGiB, MemoryGB, NVLinkGB int64 // GB are per second
			NICGB                         int64
			TFLOPs                        Peaks
		}
	}
	if err := strictjson.Decode(catalogueText, &file); err != nil {
		panic(err)
	}
	for _, row := range file.GPUs {
		c := row.GPUModel
		c.aliases, c.MemoryBytes = row.Aliases, row.MemoryGiB<<30
		c.MemoryBandwidth, c.NVLink, c.NIC = row.MemoryGB*giga, row.NVLinkGB*giga, row.NICGB*giga
		p := row.TFLOPs
		c.Peak = Peaks{p.BF16 * 1e12, p.FP8 * 1e12, p.MXFP8 * 1e12, p.NVFP4 * 1e12}
		c.MXFP8, c.NVFP4 = p.MXFP8 > 0, p.NVFP4 > 0
		for _, text := range []json.RawMessage{file.Chips[row.Chip], row.Device} {
			if len(text) > 0 {
				if err := strictjson.Decode(text, &c.device); err != nil {
					panic(c.Name + ": " + err.Error())
				}
			}
		}
		list = append(list, c)
	}
	return list
})
