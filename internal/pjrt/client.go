package pjrt

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
)

// A Client is a process's view of the devices of one platform.
type Client struct {
	plugin   *Plugin
	ptr      unsafe.Pointer
	kv       uintptr
	platform string
	version  string
	devices  []*Device // all of them, of every process
	local    []*Device // those this process can use
	byPtr    map[unsafe.Pointer]*Device
	launches atomic.Int32
	named    atomic.Bool // XLA has the incarnations
	staging  staging

	lifeMu sync.Mutex
	live   int // calls under way, and buffers, executables and runs that exist
	closed bool
}

// A Device is one device of a client.
type Device struct {
	client   *Client
	ptr      unsafe.Pointer
	ID       int    // global, the same in every process
	Process  int    // the process that can use it
	LocalID  int    // its number on its host, -1 where it is another process's
	Kind     string // what the platform calls it
	Attr     map[string]any
	memories []*Memory
	memory   *Memory // the default one
	ledger   ledger

	turn sync.Mutex // held while a run with collectives is started
	last *flight    // the last such run; see Loaded.turns
}

// A Memory is a place for buffers that belongs to a device: its own, or a part of the host's.
type Memory struct {
	Kind string // "device", "pinned_host", "unpinned_host"
	ptr  unsafe.Pointer
}

