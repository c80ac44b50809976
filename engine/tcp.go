package engine

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/program"
)

// A wireLink is one end of a link between processes.
type wireLink struct {
	hub        *Hub
	self, peer int
	ctx        context.Context // ends when the link does, with what went wrong
	cancel     context.CancelCauseFunc
	in         *coming
	dialed     chan struct{} // closed when out is there or never will be
	out        net.Conn
	sending    sync.Mutex
	buf        []byte // what is being sent
	failed     atomic.Bool
	once       sync.Once // for hangUp
}

func (l *wireLink) Meets() bool { return false }

// dial tries until the other process listens: processes do not start at the same moment.
func (l *wireLink) dial(address string) error {
	ctx, cancel := context.WithTimeout(l.ctx, l.hub.Patience)
	defer cancel()
	dialer := net.Dialer{KeepAliveConfig: keepAlive}
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		conn, err := dialer.DialContext(ctx, "tcp", address)
		if err == nil {
			err = l.greet(conn)
			if err == nil {
				l.out = conn
				return nil
			}
			_ = conn.Close()
			if _, final := errors.AsType[*diag.Error](err); final {
				return err
			}
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return diag.New(diag.LinkLost, "rank %d cannot be reached at %s", l.peer, address).Wrap(err).
				Try("see whether its process runs, and whether the address is right")
		}
	}
}

// greet says who dials, and hears whether it is welcome.
func (l *wireLink) greet(conn net.Conn) error {
	stop := context.AfterFunc(l.ctx, func() { _ = conn.Close() })
	defer stop()
	if err := conn.SetDeadline(time.Now().Add(handshakeTime)); err != nil {
		return err
	}
	hello := frame{kind: helloFrame, epoch: l.hub.epoch, from: uint32(l.self), to: uint32(l.peer)}
	if _, err := conn.Write(hello.append(nil)); err != nil {
		return err
	}
	answer, err := readFrame(conn)
	switch {
	case errors.Is(err, errNotOurs):
		return diag.New(diag.LinkVersion, "rank %d does not answer as Deepwell does", l.peer).Wrap(err)
	case err != nil:
		return err
	case answer.kind != welcomeFrame || answer.refusal != "":
		return diag.New(diag.LinkVersion, "rank %d refuses the link of epoch %d", l.peer, l.hub.epoch).
			Because("%s", answer.refusal).Try("start all processes of the run anew")
	}
	return conn.SetDeadline(time.Time{})
}

// fail ends the link and gives the error that Send and Recv return from now on.
func (l *wireLink) fail(err error) error {
	l.failed.Store(true)
	l.cancel(err)
	l.hangUp()
	return context.Cause(l.ctx)
}

// lost describes what a connection returned.
func (l *wireLink) lost(ctx context.Context, doing, tag string, err error) error {
	if ended := context.Cause(l.ctx); ended != nil {
		return ended
	}
	if ctx.Err() != nil {
		return stopped(ctx, doing, tag)
	}
	if e, ok := errors.AsType[*diag.Error](err); ok {
		return e.At("%s rank %d, %s", doing, l.peer, tag)
	}
	where := fmt.Sprintf("%s %s", doing, tag)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return diag.New(diag.LinkStalled, "rank %d made no progress for %s", l.peer, l.hub.Patience).
			At("%s", where).Try("look at what the process of that rank does")
	}
	return diag.New(diag.LinkLost, "rank %d has gone away", l.peer).At("%s", where).Wrap(err).
		Try("look for the error in the log of that rank; then restart from the last checkpoint")
}

// Send copies each piece to the host and writes it out.
func (l *wireLink) Send(ctx context.Context, tag string, a *Array) error {
	select {
	case <-l.dialed:
	case <-ctx.Done():
		return stopped(ctx, "sending", tag)
	}
	if err := context.Cause(l.ctx); err != nil {
		return err
	}
	if len(tag) > maxText {
		return diag.New(diag.LinkTag, "a tag of %d bytes is too long", len(tag))
	}
	if err := a.Await(ctx); err != nil {
		return err // nothing was sent yet, so the link can go on
	}
	l.sending.Lock()
	w := l.watch(ctx, l.out)
	err := w.end(l.write(ctx, w, tag, a))
	l.sending.Unlock()
	if err != nil {
		return l.fail(l.lost(ctx, "sending", tag, err))
	}
	return nil
}

