package machine

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/nvml"
)

// A GPU is one NVIDIA device of the host.
type GPU struct {
	Index int    `json:"index"`
	Name  string `json:"name"`           // as the driver gives it
	Model string `json:"card,omitempty"` // its name in the catalogue, where it has one
	UUID  string `json:"uuid,omitempty"` // only where Options.Identify asks for it
	PCI   string `json:"pci,omitempty"`
	NUMA  int    `json:"numa"` // -1 where not known

	// "Blackwell" is two different chips, so the compute capability decides. TensorCore names the
	// family of matrix instructions: tcgen05 (sm_100, sm_103), mma (sm_120), wgmma (sm_90).
	ComputeCapability string `json:"compute_capability,omitempty"`
	Arch              string `json:"arch,omitempty"`
	TensorCore        string `json:"tensor_core,omitempty"`
	// Formats are those that its tensor cores multiply; Missing says why another is not there.
	Formats []string          `json:"formats,omitempty"`
	Missing map[string]string `json:"missing,omitempty"`

	MemoryBytes   int64 `json:"memory_bytes,omitempty"`
	ReservedBytes int64 `json:"reserved_bytes,omitempty"` // kept by the driver
	FreeBytes     int64 `json:"free_bytes,omitempty"`

	PCIeGen        int `json:"pcie_gen,omitempty"` // as negotiated now; idle GPUs slow down
	PCIeLanes      int `json:"pcie_lanes,omitempty"`
	PCIeGenMax     int `json:"pcie_gen_max,omitempty"`
	PCIeLanesMax   int `json:"pcie_lanes_max,omitempty"`
	PowerWatts     int `json:"power_watts,omitempty"` // the limit in force
	ClockMHz       int `json:"clock_mhz,omitempty"`   // the highest
	MemoryClockMHz int `json:"memory_clock_mhz,omitempty"`

	// What changes while a GPU works: the clock now, why it is held back, ECC errors since the driver
	// was loaded, and whether rows of memory wait to be replaced, or cannot be.
	ClockNowMHz    int      `json:"clock_now_mhz,omitempty"`
	Throttled      []string `json:"throttled,omitempty"`
	TemperatureC   int      `json:"temperature_c,omitempty"`
	ECCCorrected   int64    `json:"ecc_corrected,omitempty"`
	ECCUncorrected int64    `json:"ecc_uncorrected,omitempty"`
	Remap          string   `json:"remap,omitempty"` // pending or failed

	ECC         string     `json:"ecc,omitempty"` // on, off, or nothing where not known
	Persistence string     `json:"persistence,omitempty"`
	MIG         string     `json:"mig,omitempty"`
	Instances   []Instance `json:"instances,omitempty"`

	Links        []Link   `json:"links,omitempty"`
	FabricDomain string   `json:"fabric_domain,omitempty"` // of a rack: cluster/clique
	NICs         []string `json:"nics,omitempty"`          // behind the same PCIe switch
}

// An Instance is a MIG partition of a GPU.
type Instance struct {
	Profile     string `json:"profile"` // 1g.10gb
	UUID        string `json:"uuid,omitempty"`
	MemoryBytes int64  `json:"memory_bytes"`
	Cores       int    `json:"cores"` // streaming multiprocessors
}

// A Link stands for several equal NVLinks to the same place.
type Link struct {
	Count          int    `json:"count"`
	Version        int    `json:"version,omitempty"`
	BytesPerSecond int64  `json:"bytes_per_second,omitempty"` // of one, in one direction
	To             string `json:"to"`                         // switch, cpu, gpu3, unknown or down
}

// throttles are the reasons of nvml.h for which a clock is held back, by bit. Left out are an idle
// GPU, clocks that the user has set, and the power limit, at which any large GEMM is.
var throttles = []struct {
	bit  uint64
	name string
}{
	{0x08, "hardware slowdown"}, {0x20, "software thermal slowdown"},
	{0x40, "hardware thermal slowdown"}, {0x80, "power brake"},
}

func throttled(reasons uint64) (list []string) {
	for _, t := range throttles {
		if reasons&t.bit != 0 {
			list = append(list, t.name)
		}
	}
	return list
}

// readGPUs asks NVML. No driver at all is no error: the snapshot is then nil and why says so.
func readGPUs(library string) (s *nvml.Snapshot, why string, err error) {
	s, err = nvml.Read(library)
	if errors.Is(err, nvml.ErrNoLibrary) {
		return nil, "libnvidia-ml.so.1 is not there", nil
	}
	if err == nil {
		return s, "", nil
	}
	failed := diag.New(diag.ProbeFailed, "the NVIDIA driver cannot be asked").Wrap(err).
		Try("check that nvidia-smi works")
	if e, ok := errors.AsType[*nvml.Error](err); ok {
		failed.What = "NVML answered: " + strings.ToLower(e.Text)
		switch e.Code {
		case nvml.CodeNotLoaded:
			failed = failed.Try("load the kernel module: sudo modprobe nvidia")
		case nvml.CodeMismatch:
			failed = failed.Try("reboot: the driver was updated and the old module still runs")
		}
	}
	return nil, "", failed
}

// pcie is what the link to the host carries in one direction once it is awake.
func (g GPU) pcie() int64 {
	return pcieBytes(max(g.PCIeGen, g.PCIeGenMax), max(g.PCIeLanes, g.PCIeLanesMax))
}

