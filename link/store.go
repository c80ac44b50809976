package link

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"net"
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

	mu     sync.Mutex
	values map[string][]byte // of process 0; a value is never written to
	bytes  int               // that they take, at most limit
	limit  int
	waits  map[string]*storeWait // by the keys that calls wait for

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
	maxStoreBytes = 256 << 20
	// storeEntry is what the map of values takes for each, besides its bytes.
	storeEntry = 128
	// maxStoreWaits bounds the calls of one process that wait at the same time, and maxStoreWait how
	// long one does: XLA waits for minutes.
	maxStoreWaits = 1024
	maxStoreWait  = time.Hour
	// storeGrace is how much later than process 0 another one gives up a call.
	storeGrace = 10 * time.Second
)

// A storeWait is what calls for one key wait for.
type storeWait struct {
	put   chan struct{} // closed when the key is put
	calls int
}

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
	s := &Store{values: map[string][]byte{}, limit: maxStoreBytes, waits: map[string]*storeWait{},
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
	c.timeout = min(max(0, c.timeout), maxStoreWait)
	if s.wire == nil {
		return s.answer(c, nil)
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
	if err := s.wire.tell(s.ctx, storeTag, c.head(), c.value); err != nil {
		return nil, cmp.Or(context.Cause(s.ctx), err)
	}
	late := time.NewTimer(s.patience(c))
	defer late.Stop()
	select {
	case r := <-reply:
		return r.value, r.err
	case <-late.C:
		return nil, fmt.Errorf("%s does not answer a call to the store of the run: %w", s.wire.peer(),
			context.DeadlineExceeded)
	case <-s.wire.ctx.Done():
		return nil, context.Cause(s.wire.ctx)
	case <-s.ctx.Done():
		return nil, context.Cause(s.ctx)
	}
}

// patience is how long a call waits for process 0, which may be there and not answer.
func (s *Store) patience(c storeCall) time.Duration {
	if c.op == storeGet {
		return c.timeout + storeGrace
	}
	return s.wire.hub.StallTimeout
}

// answer is process 0's work for a call, until gone is closed.
func (s *Store) answer(c storeCall, gone <-chan struct{}) ([]byte, error) {
	if c.op == storePut {
		return nil, s.put(c.key, c.value)
	}
	s.mu.Lock()
	value, ok := s.values[c.key]
	switch {
	case ok:
		s.mu.Unlock()
		return value, nil
	case c.op == storeTry:
		s.mu.Unlock()
		return nil, fs.ErrNotExist
	}
	wait := s.waits[c.key]
	if wait == nil {
		wait = &storeWait{put: make(chan struct{})}
		s.waits[c.key] = wait
	}
	wait.calls++
	s.mu.Unlock()
	late := time.NewTimer(min(c.timeout, maxStoreWait))
	defer late.Stop()
	err := context.DeadlineExceeded // as the plugin expects, a time-out
	select {
	case <-wait.put:
	case <-late.C:
	case <-gone:
		err = net.ErrClosed
	case <-s.ctx.Done():
		err = context.Cause(s.ctx)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if value, ok := s.values[c.key]; ok {
		return value, nil
	}
	if wait.calls--; wait.calls == 0 {
		delete(s.waits, c.key)
	}
	return nil, err
}

func (s *Store) put(key string, value []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	size := s.bytes + len(value) - len(s.values[key])
	if _, known := s.values[key]; !known {
		size += len(key) + storeEntry
	}
	if size > s.limit {
		return diag.New(diag.LinkData, "the store of the run holds %d bytes and takes no more", s.bytes)
	}
	s.bytes, s.values[key] = size, slices.Clone(value)
	if wait := s.waits[key]; wait != nil {
		close(wait.put)
		delete(s.waits, key)
	}
	return nil
}

// serve answers the calls of one process until its link ends. A call that waits keeps no other
// waiting; from who does not read answers nothing more is read.
func (s *Store) serve(w *Wire) {
	var calls sync.WaitGroup
	defer calls.Wait()
	free := make(chan struct{}, maxStoreWaits)
	reply := func(id uint64, value []byte, err error) {
		r := storeReply{id, value, err}
		_ = w.tell(s.ctx, storeTag, r.head(), r.body()) // else the link has ended, as Hear finds
	}
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
		if c.op != storeGet {
			value, err := s.answer(c, nil)
			reply(c.id, value, err)
			continue
		}
		select {
		case free <- struct{}{}:
		default:
			reply(c.id, nil, diag.New(diag.LinkData, "%d calls of this process wait", maxStoreWaits))
			continue
		}
		calls.Go(func() {
			defer func() { <-free }()
			value, err := s.answer(c, w.ctx.Done())
			reply(c.id, value, err)
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
