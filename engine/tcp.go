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
	hub     *Hub
	address string          // of the other process
	ctx     context.Context // ends when the link does, with what went wrong
	cancel  context.CancelCauseFunc
	in      *coming
	dialed  chan struct{} // closed when out is there or never will be
	out     net.Conn
	sending sync.Mutex
	buf     []byte // what is being sent
	failed  atomic.Bool
	once    sync.Once // for hangUp
	// sends and takes are the tags that Send and Recv work on, for who asks what a run waits for.
	sends, takes atomic.Pointer[string]
}

// peer names the process at the other end.
func (l *wireLink) peer() string {
	l.hub.mu.Lock()
	defer l.hub.mu.Unlock()
	return l.hub.nameOf(l.address)
}

func (l *wireLink) Meets() bool { return false }

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
		return e.At("%s %s, %s", doing, tag, l.peer())
	}
	where := fmt.Sprintf("%s %s", doing, tag)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return diag.New(diag.LinkStalled, "%s made no progress for %s", l.peer(),
			l.hub.Patience).At("%s", where).Try("look at what that process does")
	}
	return diag.New(diag.LinkLost, "%s has gone away", l.peer()).At("%s", where).Wrap(err).
		Try(restart)
}

// Send copies each piece to the host and writes it out.
func (l *wireLink) Send(ctx context.Context, tag string, a *Array) error {
	l.sends.Store(&tag)
	defer l.sends.Store(nil)
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

// Read may take any time for the first byte: nothing is owed before it. It ends when the other
// process is lost, which closes the connection.
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
	l.takes.Store(&tag)
	defer l.takes.Store(nil)
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
		return nil, l.fail(diag.New(diag.LinkLost, "%s has not connected within %s", l.peer(),
			l.hub.Patience).Try(notThere))
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
		return nil, diag.New(diag.LinkLost, "%s has closed the link", l.peer()).Try(restart)
	case f.kind != arrayFrame:
		return nil, damaged("a frame of kind %d among arrays", f.kind)
	case f.epoch != l.hub.epoch:
		return nil, diag.New(diag.LinkVersion, "%s sends for another run", l.peer())
	case f.tag != tag:
		return nil, diag.New(diag.LinkTag, "%s sends %q; %q is expected", l.peer(), f.tag, tag)
	case !f.shape.Equal(local) || int(f.pieces) != len(s.Devices):
		return nil, diag.New(diag.LinkShape,
			"%s sends %s in %d pieces; %s in %d pieces is expected", l.peer(), f.shape, f.pieces,
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
			"piece %d from %s has another checksum than when it was sent", i, l.peer()).
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
	l.cancel(diag.New(diag.LinkLost, "the link to %s was closed", l.peer()))
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
