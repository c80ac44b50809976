package pjrt

import (
	"encoding/binary"
	"errors"
	"runtime"
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/deepwell/deepwell/diag"
)

// HandleBytes is the size of a CUipcMemHandle.
const HandleBytes = 64

// lazyPeerAccess is CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, which the driver insists on.
const lazyPeerAccess = 1

// failedGPU is the first of the driver's results that are about a GPU which has failed, and not
// about a call: CUDA_ERROR_ILLEGAL_ADDRESS.
const failedGPU = 700

// driver has the functions of libcuda.so.1 that open memory of another process. PJRT has none.
type driver struct {
	init        func(flags uint32) int32
	retain      func(context *uintptr, device int32) int32
	release     func(device int32) int32
	push        func(context uintptr) int32
	pop         func(context *uintptr) int32
	synchronize func() int32
	open        uintptr // by openHandle
	close       func(pointer uintptr) int32
	addresses   func(start *uintptr, bytes *uintptr, pointer uintptr) int32
	copy        func(to, from, bytes uintptr) int32
	name        func(result int32, text *unsafe.Pointer) int32
}

// loadDriver loads the driver once in a process.
var loadDriver = sync.OnceValues(func() (*driver, error) {
	const soname = "libcuda.so.1"
	library, err := purego.Dlopen(soname, purego.RTLD_NOW|purego.RTLD_GLOBAL)
	if err != nil {
		return nil, loadError(soname, err)
	}
	d := &driver{}
	for name, fn := range map[string]any{"cuInit": &d.init, "cuDevicePrimaryCtxRetain": &d.retain,
		"cuDevicePrimaryCtxRelease_v2": &d.release, "cuCtxPushCurrent_v2": &d.push,
		"cuCtxPopCurrent_v2": &d.pop, "cuCtxSynchronize": &d.synchronize,
		"cuIpcOpenMemHandle_v2": &d.open, "cuIpcCloseMemHandle": &d.close,
		"cuMemGetAddressRange_v2": &d.addresses, "cuMemcpyDtoD_v2": &d.copy,
		"cuGetErrorName": &d.name} {
		address, err := purego.Dlsym(library, name)
		if err != nil {
			return nil, loadError(soname, err)
		}
		if word, ok := fn.(*uintptr); ok {
			*word = address
		} else {
			purego.RegisterFunc(fn, address)
		}
	}
	return d, nil
})

// check makes an error of the driver's answer.
func (d *driver) check(call string, result int32) error {
	if result == 0 {
		return nil
	}
	var text unsafe.Pointer
	name := ""
	if d.name(result, &text) == 0 && text != nil {
		name = cString(text)
	}
	code := diag.RuntimeFailed
	if result >= failedGPU {
		code = diag.DeviceFailed
	}
	return diag.New(code, "%s: %s (%d)", call, name, result)
}

// cString copies a string of C that ends with a zero.
func cString(text unsafe.Pointer) string {
	n := 0
	for *(*byte)(unsafe.Add(text, n)) != 0 {
		n++
	}
	return span{text, uintptr(n)}.String()
}

// in calls fn on a thread whose context is the device's primary one, which XLA uses as well.
func (d *driver) in(device int, fn func() error) (err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := d.check("cuInit", d.init(0)); err != nil {
		return err
	}
	var context uintptr
	err = d.check("cuDevicePrimaryCtxRetain", d.retain(&context, int32(device)))
	if err != nil {
		return err
	}
	defer d.release(int32(device))
	if err := d.check("cuCtxPushCurrent", d.push(context)); err != nil {
		return err
	}
	defer d.pop(&context)
	return fn()
}

// openHandle calls cuIpcOpenMemHandle(&address, handle, flags), which takes a structure of 64
// bytes by value: on x86-64 it is on the stack, behind the arguments that fill the six registers,
// on arm64 a pointer to a copy.
func (d *driver) openHandle(address *uintptr, handle *[HandleBytes / 8]uintptr) error {
	pin := new(runtime.Pinner)
	defer pin.Unpin()
	pin.Pin(address)
	pin.Pin(handle)
	to := uintptr(unsafe.Pointer(address))
	args := []uintptr{to, uintptr(unsafe.Pointer(handle)), lazyPeerAccess}
	if runtime.GOARCH == "amd64" {
		args = append([]uintptr{to, lazyPeerAccess, 0, 0, 0, 0}, handle[:]...)
	}
	return d.check("cuIpcOpenMemHandle", int32(first(purego.SyscallN(d.open, args...))))
}

// Shared is an allocation of another process in the memory of a device, as this process has it.
type Shared struct {
	driver  *driver
	device  *Device
	Address uintptr
	Size    int64 // bytes
}

// OpenShared opens the allocation that a CUipcMemHandle of another process names. A handle that is
// open already gives the same address, and is to be closed once more.
func OpenShared(device *Device, handle []byte) (*Shared, error) {
	if len(handle) != HandleBytes {
		return nil, diag.New(diag.BadInput, "a handle of a GPU's memory has %d bytes, not %d",
			HandleBytes, len(handle))
	}
	d, err := loadDriver()
	if err != nil {
		return nil, err
	}
	s := &Shared{driver: d, device: device}
	var words [HandleBytes / 8]uintptr
	for i := range words {
		words[i] = uintptr(binary.NativeEndian.Uint64(handle[8*i:]))
	}
	err = d.in(device.LocalID, func() error {
		if err := d.openHandle(&s.Address, &words); err != nil {
			return err
		}
		var start, bytes uintptr
		err := d.check("cuMemGetAddressRange", d.addresses(&start, &bytes, s.Address))
		s.Size = int64(bytes - (s.Address - start))
		return err
	})
	if err != nil && !errors.Is(err, diag.DeviceFailed) {
		err = diag.New(diag.BadInput, "device %d can open no memory by this handle", device.ID).Wrap(err).
			Try("give the handle of memory by cudaMalloc that is not freed, of another process")
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

// Close ends the mapping: nobody may use the memory afterwards.
func (s *Shared) Close() error {
	return s.driver.in(s.device.LocalID, func() error {
		return s.driver.check("cuIpcCloseMemHandle", s.driver.close(s.Address))
	})
}

// Copy copies bytes from one address of the device to another, and waits for it.
func (s *Shared) Copy(to, from uintptr, bytes int64) error {
	return s.driver.in(s.device.LocalID, func() error {
		err := s.driver.check("cuMemcpyDtoD", s.driver.copy(to, from, uintptr(bytes)))
		if err != nil {
			return err
		}
		return s.driver.check("cuCtxSynchronize", s.driver.synchronize())
	})
}
