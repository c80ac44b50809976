package link

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
)

// A Hub is where the links of a process to other processes begin and end: one listener for all of
// them, and for each link one connection out and one in. With a secret that all processes share,
// connections are TLS 1.3 and both ends prove that they hold it; without one, a hub listens and
// dials on the loopback interface only. The epoch keeps runs apart, not strangers out.
type Hub struct {
	// StallTimeout bounds dialing, gaps within an array, and blocked sends. It is set before the first
	// link is made.
	StallTimeout time.Duration
	// HeartbeatTimeout is how long a process that has joined may send no heartbeat before it is lost.
	// It is set before [Hub.Join].
	HeartbeatTimeout time.Duration

	events   event.Sink
	listener net.Listener
	tls      *tls.Config // nil without a secret
	epoch    uint64
	ctx      context.Context // ends with the hub
	cancel   context.CancelCauseFunc
	wg       sync.WaitGroup
	slots    chan struct{} // one for each connection that has not said who it is

	mu      sync.Mutex
	arrived map[endpoint]*pendingConn
	early   int // of arrived, those that nobody expects yet
	wires   []*Wire
	pending []net.Conn // unidentified, oldest first
	warned  time.Time  // when a refusal was last reported
	self    uint32     // this process, once it has joined
	members []*member
	status  func() Status // what heartbeats say
	watch   []func(Peer, error)
	failure error  // of the first process that was lost
	gone    uint32 // that process, if there is a failure
}

// An endpoint identifies the link that a connection belongs to.
type endpoint struct {
	control  bool
	from, to uint32
}

// A pendingConn is a connection that another process opens, or will open.
type pendingConn struct {
	early bool          // nobody expects it yet; guarded by Hub.mu
	taken bool          // a process has connected, or need not any more; guarded by Hub.mu
	conn  net.Conn      // guarded by Hub.mu until it is ready
	ready chan struct{} // closed when conn can be used
}

const (
	// defaultStallTimeout is longer than a step of any model, and short enough for a night's run.
	defaultStallTimeout = 5 * time.Minute
	// handshakeTime is for the handshake of TLS and two small frames, on a busy host.
	handshakeTime = 10 * time.Second
	// maxHandshakes bounds the connections that have not said who they are. One more closes an old
	// one: a process of the run is through within milliseconds, an idle stranger is not.
	maxHandshakes = 64
	// maxStrangers bounds the connections that are kept for links that nobody has made yet. One more
	// is closed without an answer, and comes again.
	maxStrangers = 4096
	// warnEvery is how often refused connections are worth a line.
	warnEvery = 30 * time.Second
)

// keepAlive finds out within half a minute that a host is gone of which no word is expected.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second,
	Count: 3}

// Listen opens a hub at an address such as ":7000". All processes of a run give the same epoch, and
// the same secret: 32 random bytes or more, from which the key of their certificate is derived.
// Without a secret the address must be on the loopback interface. events hears of connections that
// are refused and of processes that are waited for.
func Listen(ctx context.Context, address string, epoch uint64, secret []byte,
	events event.Sink) (*Hub, error) {
	bad := func(err error) error {
		return diag.New(diag.LinkLost, "cannot listen at %s", address).Wrap(err).
			Try("give an address of this host that no other process uses").
			Exit(diag.Failed) // starting again does not help
	}
	at, err := net.ResolveTCPAddr("tcp", address)
	if err != nil {
		return nil, bad(err)
	}
	h := &Hub{StallTimeout: defaultStallTimeout, HeartbeatTimeout: defaultHeartbeatTimeout,
		events: events, epoch: epoch, arrived: map[endpoint]*pendingConn{}, self: anyProcess,
		slots: make(chan struct{}, 2*maxHandshakes)}
	if len(secret) > 0 {
		if h.tls, err = pinned(secret); err != nil {
			return nil, err
		}
	} else if !at.IP.IsLoopback() {
		return nil, unprotected(address)
	}
	config := net.ListenConfig{KeepAliveConfig: keepAlive}
	if h.listener, err = config.Listen(ctx, "tcp", at.String()); err != nil {
		return nil, bad(err)
	}
	h.ctx, h.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	h.wg.Go(h.accept)
	return h, nil
}

