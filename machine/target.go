package machine

import (
	"fmt"
	"strconv"
	"strings"
)

// A Target is what XLA is told in order to compile for hardware that is not there. A partition is
// what XLA calls the hosts that share a fast interconnect: one NVLink domain.
type Target struct {
	Card              Card
	Partitions        int
	HostsPerPartition int
	DevicesPerHost    int
}

// Topology gives the shape as the plugin's option "topology" takes it: partitions x hosts in one x
// devices in a host.
func (t Target) Topology() string {
	return fmt.Sprintf("%dx%dx%d", t.Partitions, t.HostsPerPartition, t.DevicesPerHost)
}

// Devices is the number of devices of the whole target.
func (t Target) Devices() int { return t.Partitions * t.HostsPerPartition * t.DevicesPerHost }

// CPU reports whether the target is the local processor, which needs no description.
func (t Target) CPU() bool { return t.Card.Name == "cpu" }

// MemoryBytes is the memory that a program may use on each device; 0 for the processor.
func (t Target) MemoryBytes() int64 { return t.Card.UsableBytes }

// Versions of CUDA that a target claims. The plugin is the CUDA 13 build, and on a card it finds at
// least these; the files that XLA ships say 12.8, which keeps 32-byte vectors off on sm_100
// (gpu_fusible.cc asks for 12.9) and, where nothing is said, command buffers altogether.
const (
	cudaVersion = "13.0.0"
	cubVersion  = "3.1.2" // part of the plugin; the value of XLA's own files
)

// oldestCuDNN is the first release whose block-scaled product XLA calls, as its pass
// block_scaling_rewriter.cc has it.
const oldestCuDNN = "9.10.0"

// ConfigText gives stream_executor.GpuTargetConfigProto as text, for the plugin's option
// "target_config". XLA decides by cudnnVersion which of cuDNN's products a program may use, so it
// must be the version that will be loaded: "9.24.1" or a wheel's "9.24.1.1". With "" the target
// claims the oldest release that has block-scaled products. The text of a CPU target is empty.
func (t Target) ConfigText(cudnnVersion string) string {
	if t.CPU() {
		return ""
	}
	d := t.Card.device
	w := &protoText{}
	w.open("gpu_device_info")
	w.device(t.Card)
	w.units("scalar_unit_description", d.Scalar, d.Clock, d.Clock)
	w.units("matrix_unit_description", d.Matrix, d.TensorClock, d.Clock)
	w.text("driver_version", cudaVersion)
	w.text("runtime_version", cudaVersion)
	w.text("compile_time_toolkit_version", cudaVersion)
	w.text("dnn_version", threeNumbers(cudnnVersion))
	w.text("cub_version", cubVersion)
	if d.Links > 0 {
		w.open("device_interconnect_info")
		w.number("active_links", int64(d.Links))
		w.close()
	}
	w.close()
	w.text("platform_name", "CUDA")
	w.text("device_description_str", d.Name)
	return w.String()
}

func (w *protoText) device(c Card) {
	d := c.device
	w.text("name", d.Name)
	w.text("device_vendor", "NVIDIA Corporation")
	w.text("platform_version", "Compute Capability "+c.ComputeCapability)
	if d.MemoryClock > 0 {
		w.text("model_str", fmt.Sprintf(
			"sm_%s with %dB RAM, %d cores, %dKHz clock, %dKHz mem clock, %dB L2$",
			c.ComputeCapability, c.UsableBytes, d.Cores, khz(d.Clock), khz(d.MemoryClock), d.L2))
	}
	w.number("threads_per_block_limit", 1024)
	w.number("threads_per_warp", 32)
	w.number("shared_memory_per_block", 49152)
	w.number("shared_memory_per_core", int64(d.Shared))
	w.number("threads_per_core_limit", int64(d.Threads))
	w.number("core_count", int64(d.Cores))
	w.number("fpus_per_core", int64(d.FPUs))
	w.number("block_dim_limit_x", 1<<31-1)
	w.number("block_dim_limit_y", 65535)
	w.number("block_dim_limit_z", 65535)
	w.number("memory_bandwidth", d.Bandwidth)
	w.number("l2_cache_size", d.L2)
	w.float("clock_rate_ghz", d.Clock)
	w.number("device_memory_size", c.UsableBytes)
	w.number("shared_memory_per_block_optin", int64(d.SharedOptin))
	w.open("cuda_compute_capability")
	w.number("major", int64(d.Major))
	w.number("minor", int64(d.Minor))
	w.word("feature_extension", featureExtension(d.Major))
	w.close()
	w.number("registers_per_core_limit", 65536)
	w.number("registers_per_block_limit", 65536)
	w.number("thread_dim_limit_x", 1024)
	w.number("thread_dim_limit_y", 1024)
	w.number("thread_dim_limit_z", 64)
	w.number("device_address_bits", 64)
	w.number("pcie_bandwidth", d.PCIe)
	if d.ECC {
		w.word("ecc_enabled", "true")
	}
	w.float("mem_clock_ghz", d.MemoryClock)
	w.number("reserved_shared_memory_per_block", 1024)
	w.number("max_blocks_per_multiprocessor", int64(d.Blocks))
	w.number("collective_memory_granularity", 2<<20)
}

// featureExtension is what XLA takes on a real card (GetComputeCapability in cuda_executor.cc): the
// chip's own instructions from sm_90 on. Its file for rtx6000pro says NONE, which would compile
// another program than the card runs.
func featureExtension(major int) string {
	if major >= 9 {
		return "ACCELERATED_FEATURES"
	}
	return "NONE"
}

// threeNumbers brings a version to the form that XLA parses, or gives the oldest one of use.
func threeNumbers(version string) string {
	parts := strings.SplitN(strings.TrimSpace(version), ".", 4)
	numbers := [3]string{"0", "0", "0"}
	for i, p := range parts[:min(3, len(parts))] {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil {
			return oldestCuDNN
		}
		numbers[i] = strconv.FormatUint(n, 10)
	}
	return strings.Join(numbers[:], ".")
}

func khz(ghz float32) int64 { return int64(float64(ghz)*1e6 + 0.5) }

// A protoText writes fields in the order they come; a zero is left out, as proto3 does.
type protoText struct {
	strings.Builder
	depth int
}

func (w *protoText) line(format string, args ...any) {
	w.WriteString(strings.Repeat("  ", w.depth))
	fmt.Fprintf(w, format+"\n", args...)
}

func (w *protoText) open(name string) {
	w.line("%s {", name)
	w.depth++
}

func (w *protoText) close() {
	w.depth--
	w.line("}")
}

func (w *protoText) text(name, value string) { w.line("%s: %q", name, value) }

func (w *protoText) word(name, value string) { w.line("%s: %s", name, value) }

func (w *protoText) number(name string, value int64) {
	if value != 0 {
		w.line("%s: %d", name, value)
	}
}

func (w *protoText) float(name string, value float32) {
	if value != 0 {
		w.line("%s: %s", name, strconv.FormatFloat(float64(value), 'g', -1, 32))
	}
}

// units writes a map of rates by type; double precision runs at the slow clock.
func (w *protoText) units(name string, rates []rate, clock, slow float32) {
	if len(rates) == 0 {
		return
	}
	w.open(name)
	for _, r := range rates {
		at := clock
		if r.Primitive == float64Type {
			at = slow
		}
		w.open("rate_infos")
		w.number("key", int64(r.Primitive))
		w.open("value")
		w.float("clock_rate_ghz", at)
		w.number("units_per_core", int64(r.Units))
		w.number("ops_per_clock", int64(r.Ops))
		w.close()
		w.close()
	}
	w.close()
}
