package train

import (
	"context"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/link"
)

// Three processes compare whole digests, pair by pair: none of them can make up for another, as
// terms of a sum could. Each error names the processes and the facts that differ, and no others.
func TestProcessesAgreeByDigest(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	e, err := engine.Open(ctx, "cpu", engine.Options{})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	for _, third := range []map[string]string{nil, {"engine": "another"}, {"build of Deepwell": "v2"},
		{"model": "m2", "programs": "p2"}} {
		var hubs [3]*link.Hub
		var addresses []string
		for i := range hubs {
			if hubs[i], err = link.Listen(ctx, "127.0.0.1:0", 7, nil, event.Discard); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = hubs[i].Close() }()
			addresses = append(addresses, hubs[i].Addr())
		}
		var errs [3]error
		var all sync.WaitGroup
		for self := range hubs {
			facts := map[string]string{"build of Deepwell": "v1", "engine": "cpu", "model": "m", "programs": "p"}
			if self == 2 {
				maps.Copy(facts, third)
			}
			all.Go(func() {
				errs[self] = agree(ctx, &Processes{Self: self, Addresses: addresses,
					Hub: hubs[self]}, e, facts)
			})
		}
		all.Wait()
		for self, err := range errs {
			if len(third) == 0 {
				if err != nil {
					t.Errorf("process %d: %v", self, err)
				}
				continue
			}
			if err == nil || diag.From(err).Code != diag.PeersDiffer {
				t.Errorf("%v: process %d: %v", third, self, err)
				continue
			}
			text := err.Error()
			for _, name := range []string{"engine", "build of Deepwell", "model", "programs"} {
				if _, differs := third[name]; strings.Contains(text, "another "+name) != differs {
					t.Errorf("%v: process %d: %v", third, self, err)
				}
			}
			if strings.Contains(text, "process 2 (") != (self != 2) ||
				strings.Contains(text, "process 1 (") != (self == 2) {
				t.Errorf("%v: process %d names %v", third, self, err)
			}
		}
	}
}

// Whatever the number of processes, each gets what every one has sent, in their order.
func TestProcessesExchangeAlongATree(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for n := 1; n <= 8; n++ {
		hubs, addresses := make([]*link.Hub, n), make([]string, n)
		var want [][]byte
		for i := range hubs {
			var err error
			if hubs[i], err = link.Listen(ctx, "127.0.0.1:0", 7, nil, event.Discard); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = hubs[i].Close() }()
			addresses[i] = hubs[i].Addr()
			want = append(want, []byte{byte(i), 9, byte(i * i)})
		}
		var all sync.WaitGroup
		for self := range hubs {
			all.Go(func() {
				p := &Processes{Self: self, Addresses: addresses, Hub: hubs[self]}
				got, err := exchange(ctx, p, want[self])
				if err != nil || !reflect.DeepEqual(got, want) {
					t.Errorf("process %d of %d has %v: %v", self, n, got, err)
				}
			})
		}
		all.Wait()
	}
}

// agree compares facts with the other processes.
func agree(ctx context.Context, p *Processes, e *engine.Engine, values map[string]string) error {
	x := p.connect(e)
	defer x.close()
	var facts []fact
	for _, name := range slices.Sorted(maps.Keys(values)) {
		facts = append(facts, fact{name, values[name]})
	}
	return x.agree(ctx, facts)
}

// exchange returns what every process has sent.
func exchange(ctx context.Context, p *Processes, mine []byte) ([][]byte, error) {
	x := p.connect(nil)
	defer x.close()
	return x.exchange(ctx, "test", mine)
}
