package link

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
)

// stores opens the stores of processes that share a secret.
func stores(t *testing.T, n int) (hubs []*Hub, list []*Store) {
	t.Helper()
	var addresses []string
	for range n {
		h, err := Listen(t.Context(), "127.0.0.1:0", 1, bytes.Repeat([]byte("k"), 32), event.Discard)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = h.Close() })
		hubs, addresses = append(hubs, h), append(addresses, h.Addr())
	}
	for i, h := range hubs {
		s := h.Store(i, addresses)
		t.Cleanup(s.Close)
		list = append(list, s)
	}
	return hubs, list
}

// What one process puts the others get, whether they asked before or ask after.
func TestStore(t *testing.T) {
	_, list := stores(t, 3)
	var wg sync.WaitGroup
	for i, s := range list {
		wg.Go(func() {
			for j := range list {
				for k := range 20 {
					key := fmt.Sprintf("from %d, %d", j, k)
					if got, err := s.Get(key, time.Minute); err != nil || string(got) != key+"!" {
						t.Errorf("process %d: %q is %q, %v", i, key, got, err)
					}
				}
			}
		})
		wg.Go(func() {
			for k := range 20 {
				key := fmt.Sprintf("from %d, %d", i, k)
				if err := s.Put(key, []byte(key+"!")); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for i, s := range list {
		if _, err := s.TryGet("nothing"); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("process %d: a missing key: %v", i, err)
		}
		if _, err := s.Get("nothing", time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("process %d: a key that does not come: %v", i, err)
		}
		big := bytes.Repeat([]byte{byte(i)}, maxStoreValue)
		if err := s.Put("big", big); err != nil {
			t.Error(err)
		}
		if got, err := list[2-i].Get("big", time.Minute); err != nil || !bytes.Equal(got, big) {
			t.Errorf("a value of %d bytes: %d come back, %v", len(big), len(got), err)
		}
		if err := s.Put("big", append(big, 0)); !errors.Is(err, diag.LinkData) {
			t.Errorf("a longer value: %v", err)
		}
	}
}

// A store that is full refuses a value, and keeps what it has.
func TestFullStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Store{values: map[string][]byte{"a": nil}, limit: maxStoreBytes,
			bytes: maxStoreBytes - storeEntry - 10}
		if err := s.put("b", make([]byte, 10)); !errors.Is(err, diag.LinkData) {
			t.Error(err)
		}
		if err := s.put("b", make([]byte, 9)); err != nil {
			t.Error(err)
		}
		if err := s.put("b", make([]byte, 9)); err != nil {
			t.Error(err)
		}
	})
}

// Calls that wait end when the store, or the process that holds it, does.
func TestStoreEnds(t *testing.T) {
	hubs, list := stores(t, 3)
	errs := make(chan error)
	for _, s := range list {
		go func() {
			_, err := s.Get("never", time.Hour)
			errs <- err
		}()
	}
	for _, s := range list { // all three have reached process 0
		if err := s.Put("x", nil); err != nil {
			t.Fatal(err)
		}
	}
	list[2].Close()
	if err := <-errs; !errors.Is(err, diag.LinkLost) {
		t.Error(err)
	}
	_ = hubs[0].Close()
	for range 2 {
		if err := <-errs; !errors.Is(err, diag.LinkLost) {
			t.Error(err)
		}
	}
}

// Messages print and parse themselves, and garbage is refused.
func FuzzStoreMessages(f *testing.F) {
	whole := func(c storeCall) []byte { return append(c.head(), c.value...) }
	answer := func(r storeReply) []byte { return append(r.head(), r.body()...) }
	f.Add(whole(storeCall{1, storeGet, time.Second, "key", nil}))
	f.Add(whole(storeCall{2, storePut, 0, "key", []byte("value")}))
	f.Add(answer(storeReply{3, []byte("value"), nil}))
	f.Add(answer(storeReply{4, nil, fs.ErrNotExist}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if c, ok := parseStoreCall(b); ok && !bytes.Equal(whole(c), b) {
			if c2, _ := parseStoreCall(whole(c)); c2.key != c.key || c2.timeout != c.timeout {
				t.Errorf("%+v", c)
			}
		}
		if r, ok := parseStoreReply(b); ok && r.err == nil && !bytes.Equal(answer(r), b) {
			t.Errorf("%+v", r)
		}
	})
}
