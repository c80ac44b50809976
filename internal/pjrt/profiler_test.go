package pjrt

import (
	"errors"
	"io/fs"
	"testing"
)

// The CPU plugin has no profiler and says so; the CUDA plugin's starts and stops without a GPU, and
// sees none.
func TestProfilers(t *testing.T) {
	p, _ := real(t, "cpu")
	if _, err := p.NewProfiler(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("cpu: %v", err)
	}
	p, _ = real(t, "cuda13")
	x, err := p.NewProfiler()
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := x.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := x.Stop(); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(x.Close(), x.Close()); err != nil {
		t.Error(err)
	}
}
