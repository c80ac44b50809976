package machine

import (
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/internal/lists"
)

// A NIC is one function of a network adapter with a port. Loopback, bridges, tunnels and virtual
// functions are left out: they share the wire of another.
type NIC struct {
	Name           string `json:"name"`           // of the interface; else of the RDMA device
	RDMA           string `json:"rdma,omitempty"` // name of the RDMA device: mlx5_0
	Link           string `json:"link"`           // ethernet or infiniband
	Driver         string `json:"driver,omitempty"`
	Up             bool   `json:"up"`
	BytesPerSecond int64  `json:"bytes_per_second,omitempty"` // of the port, in one direction
	PCI            string `json:"pci,omitempty"`
	PCIeGen        int    `json:"pcie_gen,omitempty"`
	PCIeLanes      int    `json:"pcie_lanes,omitempty"`
	NUMA           int    `json:"numa"` // -1 where not known

	place string // in the tree of devices, to find what is near
}

// readNICs finds network interfaces and RDMA devices and merges the entries of one PCI function.
func readNICs(t tree) []NIC {
	var nics []NIC
	for _, name := range t.list("sys/class/net") {
		dir := path.Join("sys/class/net", name)
		if n, ok := readFunction(t, dir); ok {
			n.Name, n.Link = name, "ethernet"
			if t.text(path.Join(dir, "type")) == "32" { // ARPHRD_INFINIBAND
				n.Link = "infiniband"
			}
			n.Up = t.text(path.Join(dir, "operstate")) == "up"
			if mbit, ok := t.number(path.Join(dir, "speed")); ok && mbit > 0 && mbit < 1<<32 {
				n.BytesPerSecond = mbit * 1e6 / 8
			}
			nics = append(nics, n)
		}
	}
	for _, name := range t.list("sys/class/infiniband") {
		dir := path.Join("sys/class/infiniband", name)
		n, ok := readFunction(t, dir)
		if !ok {
			continue
		}
		at := slices.IndexFunc(nics, func(o NIC) bool { return o.PCI == n.PCI && o.RDMA == "" })
		if at < 0 {
			n.Name = name
			at, nics = len(nics), append(nics, n)
		}
		readPort(t, dir, &nics[at])
		nics[at].RDMA = name
	}
	lists.Sort(nics, func(a, b NIC) int {
		if c := strings.Compare(a.PCI, b.PCI); c != 0 {
			return c // hexadecimal of fixed width
		}
		return natural(a.Name, b.Name)
	})
	return nics
}

// readFunction reads the PCI function behind a class entry; ok is false for one without hardware
// of its own.
func readFunction(t tree, dir string) (n NIC, ok bool) {
	device := path.Join(dir, "device")
	if strings.Contains(t.resolve(dir), "/virtual/") || !t.exists(device) ||
		t.exists(path.Join(device, "physfn")) {
		return NIC{}, false
	}
	n = NIC{NUMA: -1, Driver: path.Base(t.resolve(path.Join(device, "driver")))}
	if n.Driver == "." {
		n.Driver = ""
	}
	if node, ok := t.number(path.Join(device, "numa_node")); ok && node >= 0 && node < 1<<16 {
		n.NUMA = int(node)
	}
	// The class entry is a link into the device tree: …/0000:18:00.0/net/eth0. A paravirtual adapter
	// has one more step: …/0000:00:03.0/virtio1/net/eth0.
	for at := path.Dir(t.resolve(dir)); len(at) > 1 && n.PCI == ""; at = path.Dir(at) {
		if base := path.Base(at); pciAddress(base) {
			n.PCI, n.place = base, at
		}
	}
	n.PCIeGen = pcieGeneration(t.text(path.Join(device, "current_link_speed")))
	if lanes, ok := t.number(path.Join(device, "current_link_width")); ok && lanes <= 32 {
		n.PCIeLanes = int(max(0, lanes))
	}
	return n, true
}

// readPort reads the first port of an RDMA device, which tells the rate of InfiniBand, where the
// interface often does not.
func readPort(t tree, dir string, n *NIC) {
	port := path.Join(dir, "ports", "1")
	if layer := strings.ToLower(t.text(path.Join(port, "link_layer"))); layer != "" {
		n.Link = layer
	}
	if state := t.text(path.Join(port, "state")); state != "" { // "4: ACTIVE"
		n.Up = strings.Contains(state, "ACTIVE")
	}
	rate, _, _ := strings.Cut(t.text(path.Join(port, "rate")), " ") // "400 Gb/sec (4X NDR)"
	if gbit, err := strconv.ParseFloat(rate, 64); err == nil && gbit > 0 && gbit < 1e6 {
		n.BytesPerSecond = int64(gbit * 1e9 / 8)
	}
	if n.Link == "" {
		n.Link = "infiniband"
	}
}

// pciAddress reports whether a name is domain:bus:device.function.
func pciAddress(s string) bool {
	return strings.Count(s, ":") == 2 && strings.Contains(s, ".") &&
		strings.Trim(s, "0123456789abcdef:.") == ""
}

// nearNICs lists the NICs that share the most PCIe bridges with a device, and at least the root
// port: traffic between them need not pass through the processor.
func nearNICs(place string, nics []NIC) []string {
	best := 2 // the root complex and one port below it
	var near []string
	for _, n := range nics {
		shared := sharedBridges(place, n.place)
		if shared > best {
			best, near = shared, nil
		}
		if shared == best {
			near = append(near, n.Name)
		}
	}
	return near
}

// sharedBridges counts the steps that two paths such as
// sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0 have in common below sys/devices.
func sharedBridges(a, b string) int {
	const root = "sys/devices/"
	a, okA := strings.CutPrefix(a, root)
	b, okB := strings.CutPrefix(b, root)
	if !okA || !okB {
		return 0
	}
	as, bs := strings.Split(a, "/"), strings.Split(b, "/")
	n := 0
	for n < min(len(as), len(bs)) && as[n] == bs[n] {
		n++
	}
	return n
}

// pcieGeneration reads what sysfs says of a link: "32.0 GT/s PCIe" is generation 5.
func pcieGeneration(speed string) int {
	gt, _, _ := strings.Cut(speed, " ")
	rates := []string{"2.5", "5.0", "8.0", "16.0", "32.0", "64.0"}
	return slices.Index(rates, gt) + 1
}

// pcieBytes is what a link carries in one direction. Generations 1 and 2 spend two bits of ten on
// coding, 3 to 5 two of 130, and 6 sends frames of 256 bytes with 242 of payload (PCI-SIG).
func pcieBytes(gen, lanes int) int64 {
	perLane := []float64{0, 2.5e9 / 8 * 8 / 10, 5e9 / 8 * 8 / 10, 8e9 / 8 * 128 / 130,
		16e9 / 8 * 128 / 130, 32e9 / 8 * 128 / 130, 64e9 / 8 * 242 / 256}
	if gen < 1 || gen >= len(perLane) || lanes < 1 {
		return 0
	}
	return int64(perLane[gen] * float64(lanes))
}
