package engine

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/cas"
	"github.com/deepwell/deepwell/internal/pjrt"
	"github.com/deepwell/deepwell/program"
)

// An Executable is a compiled module, loaded on its devices. Several goroutines may run it at the
// same time, also with the same arguments.
type Executable struct {
	engine  *Engine
	module  program.Module
	loaded  *shared
	cached  bool // came from the cache, or was loaded before
	freed   atomic.Bool
	scratch sync.Pool // of [][]*pjrt.Buffer: argument lists by device
}

// A programHead is the JSON part of a cache entry, before the serialized program.
type programHead struct {
	pjrt.Signature
	Seconds float64 // compile time
}

// Compile compiles a module for the devices it names. In this order it takes the program from what
// the engine has loaded, from the cache on disk, or from XLA. The key covers the text, the compile
// options, the engine's files, the host's processor and every environment variable that XLA reads.
// Where several processes share the client and the module, the one with its first device compiles,
// and the others get the program from it.
//
// Shapes, donation and number of arguments must be the same in the description and in the text.
// A module without a description (Args and Results are nil) gets one from the compiled program.
func (e *Engine) Compile(ctx context.Context, m *program.Module) (*Executable, error) {
	if err := ctx.Err(); err != nil {
		return nil, diag.New(diag.Canceled, "stopped before compiling %s", m.Name).Wrap(err)
	}
	if err := m.Validate(); err != nil {
		return nil, err
	}
	return e.compile(ctx, m, []byte(m.Text), e.options(m))
}

// CompileHLO compiles a serialized xla.HloModuleProto for the devices of a module, whose arguments
// and results it must have. The module's text is not used. The code prescribes every rounding: the
// compiler may not keep more bits than its types have, whatever the module's flags say.
//
// XLA checks less of HLO than of StableHLO: it ends the process on calls and layouts that it does
// not know. What comes from elsewhere is compiled in a process that may crash.
func (e *Engine) CompileHLO(ctx context.Context, m *program.Module, code []byte) (*Executable,
	error) {
	if err := ctx.Err(); err != nil {
		return nil, diag.New(diag.Canceled, "stopped before compiling %s", m.Name).Wrap(err)
	}
	described := *m
	described.Text = "HLO" // a module has a text
	if err := described.Validate(); err != nil {
		return nil, err
	}
	flags := map[string]any{}
	maps.Copy(flags, m.Flags)
	flags["xla_allow_excess_precision"] = false
	return e.compile(ctx, m, code, pjrt.CompileOptions{Devices: m.Devices, DeviceMemory: m.MemoryBytes,
		Flags: flags, HLO: true})
}

// compile compiles the code of a module, whose description is consistent.
func (e *Engine) compile(ctx context.Context, m *program.Module, code []byte,
	options pjrt.CompileOptions) (*Executable, error) {
	for _, id := range m.Devices {
		if _, err := e.device(id); err != nil && !e.remote(id) {
			return nil, err
		}
	}
	if err := checkDumps(m.Flags); err != nil {
		return nil, err
	}
	encoded, err := options.Encode()
	if err != nil {
		return nil, err
	}
	b := build{m: m, code: code, options: options,
		key: cas.Key(slices.Concat([][]byte{[]byte(cacheVersion), []byte(e.digest), e.hostKey(),
			e.environ.Key(), code, encoded}, form(options))...)}
	start := time.Now()
	var loaded *shared
	if !dumps(options.Flags, e.environ) { // a program that is loaded already writes no files
		loaded = e.programs.take(b.key)
	}
	cached, from := true, ""
	if loaded == nil {
		e.events.Emit(event.Busy{Task: "compiling " + m.Name})
		p, err := e.obtain(ctx, b)
		if err != nil {
			return nil, err
		}
		cached, from, start = p.cached, p.from, start.Add(p.waited)
		loaded = e.programs.put(b.key, p.Loaded, p.head.Seconds)
	}
	x := &Executable{engine: e, module: *m, loaded: loaded, cached: cached}
	if err := x.check(); err != nil {
		x.Free()
		return nil, err
	}
	e.events.Emit(event.Compiled{Module: m.Name, Target: e.platform, Devices: len(m.Devices),
		Seconds: time.Since(start).Seconds(), Cached: cached, From: from})
	return x, nil
}

// compileAsPlanned compiles, and once more if XLA rematerializes on its own (see disablePasses), as
// [Compiler.Compile] does: the program is the one that was planned with.
func (e *Engine) compileAsPlanned(code []byte, options pjrt.CompileOptions) (*pjrt.Loaded, error) {
	one, err := e.client.Compile(code, options)
	if err != nil || e.platform != "cuda" || options.Flags[disablePasses] != nil {
		return one, err
	}
	m, err := one.Optimized()
	if err == nil && len(m.Remat()) == 0 {
		return one, nil
	}
	one.Free()
	if err != nil {
		return nil, err
	}
	options.Flags = maps.Clone(options.Flags)
	options.Flags[disablePasses] = "rematerialization"
	return e.client.Compile(code, options)
}

