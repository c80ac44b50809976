package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/environ"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/pjrt"
	"github.com/deepwell/deepwell/plugin"
	"github.com/deepwell/deepwell/program"
)

// Options say how an engine or a compiler is opened.
type Options struct {
	// Dir is the folder of installed engines; "" is the user's.
	Dir string
	// Devices is the number of CPU devices to make; 0 means 1. Of GPUs it is how many are opened, the
	// first that CUDA shows, and 0 means all: others, and their memory, are left alone.
	Devices int
	// Cache is the folder of caches. Compiled programs go to its subfolder "programs"; nothing else
	// in it is touched. "" turns the compile cache off.
	Cache string
	// Environ is the environment of the process, which the engine's libraries read whatever stands
	// here; nil is [os.Environ]. Variables that change numbers are refused, or part of the cache's
	// key and of the engine's [Identity].
	Environ []string
	// Events gets an event for each compile, and warnings about a cache that cannot be used.
	Events event.Sink
	// Nodes is the number of processes that share one GPU client, Node the rank of this one, and
	// Store is how they find each other. A single process needs none of them.
	Node, Nodes int
	Store       Store
	// MemoryFraction is the fraction of a GPU's memory that the engine allocates; 0 leaves it to XLA,
	// which takes three quarters.
	MemoryFraction float32
	// OnDemand makes the engine allocate a GPU's memory as it needs it, and not all of its fraction at
	// once: another process works there, too.
	OnDemand bool
	// WithoutCuDNN makes a [Compiler] skip cuDNN's plans: cuDNN calls are compiled as names only,
	// and reported memory lacks their workspace.
	WithoutCuDNN bool
	// Ahead makes a [Compiler] keep executables in the cache, and an engine on GPUs of that model use
	// them where the cache has none of its own. Programs that call cuDNN are left out.
	Ahead bool
}

// A Store is the key-value store through which the processes of one client find each other. Its
// methods are called from threads of the engine, several at the same time.
type Store interface {
	// Get waits up to timeout for a key to be put.
	Get(key string, timeout time.Duration) ([]byte, error)
	// TryGet returns at once; the error of a missing key is fs.ErrNotExist.
	TryGet(key string) ([]byte, error)
	// Put stores a value.
	Put(key string, value []byte) error
}

// An Engine runs programs on the devices of this process.
//
// Its methods may be called by several goroutines at the same time, except Close, which must come
// last. Several trainers may share an engine: they share its devices and their memory.
type Engine struct {
	name     string
	version  string
	digest   string
	platform string
	bundle   *plugin.Bundle
	plugin   *pjrt.Plugin
	client   *pjrt.Client
	devices  map[int]*pjrt.Device // by global number; nil for devices of other processes
	cache    cache
	programs loadedPrograms
	ahead    bool
	store    Store // of the processes that share the client; nil for one
	shipped  atomic.Int64
	imports  imports
	environ  *environ.Set
	events   event.Sink
}

// Open opens the named engine: "cpu", or "cuda13-run" on a host with GPUs. The smaller "cuda13"
// compiles, but lacks what a GPU host needs to run (NCCL, cuBLAS); its name opens cuda13-run if
// only that one is installed.
func Open(ctx context.Context, name string, o Options) (*Engine, error) {
	if o.Devices < 0 || o.Devices > maxCPUDevices {
		return nil, diag.New(diag.BadUsage, "an engine has 1 to %d CPU devices, not %d", maxCPUDevices,
			o.Devices)
	}
	if o.Environ == nil {
		o.Environ = os.Environ()
	}
	variables, err := environ.Read(o.Environ)
	if err != nil {
		return nil, err
	}
	p, bundle, err := loadToRun(ctx, name, o.Dir)
	if err != nil {
		return nil, err
	}
	e := &Engine{name: name, bundle: bundle, version: bundle.Version, digest: bundle.Digest,
		platform: platformOf(name), plugin: p, cache: newCache(o), environ: variables,
		ahead: o.Ahead, events: o.Events}
	if o.Nodes > 1 {
		e.store = o.Store
	}
	if e.events == nil {
		e.events = event.Discard
	}
	for _, variable := range variables.Allowed() {
		e.events.Emit(event.Warning{Code: string(diag.EnvRefused), Text: variable +
			" is set, and allowed by " + environ.Allow + ": numbers may differ from other runs",
			Fix: "unset " + variable})
	}
	if e.client, err = p.NewClient(e.clientOptions(o), o.Store); err != nil {
		return nil, diag.New(diag.EngineLoad, "engine %q cannot open its devices", name).Wrap(err).
			Try("deepwell doctor")
	}
	e.devices = map[int]*pjrt.Device{}
	for _, d := range e.client.Devices() {
		e.devices[d.ID] = nil
	}
	for _, d := range e.client.Local() {
		e.devices[d.ID] = d
	}
	return e, nil
}

// maxCPUDevices bounds the virtual devices of a process: XLA makes a thread for each, and ends the
// process when the system refuses one.
const maxCPUDevices = 256

