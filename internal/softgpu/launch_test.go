package softgpu_test

import (
	"sync"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/softgpu"
)

// Several goroutines run programs with collectives on the same GPUs at the same time. If two runs
// reached two GPUs in different orders, each GPU would wait for the other, and XLA would end the
// process after 40 s.
func TestRunsReachAllGPUsInOneOrder(t *testing.T) {
	if !softgpu.Child(t, softgpu.Options{GPUs: 8, Memory: 64 << 20, Delay: 5}) {
		return
	}
	e := open(t, engine.Options{})
	m := collectiveModule(dtype.F32, "f32")
	x, err := e.Compile(t.Context(), m)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Free()
	arg, err := e.Place(m, m.Args[0], engine.Copied,
		func(int) ([]byte, error) { return make([]byte, rows*cols*4), nil })
	if err != nil {
		t.Fatal(err)
	}
	defer arg.Free()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 12 {
				r, err := x.Run(t.Context(), arg)
				if err == nil {
					err = r.Wait(t.Context())
					r.Free()
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}
