package preflight

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/plan"
)

func sound() machine.GPU {
	return machine.GPU{Name: "NVIDIA B200", MemoryBytes: 180e9, FreeBytes: 179e9, ECC: "on", MIG: "off",
		ClockMHz: 1965, ClockNowMHz: 1900, Links: []machine.Link{{Count: 18, To: "switch"}}}
}

// What the driver tells is a problem with the number of its GPU, and a sound GPU has none.
func TestInspect(t *testing.T) {
	for _, row := range []struct {
		name, says string
		change     func(*machine.GPU)
	}{
		{"sound", "", func(*machine.GPU) {}},
		{"ecc off", "ECC is off", func(g *machine.GPU) { g.ECC = "off" }},
		{"ecc errors", "3 uncorrectable ECC errors", func(g *machine.GPU) { g.ECCUncorrected = 3 }},
		{"rows", "rows of its memory wait", func(g *machine.GPU) { g.Remap = "pending" }},
		{"no rows", "no spare rows", func(g *machine.GPU) { g.Remap = "failed" }},
		{"used", "another process uses it", func(g *machine.GPU) { g.FreeBytes = 90e9 }},
		{"mig", "split by MIG", func(g *machine.GPU) { g.MIG = "on" }},
		{"throttled", "held back: power brake", func(g *machine.GPU) { g.Throttled = []string{"power brake"} }},
		{"link down", "2 of its NVLinks are down", func(g *machine.GPU) {
			g.Links = []machine.Link{{Count: 16, To: "switch"}, {Count: 2, To: "down"}}
		}},
		{"fewer links", "it has 17 NVLinks, and others 18", func(g *machine.GPU) {
			g.Links = []machine.Link{{Count: 17, To: "switch"}}
		}},
		{"another GPU", "it is NVIDIA H100", func(g *machine.GPU) { g.Name = "NVIDIA H100" }},
	} {
		g := sound()
		row.change(&g)
		r := &Result{}
		Inspect(r, Options{Process: 4, Machine: &machine.Machine{Driver: "595.40.00",
			GPUs: []machine.GPU{sound(), g}}})
		switch {
		case row.says == "" && len(r.Problems) > 0:
			t.Errorf("%s: %+v", row.name, r.Problems)
		case row.says == "":
		case len(r.Problems) != 1 || r.Problems[0].GPU != 1 || r.Problems[0].Process != 4 ||
			!strings.Contains(r.Problems[0].Text, row.says) || r.Problems[0].Fix == "":
			t.Errorf("%s: %+v", row.name, r.Problems)
		}
	}
}

// A store in memory, as the processes of a test share it.
type store struct {
	mu   sync.Mutex
	kept map[string][]byte
}

func (s *store) Put(key string, value []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kept[key] = value
	return nil
}

func (s *store) TryGet(key string) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if v, ok := s.kept[key]; ok {
		return v, nil
	}
	return nil, errors.New("not there")
}

func (s *store) Get(key string, timeout time.Duration) ([]byte, error) {
	for end := time.Now().Add(timeout); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if v, err := s.TryGet(key); err == nil {
			return v, nil
		}
	}
	return nil, errors.New("the time is up")
}

// Processes tell each other what they found, and each names the slow GPU of another.
func TestExchange(t *testing.T) {
	s := &store{kept: map[string][]byte{}}
	var wg sync.WaitGroup
	results := make([]*Result, 3)
	for n := range results {
		wg.Go(func() {
			r := &Result{GPUs: []GPU{{Process: n, GEMMSeconds: 1}, {Process: n, Number: 1, GEMMSeconds: 1}}}
			if n == 2 {
				r.GPUs[1].GEMMSeconds = 2
			}
			if err := r.exchange(Options{Process: n, Processes: 3, Store: s, Wait: 10 * time.Second}); err != nil {
				t.Error(err)
			}
			r.compare(defaultSlow)
			results[n] = r
		})
	}
	wg.Wait()
	for n, r := range results {
		if len(r.GPUs) != 6 || len(r.Problems) != 1 || r.Problems[0].Process != 2 || r.Problems[0].GPU != 1 {
			t.Errorf("process %d: %d GPUs, %+v", n, len(r.GPUs), r.Problems)
		}
	}
}

// A process that tells nothing, or garbage, is an error that names it.
func TestExchangeWithASilentProcess(t *testing.T) {
	s := &store{kept: map[string][]byte{}}
	o := Options{Process: 0, Processes: 2, Store: s, Wait: 10 * time.Millisecond}
	err := (&Result{}).exchange(o)
	if !errors.Is(err, diag.LinkLost) || !strings.Contains(err.Error(), "process 1") {
		t.Error(err)
	}
	s.kept["preflight/1"] = []byte("{")
	if err := (&Result{}).exchange(o); !errors.Is(err, diag.PeersDiffer) {
		t.Error(err)
	}
}

// The axes of a plan are summed one by one, over groups as the plan has them.
func TestAxes(t *testing.T) {
	p, err := plan.Parse([]byte(`{"version": 1, "model": "m", "cluster": "16xb200", "seq": 8, "batch": 16,
"microbatches": 4, "fsdp": {"size": 4, "zero": 3, "gather": "layer"}, "tp": {"size": 2},
"pp": {"size": 2, "schedule": "1f1b"}}`), "plan.json")
	if err != nil {
		t.Fatal(err)
	}
	mesh := meshOf(p)
	if fmt.Sprint(mesh) != "[{pp 2} {fsdp 4} {tp 2}]" {
		t.Errorf("mesh %v", mesh)
	}
	for axis, group := range map[string]string{"tp": "[0, 1]", "fsdp": "[0, 2, 4, 6]", "pp": "[0, 8]"} {
		m, err := axisSum(dtype.Shape{Type: dtype.F32, Dims: []int64{8, 8}}, mesh, axis)
		if err != nil || len(m.Devices) != 16 || !strings.Contains(m.Text, group) {
			t.Errorf("%s: %v\n%s", axis, err, m.Text)
		}
	}
	if _, err := (Options{Plan: p}).prices(); err != nil {
		t.Error(err)
	}
	if text, err := json.Marshal(Rate{Name: "tp", Predicted: 1, Measured: 2}); err != nil ||
		(Rate{Predicted: 1, Measured: 2}).Share() != 0.5 {
		t.Errorf("%s %v", text, err)
	}
}
