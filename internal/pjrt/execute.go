package pjrt

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"unsafe"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
)

// A Loaded is an executable on its devices, ready to run.
type Loaded struct {
	*Executable
	client  *Client
	devices []*Device // local ones, in the order in which arguments are given
	ordered []*Device // the same, by number
	sig     Signature
	temp    int64
	results int64 // bytes of all results on one device

	mu     sync.RWMutex
	ptr    unsafe.Pointer
	frames sync.Pool // of *frame

	flightsMu sync.Mutex
	flights   []*flight // runs that may not have been waited for, the oldest first
}

func (c *Client) newLoaded(ptr unsafe.Pointer, known *Signature) (x *Loaded, err error) {
	x = &Loaded{client: c, ptr: ptr}
	c.hold()
	defer func() {
		if err != nil {
			x.Free()
			x = nil
		}
	}()
	program := get(&err, c.plugin.readRelated, loadedExecutable, ptr)
	ptrs := get(&err, c.plugin.readList, loadedDevices, ptr)
	if program != nil {
		x.Executable = c.plugin.newExecutable(program)
	}
	if err != nil {
		return x, err
	}
	x.devices = lists.Map(ptrs, func(p unsafe.Pointer) *Device { return c.byPtr[p] })
	x.ordered = slices.SortedFunc(slices.Values(x.devices), func(a, b *Device) int {
		return cmp.Compare(a.ID, b.ID)
	})
	if known != nil {
		x.sig = *known
		// The plugin writes as many results as it knows of, so a signature that says otherwise,
		// from a damaged cache, must not size the memory it writes to.
		n, err := c.plugin.readNumber(executableOutputs, program)
		if err != nil || int(n) != len(known.Results) || len(known.Donates) != len(known.Params) {
			return x, diag.New(diag.CacheFailed, "the program and its description differ")
		}
	} else if x.sig, err = x.Executable.Signature(); err != nil {
		return x, err
	}
	x.sig.Alone = x.sig.Alone && c.platform == "cpu"
	x.results = lists.Sum(x.sig.Results, dtype.Shape.Bytes)
	if m, err := x.Memory(); err == nil {
		x.temp = m.Temp
	}
	x.frames.New = func() any { return x.newFrame() }
	return x, nil
}

// Signature asks the compiled program what it takes: the C interface tells the results, only the
// optimized program tells the parameters and which of them a run consumes.
func (x *Executable) Signature() (Signature, error) {
	m, err := x.Optimized()
	if err != nil {
		return Signature{}, err
	}
	results, err := x.results()
	if err != nil {
		return Signature{}, err
	}
	for _, shape := range results {
		if !shape.Type.Valid() {
			return Signature{}, diag.New(diag.NotSupported, "a result has an element type Deepwell lacks")
		}
	}
	sig := Signature{Results: results, Donates: make([]bool, len(m.Params))}
	sig.Alone = len(m.Collectives()) == 0 && len(m.CustomCalls()) == 0
	for i, v := range m.Params {
		if !v.Shape.Type.Valid() {
			return Signature{}, diag.New(diag.NotSupported, "parameter %d is %s, which Deepwell lacks",
				i, v.Text)
		}
		sig.Params = append(sig.Params, v.Shape)
	}
	for _, a := range m.Aliases {
		sig.Donates[a.Param] = true
	}
	return sig, nil
}

// Signature is what the program takes and gives on each device.
func (x *Loaded) Signature() Signature { return x.sig }

// Devices are the local devices that the program runs on, in the order of its arguments.
func (x *Loaded) Devices() []*Device { return x.devices }

// Free ends the executable; runs that have started go on. A second Free does nothing.
func (x *Loaded) Free() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.ptr == nil {
		return
	}
	if x.Executable != nil {
		x.Executable.Free()
	}
	x.client.plugin.destroy(loadedDestroy, x.ptr)
	x.ptr = nil
	x.client.leave()
}

// A frame is the memory that one call to Execute needs. Frames are used again: a training loop
// makes thousands of calls a second, and none of this is kept by C afterwards.
type frame struct {
	args     executeArgs
	single   executeArgs // a copy for calls that start one device
	options  executeOptions
	inLists  []unsafe.Pointer // for each device, where its part of in begins
	in       []unsafe.Pointer
	outLists []unsafe.Pointer
	out      []unsafe.Pointer
	events   []unsafe.Pointer
	lent     []*Buffer // buffers acquired so far, to be released
	donated  []*Buffer // the ones that the run consumes
	keep     []int64
}

