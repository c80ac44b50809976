package engine_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/link"
	"github.com/deepwell/deepwell/program"
)

// A bed is two stages of two devices each, of one engine, with a link between them.
type bed struct {
	engine      *engine.Engine
	left, right *program.Module
	a, b        engine.Link
}

func stagesOf(n int) (left, right *program.Module) {
	return &program.Module{Name: "left", Devices: program.Range(0, n), Text: "-"},
		&program.Module{Name: "right", Devices: program.Range(4, n), Text: "-"}
}

func (b *bed) place(t testing.TB, m *program.Module, spec program.Array) *engine.Array {
	t.Helper()
	local, err := m.Local(spec)
	if err != nil {
		t.Fatal(err)
	}
	return place(t, b.engine, m, spec, func(i int) []byte { return content(local.Bytes(), i) })
}

func content(n int64, shard int) []byte {
	data := engine.Aligned(int(n))
	for i := range data {
		data[i] = byte(7*i + 31*shard + 1)
	}
	return data
}

// links makes each kind of link between two stages of n devices.
var links = map[string]func(t testing.TB, e *engine.Engine, n int) *bed{
	"pipe": func(t testing.TB, e *engine.Engine, n int) *bed {
		left, right := stagesOf(n)
		a, b, err := e.Pipe(left.Devices, right.Devices, 2)
		if err != nil {
			t.Fatal(err)
		}
		return &bed{e, left, right, a, b}
	},
	"permute": func(t testing.TB, e *engine.Engine, n int) *bed {
		left, right := stagesOf(n)
		a, b, err := e.Permute(left.Devices, right.Devices)
		if err != nil {
			t.Fatal(err)
		}
		return &bed{e, left, right, a, b}
	},
	"tcp": func(t testing.TB, e *engine.Engine, n int) *bed {
		left, right := stagesOf(n)
		one, two := listen(t, nil), listen(t, nil)
		return &bed{e, left, right, e.Wired(one.Wire(0, 1, two.Addr())),
			e.Wired(two.Wire(1, 0, one.Addr()))}
	},
	"tls": func(t testing.TB, e *engine.Engine, n int) *bed {
		left, right := stagesOf(n)
		one, two := listen(t, secret), listen(t, secret)
		return &bed{e, left, right, e.Wired(one.Wire(0, 1, two.Addr())),
			e.Wired(two.Wire(1, 0, one.Addr()))}
	},
}

func listen(t testing.TB, secret []byte) *link.Hub {
	t.Helper()
	h, err := link.Listen(context.Background(), "127.0.0.1:0", 1, secret, event.Discard)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Close() })
	return h
}

var secret = []byte("0123456789abcdef0123456789abcdef")

func eachLink(t *testing.T, n int, test func(t *testing.T, b *bed)) {
	e := cpu(t)
	for name, open := range links {
		t.Run(name, func(t *testing.T) {
			b := open(t, e, n)
			defer b.a.Close()
			defer b.b.Close()
			test(t, b)
		})
	}
	// Memory that a run still reads is live until the run's callback comes, on a thread of its own.
	live := e.LiveBytes()
	for end := time.Now().Add(5 * time.Second); slices.Max(live) > 0 && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
		live = e.LiveBytes()
	}
	if slices.Max(live) > 0 {
		t.Errorf("%v bytes are live after everything was freed", live)
	}
}

var vector = program.Array{Name: "x", Global: f32(1000)}

// hand sends an array from left to right, or back, and returns what arrives.
func (b *bed) hand(ctx context.Context, t testing.TB, spec program.Array, back bool) (*engine.Array, error) {
	t.Helper()
	from, at, m, into := b.a, b.b, b.left, b.right
	if back {
		from, at, m, into = at, from, into, m
	}
	a := b.place(t, m, spec)
	defer a.Free()
	var sent error
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { sent = from.Send(ctx, "tag", a) })
	got, err := at.Recv(ctx, "tag", into, spec)
	wg.Wait()
	return got, errors.Join(err, sent)
}

func TestLinksHandOverEveryElementType(t *testing.T) {
	eachLink(t, 2, func(t *testing.T, b *bed) {
		for _, d := range dtype.All() {
			if b.a.Rendezvous() && (d.Bits() < 8 || d.Bits() > 64 || testing.Short() && d.Bits() < 16) {
				continue
			}
			for _, dims := range [][]int64{{}, {3, 5}, {0, 4}} {
				spec := program.Array{Name: "x", Global: dtype.Shape{Type: d, Dims: dims}}
				got, err := b.hand(t.Context(), t, spec, d.Bits() == 16)
				if err != nil {
					t.Fatalf("%s: %v", spec.Global, err)
				}
				for i := range 2 {
					data, err := got.Read(t.Context(), i)
					want := content(spec.Global.Bytes(), i)
					if d == dtype.Pred || d.Bits() < 8 {
						continue // engines make 0 or 1 of a pred, and drop the other half of a last byte
					}
					if err != nil || !bytes.Equal(data, want) {
						t.Errorf("%s, shard %d: %x, want %x (%v)", spec.Global, i, data, want, err)
					}
				}
				got.Free()
			}
		}
	})
}