// A watched connection ends its reads and writes when a context does, or when one of them takes
// longer than the hub's patience.
type watched struct {
	net.Conn
	patience time.Duration
	ctx      context.Context
	stop     func() bool

	mu    sync.Mutex // so that no new deadline replaces the one of a context that has ended
	ended bool
	began bool // something was read
}

func (l *wireLink) watch(ctx context.Context, conn net.Conn) *watched {
	w := &watched{Conn: conn, patience: l.hub.Patience, ctx: ctx}
	w.stop = context.AfterFunc(ctx, func() { w.set(time.Unix(1, 0), true) })
	return w
}

func (w *watched) set(t time.Time, ended bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended {
		return
	}
	w.ended = ended
	_ = w.SetDeadline(t) // of a connection that was closed: the next read says so
}

// end lets go of the connection. If the context has ended meanwhile, the connection has a deadline
// that has passed, and cannot be used again.
func (w *watched) end(err error) error {
	if !w.stop() && err == nil {
		return w.ctx.Err()
	}
	return err
}

// Read may take any time for the first byte: nothing is owed before it.
func (w *watched) Read(p []byte) (int, error) {
	if w.began {
		w.set(time.Now().Add(w.patience), false)
	} else {
		w.set(time.Time{}, false)
	}
	n, err := w.Conn.Read(p)
	w.began = w.began || n > 0
	return n, err
}

// send writes some pieces of memory in one go.
func (w *watched) send(parts net.Buffers) error {
	w.set(time.Now().Add(w.patience), false)
	_, err := parts.WriteTo(w.Conn)
	return err
}

// chunk is how much is written or read between two looks at the clock, and how much of a piece is
// in the processor's cache while its checksum is computed.
const chunk = 256 << 10

func (l *wireLink) write(ctx context.Context, w *watched, tag string, a *Array) error {
	f := frame{kind: arrayFrame, epoch: l.hub.epoch, tag: tag, shape: a.local,
		pieces: uint32(len(a.parts))}
	head := f.append(nil)
	size := int(a.local.Bytes())
	if cap(l.buf) < size {
		l.buf = Aligned(size)
	}
	for i := range a.parts {
		data := l.buf[:size]
		if err := a.ReadInto(ctx, i, data); err != nil {
			l.buf = nil // the engine may still write to it
			return err
		}
		sum := uint32(0)
		for first := true; first || len(data) > 0; first = false {
			part := data[:min(chunk, len(data))]
			data = data[len(part):]
			sum = crc32.Update(sum, castagnoli, part)
			out := net.Buffers{head, part}
			if len(data) == 0 {
				out = append(out, binary.LittleEndian.AppendUint32(nil, sum))
			}
			head = nil
			if err := w.send(out); err != nil {
				return err
			}
		}
	}
	return nil
}

// Recv reads the bytes of each piece into the memory that becomes the array.
func (l *wireLink) Recv(ctx context.Context, tag string, s *program.Stage,
	spec program.Array) (*Array, error) {
	conn, err := l.incoming(ctx, tag)
	if err != nil {
		return nil, err
	}
	w := l.watch(ctx, conn)
	a, err := l.read(w, tag, s, spec)
	if err = w.end(err); err != nil {
		if a != nil {
			a.Free()
		}
		return nil, l.fail(l.lost(ctx, "receiving", tag, err))
	}
	return a, nil
}

