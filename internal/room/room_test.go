package room

import (
	"os"
	"runtime"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

const gib = 1 << 30

// host makes a host of text: files by name.
func host(files map[string]string) fstest.MapFS {
	m := fstest.MapFS{"proc/meminfo": {Data: []byte(
		"MemTotal:       25165824 kB\nMemFree: 1 kB\nMemAvailable:   20971520 kB\n")}}
	for name, text := range files {
		m[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return m
}

const (
	v1Mounts = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n" +
		"34 31 0:31 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n" +
		"35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
	v2Mounts = "31 23 0:28 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
	limits   = "Limit                     Soft Limit           Hard Limit           Units     \n" +
		"Max cpu time              unlimited            unlimited            seconds   \n"
)

func TestMemoryIsBoundByHostGroupAndLimit(t *testing.T) {
	for _, c := range []struct {
		name  string
		files map[string]string
		want  []int64
		where string // of the tightest
	}{
		{"host alone", nil, []int64{20 * gib}, "MemAvailable"},
		{"v2, a group of its own and one above", map[string]string{
			"proc/self/cgroup":                                  "0::/user.slice/run.scope\n",
			"proc/self/mountinfo":                               v2Mounts,
			"sys/fs/cgroup/user.slice/run.scope/memory.max":     "max\n",
			"sys/fs/cgroup/user.slice/run.scope/memory.current": "1073741824\n",
			"sys/fs/cgroup/user.slice/memory.max":               "8589934592\n",
			"sys/fs/cgroup/user.slice/memory.current":           "3221225472\n",
			"sys/fs/cgroup/user.slice/memory.stat":              "anon 1\ninactive_file 536870912\nactive_file 536870912\n",
		}, []int64{6 * gib, 20 * gib}, "/sys/fs/cgroup/user.slice/memory.max"},
		{"v2 in a container that is its own root", map[string]string{
			"proc/self/cgroup":             "0::/\n",
			"proc/self/mountinfo":          v2Mounts,
			"sys/fs/cgroup/memory.max":     "4294967296\n",
			"sys/fs/cgroup/memory.current": "5368709120\n", // more than the limit: nothing is left
		}, []int64{0, 20 * gib}, "/sys/fs/cgroup/memory.max"},
		{"v1", map[string]string{
			"proc/self/cgroup":                               "4:memory:/job\n3:cpuset:/\n0::/\n",
			"proc/self/mountinfo":                            v1Mounts,
			"sys/fs/cgroup/memory/job/memory.limit_in_bytes": "2147483648",
			"sys/fs/cgroup/memory/job/memory.usage_in_bytes": "1073741824",
			"sys/fs/cgroup/memory/job/memory.stat":           "inactive_file 7\ntotal_inactive_file 536870912\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes":     "9223372036854771712",
			"sys/fs/cgroup/memory/memory.usage_in_bytes":     "1073741824",
		}, []int64{3 * gib / 2, 20 * gib}, "/sys/fs/cgroup/memory/job/memory.limit_in_bytes"},
		{"v1 in a container that sees the host's names", map[string]string{
			"proc/self/cgroup":                           "4:memory:/docker/ab12\n",
			"proc/self/mountinfo":                        strings.ReplaceAll(v1Mounts, "0:32 /", "0:32 /docker/ab12"),
			"sys/fs/cgroup/memory/memory.limit_in_bytes": "2147483648",
			"sys/fs/cgroup/memory/memory.usage_in_bytes": "0",
		}, []int64{2 * gib, 20 * gib}, "/sys/fs/cgroup/memory/memory.limit_in_bytes"},
		{"a mount of another part of the hierarchy", map[string]string{
			"proc/self/cgroup":             "0::/../other\n",
			"proc/self/mountinfo":          strings.ReplaceAll(v2Mounts, "0:28 /", "0:28 /here"),
			"sys/fs/cgroup/memory.max":     "1073741824",
			"sys/fs/cgroup/memory.current": "0",
		}, []int64{gib, 20 * gib}, "/sys/fs/cgroup/memory.max"},
		{"ulimit -v", map[string]string{
			"proc/self/limits": limits + "Max address space         9216000000           9216000000           bytes\n",
			"proc/self/status": "Name:\tx\nVmPeak:\t 9 kB\nVmSize:\t 1000000 kB\n",
		}, []int64{9216000000 - 1000000<<10, 20 * gib}, "ulimit -v 9000000"},
		{"no ulimit", map[string]string{
			"proc/self/limits": limits + "Max address space         unlimited            unlimited            bytes\n",
		}, []int64{20 * gib}, "MemAvailable"},
		{"text that means nothing", map[string]string{
			"proc/meminfo":        "MemAvailable: lots",
			"proc/self/cgroup":    "::\n4\n0::/x",
			"proc/self/mountinfo": " - cgroup2\n\n1 2 3 4 5 - cgroup2 a b\n",
			"proc/self/limits":    "Max address space",
		}, nil, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := Memory(host(c.files))
			var bytes []int64
			for _, b := range got {
				bytes = append(bytes, b.Bytes)
			}
			if d := cmp.Diff(c.want, bytes); d != "" {
				t.Error(d)
			}
			if len(got) > 0 && !strings.Contains(got[0].Where, c.where) {
				t.Errorf("the tightest is %q, want %q", got[0].Where, c.where)
			}
		})
	}
}

func TestThisHostHasRoom(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("reads Linux")
	}
	list := Memory(os.DirFS("/"))
	t.Log(list)
	if len(list) == 0 || list[0].Bytes < 1<<20 {
		t.Errorf("memory: %v", list)
	}
	free, err := Disk(t.TempDir())
	if err != nil || free < 1<<20 {
		t.Errorf("disk: %d, %v", free, err)
	}
	if _, err := Disk(t.TempDir() + "/none"); err == nil {
		t.Error("a folder that is not there has room")
	}
}
