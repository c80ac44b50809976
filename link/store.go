package link

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"io/fs"
	"slices"
	"sync"
	"time"

	"github.com/deepwell/deepwell/diag"
)

// A Store is the key-value store of a run: process 0 holds it, and each of the others asks it over
// a link. The processes of one PJRT client find each other through it (package engine's Store). Its
// methods may be called by several goroutines.
type Store struct {
	ctx    context.Context // ends with the store
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup

	mu      sync.Mutex
	values  map[string][]byte // of process 0
	bytes   int
	changed chan struct{} // closed, and replaced, by every Put

	wire  *Wire // to process 0; nil in process 0
	calls map[uint64]chan storeReply
	last  uint64
}

const (
	storeTag = "store"
	// storeEnd is added to a process's number to number its end of a link: pipeline ranks are below.
	storeEnd = 1 << 30
	// maxStoreKey and maxStoreValue bound what one Put keeps, and maxStoreBytes all of them: XLA's
	// largest value is the topology of a cluster, some hundred bytes a device.
	maxStoreKey   = 4 << 10
	maxStoreValue = maxMessage - 8<<10
	maxStoreBytes = 1 << 30
	// maxStoreWaits bounds the calls of one process that wait at the same time.
	maxStoreWaits = 1024
)

// The operations of a store, and the outcomes of one, as messages have them.
const (
	storeGet = byte(iota)
	storeTry
	storePut
)

const (
	storeDone = byte(iota)
	storeMissing
	storeLate
	storeFailed
)

// Store opens this process's end of the run's store. addresses name all processes, in order.
func (h *Hub) Store(self int, addresses []string) *Store {
	s := &Store{values: map[string][]byte{}, changed: make(chan struct{}),
		calls: map[uint64]chan storeReply{}}
	s.ctx, s.cancel = context.WithCancelCause(h.ctx)
	h.Watch(func(p Peer, err error) {
		if err == nil {
			err = diag.New(diag.LinkLost, "%s has left the run", p)
		}
		s.cancel(err) // what it was to put will not come
	})
	if self > 0 {
		s.wire = h.Wire(storeEnd+self, storeEnd, addresses[0])
		s.wg.Go(s.hear)
		return s
	}
	for peer := 1; peer < len(addresses); peer++ {
		wire := h.Wire(storeEnd, storeEnd+peer, addresses[peer])
		s.wg.Go(func() { s.serve(wire) })
	}
	return s
}

// Close ends the store; calls that wait end with an error. The hub closes its links.
func (s *Store) Close() {
	s.cancel(diag.New(diag.LinkLost, "the store of the run was closed"))
	s.wg.Wait()
}

// Get waits up to timeout for a key to be put.
func (s *Store) Get(key string, timeout time.Duration) ([]byte, error) {
	return s.do(storeCall{op: storeGet, key: key, timeout: timeout})
}

// TryGet returns at once; the error of a missing key is fs.ErrNotExist.
func (s *Store) TryGet(key string) ([]byte, error) {
	return s.do(storeCall{op: storeTry, key: key})
}

// Put stores a value. A key that is put again has the new value.
func (s *Store) Put(key string, value []byte) error {
	_, err := s.do(storeCall{op: storePut, key: key, value: value})
	return err
}

// do runs a call here in process 0, and there from any other.
func (s *Store) do(c storeCall) ([]byte, error) {
	if len(c.key) > maxStoreKey || len(c.value) > maxStoreValue {
		return nil, diag.New(diag.LinkData, "a key of %d bytes with a value of %d is too long for the"+
			" store of a run", len(c.key), len(c.value))
	}
	if s.wire == nil {
		return s.answer(c)
	}
	s.mu.Lock()
	s.last++
	c.id = s.last
	reply := make(chan storeReply, 1)
	s.calls[c.id] = reply
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.calls, c.id)
	}()
	if err := s.wire.Tell(s.ctx, storeTag, c.append(nil)); err != nil {
		return nil, cmp.Or(context.Cause(s.ctx), err)
	}
	select {
	case r := <-reply:
		return r.value, r.err
	case <-s.wire.ctx.Done():
		return nil, context.Cause(s.wire.ctx)
	case <-s.ctx.Done():
		return nil, context.Cause(s.ctx)
	}
}

// answer is process 0's work for a call.
func (s *Store) answer(c storeCall) ([]byte, error) {
	if c.op == storePut {
		return nil, s.put(c.key, c.value)
	}
	late := time.NewTimer(c.timeout)
	defer late.Stop()
	for {
		s.mu.Lock()
		value, ok := s.values[c.key]
		changed := s.changed
		s.mu.Unlock()
		switch {
		case ok:
			return value, nil
		case c.op == storeTry:
			return nil, fs.ErrNotExist
		}
		select {
		case <-changed:
		case <-late.C:
			return nil, context.DeadlineExceeded // as the plugin expects, a time-out
		case <-s.ctx.Done():
			return nil, context.Cause(s.ctx)
		}
	}
}

