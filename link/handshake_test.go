package link

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"

	"github.com/deepwell/deepwell/diag"
)

// FuzzHandshake plays strangers against the hub's side of a handshake, one byte of the input for
// each thing that is said. A place is claimed only by a whole hello of this run that comes first,
// once; who does not know the epoch hears nothing but a version; nothing stays pending.
func FuzzHandshake(f *testing.F) {
	const epoch, self = 7, 0
	hello := func(e uint64, control bool, from, peer uint32) []byte {
		x := frame{kind: helloFrame, epoch: e, control: control, from: from, to: self, self: from, peer: peer}
		return x.append(nil)
	}
	beat := frame{kind: beatFrame, epoch: epoch, number: 1}
	bye := frame{kind: byeFrame, epoch: epoch}
	old := hello(epoch, false, 1, self)
	old[4] = 1
	right := map[byte]bool{0: true, 1: true, 2: true}
	table := [][]byte{hello(epoch, false, 1, self), hello(epoch, true, 1, self), hello(epoch, true, 2, anyProcess),
		hello(epoch, true, 1, 5), hello(epoch+1, false, 1, self), beat.append(nil), bye.append(nil), old,
		[]byte("GET / HTTP/1.1\r\n\r\n"), make([]byte, 64)}
	for i := range table {
		f.Add([]byte{byte(i)}, uint8(255))
		f.Add([]byte{byte(i), 0, 1}, uint8(30))
	}
	f.Fuzz(func(t *testing.T, script []byte, cut uint8) {
		h := &Hub{epoch: epoch, self: self, arrived: map[endpoint]*pendingConn{}, slots: make(chan struct{}, 1)}
		h.ctx, h.cancel = context.WithCancelCause(t.Context())
		defer h.cancel(nil)
		for range 2 { // the second time all places are taken that can be
			here, there := net.Pipe()
			h.admit(here)
			said := []byte{}
			for _, op := range script[:min(len(script), 8)] {
				said = append(said, table[int(op)%len(table)]...)
			}
			whole := len(script) > 0 && len(said) > 0
			if int(cut) < len(said) {
				said = said[:cut]
				whole = whole && int(cut) >= len(table[int(script[0])%len(table)])
			}
			heard := make(chan []byte)
			go func() {
				b, _ := io.ReadAll(there)
				heard <- b
			}()
			go func() {
				_, _ = there.Write(said)
				_ = there.Close()
			}()
			before := taken(h)
			err := h.welcome(here)
			h.settle(here)
			_ = here.Close()
			<-heard
			op := byte(255)
			if len(script) > 0 {
				op = script[0] % byte(len(table))
			}
			if now := taken(h); now != before && (!whole || !right[op]) {
				t.Fatalf("a place was claimed by %v truncated at %d (%v)", script, cut, err)
			}
			if err == nil && !right[op] {
				t.Fatalf("%v was welcome", script)
			}
			if len(h.pending) > 0 {
				t.Fatal("a connection stays pending")
			}
		}
	})
}

// A process of a large run takes all that it expects, however many came before their links were
// made: what it has no room for is closed without an answer, and comes again. Once it was refused
// for good, above 4,096 places in all.
func TestManyArriveEarly(t *testing.T) {
	h := &Hub{epoch: 7, self: 0, arrived: map[endpoint]*pendingConn{}}
	come := func(from uint32) error {
		here, there := net.Pipe()
		t.Cleanup(func() { _, _ = here.Close(), there.Close() })
		h.admit(here)
		_, err := h.judge(here, here, &frame{kind: helloFrame, epoch: 7, from: from, to: 0, peer: 0})
		h.settle(here)
		return err
	}
	for from := range uint32(maxStrangers) {
		if err := come(from); err != nil {
			t.Fatalf("process %d: %v", from, err)
		}
	}
	if err := come(maxStrangers); !errors.Is(err, net.ErrClosed) {
		t.Errorf("one more: %v", err)
	}
	if err := come(1); !errors.Is(err, diag.LinkVersion) {
		t.Errorf("one that came before: %v", err)
	}
	h.expect(endpoint{from: 2 * maxStrangers})
	if err := come(2 * maxStrangers); err != nil {
		t.Errorf("one that is expected: %v", err)
	}
	h.expect(endpoint{from: 5})
	if err := come(maxStrangers); err != nil {
		t.Errorf("one more, when another has its link: %v", err)
	}
}

// taken counts the places that connections have.
func taken(h *Hub) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.arrived {
		if c.taken {
			n++
		}
	}
	return n
}