// Addr is where the hub listens.
func (h *Hub) Addr() string { return h.listener.Addr().String() }

// Close ends the hub with all its links.
func (h *Hub) Close() error {
	h.cancel(diag.New(diag.LinkLost, "the links of this process were closed"))
	err := h.listener.Close()
	h.mu.Lock()
	wires := h.wires
	h.mu.Unlock()
	for _, w := range wires {
		err = errors.Join(err, w.Close())
	}
	h.wg.Wait()
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.arrived {
		if c.conn != nil {
			_ = c.conn.Close()
		}
	}
	return err
}

func (h *Hub) accept() {
	for {
		select {
		case h.slots <- struct{}{}:
		case <-h.ctx.Done():
			return
		}
		conn, err := h.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			<-h.slots
			select { // for instance too many open files: it may pass
			case <-time.After(100 * time.Millisecond):
				continue
			case <-h.ctx.Done():
				return
			}
		}
		h.admit(conn)
		h.wg.Go(func() {
			defer func() { <-h.slots }()
			err := h.welcome(conn)
			h.settle(conn)
			if err != nil {
				_ = conn.Close() // holders of the key get the reason; strangers nothing
				h.warn(conn.RemoteAddr(), err)
			}
		})
	}
}

// admit records a connection that has not identified itself. One too many closes the oldest of the
// host that has most, so that a flood closes its own.
func (h *Hub) admit(conn net.Conn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.pending = append(h.pending, conn)
	if len(h.pending) <= maxHandshakes {
		return
	}
	count, most := map[string]int{}, ""
	for _, c := range h.pending {
		from := hostOf(c)
		if count[from]++; count[from] > count[most] {
			most = from
		}
	}
	at := slices.IndexFunc(h.pending, func(c net.Conn) bool { return hostOf(c) == most })
	_ = h.pending[at].Close()
	h.pending = slices.Delete(h.pending, at, at+1)
}

// hostOf is the address of the host that a connection comes from.
func hostOf(c net.Conn) string {
	if at, ok := c.RemoteAddr().(*net.TCPAddr); ok {
		return at.IP.String()
	}
	return c.RemoteAddr().String()
}

// settle forgets a connection that has identified itself or failed.
func (h *Hub) settle(conn net.Conn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.pending = slices.DeleteFunc(h.pending, func(c net.Conn) bool { return c == conn })
}

// warn reports a refused connection, at most once in warnEvery: a port scan must not fill the log.
// Connections that send nothing are not reported.
func (h *Hub) warn(from net.Addr, err error) {
	e, ok := errors.AsType[*diag.Error](err)
	h.mu.Lock()
	defer h.mu.Unlock()
	if now := time.Now(); ok && h.ctx.Err() == nil && now.Sub(h.warned) > warnEvery {
		h.warned = now
		h.events.Emit(event.Warning{Code: string(e.Code), Fix: e.Fix,
			Text: fmt.Sprintf("a connection from %s was refused: %s", from, e.What)})
	}
}

