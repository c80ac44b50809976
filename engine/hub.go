package engine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/deepwell/deepwell/diag"
)

// A Hub is where the links of a process to other processes begin and end: one listener for all of
// them, and for each link one connection out and one in. It trusts the network that it listens on,
// as collectives do; the epoch keeps runs apart, not strangers out.
type Hub struct {
	// Patience is how long the other end may make no progress while something is owed: when it is
	// to be reached, inside an array, and while nothing can be sent to it. It is set before the first
	// link is made.
	Patience time.Duration

	engine   *Engine
	listener net.Listener
	epoch    uint64
	ctx      context.Context // ends with the hub
	cancel   context.CancelCauseFunc
	wg       sync.WaitGroup

	mu      sync.Mutex
	arrived map[[2]int]*coming // by from, to
	links   []*wireLink
}

// A coming is a connection that another process opens.
type coming struct {
	taken bool          // a process has connected, or need not any more; guarded by the hub's lock
	conn  net.Conn      // guarded too, until it is ready
	ready chan struct{} // closed when conn can be used
}

const (
	// defaultPatience is longer than a step of any model takes, and short enough for a night's run.
	defaultPatience = 5 * time.Minute
	// handshakeTime is for two small frames, on a busy host.
	handshakeTime = 10 * time.Second
	// maxStrangers bounds the connections that are kept for links that nobody has made yet.
	maxStrangers = 4096
)

// keepAlive finds out within half a minute that a host is gone of which no word is expected.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second,
	Count: 3}

// Listen opens a hub at an address such as ":7000"; all processes of a run give the same epoch.
func (e *Engine) Listen(ctx context.Context, address string, epoch uint64) (*Hub, error) {
	config := net.ListenConfig{KeepAliveConfig: keepAlive}
	l, err := config.Listen(ctx, "tcp", address)
	if err != nil {
		return nil, diag.New(diag.LinkLost, "cannot listen at %s", address).Wrap(err).
			Try("give an address of this host that no other process uses")
	}
	h := &Hub{Patience: defaultPatience, engine: e, listener: l, epoch: epoch,
		arrived: map[[2]int]*coming{}}
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
	links := h.links
	h.mu.Unlock()
	for _, l := range links {
		err = errors.Join(err, l.Close())
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
		conn, err := h.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			select { // for instance too many open files: it may pass
			case <-time.After(100 * time.Millisecond):
				continue
			case <-h.ctx.Done():
				return
			}
		}
		h.wg.Go(func() {
			if err := h.welcome(conn); err != nil {
				_ = conn.Close() // who it was is told why; nobody here asked
			}
		})
	}
}

// welcome answers the hello of a connection and keeps it for the link that it belongs to.
func (h *Hub) welcome(conn net.Conn) error {
	stop := context.AfterFunc(h.ctx, func() { _ = conn.Close() })
	defer stop()
	if err := conn.SetDeadline(time.Now().Add(handshakeTime)); err != nil {
		return err
	}
	hello, err := readFrame(conn)
	var refusal string
	switch {
	case errors.Is(err, diag.New(diag.LinkVersion, "")):
		refusal = "version" // the header says which
	case err != nil:
		return err
	case hello.kind != helloFrame:
		return errNotOurs
	case hello.epoch != h.epoch:
		refusal = fmt.Sprintf("this process belongs to epoch %d", h.epoch)
	}
	var c *coming
	if refusal == "" {
		if c = h.claim(conn, int(hello.from), int(hello.to)); c == nil {
			refusal = fmt.Sprintf("rank %d has a link already, or had one", hello.from)
		}
	}
	answer := frame{kind: welcomeFrame, epoch: h.epoch, refusal: refusal}
	_, err = conn.Write(answer.append(nil))
	if err == nil {
		err = conn.SetDeadline(time.Time{})
	}
	if refusal != "" || err != nil {
		return errors.Join(errNotOurs, err)
	}
	close(c.ready)
	return nil
}

// expect finds or makes the place where a connection will be.
func (h *Hub) expect(from, to int) *coming {
	key := [2]int{from, to}
	if h.arrived[key] == nil {
		h.arrived[key] = &coming{ready: make(chan struct{})}
	}
	return h.arrived[key]
}

// claim gives the place to a connection that has come, once.
func (h *Hub) claim(conn net.Conn, from, to int) *coming {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.arrived) > maxStrangers {
		return nil
	}
	c := h.expect(from, to)
	if c.taken {
		return nil
	}
	c.taken, c.conn = true, conn
	return c
}

// Link makes this process's end of the link between two ranks of a pipeline: self is here, peer in
// the process whose hub listens at address. It returns at once; the first Send and Recv wait until
// the other process is there.
func (h *Hub) Link(self, peer int, address string) Link {
	l := &wireLink{hub: h, self: self, peer: peer, dialed: make(chan struct{})}
	h.mu.Lock()
	l.in = h.expect(peer, self)
	h.links = append(h.links, l)
	h.mu.Unlock()
	l.ctx, l.cancel = context.WithCancelCause(h.ctx)
	h.wg.Go(func() {
		err := l.dial(address)
		if err != nil {
			l.cancel(err) // before anybody takes it that there is a connection
		}
		close(l.dialed)
		if err != nil {
			_ = l.fail(err) // Send and Recv return it
		}
	})
	return l
}
