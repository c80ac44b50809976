package pjrt

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"
	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/diag"
)

// A Plugin is a loaded XLA plugin. It is never unloaded.
type Plugin struct {
	path  string
	api   unsafe.Pointer
	size  uintptr // bytes of the function table that the plugin has
	major int
	minor int

	extensions map[int32]unsafe.Pointer // by PJRT_Extension_Type

	callbacksOnce sync.Once
	callbacks     callbacks

	handlersMu sync.Mutex
	handlers   map[string]bool // names that Go functions are registered under
}

// Values of PJRT_Extension_Type.
const (
	extensionProfiler = 1
	extensionFFI      = 5
)

// plugins remembers what this process has loaded. A shared library is a fact of the process:
// initializing the same plugin twice is undefined, so the second Load gets the first one's value.
var plugins = struct {
	sync.Mutex
	byPath map[string]*Plugin
}{byPath: map[string]*Plugin{}}

// Load loads the plugin at path after the libraries in preload, which it or its own libraries
// will look for by name. Loading the same path again gives the same Plugin.
func Load(path string, preload ...string) (*Plugin, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, diag.New(diag.EngineLoad, "cannot find the plugin").Wrap(err)
	}
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real // one library under two names is one library
	}
	plugins.Lock()
	defer plugins.Unlock()
	if p := plugins.byPath[path]; p != nil {
		return p, nil
	}
	p := &Plugin{path: path}
	quieten()
	if err := withoutRemarks(func() error { return p.load(preload) }); err != nil {
		return nil, err
	}
	plugins.byPath[path] = p
	return p, nil
}

// load brings the libraries into the process and sets the plugin up.
func (p *Plugin) load(preload []string) error {
	for _, lib := range preload {
		if _, err := purego.Dlopen(lib, purego.RTLD_NOW|purego.RTLD_GLOBAL); err != nil {
			return loadError(lib, err)
		}
	}
	lib, err := purego.Dlopen(p.path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return loadError(p.path, err)
	}
	entry, err := purego.Dlsym(lib, "GetPjrtApi")
	if err != nil {
		return loadError(p.path, errors.New("it exports no GetPjrtApi, so it is not an XLA plugin"))
	}
	p.api = pointer(first(purego.SyscallN(entry)))
	if err := p.check(); err != nil {
		return err
	}
	if err := call(p, pluginInitialize, &head{}); err != nil {
		return loadError(p.path, err)
	}
	p.extensions = p.walkExtensions()
	return nil
}

// Preload brings a library into the process by its name, as the system finds it, for a plugin that
// will look it up. It stays there.
func Preload(soname string) error {
	return withoutRemarks(func() error {
		_, err := purego.Dlopen(soname, purego.RTLD_NOW|purego.RTLD_GLOBAL)
		return err
	})
}

// OpenCuDNN opens cuDNN at a path on the present GPU and closes it again, and returns cuDNN's
// reason if it cannot.
func OpenCuDNN(path string) error {
	library, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_GLOBAL)
	if err != nil {
		return err
	}
	var create, destroy func(unsafe.Pointer) int32
	var text func(int32) string
	for name, fn := range map[string]any{"cudnnCreate": &create, "cudnnDestroy": &destroy,
		"cudnnGetErrorString": &text} {
		address, err := purego.Dlsym(library, name)
		if err != nil {
			return err
		}
		purego.RegisterFunc(fn, address)
	}
	var handle unsafe.Pointer
	if status := create(unsafe.Pointer(&handle)); status != 0 {
		return fmt.Errorf("cudnnCreate: %s", text(status))
	}
	_ = destroy(handle)
	return nil
}

func loadError(lib string, err error) error {
	return diag.New(diag.EngineLoad, "cannot load %s", filepath.Base(lib)).At("%s", lib).Wrap(err).
		Try("deepwell doctor")
}

