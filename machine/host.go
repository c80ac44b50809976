package machine

import (
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/internal/lists"
)

// A Host is the computer around the accelerators.
type Host struct {
	Name   string `json:"name,omitempty"` // only where Options.Identify asks for it
	OS     string `json:"os,omitempty"`
	Kernel string `json:"kernel,omitempty"`
	Arch   string `json:"arch"`
	CPU    CPU    `json:"cpu"`
	NUMA   []NUMA `json:"numa,omitempty"`

	MemoryBytes    int64  `json:"memory_bytes"`
	AvailableBytes int64  `json:"available_bytes,omitempty"`
	LimitBytes     int64  `json:"limit_bytes,omitempty"` // of the control group, where it has one
	HugePageBytes  int64  `json:"huge_page_bytes,omitempty"`
	HugePages      int64  `json:"huge_pages,omitempty"` // set aside
	HugePagesFree  int64  `json:"huge_pages_free,omitempty"`
	TransparentHP  string `json:"transparent_huge_pages,omitempty"` // always, madvise or never
}

// A MemoryLimit is one limit on the host memory that this process may still allocate.
type MemoryLimit struct {
	Bytes int64  // still free
	Where string // what sets the limit, for people
}

// A CPU is the processors of a host taken together.
type CPU struct {
	Model   string   `json:"model,omitempty"`
	Sockets int      `json:"sockets"`
	Cores   int      `json:"cores"`
	Threads int      `json:"threads"`
	Flags   []string `json:"flags,omitempty"` // only those that matter to matrix products
}

// A NUMA node is memory and the CPUs it is near to.
type NUMA struct {
	ID          int    `json:"id"`
	CPUs        string `json:"cpus,omitempty"` // as Linux writes it: 0-55,112-167
	MemoryBytes int64  `json:"memory_bytes,omitempty"`
	Distances   []int  `json:"distances,omitempty"` // to every node in order; 10 is its own
}

// flags are the instruction sets that XLA's products on the processor can use, on x86 and on Arm.
var flags = []string{
	"avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "amx_int8",
	"asimd", "bf16", "i8mm", "sve", "sve2", "svebf16",
}

// armParts names Arm's server cores by the part number in /proc/cpuinfo (Arm's own MIDR list).
var armParts = map[string]string{
	"0xd0c": "Arm Neoverse N1", "0xd40": "Arm Neoverse V1", "0xd49": "Arm Neoverse N2",
	"0xd4f": "Arm Neoverse V2", "0xd84": "Arm Neoverse V3", "0xd8e": "Arm Neoverse N3",
}

// A tree is the host's file system from its root. Files that are missing or unreadable read as
// nothing: each kernel and container shows another part of it.
type tree struct{ fs.FS }

func (t tree) text(name string) string {
	b, err := fs.ReadFile(t.FS, name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// number reads a decimal; ok is false when the file holds none.
func (t tree) number(name string) (n int64, ok bool) {
	n, err := strconv.ParseInt(t.text(name), 10, 64)
	return n, err == nil
}

// list gives the names in a directory, sorted as people count: mlx5_2 before mlx5_10.
func (t tree) list(dir string) []string {
	entries, err := fs.ReadDir(t.FS, dir)
	if err != nil {
		return nil
	}
	names := lists.Map(entries, fs.DirEntry.Name)
	lists.Sort(names, natural)
	return names
}

// resolve follows one symbolic link and gives the path it leads to from the root, or "".
func (t tree) resolve(name string) string {
	to, err := fs.ReadLink(t.FS, name)
	if err != nil || path.IsAbs(to) {
		return ""
	}
	return path.Join(path.Dir(name), to)
}

func (t tree) exists(name string) bool {
	_, err := fs.Stat(t.FS, name)
	return err == nil
}

func readHost(t tree, arch string, identify bool) Host {
	h := Host{
		OS:            osName(t.text("etc/os-release")),
		Kernel:        t.text("proc/sys/kernel/osrelease"),
		Arch:          arch,
		CPU:           parseCPUInfo(t.text("proc/cpuinfo")),
		NUMA:          readNUMA(t),
		TransparentHP: chosen(t.text("sys/kernel/mm/transparent_hugepage/enabled")),
	}
	if identify {
		h.Name = t.text("proc/sys/kernel/hostname")
	}
	if h.CPU.Sockets == 0 {
		h.CPU.topology(t)
	}
	m := parseMemInfo(t.text("proc/meminfo"))
	h.MemoryBytes, h.AvailableBytes = m["MemTotal"], m["MemAvailable"]
	if n := m["HugePages_Total"]; n > 0 {
		h.HugePages, h.HugePagesFree, h.HugePageBytes = n, m["HugePages_Free"], m["Hugepagesize"]
	}
	if limit, ok := t.number("sys/fs/cgroup/memory.max"); ok && limit > 0 && limit < h.MemoryBytes {
		h.LimitBytes = limit
	}
	return h
}

func osName(release string) string {
	for line := range strings.Lines(release) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), "PRETTY_NAME="); ok {
			return strings.Trim(value, `"'`)
		}
	}
	return ""
}