// newGPU says in our words what NVML found.
func newGPU(index int, d nvml.Device, s *nvml.Snapshot, t tree, nics []NIC, identify bool) GPU {
	g := GPU{
		Index: index, Name: d.Name, PCI: d.PCI, NUMA: d.NUMA,
		MemoryBytes: d.TotalBytes, ReservedBytes: d.ReservedBytes, FreeBytes: d.FreeBytes,
		PCIeGen: d.PCIeGen, PCIeLanes: d.PCIeWidth,
		PCIeGenMax: d.PCIeMaxGen, PCIeLanesMax: d.PCIeMaxWidth,
		PowerWatts: d.PowerLimitMilliwatts / 1000,
		ClockMHz:   d.SMClockMHz, MemoryClockMHz: d.MemoryClockMHz,
		ClockNowMHz: d.SMClockNowMHz, Throttled: throttled(d.Throttle), TemperatureC: d.TemperatureC,
		ECCCorrected: d.ECCCorrected, ECCUncorrected: d.ECCUncorrected,
		ECC: onOff(d.ECC), Persistence: onOff(d.Persistence), MIG: onOff(d.MIG),
		Links: bundle(d.Links, s),
	}
	switch {
	case d.RemapFailed:
		g.Remap = "failed"
	case d.RemapPending:
		g.Remap = "pending"
	}
	if gpu, err := FindGPUModel(d.Name); err == nil {
		g.Model = gpu.Name
	}
	if d.Fabric.Ready && strings.Trim(d.Fabric.Cluster, "0-") != "" {
		g.FabricDomain = fmt.Sprintf("%s/%d", d.Fabric.Cluster, d.Fabric.Clique)
	}
	g.formats(d.Major, d.Minor)
	for _, part := range d.Instances {
		_, profile, _ := strings.Cut(part.Name, " MIG ")
		in := Instance{Profile: profile, MemoryBytes: part.MemoryBytes, Cores: part.Multiprocessors}
		if identify {
			in.UUID = part.UUID
		}
		g.Instances = append(g.Instances, in)
	}
	if identify {
		g.UUID = d.UUID
	}
	if d.PCI != "" {
		at := path.Join("sys/bus/pci/devices", d.PCI)
		// The kernel and NVML rarely differ; where they do, processes are placed by the kernel's.
		if node, ok := t.number(path.Join(at, "numa_node")); ok && node >= 0 && node < 1<<16 {
			g.NUMA = int(node)
		}
		g.NICs = nearNICs(t.resolve(at), nics)
	}
	return g
}

func onOff(s nvml.State) string {
	return map[nvml.State]string{nvml.On: "on", nvml.Off: "off"}[s]
}

// formats says what the tensor cores of a compute capability multiply.
func (g *GPU) formats(major, minor int) {
	if major == 0 {
		return // not known
	}
	g.ComputeCapability = fmt.Sprintf("%d.%d", major, minor)
	g.Arch = fmt.Sprintf("sm_%d%d", major, minor)
	switch {
	case major >= 12:
		g.TensorCore = "mma"
	case major >= 10:
		g.TensorCore = "tcgen05"
	case major == 9:
		g.TensorCore = "wgmma"
	default:
		g.TensorCore = "mma"
	}
	for _, f := range []struct {
		name       string
		has        bool
		since, why string
	}{
		{"bf16", major >= 8, "sm_80", "bf16 products"},
		{"fp8", major*10+minor >= 89, "sm_89", "FP8 products"},
		{"mxfp8", major >= 10, "sm_100", "products with a scale for each block"},
		{"nvfp4", major >= 10, "sm_100", "FP4 products"},
	} {
		if f.has {
			g.Formats = append(g.Formats, f.name)
			continue
		}
		if g.Missing == nil {
			g.Missing = map[string]string{}
		}
		g.Missing[f.name] = fmt.Sprintf("%s has no %s; they came with %s", g.Arch, f.why, f.since)
	}
}

// nominal is the payload rate of one NVLink in one direction by generation, in bytes a second. The
// driver tells the rate of the wire, which includes forward error correction from generation 4 on:
// 26.562 GB/s for 25 and 53.125 for 50.
var nominal = map[int]int64{2: 25 * giga, 3: 25 * giga, 4: 25 * giga, 5: 50 * giga}

// bundle counts links that are alike.
func bundle(links []nvml.Link, s *nvml.Snapshot) []Link {
	var out []Link
	for _, l := range links {
		b := Link{Count: 1, Version: l.Version, To: "down"}
		if l.Active {
			b.To = destination(l, s)
			b.BytesPerSecond = int64(l.MBps) * 1e6
			if n := nominal[l.Version]; n > 0 && (b.BytesPerSecond == 0 || b.BytesPerSecond > n) {
				b.BytesPerSecond = n
			}
		}
		if i := slices.IndexFunc(out, func(o Link) bool {
			o.Count = 1
			return o == b
		}); i >= 0 {
			out[i].Count++
		} else {
			out = append(out, b)
		}
	}
	return out
}

func destination(l nvml.Link, s *nvml.Snapshot) string {
	for i, d := range s.Devices {
		if l.PCI != "" && l.PCI == d.PCI {
			return fmt.Sprintf("gpu%d", i)
		}
	}
	known := map[nvml.Remote]string{nvml.RemoteSwitch: "switch", nvml.RemoteCPU: "cpu"}
	return cmp.Or(known[l.Remote], "unknown")
}

// onBus counts the NVIDIA GPUs that the PCI bus has, driver or not: devices of vendor 0x10de that
// are a display or 3D controller (class 03).
func onBus(t tree) int {
	n := 0
	for _, name := range t.list("sys/bus/pci/devices") {
		dir := path.Join("sys/bus/pci/devices", name)
		class := t.text(path.Join(dir, "class"))
		if t.text(path.Join(dir, "vendor")) == "0x10de" && strings.HasPrefix(class, "0x03") {
			n++
		}
	}
	return n
}
