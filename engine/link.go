package engine

import (
	"context"
	"sync"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/link"
	"github.com/deepwell/deepwell/program"
)

// A Link is one end of a connection between two pipeline stages: what one end sends, the other
// receives in the same order. [Engine.Pipe] makes one between devices of a client, [Engine.Wired]
// one between processes, and [Engine.Permute] one inside a program that both stages run.
//
// One goroutine may send while another receives. A link that has failed stays so.
type Link interface {
	// Send sends an array to the other end, under a tag that the other end must expect. It waits
	// while the link is full. When it returns, the array may be freed.
	Send(ctx context.Context, tag string, a *Array) error
	// Recv receives the next array, which must have the tag and the local shape that spec has on the
	// devices of s, and places it there. The copy to the devices may still be under way.
	Recv(ctx context.Context, tag string, m *program.Module, spec program.Array) (*Array, error)
	// Rendezvous reports whether Send and Recv wait for each other. Then each end must call them in
	// the order that both have agreed on, sends and receives alike.
	Rendezvous() bool
	// Close ends both directions. The other end still receives what was sent before it.
	Close() error
}

// A parcel is an array in transit, with its tag.
type parcel struct {
	tag   string
	array *Array
}

// Pipe makes both ends of a link between the devices of two stages of this engine. Shard i is
// copied from device left[i] to right[i], or back, without going through the host. Each direction
// holds at most capacity arrays that were sent and not received, in memory of the receiver's
// devices.
func (e *Engine) Pipe(left, right program.Devices, capacity int) (atLeft, atRight Link, err error) {
	if capacity < 1 || len(left) != len(right) {
		return nil, nil, diag.New(diag.ArgumentCount,
			"a pipe from %d to %d devices that holds %d arrays", len(left), len(right), capacity).
			Try("give both stages as many devices, and the pipe a capacity of at least one array")
	}
	there, back := newLane(capacity), newLane(capacity)
	return &pipe{engine: e, to: right, out: there, in: back},
		&pipe{engine: e, to: left, out: back, in: there}, nil
}

// A lane is one direction of a pipe.
type lane struct {
	slots chan struct{} // one for each parcel that was sent and not received
	queue chan parcel
	shut  chan struct{} // closed when one end is
	once  sync.Once

	mu   sync.Mutex
	gone bool // the receiver is
}

func newLane(capacity int) *lane {
	return &lane{slots: make(chan struct{}, capacity), queue: make(chan parcel, capacity),
		shut: make(chan struct{})}
}

func (l *lane) close() { l.once.Do(func() { close(l.shut) }) }

// put queues a parcel that has a slot. It reports false if the receiver has closed.
func (l *lane) put(p parcel) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return false
	}
	l.queue <- p
	return true
}

// abandon is the receiver's close: it frees the arrays that nobody will receive.
func (l *lane) abandon() {
	l.close()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.gone = true
	for {
		select {
		case p := <-l.queue:
			p.array.Free()
		default:
			return
		}
	}
}

type pipe struct {
	engine  *Engine
	to      program.Devices
	out, in *lane
}

func (p *pipe) Rendezvous() bool { return false }

// Send waits for a slot before it copies: there are never more than capacity copies.
func (p *pipe) Send(ctx context.Context, tag string, a *Array) error {
	select {
	case <-p.out.shut:
		return p.closed(tag)
	default:
	}
	select {
	case p.out.slots <- struct{}{}:
	case <-p.out.shut:
		return p.closed(tag)
	case <-ctx.Done():
		return link.Stopped(ctx, "sending", tag)
	}
	c, err := p.engine.Copy(a, p.to)
	if err != nil {
		<-p.out.slots
		return err
	}
	if !p.out.put(parcel{tag, c}) {
		c.Free()
		return p.closed(tag)
	}
	return nil
}

func (p *pipe) Recv(ctx context.Context, tag string, m *program.Module,
	spec program.Array) (*Array, error) {
	got, err := p.next(ctx, tag)
	if err != nil {
		return nil, err
	}
	<-p.in.slots
	if err := arrived(got, tag, m, spec); err != nil {
		got.array.Free()
		return nil, err
	}
	return got.array, nil
}

// next takes a queued parcel, also if the other end has closed since.
func (p *pipe) next(ctx context.Context, tag string) (parcel, error) {
	select {
	case got := <-p.in.queue:
		return got, nil
	default:
	}
	select {
	case got := <-p.in.queue:
		return got, nil
	case <-ctx.Done():
		return parcel{}, link.Stopped(ctx, "receiving", tag)
	case <-p.in.shut:
	}
	select {
	case got := <-p.in.queue:
		return got, nil
	default:
		return parcel{}, p.closed(tag)
	}
}

func (p *pipe) Close() error {
	p.out.close()
	p.in.abandon()
	return nil
}

func (p *pipe) closed(tag string) error {
	return diag.New(diag.LinkLost, "the link was closed").At("%s", tag)
}

// arrived checks an array on the receiver's devices against the receiver's spec, and gives it that
// spec.
func arrived(p parcel, tag string, m *program.Module, spec program.Array) error {
	a := p.array
	local, err := m.Local(spec)
	switch {
	case err != nil:
		return err
	case p.tag != tag:
		return diag.New(diag.LinkTag, "the other end sends %q; %q is expected", p.tag, tag)
	case !a.local.Equal(local) || len(a.parts) != len(m.Devices):
		return diag.New(diag.LinkShape,
			"the other end sends %s in %d shards; %s in %d shards is expected", a.local, len(a.parts),
			local, len(m.Devices)).At("%s", tag)
	}
	for i, b := range a.parts {
		if b.Device().ID != m.Devices[i] {
			return diag.New(diag.DeviceMismatch, "shard %d is on device %d; module %s has %s", i,
				b.Device().ID, m.Name, m.Devices).At("%s", tag)
		}
	}
	a.spec = spec
	return nil
}

// Wired makes a link of a wire to another process. Shards go through the host's memory.
func (e *Engine) Wired(w *link.Wire) Link { return &wired{w, e} }

type wired struct {
	wire   *link.Wire
	engine *Engine
}

func (w *wired) Rendezvous() bool { return false }

func (w *wired) Close() error { return w.wire.Close() }

// Send waits for the array before it sends a byte: an error up to there leaves the link usable.
func (w *wired) Send(ctx context.Context, tag string, a *Array) error {
	if err := a.Await(ctx); err != nil {
		return err
	}
	return w.wire.Send(ctx, tag, a.local, len(a.parts), func(i int, dst []byte) error {
		return a.ReadInto(ctx, i, dst)
	})
}

// Recv reads each shard into the memory that becomes the array: the CPU engine copies nothing.
func (w *wired) Recv(ctx context.Context, tag string, m *program.Module,
	spec program.Array) (a *Array, err error) {
	local, err := m.Local(spec)
	if err != nil {
		return nil, err
	}
	here := len(m.Devices) // shards in this process
	for _, id := range m.Devices {
		if w.engine.remote(id) {
			here--
		}
	}
	err = w.wire.Recv(ctx, tag, local, here, func(next func([]byte) error) error {
		a, err = w.engine.Place(m, spec, Given, func(int) ([]byte, error) {
			data := Aligned(int(local.Bytes()))
			return data, next(data)
		})
		return err
	})
	if err != nil && a != nil {
		a.Free()
		a = nil
	}
	return a, err
}