// check reads the header of the plugin's table and refuses versions that we have not seen.
func (p *Plugin) check() error {
	if p.api == nil {
		return loadError(p.path, errors.New("GetPjrtApi returned nothing"))
	}
	h := (*apiHeader)(p.api)
	p.size, p.major, p.minor = h.size, int(h.version.major), int(h.version.minor)
	if p.major != versionMajor || p.minor < versionMinorMin || p.minor > versionMinorMax {
		return diag.New(diag.EngineAPI, "%s speaks PJRT %d.%d; Deepwell speaks %d.%d to %d.%d",
			filepath.Base(p.path), p.major, p.minor, versionMajor, versionMinorMin,
			versionMajor, versionMinorMax).
			At("%s", p.path).Try("deepwell engine install, which pins a version that works")
	}
	return nil
}

// Version gives the PJRT version that the plugin speaks.
func (p *Plugin) Version() (major, minor int) { return p.major, p.minor }

func (p *Plugin) walkExtensions() map[int32]unsafe.Pointer {
	found := map[int32]unsafe.Pointer{}
	next := (*apiHeader)(p.api).extension
	for range 64 { // no plugin has half as many; a longer chain is a cycle
		if next == nil {
			break
		}
		base := (*struct {
			size uintptr
			kind int32
			next unsafe.Pointer
		})(next)
		if found[base.kind] == nil {
			found[base.kind] = next
		}
		next = base.next
	}
	return found
}

// function gives the address of a slot, or 0 if the plugin's table ends before it.
func (p *Plugin) function(s slot) uintptr {
	offset := unsafe.Sizeof(apiHeader{}) + uintptr(s)*unsafe.Sizeof(uintptr(0))
	if offset+unsafe.Sizeof(uintptr(0)) > p.size {
		return 0
	}
	return *(*uintptr)(unsafe.Add(p.api, offset))
}

// call runs one function of the plugin with a structure that begins with head.
func call[T any](p *Plugin, s slot, args *T) error {
	return p.call(s, unsafe.Pointer(args), unsafe.Sizeof(*args))
}

// call is call for arguments of any type, once in the binary.
func (p *Plugin) call(s slot, args unsafe.Pointer, size uintptr) error {
	*(*uintptr)(args) = size
	fn := p.function(s)
	if fn == 0 {
		name := cmp.Or(slotNames[s], fmt.Sprintf("function %d", s))
		return diag.New(diag.NotSupported, "this plugin (PJRT %d.%d) has no %s", p.major, p.minor, name)
	}
	status := first(purego.SyscallN(fn, uintptr(args)))
	if status == 0 {
		return nil
	}
	return p.takeError(pointer(status))
}

// Status codes that change what a caller does; the numbers are Abseil's.
const (
	statusDeadline      = 4
	statusNotFound      = 5
	statusExhausted     = 8
	statusUnimplemented = 12
	statusInternal      = 13
)

// A Status is an error as the plugin reported it.
type Status struct {
	Code    int
	Message string
}

// Error implements error.
func (s *Status) Error() string { return s.Message }

// takeError turns a PJRT_Error into a Go error and destroys it.
func (p *Plugin) takeError(status unsafe.Pointer) error {
	s := p.readStatus(status)
	code := diag.RuntimeFailed
	what, _, _ := strings.Cut(s.Message, "\n")
	switch {
	case s.Code == statusExhausted, strings.Contains(what, "Out of memory"),
		strings.Contains(what, "CUDA_ERROR_OUT_OF_MEMORY"):
		code = diag.OutOfMemory // XLA:CPU says INTERNAL when a run finds no memory
	case s.Code == statusUnimplemented:
		code = diag.NotSupported
	case strings.Contains(s.Message, "NCCL operation"):
		code = diag.CollectiveFailed
	case strings.Contains(s.Message, "CUDA_ERROR_"), strings.Contains(s.Message, "CUDA error"):
		code = diag.DeviceFailed
	case strings.Contains(what, handlerWords):
		code = diag.HandlerFailed
	}
	return diag.New(code, "%s", what).Wrap(s)
}