// form is the part of a key that tells HLO from StableHLO, which has none.
func form(o pjrt.CompileOptions) [][]byte {
	if o.HLO {
		return [][]byte{[]byte("hlo")}
	}
	return nil
}

// check compares the module's description with the compiled program's signature, and fills in a
// description that is missing.
func (x *Executable) check() error {
	sig, m := x.loaded.Signature(), &x.module
	if m.Args == nil && m.Results == nil {
		for i, shape := range sig.Params {
			m.Args = append(m.Args, program.Array{Name: fmt.Sprintf("arg%d", i), Global: shape})
		}
		for i, shape := range sig.Results {
			m.Results = append(m.Results, program.Array{Name: fmt.Sprintf("result%d", i), Global: shape})
		}
		return nil
	}
	if err := x.compare("argument", m.Args, sig.Params); err != nil {
		return err
	}
	if err := x.compare("result", m.Results, sig.Results); err != nil {
		return err
	}
	for i, a := range m.Args {
		if donated := a.Into != ""; donated != sig.Donates[i] {
			return diag.New(diag.ProgramInvalid, "argument %s: the module says donated=%v, its text %v",
				a.Name, donated, sig.Donates[i]).At("module %s", m.Name)
		}
	}
	return nil
}

func (x *Executable) compare(what string, specs []program.Array, shapes []dtype.Shape) error {
	if len(specs) != len(shapes) {
		return diag.New(diag.ProgramInvalid, "the module lists %d %ss, its text has %d", len(specs), what,
			len(shapes)).At("module %s", x.module.Name)
	}
	for i, spec := range specs {
		local, err := x.module.Local(spec)
		if err != nil {
			return err
		}
		if !local.Equal(shapes[i]) {
			return diag.New(diag.ProgramInvalid, "%s %s is %s on a device; the text has %s", what,
				spec.Name, local, shapes[i]).At("module %s", x.module.Name)
		}
	}
	return nil
}

// Module describes the program, its arguments and its results. The caller must not change it.
func (x *Executable) Module() *program.Module { return &x.module }

// Memory is what a run needs on each device, by the compiler's count.
func (x *Executable) Memory() (Memory, error) {
	if err := x.alive(); err != nil {
		return Memory{}, err
	}
	m, err := x.loaded.Memory()
	return Memory(m), err
}

// Optimized is the program after XLA's passes: fused, scheduled, with buffers assigned.
func (x *Executable) Optimized() (*hlo.Module, error) {
	if err := x.alive(); err != nil {
		return nil, err
	}
	return x.loaded.Optimized()
}

// Free releases the executable; runs that have started go on. The program stays loaded while
// another Executable of the same engine uses it.
func (x *Executable) Free() {
	if !x.freed.Swap(true) {
		x.engine.programs.release(x.loaded)
	}
}

// alive returns an error once the executable was freed.
func (x *Executable) alive() error {
	if x.freed.Load() {
		return diag.New(diag.BufferGone, "the executable of module %s was freed", x.module.Name)
	}
	return nil
}

// A Run is one execution of a module. Its owner frees it, which frees the results that nobody has
// taken. All methods but Wait are for one goroutine.
type Run struct {
	// Results are in the module's order. They may be arguments of other runs before Wait returns.
	Results []*Array
	run     *pjrt.Run
	kept    map[*Array]bool // results with another owner: a State, or the caller of Take
}

// Run queues the module with arguments in its order and returns at once, before it has run; other
// runs may take the results as arguments. Donated arguments are consumed.
//
// ctx covers the start alone: on CPU devices, a module with collectives starts when the previous
// run on its devices is done. If ctx ends first, nothing is started or consumed, and the error has
// the code [diag.Canceled]. If an argument was freed or donated before, its code is
// [diag.BufferGone], and nothing is started either. A run that has started cannot be canceled;
// [Run.Wait] stops waiting for it.
func (x *Executable) Run(ctx context.Context, args ...*Array) (*Run, error) {
	if len(args) != len(x.module.Args) {
		return nil, diag.New(diag.ArgumentCount, "module %s takes %d arguments; %d were given",
			x.module.Name, len(x.module.Args), len(args))
	}
	if err := x.alive(); err != nil {
		return nil, err
	}
	devices := x.loaded.Devices()
	// lists[d][i] is argument i of device d; the memory is reused, since a step has some thousand
	// arguments on each device.
	lists, _ := x.scratch.Get().([][]*pjrt.Buffer)
	if lists == nil {
		flat := make([]*pjrt.Buffer, len(devices)*len(args))
		for range devices {
			lists = append(lists, flat[:len(args):len(args)])
			flat = flat[len(args):]
		}
	}
	defer func() {
		for _, list := range lists {
			clear(list)
		}
		x.scratch.Put(lists) //nolint:staticcheck // a slice header a run is cheaper than a pointer
	}()
	for i, a := range args {
		if a == nil || len(a.parts) != len(devices) {
			return nil, diag.New(diag.ArgumentCount,
				"argument %s of module %s must have a shard on each of %d devices",
				x.module.Args[i].Name, x.module.Name, len(devices))
		}
		for d := range devices {
			lists[d][i] = a.parts[d]
		}
	}
	run, err := x.loaded.Execute(ctx, lists)
	if err != nil {
		return nil, err
	}
	r := &Run{run: run, Results: make([]*Array, len(x.module.Results))}
	// One allocation for all results, and one for all their shards.
	arrays := make([]Array, len(x.module.Results))
	parts := make([]*pjrt.Buffer, len(devices)*len(arrays))
	for i := range arrays {
		own := parts[:len(devices):len(devices)]
		parts = parts[len(devices):]
		for d := range devices {
			own[d] = run.Outputs[d][i]
		}
		arrays[i] = Array{spec: x.module.Results[i], local: own[0].Shape(), parts: own}
		r.Results[i] = &arrays[i]
	}
	return r, nil
}

