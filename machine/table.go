package machine

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/deepwell/deepwell/event"
)

// String gives the machine as people read it.
func (m *Machine) String() string {
	var b strings.Builder
	_ = m.WriteTable(&b) // a Builder takes everything
	return b.String()
}

// WriteTable writes the machine for people: a line for each component of the host, then a table of
// GPUs, a table of network interfaces, and warnings.
func (m *Machine) WriteTable(w io.Writer) error {
	p := &printer{}
	m.printHost(p)
	m.printGPUs(p)
	m.printNICs(p)
	m.printRest(p)
	_, err := io.WriteString(w, p.String())
	return err
}

// A printer collects lines with a label, and tables with an empty line before and after.
type printer struct {
	strings.Builder
	gap bool // an empty line is due before what comes next
}

func (p *printer) space() {
	if p.gap && p.Len() > 0 {
		p.WriteByte('\n')
	}
	p.gap = false
}

// line writes the facts that are there, with a dot between them; without any it writes nothing.
func (p *printer) line(label string, facts ...string) {
	facts = slices.DeleteFunc(facts, func(f string) bool { return f == "" })
	if len(facts) > 0 {
		p.space()
		fmt.Fprintf(p, "%-8s %s\n", label, strings.Join(facts, " · "))
	}
}

// table aligns rows of cells. A column in which no row has anything is left out with its title.
func (p *printer) table(rows [][]string) {
	p.gap = true
	p.space()
	w := tabwriter.NewWriter(p, 0, 0, 2, ' ', 0)
	var keep []int
	for c := range rows[0] {
		if slices.ContainsFunc(rows[1:], func(r []string) bool { return r[c] != "" }) {
			keep = append(keep, c)
		}
	}
	for _, row := range rows {
		cells := make([]string, len(keep))
		for i, c := range keep {
			if cells[i] = row[c]; cells[i] == "" {
				cells[i] = "-"
			}
		}
		fmt.Fprintln(w, strings.Join(cells, "\t"))
	}
	_ = w.Flush() // into a Builder, which takes everything
	p.gap = true
}

func (m *Machine) printHost(p *printer) {
	h := m.Host
	p.line("host", h.Name, h.OS, some(h.Kernel != "", "Linux %s", h.Kernel), h.Arch)
	model := h.CPU.Model
	if model != "" && h.CPU.Sockets > 1 {
		model = fmt.Sprintf("%d x %s", h.CPU.Sockets, model)
	}
	p.line("cpu", model, plural(h.CPU.Cores, "core"), plural(h.CPU.Threads, "thread"),
		strings.Join(h.CPU.Flags, " "))
	p.line("memory", event.Size(h.MemoryBytes),
		some(h.AvailableBytes > 0, "%s available", event.Size(h.AvailableBytes)),
		some(h.LimitBytes > 0, "limited to %s", event.Size(h.LimitBytes)),
		some(len(h.NUMA) > 1, "%s", plural(len(h.NUMA), "NUMA node")),
		some(h.HugePages > 0, "%d huge pages of %s", h.HugePages, event.Size(h.HugePageBytes)))
	p.line("driver", m.Driver, some(m.Driver != "", "CUDA %s", m.CUDA))
}

func (m *Machine) printGPUs(p *printer) {
	if len(m.GPUs) == 0 {
		p.line("gpu", "none")
		return
	}
	rows := [][]string{{"gpu", "name", "model", "arch", "tensor", "memory", "pcie", "nvlink", "numa",
		"formats", "nics"}}
	for _, g := range m.GPUs {
		rows = append(rows, []string{
			strconv.Itoa(g.Index), g.Name, g.Model, g.Arch, g.TensorCore, size(g.MemoryBytes),
			pcieText(max(g.PCIeGen, g.PCIeGenMax), max(g.PCIeLanes, g.PCIeLanesMax)),
			linkText(g), node(g.NUMA), strings.Join(g.Formats, " "), strings.Join(g.NICs, " "),
		})
		for i, in := range g.Instances {
			rows = append(rows, []string{
				fmt.Sprintf("%d:%d", g.Index, i), "MIG " + in.Profile, "", "", "",
				size(in.MemoryBytes), "", "", "", "", "",
			})
		}
	}
	p.table(rows)
	m.printPairs(p)
	for _, format := range []string{"bf16", "fp8", "mxfp8", "nvfp4"} {
		m.printMissing(p, format)
	}
}

