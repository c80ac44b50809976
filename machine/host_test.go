package machine

import (
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// A made is a host's file system in the making.
type made fstest.MapFS

func (m made) file(name, text string) { m[name] = &fstest.MapFile{Data: []byte(text + "\n")} }

// link makes a symbolic link with the shortest relative way, as sysfs does.
func (m made) link(name, to string) {
	up := strings.Repeat("../", strings.Count(name, "/"))
	m[name] = &fstest.MapFile{Data: []byte(up + to), Mode: fs.ModeSymlink}
}

// pci makes a PCI function below the given bridges and gives its place.
func (m made) pci(bridges, address, vendor, class string, numa int) string {
	at := path.Join("sys/devices", bridges, address)
	m.file(at+"/vendor", vendor)
	m.file(at+"/class", class)
	m.file(at+"/numa_node", fmt.Sprint(numa))
	m.file(at+"/current_link_speed", "32.0 GT/s PCIe")
	m.file(at+"/current_link_width", "16")
	m.link("sys/bus/pci/devices/"+address, at)
	return at
}

// nic makes a network function with an interface.
func (m made) nic(at, name, driver, speed, kind string) {
	dir := path.Join(at, "net", name)
	m.file(dir+"/operstate", "up")
	m.file(dir+"/type", kind)
	if speed != "" {
		m.file(dir+"/speed", speed)
	}
	m.link(dir+"/device", at)
	m.link("sys/class/net/"+name, dir)
	m.link(at+"/driver", "sys/bus/pci/drivers/"+driver)
}

// plain is a small host of one processor with some GPUs in its slots.
func plain(gpus int) made {
	m := made{}
	m.file("etc/os-release", "PRETTY_NAME=\"Debian GNU/Linux 13 (trixie)\"")
	m.file("proc/sys/kernel/osrelease", "6.12.48+deb13-amd64")
	m.file("proc/sys/kernel/hostname", "bench")
	m.file("proc/meminfo", "MemTotal: 131881024 kB\nMemAvailable: 126000000 kB")
	var cpuinfo strings.Builder
	for i := range 32 {
		fmt.Fprintf(&cpuinfo, "processor : %d\nmodel name : AMD EPYC 9124 16-Core Processor\n"+
			"physical id : 0\ncore id : %d\nflags : sse2 avx2 avx512f avx512_bf16\n\n", i, i%16)
	}
	m.file("proc/cpuinfo", cpuinfo.String())
	m.file("sys/devices/system/node/node0/cpulist", "0-31")
	m.file("sys/devices/system/node/node0/distance", "10")
	for _, bus := range []string{"1b", "43"}[:gpus] {
		m.pci("pci0000:"+bus, "0000:"+bus+":00.0", "0x10de", "0x030000", 0)
	}
	at := m.pci("pci0000:c0", "0000:c1:00.0", "0x15b3", "0x020000", 0)
	m.nic(at, "enp193s0np0", "mlx5_core", "25000", "1")
	m.rdma(at, "mlx5_0", "Ethernet", "25 Gb/sec (1X EDR)")
	return m
}

// dgx is a host like a DGX B200: two processors of 56 cores, eight GPUs, each behind a PCIe switch
// with a ConnectX-7 of 400 Gb/s, and a slow management NIC.
func dgx() made {
	m := made{}
	m.file("etc/os-release", "NAME=\"Ubuntu\"\nPRETTY_NAME=\"Ubuntu 24.04.3 LTS\"")
	m.file("proc/sys/kernel/osrelease", "6.8.0-79-generic")
	m.file("proc/sys/kernel/hostname", "dgx-17")
	m.file("proc/meminfo", "MemTotal:       2113390652 kB\nMemFree:        2000000000 kB\n"+
		"MemAvailable:   2063120552 kB\nHugePages_Total:    1024\nHugePages_Free:     1000\n"+
		"Hugepagesize:       2048 kB")
	m.file("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
	m.file("sys/fs/cgroup/memory.max", "max")
	var cpuinfo strings.Builder
	for i := range 224 {
		fmt.Fprintf(&cpuinfo, "processor\t: %d\nmodel name\t: INTEL(R) XEON(R) PLATINUM 8570\n"+
			"physical id\t: %d\ncore id\t\t: %d\n"+
			"flags\t\t: fpu sse2 avx2 avx512f avx512_bf16 amx_bf16 amx_tile amx_int8\n\n",
			i, i/56%2, i%56)
	}
	m.file("proc/cpuinfo", cpuinfo.String())
	for i, cpus := range []string{"0-55,112-167", "56-111,168-223"} {
		dir := fmt.Sprintf("sys/devices/system/node/node%d", i)
		m.file(dir+"/cpulist", cpus)
		m.file(dir+"/meminfo", fmt.Sprintf("Node %d MemTotal:       1056695326 kB", i))
		m.file(dir+"/distance", []string{"10 21", "21 10"}[i])
	}
	m.file("sys/devices/system/node/online", "0-1")
	gpus := []int{0x1b, 0x43, 0x52, 0x61, 0x9d, 0xc3, 0xd1, 0xdf}
	for i, bus := range gpus {
		root := bus - 6
		bridges := fmt.Sprintf("pci0000:%02x/0000:%02x:01.0/0000:%02x:00.0", root, root, root+1)
		m.pci(bridges+fmt.Sprintf("/0000:%02x:00.0", bus-4), fmt.Sprintf("0000:%02x:00.0", bus),
			"0x10de", "0x030200", i/4)
		at := m.pci(bridges+fmt.Sprintf("/0000:%02x:01.0", bus-4),
			fmt.Sprintf("0000:%02x:00.0", bus-3), "0x15b3", "0x020700", i/4)
		m.nic(at, fmt.Sprintf("ibp%ds0", bus-3), "mlx5_core", "", "32")
		m.rdma(at, fmt.Sprintf("mlx5_%d", i), "InfiniBand", "400 Gb/sec (4X NDR)")
	}
	at := m.pci("pci0000:00/0000:00:1c.0", "0000:02:00.0", "0x8086", "0x020000", 0)
	m.file(at+"/current_link_speed", "8.0 GT/s PCIe")
	m.file(at+"/current_link_width", "4")
	m.nic(at, "eno3", "ixgbe", "10000", "1")
	// What must not be listed: a virtual function of the first ConnectX, loopback and a bridge.
	vf := m.pci("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0", "0000:18:00.1", "0x15b3",
		"0x020700", 0)
	m.file(vf+"/physfn/vendor", "0x15b3")
	m.nic(vf, "ibp24s0v0", "mlx5_core", "", "32")
	for _, name := range []string{"lo", "docker0"} {
		m.file("sys/devices/virtual/net/"+name+"/type", "1")
		m.link("sys/class/net/"+name, "sys/devices/virtual/net/"+name)
	}
	return m
}

func (m made) rdma(at, name, layer, rate string) {
	dir := path.Join(at, "infiniband", name)
	m.file(dir+"/ports/1/link_layer", layer)
	m.file(dir+"/ports/1/state", "4: ACTIVE")
	m.file(dir+"/ports/1/rate", rate)
	m.link(dir+"/device", at)
	m.link("sys/class/infiniband/"+name, dir)
}

func TestReadNICs(t *testing.T) {
	nics := readNICs(tree{fstest.MapFS(dgx())})
	if len(nics) != 9 {
		t.Fatalf("%d NICs: %+v", len(nics), nics)
	}
	want := NIC{Name: "ibp24s0", RDMA: "mlx5_0", Link: "infiniband", Driver: "mlx5_core", Up: true,
		BytesPerSecond: 50e9, PCI: "0000:18:00.0", PCIeGen: 5, PCIeLanes: 16, NUMA: 0,
		place: "sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:18:00.0"}
	if diff := cmp.Diff(want, nics[1], cmp.AllowUnexported(NIC{})); diff != "" {
		t.Errorf("second NIC (-want +got):\n%s", diff)
	}
	if n := nics[0]; n.Name != "eno3" || n.RDMA != "" || n.BytesPerSecond != 1250e6 || n.PCIeGen != 3 {
		t.Errorf("first NIC: %+v", n)
	}
}

// TestReadNICsOfOtherHosts covers RDMA devices without an interface, paravirtual adapters, RoCE,
// and ports that are down.
func TestReadNICsOfOtherHosts(t *testing.T) {
	m := made{}
	at := m.pci("pci0000:10", "0000:10:00.0", "0x1d0f", "0x020000", -1)
	m.rdma(at, "rdmap16s0", "Unspecified", "200 Gb/sec (4X HDR)")
	at = m.pci("pci0000:00", "0000:00:03.0", "0x1af4", "0x020000", 0)
	m.nic(at+"/virtio1", "eth0", "virtio_net", "-1", "1")
	at = m.pci("pci0000:20", "0000:20:00.0", "0x15b3", "0x020000", 1)
	m.nic(at, "enp32s0", "mlx5_core", "400000", "1")
	m.rdma(at, "mlx5_0", "Ethernet", "400 Gb/sec (4X NDR)")
	m.file(at+"/net/enp32s0/operstate", "down")
	m.file(at+"/infiniband/mlx5_0/ports/1/state", "1: DOWN")
	var got []string
	for _, n := range readNICs(tree{fstest.MapFS(m)}) {
		got = append(got, fmt.Sprint(n.Name, " ", n.RDMA, " ", n.Link, " ", n.Up, " ",
			n.BytesPerSecond, " ", n.PCI, " ", n.NUMA))
	}
	want := []string{
		"eth0  ethernet true 0 0000:00:03.0 -1",
		"rdmap16s0 rdmap16s0 unspecified true 25000000000 0000:10:00.0 -1",
		"enp32s0 mlx5_0 ethernet false 50000000000 0000:20:00.0 1",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestNearNICs(t *testing.T) {
	at := tree{fstest.MapFS(dgx())}
	nics := readNICs(at)
	for bus, want := range map[string][]string{
		"0000:1b:00.0": {"ibp24s0"}, "0000:df:00.0": {"ibp220s0"}, "0000:00:00.0": nil,
	} {
		got := nearNICs(at.resolve("sys/bus/pci/devices/"+bus), nics)
		if !slices.Equal(got, want) {
			t.Errorf("%s: near %v, want %v", bus, got, want)
		}
	}
}

// TestGrace reads a host of two Grace processors, whose cpuinfo tells neither socket nor model.
func TestGrace(t *testing.T) {
	m := made{}
	var cpuinfo strings.Builder
	for i := range 144 {
		fmt.Fprintf(&cpuinfo, "processor\t: %d\nFeatures\t: fp asimd sve sve2 i8mm bf16 svebf16\n"+
			"CPU implementer\t: 0x41\nCPU part\t: 0xd4f\n\n", i)
		dir := fmt.Sprintf("sys/devices/system/cpu/cpu%d/topology", i)
		m.file(dir+"/physical_package_id", fmt.Sprint(i/72))
		m.file(dir+"/core_id", fmt.Sprint(i%72))
	}
	m.file("sys/devices/system/cpu/cpufreq/policy0", "x")
	m.file("proc/cpuinfo", cpuinfo.String())
	m.file("proc/meminfo", "MemTotal: 1000000 kB")
	m.file("sys/fs/cgroup/memory.max", "536870912")
	h := readHost(tree{fstest.MapFS(m)}, "arm64", false)
	want := CPU{Model: "Arm Neoverse V2", Sockets: 2, Cores: 144, Threads: 144,
		Flags: []string{"asimd", "bf16", "i8mm", "sve", "sve2", "svebf16"}}
	if diff := cmp.Diff(want, h.CPU); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if h.LimitBytes != 512<<20 || h.Name != "" {
		t.Errorf("limit %d, name %q", h.LimitBytes, h.Name)
	}
}

func TestEmptyHost(t *testing.T) {
	h := readHost(tree{fstest.MapFS{}}, "amd64", true)
	if diff := cmp.Diff(Host{Arch: "amd64", CPU: CPU{Sockets: 1}}, h); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestPCIeBytes(t *testing.T) {
	for _, tt := range []struct {
		gen, lanes int
		want       float64
	}{{1, 16, 4e9}, {3, 16, 15.754e9}, {4, 16, 31.508e9}, {5, 16, 63.015e9}, {6, 16, 121e9},
		{0, 16, 0}, {5, 0, 0}, {9, 16, 0}} {
		got := float64(pcieBytes(tt.gen, tt.lanes))
		if got < tt.want*0.9999 || got > tt.want*1.0001 {
			t.Errorf("generation %d x%d: %.0f", tt.gen, tt.lanes, got)
		}
	}
	for speed, want := range map[string]int{"32.0 GT/s PCIe": 5, "2.5 GT/s PCIe": 1, "Unknown": 0,
		"64.0 GT/s PCIe": 6, "": 0} {
		if got := pcieGeneration(speed); got != want {
			t.Errorf("%q is generation %d", speed, got)
		}
	}
}

func TestNaturalIsAnOrder(t *testing.T) {
	names := []string{"eth10", "eth2", "mlx5_10", "mlx5_2", "eth"}
	slices.SortFunc(names, natural)
	if want := []string{"eth", "eth2", "eth10", "mlx5_2", "mlx5_10"}; !slices.Equal(names, want) {
		t.Errorf("sorted: %v", names)
	}
	name := rapid.StringMatching(`[a-c]{0,2}[0-9]{0,3}[a-c]?`)
	rapid.Check(t, func(t *rapid.T) {
		a, b, c := name.Draw(t, "a"), name.Draw(t, "b"), name.Draw(t, "c")
		if sign(natural(a, b)) != -sign(natural(b, a)) {
			t.Fatalf("%q and %q: %d and %d", a, b, natural(a, b), natural(b, a))
		}
		if natural(a, b) <= 0 && natural(b, c) <= 0 && natural(a, c) > 0 {
			t.Fatalf("%q <= %q <= %q, but not across", a, b, c)
		}
	})
}

func sign(n int) int { return max(-1, min(1, n)) }

func FuzzHostFiles(f *testing.F) {
	f.Add("processor: 0\nphysical id: 0\ncore id: 0\nflags: avx2\n", "MemTotal: 5 kB\n", "10 21",
		"400 Gb/sec")
	f.Add("processor\nprocessor", "MemTotal: -5 kB\nMemTotal: 99999999999999999999 kB", "x", "NaN")
	f.Fuzz(func(t *testing.T, cpuinfo, meminfo, distance, rate string) {
		m := dgx()
		m.file("proc/cpuinfo", cpuinfo)
		m.file("proc/meminfo", meminfo)
		m.file("etc/os-release", cpuinfo)
		m.file("sys/devices/system/node/node1/distance", distance)
		m.file("sys/class/infiniband/mlx5_0/ports/1/rate", rate)
		h := readHost(tree{fstest.MapFS(m)}, "amd64", true)
		if h.MemoryBytes < 0 || h.CPU.Cores < 0 || h.CPU.Sockets < 1 {
			t.Fatalf("%+v", h)
		}
		for _, n := range readNICs(tree{fstest.MapFS(m)}) {
			if n.BytesPerSecond < 0 || n.Name == "" {
				t.Fatalf("%+v", n)
			}
		}
	})
}
