package engine

import (
	"maps"
	"strings"

	"github.com/deepwell/deepwell/internal/environ"
	"github.com/deepwell/deepwell/internal/pjrt"
	"github.com/deepwell/deepwell/program"
)

// gpuFlags are the flags of every program for GPUs of an architecture, compiled for a live client
// or without a device: what runs is what was planned and priced. They are the set that hid most
// communication behind compute when it was measured on a 405B step
// (docs/decisions/0009-compile-options.md).
//
// What the user allowed in XLA_FLAGS is left out: options of a compile would win over it.
func gpuFlags(arch, dataDir string, variables *environ.Set) map[string]any {
	flags := map[string]any{
		"xla_gpu_cuda_data_dir": dataDir,
		// Autotuning would time kernels on this host and choose by noise: other code, and so other
		// bits, after a resume and on each host.
		"xla_gpu_autotune_level":   0,
		"xla_gpu_shard_autotuning": false,
		// Without autotuning every Triton GEMM would get a default tile. cuBLAS chooses its kernel on
		// the GPU.
		"xla_gpu_enable_triton_gemm": false,
		// Prefetch only the all-gathers that the program marks; "on" also clones recomputed layers.
		"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_EXPLICIT",
		// Collectives inside an NVLink domain do not queue behind inter-host ones.
		"xla_gpu_collective_domain_assignment": "scale_up_fabric",
		// XLA's own kernels for small all-reduces are off: the compiler aborts on a scalar all-reduce
		// over the 64 devices of a GB200 domain ("size mismatch when packing elements").
		"xla_gpu_experimental_use_collective_kernels": "",
	}
	if arch != "sm_90" && arch != "sm_100" && arch != "sm_103" {
		// XLA turns the scheduler on by itself only where its cost model knows the architecture.
		flags["xla_gpu_enable_latency_hiding_scheduler"] = true
	}
	maps.DeleteFunc(flags, func(name string, _ any) bool {
		return strings.Contains(variables.Recorded()["XLA_FLAGS"], name+"=")
	})
	return flags
}

// devicelessFlags are what only a compile without a device needs; a program that was compiled live
// has none of them.
func devicelessFlags(cudnn bool) map[string]any {
	flags := map[string]any{
		// CUB asks the CUDA runtime how much scratch a sort needs, which fails without a device.
		"xla_gpu_deviceless_cub_mode": "DEVICELESS_CUB_DISABLED",
	}
	if cudnn {
		flags["xla_gpu_cudnn_deviceless_compilation_mode"] = "CUDNN_DEVICELESS_COMPILATION_AUTO"
	}
	return flags
}

// liveFlags are what only a program that runs needs. By default XLA ends the process when devices
// of a run have not met for 40 s: the communicators of thousands of GPUs take longer than that, and
// so may a late process. Heartbeats and the watchdog find who is gone or stuck, and say who it is.
func liveFlags() map[string]any {
	return map[string]any{
		"xla_gpu_executable_warn_stuck_timeout_seconds":            60,
		"xla_gpu_executable_terminate_timeout_seconds":             3600,
		"xla_gpu_first_collective_call_warn_stuck_timeout_seconds": 60,
		"xla_gpu_first_collective_call_terminate_timeout_seconds":  3600,
	}
}

// options are the module's flags on top of what every program for this engine's devices has.
func (e *Engine) options(m *program.Module) pjrt.CompileOptions {
	o := pjrt.CompileOptions{Devices: m.Devices, DeviceMemory: m.MemoryBytes, Flags: m.Flags}
	if e.platform != "cuda" {
		return o
	}
	o.Flags = gpuFlags(e.Arch(), e.bundle.DataDir, e.environ)
	maps.Copy(o.Flags, liveFlags())
	maps.Copy(o.Flags, m.Flags)
	if o.DeviceMemory == 0 {
		o.DeviceMemory = e.deviceMemory()
	}
	return o
}

// Arch is the architecture of this process's devices: "cpu", or a GPU's such as "sm_100"; "" where
// the plugin does not tell.
func (e *Engine) Arch() string {
	if e.platform == "cpu" {
		return "cpu"
	}
	for _, d := range e.client.Local() {
		if capability, ok := d.Attr["compute_capability"].(string); ok {
			return "sm_" + strings.ReplaceAll(capability, ".", "")
		}
	}
	return ""
}

// Capacity is the memory, in bytes, that the engine's allocator has on the GPU with the least; 0
// for CPU devices, which use the host's.
func (e *Engine) Capacity() (least int64) {
	for _, d := range e.client.Local() {
		s, err := d.MemoryStats()
		if err == nil && s.Limit > 0 && (least == 0 || s.Limit < least) {
			least = s.Limit
		}
	}
	return least
}

// Pool is what XLA's own allocator counts on the GPU with the highest peak, in bytes: what is in
// use, the most that was, and its limit. All are 0 for CPU devices, for which XLA counts nothing.
func (e *Engine) Pool() (inUse, peak, limit int64) {
	for _, d := range e.client.Local() {
		if s, err := d.MemoryStats(); err == nil && s.Peak > peak {
			inUse, peak, limit = s.InUse, s.Peak, s.Limit
		}
	}
	return inUse, peak, limit
}

// deviceMemory is the smallest memory of a GPU of this process, in bytes; 0 where the plugin does
// not tell. It is CUDA's totalGlobalMem, which [machine.Cluster] has for each GPU, too.
func (e *Engine) deviceMemory() (least int64) {
	for _, d := range e.client.Local() {
		if n, ok := d.Attr["device_memory_bytes_limit"].(int64); ok && (least == 0 || n < least) {
			least = n
		}
	}
	return least
}