// printPairs tells the rate between GPUs in one line where it is the same for all, else by rows.
func (m *Machine) printPairs(p *printer) {
	pairs := m.Topology.Pairs
	if len(pairs) < 2 {
		return
	}
	first, same := pairs[0][1], true
	for i, row := range pairs {
		for j, rate := range row {
			same = same && (i == j || rate == first)
		}
	}
	if same {
		what := plural(len(pairs)*(len(pairs)-1)/2, "pair")
		p.line("between", fmt.Sprintf("%s each way, %s", rateText(first), what))
		return
	}
	title := []string{"GB/s"}
	for i := range pairs {
		title = append(title, strconv.Itoa(i))
	}
	rows := [][]string{title}
	for i, row := range pairs {
		cells := []string{strconv.Itoa(i)}
		for j, rate := range row {
			cell := ""
			if i != j && rate > 0 {
				cell = fmt.Sprintf("%.0f", float64(rate)/1e9)
			}
			cells = append(cells, cell)
		}
		rows = append(rows, cells)
	}
	p.table(rows)
}

// printMissing says once for each reason why GPUs lack a format.
func (m *Machine) printMissing(p *printer, format string) {
	var reasons []string
	for _, g := range m.GPUs {
		if why := g.Missing[format]; why != "" && !slices.Contains(reasons, why) {
			reasons = append(reasons, why)
		}
	}
	for _, why := range reasons {
		p.line(format, "no: "+why)
	}
}

func (m *Machine) printNICs(p *printer) {
	if len(m.NICs) == 0 {
		return
	}
	rows := [][]string{{"nic", "rdma", "link", "driver", "speed", "pcie", "numa", "pci"}}
	for _, n := range m.NICs {
		speed := "down"
		if n.Up {
			speed = rateText(n.BytesPerSecond)
		}
		rows = append(rows, []string{n.Name, n.RDMA, n.Link, n.Driver, speed,
			pcieText(n.PCIeGen, n.PCIeLanes), node(n.NUMA), n.PCI})
	}
	p.table(rows)
}

func (m *Machine) printRest(p *printer) {
	for _, e := range m.Engines {
		state := "not installed"
		if e.Installed {
			state = "installed"
		}
		p.line("engine", strings.TrimSpace(e.Name+" "+e.Version), state)
	}
	if r := m.Measured; r != nil {
		p.line("measured", plural(r.Devices, "device")+" of "+r.Engine,
			measure("copy", rateText(r.DeviceCopy)), measure("to device", rateText(r.HostToDevice)),
			measure("to host", rateText(r.DeviceToHost)), measure("all-reduce", rateText(r.AllReduce)),
			measure("f32", flopText(r.MatmulF32)), measure("bf16", flopText(r.MatmulBF16)))
	}
	for _, n := range m.Notes {
		p.line("note", n)
	}
}

// some writes a fact, if there is one.
func some(there bool, format string, args ...any) string {
	if !there {
		return ""
	}
	return fmt.Sprintf(format, args...)
}

func measure(name, rate string) string { return some(rate != "", "%s %s", name, rate) }

func size(bytes int64) string { return some(bytes != 0, "%s", event.Size(bytes)) }

func node(n int) string { return some(n >= 0, "%d", n) }

func pcieText(gen, lanes int) string { return some(gen*lanes != 0, "%d.0 x%d", gen, lanes) }

// linkText tells the links that are up: 18 x 50.0 GB/s.
func linkText(g GPU) string {
	var parts []string
	for _, l := range g.Links {
		if l.To != "down" {
			parts = append(parts, strings.TrimSuffix(
				fmt.Sprintf("%d x %s", l.Count, rateText(l.BytesPerSecond)), " x "))
		}
	}
	if len(parts) == 0 && len(g.Links) > 0 {
		return "down"
	}
	return strings.Join(parts, " + ")
}

// rateText writes bytes a second in decimal units, as links and memories are sold.
func rateText(bytes int64) string {
	return some(bytes != 0, "%.1f GB/s", float64(bytes)/1e9)
}

func flopText(flops int64) string {
	if flops < 1e12 {
		return some(flops != 0, "%.1f GFLOP/s", float64(flops)/1e9)
	}
	return fmt.Sprintf("%.1f TFLOP/s", float64(flops)/1e12)
}
