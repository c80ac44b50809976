package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/environ"
	"github.com/deepwell/deepwell/internal/pjrt"
	"github.com/deepwell/deepwell/plugin"
	"github.com/deepwell/deepwell/program"
)

// runEngine is the engine that runs on NVIDIA GPUs: compilerEngine and what a GPU host needs.
const runEngine = "cuda13-run"

// A library is one that XLA looks up by name as it runs. Where one is missing, XLA says that there
// is no GPU (NVML, the CUDA runtime) or ends the process in the first product (cuBLAS).
type library struct {
	soname string
	driver bool // comes with NVIDIA's driver, not with the engine
}

var libraries = []library{
	{"libcuda.so.1", true}, {"libnvidia-ml.so.1", true}, {"libcudart.so.13", false},
	{"libcublas.so.13", false}, {"libcublasLt.so.13", false}, {"libnccl.so.2", false},
}

// loadToRun is load for an engine that runs. On GPUs it takes cuda13-run, or else cuda13 where the
// host has the libraries that it lacks; a missing library is an error that names it.
func loadToRun(ctx context.Context, name, dir string) (*pjrt.Plugin, *plugin.Bundle, error) {
	if platformOf(name) != "cuda" {
		return load(ctx, name, dir)
	}
	p, bundle, err := load(ctx, runEngine, dir)
	if errors.Is(err, diag.EngineMissing) && name != runEngine {
		p, bundle, err = load(ctx, name, dir)
	}
	if err != nil {
		return nil, nil, err
	}
	return p, bundle, findLibraries(bundle)
}

const cuDNN = "libcudnn.so.9"

// CheckCuDNN returns an error if cuDNN does not open on the GPUs of this process: programs with its
// calls would be compiled, and fail as they run.
func (e *Engine) CheckCuDNN() error {
	path := cmp.Or(e.bundle.Library(cuDNN), cuDNN)
	err := pjrt.OpenCuDNN(path)
	if err == nil {
		return nil
	}
	return diag.New(diag.LibraryMissing, "cuDNN does not open on this host's GPUs").At("%s", path).
		Wrap(err).Try("deepwell engine install %s; or attention without it: a plan with"+
		" \"attention\": \"plain\"", runEngine)
}

// findLibraries returns an error for the first library that neither the engine nor the host has.
func findLibraries(bundle *plugin.Bundle) error {
	for _, l := range libraries {
		if !l.driver && bundle.Library(l.soname) != "" {
			continue
		}
		err := pjrt.Preload(l.soname)
		if err == nil {
			continue
		}
		e := diag.New(diag.LibraryMissing, "%s cannot be loaded, without which no GPU runs a program",
			l.soname).At("engine %s", bundle.Name).Wrap(err)
		if l.driver {
			return e.Try("install NVIDIA's driver, in a container with its compute and utility" +
				" capabilities; or train on CPU devices: --device cpu")
		}
		return e.Try("deepwell engine install %s", runEngine)
	}
	return nil
}

// versions are the libraries whose version is asked for: how, and how the number is written.
var versions = []struct {
	name, soname, function string
	stores                 bool // the function stores the number where its argument points
	major, minor           int  // divisors
}{
	{"cuda_runtime", "libcudart.so.13", "cudaRuntimeGetVersion", true, 1000, 10},
	{"cublas_lt", "libcublasLt.so.13", "cublasLtGetVersion", false, 10000, 100},
	{"cudnn", cuDNN, "cudnnGetVersion", false, 10000, 100},
	{"nccl", "libnccl.so.2", "ncclGetVersion", true, 10000, 100},
}

// Versions are the versions of what runs programs on GPUs, for reports: of the plugin, of PJRT, and
// of libraries. What cannot be asked is not there.
func (e *Engine) Versions() map[string]string {
	major, minor := e.plugin.Version()
	list := map[string]string{"plugin": e.version, "pjrt": fmt.Sprintf("%d.%d", major, minor)}
	for _, v := range versions {
		n, err := pjrt.Version(cmp.Or(e.bundle.Library(v.soname), v.soname), v.function, v.stores)
		if err == nil {
			list[v.name] = fmt.Sprintf("%d.%d.%d", n/v.major, n%v.major/v.minor, n%v.minor)
		}
	}
	return list
}

// Flags are the flags of every program for this engine's GPUs, without folders, and variables that
// may change numbers.
func (e *Engine) Flags() map[string]string {
	list := map[string]string{}
	for name, value := range gpuFlags(e.Arch(), "", e.environ) {
		if name != "xla_gpu_cuda_data_dir" {
			list[name] = fmt.Sprint(value)
		}
	}
	maps.Copy(list, e.environ.Recorded())
	return list
}

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