// chosen gives the word in brackets: "always [madvise] never".
func chosen(words string) string {
	_, after, _ := strings.Cut(words, "[")
	word, _, _ := strings.Cut(after, "]")
	return word
}

// parseCPUInfo reads /proc/cpuinfo. Sockets and cores stay 0 where the file does not tell them,
// as on Arm.
func parseCPUInfo(text string) CPU {
	var c CPU
	var socket, part string
	sockets, cores, has := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		key, value = strings.TrimSpace(key), strings.TrimSpace(value)
		switch key {
		case "processor":
			c.Threads++
		case "model name":
			c.Model = value
		case "CPU part":
			part = value
		case "physical id":
			socket = value
			sockets[socket] = true
		case "core id":
			cores[socket+"/"+value] = true
		case "flags", "Features":
			if len(has) == 0 { // the same for every CPU, and long
				for f := range strings.FieldsSeq(value) {
					has[f] = true
				}
			}
		}
	}
	if c.Model == "" {
		c.Model = armParts[part]
	}
	c.Sockets, c.Cores = len(sockets), len(cores)
	c.Flags = lists.Filter(flags, func(f string) bool { return has[f] })
	return c
}

// topology counts sockets and cores in sysfs.
func (c *CPU) topology(t tree) {
	sockets, cores, threads := map[string]bool{}, map[string]bool{}, 0
	for _, name := range t.list("sys/devices/system/cpu") {
		dir := path.Join("sys/devices/system/cpu", name, "topology")
		socket := t.text(path.Join(dir, "physical_package_id"))
		if socket == "" {
			continue
		}
		threads++
		sockets[socket] = true
		cores[socket+"/"+t.text(path.Join(dir, "core_id"))] = true
	}
	c.Sockets, c.Cores = max(1, len(sockets)), len(cores)
	c.Threads = max(c.Threads, threads)
	if c.Cores == 0 {
		c.Cores = c.Threads
	}
}

// parseMemInfo reads /proc/meminfo into bytes and counts.
func parseMemInfo(text string) map[string]int64 {
	m := map[string]int64{}
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		number, unit, _ := strings.Cut(strings.TrimSpace(value), " ")
		n, err := strconv.ParseInt(number, 10, 64)
		if err != nil || n < 0 || n > 1<<52 {
			continue
		}
		if strings.TrimSpace(unit) == "kB" {
			n <<= 10
		}
		m[strings.TrimSpace(key)] = n
	}
	return m
}

func readNUMA(t tree) []NUMA {
	var nodes []NUMA
	for _, name := range t.list("sys/devices/system/node") {
		var id int
		if n, err := fmt.Sscanf(name, "node%d", &id); n != 1 || err != nil {
			continue
		}
		dir := path.Join("sys/devices/system/node", name)
		node := NUMA{ID: id, CPUs: t.text(path.Join(dir, "cpulist"))}
		// Lines read "Node 0 MemTotal: 1056445432 kB".
		info := strings.ReplaceAll(t.text(path.Join(dir, "meminfo")), fmt.Sprintf("Node %d ", id), "")
		node.MemoryBytes = parseMemInfo(info)["MemTotal"]
		for d := range strings.FieldsSeq(t.text(path.Join(dir, "distance"))) {
			if n, err := strconv.Atoi(d); err == nil {
				node.Distances = append(node.Distances, n)
			}
		}
		nodes = append(nodes, node)
	}
	return nodes
}

// natural orders names with numbers in them by the numbers.
func natural(a, b string) int {
	for a != "" && b != "" {
		an, bn := digits(a), digits(b)
		if an > 0 && bn > 0 {
			x, y := strings.TrimLeft(a[:an], "0"), strings.TrimLeft(b[:bn], "0")
			if len(x) != len(y) {
				return len(x) - len(y)
			}
			if c := strings.Compare(x, y); c != 0 {
				return c
			}
			a, b = a[an:], b[bn:]
			continue
		}
		if a[0] != b[0] {
			return int(a[0]) - int(b[0])
		}
		a, b = a[1:], b[1:]
	}
	return len(a) - len(b)
}

func digits(s string) int { return len(s) - len(strings.TrimLeft(s, "0123456789")) }
