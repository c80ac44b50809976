package pjrt

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
)

// A Call is one invocation of a Go function by a running program. Its memory is the program's
// own and must not be kept after the handler returns.
type Call struct {
	Args    []HostArray
	Results []HostArray
	Attrs   map[string]any // int64, int32, float32, float64, bool or string
	Device  int            // the device's number on its host, -1 if the runtime does not tell
}

// A HostArray is an argument or a result as a handler sees it. On CPU devices Data is readable
// memory; on GPUs it is a device address, Data is empty and Address is set.
type HostArray struct {
	Shape   dtype.Shape
	Data    []byte
	Address uintptr
}

// A Handler is a Go function that a program calls. It runs on a thread of the engine. A returned
// error, or a panic, fails the run. Where the devices meet in a collective after the call, the
// others wait there for the one that failed, and XLA:CPU ends the process after 40 s; so what went
// wrong is also written to the standard error stream, at once.
type Handler func(*Call) error

// Layout of the typed FFI (xla/ffi/api/c_api.h, version 0.1 to 0.4; later versions append).
type (
	ffiArrayList struct { // XLA_FFI_Args and XLA_FFI_Rets
		head
		len   int64
		types unsafe.Pointer
		items unsafe.Pointer
	}
	ffiAttrs struct {
		head
		len   int64
		types unsafe.Pointer
		names unsafe.Pointer
		items unsafe.Pointer
	}
	ffiFrame struct {
		head
		api   unsafe.Pointer
		ctx   unsafe.Pointer
		stage int32
		args  ffiArrayList
		rets  ffiArrayList
		attrs ffiAttrs
	}
	ffiBuffer struct {
		head
		kind int32
		data unsafe.Pointer
		rank int64
		dims unsafe.Pointer
	}
	ffiMetadata struct { // XLA_FFI_Metadata_Extension, after its common head
		size     uintptr
		kind     int32
		next     unsafe.Pointer
		metadata *struct {
			size    uintptr
			version struct {
				head
				major, minor int32
			}
			traits uint32
		}
	}
	ffiScalar struct {
		kind  int32
		value unsafe.Pointer
	}
	ffiErrorCreate struct {
		head
		message unsafe.Pointer
		code    int32
	}
)

const (
	ffiMetadataExtension = 1
	ffiStageExecute      = 3
	ffiVersionMinor      = 1 // the oldest that has all we use: the widest range of plugins
	ffiAttrScalar        = 3
	ffiAttrString        = 4
	ffiStatusInternal    = 13
	ffiAPIFunctions      = 6 // words of XLA_FFI_Api before its first function
	ffiSlotErrorCreate   = 0
	ffiSlotErrorDestroy  = 2
	ffiSlotDeviceOrdinal = 17
)

// ffiTypes are XLA's numbers (xla.PrimitiveType), which differ from the types of buffers.
var ffiTypes = map[int32]dtype.DType{
	1: dtype.Pred, 2: dtype.S8, 3: dtype.S16, 4: dtype.S32, 5: dtype.S64, 6: dtype.U8,
	7: dtype.U16, 8: dtype.U32, 9: dtype.U64, 10: dtype.F16, 11: dtype.F32, 12: dtype.F64,
	15: dtype.C64, 16: dtype.BF16, 18: dtype.C128, 19: dtype.F8E5M2, 20: dtype.F8E4M3FN,
	21: dtype.S4, 22: dtype.U4, 32: dtype.F4E2M1FN, 33: dtype.F8E8M0FNU,
}

// platformFFI is the name under which a platform looks for handlers.
func platformFFI(platform string) string {
	if platform == "cpu" {
		return "Host"
	}
	return strings.ToUpper(platform)
}

// Register makes a Go function callable by programs of a platform ("cpu", "cuda"), as
// stablehlo.custom_call @target with api_version 4. A target can be registered once in a process.
func (p *Plugin) Register(target, platform string, h Handler) error {
	base := p.extensions[extensionFFI]
	if base == nil {
		return diag.New(diag.NotSupported, "this plugin has no FFI extension")
	}
	ffi := (*struct {
		size     uintptr
		kind     int32
		next     unsafe.Pointer
		register [3]uintptr // type_register, user_data_add, register_handler
	})(base)
	name := platformFFI(platform)
	if err := p.claimHandler(target, name); err != nil {
		return err
	}
	entry := purego.NewCallback(func(f *ffiFrame) uintptr {
		return invoke(f, target, platform == "cpu", h)
	})
	// This structure has no extension pointer, unlike all others.
	a := struct {
		size         uintptr
		target       span
		handler      uintptr
		platform     span
		traits, _pad int32
	}{target: textSpan(target), handler: entry, platform: textSpan(name)}
	a.size = unsafe.Sizeof(a)
	status := first(purego.SyscallN(ffi.register[2], uintptr(unsafe.Pointer(&a))))
	runtime.KeepAlive(name)
	if status != 0 {
		return p.takeError(pointer(status))
	}
	return nil
}

