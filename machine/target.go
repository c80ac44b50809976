package machine

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
)

// Topology gives the shape as the plugin's option "topology" takes it: partitions x hosts in one x
// devices in a host. A partition is what XLA calls the hosts that share a fast interconnect: one
// NVLink domain.
func (t Cluster) Topology() string {
	if t.Hosts() == 0 && t.GPU.GPUsPerHost > 0 { // made by hand, with Count alone
		t = newCluster(t.GPU, t.Count)
	}
	return fmt.Sprintf("%dx%dx%d", t.Domains, t.HostsPerDomain, t.DevicesPerHost)
}

// Devices is how many the cluster has: Count.
func (t Cluster) Devices() int { return t.Count }

// MemoryBytes is the memory that a program may use on each device; 0 for the processor.
func (t Cluster) MemoryBytes() int64 { return t.GPU.UsableBytes }

// Versions of CUDA that a target claims. The plugin is the CUDA 13 build, and on a GPU it finds at
// least these; the files that XLA ships state 12.8, which disables 32-byte vectors on sm_100
// (gpu_fusible.cc requires 12.9) and, without a version, command buffers altogether.
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
func (t Cluster) ConfigText(cudnnVersion string) string {
	if t.CPU() {
		return ""
	}
	c, d := t.GPU, t.GPU.device
	model := ""
	if d.MemoryClock > 0 {
		model = fmt.Sprintf("sm_%s with %dB RAM, %d cores, %dKHz clock, %dKHz mem clock, %dB L2$",
			c.ComputeCapability, c.UsableBytes, d.Cores, khz(d.Clock), khz(d.MemoryClock), d.L2)
	}
	cuda := message{{"major", d.Major}, {"minor", d.Minor},
		{"feature_extension", featureExtension(d.Major)}}
	info := message{{"name", d.Name}, {"device_vendor", "NVIDIA Corporation"},
		{"platform_version", "Compute Capability " + c.ComputeCapability}, {"model_str", model},
		{"threads_per_block_limit", 1024}, {"threads_per_warp", 32}, {"shared_memory_per_block", 49152},
		{"shared_memory_per_core", d.Shared}, {"threads_per_core_limit", d.Threads},
		{"core_count", d.Cores}, {"fpus_per_core", d.FPUs}, {"block_dim_limit_x", 1<<31 - 1},
		{"block_dim_limit_y", 65535}, {"block_dim_limit_z", 65535}, {"memory_bandwidth", d.Bandwidth},
		{"l2_cache_size", d.L2}, {"clock_rate_ghz", d.Clock}, {"device_memory_size", c.UsableBytes},
		{"shared_memory_per_block_optin", d.SharedOptin}, {"cuda_compute_capability", cuda},
		{"registers_per_core_limit", 65536}, {"registers_per_block_limit", 65536},
		{"thread_dim_limit_x", 1024}, {"thread_dim_limit_y", 1024}, {"thread_dim_limit_z", 64},
		{"device_address_bits", 64}, {"pcie_bandwidth", d.PCIe}, {"ecc_enabled", d.ECC},
		{"mem_clock_ghz", d.MemoryClock}, {"reserved_shared_memory_per_block", 1024},
		{"max_blocks_per_multiprocessor", d.Blocks}, {"collective_memory_granularity", 2 << 20},
		{"scalar_unit_description", units(d.Scalar, d.Clock, d.Clock)},
		{"matrix_unit_description", units(d.Matrix, d.TensorClock, d.Clock)},
		{"driver_version", cudaVersion}, {"runtime_version", cudaVersion},
		{"compile_time_toolkit_version", cudaVersion}, {"dnn_version", threeNumbers(cudnnVersion)},
		{"cub_version", cubVersion}}
	if d.Links > 0 {
		info = append(info, field{"device_interconnect_info", message{{"active_links", d.Links}}})
	}
	return message{{"gpu_device_info", info}, {"platform_name", "CUDA"},
		{"device_description_str", d.Name}}.text("")
}

// featureExtension is what XLA detects on a real GPU (GetComputeCapability in cuda_executor.cc):
// the chip's own instructions from sm_90 on. XLA's file for rtx6000pro has NONE, which would
// compile another program than the GPU runs.
func featureExtension(major int) word {
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

// A message is the fields of a proto in the order in which they are written; a zero is left out, as
// proto3 does. A word is written without quotes.
type (
	message []field
	field   struct {
		name  string
		value any
	}
	word string
)

// text writes a message with so much before each line.
func (m message) text(before string) string {
	var b strings.Builder
	for _, f := range m {
		switch v := f.value.(type) {
		case message:
			if len(v) > 0 {
				fmt.Fprintf(&b, "%s%s {\n%s%[1]s}\n", before, f.name, v.text(before+"  "))
			}
		case float32:
			if v != 0 {
				fmt.Fprintf(&b, "%s%s: %s\n", before, f.name, strconv.FormatFloat(float64(v), 'g', -1, 32))
			}
		case string:
			if v != "" {
				fmt.Fprintf(&b, "%s%s: %q\n", before, f.name, v)
			}
		default:
			if !reflect.ValueOf(v).IsZero() {
				fmt.Fprintf(&b, "%s%s: %v\n", before, f.name, v)
			}
		}
	}
	return b.String()
}

// units gives rates by type; double precision runs at the slow clock.
func units(rates []rate, clock, slow float32) (list message) {
	for _, r := range rates {
		at := clock
		if r.Primitive == float64Type {
			at = slow
		}
		list = append(list, field{"rate_infos", message{{"key", r.Primitive}, {"value", message{
			{"clock_rate_ghz", at}, {"units_per_core", r.Units}, {"ops_per_clock", r.Ops}}}}})
	}
	return list
}