// welcome answers the hello of a connection and keeps it for the link that it belongs to.
func (h *Hub) welcome(raw net.Conn) error {
	stop := context.AfterFunc(h.ctx, func() { _ = raw.Close() })
	defer stop()
	if err := raw.SetDeadline(time.Now().Add(handshakeTime)); err != nil {
		return err
	}
	conn, err := h.accepted(raw)
	if err != nil {
		return err
	}
	hello, err := readFrame(conn)
	if errors.Is(err, diag.LinkVersion) {
		answer := frame{kind: welcomeFrame, refusal: "version"} // the header says which; no epoch
		_, _ = conn.Write(answer.append(nil))
		return err
	}
	if err != nil {
		return err
	}
	c, err := h.judge(raw, conn, hello)
	refusal := ""
	if e, ok := errors.AsType[*diag.Error](err); ok && (h.tls != nil || hello.epoch == h.epoch) {
		refusal = e.What // it holds the key, or knows the epoch
	} else if err != nil {
		return err
	}
	answer := frame{kind: welcomeFrame, refusal: refusal}
	_, wrong := conn.Write(answer.append(nil))
	if wrong == nil {
		wrong = raw.SetDeadline(time.Time{})
	}
	switch {
	case err != nil:
		return err
	case wrong != nil:
		h.mu.Lock()
		defer h.mu.Unlock()
		if c.conn == conn { // unless its link has ended meanwhile
			c.taken, c.conn = false, nil // it may come again
		}
		return wrong
	}
	close(c.ready)
	return nil
}

// judge returns the endpoint that a hello asks for, or the reason of a refusal.
func (h *Hub) judge(raw, conn net.Conn, hello *frame) (*pendingConn, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	at := slices.Index(h.pending, raw)
	switch {
	case at < 0:
		return nil, net.ErrClosed // to make room
	case hello.kind != helloFrame:
		return nil, errNotOurs
	case hello.epoch != h.epoch:
		return nil, diag.New(diag.LinkVersion, "the processes belong to different runs").
			Try("give all processes the same recipe, plan and --until")
	case h.self != anyProcess && hello.peer != anyProcess && hello.peer != h.self:
		return nil, diag.New(diag.LinkVersion, "this is process %d of the run, not %d", h.self,
			hello.peer).Try("give all processes the same --peers, and each its own --self")
	}
	end := endpoint{hello.control, hello.from, hello.to}
	if h.arrived[end] == nil && h.early >= maxStrangers {
		return nil, net.ErrClosed // until some of them have their links
	}
	c := h.claim(conn, end)
	if c == nil {
		return nil, diag.New(diag.LinkVersion, "that end has a connection already, or had one").
			Try("start all processes of the run anew")
	}
	h.pending = slices.Delete(h.pending, at, at+1)
	return c, nil
}

// expect finds or makes the pending connection of an endpoint.
func (h *Hub) expect(key endpoint) *pendingConn {
	c := h.arrived[key]
	switch {
	case c == nil:
		c = &pendingConn{ready: make(chan struct{})}
		h.arrived[key] = c
	case c.early:
		c.early = false
		h.early--
	}
	return c
}

// claim gives an endpoint to a connection that has arrived, once.
func (h *Hub) claim(conn net.Conn, at endpoint) *pendingConn {
	c := h.arrived[at]
	if c == nil {
		c = h.expect(at)
		c.early = true
		h.early++
	}
	if c.taken {
		return nil
	}
	c.taken, c.conn = true, conn
	return c
}

// Wire makes this process's end of a link: self numbers the end here, peer the other one, in the
// process whose hub listens at address. It returns at once; the first use waits until the other
// process is there.
func (h *Hub) Wire(self, peer int, address string) *Wire {
	w := &Wire{hub: h, address: address, dialed: make(chan struct{})}
	w.ctx, w.cancel = context.WithCancelCause(h.ctx)
	h.mu.Lock()
	w.in = h.expect(endpoint{from: uint32(peer), to: uint32(self)})
	h.wires = append(h.wires, w)
	hello := frame{kind: helloFrame, epoch: h.epoch, from: uint32(self), to: uint32(peer),
		self: h.self, peer: anyProcess}
	if m := h.member(address); m != nil {
		hello.peer = uint32(m.Process)
		if m.lost != nil {
			w.cancel(m.lost)
		}
	}
	h.mu.Unlock()
	h.wg.Go(func() {
		var err error
		if w.out, err = h.dial(w.ctx, address, &hello, nil); err != nil {
			w.cancel(err) // before anybody takes it that there is a connection
		}
		close(w.dialed)
		if err != nil {
			_ = w.fail(err) // Send and Recv return it
		}
	})
	return w
}
