package pjrt

import (
	"runtime"
	"sync"
	"unsafe"

	"github.com/deepwell/deepwell/diag"
)

// A Topology describes devices that need not be at hand, to compile for.
type Topology struct {
	plugin *Plugin
	mu     sync.RWMutex
	ptr    unsafe.Pointer
}

// NewTopology describes devices by options: for the CUDA plugin "target_config", the card as a
// text proto, and "topology", partitions x hosts x devices.
func (p *Plugin) NewTopology(options []Option) (*Topology, error) {
	opts, err := newNamed(options)
	if err != nil {
		return nil, err
	}
	a := topologyCreateArgs{options: opts.pointer(), numOptions: opts.len()}
	err = call(p, topologyCreate, &a)
	runtime.KeepAlive(opts)
	if err != nil {
		return nil, err
	}
	return &Topology{plugin: p, ptr: a.topology}, nil
}

// Devices is the number of devices described.
func (t *Topology) Devices() (int, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.ptr == nil {
		return 0, diag.New(diag.BufferGone, "the topology was freed")
	}
	a := list{object: t.ptr}
	err := call(t.plugin, topologyDescriptions, &a)
	return int(a.len), err
}

// Compile compiles for the described devices, without any of them.
func (t *Topology) Compile(code []byte, o CompileOptions) (*Executable, error) {
	options, err := o.Encode()
	if err != nil {
		return nil, err
	}
	program, err := newProgram(code)
	if err != nil {
		return nil, err
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.ptr == nil {
		return nil, diag.New(diag.BufferGone, "the topology was freed")
	}
	a := compileArgs{topology: t.ptr, program: unsafe.Pointer(program),
		options: bytesPointer(options), optionsLen: uintptr(len(options))}
	if err := call(t.plugin, compileTopology, &a); err != nil {
		return nil, compileError(err)
	}
	return &Executable{plugin: t.plugin, ptr: a.executable}, nil
}

// Free ends the topology; a second Free does nothing.
func (t *Topology) Free() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.plugin.destroy(topologyDestroy, t.ptr)
	t.ptr = nil
}