func (x *Loaded) newFrame() *frame {
	devices, ins, outs := len(x.devices), len(x.sig.Params), len(x.sig.Results)
	f := &frame{
		inLists: make([]unsafe.Pointer, devices), in: make([]unsafe.Pointer, devices*ins),
		outLists: make([]unsafe.Pointer, devices), out: make([]unsafe.Pointer, devices*outs),
		events: make([]unsafe.Pointer, devices),
	}
	for d := range devices {
		f.inLists[d] = slicePointer(f.in[d*ins:])
		f.outLists[d] = slicePointer(f.out[d*outs:])
	}
	f.options.size = unsafe.Sizeof(f.options)
	f.args = executeArgs{options: unsafe.Pointer(&f.options),
		arguments: slicePointer(f.inLists), numDevices: uintptr(devices), numArgs: uintptr(ins),
		outputs: slicePointer(f.outLists), events: slicePointer(f.events)}
	return f
}

// A Run is a program that was started: its results may be used at once, as arguments of other
// runs or to wait for.
type Run struct {
	// Outputs has the results of every local device, in the order of Loaded.Devices.
	Outputs [][]*Buffer

	*flight
}

// Execute starts the program on all its local devices: args[d] are the arguments of device d. A
// buffer whose parameter is donated is consumed, unless its index is in keep. Execute returns
// when the run has been started; Wait tells when it is done. If ctx ends before, nothing was
// started and nothing is consumed.
func (x *Loaded) Execute(ctx context.Context, args [][]*Buffer, keep ...int) (*Run, error) {
	return x.execute(ctx, incarnations{}, args, keep)
}

// execute is Execute; it also gives XLA the incarnations of processes, if there are any.
func (x *Loaded) execute(ctx context.Context, named incarnations, args [][]*Buffer,
	keep []int) (*Run, error) {
	if err := ctx.Err(); err != nil {
		return nil, notStarted(err)
	}
	if err := x.client.enter(); err != nil {
		return nil, err
	}
	defer x.client.leave()
	x.mu.RLock()
	defer x.mu.RUnlock()
	if x.ptr == nil {
		return nil, diag.New(diag.BufferGone, "the executable was freed")
	}
	if len(args) != len(x.devices) {
		return nil, diag.New(diag.ArgumentCount,
			"the program runs on %d devices; arguments for %d were given", len(x.devices), len(args))
	}
	f := x.frames.Get().(*frame)
	defer x.frames.Put(f)
	defer f.releaseAll()
	if err := x.lend(f, args, keep); err != nil {
		for _, b := range f.donated {
			b.restore()
		}
		return nil, err
	}
	f.options.launchID = x.client.launches.Add(1)
	f.options.numTasks = uintptr(len(named.tasks))
	f.options.taskIDs, f.options.incarnations = slicePointer(named.tasks), slicePointer(named.ids)
	takeTurn, endTurn := x.turns()
	if err := takeTurn(ctx); err != nil {
		for _, b := range f.donated {
			b.restore()
		}
		return nil, err
	}
	if err := x.start(f); err != nil {
		endTurn(nil)
		x.settleDonated(f)
		return nil, err
	}
	r := x.newRun(f)
	endTurn(r.flight)
	return r, nil
}

func notStarted(why error) error {
	return diag.New(diag.Canceled, "stopped before a program was started").Wrap(why)
}

// turns keeps runs that meet in collectives apart. XLA:CPU gives every device of a run a thread of
// one pool and lets it block there until the others have come; a second run on the same devices
// can take the threads that the first still needs, and after 40 s XLA ends the process. (JAX 0.10.2
// on its own XLA does so too.) So a device begins such a run when its last one is done. GPUs queue
// on streams and need no turns.
func (x *Loaded) turns() (take func(context.Context) error, end func(*flight)) {
	if x.client.platform != "cpu" || x.sig.Alone || len(x.devices) == 1 {
		return func(context.Context) error { return nil }, func(*flight) {}
	}
	// Locks are taken in the order of device numbers, so that two launches cannot block each other.
	take = func(ctx context.Context) error {
		for i, d := range x.ordered {
			d.turn.Lock()
			if d.last == nil {
				continue
			}
			_ = d.last.Wait(ctx) // its error is kept for who waits for it
			if err := ctx.Err(); err != nil {
				for _, taken := range x.ordered[:i+1] {
					taken.turn.Unlock()
				}
				return notStarted(err)
			}
			d.last = nil
		}
		return nil
	}
	end = func(started *flight) {
		for _, d := range x.ordered {
			d.last = started
			d.turn.Unlock()
		}
	}
	return take, end
}

