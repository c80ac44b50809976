package machine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/golden"
	"github.com/deepwell/deepwell/internal/nvml"
)

// stub compiles the stand-in for NVML and gives its path.
func stub(t *testing.T, flags ...string) string {
	t.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler (cc) to build the stand-in for NVML with")
	}
	library := filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
	source := filepath.Join("..", "internal", "nvml", "testdata", "nvmlstub.c")
	args := append(flags, "-shared", "-fPIC", "-O1", "-o", library, source)
	if out, err := exec.Command(cc, args...).CombinedOutput(); err != nil {
		t.Fatalf("cc: %v\n%s", err, out)
	}
	return library
}

func probe(t *testing.T, machine string, o Options) *Machine {
	t.Helper()
	t.Setenv("NVMLSTUB", machine)
	o.Arch = "amd64"
	if o.Root == nil {
		o.Root = fstest.MapFS(dgx())
	}
	o.Engines = []Engine{{"cpu", "0.0.1", true}, {"cuda13", "0.12.0.1", false}}
	m, err := Probe(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestGoldens(t *testing.T) {
	library, missing := stub(t), filepath.Join(t.TempDir(), "none.so")
	meter := func(context.Context) (Measured, error) {
		return Measured{Engine: "cuda13", Devices: 8, DeviceCopy: 6_930e9, HostToDevice: 57_700e6,
			DeviceToHost: 55_100e6, AllReduce: 410e9, MatmulF32: 900e12, MatmulBF16: 1_850e12}, nil
	}
	for _, tt := range []struct {
		name, machine string
		options       Options
	}{
		{"dgx-b200", "b200", Options{NVML: library, Meter: meter}},
		{"mig", "mig", Options{NVML: library, Root: fstest.MapFS(plain(1))}},
		{"rtx", "rtx", Options{NVML: library, Root: fstest.MapFS(plain(2))}},
		{"uneven", "uneven", Options{NVML: library}},
		{"old", "old", Options{NVML: library}},
		{"identified", "gb200", Options{NVML: library, Identify: true}},
		{"nogpu", "", Options{NVML: missing, Root: fstest.MapFS(plain(0))}},
		{"nodriver", "", Options{NVML: missing, Root: fstest.MapFS(plain(2))}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := probe(t, tt.machine, tt.options)
			data, err := m.Marshal()
			if err != nil {
				t.Fatal(err)
			}
			golden.Compare(t, filepath.Join("testdata", tt.name+".json"), data)
			golden.Compare(t, filepath.Join("testdata", tt.name+".txt"), []byte(m.String()))
			again, err := Parse(data)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(m, again, cmpopts.EquateEmpty(),
				cmpopts.IgnoreUnexported(NIC{})); diff != "" {
				t.Errorf("reads back otherwise (-wrote +read):\n%s", diff)
			}
			if second, _ := again.Marshal(); !bytes.Equal(data, second) {
				t.Error("writes back otherwise")
			}
			if !tt.options.Identify && (strings.Contains(string(data), "dgx-17") ||
				strings.Contains(string(data), "GPU-0")) {
				t.Error("the description tells which host it was")
			}
		})
	}
}

func TestTopologyOfDGX(t *testing.T) {
	m := probe(t, "b200", Options{NVML: stub(t)})
	kinds := map[string]int{}
	for _, n := range m.Topology.Nodes {
		kinds[n.Kind]++
	}
	want := map[string]int{"numa": 2, "gpu": 8, "nvswitch": 1, "nic": 9, "network": 1}
	if diff := cmp.Diff(want, kinds); diff != "" {
		t.Errorf("nodes (-want +got):\n%s", diff)
	}
	for _, e := range []Edge{
		{A: "numa0", B: "numa1", Kind: "numa", Distance: 21},
		{A: "numa1", B: "gpu7", Kind: "pcie", BytesPerSecond: 63015384615},
		{A: "gpu7", B: "nvswitch0", Kind: "nvlink", BytesPerSecond: 900e9, Links: 18},
		{A: "numa1", B: "ibp220s0", Kind: "pcie", BytesPerSecond: 63015384615},
		{A: "ibp220s0", B: "network", Kind: "nic", BytesPerSecond: 50e9},
	} {
		if !slices.Contains(m.Topology.Edges, e) {
			t.Errorf("no edge %+v", e)
		}
	}
	for i, row := range m.Topology.Pairs {
		for j, rate := range row {
			if want := int64(900e9); i != j && rate != want {
				t.Errorf("pair %d %d: %d", i, j, rate)
			}
		}
	}
}

// TestOldDriverKeepsNVLink reads a driver that neither names the far end of a link nor answers for
// pairs: all links up must still mean NVLink between all.
func TestOldDriverKeepsNVLink(t *testing.T) {
	m := probe(t, "b200", Options{NVML: stub(t, "-DNVMLSTUB_BARE")})
	if got := m.Topology.Pairs[0][7]; got != 900e9 {
		t.Errorf("gpu0 reaches gpu7 at %d", got)
	}
	if m.GPUs[0].NUMA != 0 || m.GPUs[7].NUMA != 1 {
		t.Error("the NUMA node was not taken from sysfs")
	}
}

// TestDirectLinks reads GPUs that are wired to each other without switches, as in a V100 cube.
func TestDirectLinks(t *testing.T) {
	link := func(to string) nvml.Link {
		return nvml.Link{Active: true, Version: 3, MBps: 25781, Remote: nvml.RemoteGPU, PCI: to}
	}
	s := &nvml.Snapshot{
		Devices: []nvml.Device{
			{PCI: "0000:01:00.0", Links: []nvml.Link{link("0000:02:00.0"), link("0000:02:00.0")}},
			{PCI: "0000:02:00.0", Links: []nvml.Link{link("0000:01:00.0"), link("0000:01:00.0")}},
			{PCI: "0000:03:00.0", PCIeGen: 4, PCIeWidth: 16},
		},
		NVLink: [][]bool{{false, true, false}, {true, false, false}, {false, false, false}},
	}
	var gpus []GPU
	for i, d := range s.Devices {
		gpus = append(gpus, newGPU(i, d, s, tree{fstest.MapFS{}}, nil, false))
	}
	top := newTopology(Host{}, gpus, nil, s)
	want := Edge{A: "gpu0", B: "gpu1", Kind: "nvlink", BytesPerSecond: 50e9, Links: 2}
	if !slices.Contains(top.Edges, want) || top.Pairs[0][1] != 50e9 || top.Pairs[0][2] != 0 {
		t.Errorf("edges %+v, pairs %v", top.Edges, top.Pairs)
	}
}

func TestTopologyHolds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 9).Draw(t, "gpus")
		s := &nvml.Snapshot{}
		remotes := []nvml.Remote{nvml.RemoteUnknown, nvml.RemoteGPU, nvml.RemoteCPU,
			nvml.RemoteSwitch}
		for i := range n {
			d := nvml.Device{PCI: fmt.Sprintf("0000:%02x:00.0", i), PCIeGen: 5, PCIeWidth: 16,
				NUMA: rapid.IntRange(-1, 2).Draw(t, "numa")}
			for range rapid.IntRange(0, 3).Draw(t, "links") {
				d.Links = append(d.Links, nvml.Link{
					Active:  rapid.Bool().Draw(t, "active"),
					Version: rapid.IntRange(0, 6).Draw(t, "version"),
					MBps:    rapid.IntRange(0, 60000).Draw(t, "speed"),
					Remote:  rapid.SampledFrom(remotes).Draw(t, "remote"),
					PCI:     fmt.Sprintf("0000:%02x:00.0", rapid.IntRange(0, 12).Draw(t, "far")),
				})
			}
			s.Devices = append(s.Devices, d)
			s.NVLink = append(s.NVLink, make([]bool, n))
		}
		h := Host{NUMA: make([]NUMA, rapid.IntRange(0, 2).Draw(t, "nodes"))}
		for i := range h.NUMA {
			h.NUMA[i].ID = i
		}
		m := &Machine{Version: schema, Host: h}
		for i, d := range s.Devices {
			m.GPUs = append(m.GPUs, newGPU(i, d, s, tree{fstest.MapFS{}}, nil, false))
		}
		m.Topology = newTopology(h, m.GPUs, nil, s)
		data, err := m.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Parse(data); err != nil {
			t.Fatal(err)
		}
		for i, row := range m.Topology.Pairs {
			for j := range row {
				if row[j] != m.Topology.Pairs[j][i] || (i == j) != (row[j] == 0) {
					t.Fatalf("pairs %v", m.Topology.Pairs)
				}
			}
		}
		_ = m.String()
	})
}