// incoming waits until the other process has connected.
func (l *wireLink) incoming(ctx context.Context, tag string) (net.Conn, error) {
	patience := time.NewTimer(l.hub.Patience)
	defer patience.Stop()
	select {
	case <-l.in.ready:
	case <-ctx.Done():
		return nil, stopped(ctx, "receiving", tag)
	case <-l.ctx.Done():
	case <-patience.C:
		return nil, l.fail(diag.New(diag.LinkLost, "rank %d has not connected within %s", l.peer,
			l.hub.Patience).Try("see whether its process runs and was given the right addresses"))
	}
	if err := context.Cause(l.ctx); err != nil {
		return nil, err
	}
	return l.in.conn, nil
}

func (l *wireLink) read(r io.Reader, tag string, s *program.Stage, spec program.Array) (*Array,
	error) {
	f, err := readFrame(r)
	if err != nil {
		return nil, err
	}
	local, err := s.Local(spec)
	switch {
	case err != nil:
		return nil, err
	case f.kind == byeFrame:
		return nil, diag.New(diag.LinkLost, "rank %d has closed the link", l.peer)
	case f.kind != arrayFrame:
		return nil, damaged("a frame of kind %d among arrays", f.kind)
	case f.epoch != l.hub.epoch:
		return nil, diag.New(diag.LinkVersion, "rank %d sends for epoch %d; this is epoch %d", l.peer,
			f.epoch, l.hub.epoch)
	case f.tag != tag:
		return nil, diag.New(diag.LinkTag, "rank %d sends %q; %q is expected", l.peer, f.tag, tag)
	case !f.shape.Equal(local) || int(f.pieces) != len(s.Devices):
		return nil, diag.New(diag.LinkShape,
			"rank %d sends %s in %d pieces; %s in %d pieces is expected", l.peer, f.shape, f.pieces,
			local, len(s.Devices))
	}
	return l.hub.engine.Place(s, spec, Given, func(i int) ([]byte, error) {
		return l.readPiece(r, i, int(local.Bytes()))
	})
}

// readPiece reads one piece and its checksum.
func (l *wireLink) readPiece(r io.Reader, i, size int) ([]byte, error) {
	data, sum := Aligned(size), uint32(0)
	for rest := data; len(rest) > 0; {
		part := rest[:min(chunk, len(rest))]
		rest = rest[len(part):]
		if _, err := io.ReadFull(r, part); err != nil {
			return nil, cutOff(err)
		}
		sum = crc32.Update(sum, castagnoli, part)
	}
	var tail [4]byte
	if _, err := io.ReadFull(r, tail[:]); err != nil {
		return nil, cutOff(err)
	}
	if binary.LittleEndian.Uint32(tail[:]) != sum {
		return nil, diag.New(diag.LinkData,
			"piece %d from rank %d has another checksum than when it was sent", i, l.peer).
			Try("check the network between the hosts")
	}
	return data, nil
}

// byeTime is how long a process that ends waits for room to say so.
const byeTime = time.Second

// Close ends both connections. What was sent before is still delivered.
func (l *wireLink) Close() error {
	if !l.failed.Load() {
		l.bye()
	}
	l.cancel(diag.New(diag.LinkLost, "the link to rank %d was closed", l.peer))
	l.hangUp()
	return nil
}

// bye tells the other end that nothing more comes, unless an array is half sent.
func (l *wireLink) bye() {
	select {
	case <-l.dialed:
	default:
		return
	}
	if l.out == nil || !l.sending.TryLock() {
		return
	}
	defer l.sending.Unlock()
	_ = l.out.SetWriteDeadline(time.Now().Add(byeTime))
	bye := frame{kind: byeFrame, epoch: l.hub.epoch}
	_, _ = l.out.Write(bye.append(nil))
}

// hangUp ends the connections of a link whose context has ended.
func (l *wireLink) hangUp() {
	l.once.Do(func() {
		<-l.dialed
		if l.out != nil {
			_ = l.out.Close()
		}
		l.hub.mu.Lock()
		defer l.hub.mu.Unlock()
		l.in.taken = true // from now on none is welcome
		if l.in.conn != nil {
			_ = l.in.conn.Close()
		}
	})
}