// start hands the frame to the plugin. XLA:CPU wakes a thread for each device of a call; where
// the devices need not meet, one call a device on our own thread costs a fifth (25 µs against
// 115 µs for 8 devices on 2 cores, bench/dispatch). Larger programs are queued either way.
func (x *Loaded) start(f *frame) error {
	f.args.executable = x.ptr
	if !x.sig.Alone || len(x.devices) == 1 {
		return call(x.client.plugin, loadedExecute, &f.args)
	}
	single := &f.single
	*single = f.args
	single.numDevices = 1
	for d, device := range x.devices {
		single.device = device.ptr
		single.arguments = unsafe.Pointer(&f.inLists[d])
		single.outputs = unsafe.Pointer(&f.outLists[d])
		single.events = unsafe.Pointer(&f.events[d])
		if err := call(x.client.plugin, loadedExecute, single); err != nil {
			x.abandon(f, d)
			return err
		}
	}
	return nil
}

// abandon drops what the first n devices of a run have begun that cannot be started on all.
func (x *Loaded) abandon(f *frame, n int) {
	for _, e := range f.events[:n] {
		x.client.plugin.destroy(eventDestroy, e)
	}
	for _, b := range f.out[:n*len(x.sig.Results)] {
		x.client.plugin.destroy(bufferDestroy, b)
	}
}

// lend checks every argument and writes its C object into the frame.
func (x *Loaded) lend(f *frame, args [][]*Buffer, keep []int) error {
	params := x.sig.Params
	f.keep = f.keep[:0]
	for _, k := range keep {
		f.keep = append(f.keep, int64(k))
	}
	f.options.nonDonatable = spanOf(f.keep)
	for d, list := range args {
		if len(list) != len(params) {
			return diag.New(diag.ArgumentCount, "the program takes %d arguments; device %d got %d",
				len(params), x.devices[d].ID, len(list))
		}
		for i, b := range list {
			if err := x.checkArg(b, i, x.devices[d], params[i]); err != nil {
				return err
			}
			take := b.lend
			consumed := x.sig.Donates[i] && !slices.Contains(keep, i)
			if consumed {
				take = b.donate
			}
			ptr, err := take()
			if err != nil {
				return diag.From(err).At("argument %d of device %d", i, x.devices[d].ID)
			}
			f.in[d*len(params)+i] = ptr
			f.lent = append(f.lent, b)
			if consumed {
				f.donated = append(f.donated, b)
			}
		}
	}
	return nil
}

func (x *Loaded) checkArg(b *Buffer, i int, d *Device, want dtype.Shape) error {
	switch {
	case b == nil:
		return diag.New(diag.BufferMismatch, "argument %d of device %d is nil", i, d.ID)
	case b.device.client != x.client:
		return diag.New(diag.DeviceMismatch, "argument %d of device %d belongs to another client",
			i, d.ID)
	case b.device != d:
		return diag.New(diag.DeviceMismatch, "argument %d for device %d is on device %d",
			i, d.ID, b.device.ID)
	case !b.shape.Equal(want):
		return diag.New(diag.BufferMismatch, "argument %d is %s; the program takes %s", i, b.shape, want).
			At("device %d", d.ID)
	}
	return nil
}

func (f *frame) releaseAll() {
	for _, b := range f.lent {
		b.giveBack()
	}
	clear(f.lent)
	clear(f.donated)
	f.lent, f.donated = f.lent[:0], f.donated[:0]
}

// settleDonated finds out, after a run that could not be started, which of the buffers it was to
// consume are gone all the same.
func (x *Loaded) settleDonated(f *frame) {
	for _, b := range f.donated {
		if v, err := x.client.plugin.readNumber(bufferIsDeleted, b.ptr); err == nil && v&0xff == 0 {
			b.restore()
		} else {
			b.device.account(-b.Bytes())
		}
	}
}

// newRun takes the results and events out of the frame, and moves the ledgers: what was donated
// is gone before the results that take its place are counted.
func (x *Loaded) newRun(f *frame) *Run {
	outs := len(x.sig.Results)
	r := &Run{Outputs: make([][]*Buffer, len(x.devices)), flight: x.newFlight(f.events)}
	for _, b := range f.donated {
		b.device.ledger.live.Add(-b.Bytes())
	}
	slab := make([]Buffer, len(f.out))
	refs := make([]*Buffer, len(f.out))
	for d, device := range x.devices {
		for i, shape := range x.sig.Results {
			at := d*outs + i
			b := &slab[at]
			b.shape, b.device, b.ptr = shape, device, f.out[at]
			x.client.hold()
			refs[at] = b
		}
		r.Outputs[d] = refs[d*outs : (d+1)*outs : (d+1)*outs]
		device.account(x.results + x.temp)
	}
	return r
}

// Free frees every output that is still live. It does not wait.
func (r *Run) Free() {
	for _, device := range r.Outputs {
		for _, b := range device {
			b.Free()
		}
	}
	r.watch()
}

// Forget lets go of a run whose results have other owners. It does not wait.
func (r *Run) Forget() { r.watch() }