func TestProbeFails(t *testing.T) {
	library := stub(t)
	for machine, want := range map[string]string{
		"notloaded": "NVML answered: driver not loaded",
		"mismatch":  "NVML answered: driver/library version mismatch",
	} {
		t.Setenv("NVMLSTUB", machine)
		_, err := Probe(t.Context(), Options{Root: fstest.MapFS(dgx()), NVML: library})
		if e := diag.From(err); e == nil || e.Code != diag.ProbeFailed || e.What != want || e.Fix == "" {
			t.Errorf("%s: %v", machine, err)
		}
		m, err := Probe(t.Context(), Options{Root: fstest.MapFS(dgx()), NVML: library, NoGPU: true})
		if err != nil || len(m.NICs) != 9 {
			t.Errorf("%s without GPUs: %v", machine, err)
		}
	}
	boom := errors.New("boom")
	_, err := Probe(t.Context(), Options{NoGPU: true, Meter: func(context.Context) (Measured, error) {
		return Measured{}, boom
	}})
	if !errors.Is(err, boom) {
		t.Errorf("the meter's error became %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Probe(ctx, Options{NoGPU: true}); diag.From(err).Code != diag.Canceled {
		t.Errorf("canceled: %v", err)
	}
}

func TestLostGPUIsNoted(t *testing.T) {
	m := probe(t, "lost", Options{NVML: stub(t)})
	want := "gpu5: nvmlDeviceGetHandleByIndex_v2: GPU is lost (NVML code 15)"
	if len(m.GPUs) != 8 || !slices.Contains(m.Notes, want) {
		t.Errorf("%d GPUs, notes %q", len(m.GPUs), m.Notes)
	}
}

func TestParseRefuses(t *testing.T) {
	for text, code := range map[string]diag.Code{
		`{"version":2}`: diag.MachineVersion,
		`{}`:            diag.MachineVersion,
		`{"version":1,"host":{},"gpus":[],"nics":[],"topology":{},"colour":1}`: diag.BadInput,
		`{"version":1}{}`:                                                 diag.BadInput,
		`{"version":1,"gpus":[{"index":3}]}`:                              diag.BadInput,
		`{"version":1,"topology":{"edges":[{"a":"x","b":"y"}]}}`:          diag.BadInput,
		`{"version":1,"topology":{"pairs":[[0]]}}`:                        diag.BadInput,
		`{"version":1,"gpus":[{"index":0}],"topology":{"pairs":[[0,1]]}}`: diag.BadInput,
		`[]`: diag.BadInput,
		``:   diag.BadInput,
	} {
		_, err := Parse([]byte(text))
		if e := diag.From(err); e == nil || e.Code != code || e.Fix == "" {
			t.Errorf("%s: %v, want %s", text, err, code)
		}
	}
}

// TestFirstVersionStillReads holds on to a file of version 1 as it was first written. It is never
// rewritten.
func TestFirstVersionStillReads(t *testing.T) {
	data, err := os.ReadFile(filepath.Join("testdata", "v1.json"))
	if err != nil {
		t.Fatal(err)
	}
	m, err := Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	if len(m.GPUs) != 8 || m.GPUs[7].Model != "b200" || m.Measured.AllReduce != 410e9 ||
		m.Topology.Pairs[0][7] != 900e9 || m.NICs[8].RDMA != "mlx5_7" {
		t.Errorf("got %+v", m)
	}
}

func FuzzParse(f *testing.F) {
	for _, name := range []string{"v1.json", "mig.json", "nogpu.json"} {
		data, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := Parse(data)
		if err != nil {
			return
		}
		_ = m.String()
		again, err := m.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Parse(again); err != nil {
			t.Fatalf("%v\n%s", err, again)
		}
	})
}

// TestProbeHere examines the host that runs the tests, whatever it is.
func TestProbeHere(t *testing.T) {
	m, err := Probe(t.Context(), Options{NoGPU: true})
	if err != nil {
		t.Fatal(err)
	}
	if m.Host.CPU.Threads < 1 || m.Host.MemoryBytes < 1<<20 {
		t.Skipf("no Linux host: %+v", m.Host)
	}
}
