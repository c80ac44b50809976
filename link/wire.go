package link

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
	"github.com/deepwell/deepwell/dtype"
)

// A Wire is one end of a link between processes: what one end sends the other receives, in order.
// One goroutine may send while another receives. A wire that has failed stays so.
type Wire struct {
	hub     *Hub
	address string          // of the other process
	ctx     context.Context // ends when the link does, with what went wrong
	cancel  context.CancelCauseFunc
	in      *pendingConn
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
func (w *Wire) peer() string { return w.hub.name(w.address) }

// fail ends the link and gives the error that Send and Recv return from now on.
func (w *Wire) fail(err error) error {
	w.failed.Store(true)
	w.cancel(err)
	w.hangUp()
	return context.Cause(w.ctx)
}

// lost describes what a connection returned.
func (w *Wire) lost(ctx context.Context, doing, tag string, err error) error {
	if ended := context.Cause(w.ctx); ended != nil {
		return ended
	}
	if ctx.Err() != nil {
		return Stopped(ctx, doing, tag)
	}
	if e, ok := errors.AsType[*diag.Error](err); ok {
		return e.At("%s %s, %s", doing, tag, w.peer())
	}
	where := fmt.Sprintf("%s %s", doing, tag)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return diag.New(diag.LinkStalled, "%s made no progress for %s", w.peer(),
			w.hub.StallTimeout).At("%s", where).Try("look at what that process does")
	}
	return diag.New(diag.LinkLost, "%s has gone away", w.peer()).At("%s", where).Wrap(err).
		Try(restart)
}

// Send writes shards of one shape under a tag that the other end must expect. read fills dst with
// shard i. After an error dst must not be reused: it may still be written to.
func (w *Wire) Send(ctx context.Context, tag string, shape dtype.Shape, shards int,
	read func(i int, dst []byte) error) error {
	f := &frame{kind: arrayFrame, epoch: w.hub.epoch, tag: tag, shape: shape, shards: uint32(shards)}
	return w.send(ctx, f, func(i int) ([][]byte, error) {
		size := int(shape.Bytes())
		if cap(w.buf) < size {
			w.buf = make([]byte, size)
		}
		data := w.buf[:size]
		if err := read(i, data); err != nil {
			w.buf = nil
			return nil, err
		}
		return [][]byte{data}, nil
	})
}

// send writes an array whose shards are given in parts, one after the other.
func (w *Wire) send(ctx context.Context, f *frame, shard func(i int) ([][]byte, error)) error {
	tag := f.tag
	w.sends.Store(&tag)
	defer w.sends.Store(nil)
	select {
	case <-w.dialed:
	case <-ctx.Done():
		return Stopped(ctx, "sending", tag)
	}
	if err := context.Cause(w.ctx); err != nil {
		return err
	}
	if len(tag) > maxText {
		return diag.New(diag.LinkTag, "a tag of %d bytes is too long", len(tag))
	}
	w.sending.Lock()
	c := w.watch(ctx, w.out)
	err := c.end(write(c, f, shard))
	w.sending.Unlock()
	if err != nil {
		return w.fail(w.lost(ctx, "sending", tag, err))
	}
	return nil
}

// Tell sends a message of at most maxMessage bytes: an array of bytes whose length the receiver
// need not know.
func (w *Wire) Tell(ctx context.Context, tag string, message []byte) error {
	return w.tell(ctx, tag, message)
}

// tell sends a message in parts, without a copy: a value of the store may go to every process.
func (w *Wire) tell(ctx context.Context, tag string, parts ...[]byte) error {
	n := int64(0)
	for _, p := range parts {
		n += int64(len(p))
	}
	f := &frame{kind: arrayFrame, epoch: w.hub.epoch, tag: tag, shards: 1,
		shape: dtype.Shape{Type: dtype.U8, Dims: []int64{n}}}
	return w.send(ctx, f, func(int) ([][]byte, error) { return parts, nil })
}