// Arrays come in order, both ways at once, with no more under way than fit.
func TestLinksKeepOrder(t *testing.T) {
	eachLink(t, 1, func(t *testing.T, b *bed) {
		const rounds = 30
		way := func(from, to engine.Link, m, into *program.Module) {
			var wg sync.WaitGroup
			wg.Go(func() {
				for i := range rounds {
					a := place(t, b.engine, m, vector, func(int) []byte { return slices.Repeat([]byte{byte(i)}, 4000) })
					if err := from.Send(t.Context(), fmt.Sprint(i), a); err != nil {
						t.Error(err)
					}
					a.Free()
				}
			})
			for i := range rounds {
				a, err := to.Recv(t.Context(), fmt.Sprint(i), into, vector)
				if err != nil {
					t.Error(err)
					return
				}
				if data, err := a.Read(t.Context(), 0); err != nil || data[3999] != byte(i) {
					t.Errorf("round %d got %d (%v)", i, data[3999], err)
				}
				a.Free()
			}
			wg.Wait()
		}
		var wg sync.WaitGroup
		wg.Go(func() { way(b.a, b.b, b.left, b.right) })
		way(b.b, b.a, b.right, b.left)
		wg.Wait()
	})
}

func TestLinksRefuseWhatIsNotExpected(t *testing.T) {
	for name, c := range map[string]struct {
		tag  string
		spec program.Array
		want diag.Code
	}{
		"tag":   {"0 F1.4/0", vector, diag.LinkTag},
		"shape": {"0 F1.3/0", program.Array{Name: "x", Global: f32(999)}, diag.LinkShape},
		"type":  {"0 F1.3/0", program.Array{Name: "x", Global: dtype.Shape{Type: dtype.S32, Dims: []int64{1000}}}, diag.LinkShape},
	} {
		t.Run(name, func(t *testing.T) {
			eachLink(t, 2, func(t *testing.T, b *bed) {
				a := b.place(t, b.left, c.spec)
				defer a.Free()
				var wg sync.WaitGroup
				wg.Go(func() { _ = b.a.Send(t.Context(), c.tag, a) })
				_, err := b.b.Recv(t.Context(), "0 F1.3/0", b.right, vector)
				wg.Wait()
				if !errors.Is(err, c.want) {
					t.Errorf("%v, want %s", err, c.want)
				}
			})
		})
	}
}

// Who waits when a link is closed, or when a context ends, gets an error.
func TestLinksEnd(t *testing.T) {
	eachLink(t, 1, func(t *testing.T, b *bed) {
		soon, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		if _, err := b.b.Recv(soon, "x", b.right, vector); !errors.Is(err, diag.Canceled) {
			t.Errorf("after the deadline: %v", err)
		}
	})
	eachLink(t, 1, func(t *testing.T, b *bed) {
		var wg sync.WaitGroup
		there, back := b.place(t, b.left, vector), b.place(t, b.right, vector)
		defer there.Free()
		defer back.Free()
		wg.Go(func() { // once both directions are connected
			err := b.a.Send(t.Context(), "there", there)
			if err == nil {
				var got *engine.Array
				if got, err = b.a.Recv(t.Context(), "back", b.left, vector); err == nil {
					got.Free()
				}
			}
			if err != nil {
				t.Error(err)
			}
			time.Sleep(20 * time.Millisecond)
			b.a.Close()
		})
		got, err := b.b.Recv(t.Context(), "there", b.right, vector)
		if err != nil {
			t.Fatal(err)
		}
		got.Free()
		if err := b.b.Send(t.Context(), "back", back); err != nil {
			t.Fatal(err)
		}
		if _, err := b.b.Recv(t.Context(), "x", b.right, vector); !errors.Is(err, diag.LinkLost) {
			t.Errorf("after the other end has closed: %v", err)
		}
		wg.Wait()
		a := b.place(t, b.left, vector)
		defer a.Free()
		if err := b.a.Send(t.Context(), "x", a); !errors.Is(err, diag.LinkLost) {
			t.Errorf("sending at an end that was closed: %v", err)
		}
	})
}

// What was sent before the end is still received.
func TestClosedLinksDeliver(t *testing.T) {
	eachLink(t, 1, func(t *testing.T, b *bed) {
		if b.a.Rendezvous() {
			t.Skip("nothing is under way where both ends meet")
		}
		a := b.place(t, b.left, vector)
		defer a.Free()
		if err := b.a.Send(t.Context(), "x", a); err != nil {
			t.Fatal(err)
		}
		b.a.Close()
		got, err := b.b.Recv(t.Context(), "x", b.right, vector)
		if err != nil {
			t.Fatal(err)
		}
		got.Free()
	})
}

