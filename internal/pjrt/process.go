package pjrt

import (
	"bufio"
	"os"
	"regexp"
	"runtime/debug"
	"strings"

	"github.com/ebitengine/purego"
	"golang.org/x/sys/unix"
)

// remark is a line that XLA's log writes for its own developers: of severity INFO, or the notice
// that the log is not set up yet.
var remark = regexp.MustCompile(`^(I\d{4} |WARNING: All log messages before absl::InitializeLog)`)

// quieten asks XLA for errors only, unless the user has set a level: its warnings speak to its own
// developers, and what a user must know of a program is in the report.
func quieten() {
	const variable = "TF_CPP_MIN_LOG_LEVEL"
	if _, set := os.LookupEnv(variable); set {
		return
	}
	// The plugin reads C's environment, which os.Setenv does not change in a program without cgo.
	setenv, err := purego.Dlsym(purego.RTLD_DEFAULT, "setenv")
	if err != nil {
		return
	}
	name, value := append([]byte(variable), 0), []byte("2\x00")
	purego.SyscallN(setenv, uintptr(bytesPointer(name)), uintptr(bytesPointer(value)), 1)
}

// withoutRemarks runs fn and drops the remarks that it leaves on the standard error stream: while
// a plugin loads it writes before its level is set. Everything else that was written is written
// again. It is used for loading only; a crash while a program runs must not lose its last words.
func withoutRemarks(fn func() error) error {
	kept, err := unix.Dup(2)
	if err != nil {
		return fn()
	}
	defer func() { _ = unix.Close(kept) }()
	fd, err := unix.MemfdCreate("stderr", unix.MFD_CLOEXEC)
	if err != nil {
		return fn()
	}
	caught := os.NewFile(uintptr(fd), "stderr")
	defer func() { _ = caught.Close() }()
	// If loading kills the process, Go's account of it must not be lost in the memory file.
	if words, err := unix.Dup(kept); err == nil {
		last := os.NewFile(uintptr(words), "stderr")
		defer func() { _ = last.Close() }()
		if debug.SetCrashOutput(last, debug.CrashOptions{}) == nil {
			defer func() { _ = debug.SetCrashOutput(nil, debug.CrashOptions{}) }()
		}
	}
	if err := unix.Dup3(fd, 2, 0); err != nil {
		return fn()
	}
	err = fn()
	if restore := unix.Dup3(kept, 2, 0); restore != nil {
		return restore
	}
	if _, seek := caught.Seek(0, 0); seek != nil {
		return err
	}
	in := bufio.NewReader(caught)
	for {
		line, end := in.ReadString('\n')
		if strings.TrimSpace(line) != "" && !remark.MatchString(line) {
			_, _ = os.Stderr.WriteString(line)
		}
		if end != nil {
			return err
		}
	}
}

// glibc's names for what mallopt changes (malloc.h).
const (
	mTrimThreshold = -1
	mMmapMax       = -4
	mArenaMax      = -8
)

// KeepResident tells the C allocator to keep memory that a program has freed. XLA:CPU allocates
// its temporary arena anew for every run; by default glibc maps and unmaps it each time, which
// costs 148,000 page faults and 1.2 to 1.6 times the step of a 13M-parameter model. One arena, no
// mmap and no trimming make the second run find the memory of the first. It must be called
// before a plugin is loaded; settings that the user made by environment are left alone, and so
// is a C library other than glibc.
func KeepResident() bool {
	for _, kv := range os.Environ() {
		if strings.HasPrefix(kv, "MALLOC_") || strings.HasPrefix(kv, "GLIBC_TUNABLES=") {
			return false
		}
	}
	fn, err := purego.Dlsym(purego.RTLD_DEFAULT, "mallopt")
	if err != nil {
		return false
	}
	ok := true
	for _, set := range []struct{ name, value int32 }{
		{mArenaMax, 1}, {mMmapMax, 0}, {mTrimThreshold, -1},
	} {
		r := first(purego.SyscallN(fn, uintptr(uint32(set.name)), uintptr(uint32(set.value))))
		ok = ok && int32(r) == 1
	}
	return ok
}
