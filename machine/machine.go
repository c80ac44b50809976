package machine

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/nvml"
	"github.com/deepwell/deepwell/internal/strictjson"
)

// schema is the version of the JSON form. A change that an older binary would misread raises it.
const schema = 1

// A Machine is one host: what it has, how it is wired, and how fast it was measured to be.
type Machine struct {
	Version  int       `json:"version"`
	Host     Host      `json:"host"`
	Driver   string    `json:"driver,omitempty"` // NVIDIA's, such as 580.95.05
	CUDA     string    `json:"cuda,omitempty"`   // the newest that the driver runs
	NVML     string    `json:"nvml,omitempty"`
	GPUs     []GPU     `json:"gpus"`
	NICs     []NIC     `json:"nics"`
	Engines  []Engine  `json:"engines,omitempty"`
	Topology Topology  `json:"topology"`
	Measured *Measured `json:"measured,omitempty"`
	Notes    []string  `json:"notes,omitempty"` // what a person should look at
}

// An Engine is a compiler and runtime that Deepwell can use, installed here or not.
type Engine struct {
	Name      string `json:"name"`
	Version   string `json:"version,omitempty"`
	Installed bool   `json:"installed"`
}

// Measured holds rates that were timed on this host, as opposed to those on a data sheet. Bytes and
// floating-point operations are by the second; 0 was not measured.
type Measured struct {
	Engine       string `json:"engine"`
	Devices      int    `json:"devices"`
	DeviceCopy   int64  `json:"device_copy_bytes,omitempty"` // within one device's memory
	HostToDevice int64  `json:"host_to_device_bytes,omitempty"`
	DeviceToHost int64  `json:"device_to_host_bytes,omitempty"`
	AllReduce    int64  `json:"all_reduce_bytes,omitempty"` // of the buffer, across all devices
	MatmulF32    int64  `json:"matmul_f32_flops,omitempty"` // of one device
	MatmulBF16   int64  `json:"matmul_bf16_flops,omitempty"`
}

// Options say what Probe looks at. The zero value is the host at hand.
type Options struct {
	Root     fs.FS    // the host's file system; nil means /
	Arch     string   // the processor's GOARCH; "" means this program's
	NVML     string   // path of the library; "" lets the loader find it
	NoGPU    bool     // leave the NVIDIA driver alone
	Identify bool     // also record the host's name and the GPUs' UUIDs
	Engines  []Engine // as the caller found them
	// Meter times the host, if set. The caller connects one to an engine; this package only keeps the
	// result.
	Meter func(ctx context.Context) (Measured, error)
}

// Probe examines the host.
func Probe(ctx context.Context, o Options) (*Machine, error) {
	if o.Root == nil {
		o.Root = os.DirFS("/")
	}
	if o.Arch == "" {
		o.Arch = runtime.GOARCH
	}
	t := tree{o.Root}
	m := &Machine{
		Version: schema,
		Host:    readHost(t, o.Arch, o.Identify),
		NICs:    readNICs(t),
		Engines: slices.Clone(o.Engines),
	}
	var s *nvml.Snapshot
	why := "the NVIDIA driver was not asked"
	if !o.NoGPU {
		var err error
		if s, why, err = readGPUs(o.NVML); err != nil {
			return nil, err
		}
	}
	if s != nil {
		m.Driver, m.CUDA, m.NVML = s.Driver, s.CUDA, s.NVML
		for i, d := range s.Devices {
			m.GPUs = append(m.GPUs, newGPU(i, d, s, t, m.NICs, o.Identify))
		}
	}
	m.Topology = newTopology(m.Host, m.GPUs, m.NICs, s)
	m.remark(s, onBus(t), why)
	if o.Meter != nil {
		measured, err := o.Meter(ctx)
		if err != nil {
			return nil, err
		}
		m.Measured = &measured
	}
	if err := ctx.Err(); err != nil {
		return nil, diag.New(diag.Canceled, "stopped while examining the machine").Wrap(err)
	}
	return m, nil
}

