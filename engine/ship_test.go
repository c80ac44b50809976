package engine

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"testing"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/program"
)

// shelf is a store in memory.
type shelf map[string][]byte

func (s shelf) TryGet(key string) ([]byte, error) {
	if v, ok := s[key]; ok {
		return v, nil
	}
	return nil, fs.ErrNotExist
}

func (s shelf) Get(key string, timeout time.Duration) ([]byte, error) {
	v, err := s.TryGet(key)
	if err != nil {
		time.Sleep(min(timeout, 100*time.Millisecond))
	}
	return v, err
}

func (s shelf) Put(key string, value []byte) error {
	s[key] = value
	return nil
}

// A program that another process sends is loaded only if it is the one that was announced, and no
// announcement makes a process allocate without bound or wait beyond its context.
func TestShippedProgramsAreChecked(t *testing.T) {
	t.Parallel()
	b := build{m: &program.Module{Name: "m", Devices: program.Devices{0, 1}}, code: []byte("text")}
	// The SHA-256 of "abc" is the first example of FIPS 180.
	sum := "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
	for _, row := range []struct {
		chunk string
		s     shipment
		ok    bool
	}{
		{"abc", shipment{Bytes: 3, Sum: sum}, true},
		{"abd", shipment{Bytes: 3, Sum: sum}, false},
		{"abc", shipment{Bytes: 2, Sum: sum}, false},
		{"abc", shipment{Bytes: shipChunk + 3, Sum: sum}, false}, // the second chunk is missing
		{"abc", shipment{Bytes: -1, Sum: sum}, false},
		{"abc", shipment{Bytes: maxShipped + 1, Sum: sum}, false},
	} {
		e := &Engine{store: shelf{fmt.Sprintf("%s/0", shipName(b)): []byte(row.chunk)}}
		got, err := e.fetch(b, row.s)
		if row.ok != (err == nil) || err != nil && !errors.Is(err, diag.LinkData) {
			t.Errorf("%q, %+v: %q, %v", row.chunk, row.s, got, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := (&Engine{store: shelf{}}).await(ctx, b); !errors.Is(err, context.Canceled) {
		t.Errorf("a wait whose context ended: %v", err)
	}
	other := b
	other.m = &program.Module{Name: "m", Devices: program.Devices{2, 3}}
	if shipName(b) == shipName(other) {
		t.Error("programs of other devices have the same name")
	}
}
