package engine_test

import (
	"bytes"
	"context"
	"errors"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/program"
)

// An array that is written in parts is the one that was placed whole; one that is not written whole
// is no array, and its memory is free.
func TestArraysAreWrittenInParts(t *testing.T) {
	e, err := engine.Open(context.Background(), "cpu", engine.Options{Devices: 2, Cache: enginetest.Cache()})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	defer e.Close()
	m := &program.Module{Name: "m", Devices: program.Devices{0, 1}}
	spec := program.Array{Name: "x", Global: dtype.Shape{Type: dtype.F32, Dims: []int64{4, 5}}}
	want := make([]byte, 80)
	for i := range want {
		want[i] = byte(i * 3)
	}
	live := e.LiveBytes()
	a, err := e.Allocate(m, spec)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		for at := 60; at >= 0; at -= 20 {
			if err := a.WriteAt(t.Context(), i, int64(at), want[at:at+20]); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := a.WriteAt(t.Context(), 2, 0, want); !errors.Is(err, diag.ArgumentCount) {
		t.Errorf("a third shard: %v", err)
	}
	if err := a.WriteAt(t.Context(), 0, 0, want); !errors.Is(err, diag.BufferMismatch) {
		t.Errorf("more than a shard has: %v", err)
	}
	if err := a.Filled(); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		got, err := a.Read(t.Context(), i)
		part := make([]byte, 33)
		if err = errors.Join(err, a.ReadAt(t.Context(), i, 7, part)); err != nil ||
			!bytes.Equal(got, want) || !bytes.Equal(part, want[7:40]) {
			t.Errorf("shard %d: %v, %v, %v", i, got, part, err)
		}
	}
	a.Free()
	half, err := e.Allocate(m, spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := half.WriteAt(t.Context(), 0, 0, want[:20]); err != nil {
		t.Error(err)
	}
	if err := half.Filled(); !errors.Is(err, diag.BufferMismatch) {
		t.Errorf("half an array: %v", err)
	}
	for i, n := range e.LiveBytes() {
		if n != live[i] {
			t.Errorf("device %d holds %d bytes more", i, n-live[i])
		}
	}
}
