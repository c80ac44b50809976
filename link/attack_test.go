package link_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/link"
)

// cert derives the certificate that processes with a secret present; see secure.go.
func cert(t testing.TB, secret []byte) tls.Certificate {
	t.Helper()
	seed, err := hkdf.Key(sha256.New, secret, nil, "deepwell link ed25519 v1", ed25519.SeedSize)
	if err != nil {
		t.Fatal(err)
	}
	key := ed25519.NewKeyFromSeed(seed)
	template := &x509.Certificate{SerialNumber: big.NewInt(2), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(nil, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func clientOf(certs ...tls.Certificate) *tls.Config {
	return &tls.Config{InsecureSkipVerify: true, Certificates: certs, NextProtos: []string{"deepwell-link"}}
}

const attacked = 5 // the epoch of the run

// wireBeat is a heartbeat.
func wireBeat(number, step uint64) []byte {
	body := binary.LittleEndian.AppendUint64(nil, number)
	for _, x := range []uint64{step, 1 << 63, 1 << 62} {
		body = binary.LittleEndian.AppendUint64(body, x)
	}
	return wire(3, 5, attacked, append(body, 1, 0, 'x', 0, 0, 255, 255, 255, 255, 0, 0))
}

// controlHello is the hello of a control connection from one process to another.
func controlHello(from, to uint32) []byte {
	body := []byte{1}
	for _, x := range []uint32{from, to, from, to} {
		body = binary.LittleEndian.AppendUint32(body, x)
	}
	return wire(3, 1, attacked, body)
}

// An attack does something to a hub, and gives all that the hub said in return.
type attack struct {
	name   string
	do     func(t *testing.T, c net.Conn) // on a plain connection, or one of TLS with the run's key
	key    bool
	answer string // what an answer may have; "" means no answer
}

func says(b []byte) func(*testing.T, net.Conn) {
	return func(t *testing.T, c net.Conn) { _, _ = c.Write(b) }
}

var attacks = []attack{
	{name: "garbage", do: says([]byte(strings.Repeat("garbage\x00\xff", 500)))},
	{name: "HTTP", do: says([]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"))},
	{name: "plain hello to a TLS port", do: says(wire(3, 1, attacked, wireHello(0, 1, 0)))},
	{name: "TLS with another key", do: func(t *testing.T, c net.Conn) {
		tc := tls.Client(c, clientOf(cert(t, []byte("another secret of some 32 bytes!"))))
		_ = tc.HandshakeContext(t.Context())
		_, _ = tc.Write(wire(3, 1, attacked, wireHello(0, 7, 0)))
	}, answer: "\x15"},
	{name: "the run's certificate, signed with another key", do: func(t *testing.T, c net.Conn) {
		stolen := cert(t, secret) // it is no secret: a listener shows it to everybody
		stolen.PrivateKey = cert(t, []byte("another secret of some 32 bytes!")).PrivateKey
		tc := tls.Client(c, clientOf(stolen))
		_ = tc.HandshakeContext(t.Context())
		_, _ = tc.Write(controlHello(9, 0))
	}, answer: "\x15"},
	{name: "two certificates", do: func(t *testing.T, c net.Conn) {
		two := cert(t, secret)
		two.Certificate = append(two.Certificate, two.Certificate[0])
		tc := tls.Client(c, clientOf(two))
		_ = tc.HandshakeContext(t.Context())
		_, _ = tc.Write(controlHello(9, 0))
	}, answer: "\x15"},
	{name: "TLS without a certificate", do: func(t *testing.T, c net.Conn) {
		tc := tls.Client(c, clientOf())
		_ = tc.HandshakeContext(t.Context())
		_, _ = tc.Write(wire(3, 1, attacked, wireHello(0, 7, 0)))
	}, answer: "\x15"},
	{name: "TLS 1.2", do: func(t *testing.T, c net.Conn) {
		config := clientOf(cert(t, secret))
		config.MinVersion, config.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
		if tls.Client(c, config).HandshakeContext(t.Context()) == nil {
			t.Error("TLS 1.2 was accepted")
		}
	}, answer: "\x15"},
	{name: "TLS of another protocol", do: func(t *testing.T, c net.Conn) {
		config := clientOf(cert(t, secret))
		config.NextProtos = []string{"h2"}
		if tls.Client(c, config).HandshakeContext(t.Context()) == nil {
			t.Error("another protocol was accepted")
		}
	}, answer: "\x15"},
	{name: "half of a TLS handshake", do: says([]byte{22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3})},
	{name: "a TLS record of 64 KiB", do: says(append([]byte{22, 3, 3, 255, 255}, make([]byte, 65535)...))},
	{name: "nothing, half closed", do: func(t *testing.T, c net.Conn) { _ = c.(*net.TCPConn).CloseWrite() }},
	{name: "reset", do: func(t *testing.T, c net.Conn) {
		_ = c.(*net.TCPConn).SetLinger(0)
		_ = c.Close()
	}},
	{name: "another epoch", key: true, do: says(wire(3, 1, 99, wireHello(0, 1, 0))), answer: "different runs"},
	{name: "another version", key: true, do: says(wire(1, 1, attacked, wireHello(0, 1, 0))), answer: "version"},
	{name: "another process is meant", key: true, do: says(controlHello(1, 2)), answer: "not 2"},
	{name: "a claim that is taken", key: true, do: says(controlHello(1, 0)), answer: "already"},
	{name: "a link that is taken", key: true, do: says(wire(3, 1, attacked, wireHello(0, 1, 0))), answer: "already"},
	{name: "a hello twice", key: true, do: says(append(controlHello(1, 0), controlHello(1, 0)...)), answer: "already"},
	{name: "self-connection", key: true, do: says(controlHello(0, 1)), answer: "not 1"},
	{name: "bye before hello", key: true, do: says(wire(3, 4, attacked, nil))},
	{name: "heartbeat before hello", key: true, do: says(wireBeat(1, 1))},
	{name: "array before hello", key: true, do: says(wireArray("x"))},
	{name: "unknown kind", key: true, do: says(wire(3, 77, attacked, nil))},
	{name: "unknown way", key: true, do: says(wire(3, 1, attacked, wireHello(9, 1, 0)))},
	{name: "huge frame", key: true, do: says(append(wire(3, 1, attacked, nil)[:16], 0xff, 0xff, 0xff, 0x7f))},
	{name: "a frame of 4 GiB", key: true, do: says(append(wire(3, 1, attacked, nil)[:16], 0xff, 0xff, 0xff, 0xff))},
	{name: "truncated frame", key: true, do: says(wire(3, 1, attacked, wireHello(0, 1, 0))[:30])},
	{name: "flipped byte", key: true, do: func(t *testing.T, c net.Conn) {
		b := controlHello(9, 0)
		b[25] ^= 4
		_, _ = c.Write(b)
	}},
	{name: "flipped byte below TLS", do: func(t *testing.T, c net.Conn) {
		tc := tls.Client(flipping{c}, clientOf(cert(t, secret)))
		_ = tc.HandshakeContext(t.Context())
		_, _ = tc.Write(controlHello(9, 0))
	}, answer: "\x15"},
}

// flipping changes one bit of large records.
type flipping struct{ net.Conn }

func (f flipping) Write(p []byte) (int, error) {
	b := append([]byte(nil), p...)
	b[len(b)-1] ^= 1
	return f.Conn.Write(b)
}

// A pair is two hubs that have joined, with a link between them.
type pair struct {
	one, two *link.Hub
	a, b     *link.Wire
}

func join(t testing.TB, secret []byte, silence time.Duration) *pair {
	t.Helper()
	p := &pair{one: listen(t, attacked, secret), two: listen(t, attacked, secret)}
	p.connect(silence, p.one.Addr(), p.two.Addr())
	return p
}

// connect joins the hubs, which find each other at the given addresses.
func (p *pair) connect(silence time.Duration, one, two string) {
	status := func() link.Status { return link.Status{Step: 3, Phase: "step"} }
	p.one.HeartbeatTimeout, p.two.HeartbeatTimeout = silence, silence
	p.one.Join(0, []link.Peer{{Process: 1, Address: two, Ranks: "pipeline rank 1"}}, status)
	p.two.Join(1, []link.Peer{{Process: 0, Address: one, Ranks: "pipeline rank 0"}}, status)
	p.a, p.b = p.one.Wire(0, 1, two), p.two.Wire(1, 0, one)
}

// works hands an array over, both ways.
func (p *pair) works(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for _, way := range [][2]*link.Wire{{p.a, p.b}, {p.b, p.a}} {
		sent := make(chan error, 1)
		go func() { sent <- send(ctx, way[0], vector) }()
		if err := errors.Join(recv(ctx, way[1]), <-sent); err != nil {
			t.Fatalf("the run does not go on: %v", err)
		}
	}
}

// Strangers and processes that misbehave are closed and learn nothing of the run, which goes on.
func TestAttacksAreRefused(t *testing.T) {
	p := join(t, secret, 20*time.Second)
	p.works(t)
	t.Logf("%d attacks and floods below", len(attacks))
	epoch := binary.LittleEndian.AppendUint64(nil, attacked)
	for _, a := range attacks {
		t.Run(a.name, func(t *testing.T) {
			raw, err := net.Dial("tcp", p.one.Addr())
			if err != nil {
				t.Fatal(err)
			}
			defer raw.Close()
			_ = raw.SetDeadline(time.Now().Add(30 * time.Second))
			if !a.key {
				a.do(t, raw)
				if !slowtest.Enabled { // else the hub's own deadline ends it, after 10 s
					_ = raw.(*net.TCPConn).CloseWrite()
				}
				rest, _ := io.ReadAll(raw)
				if len(rest) > 0 && (a.answer == "" && rest[0] != 0x15 || string(rest) == string(epoch)) {
					t.Errorf("a stranger receives %q", rest) // TLS alerts say nothing of the run
				}
			} else {
				c := tls.Client(raw, clientOf(cert(t, secret)))
				if err := c.HandshakeContext(t.Context()); err != nil {
					t.Fatal(err)
				}
				a.do(t, c)
				_ = c.CloseWrite()
				rest, _ := io.ReadAll(c)
				if a.answer == "" && len(rest) > 0 || !strings.Contains(string(rest), a.answer) {
					t.Errorf("the answer is %q, want %q", rest, a.answer)
				}
				if len(rest) >= 16 && binary.LittleEndian.Uint64(rest[8:]) != 0 {
					t.Errorf("the epoch leaks: %q", rest)
				}
			}
		})
	}
	p.works(t)
}

// Without a key only the epoch keeps strangers apart, and it is never sent to them.
func TestTheEpochDoesNotLeak(t *testing.T) {
	p := join(t, nil, 20*time.Second)
	for name, b := range map[string][]byte{
		"another epoch":   wire(3, 1, 99, wireHello(0, 1, 0)),
		"another version": wire(1, 1, 99, wireHello(0, 1, 0)),
		"no hello":        wire(3, 4, attacked, nil),
	} {
		c, err := net.Dial("tcp", p.one.Addr())
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		_, _ = c.Write(b)
		rest, err := io.ReadAll(c)
		c.Close()
		if err != nil && !errors.Is(err, io.EOF) && !strings.Contains(err.Error(), "reset") {
			t.Errorf("%s: %v", name, err)
		}
		if len(rest) >= 16 && binary.LittleEndian.Uint64(rest[8:]) != 0 || name == "another epoch" && len(rest) > 0 {
			t.Errorf("%s: received %q", name, rest)
		}
	}
	p.works(t)
}

// 500 idle connections, and some that send a byte now and then, do not keep a process of the run
// out, and take bounded memory and descriptors.
func TestSlowStrangersDoNotBlockAHub(t *testing.T) {
	p := &pair{one: listen(t, attacked, secret), two: listen(t, attacked, secret)}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	var all []net.Conn
	for range 500 {
		c, err := net.Dial("tcp", p.one.Addr())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_, _ = c.Write([]byte{22})
		all = append(all, c)
	}
	p.connect(20*time.Second, p.one.Addr(), p.two.Addr())
	p.works(t)
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapInuse) - int64(before.HeapInuse); grown > 64<<20 {
		t.Errorf("the heap grew by %d bytes", grown)
	}
	open := 0
	for _, c := range all {
		_ = c.SetReadDeadline(time.Now().Add(time.Millisecond))
		_, err := c.Read(make([]byte, 1))
		if n, ok := errors.AsType[net.Error](err); ok && n.Timeout() {
			open++
		}
	}
	t.Logf("%d of 500 idle connections are open", open)
	if open > 140 {
		t.Errorf("%d idle connections are open", open)
	}
}

// evil is the second process of a run, played by the test: it holds the key.
func evil(t *testing.T) (hub *link.Hub, w *link.Wire, control net.Conn) {
	t.Helper()
	config := clientOf(cert(t, secret))
	config.ClientAuth = tls.RequireAnyClientCert
	l, err := tls.Listen("tcp", "127.0.0.1:0", config)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	t.Cleanup(func() { l.Close(); wg.Wait() })
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				if _, err := io.ReadFull(c, make([]byte, 41)); err == nil {
					_, _ = c.Write(wire(3, 2, 0, []byte{0, 0}))
				}
				_, _ = io.Copy(io.Discard, c)
			})
		}
	})
	hub = listen(t, attacked, secret)
	hub.HeartbeatTimeout = 400 * time.Millisecond
	hub.Join(0, []link.Peer{{Process: 1, Address: l.Addr().String(), Ranks: "pipeline rank 1"}},
		func() link.Status { return link.Status{} })
	w = hub.Wire(0, 1, l.Addr().String())
	control, err = tls.Dial("tcp", hub.Addr(), clientOf(cert(t, secret)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { control.Close() })
	if _, err := control.Write(controlHello(1, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(control, make([]byte, 26)); err != nil {
		t.Fatal(err)
	}
	return hub, w, control
}

// What a control connection must not send ends the links to its process, by name; absurd figures
// and floods do no harm.
func TestControlConnections(t *testing.T) {
	for name, c := range map[string]struct {
		sends func(c net.Conn)
		want  diag.Code
	}{
		"silence":             {func(c net.Conn) {}, ""},
		"a beat, then none":   {func(c net.Conn) { _, _ = c.Write(wireBeat(1, 1)) }, diag.LinkStalled},
		"closed":              {func(c net.Conn) { _, _ = c.Write(wireBeat(1, 1)); c.Close() }, diag.LinkLost},
		"out of order":        {func(c net.Conn) { _, _ = c.Write(append(wireBeat(7, 1), wireBeat(6, 1)...)) }, diag.LinkData},
		"replayed":            {func(c net.Conn) { _, _ = c.Write(append(wireBeat(7, 1), wireBeat(7, 1)...)) }, diag.LinkData},
		"an array":            {func(c net.Conn) { _, _ = c.Write(wireArray("x")) }, diag.LinkVersion},
		"of another run":      {func(c net.Conn) { _, _ = c.Write(wire(3, 4, 6, nil)) }, diag.LinkVersion},
		"absurd, then silent": {func(c net.Conn) { _, _ = c.Write(wireBeat(1, 1<<63)) }, diag.LinkStalled},
		"flood, then silent": {func(c net.Conn) {
			_ = c.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
			for n := range uint64(2000) {
				if _, err := c.Write(wireBeat(n+1, 1)); err != nil {
					return
				}
			}
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			hub, w, control := evil(t)
			c.sends(control)
			if c.want == "" {
				if s := hub.Statuses(); len(s) > 1 {
					t.Errorf("statuses %v", s)
				}
				return
			}
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			err := recv(ctx, w)
			if e := diag.From(err); e.Code != c.want {
				t.Errorf("%v, want %s", err, c.want)
			}
			if strings.Contains(fmt.Sprint(err), "1048") {
				t.Errorf("an internal number leaks: %v", err)
			}
		})
	}
}

// A proxy passes bytes on until it is a black hole: connections stay, nothing comes through.
type proxy struct {
	net.Listener
	hole chan struct{}
	wg   sync.WaitGroup
}

func newProxy(t *testing.T, to string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{Listener: l, hole: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() { l.Close(); cancel(); p.wg.Wait() })
	p.wg.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				in.Close()
				continue
			}
			context.AfterFunc(ctx, func() { in.Close(); out.Close() })
			for _, way := range [][2]net.Conn{{in, out}, {out, in}} {
				p.wg.Go(func() {
					b := make([]byte, 64<<10)
					for {
						n, err := way[0].Read(b)
						select {
						case <-p.hole:
							<-ctx.Done()
							return
						default:
						}
						if err != nil {
							way[1].Close()
							return
						}
						if _, err := way[1].Write(b[:n]); err != nil {
							return
						}
					}
				})
			}
		}
	})
	return p
}