// NewClient creates a client. kv is needed only for clients of several processes, and nil else.
func (p *Plugin) NewClient(options []Option, kv KV) (*Client, error) {
	opts, err := newNamed(options)
	if err != nil {
		return nil, err
	}
	a := clientCreateArgs{options: spanOf(opts.values)}
	c := &Client{plugin: p, byPtr: map[unsafe.Pointer]*Device{}}
	if kv != nil {
		cb := p.calls()
		c.kv = cb.stores.put(kv)
		a.kvGet, a.kvTryGet, a.kvPut = cb.kvGet, cb.kvTryGet, cb.kvPut
		a.kvGetArg, a.kvTryArg, a.kvPutArg = c.kv, c.kv, c.kv
	}
	err = call(p, clientCreate, &a)
	runtime.KeepAlive(opts)
	if err != nil {
		c.dropStore()
		return nil, err
	}
	c.ptr = a.client
	if err := c.describe(); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func (c *Client) describe() (err error) {
	p := c.plugin
	c.platform = get(&err, p.readText, clientPlatformName, c.ptr)
	c.version = get(&err, p.readText, clientPlatformVersion, c.ptr)
	all := get(&err, p.readList, clientDevices, c.ptr)
	usable := get(&err, p.readList, clientAddressable, c.ptr)
	for _, ptr := range all {
		d, err := c.newDevice(ptr, slices.Contains(usable, ptr))
		if err != nil {
			return err
		}
		c.devices = append(c.devices, d)
		c.byPtr[ptr] = d
		if d.LocalID >= 0 {
			c.local = append(c.local, d)
		}
	}
	return err
}

func (c *Client) newDevice(ptr unsafe.Pointer, usable bool) (d *Device, err error) {
	p := c.plugin
	d = &Device{client: c, ptr: ptr, LocalID: -1}
	about := get(&err, p.readRelated, deviceDescription, ptr)
	d.ID = get(&err, p.readInt, descriptionID, about)
	d.Process = get(&err, p.readInt, descriptionProcess, about)
	d.Kind = get(&err, p.readText, descriptionKind, about)
	if err != nil {
		return nil, err
	}
	attrs := counted{object: about}
	if err := call(p, descriptionAttributes, &attrs); err != nil {
		return nil, err
	}
	d.Attr = readNamed(attrs.items, attrs.len)
	if !usable {
		return d, nil
	}
	d.LocalID = get(&err, p.readInt, deviceLocalID, ptr)
	own := get(&err, p.readRelated, deviceDefaultMemory, ptr)
	for _, ptr := range get(&err, p.readList, deviceMemories, ptr) {
		m := &Memory{Kind: get(&err, p.readText, memoryKind, ptr), ptr: ptr}
		d.memories = append(d.memories, m)
		if ptr == own {
			d.memory = m
		}
	}
	return d, err
}

// PlatformVersion tells the version of the runtime behind the client.
func (c *Client) PlatformVersion() string { return c.version }

// Devices lists the devices of all processes, by global number.
func (c *Client) Devices() []*Device { return c.devices }

// Local lists the devices that this process can use.
func (c *Client) Local() []*Device { return c.local }

// Memories lists the kinds of memory that the device can use, its default first.
func (d *Device) Memories() []string {
	var kinds []string
	for _, m := range d.memories {
		if m == d.memory {
			kinds = append([]string{m.Kind}, kinds...)
		} else {
			kinds = append(kinds, m.Kind)
		}
	}
	return kinds
}

func (d *Device) findMemory(kind string) (*Memory, error) {
	if m := lists.Find(d.memories, func(m *Memory) bool { return m.Kind == kind }); m != nil {
		return m, nil
	}
	return nil, diag.New(diag.DeviceMismatch, "device %d has no memory of kind %q; it has %v",
		d.ID, kind, d.Memories())
}

// MemoryStats is a device's own account of its memory; a field the platform does not keep is -1.
type MemoryStats struct{ InUse, Peak, Limit int64 }

// MemoryStats asks the device. XLA:CPU keeps no account and says so with NotSupported.
func (d *Device) MemoryStats() (MemoryStats, error) {
	a := deviceMemoryArgs{device: d.ptr}
	if err := call(d.client.plugin, deviceMemoryStats, &a); err != nil {
		return MemoryStats{}, err
	}
	get := func(o optionalInt) int64 {
		if o.set {
			return o.value
		}
		return -1
	}
	return MemoryStats{a.inUse, get(a.peakInUse), get(a.limit)}, nil
}

// A ProcessState is what the other processes of a client are known to be.
type ProcessState int32

// The states of a process.
const (
	ProcessDisconnected ProcessState = 2
	ProcessConnected    ProcessState = 3
	ProcessFailed       ProcessState = 4
)

// A ProcessInfo tells a client about one process; an Incarnation that changed means a restart.
type ProcessInfo struct {
	Task        int
	Incarnation uint64
	State       ProcessState
	Code        int
	Message     string
}

// UpdateProcesses tells the client which processes live, so that collectives with the dead are
// given up instead of waited for. The first call must come before the first run.
func (c *Client) UpdateProcesses(infos []ProcessInfo) error {
	if err := c.enter(); err != nil {
		return err
	}
	defer c.leave()
	raw := make([]processInfo, len(infos))
	for i, in := range infos {
		raw[i] = processInfo{size: unsafe.Sizeof(raw[i]), task: int32(in.Task),
			incarnation: in.Incarnation, state: int32(in.State), code: int32(in.Code),
			message: textSpan(in.Message)}
	}
	a := updateProcessesArgs{client: c.ptr, infos: spanOf(raw)}
	if err := call(c.plugin, clientUpdateProcesses, &a); err != nil {
		return err
	}
	if c.platform != "cuda" || len(c.local) == 0 || c.named.Swap(true) {
		return nil // a process that comes back later is another
	}
	return c.nameProcesses(infos)
}

// incarnations tell apart the processes of a client and those that were restarted in their place.
type incarnations struct {
	tasks []int32
	ids   []uint64
}

// nameProcesses gives XLA the incarnations. They are in the keys of all communicators: without, XLA
// cannot give up collectives with a process that died. It takes them with a run and keeps them for
// the client: each device's part of such a run replaces the map that all devices read, and takes
// no lock. So a run on one device passes them, before all others, and no later run does.
func (c *Client) nameProcesses(infos []ProcessInfo) error {
	if c.launches.Load() > 0 {
		return diag.New(diag.BadUsage, "the processes of a client are named before its first run")
	}
	var all incarnations
	for _, in := range infos {
		all.tasks, all.ids = append(all.tasks, int32(in.Task)), append(all.ids, in.Incarnation)
	}
	// Processes must not wait for each other's autotuning of a program that each has for itself.
	x, err := c.Compile([]byte(nothing), CompileOptions{Devices: []int{c.local[0].ID},
		Flags: map[string]any{"xla_gpu_autotune_level": 0, "xla_gpu_shard_autotuning": false}})
	if err != nil {
		return err
	}
	defer x.Free()
	r, err := x.execute(context.Background(), all, [][]*Buffer{nil}, nil)
	if err != nil {
		return err
	}
	defer r.Free()
	return r.Wait(context.Background())
}

// nothing is a program without arguments, kernels and results.
const nothing = `module @nothing { func.func public @main() { return } }`

// Close ends the client: calls on it are errors from now on. What it owns in C goes when the last
// buffer, executable and run is gone, so the order of closing and freeing does not matter.
func (c *Client) Close() {
	c.lifeMu.Lock()
	defer c.lifeMu.Unlock()
	if !c.closed {
		c.closed = true
		c.endIfUnused(func(end func()) { end() })
	}
}

// enter keeps the client alive for one call; leave ends it.
func (c *Client) enter() error {
	c.lifeMu.Lock()
	defer c.lifeMu.Unlock()
	if c.closed {
		return diag.New(diag.BufferGone, "the engine was closed")
	}
	c.live++
	return nil
}

// hold keeps the client alive for one object, which is being made inside enter; leave ends it.
func (c *Client) hold() {
	c.lifeMu.Lock()
	c.live++
	c.lifeMu.Unlock()
}

func (c *Client) leave() {
	c.lifeMu.Lock()
	defer c.lifeMu.Unlock()
	c.live--
	// The last to leave may be a callback on a thread of the client, which the client waits for
	// when it is destroyed: so that is done from a thread of our own.
	c.endIfUnused(func(end func()) { go end() })
}

// endIfUnused destroys the client once it is closed and nothing of it is left; c.lifeMu is held.
func (c *Client) endIfUnused(do func(end func())) {
	if c.closed && c.live == 0 && c.ptr != nil {
		ptr := c.ptr
		c.ptr = nil
		c.dropStore()
		do(func() { c.plugin.destroy(clientDestroy, ptr) })
	}
}

func (c *Client) dropStore() {
	if c.kv != 0 {
		c.plugin.calls().stores.take(c.kv)
	}
}

// ledger counts the bytes that are in use on a device: buffers that live, and the temporary
// memory of runs that have not been waited for.
type ledger struct {
	live atomic.Int64
	peak atomic.Int64
}

func (d *Device) account(delta int64) {
	now := d.ledger.live.Add(delta)
	for {
		peak := d.ledger.peak.Load()
		if now <= peak || d.ledger.peak.CompareAndSwap(peak, now) {
			return
		}
	}
}

// LiveBytes is what buffers and running programs hold on the device now, by our own count.
func (d *Device) LiveBytes() int64 { return d.ledger.live.Load() }

// HighWater is the most that LiveBytes has been since the last ResetHighWater.
func (d *Device) HighWater() int64 { return d.ledger.peak.Load() }

// ResetHighWater makes the high-water mark begin again at what is live now.
func (d *Device) ResetHighWater() { d.ledger.peak.Store(d.ledger.live.Load()) }
