package pjrt

import (
	"errors"
	"runtime"
	"slices"
	"strings"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/hlo"
)

// An Executable is a compiled program. It can be examined and written to disk; only a [Loaded]
// one can run.
type Executable struct{ object }

func (p *Plugin) newExecutable(ptr unsafe.Pointer) *Executable {
	return &Executable{object{plugin: p, what: "executable", ptr: ptr}}
}

// A Signature is what a program takes and gives, for one device.
type Signature struct {
	Params  []dtype.Shape
	Results []dtype.Shape
	Donates []bool // for each parameter: whether a run consumes it
	// Alone says that the devices neither wait for each other nor call out, so that they may be
	// started one after the other on one thread.
	Alone bool
}

// Free ends the executable; a second Free does nothing.
func (x *Executable) Free() { x.free(executableDestroy) }

// CompiledMemory is what one device needs to run a program, in bytes, as the compiler counts it.
type CompiledMemory struct {
	Code     int64
	Argument int64
	Output   int64
	Alias    int64 // the part of Output that reuses donated arguments
	Temp     int64
	Peak     int64
	Host     int64 // host memory: arguments, outputs and temp together
}

// Memory reads the compiler's account of the memory that a run needs.
func (x *Executable) Memory() (m CompiledMemory, err error) {
	err = x.use(func(ptr unsafe.Pointer) error {
		a := compiledMemoryArgs{executable: ptr}
		if err := call(x.plugin, executableMemoryStats, &a); err != nil {
			return err
		}
		m = CompiledMemory{Code: a.code, Argument: a.argument, Output: a.output, Alias: a.alias,
			Temp: a.temp, Peak: a.peak,
			Host: a.host.code + a.host.argument + a.host.output - a.host.alias + a.host.temp}
		return nil
	})
	return m, err
}

// Optimized reads the program as the compiler left it.
func (x *Executable) Optimized() (*hlo.Module, error) {
	format, code, err := x.OptimizedBytes()
	if err != nil {
		return nil, err
	}
	return hlo.Read(format, code)
}

// OptimizedBytes gives the program as the compiler left it, in a format that [hlo.Read] knows.
func (x *Executable) OptimizedBytes() (format string, code []byte, err error) {
	err = x.use(func(ptr unsafe.Pointer) error {
		var program programArgs
		program.size = unsafe.Sizeof(program)
		a := related{object: ptr, result: unsafe.Pointer(&program)}
		if err := call(x.plugin, executableOptimized, &a); err != nil {
			return err
		}
		code = make([]byte, program.code.len)
		program.code.data = bytesPointer(code)
		if err := call(x.plugin, executableOptimized, &a); err != nil {
			return err
		}
		format = program.format.String()
		return nil
	})
	return format, code, err
}

// Serialize writes the executable as bytes that the same version of the plugin can load again.
func (x *Executable) Serialize() (data []byte, err error) {
	err = x.use(func(ptr unsafe.Pointer) error {
		a := serialized{object: ptr}
		if err := call(x.plugin, executableSerialize, &a); err != nil {
			return err
		}
		data = slices.Clone(unsafe.Slice((*byte)(a.data), int(a.len)))
		purego.SyscallN(a.deleter, uintptr(a.backing))
		return nil
	})
	return data, err
}

func (x *Executable) results() (shapes []dtype.Shape, err error) {
	err = x.use(func(ptr unsafe.Pointer) error {
		types := list{object: ptr}
		if err := call(x.plugin, executableOutputTypes, &types); err != nil {
			return err
		}
		dims := outputArgs{executable: ptr}
		if err := call(x.plugin, executableOutputDims, &dims); err != nil {
			return err
		}
		lens := unsafe.Slice((*uintptr)(dims.lens), int(dims.outputs))
		at := 0
		for i, kind := range unsafe.Slice((*int32)(types.data), int(types.len)) {
			n := int(lens[i])
			all := unsafe.Slice((*int64)(dims.items), at+n)
			shapes = append(shapes, dtype.Shape{Type: typeOfBuffer(kind), Dims: slices.Clone(all[at:])})
			at += n
		}
		return nil
	})
	return shapes, err
}

