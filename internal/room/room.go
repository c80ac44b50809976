package room

import (
	"cmp"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/machine"
)

// Memory reads what bounds the memory that this process may still take, tightest first: what the
// host has available, what each control group above the process leaves (cgroup v1 and v2), and what
// ulimit -v leaves of the address space. It returns none where the files are not there, as on a
// system that is not Linux.
func Memory(root fs.FS) []machine.MemoryLimit {
	var list []machine.MemoryLimit
	if free, ok := field(root, "proc/meminfo", "MemAvailable:"); ok {
		list = append(list, machine.MemoryLimit{Bytes: free,
			Where: "the host: MemAvailable in /proc/meminfo"})
	}
	list = append(list, groups(root)...)
	if limit, ok := addressSpace(root); ok {
		used, _ := field(root, "proc/self/status", "VmSize:")
		list = append(list, machine.MemoryLimit{Bytes: max(0, limit-used),
			Where: fmt.Sprintf("the address space of this process: ulimit -v %d", limit>>10)})
	}
	lists.Sort(list, func(a, b machine.MemoryLimit) int {
		return cmp.Compare(a.Bytes, b.Bytes)
	})
	return list
}

// Disk returns the bytes that this user may still write to the file system of a folder. A quota may
// leave less.
func Disk(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, &fs.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return int64(min(st.Bavail, 1<<62/uint64(st.Bsize)) * uint64(st.Bsize)), nil
}

// unlimited is more than any host has: cgroup v1 writes the largest multiple of a page for none.
const unlimited = 1 << 60

// A version is how one version of control groups names its files.
type version struct {
	fstype, option   string // of the mount; option "" is any
	limit, used      string
	inactive, active string // file cache in memory.stat, of the whole subtree
}

var versions = []version{
	{"cgroup2", "", "memory.max", "memory.current", "inactive_file", "active_file"},
	{"cgroup", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
		"total_active_file"},
}

// groups reads the limits of the process's control group and of those above it, as far as the mount
// shows them: a container often sees its own group as the root.
func groups(root fs.FS) []machine.MemoryLimit {
	var list []machine.MemoryLimit
	for _, v := range versions {
		group, ok := v.group(text(root, "proc/self/cgroup"))
		if !ok {
			continue
		}
		top, at := v.mount(text(root, "proc/self/mountinfo"))
		if at == "" {
			continue
		}
		below, inside := strings.CutPrefix(group, strings.TrimSuffix(top, "/"))
		if !inside || strings.Contains(below, "..") {
			below = "" // the mount shows another part of the hierarchy: its root bounds us at least
		}
		for dir := path.Join("/", below); ; dir = path.Dir(dir) {
			if b, ok := v.bound(root, strings.TrimPrefix(path.Join(at, dir), "/")); ok {
				list = append(list, b)
			}
			if dir == "/" {
				break
			}
		}
	}
	return list
}

// group finds the process's group in /proc/self/cgroup: "0::/a/b" in v2, "4:memory:/a/b" in v1.
func (v version) group(lines string) (string, bool) {
	for line := range strings.Lines(lines) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 {
			continue
		}
		if v.option == "" && parts[0] == "0" && parts[1] == "" ||
			v.option != "" && slices.Contains(strings.Split(parts[1], ","), v.option) {
			return parts[2], true
		}
	}
	return "", false
}

// mount finds where the hierarchy is mounted, and which of its groups the mount's root is. A line
// of mountinfo reads "35 31 0:32 /root /mount/point rw - cgroup cgroup rw,memory".
func (v version) mount(lines string) (top, at string) {
	for line := range strings.Lines(lines) {
		before, after, _ := strings.Cut(line, " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if len(left) < 5 || len(right) < 3 || right[0] != v.fstype {
			continue
		}
		if v.option == "" || slices.Contains(strings.Split(right[2], ","), v.option) {
			return left[3], left[4]
		}
	}
	return "", ""
}

// bound reads what one group leaves. File cache counts as free: the kernel drops it first.
func (v version) bound(root fs.FS, dir string) (machine.MemoryLimit, bool) {
	limit, err := strconv.ParseInt(text(root, path.Join(dir, v.limit)), 10, 64)
	if err != nil || limit >= unlimited { // v2 writes max
		return machine.MemoryLimit{}, false
	}
	used, err := strconv.ParseInt(text(root, path.Join(dir, v.used)), 10, 64)
	if err != nil {
		return machine.MemoryLimit{}, false
	}
	stat := path.Join(dir, "memory.stat")
	a, _ := field(root, stat, v.inactive)
	b, _ := field(root, stat, v.active)
	where := fmt.Sprintf("the control group: /%s is %d", path.Join(dir, v.limit), limit)
	return machine.MemoryLimit{Bytes: max(0, limit-max(0, used-a-b)), Where: where}, true
}

// addressSpace reads RLIMIT_AS; ok is false without a limit.
func addressSpace(root fs.FS) (limit int64, ok bool) {
	for line := range strings.Lines(text(root, "proc/self/limits")) {
		if rest, found := strings.CutPrefix(line, "Max address space"); found {
			limit, err := strconv.ParseInt(strings.Fields(rest + " -")[0], 10, 64)
			return limit, err == nil
		}
	}
	return 0, false
}

// field reads a number from a file of lines "Name: 12 kB" or "name 12", in bytes.
func field(root fs.FS, file, name string) (int64, bool) {
	for line := range strings.Lines(text(root, file)) {
		words := strings.Fields(line)
		if len(words) < 2 || words[0] != name {
			continue
		}
		n, err := strconv.ParseInt(words[1], 10, 64)
		if err != nil || n < 0 || n > 1<<52 {
			return 0, false
		}
		if len(words) > 2 && words[2] == "kB" {
			n <<= 10
		}
		return n, true
	}
	return 0, false
}

func text(root fs.FS, name string) string {
	b, err := fs.ReadFile(root, name)
	if err != nil {
		return "" // each kernel and container shows another part
	}
	return strings.TrimSpace(string(b))
}