// Stopped is the error of a context that ended while something was sent or received.
func Stopped(ctx context.Context, doing, tag string) error {
	return diag.New(diag.Canceled, "stopped while %s %s", doing, tag).Wrap(ctx.Err())
}

// A watched connection ends its reads and writes when a context does, or when one of them takes
// longer than the hub's patience.
type stallConn struct {
	net.Conn
	patience time.Duration
	ctx      context.Context
	stop     func() bool

	mu    sync.Mutex // so that no new deadline replaces the one of a context that has ended
	ended bool
	began bool // something was read
}

func (w *Wire) watch(ctx context.Context, conn net.Conn) *stallConn {
	c := &stallConn{Conn: conn, patience: w.hub.StallTimeout, ctx: ctx}
	c.stop = context.AfterFunc(ctx, func() { c.set(time.Unix(1, 0), true) })
	return c
}

func (w *stallConn) set(t time.Time, ended bool) {
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
func (w *stallConn) end(err error) error {
	if !w.stop() && err == nil {
		return w.ctx.Err()
	}
	return err
}

// Read may take any time for the first byte: nothing is owed before it. It ends when the other
// process is lost, which closes the connection.
func (w *stallConn) Read(p []byte) (int, error) {
	if w.began {
		w.set(time.Now().Add(w.patience), false)
	} else {
		w.set(time.Time{}, false)
	}
	n, err := w.Conn.Read(p)
	w.began = w.began || n > 0
	return n, err
}

// send writes several buffers in one system call.
func (w *stallConn) send(parts net.Buffers) error {
	w.set(time.Now().Add(w.patience), false)
	_, err := parts.WriteTo(w.Conn)
	return err
}

// chunk is the size of reads and writes between two checks of the clock; it stays in the
// processor's cache while its checksum is computed.
const chunk = 256 << 10

func write(c *stallConn, f *frame, shard func(i int) ([][]byte, error)) error {
	head := f.append(nil)
	for i := range int(f.shards) {
		parts, err := shard(i)
		if err != nil {
			return err
		}
		sum := uint32(0)
		for k, data := range parts {
			for first := true; first || len(data) > 0; first = false {
				part := data[:min(chunk, len(data))]
				data = data[len(part):]
				sum = crc32.Update(sum, castagnoli, part)
				out := net.Buffers{head, part}
				if len(data) == 0 && k == len(parts)-1 {
					out = append(out, binary.LittleEndian.AppendUint32(nil, sum))
				}
				head = nil
				if err := c.send(out); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// Recv takes the next array, which must have the tag, the shape and the number of shards. take gets
// a function that fills dst with the next shard, and must call it once for every shard.
func (w *Wire) Recv(ctx context.Context, tag string, shape dtype.Shape, shards int,
	take func(next func(dst []byte) error) error) error {
	return w.receive(ctx, tag, func(r io.Reader, f *frame) error {
		if !f.shape.Equal(shape) || int(f.shards) != shards {
			return diag.New(diag.LinkShape,
				"%s sends %d shards of %s; %d of %s are expected", w.peer(), f.shards, f.shape,
				shards, shape)
		}
		return take(func(dst []byte) error { return w.readShard(r, dst) })
	})
}

// maxMessage bounds what a length in a message makes us allocate.
const maxMessage = 16 << 20

// Hear takes the next message, which must have the tag.
func (w *Wire) Hear(ctx context.Context, tag string) (message []byte, err error) {
	err = w.receive(ctx, tag, func(r io.Reader, f *frame) error {
		if f.shape.Type != dtype.U8 || len(f.shape.Dims) != 1 || f.shards != 1 ||
			f.shape.Dims[0] < 0 || f.shape.Dims[0] > maxMessage {
			return diag.New(diag.LinkShape, "%s sends %d shards of %s; a message is expected", w.peer(),
				f.shards, f.shape)
		}
		message = make([]byte, f.shape.Dims[0])
		return w.readShard(r, message)
	})
	return message, err
}

// receive reads the head of what comes next, and lets rest read what follows it.
func (w *Wire) receive(ctx context.Context, tag string,
	rest func(r io.Reader, f *frame) error) error {
	w.takes.Store(&tag)
	defer w.takes.Store(nil)
	conn, err := w.incoming(ctx, tag)
	if err != nil {
		return err
	}
	c := w.watch(ctx, conn)
	f, err := w.readHead(c, tag)
	if err == nil {
		err = rest(c, f)
	}
	if err = c.end(err); err != nil {
		return w.fail(w.lost(ctx, "receiving", tag, err))
	}
	return nil
}

// incoming waits until the other process has connected.
func (w *Wire) incoming(ctx context.Context, tag string) (net.Conn, error) {
	patience := time.NewTimer(w.hub.StallTimeout)
	defer patience.Stop()
	select {
	case <-w.in.ready:
	case <-ctx.Done():
		return nil, Stopped(ctx, "receiving", tag)
	case <-w.ctx.Done():
	case <-patience.C:
		return nil, w.fail(diag.New(diag.LinkLost, "%s has not connected within %s", w.peer(),
			w.hub.StallTimeout).Try(notThere))
	}
	if err := context.Cause(w.ctx); err != nil {
		return nil, err
	}
	return w.in.conn, nil
}

func (w *Wire) readHead(r io.Reader, tag string) (*frame, error) {
	f, err := readFrame(r)
	switch {
	case err != nil:
		return nil, err
	case f.kind == byeFrame:
		return nil, diag.New(diag.LinkLost, "%s has closed the link", w.peer()).Try(restart)
	case f.kind != arrayFrame:
		return nil, damaged("a frame of kind %d among arrays", f.kind)
	case f.epoch != w.hub.epoch:
		return nil, diag.New(diag.LinkVersion, "%s sends for another run", w.peer())
	case f.tag != tag:
		return nil, diag.New(diag.LinkTag, "%s sends %q; %q is expected", w.peer(), f.tag, tag)
	}
	return f, nil
}

// readShard reads one shard and its checksum.
func (w *Wire) readShard(r io.Reader, data []byte) error {
	sum := uint32(0)
	for rest := data; len(rest) > 0; {
		part := rest[:min(chunk, len(rest))]
		rest = rest[len(part):]
		if _, err := io.ReadFull(r, part); err != nil {
			return cutOff(err)
		}
		sum = crc32.Update(sum, castagnoli, part)
	}
	var tail [4]byte
	if _, err := io.ReadFull(r, tail[:]); err != nil {
		return cutOff(err)
	}
	if binary.LittleEndian.Uint32(tail[:]) != sum {
		return diag.New(diag.LinkData,
			"a shard from %s has another checksum than when it was sent", w.peer()).
			Try("check the network between the hosts")
	}
	return nil
}

// byeTime is how long a process that ends waits for room to say so.
const byeTime = time.Second

// Close ends both connections. What was sent before is still delivered.
func (w *Wire) Close() error {
	if !w.failed.Load() {
		w.bye()
	}
	w.cancel(diag.New(diag.LinkLost, "the link to %s was closed", w.peer()))
	w.hangUp()
	return nil
}

// bye tells the other end that nothing more comes, unless an array is half sent.
func (w *Wire) bye() {
	select {
	case <-w.dialed:
	default:
		return
	}
	if w.out == nil || !w.sending.TryLock() {
		return
	}
	defer w.sending.Unlock()
	_ = w.out.SetWriteDeadline(time.Now().Add(byeTime))
	bye := frame{kind: byeFrame, epoch: w.hub.epoch}
	_, _ = w.out.Write(bye.append(nil))
}

// hangUp ends the connections of a link whose context has ended.
func (w *Wire) hangUp() {
	w.once.Do(func() {
		<-w.dialed
		if w.out != nil {
			_ = w.out.Close()
		}
		w.hub.mu.Lock()
		defer w.hub.mu.Unlock()
		w.in.taken = true // from now on none is welcome
		if w.in.conn != nil {
			_ = w.in.conn.Close()
		}
	})
}