// Compile compiles StableHLO text or bytecode, or a serialized HLO module, for devices of the
// client, ready to run.
func (c *Client) Compile(code []byte, o CompileOptions) (*Loaded, error) {
	if err := c.enter(); err != nil {
		return nil, err
	}
	defer c.leave()
	for _, id := range o.Devices {
		if !slices.ContainsFunc(c.devices, func(d *Device) bool { return d.ID == id }) {
			return nil, diag.New(diag.DeviceMismatch, "there is no device %d", id)
		}
	}
	options, program, err := newProgram(code, o)
	if err != nil {
		return nil, err
	}
	a := clientCompileArgs{client: c.ptr, program: unsafe.Pointer(program), options: spanOf(options)}
	if err := call(c.plugin, clientCompile, &a); err != nil {
		return nil, compileError(err)
	}
	return c.newLoaded(a.executable, nil)
}

// Load brings back what Serialize wrote, for the devices of o. The signature is the one the
// executable had when it was compiled: a loaded program does not always know its own.
func (c *Client) Load(data []byte, o CompileOptions, sig Signature) (*Loaded, error) {
	if err := c.enter(); err != nil {
		return nil, err
	}
	defer c.leave()
	options, err := o.Encode()
	if err != nil {
		return nil, err
	}
	a := loadArgs{client: c.ptr, data: spanOf(data), options: spanOf(options)}
	if err := call(c.plugin, deserializeAndLoad, &a); err != nil {
		return nil, compileError(err)
	}
	return c.newLoaded(a.loaded, &sig)
}

func newProgram(code []byte, o CompileOptions) (options []byte, p *programArgs, err error) {
	if options, err = o.Encode(); err != nil {
		return nil, nil, err
	}
	if len(code) == 0 {
		return nil, nil, diag.New(diag.ProgramText, "the program is empty")
	}
	format := "mlir"
	if o.HLO {
		format = "hlo"
	}
	p = &programArgs{code: spanOf(code), format: textSpan(format)}
	p.size = unsafe.Sizeof(*p)
	return options, p, nil
}

// compileError tells a fault in the program's text or options from a failure of the compiler.
func compileError(err error) error {
	s, ok := errors.AsType[*Status](err)
	if !ok || s.Code == statusExhausted {
		return err
	}
	if where, what, ok := findLocation(s.Message); ok {
		return &diag.Error{Code: diag.ProgramText, What: what, Where: where, Err: s}
	}
	what, _, _ := strings.Cut(s.Message, "\n")
	failed := diag.New(diag.CompileFailed, "%s", what)
	switch {
	case strings.Contains(what, "No such compile option"),
		strings.Contains(what, "While setting option"):
		failed = diag.New(diag.CompileOption, "%s", what).
			Try("options are the fields of DebugOptions in XLA's xla.proto, with their types")
	case strings.Contains(what, "No registered implementation"):
		failed = failed.Try("register the function before compiling, or compile for a GPU that has it")
	}
	return failed.Wrap(s)
}

// findLocation looks for the position that MLIR's parser puts before its message, as in
// "-:3:14: error: custom op 'stablehlo.ad' is unknown". The notes that follow it repeat the
// program or blame its version, so the first message is all that is passed on.
func findLocation(message string) (where, what string, found bool) {
	for line := range strings.SplitSeq(message, "\n") {
		at, rest, ok := strings.Cut(line, ": error: ")
		parts := strings.Split(at, ":")
		if !ok || len(parts) < 3 {
			continue
		}
		return "line " + parts[len(parts)-2] + ", column " + parts[len(parts)-1], rest, true
	}
	return "", "", false
}

// A Topology describes devices that need not be at hand, to compile for.
type Topology struct{ object }

// NewTopology describes devices by options: for the CUDA plugin "target_config", the GPU as a
// text proto, and "topology", partitions x hosts x devices.
func (p *Plugin) NewTopology(options []Option) (*Topology, error) {
	opts, err := newNamed(options)
	if err != nil {
		return nil, err
	}
	a := topologyCreateArgs{options: spanOf(opts.values)}
	err = call(p, topologyCreate, &a)
	runtime.KeepAlive(opts)
	if err != nil {
		return nil, err
	}
	return &Topology{object{plugin: p, what: "topology", ptr: a.topology}}, nil
}

// Compile compiles for the described devices, without any of them.
func (t *Topology) Compile(code []byte, o CompileOptions) (x *Executable, err error) {
	options, program, err := newProgram(code, o)
	if err != nil {
		return nil, err
	}
	err = t.use(func(ptr unsafe.Pointer) error {
		a := compileArgs{topology: ptr, program: unsafe.Pointer(program), options: spanOf(options)}
		err := call(t.plugin, compileTopology, &a)
		x = t.plugin.newExecutable(a.executable)
		return err
	})
	if err != nil {
		return nil, compileError(err)
	}
	return x, nil
}

// Free ends the topology; a second Free does nothing.
func (t *Topology) Free() { t.free(topologyDestroy) }