// load verifies an installed engine and loads its plugin. The CPU engine's temporary memory is
// C memory, so the allocator is set up before the plugin allocates anything.
func load(ctx context.Context, name, dir string) (*pjrt.Plugin, *plugin.Bundle, error) {
	dir, err := engineDir(dir)
	if err != nil {
		return nil, nil, err
	}
	bundle, err := verify(ctx, dir, name, plugin.Open)
	if err != nil {
		return nil, nil, err
	}
	if platformOf(name) == "cpu" {
		pjrt.KeepResident()
	}
	p, err := pjrt.Load(bundle.Plugin, bundle.Preload...)
	if err == nil {
		err = bundle.Loaded()
	}
	return p, bundle, err
}

func engineDir(dir string) (string, error) {
	if dir != "" {
		return dir, nil
	}
	return plugin.DefaultDir(os.Getenv)
}

// verified remembers the bundles that this process has verified: a library that is in memory does
// not change when its file does.
var verified = struct {
	sync.Mutex
	bundles map[string]*plugin.Bundle
}{bundles: map[string]*plugin.Bundle{}}

// Verify finds an installed engine in dir and hashes all its files. If this process has verified or
// opened the engine already, it gives the bundle of then and reads nothing: opening has hashed the
// files that changed since they were hashed last.
func Verify(ctx context.Context, dir, name string) (*plugin.Bundle, error) {
	return verify(ctx, dir, name, plugin.Verify)
}

func verify(ctx context.Context, dir, name string,
	open func(ctx context.Context, dir, name string) (*plugin.Bundle, error)) (*plugin.Bundle,
	error) {
	verified.Lock()
	defer verified.Unlock()
	if b := verified.bundles[dir+"\x00"+name]; b != nil {
		return b, nil
	}
	b, err := open(ctx, dir, name)
	if err == nil {
		verified.bundles[dir+"\x00"+name] = b
	}
	return b, err
}

// platformOf returns XLA's platform of an engine: cuda for cuda13.
func platformOf(name string) string {
	if strings.HasPrefix(name, "cuda") {
		return "cuda"
	}
	return name
}

// clientOptions are the plugin's own options: CPU devices are virtual, any number of them; a GPU
// client takes the GPUs it finds unless it is given a list.
func (e *Engine) clientOptions(o Options) []pjrt.Option {
	if e.platform == "cpu" {
		return []pjrt.Option{{Name: "cpu_device_count", Value: max(1, o.Devices)}}
	}
	var list []pjrt.Option
	if o.Nodes > 1 {
		list = append(list, pjrt.Option{Name: "node_id", Value: o.Node},
			pjrt.Option{Name: "num_nodes", Value: o.Nodes},
			// A peer that dies must fail the collective, not hang it.
			pjrt.Option{Name: "abort_collectives_on_failure", Value: true})
	}
	if o.Devices > 0 {
		visible := make([]int64, o.Devices)
		for i := range visible {
			visible[i] = int64(i)
		}
		list = append(list, pjrt.Option{Name: "visible_devices", Value: visible})
	}
	if o.MemoryFraction > 0 {
		list = append(list, pjrt.Option{Name: "memory_fraction", Value: o.MemoryFraction})
	}
	if o.OnDemand {
		list = append(list, pjrt.Option{Name: "preallocate", Value: false})
	}
	return list
}

// A Device describes one device of an engine.
type Device struct {
	ID       int      `json:"id"` // global number, as modules use it
	Process  int      `json:"process"`
	Local    bool     `json:"local"` // belongs to this process
	Kind     string   `json:"kind"`
	Memories []string `json:"memories"`
}

// Devices describes all devices of the client, also in other processes.
func (e *Engine) Devices() []Device {
	var list []Device
	for _, d := range e.client.Devices() {
		list = append(list, Device{d.ID, d.Process, d.LocalID >= 0, d.Kind, d.Memories()})
	}
	return list
}

// Platform is "cpu" or "cuda".
func (e *Engine) Platform() string { return e.platform }

// Name is the name that the engine was opened with.
func (e *Engine) Name() string { return e.name }

// PJRTVersion is the version of the PJRT C API that the engine's plugin implements.
func (e *Engine) PJRTVersion() (major, minor int) { return e.plugin.Version() }

// An Identity is everything beside a program's text that decides its results: two engines of equal
// identity give the same bits. Checkpoints record it.
type Identity struct {
	Name    string `json:"name"`
	PJRT    []int  `json:"pjrt"` // version of the interface
	Version string `json:"version,omitempty"`
	Digest  string `json:"digest,omitempty"` // of the engine's files
	// Host is the processor that code is compiled for: the CPU's digest, or the GPU and CUDA's
	// version.
	Host string `json:"host,omitempty"`
	// Environment has the variables of the process that may change numbers.
	Environment map[string]string `json:"environment,omitempty"`
}

// Identity returns the identity of this engine on this host.
func (e *Engine) Identity() Identity {
	major, minor := e.plugin.Version()
	return Identity{Name: e.name, PJRT: []int{major, minor}, Version: e.version, Digest: e.digest,
		Host: e.processor(), Environment: e.environ.Recorded()}
}