// A full pipe makes the sender wait, and holds no more than it may.
func TestPipePushesBack(t *testing.T) {
	e := cpu(t)
	left, right := stagesOf(1)
	a, b, err := e.Pipe(left.Devices, right.Devices, 2)
	if err != nil {
		t.Fatal(err)
	}
	x := place(t, e, left, vector, func(int) []byte { return make([]byte, 4000) })
	defer x.Free()
	for range 2 {
		if err := a.Send(t.Context(), "x", x); err != nil {
			t.Fatal(err)
		}
	}
	soon, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := a.Send(soon, "x", x); !errors.Is(err, diag.Canceled) {
		t.Errorf("a third array went into a pipe for two: %v", err)
	}
	if held := e.LiveBytes()[4]; held != 8000 {
		t.Errorf("the receiver's device holds %d bytes, want 8000", held)
	}
	got, err := b.Recv(t.Context(), "x", right, vector)
	if err != nil {
		t.Fatal(err)
	}
	got.Free()
	if err := a.Send(t.Context(), "x", x); err != nil {
		t.Errorf("after there was room: %v", err)
	}
	a.Close()
	b.Close()
	if held := e.LiveBytes()[4]; held != 0 {
		t.Errorf("%d bytes are live after both ends were closed", held)
	}
}

// On Blackwell a permutation is asynchronous, a start and a done, where the program has something
// to compute in between; alone it is one synchronous instruction. Both are compiled here, not run.
func TestPermuteCompilesForBlackwell(t *testing.T) {
	if testing.Short() {
		t.Skip("loads the compiler")
	}
	c := enginetest.GPUCompiler(t, true)
	shard := dtype.Shape{Type: dtype.BF16, Dims: []int64{1, 8192, 16384}}
	alone, err := engine.PermuteModule(shard, program.Range(0, 32), program.Range(32, 32))
	if err != nil {
		t.Fatal(err)
	}
	beside := &program.FromText("beside", besideWork(alone.Text), 64).Modules[0]
	for _, m := range []*program.Module{alone, beside} {
		r := enginetest.Report(t, c, m, "64xb200")
		if len(r.Collectives) != 1 {
			t.Fatalf("collectives %v", r.Collectives)
		}
		got := r.Collectives[0]
		if got.Kind != hlo.CollectivePermute || got.Bytes() != shard.Bytes() || got.Type != dtype.U16 {
			t.Errorf("%s has %+v", m.Name, got)
		}
		if want := m == beside; got.Async != want || strings.Contains(got.Name, "-start") != want {
			t.Errorf("%s: asynchronous %v, want %v: %s", m.Name, got.Async, want, got.Name)
		}
		t.Logf("%s: %s of %s in %.2f s", m.Name, got.Name, event.Size(got.Bytes()), r.Seconds)
	}
}

// besideWork adds a product that does not need what is received.
func besideWork(text string) string {
	const matrix = "tensor<8192x8192xbf16>"
	text = strings.Replace(text, "@main(", "@main(%w: "+matrix+", ", 1)
	text = strings.Replace(text, "-> tensor<1x8192x16384xbf16> {", "-> (tensor<1x8192x16384xbf16>, "+matrix+") {", 1)
	return strings.Replace(text, "    return %r : tensor<1x8192x16384xbf16>",
		"    %p = stablehlo.dot_general %w, %w, contracting_dims = [1] x [0] : ("+matrix+", "+matrix+") -> "+matrix+"\n"+
			"    return %r, %p : tensor<1x8192x16384xbf16>, "+matrix, 1)
}

func benchmarkLink(b *testing.B, kind string, size int64) {
	e := cpu(b)
	bed := links[kind](b, e, 1)
	spec := program.Array{Name: "x", Global: f32(size / 4)}
	a := bed.place(b, bed.left, spec)
	defer a.Free()
	b.SetBytes(size)
	b.ResetTimer()
	var wg sync.WaitGroup
	wg.Go(func() {
		for range b.N {
			if err := bed.a.Send(context.Background(), "x", a); err != nil {
				b.Error(err)
			}
		}
	})
	for range b.N {
		got, err := bed.b.Recv(context.Background(), "x", bed.right, spec)
		if err != nil {
			b.Fatal(err)
		}
		got.Free()
	}
	wg.Wait()
}

// Speed of a link between two processes' worth of sockets, against plain io.Copy over loopback.
func BenchmarkTCP(b *testing.B) {
	const size = 64 << 20
	for _, kind := range []string{"tcp", "tls"} {
		b.Run(kind, func(b *testing.B) { benchmarkLink(b, kind, size) })
	}
	b.Run("copy", func(b *testing.B) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			b.Fatal(err)
		}
		defer l.Close()
		out, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			b.Fatal(err)
		}
		in, err := l.Accept()
		if err != nil {
			b.Fatal(err)
		}
		b.SetBytes(size)
		b.ResetTimer()
		go func() {
			data := make([]byte, size)
			for range b.N {
				io.Copy(out, struct{ io.Reader }{bytes.NewReader(data)})
			}
			out.Close()
		}()
		if n, err := io.Copy(io.Discard, struct{ io.Reader }{in}); err != nil || n != int64(b.N)*size {
			b.Fatal(n, err)
		}
		in.Close()
	})
}
