package pjrt

import (
	"encoding/binary"
	"errors"
	"math"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
)

var pair = dtype.Shape{Type: dtype.F32, Dims: []int64{2}}

// A view is memory of somebody else: what is written there later is seen, and its owner hears once
// when the engine is done with it.
func TestViewIsTheMemoryItself(t *testing.T) {
	c := newCPU(t, 1)
	d := c.Local()[0]
	data := Aligned(8)
	pin := new(runtime.Pinner)
	pin.Pin(unsafe.SliceData(data))
	defer pin.Unpin()
	at := uintptr(bytesPointer(data))
	done := make(chan struct{}, 2)
	b, err := c.View(at, pair, d, func() { done <- struct{}{} })
	if err != nil {
		t.Fatal(err)
	}
	if have, err := b.Address(); err != nil || have != at {
		t.Errorf("the view is at %#x, %v; its memory at %#x", have, err, at)
	}
	x, err := c.Compile([]byte(twice), CompileOptions{Devices: []int{0}})
	if err != nil {
		t.Fatal(err)
	}
	defer x.Free()
	for _, value := range []float32{3, -5} {
		binary.LittleEndian.PutUint32(data[4:], math.Float32bits(value))
		run, err := x.Execute(t.Context(), [][]*Buffer{{b}})
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
		if have := math.Float32frombits(binary.LittleEndian.Uint32(got[4:])); have != 2*value {
			t.Errorf("twice %v is %v", value, have)
		}
		run.Free()
	}
	select {
	case <-done:
		t.Error("the memory was given back while the view lives")
	default:
	}
	b.Free()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Error("the memory was never given back")
	}
	if _, err := b.Address(); !errors.Is(err, diag.BufferGone) {
		t.Errorf("the address of a freed view: %v", err)
	}
}

// A view may be donated. XLA:CPU writes the result elsewhere (XLA on GPUs writes it there, which a
// test of package call shows), and the memory is its owner's when the result is freed.
func TestDonatedView(t *testing.T) {
	c := newCPU(t, 1)
	d := c.Local()[0]
	data := Aligned(8)
	pin := new(runtime.Pinner)
	pin.Pin(unsafe.SliceData(data))
	defer pin.Unpin()
	binary.LittleEndian.PutUint32(data, math.Float32bits(1.5))
	at, done := uintptr(bytesPointer(data)), make(chan struct{}, 2)
	b, err := c.View(at, pair, d, func() { done <- struct{}{} })
	if err != nil {
		t.Fatal(err)
	}
	x, err := c.Compile([]byte(`module @double {
func.func @main(%x: tensor<2xf32> {tf.aliasing_output = 0 : i32}) -> tensor<2xf32> {
  %r = stablehlo.add %x, %x : tensor<2xf32>
  return %r : tensor<2xf32>
}}`), CompileOptions{Devices: []int{0}})
	if err != nil {
		t.Fatal(err)
	}
	defer x.Free()
	run, err := x.Execute(t.Context(), [][]*Buffer{{b}})
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
	if have := math.Float32frombits(binary.LittleEndian.Uint32(got)); have != 3 || b.Live() {
		t.Errorf("twice 1.5 is %v; the view is live: %v", have, b.Live())
	}
	run.Free()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Error("the memory was never given back")
	}
	if len(done) > 0 {
		t.Error("the memory was given back twice")
	}
}

// What cannot be a view is an error, and so is a plugin that has none; the memory is its owner's.
func TestViewsThatCannotBe(t *testing.T) {
	c := newCPU(t, 1)
	other := newCPU(t, 1).Local()[0]
	data := Aligned(8)
	at, d := uintptr(bytesPointer(data)), c.Local()[0]
	for name, v := range map[string]struct {
		at    uintptr
		shape dtype.Shape
		d     *Device
		code  diag.Code
	}{
		"no address":    {0, pair, d, diag.BufferMismatch},
		"no bytes":      {at, dtype.Shape{Type: dtype.F32, Dims: []int64{0}}, d, diag.BufferMismatch},
		"half bytes":    {at, dtype.Shape{Type: dtype.S4, Dims: []int64{2}}, d, diag.BufferMismatch},
		"no type":       {at, dtype.Shape{Dims: []int64{2}}, d, diag.BufferMismatch},
		"no device":     {at, pair, nil, diag.DeviceMismatch},
		"other clients": {at, pair, other, diag.DeviceMismatch},
	} {
		done := 0
		_, err := c.View(v.at, v.shape, v.d, func() { done++ })
		if !errors.Is(err, v.code) || done != 1 {
			t.Errorf("%s: %v, and the memory was given back %d times", name, err, done)
		}
	}
	p, err := Load(fake(t))
	if err != nil {
		t.Fatal(err)
	}
	lost, err := p.NewClient(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer lost.Close()
	done := 0
	fakes := &Device{client: lost, memory: &Memory{}}
	if _, err := lost.View(at, pair, fakes, func() { done++ }); err == nil || done != 1 {
		t.Errorf("a plugin without views: %v, and the memory was given back %d times", err, done)
	}
	runtime.KeepAlive(data)
}

// Memory of a GPU is opened by a whole handle, and by a driver; what goes well is in package call,
// on the software GPU.
func TestSharedMemoryNeedsADriver(t *testing.T) {
	d := newCPU(t, 1).Local()[0]
	if _, err := OpenShared(d, make([]byte, HandleBytes-1)); !errors.Is(err, diag.BadInput) {
		t.Errorf("a handle of 63 bytes: %v", err)
	}
	if _, err := loadDriver(); err == nil {
		t.Skip("this host has a driver")
	}
	if _, err := OpenShared(d, make([]byte, HandleBytes)); !errors.Is(err, diag.EngineLoad) {
		t.Errorf("without a driver: %v", err)
	}
}