// Compared is the environment without variables that differ from host to host and change no result.
func (i Identity) Compared() map[string]string {
	list := maps.Clone(i.Environment)
	maps.DeleteFunc(list, func(name, _ string) bool { return !environ.Compares(name) })
	return list
}

// Record starts the plugin's profiler, which a process can do once at a time; the function that it
// returns stops it and gives a serialized XSpace (tsl/profiler/protobuf/xplane.proto). A plugin
// without a profiler gives fs.ErrNotExist.
func (e *Engine) Record() (stop func() ([]byte, error), err error) {
	p, err := e.plugin.NewProfiler()
	if err != nil {
		return nil, err
	}
	if err := p.Start(); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return func() ([]byte, error) {
		space, err := p.Stop()
		return space, errors.Join(err, p.Close())
	}, nil
}

// A Process is the state of one of the processes that share a client ([Options].Nodes).
type Process struct {
	Node        int    // as in its Options
	Incarnation uint64 // another value than before means that the process was restarted
	Connected   bool
	// Err is why a process that is not Connected failed; nil means that it left.
	Err error
}

// UpdateProcesses tells the client which processes are alive. Collectives with a process that is
// not fail instead of waiting for it. The first call must come before the first run.
func (e *Engine) UpdateProcesses(list []Process) error {
	return e.client.UpdateProcesses(lists.Map(list, func(p Process) pjrt.ProcessInfo {
		info := pjrt.ProcessInfo{Task: p.Node, Incarnation: p.Incarnation,
			State: pjrt.ProcessConnected}
		if !p.Connected {
			info.State = pjrt.ProcessDisconnected
		}
		if !p.Connected && p.Err != nil {
			info.State, info.Message = pjrt.ProcessFailed, p.Err.Error()
		}
		return info
	}))
}

// LiveBytes is the memory of arrays and unfinished runs, in bytes, for each local device.
func (e *Engine) LiveBytes() []int64 { return e.each((*pjrt.Device).LiveBytes) }

// HighWater is the maximum of LiveBytes since the last reset, for each local device. It includes
// the temporary memory of runs.
func (e *Engine) HighWater() []int64 { return e.each((*pjrt.Device).HighWater) }

// ResetHighWater sets every high-water mark to what is live now.
func (e *Engine) ResetHighWater() {
	for _, d := range e.client.Local() {
		d.ResetHighWater()
	}
}

// each calls f for every local device, in the order of their numbers.
func (e *Engine) each(f func(*pjrt.Device) int64) []int64 {
	var list []int64
	for _, d := range e.client.Local() {
		list = append(list, f(d))
	}
	return list
}

// Close ends the engine. Its users are closed before: trainers, pipelines, and whoever owns arrays,
// runs or executables. What outlives the engine can only be freed; see Memory in the package's
// documentation. A second Close does nothing.
func (e *Engine) Close() { e.client.Close() }

// device finds a local device by its global number.
func (e *Engine) device(id int) (*pjrt.Device, error) {
	if d := e.devices[id]; d != nil {
		return d, nil
	}
	return nil, diag.New(diag.DeviceMismatch, "this process has no device %d; it has %s", id,
		deviceNumbers(e.client.Local()))
}

// Has reports whether a device, by its global number, belongs to this process.
func (e *Engine) Has(id int) bool { return e.devices[id] != nil }

// remote reports whether a device belongs to another process of this engine's client.
func (e *Engine) remote(id int) bool {
	d, known := e.devices[id]
	return known && d == nil
}

// deviceNumbers lists global device numbers, for messages.
func deviceNumbers(list []*pjrt.Device) program.Devices {
	var ids program.Devices
	for _, d := range list {
		ids = append(ids, d.ID)
	}
	return ids
}

// hostKey is the part of the cache key that describes the host. XLA:CPU partitions loops into tasks
// for max(processors, devices) threads, so compiled code depends on both numbers. Code for a GPU
// depends on nothing of the host, so that hosts of one kind share it.
func (e *Engine) hostKey() []byte {
	if e.platform != "cpu" {
		return []byte(e.processor())
	}
	return fmt.Appendf(nil, "%s, %d processors, %d devices", hostID(), runtime.NumCPU(),
		len(e.devices))
}

// processor identifies what code is compiled for: the CPU, or the GPUs with the CUDA version of
// their driver. The libraries of an engine are in its digest.
func (e *Engine) processor() string {
	if e.platform == "cpu" {
		return hostID()
	}
	kind := ""
	for _, d := range e.client.Local() {
		kind = d.Kind
	}
	return fmt.Sprintf("%s, %s, %s", kind, e.Arch(), e.client.PlatformVersion())
}

// hostID identifies the processor model and its features, for which CPU code is compiled: code with
// AVX-512 does not run on a processor without.
func hostID() string {
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return ""
	}
	h := sha256.New()
	for line := range strings.Lines(string(info)) {
		if strings.HasPrefix(line, "model name") || strings.HasPrefix(line, "flags") ||
			strings.HasPrefix(line, "Features") {
			h.Write([]byte(line))
		}
		if strings.TrimSpace(line) == "" {
			break // one core speaks for all
		}
	}
	return hex.EncodeToString(h.Sum(nil))
}