// maxHandlers leaves room among the 2,000 C entry points that purego can make in a process.
const maxHandlers = 1000

// claimHandler reserves a name: the C interface does not say that it is taken.
func (p *Plugin) claimHandler(target, platform string) error {
	p.handlersMu.Lock()
	defer p.handlersMu.Unlock()
	if p.handlers == nil {
		p.handlers = map[string]bool{}
	}
	key := platform + " " + target
	switch {
	case p.handlers[key]:
		return diag.New(diag.HandlerFailed, "a function is already registered as %s", target)
	case len(p.handlers) >= maxHandlers:
		return diag.New(diag.HandlerFailed, "%d functions are registered; there is no room for %s",
			maxHandlers, target)
	}
	p.handlers[key] = true
	return nil
}

// handlerWords begin the message of a failed handler, so that it can be distinguished from other
// errors.
const handlerWords = "Go function "

// invoke runs a handler for one call frame. XLA first calls with a metadata extension, to ask
// which version of the interface the handler was written for.
func invoke(f *ffiFrame, target string, onHost bool, h Handler) (status uintptr) {
	if f.extension != nil {
		if m := (*ffiMetadata)(f.extension); m.kind == ffiMetadataExtension {
			m.metadata.version.major, m.metadata.version.minor = 0, ffiVersionMinor
			m.metadata.traits = 0
			return 0
		}
	}
	if f.stage != ffiStageExecute {
		return 0
	}
	defer func() {
		if r := recover(); r != nil {
			status = f.fail(fmt.Sprintf(handlerWords+"%s panicked: %v", target, r))
		}
	}()
	c := Call{Args: f.args.arrays(onHost), Results: f.rets.arrays(onHost),
		Attrs: f.attrs.read(), Device: f.device()}
	if err := h(&c); err != nil {
		return f.fail(fmt.Sprintf(handlerWords+"%s: %v", target, err))
	}
	return 0
}

func (f *ffiFrame) function(slot int) uintptr {
	size := *(*uintptr)(f.api)
	offset := uintptr(ffiAPIFunctions+slot) * unsafe.Sizeof(uintptr(0))
	if offset+unsafe.Sizeof(uintptr(0)) > size {
		return 0
	}
	return *(*uintptr)(unsafe.Add(f.api, offset))
}

func (f *ffiFrame) fail(message string) uintptr {
	_, _ = os.Stderr.WriteString(message + "\n")
	zeroed := append([]byte(message), 0)
	a := ffiErrorCreate{message: bytesPointer(zeroed), code: ffiStatusInternal}
	a.size = unsafe.Sizeof(a)
	status := first(purego.SyscallN(f.function(ffiSlotErrorCreate), uintptr(unsafe.Pointer(&a))))
	runtime.KeepAlive(zeroed)
	return status
}

func (f *ffiFrame) device() int {
	fn := f.function(ffiSlotDeviceOrdinal)
	if fn == 0 {
		return -1
	}
	a := number{object: f.ctx}
	a.size = unsafe.Sizeof(a)
	if status := first(purego.SyscallN(fn, uintptr(unsafe.Pointer(&a)))); status != 0 {
		d := one{object: pointer(status)}
		d.size = unsafe.Sizeof(d)
		purego.SyscallN(f.function(ffiSlotErrorDestroy), uintptr(unsafe.Pointer(&d)))
		return -1
	}
	return int(int32(a.value))
}

func (l *ffiArrayList) arrays(onHost bool) []HostArray {
	items := unsafe.Slice((**ffiBuffer)(l.items), int(l.len))
	out := make([]HostArray, len(items))
	for i, b := range items {
		shape := dtype.Shape{Type: ffiTypes[b.kind],
			Dims: slices.Clone(unsafe.Slice((*int64)(b.dims), int(b.rank)))}
		out[i] = HostArray{Shape: shape, Address: uintptr(b.data)}
		if onHost {
			out[i].Data = unsafe.Slice((*byte)(b.data), int(shape.Bytes()))
		}
	}
	return out
}

func (a *ffiAttrs) read() map[string]any {
	if a.len == 0 {
		return nil
	}
	out := make(map[string]any, a.len)
	types := unsafe.Slice((*int32)(a.types), int(a.len))
	names := unsafe.Slice((**span)(a.names), int(a.len))
	items := unsafe.Slice((*unsafe.Pointer)(a.items), int(a.len))
	for i, kind := range types {
		name := names[i].String()
		switch kind {
		case ffiAttrString:
			out[name] = (*span)(items[i]).String()
		case ffiAttrScalar:
			out[name] = readScalar((*ffiScalar)(items[i]))
		}
	}
	return out
}

func readScalar(s *ffiScalar) any {
	switch ffiTypes[s.kind] {
	case dtype.Pred:
		return *(*bool)(s.value)
	case dtype.S32:
		return *(*int32)(s.value)
	case dtype.S64:
		return *(*int64)(s.value)
	case dtype.F32:
		return *(*float32)(s.value)
	case dtype.F64:
		return *(*float64)(s.value)
	}
	return nil
}
