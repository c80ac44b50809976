package link

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
)

// A raid is a process of the run gone wrong: it holds the key, and says to the store of process 0
// what it likes.
type raid struct {
	store, friend *Store // of process 0, and of one that behaves
	hub           *Hub   // of the one that does not
	wire          *Wire
}

func newRaid(t *testing.T) *raid {
	t.Helper()
	var hubs []*Hub
	var addresses []string
	for range 3 {
		h, err := Listen(t.Context(), "127.0.0.1:0", 1, bytes.Repeat([]byte("k"), 32), event.Discard)
		if err != nil {
			t.Fatal(err)
		}
		hubs, addresses = append(hubs, h), append(addresses, h.Addr())
	}
	// Process 0 may give the link up before it has called back; the raider waits this long for it.
	hubs[1].StallTimeout = 5 * time.Second
	r := &raid{store: hubs[0].Store(0, addresses), friend: hubs[2].Store(2, addresses), hub: hubs[1],
		wire: hubs[1].Wire(storeEnd+1, storeEnd, addresses[0])}
	t.Cleanup(func() {
		for _, h := range hubs {
			_ = h.Close()
		}
		r.store.Close()
		r.friend.Close()
	})
	return r
}

// say sends a call; what comes of it is nobody's concern.
func (r *raid) say(t *testing.T, c storeCall) error {
	return r.wire.tell(t.Context(), storeTag, c.head(), c.value)
}

// heap is what is in use after a collection, in bytes.
func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse + m.StackInuse)
}

// raids are what a process gone wrong does to the store, and the memory that it may take, in MiB.
var raids = []struct {
	name string
	mib  int64
	do   func(t *testing.T, r *raid)
}{
	{"answers that nobody reads", 96, func(t *testing.T, r *raid) {
		// One Put, and 1024 Gets of it: once a copy was made for each, 16 GiB.
		value := make([]byte, maxStoreValue)
		if err := r.say(t, storeCall{op: storePut, key: "big", value: value}); err != nil {
			t.Error(err)
		}
		for i := range uint64(maxStoreWaits) {
			if r.say(t, storeCall{id: i, op: storeGet, key: "big"}) != nil {
				break
			}
		}
		time.Sleep(200 * time.Millisecond)
	}},
	{"small keys", 16, func(t *testing.T, r *raid) {
		// Once an entry counted as its bytes: five each, of which a map takes a hundred.
		go func() {
			for {
				if _, err := r.wire.Hear(t.Context(), storeTag); err != nil {
					return
				}
			}
		}()
		for i := range uint32(20_000) {
			key := string(binary.LittleEndian.AppendUint32(nil, i))
			if err := r.say(t, storeCall{op: storePut, key: key, value: []byte{1}}); err != nil {
				t.Error(err)
				return
			}
		}
	}},
	{"waits without an end", 64, func(t *testing.T, r *raid) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			for i := range uint64(5000) {
				key := fmt.Sprintf("%04d%s", i, bytes.Repeat([]byte("x"), maxStoreKey-4))
				if r.say(t, storeCall{id: i, op: storeGet, key: key, timeout: 1<<63 - 1}) != nil {
					return
				}
			}
		}()
		for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
			if r.store.waiting() == maxStoreWaits {
				break
			}
		}
		if n := r.store.waiting(); n != maxStoreWaits {
			t.Errorf("%d calls wait", n)
		}
		t.Cleanup(func() { // they end with the process
			_ = r.hub.Close()
			<-done
			for end := time.Now().Add(5 * time.Second); r.store.waiting() > 0; time.Sleep(time.Millisecond) {
				if time.Now().After(end) {
					t.Errorf("%d calls of a process that is gone wait", r.store.waiting())
					return
				}
			}
		})
	}},
	{"a value too long", 64, func(t *testing.T, r *raid) {
		_ = r.say(t, storeCall{op: storePut, key: "k", value: make([]byte, maxStoreValue+1)})
		r.ends(t, "an answer to a value too long")
	}},
	{"an unknown operation", 16, func(t *testing.T, r *raid) {
		_ = r.say(t, storeCall{op: 77, key: "k"})
		r.ends(t, "an answer to an unknown operation")
	}},
	{"a key longer than the message", 16, func(t *testing.T, r *raid) {
		head := storeCall{op: storeGet, key: "k"}.head()
		binary.LittleEndian.PutUint32(head[17:], 1<<32-1)
		_ = r.wire.tell(t.Context(), storeTag, head)
		r.ends(t, "an answer to half of a call")
	}},
	{"answers to nothing", 16, func(t *testing.T, r *raid) {
		_ = r.wire.tell(t.Context(), storeTag, storeReply{id: 1 << 40}.head())
		r.ends(t, "an answer to an answer")
	}},
}

// ends waits for the link to be given up.
func (r *raid) ends(t *testing.T, otherwise string) {
	t.Helper()
	if _, err := r.wire.Hear(t.Context(), storeTag); !errors.Is(err, diag.LinkLost) {
		t.Errorf("%s: %v", otherwise, err)
	}
}

// waiting counts the calls that wait.
func (s *Store) waiting() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.waits {
		n += w.calls
	}
	return n
}

// A process that holds the key and goes wrong takes a bounded part of process 0's memory, and keeps
// nobody else waiting.
func TestRaidsOnTheStore(t *testing.T) {
	for _, c := range raids {
		t.Run(c.name, func(t *testing.T) {
			r := newRaid(t)
			r.store.limit = 1 << 20 // more only takes longer
			if c.name == "answers that nobody reads" || c.name == "a value too long" {
				r.store.limit = maxStoreBytes
			}
			before, began := heap(), time.Now()
			c.do(t, r)
			grown, took := heap()-before, time.Since(began)
			t.Logf("%.1f MiB, %s", float64(grown)/(1<<20), took.Round(time.Millisecond))
			if grown > c.mib<<20 {
				t.Errorf("the heap grew by %d MiB, more than %d", grown>>20, c.mib)
			}
			if took > time.Minute {
				t.Errorf("it took %s", took)
			}
			r.store.mu.Lock()
			r.store.limit = maxStoreBytes
			r.store.mu.Unlock()
			began = time.Now()
			var both sync.WaitGroup
			both.Go(func() {
				if got, err := r.store.Get("hello", time.Minute); err != nil || string(got) != "friend" {
					t.Errorf("%q, %v", got, err)
				}
			})
			if err := r.friend.Put("hello", []byte("friend")); err != nil {
				t.Error(err)
			}
			both.Wait()
			if took := time.Since(began); took > 10*time.Second {
				t.Errorf("a process that behaves waits %s", took)
			}
		})
	}
}

// A call does not wait longer than it may for a process 0 that is there and does not answer.
func TestStoreThatDoesNotAnswer(t *testing.T) {
	one, err := Listen(t.Context(), "127.0.0.1:0", 1, nil, event.Discard)
	if err != nil {
		t.Fatal(err)
	}
	defer one.Close()
	two, err := Listen(t.Context(), "127.0.0.1:0", 1, nil, event.Discard)
	if err != nil {
		t.Fatal(err)
	}
	defer two.Close()
	two.StallTimeout = 300 * time.Millisecond
	_ = one.Wire(storeEnd, storeEnd+1, two.Addr()) // takes calls, and says nothing
	s := two.Store(1, []string{one.Addr(), two.Addr()})
	defer s.Close()
	began := time.Now()
	if err := s.Put("k", nil); err == nil || time.Since(began) > 5*time.Second {
		t.Errorf("%v after %s", err, time.Since(began))
	}
}
