package link_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/link"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func listen(t testing.TB, epoch uint64, secret []byte) *link.Hub {
	t.Helper()
	h, err := link.Listen(context.Background(), "127.0.0.1:0", epoch, secret, event.Discard)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close() })
	return h
}

var secret = []byte("0123456789abcdef0123456789abcdef")

var vector = f32(1000)

func f32(n int64) dtype.Shape { return dtype.Shape{Type: dtype.F32, Dims: []int64{n}} }

func send(ctx context.Context, w *link.Wire, shape dtype.Shape) error {
	return w.Send(ctx, "x", shape, 1, func(_ int, dst []byte) error {
		clear(dst)
		return nil
	})
}

func recv(ctx context.Context, w *link.Wire) error {
	return w.Recv(ctx, "x", vector, 1, func(next func([]byte) error) error {
		return next(make([]byte, vector.Bytes()))
	})
}

// Messages of any length come as they were sent, between arrays, and only as messages.
func TestMessages(t *testing.T) {
	one, two := listen(t, 1, secret), listen(t, 1, secret)
	a, b := one.Wire(0, 1, two.Addr()), two.Wire(1, 0, one.Addr())
	for _, n := range []int{0, 1, 4096, 1 << 20} {
		want := bytes.Repeat([]byte{7, byte(n)}, n)
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := errors.Join(a.Tell(t.Context(), "m", want), send(t.Context(), a, vector)); err != nil {
				t.Error(err)
			}
		})
		got, err := b.Hear(t.Context(), "m")
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%d bytes were sent, %d came: %v", len(want), len(got), err)
		}
		if err := recv(t.Context(), b); err != nil {
			t.Error(err)
		}
		wg.Wait()
	}
	var wg sync.WaitGroup
	wg.Go(func() { _ = send(t.Context(), a, vector) })
	if _, err := b.Hear(t.Context(), "x"); diag.From(err).Code != diag.LinkShape {
		t.Errorf("an array where a message is expected: %v", err)
	}
	wg.Wait()
}

// A message that says it is larger than any is refused before memory is taken for it.
func TestHugeMessagesAreRefused(t *testing.T) {
	body := append([]byte{1, 0, 'x', 2, 0, 'u', '8', 1}, 0, 0, 0, 0, 0, 1, 0, 0) // 1 TiB
	w, out := stranger(t, listen(t, 1, nil), wire(3, 2, 1, []byte{0, 0}))
	if _, err := out.Write(wire(3, 3, 1, append(body, 1, 0, 0, 0))); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Hear(t.Context(), "x"); diag.From(err).Code != diag.LinkShape {
		t.Errorf("a message of 1 TiB: %v", err)
	}
}

// wire is what a foreign process would write; see frame.go for the layout.
func wire(version, kind byte, epoch uint64, body []byte) []byte {
	b := append([]byte("DWLK"), version, 0, kind, 0)
	b = binary.LittleEndian.AppendUint64(b, epoch)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(body)))
	b = append(b, body...)
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
}

func wireArray(tag string) []byte {
	text := func(b []byte, s string) []byte {
		return append(binary.LittleEndian.AppendUint16(b, uint16(len(s))), s...)
	}
	body := text(text(nil, tag), "f32")
	body = binary.LittleEndian.AppendUint64(append(body, 1), 1000)
	return wire(3, 3, 1, binary.LittleEndian.AppendUint32(body, 1))
}

// wireHello is the body of a hello between two processes whose numbers are not known.
func wireHello(way byte, from, to uint32) []byte {
	body := []byte{way}
	for _, x := range []uint32{from, to, 1<<32 - 1, 1<<32 - 1} {
		body = binary.LittleEndian.AppendUint32(body, x)
	}
	return body
}

// stranger is a process that this test plays: it listens, welcomes with the given bytes whoever
// connects, and connects itself as rank 1.
func stranger(t *testing.T, hub *link.Hub, welcome []byte) (w *link.Wire, out net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	w = hub.Wire(0, 1, l.Addr().String())
	in, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close() })
	if _, err := io.ReadFull(in, make([]byte, 41)); err != nil { // the hello
		t.Fatal(err)
	}
	if _, err := in.Write(welcome); err != nil {
		t.Fatal(err)
	}
	out, err = net.Dial("tcp", hub.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { out.Close() })
	if _, err := out.Write(wire(3, 1, 1, wireHello(0, 1, 0))); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 26)); err != nil {
		t.Fatal(err)
	}
	return w, out
}

