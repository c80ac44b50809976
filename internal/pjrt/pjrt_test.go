package pjrt

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"os"
	"strings"
	"testing"
	"time"
	"unsafe"

	"go.uber.org/goleak"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/plugin"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bundles are the engines that were verified; hashing them takes a second.
var bundles = map[string]*plugin.Bundle{}

// real loads an installed engine.
func real(t *testing.T, name string) (*Plugin, *plugin.Bundle) {
	t.Helper()
	dir, err := plugin.DefaultDir(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	b, ok := bundles[name]
	if !ok {
		if b, err = plugin.Open(t.Context(), dir, name); err != nil {
			t.Fatalf("the tests need the engine (deepwell engine install %s): %v", name, err)
		}
		bundles[name] = b
	}
	p, err := Load(b.Plugin, b.Preload...)
	if err != nil {
		t.Fatal(err)
	}
	return p, b
}

func newCPU(t *testing.T, devices int) *Client {
	t.Helper()
	p, _ := real(t, "cpu")
	c, err := p.NewClient([]Option{{"cpu_device_count", devices}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

const twice = `module @twice {
func.func @main(%x: tensor<2xf32>) -> (tensor<2xf32>, tensor<i32>) {
  %r = stablehlo.add %x, %x : tensor<2xf32>
  %c = stablehlo.constant dense<7> : tensor<i32>
  return %r, %c : tensor<2xf32>, tensor<i32>
}}`

func TestBothPluginsDescribeThemselves(t *testing.T) {
	for name, minor := range map[string]int{"cpu": 81, "cuda13": 116} {
		p, _ := real(t, name)
		if _, got := p.Version(); got != minor {
			t.Errorf("%s speaks 0.%d, want 0.%d", name, got, minor)
		}
		if p.extensions[extensionFFI] == nil {
			t.Errorf("%s has no FFI extension: %v", name, p.extensions)
		}
		again, err := Load(p.path)
		if err != nil || again != p {
			t.Errorf("%s was loaded twice: %v", name, err)
		}
	}
}

// Without a GPU the CUDA plugin has no client, of one process or of two; it must say so.
func TestCUDAClientWithoutGPU(t *testing.T) {
	p, b := real(t, "cuda13")
	if b.Driver {
		t.Skip("this host has a driver")
	}
	for _, options := range [][]Option{nil, {{"node_id", 0}, {"num_nodes", 2}}, {{"no_such_option", true}}} {
		kv := &memoryKV{values: map[string][]byte{}}
		if c, err := p.NewClient(options, kv); err == nil {
			c.Close()
			t.Errorf("options %v gave a client", options)
		}
	}
}

func TestCompileRunSerializeLoad(t *testing.T) {
	c := newCPU(t, 2)
	o := CompileOptions{Devices: []int{1}}
	x, err := c.Compile([]byte(twice), o)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Free()
	sig := x.Signature()
	if len(sig.Params) != 1 || len(sig.Results) != 2 || sig.Results[1].String() != "s32[]" || sig.Donates[0] || !sig.Alone {
		t.Errorf("signature %+v", sig)
	}
	m, err := x.Memory()
	if err != nil || m.Argument != 8 || m.Output < 8 {
		t.Errorf("memory %+v, %v", m, err)
	}
	code, err := x.Serialize()
	if err != nil {
		t.Fatal(err)
	}
	y, err := c.Load(code, o, sig)
	if err != nil {
		t.Fatal(err)
	}
	defer y.Free()
	for _, e := range []*Loaded{x, y} {
		d := e.Devices()[0]
		if d.ID != 1 {
			t.Errorf("it runs on device %d", d.ID)
		}
		in, err := c.FromHost([]byte{0, 0, 128, 63, 0, 0, 0, 64}, sig.Params[0], d, "", HostCopied) // 1, 2
		if err != nil {
			t.Fatal(err)
		}
		run, err := e.Execute(t.Context(), [][]*Buffer{{in}})
		if err != nil {
			t.Fatal(err)
		}
		if err := run.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 8)
		if err := run.Outputs[0][0].ToHost(t.Context(), got); err != nil {
			t.Fatal(err)
		}
		if want := []byte{0, 0, 0, 64, 0, 0, 128, 64}; !bytes.Equal(got, want) {
			t.Errorf("twice (1, 2) is %v", got)
		}
		run.Free()
		in.Free()
	}
	if _, err := c.Load([]byte("garbage"), o, sig); err == nil {
		t.Error("garbage was loaded")
	}
}

// Ready reports whether the event has happened.
func (e *Event) Ready() (ready bool, err error) {
	err = e.use(func(ptr unsafe.Pointer) error {
		v, err := e.plugin.readNumber(eventIsReady, ptr)
		ready = v != 0
		return err
	})
	return ready, err
}

func TestEvents(t *testing.T) {
	c := newCPU(t, 1)
	b, err := c.FromHost(make([]byte, 8), dtype.Shape{Type: dtype.F32, Dims: []int64{2}}, c.Local()[0], "", HostCopied)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Free()
	if err := b.Await(context.Background()); err != nil {
		t.Error(err)
	}
	r := related{object: b.ptr}
	if err := call(c.plugin, bufferReadyEvent, &r); err != nil {
		t.Fatal(err)
	}
	e := c.plugin.newEvent(r.result)
	done := make(chan error, 1)
	if err := e.OnReady(func(err error) { done <- err }); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the callback never came")
	}
	if ready, err := e.Ready(); err != nil || !ready {
		t.Errorf("ready %v, %v", ready, err)
	}
	e.Free()
	e.Free()
	if _, err := e.Ready(); !errors.Is(err, diag.BufferGone) {
		t.Errorf("a freed event: %v", err)
	}
	if err := e.Await(context.Background()); !errors.Is(err, diag.BufferGone) {
		t.Errorf("a freed event: %v", err)
	}
}

// XLA:CPU keeps no account of its memory, and says so.
func TestMemoryStatsThatAreNotKept(t *testing.T) {
	d := newCPU(t, 1).Local()[0]
	if _, err := d.MemoryStats(); !errors.Is(err, diag.NotSupported) {
		t.Errorf("stats: %v", err)
	}
}

func TestTopologyIsFreedOnce(t *testing.T) {
	p, b := real(t, "cuda13")
	cluster, err := machine.ParseCluster("16xb200")
	if err != nil {
		t.Fatal(err)
	}
	target := cluster
	topology, err := p.NewTopology([]Option{{"target_config", target.ConfigText(b.CuDNN)}, {"topology", target.Topology()}})
	if err != nil {
		t.Fatal(err)
	}
	topology.Free()
	topology.Free()
	_, err = topology.Compile([]byte(twice), CompileOptions{Devices: []int{0}})
	if !errors.Is(err, diag.BufferGone) {
		t.Errorf("a freed topology: %v", err)
	}
	if _, err := p.NewTopology([]Option{{"target_config", "nonsense {"}, {"topology", "1x1x8"}}); err == nil {
		t.Error("a target that is no text proto was taken")
	}
	cpu, _ := real(t, "cpu")
	if _, err := cpu.NewTopology(nil); !errors.Is(err, diag.NotSupported) {
		t.Errorf("the CPU plugin describes no topology: %v", err)
	}
}

// The bytes of the options equal xla.CompileOptionsProto, worked out by hand from its field
// numbers.
func TestCompileOptionsEncoding(t *testing.T) {
	o := CompileOptions{Devices: []int{0, 300}, DeviceMemory: 1 << 30,
		Flags: map[string]any{"b": true, "a": "x", "i": -1, "f": 0.5, "n": false, "l": int64(7)}}
	got, err := o.Encode()
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Join([]string{
		// executable_build_options { device_ordinal: -1 num_replicas: 2 num_partitions: 1
		"1a22", "08ffffffffffffffffff01", "2002", "2801",
		// device_assignment { replica_count: 2 computation_count: 1 computation_devices {
		// replica_device_ids: [0, 300] } } device_memory_size: 2^30 }
		"4a0b", "0802", "1001", "1a050a0300ac02", "788080808004",
		// env_option_overrides, sorted by key
		"3a080a0161", "12030a0178",
		"3a070a0162", "12021001",
		"3a0e0a0166", "120921000000000000e03f",
		"3a100a0169", "120b18ffffffffffffffffff01",
		"3a070a016c", "12021807",
		"3a070a016e", "12021000",
	}, "")
	if h := hex.EncodeToString(got); h != want {
		t.Errorf("encoded as\n%s, want\n%s", h, want)
	}
	if _, err := (CompileOptions{}).Encode(); err == nil {
		t.Error("a program for no device was taken")
	}
}

// A buffer that a run is being started with cannot be consumed by another: some devices of the
// first would find it, the others would wait for them in a collective until XLA ends the process.
func TestLentBufferCannotBeDonated(t *testing.T) {
	c := newCPU(t, 1)
	shape := dtype.Shape{Type: dtype.F32, Dims: []int64{2}}
	b, err := c.FromHost(make([]byte, 8), shape, c.Local()[0], "", HostCopied)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.lend(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.donate(); !errors.Is(err, diag.BufferGone) {
		t.Errorf("it was donated while it was lent: %v", err)
	}
	b.giveBack()
	// Free during a donation that comes to nothing is not lost.
	if _, err := b.donate(); err != nil {
		t.Fatal(err)
	}
	b.Free()
	b.restore()
	b.giveBack()
	if b.Live() || b.ptr != nil || c.Local()[0].LiveBytes() != 0 {
		t.Errorf("live %v, %d bytes", b.Live(), c.Local()[0].LiveBytes())
	}
}

// What a client owns in C outlives Close until the last object of it is freed.
func TestCloseBeforeFree(t *testing.T) {
	p, _ := real(t, "cpu")
	for range 20 {
		c, err := p.NewClient([]Option{{"cpu_device_count", 2}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		x, err := c.Compile([]byte(twice), CompileOptions{Devices: []int{0}})
		if err != nil {
			t.Fatal(err)
		}
		in, err := c.FromHost(make([]byte, 8), x.Signature().Params[0], c.Local()[0], "", HostCopied)
		if err != nil {
			t.Fatal(err)
		}
		run, err := x.Execute(t.Context(), [][]*Buffer{{in}})
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
		if c.ptr == nil {
			t.Fatal("the client is gone while a run goes on")
		}
		run.Free()
		in.Free()
		x.Free()
		if err := run.Wait(context.Background()); err != nil {
			t.Fatal(err)
		}
		for range 1000 {
			c.lifeMu.Lock()
			gone := c.ptr == nil
			c.lifeMu.Unlock()
			if gone {
				break
			}
			time.Sleep(time.Millisecond)
		}
		if c.live != 0 || c.ptr != nil {
			t.Fatalf("%d objects are left", c.live)
		}
	}
}

// The last to leave a closed client may be a callback on the client's own thread. To destroy the
// client there waited for that thread, for ever.
func TestLastToLeaveIsACallback(t *testing.T) {
	p, _ := real(t, "cpu")
	const slow = `module @slow {
func.func @main(%x: tensor<300x300xf32>) -> tensor<300x300xf32> {
  %a = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0] : (tensor<300x300xf32>, tensor<300x300xf32>) -> tensor<300x300xf32>
  %b = stablehlo.dot_general %a, %x, contracting_dims = [1] x [0] : (tensor<300x300xf32>, tensor<300x300xf32>) -> tensor<300x300xf32>
  return %b : tensor<300x300xf32>
}}`
	for range 20 {
		c, err := p.NewClient([]Option{{"cpu_device_count", 2}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		x, err := c.Compile([]byte(slow), CompileOptions{Devices: []int{0}})
		if err != nil {
			t.Fatal(err)
		}
		in, err := c.FromHost(make([]byte, 4*300*300), x.Signature().Params[0], c.Local()[0], "", HostCopied)
		if err != nil {
			t.Fatal(err)
		}
		run, err := x.Execute(t.Context(), [][]*Buffer{{in}})
		if err != nil {
			t.Fatal(err)
		}
		run.Free() // nobody waits: the plugin says when it is done
		in.Free()
		x.Free()
		c.Close()
		<-run.done
	}
}

// A buffer is read in parts, and where the plugin lets it, written in parts.
func TestRawParts(t *testing.T) {
	c := newCPU(t, 1)
	want := make([]byte, 4*6*10)
	for i := range want {
		want[i] = byte(i * 7)
	}
	shape := dtype.Shape{Type: dtype.F32, Dims: []int64{6, 10}}
	b, err := c.FromHost(want, shape, c.Local()[0], "", HostCopied)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Free()
	for _, part := range [][2]int{{0, 240}, {40, 80}, {236, 240}, {13, 14}, {240, 240}} {
		got := make([]byte, part[1]-part[0])
		if err := b.RawToHost(t.Context(), int64(part[0]), got); err != nil || !bytes.Equal(got, want[part[0]:part[1]]) {
			t.Errorf("bytes %v: %v, %v", part, got, err)
		}
	}
	for _, bad := range [][2]int64{{-1, 1}, {240, 1}, {0, 241}} {
		if err := b.RawToHost(t.Context(), bad[0], make([]byte, bad[1])); !errors.Is(err, diag.BufferMismatch) {
			t.Errorf("%d bytes at %d: %v", bad[1], bad[0], err)
		}
	}
	f, err := c.NewFilling(shape, c.Local()[0], "")
	if err != nil {
		t.Fatal(err)
	}
	for at := 200; at >= 0; at -= 40 {
		if err := f.Write(t.Context(), int64(at), want[at:at+40]); err != nil {
			t.Fatal(err)
		}
	}
	filled, err := f.Buffer()
	if err != nil {
		t.Fatal(err)
	}
	defer filled.Free()
	got := make([]byte, len(want))
	if err := filled.ToHost(t.Context(), got); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
}