// A network that swallows everything and keeps connections open is found by the silence.
func TestBlackHoleIsFound(t *testing.T) {
	p := &pair{one: listen(t, attacked, secret), two: listen(t, attacked, secret)}
	here, there := newProxy(t, p.one.Addr()), newProxy(t, p.two.Addr())
	p.connect(time.Second, here.Addr().String(), there.Addr().String())
	p.works(t)
	for end := time.Now().Add(20 * time.Second); min(len(p.one.Statuses()), len(p.two.Statuses())) == 0 &&
		time.Now().Before(end); {
		time.Sleep(5 * time.Millisecond)
	}
	close(here.hole)
	close(there.hole)
	for i, w := range []*link.Wire{p.a, p.b} {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		err := recv(ctx, w)
		cancel()
		if want := fmt.Sprintf("process %d at 127.0.0.1", 1-i); diag.From(err).Code != diag.LinkStalled || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// A process that connects and is silent before its first heartbeat is found as soon as one that is
// silent later; one from which no connection gets through, when the hub's patience ends.
func TestSilenceFromTheStartIsFound(t *testing.T) {
	find := func(t *testing.T, h *link.Hub, w *link.Wire, code diag.Code, process int) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		err := recv(ctx, w)
		if want := fmt.Sprintf("process %d at 127.0.0.1", process); diag.From(err).Code != code ||
			!strings.Contains(err.Error(), want) || len(h.Statuses()) > 0 {
			t.Errorf("%v, want %s of %s; statuses %v", err, code, want, h.Statuses())
		}
	}
	t.Run("connected", func(t *testing.T) {
		one, two, end := listen(t, attacked, secret), listen(t, attacked, secret), make(chan struct{})
		t.Cleanup(func() { close(end) })
		one.HeartbeatTimeout = time.Second
		one.Join(0, []link.Peer{{Process: 1, Address: two.Addr()}},
			func() link.Status { return link.Status{} })
		two.Join(1, []link.Peer{{Process: 0, Address: one.Addr()}},
			func() link.Status { <-end; return link.Status{} })
		find(t, one, one.Wire(0, 1, two.Addr()), diag.LinkStalled, 1)
	})
	t.Run("black hole", func(t *testing.T) {
		p := &pair{one: listen(t, attacked, secret), two: listen(t, attacked, secret)}
		here, there := newProxy(t, p.one.Addr()), newProxy(t, p.two.Addr())
		close(here.hole)
		close(there.hole)
		p.one.StallTimeout, p.two.StallTimeout = time.Second, time.Second
		p.connect(time.Second, here.Addr().String(), there.Addr().String())
		find(t, p.one, p.a, diag.LinkLost, 1)
		find(t, p.two, p.b, diag.LinkLost, 0)
	})
}

// Only the loopback interface is listened at and dialed without a key.
func TestWithoutAKeyOnlyLoopback(t *testing.T) {
	for _, address := range []string{":0", "0.0.0.0:0", "[::]:0"} {
		_, err := link.Listen(t.Context(), address, 1, nil, event.Discard)
		if diag.From(err).Code != diag.LinkKey {
			t.Errorf("%s: %v", address, err)
		}
	}
	h, err := link.Listen(t.Context(), "0.0.0.0:0", 1, secret, event.Discard)
	if err != nil {
		t.Fatal(err)
	}
	h.Close()
}

// A process that never comes is named by its address and ranks, and reported meanwhile.
func TestAPeerThatNeverComesIsNamed(t *testing.T) {
	h := listen(t, 1, nil)
	h.StallTimeout, h.HeartbeatTimeout = 300*time.Millisecond, 100*time.Millisecond
	h.Join(0, []link.Peer{{Process: 1, Address: "127.0.0.1:1", Ranks: "pipeline ranks 2, 3"}},
		func() link.Status { return link.Status{} })
	err := recv(t.Context(), h.Wire(1<<20, 1<<20+1, "127.0.0.1:1"))
	if diag.From(err).Code != diag.LinkLost || !strings.Contains(err.Error(), "process 1 at 127.0.0.1:1 (pipeline ranks 2, 3)") ||
		strings.Contains(err.Error(), "1048") {
		t.Errorf("%v", err)
	}
}

// A flood from one host closes its own connections, not the one that another host has just opened.
func TestAFloodClosesItsOwn(t *testing.T) {
	h := listen(t, attacked, secret)
	dial := func(from string) net.Conn {
		dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		c, err := dialer.Dial("tcp", h.Addr())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	friend := dial("127.0.0.1")
	for range 300 {
		dial("127.0.0.2")
	}
	c := tls.Client(friend, clientOf(cert(t, secret)))
	if err := c.HandshakeContext(t.Context()); err != nil {
		t.Errorf("closed for a flood from elsewhere: %v", err)
	}
}

// A connection that sends a byte now and then has the time of any other.
func TestASlowSenderHasNoMoreTime(t *testing.T) {
	slowtest.Only(t) // the ten seconds of a handshake
	t.Parallel()
	h := listen(t, attacked, secret)
	c, err := net.Dial("tcp", h.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	began := time.Now()
	_, err = c.Write([]byte{22, 3, 1, 2, 0})
	for err == nil && time.Since(began) < 30*time.Second {
		time.Sleep(100 * time.Millisecond)
		_, err = c.Write([]byte{0})
	}
	if took := time.Since(began); took > 15*time.Second {
		t.Errorf("closed after %s", took)
	}
}

// Floods of strangers, from another host and from this one, who say nothing, garbage, or what a
// process of the run said: the processes of a run meet all the same, in bounded time and memory.
func TestFloods(t *testing.T) {
	said := recorded(t)
	for _, c := range []struct {
		name, from string
		say        []byte
	}{
		{"another host, nothing", "127.0.0.2", nil},
		{"another host, garbage", "127.0.0.2", bytes.Repeat([]byte{0xff}, 4096)},
		{"another host, replayed", "127.0.0.2", said},
		{"this host, nothing", "127.0.0.1", nil},
		{"this host, replayed", "127.0.0.1", said},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := &pair{one: listen(t, attacked, secret), two: listen(t, attacked, secret)}
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			var count atomic.Int64
			ctx, stop := context.WithCancel(t.Context())
			var flood sync.WaitGroup
			for i := range 8 {
				flood.Go(func() { floods(ctx, c.from, []*link.Hub{p.one, p.two}[i%2].Addr(), c.say, &count) })
			}
			defer flood.Wait()
			defer stop()
			for end := time.Now().Add(10 * time.Second); count.Load() < 500 && time.Now().Before(end); {
				time.Sleep(time.Millisecond)
			}
			began := time.Now()
			p.connect(20*time.Second, p.one.Addr(), p.two.Addr())
			p.works(t)
			took := time.Since(began)
			runtime.GC()
			runtime.ReadMemStats(&after)
			grown := int64(after.HeapInuse) - int64(before.HeapInuse)
			t.Logf("met after %s, %d connections, %.1f MiB", took.Round(time.Millisecond), count.Load(),
				float64(grown)/(1<<20))
			if took > 15*time.Second || grown > 64<<20 {
				t.Errorf("the processes met after %s; the heap grew by %d bytes", took, grown)
			}
		})
	}
}

// floods opens connections until the context ends, a few hundred at a time, and says the same on
// each.
func floods(ctx context.Context, from, to string, say []byte, count *atomic.Int64) {
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}, Timeout: time.Second}
	var open []net.Conn
	defer func() {
		for _, c := range open {
			_ = c.Close()
		}
	}()
	for ctx.Err() == nil {
		c, err := dialer.DialContext(ctx, "tcp", to)
		if err != nil {
			time.Sleep(time.Millisecond) // no ports, for instance
			continue
		}
		_ = c.(*net.TCPConn).SetLinger(0) // else ports run out
		_ = c.SetWriteDeadline(time.Now().Add(time.Second))
		_, _ = c.Write(say)
		count.Add(1)
		if open = append(open, c); len(open) > 100 {
			_ = open[0].Close()
			open = open[1:]
		}
	}
}

// recorded is what one process of a run says to another until they have met.
func recorded(t *testing.T) []byte {
	t.Helper()
	p := &pair{one: listen(t, attacked, secret), two: listen(t, attacked, secret)}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var said bytes.Buffer
	var both sync.WaitGroup
	both.Go(func() {
		in, err := l.Accept()
		if err != nil {
			return
		}
		defer in.Close()
		out, err := net.Dial("tcp", p.one.Addr())
		if err != nil {
			return
		}
		defer out.Close()
		both.Go(func() { _, _ = io.Copy(in, out) })
		_, _ = io.Copy(io.MultiWriter(out, &said), in)
	})
	a, b := p.one.Wire(0, 1, p.two.Addr()), p.two.Wire(1, 0, l.Addr().String())
	go func() { _ = send(t.Context(), b, vector) }()
	if err := recv(t.Context(), a); err != nil {
		t.Fatal(err)
	}
	_ = p.two.Close()
	both.Wait()
	return said.Bytes()
}