func (p *Plugin) readStatus(status unsafe.Pointer) *Status {
	m := list{object: status}
	m.size = unsafe.Sizeof(m)
	purego.SyscallN(p.function(errorMessage), uintptr(unsafe.Pointer(&m)))
	c := number{object: status}
	c.size = unsafe.Sizeof(c)
	purego.SyscallN(p.function(errorGetCode), uintptr(unsafe.Pointer(&c)))
	s := &Status{Code: int(c.value), Message: m.String()}
	d := one{object: status}
	d.size = unsafe.Sizeof(d)
	purego.SyscallN(p.function(errorDestroy), uintptr(unsafe.Pointer(&d)))
	return s
}

// readText runs a call that gives a string of an object.
func (p *Plugin) readText(s slot, object unsafe.Pointer) (string, error) {
	a := list{object: object}
	if err := call(p, s, &a); err != nil {
		return "", err
	}
	return a.String(), nil
}

// readNumber runs a call that gives a small number of an object.
func (p *Plugin) readNumber(s slot, object unsafe.Pointer) (int64, error) {
	a := number{object: object}
	err := call(p, s, &a)
	return a.value, err
}

// readInt is readNumber where C stores an int32.
func (p *Plugin) readInt(s slot, object unsafe.Pointer) (int, error) {
	n, err := p.readNumber(s, object)
	return int(int32(n)), err
}

// readList runs a call that gives objects of an object.
func (p *Plugin) readList(s slot, object unsafe.Pointer) ([]unsafe.Pointer, error) {
	a := list{object: object}
	err := call(p, s, &a)
	return slices.Clone(unsafe.Slice((*unsafe.Pointer)(a.data), int(a.len))), err
}

// readRelated runs a call that gives another object of an object.
func (p *Plugin) readRelated(s slot, object unsafe.Pointer) (unsafe.Pointer, error) {
	a := related{object: object}
	err := call(p, s, &a)
	return a.result, err
}

// destroy runs a call that ends an object. Destructors only fail on misuse that the Go types
// already exclude, so there is nothing to report.
func (p *Plugin) destroy(s slot, object unsafe.Pointer) {
	if object != nil {
		_ = call(p, s, &one{object: object})
	}
}

// pointer turns an address that C returned into a pointer. The address is read through memory
// because the rule against turning integers into pointers is about Go memory that may move; this
// is C memory, which does not.
func pointer(address uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&address)) }

func first(r, _, _ uintptr) uintptr { return r }

// get reads a property of an object, unless something was wrong before.
func get[T any](err *error, read func(slot, unsafe.Pointer) (T, error), s slot,
	object unsafe.Pointer) (v T) {
	if *err == nil {
		v, *err = read(s, object)
	}
	return v
}

func bytesPointer(b []byte) unsafe.Pointer     { return unsafe.Pointer(unsafe.SliceData(b)) }
func stringPointer(s string) unsafe.Pointer    { return unsafe.Pointer(unsafe.StringData(s)) }
func slicePointer[T any](s []T) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(s)) }

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

// Version asks a library at a path for its version: a number that the named function returns, or
// stores where its argument points.
func Version(path, function string, stores bool) (int, error) {
	library, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_GLOBAL)
	if err != nil {
		return 0, err
	}
	address, err := purego.Dlsym(library, function)
	if err != nil {
		return 0, err
	}
	if !stores {
		var ask func() uintptr
		purego.RegisterFunc(&ask, address)
		return int(ask()), nil
	}
	var ask func(*int32) int32
	purego.RegisterFunc(&ask, address)
	var version int32
	if status := ask(&version); status != 0 {
		return 0, fmt.Errorf("%s: status %d", function, status)
	}
	return int(version), nil
}