// remark notes what is out of order and what hides a part of the machine.
func (m *Machine) remark(s *nvml.Snapshot, bus int, why string) {
	note := func(format string, args ...any) {
		m.Notes = append(m.Notes, fmt.Sprintf(format, args...))
	}
	if s == nil {
		if bus > 0 {
			note("%s on the PCI bus, but %s", plural(bus, "NVIDIA GPU"), why)
		}
		return
	}
	if bus > len(m.GPUs) {
		note("%s on the PCI bus, but the driver shows %d", plural(bus, "NVIDIA GPU"), len(m.GPUs))
	}
	if err := CheckDriver("cuda13", m.Driver); err != nil && len(m.GPUs) > 0 {
		note("%s", diag.From(err).What)
	}
	most := lists.Max(m.GPUs, 0, activeLinks)
	for i, g := range m.GPUs {
		for _, f := range s.Devices[i].Faults {
			note("gpu%d: %v", i, f)
		}
		if n := activeLinks(g); n < most && g.MIG != "on" && len(s.Devices[i].Faults) == 0 {
			note("gpu%d has %d of %d NVLinks up", i, n, most)
		}
		if g.PCIeLanes > 0 && g.PCIeLanes < g.PCIeLanesMax {
			note("gpu%d runs on %d of %d PCIe lanes", i, g.PCIeLanes, g.PCIeLanesMax)
		}
		if g.MIG == "on" {
			note("gpu%d is partitioned by MIG: its instances cannot reach other GPUs", i)
		}
	}
}

func activeLinks(g GPU) int {
	n := 0
	for _, l := range g.Links {
		if l.To != "down" {
			n += l.Count
		}
	}
	return n
}

// Marshal gives the machine as JSON, the same bytes for the same machine.
func (m *Machine) Marshal() ([]byte, error) {
	c := *m
	// Lists that a program iterates over are never null.
	c.GPUs, c.NICs = append([]GPU{}, c.GPUs...), append([]NIC{}, c.NICs...)
	c.Topology.Nodes = append([]Node{}, c.Topology.Nodes...)
	c.Topology.Edges = append([]Edge{}, c.Topology.Edges...)
	b, err := json.MarshalIndent(&c, "", " ")
	if err != nil {
		return nil, err
	}
	return append(b, '\n'), nil
}

// Parse reads what Marshal writes. A version that this binary does not know is refused, and so is
// a field, since writing the file back would lose it.
func Parse(data []byte) (*Machine, error) {
	bad := func(err error) error {
		return diag.New(diag.BadInput, "this is not a machine file").Wrap(err).
			Try("deepwell probe writes one")
	}
	var head struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(data, &head); err != nil {
		return nil, bad(err)
	}
	if head.Version != schema {
		return nil, diag.New(diag.MachineVersion, "the machine file has version %d; this binary "+
			"reads %d", head.Version, schema).Try("write it anew with deepwell probe")
	}
	m := &Machine{}
	if err := strictjson.Decode(data, m); err != nil {
		return nil, bad(err)
	}
	if err := m.validate(); err != nil {
		return nil, bad(err)
	}
	return m, nil
}

// validate holds what code that reads a machine relies on.
func (m *Machine) validate() error {
	for i, g := range m.GPUs {
		if g.Index != i {
			return fmt.Errorf("GPU %d is in place %d", g.Index, i)
		}
	}
	for _, e := range m.Topology.Edges {
		for _, end := range []string{e.A, e.B} {
			if !slices.ContainsFunc(m.Topology.Nodes, func(n Node) bool { return n.ID == end }) {
				return fmt.Errorf("an edge names %q, which is no node", end)
			}
		}
	}
	if p := m.Topology.Pairs; p != nil && len(p) != len(m.GPUs) {
		return fmt.Errorf("%d rows of pairs for %d GPUs", len(p), len(m.GPUs))
	}
	for _, row := range m.Topology.Pairs {
		if len(row) != len(m.GPUs) {
			return fmt.Errorf("%d pairs in a row for %d GPUs", len(row), len(m.GPUs))
		}
	}
	return nil
}