// Wait waits until all local devices are done and returns the first error, each time it is called.
// If ctx ends first, the run goes on, and Wait may be called again.
func (r *Run) Wait(ctx context.Context) error { return r.run.Wait(ctx) }

// Free frees every result that is still live and has no other owner. It does not wait.
func (r *Run) Free() {
	if len(r.kept) == 0 {
		r.run.Free()
		return
	}
	for _, a := range r.Results {
		if !r.kept[a] {
			a.Free()
		}
	}
	r.run.Forget()
}

// Take makes the caller the owner of all results: Free leaves them alone.
func (r *Run) Take() []*Array {
	if r.kept == nil {
		r.kept = make(map[*Array]bool, len(r.Results))
	}
	for _, a := range r.Results {
		r.kept[a] = true
	}
	return r.Results
}

// Keep puts results into a state by their names; the state owns them from now on.
func (r *Run) Keep(st *State, results ...*Array) {
	if r.kept == nil {
		r.kept = map[*Array]bool{}
	}
	for _, a := range results {
		st.Put(a)
		r.kept[a] = true
	}
}

// A State owns arrays on the devices by their global names, from step to step: parameters,
// optimizer state, accumulated gradients. The zero value is empty.
//
// Its methods may be called by several goroutines. [Executable.Step] calls several of them, and is
// for one goroutine at a time on one State. Nobody may free an array of the State but its methods.
type State struct {
	mu     sync.Mutex
	arrays map[string]*Array
}

// Put stores an array under its name and frees the array that had the name before.
func (st *State) Put(a *Array) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.arrays == nil {
		st.arrays = map[string]*Array{}
	}
	if old := st.arrays[a.Name()]; old != nil && old != a {
		old.Free()
	}
	st.arrays[a.Name()] = a
}

// Get returns the array of a name, or nil. It stays the state's: a caller must not free it.
func (st *State) Get(name string) *Array {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.arrays[name]
}

// Names lists the names of all arrays, sorted.
func (st *State) Names() []string {
	st.mu.Lock()
	defer st.mu.Unlock()
	return slices.Sorted(maps.Keys(st.arrays))
}

// Drop frees arrays by name; unknown names are ignored.
func (st *State) Drop(names ...string) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for _, name := range names {
		if a := st.arrays[name]; a != nil {
			a.Free()
			delete(st.arrays, name)
		}
	}
}

// Free frees all arrays and leaves the state empty.
func (st *State) Free() {
	st.mu.Lock()
	defer st.mu.Unlock()
	for _, a := range st.arrays {
		a.Free()
	}
	st.arrays = nil
}

// Step runs a module on a state: each argument is the input of its name, or else the state's array
// of that name. Inputs stay the caller's, unless the module donates them; an input that is no
// argument of the module is an error, and nil inputs are skipped.
//
// Results that take the memory of donated arguments replace them in the state, which owns them. The
// other results belong to the returned [Run]: its Free frees them, unless [Run.Keep] gives them to
// a state or [Run.Take] to the caller.
//
// Like Run, Step returns when the module is queued. Steps on one state are started by one goroutine
// at a time: of two that donate the same array, one fails with [diag.BufferGone].
func (x *Executable) Step(ctx context.Context, st *State, inputs ...*Array) (*Run, error) {
	for _, a := range inputs {
		if a != nil && !slices.ContainsFunc(x.module.Args, func(spec program.Array) bool {
			return spec.Name == a.Name()
		}) {
			return nil, diag.New(diag.ArgumentCount, "module %s has no argument %s", x.module.Name,
				a.Name())
		}
	}
	args := make([]*Array, len(x.module.Args))
	for i, spec := range x.module.Args {
		at := slices.IndexFunc(inputs, func(a *Array) bool { return a != nil && a.Name() == spec.Name })
		if at >= 0 {
			args[i] = inputs[at]
		} else if args[i] = st.Get(spec.Name); args[i] == nil {
			return nil, diag.New(diag.ArgumentCount,
				"module %s needs %s, which is neither an input nor in the state", x.module.Name, spec.Name)
		}
	}
	r, err := x.Run(ctx, args...)
	if err != nil {
		return nil, err
	}
	for _, spec := range x.module.Args {
		if spec.Into == "" {
			continue
		}
		at := slices.IndexFunc(x.module.Results, func(a program.Array) bool {
			return a.Name == spec.Into
		})
		r.Keep(st, r.Results[at])
	}
	return r, nil
}
