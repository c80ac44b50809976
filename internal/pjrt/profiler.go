package pjrt

import (
	"bytes"
	"errors"
	"io/fs"
	"runtime"
	"strings"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/deepwell/deepwell/internal/wire"
)

// profilerAPI is PLUGIN_Profiler_Api (xla/backends/profiler/plugin/profiler_c_api.h, version 1);
// later versions append.
type profilerAPI struct {
	size         uintptr
	private      unsafe.Pointer
	errorDestroy uintptr
	errorMessage uintptr
	errorCode    uintptr
	create       uintptr
	destroy      uintptr
	start        uintptr
	stop         uintptr
	collect      uintptr
}

// A Profiler records what the plugin's threads and its devices do between Start and Stop. A process
// can have one at work at a time.
type Profiler struct {
	api    *profilerAPI
	object unsafe.Pointer
}

// NewProfiler makes a profiler of the plugin. A plugin without one gives fs.ErrNotExist.
func (p *Plugin) NewProfiler() (*Profiler, error) {
	base := p.extensions[extensionProfiler]
	if base == nil {
		return nil, fs.ErrNotExist
	}
	extension := (*struct {
		size uintptr
		kind int32
		next unsafe.Pointer
		api  *profilerAPI
	})(base)
	if extension.api == nil || extension.api.size < unsafe.Sizeof(profilerAPI{}) {
		return nil, fs.ErrNotExist
	}
	x := &Profiler{api: extension.api}
	// ProfileOptions: version 1 is the one whose levels count; errors of a device's tracer are
	// returned rather than logged.
	options := wire.Msg{}.Int(5, 1).Int(2, 2).Int(3, 1).Int(13, 1)
	a := struct {
		size     uintptr
		options  span
		profiler unsafe.Pointer
	}{options: spanOf(options)}
	a.size = unsafe.Sizeof(a)
	err := x.call(x.api.create, unsafe.Pointer(&a))
	runtime.KeepAlive(options)
	x.object = a.profiler
	return x, err
}

// Start begins to record.
func (x *Profiler) Start() error { return x.callOne(x.api.start) }

// Stop ends the recording and gives it as a serialized XSpace.
func (x *Profiler) Stop() ([]byte, error) {
	if err := x.callOne(x.api.stop); err != nil {
		return nil, err
	}
	a := struct {
		size     uintptr
		profiler unsafe.Pointer
		span
	}{profiler: x.object}
	a.size = unsafe.Sizeof(a)
	if err := x.call(x.api.collect, unsafe.Pointer(&a)); err != nil || a.data == nil {
		return nil, err
	}
	space := bytes.Clone(unsafe.Slice((*byte)(a.data), int(a.len)))
	return bytes.TrimSuffix(space, []byte{0}), nil // it serializes with one byte too many
}

// Close frees the profiler.
func (x *Profiler) Close() error {
	if x.object == nil {
		return nil
	}
	err := x.callOne(x.api.destroy)
	x.object = nil
	return err
}

func (x *Profiler) callOne(function uintptr) error {
	a := struct {
		size     uintptr
		profiler unsafe.Pointer
	}{profiler: x.object}
	a.size = unsafe.Sizeof(a)
	return x.call(function, unsafe.Pointer(&a))
}

// call runs a function of the profiler, whose errors are not PJRT's.
func (x *Profiler) call(function uintptr, args unsafe.Pointer) error {
	status := pointer(first(purego.SyscallN(function, uintptr(args))))
	runtime.KeepAlive(args)
	if status == nil {
		return nil
	}
	type failure struct {
		size           uintptr
		private, error unsafe.Pointer
	}
	a := struct {
		failure
		message span
	}{failure: failure{error: status}}
	a.size = unsafe.Sizeof(a)
	purego.SyscallN(x.api.errorMessage, uintptr(unsafe.Pointer(&a)))
	message, _, _ := strings.Cut(a.message.String(), "\n")
	a.size = unsafe.Sizeof(a.failure) // the structure that destroys has no message
	purego.SyscallN(x.api.errorDestroy, uintptr(unsafe.Pointer(&a)))
	return errors.New("the plugin's profiler fails: " + strings.TrimRight(message, ": "))
}
