package malloc

import (
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
)

// variable is what glibc reads before main.
const variable = "GLIBC_TUNABLES"

// Tunables keep freed memory: one arena for all threads, nothing mapped for a single allocation,
// nothing trimmed, and no cache by thread, which would keep blocks from the others.
const Tunables = "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1:" +
	"glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=8000000000"

// Exec lets the process begin again with [Tunables] in its environment, keeping its number, its
// arguments and its open files. It returns where that is not needed: on systems without glibc, and
// where the environment already says how memory is to be kept, be it by the user or by an earlier
// Exec. It must be called first in main: nothing that was done before survives. An error means
// that the process goes on as it is, only slower.
func Exec() error {
	env := os.Environ()
	if runtime.GOOS != "linux" || settled(env) {
		return nil
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	return syscall.Exec(self, os.Args, append(env, variable+"="+Tunables))
}

// settled tells whether an environment has settings of glibc's allocator.
func settled(env []string) bool {
	return slices.ContainsFunc(env, func(kv string) bool {
		return strings.HasPrefix(kv, "MALLOC_") || strings.HasPrefix(kv, variable+"=")
	})
}
