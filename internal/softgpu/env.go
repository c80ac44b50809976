package softgpu

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/internal/environ"
)

// Options say what GPUs a process sees, and what goes wrong with them.
type Options struct {
	GPUs  int    // 0 means 1
	Model string // b200 (also ""), gb300, rtx6000pro
	// Memory is the memory of each GPU in bytes; 0 means 1 GiB. XLA's allocator fills a table of 8
	// bytes for each 256 bytes of the GPU when it allocates for the first time, so a GPU of true
	// size costs 4.5 GB of the host.
	Memory int64
	// Delay is the seed of random delays of all operations of streams, up to DelayMicroseconds (0
	// means 300) each, and of the order of what has none; 0 means neither.
	Delay uint64
	// Order is the seed of the order of blocks and warps inside of kernels; 0 is by number. It changes
	// the last bits of sums by atomic additions, as on a real GPU.
	Order             uint64
	DelayMicroseconds int
	// SlowGPU is late by SlowMicroseconds with every operation.
	SlowGPU, SlowMicroseconds int
	// Fail makes a GPU fail at its nth kernel, counted from 1, with a result of the driver: 719 is
	// CUDA_ERROR_LAUNCH_FAILED, 214 CUDA_ERROR_ECC_UNCORRECTABLE. No kernel fails if Launch is 0.
	Fail Failure
	// WrongGPU gives GEMMs that are too large by WrongPermille of their size.
	WrongGPU, WrongPermille int
	// Fabric names an NVLink domain: processes with the same name are in one.
	Fabric string
	// Log is a file that the libraries append to; "" is the one that this process's SOFTGPU_LOG
	// names, if any. Lines "driver: looks up NAME" and "ptx: INSTRUCTION" tell what a plugin uses.
	Log string
	// Share makes memory of cuMemAlloc such that other processes can open it (cuIpcGetMemHandle).
	Share bool
	Flags map[string]string // more flags of XLA
	Env   []string          // more variables
}

// A Failure is what ends a GPU.
type Failure struct{ GPU, Launch, Result int }

// Env is the environment of a process that sees the software GPU: this process's, with the
// variables below changed.
func (g *GPU) Env(o Options) []string {
	memory := o.Memory
	if memory == 0 {
		memory = 1 << 30
	}
	flags := []string{"--xla_gpu_cuda_data_dir=" + g.Toolkit, "--xla_gpu_autotune_level=0",
		"--xla_gpu_enable_triton_gemm=false"}
	for _, name := range slices.Sorted(maps.Keys(o.Flags)) {
		flags = append(flags, fmt.Sprintf("--%s=%s", name, o.Flags[name]))
	}
	set := []string{
		"LD_LIBRARY_PATH=" + g.Lib,
		// The plugin looks for cuBLASLt in the engine's folder first; what is loaded already wins.
		"LD_PRELOAD=" + filepath.Join(g.Lib, "libcublasLt.so.13"),
		"XLA_FLAGS=" + strings.Join(flags, " "), environ.Allow + "=XLA_FLAGS",
		fmt.Sprintf("SOFTGPU_GPUS=%d", max(1, o.GPUs)), "SOFTGPU_MODEL=" + o.Model,
		fmt.Sprintf("SOFTGPU_MEMORY=%d", memory), fmt.Sprintf("SOFTGPU_DELAY_SEED=%d", o.Delay),
		fmt.Sprintf("SOFTGPU_ORDER_SEED=%d", o.Order),
		"SOFTGPU_LOG=" + cmp.Or(o.Log, os.Getenv("SOFTGPU_LOG")),
	}
	if o.DelayMicroseconds > 0 {
		set = append(set, fmt.Sprintf("SOFTGPU_DELAY_US=%d", o.DelayMicroseconds))
	}
	if o.SlowMicroseconds > 0 {
		set = append(set, fmt.Sprintf("SOFTGPU_SLOW=%d:%d", o.SlowGPU, o.SlowMicroseconds))
	}
	if o.Fail.Launch > 0 {
		set = append(set, fmt.Sprintf("SOFTGPU_XID=%d:%d:%d", o.Fail.GPU, o.Fail.Launch,
			o.Fail.Result))
	}
	if o.WrongPermille > 0 {
		set = append(set, fmt.Sprintf("SOFTGPU_WRONG=%d:%d", o.WrongGPU, o.WrongPermille))
	}
	if o.Share {
		set = append(set, "SOFTGPU_SHARE=1")
	}
	if o.Fabric != "" {
		set = append(set, "SOFTGPU_FABRIC="+o.Fabric)
	}
	return replaced(os.Environ(), append(set, o.Env...))
}

// replaced gives an environment in which the given variables have their new values.
func replaced(environ, set []string) []string {
	fresh := map[string]bool{}
	for _, one := range set {
		name, _, _ := strings.Cut(one, "=")
		fresh[name] = true
	}
	var list []string
	for _, one := range environ {
		name, _, _ := strings.Cut(one, "=")
		if !fresh[name] && !strings.HasPrefix(name, "SOFTGPU_") {
			list = append(list, one)
		}
	}
	return append(list, set...)
}