func (s *Store) put(key string, value []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	size := s.bytes + len(value) - len(s.values[key])
	if _, known := s.values[key]; !known {
		size += len(key)
	}
	if size > maxStoreBytes {
		return diag.New(diag.LinkData, "the store of the run holds %d bytes and takes no more", s.bytes)
	}
	s.bytes, s.values[key] = size, slices.Clone(value)
	close(s.changed)
	s.changed = make(chan struct{})
	return nil
}

// serve answers the calls of one process until its link ends. A call that waits keeps no other
// waiting.
func (s *Store) serve(w *Wire) {
	var calls sync.WaitGroup
	defer calls.Wait()
	free := make(chan struct{}, maxStoreWaits)
	for {
		message, err := w.Hear(s.ctx, storeTag)
		if err != nil {
			return // the process is gone, or the store; heartbeats report the first
		}
		c, ok := parseStoreCall(message)
		if !ok {
			_ = w.fail(damaged("a call of %d bytes to the store", len(message)))
			return
		}
		select {
		case free <- struct{}{}:
		case <-s.ctx.Done():
			return
		}
		calls.Go(func() {
			defer func() { <-free }()
			value, err := s.answer(c)
			_ = w.Tell(s.ctx, storeTag, storeReply{c.id, value, err}.append(nil))
		})
	}
}

// hear takes the answers of process 0.
func (s *Store) hear() {
	for {
		message, err := s.wire.Hear(s.ctx, storeTag)
		if err != nil {
			return
		}
		r, ok := parseStoreReply(message)
		if !ok {
			_ = s.wire.fail(damaged("an answer of %d bytes from the store", len(message)))
			return
		}
		s.mu.Lock()
		waiting := s.calls[r.id]
		s.mu.Unlock()
		if waiting != nil {
			select {
			case waiting <- r:
			default: // answered before
			}
		}
	}
}

// A storeCall is one call: an identifier, which its answer has too, 64 bits; the operation, a byte;
// the timeout in nanoseconds, 64 bits; the length of the key, 32 bits; the key, and the value.
type storeCall struct {
	id      uint64
	op      byte
	timeout time.Duration
	key     string
	value   []byte
}

func (c storeCall) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, c.id)
	b = append(b, c.op)
	b = binary.LittleEndian.AppendUint64(b, uint64(max(0, c.timeout)))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(c.key)))
	return append(append(b, c.key...), c.value...)
}

func parseStoreCall(b []byte) (c storeCall, ok bool) {
	const head = 8 + 1 + 8 + 4
	if len(b) < head {
		return c, false
	}
	c.id, c.op = binary.LittleEndian.Uint64(b), b[8]
	c.timeout = time.Duration(binary.LittleEndian.Uint64(b[9:]) & (1<<63 - 1))
	n := binary.LittleEndian.Uint32(b[17:])
	b = b[head:]
	if c.op > storePut || n > maxStoreKey || int(n) > len(b) || len(b)-int(n) > maxStoreValue {
		return c, false
	}
	c.key, c.value = string(b[:n]), b[n:]
	return c, c.op == storePut || len(c.value) == 0
}

// A storeReply is the answer to a call: its identifier, the outcome, a byte, and the value or the
// text of an error.
type storeReply struct {
	id    uint64
	value []byte
	err   error
}

func (r storeReply) append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, r.id)
	switch {
	case r.err == nil:
		return append(append(b, storeDone), r.value...)
	case errors.Is(r.err, fs.ErrNotExist):
		return append(b, storeMissing)
	case errors.Is(r.err, context.DeadlineExceeded):
		return append(b, storeLate)
	}
	text := r.err.Error()
	return append(append(b, storeFailed), text[:min(len(text), maxText)]...)
}

func parseStoreReply(b []byte) (r storeReply, ok bool) {
	if len(b) < 9 {
		return r, false
	}
	r.id = binary.LittleEndian.Uint64(b)
	switch rest := b[9:]; b[8] {
	case storeDone:
		r.value = rest
	case storeMissing:
		r.err = fs.ErrNotExist
	case storeLate:
		r.err = context.DeadlineExceeded
	case storeFailed:
		r.err = diag.New(diag.LinkData, "the store of the run answers: %q", rest)
	default:
		return r, false
	}
	return r, true
}