func TestTCPSaysWhatIsWrongWithThePeer(t *testing.T) {
	shard := make([]byte, 4004) // with a checksum of 0, which is wrong
	shard[0] = 1
	fine := wire(3, 2, 1, []byte{0, 0})
	for name, c := range map[string]struct {
		welcome []byte
		sends   []byte
		closes  bool
		want    diag.Code
	}{
		"another version":  {wire(1, 2, 1, []byte{0, 0}), nil, false, diag.LinkVersion},
		"refused":          {wire(3, 2, 1, []byte{2, 0, 'n', 'o'}), nil, false, diag.LinkVersion},
		"not ours":         {[]byte("HTTP/1.1 400 Bad Request\r\n\r\n"), nil, false, diag.LinkVersion},
		"gone":             {fine, nil, true, diag.LinkLost},
		"gone in a frame":  {fine, wireArray("x")[:30], true, diag.LinkLost},
		"gone in a shard":  {fine, append(wireArray("x"), shard[:3000]...), true, diag.LinkLost},
		"stuck in a shard": {fine, append(wireArray("x"), shard[:3000]...), false, diag.LinkStalled},
		"stuck in a frame": {fine, wireArray("x")[:30], false, diag.LinkStalled},
		"damaged":          {fine, append(wireArray("x"), shard...), false, diag.LinkData},
		"damaged frame":    {fine, append(wireArray("x")[:40], shard...), false, diag.LinkData},
		"another tag":      {fine, wireArray("y"), false, diag.LinkTag},
		"another epoch": {fine, wire(3, 3, 2, wireArray("x")[20:len(wireArray("x"))-4]), false,
			diag.LinkVersion},
		"bye":                {fine, wire(3, 4, 1, nil), false, diag.LinkLost},
		"version in between": {fine, wire(7, 3, 1, nil), false, diag.LinkVersion},
		"hello in between":   {fine, wire(3, 1, 1, wireHello(0, 1, 0)), false, diag.LinkData},
	} {
		t.Run(name, func(t *testing.T) {
			hub := listen(t, 1, nil)
			hub.StallTimeout = 100 * time.Millisecond
			w, out := stranger(t, hub, c.welcome)
			if _, err := out.Write(c.sends); err != nil {
				t.Fatal(err)
			}
			if c.closes {
				out.Close()
			}
			err := recv(t.Context(), w)
			if !errors.Is(err, c.want) {
				t.Errorf("%v, want %s", err, c.want)
			}
			if again := recv(t.Context(), w); again == nil {
				t.Error("a link that has failed goes on")
			}
		})
	}
}

// Processes of two runs do not take each other for their own, and a rank that is connected is not
// replaced. Who holds the key is answer that it is another run; a stranger is answer nothing.
func TestTCPKeepsRunsApart(t *testing.T) {
	one, two := listen(t, 1, nil), listen(t, 2, nil)
	one.StallTimeout = 200 * time.Millisecond
	err := send(t.Context(), one.Wire(0, 1, two.Addr()), vector)
	if !errors.Is(err, diag.LinkLost) ||
		!strings.Contains(err.Error(), "without an answer") {
		t.Errorf("another epoch: %v", err)
	}
	one, two = listen(t, 1, secret), listen(t, 2, secret)
	err = send(t.Context(), one.Wire(0, 1, two.Addr()), vector)
	if !errors.Is(err, diag.LinkVersion) ||
		!strings.Contains(err.Error(), "different runs") {
		t.Errorf("another epoch: %v", err)
	}
	third := listen(t, 1, secret)
	first := one.Wire(2, 3, third.Addr())
	if err := send(t.Context(), first, vector); err != nil {
		t.Fatal(err)
	}
	second := one.Wire(2, 3, third.Addr())
	if err := send(t.Context(), second, vector); !errors.Is(err, diag.LinkVersion) {
		t.Errorf("a second connection of one rank: %v", err)
	}
}

// A process that is not there yet is waited for; one that never comes is named.
func TestTCPWaitsForThePeer(t *testing.T) {
	one := listen(t, 1, nil)
	reserved, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := reserved.Addr().String()
	reserved.Close()
	w := one.Wire(0, 1, address)
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := send(t.Context(), w, vector); err != nil {
			t.Error(err)
		}
	})
	time.Sleep(30 * time.Millisecond)
	two, err := link.Listen(t.Context(), address, 1, nil, event.Discard)
	if err != nil {
		t.Fatal(err)
	}
	defer two.Close()
	if err := recv(t.Context(), two.Wire(1, 0, one.Addr())); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	hub := listen(t, 1, nil)
	hub.StallTimeout = 50 * time.Millisecond
	err = send(t.Context(), hub.Wire(0, 1, "127.0.0.1:1"), vector)
	if !errors.Is(err, diag.LinkLost) {
		t.Errorf("a process that never comes: %v", err)
	}
}

// A sender whose receiver takes nothing is let go by its context and by the hub's patience.
func TestTCPPushesBack(t *testing.T) {
	big := f32(8 << 20) // more than the buffers of both sockets
	for name, c := range map[string]struct {
		patience, timeout time.Duration
		want              diag.Code
	}{
		"context":  {time.Minute, 100 * time.Millisecond, diag.Canceled},
		"patience": {100 * time.Millisecond, time.Minute, diag.LinkStalled},
	} {
		one, two := listen(t, 1, nil), listen(t, 1, nil)
		one.StallTimeout = c.patience
		w := one.Wire(0, 1, two.Addr())
		two.Wire(1, 0, one.Addr())
		ctx, cancel := context.WithTimeout(t.Context(), c.timeout)
		err := send(ctx, w, big)
		cancel()
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A context that ends at the moment at which a link finds nobody is an error, whichever is first.
func TestNobodyIsThere(t *testing.T) {
	hub := listen(t, 1, nil)
	hub.StallTimeout = 15 * time.Millisecond
	var wg sync.WaitGroup
	for i := range 100 {
		w := hub.Wire(0, 1+i, "127.0.0.1:1") // where nobody listens
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(),
				hub.StallTimeout+time.Duration(i-50)*20*time.Microsecond)
			defer cancel()
			if err := send(ctx, w, vector); err == nil {
				t.Error("something was sent to nobody")
			}
		})
	}
	wg.Wait()
}
