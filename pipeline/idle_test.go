package pipeline_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/pipeline"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
)

// sleeper is what the stages of this file call. The product is there because XLA:CPU queues only
// programs of some size; smaller ones it runs while it starts them.
const sleeper = `module @sleeper {
  func.func @main(%x: tensor<4xf32>, %t: tensor<f32>) -> tensor<4xf32> {
    %y = stablehlo.custom_call @pipeline.sleep(%x, %t) {api_version = 4 : i32} : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
    %i = stablehlo.iota dim = 0 : tensor<64x64xf32>
    %b = stablehlo.broadcast_in_dim %y, dims = [0] : (tensor<4xf32>) -> tensor<4x64xf32>
    %d = stablehlo.dot_general %b, %i, contracting_dims = [1] x [0] : (tensor<4x64xf32>, tensor<64x64xf32>) -> tensor<4x64xf32>
    %s = stablehlo.slice %d [0:4, 0:1] : (tensor<4x64xf32>) -> tensor<4x1xf32>
    %r = stablehlo.reshape %s : (tensor<4x1xf32>) -> tensor<4xf32>
    return %r : tensor<4xf32>
  }
}
`

// A diary is when devices slept.
type diary struct {
	mu          sync.Mutex
	first, last time.Time
	busy        time.Duration
}

func (d *diary) sleep(c *engine.Call) error {
	start := time.Now()
	t := math.Float32frombits(binary.LittleEndian.Uint32(c.Args[1].Data))
	time.Sleep(time.Duration(t * float32(time.Second)))
	end := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.first.IsZero() || start.Before(d.first) {
		d.first = start
	}
	if end.After(d.last) {
		d.last = end
	}
	d.busy += end.Sub(start)
	return nil
}

// idle is the share of the time that ranks did not sleep.
func (d *diary) idle(ranks int) float64 {
	return 1 - d.busy.Seconds()/(d.last.Sub(d.first).Seconds()*float64(ranks))
}

// sleeping makes the ranks of a schedule whose stages sleep, each on a device of its own.
func sleeping(t *testing.T, e *engine.Engine, s *schedule.Schedule, unit time.Duration) []pipeline.Rank {
	t.Helper()
	x4 := dtype.Shape{Type: dtype.F32, Dims: []int64{4}}
	var ranks []pipeline.Rank
	for r := range s.Ranks {
		on := program.Devices{r}
		compile := func(from, time, to string) *engine.Executable {
			x, err := e.Compile(t.Context(), &program.Module{Name: "sleeper", Devices: on, Text: sleeper,
				Args:    []program.Array{{Name: from, Global: x4}, {Name: time, Global: dtype.Shape{Type: dtype.F32}}},
				Results: []program.Array{{Name: to, Global: x4}}})
			if err != nil {
				t.Fatal(err)
			}
			return x
		}
		rank := pipeline.Rank{Number: r, State: &engine.State{}, Links: map[int]engine.Link{}}
		put := func(name string, shape dtype.Shape, v ...float64) {
			a, err := e.Place(&program.Module{Name: "s", Devices: on}, program.Array{Name: name, Global: shape},
				engine.Copied, func(int) ([]byte, error) { return encode(dtype.F32, v), nil })
			if err != nil {
				t.Fatal(err)
			}
			rank.State.Put(a)
		}
		put("one", x4, 1, 1, 1, 1)
		put("t.one", dtype.Shape{Type: dtype.F32}, unit.Seconds())
		put("t.two", dtype.Shape{Type: dtype.F32}, 2*unit.Seconds())
		for i := range s.Stages() {
			if s.Rank(i) != r {
				continue
			}
			x, dy, st := "x", "dy", &pipeline.Stage{Inputs: []string{"x"}, Gradients: []string{"dx"},
				Outputs: []string{"y"}, OutputGrads: []string{"dy"}}
			if i == 0 {
				x, st.Inputs, st.Gradients = "ids", nil, nil
			}
			if i == s.Stages()-1 {
				dy, st.Outputs, st.OutputGrads, st.Results = "one", nil, nil, []string{"y"}
			}
			st.Forward = compile(x, "t.one", "y")
			if isSplit(s.Name) {
				st.Dgrad, st.Wgrad = compile(dy, "t.one", "dx"), compile(dy, "t.one", "dw")
			} else {
				st.Backward = compile(dy, "t.two", "dx")
			}
			rank.Stages = append(rank.Stages, st)
		}
		ranks = append(ranks, rank)
	}
	connect(t, e, ranks, false)
	return ranks
}

// idleBound is how far the measured idle share may be from the schedule's, as a part of it.
const idleBound = 0.05

// What the runtime adds to a schedule is small: with programs that only sleep, so that eight
// devices need no more than two cores, devices are idle as much as the schedule says.
func TestIdleShareIsTheSchedules(t *testing.T) {
	slowtest.Only(t)
	const ranks, microbatches = 8, 8
	e := cpu(t, ranks)
	var d *diary
	if err := e.Register("pipeline.sleep", func(c *engine.Call) error { return d.sleep(c) }); err != nil {
		t.Fatal(err)
	}
	measured := map[string]float64{}
	for _, name := range []string{"1f1b", "interleaved", "zb-h1", "zb-v"} {
		s := newSchedule(t, name, ranks, microbatches)
		line, err := s.Simulate(schedule.Even(1, 1, 1))
		if err != nil {
			t.Fatal(err)
		}
		// A busy machine wakes sleepers late, by milliseconds: then longer sleeps are measured.
		for unit := 40 * time.Millisecond / time.Duration(s.Virtual); ; unit *= 2 {
			d = &diary{}
			runSleeping(t, e, s, unit)
			got, want := d.idle(ranks), 1.0
			for _, busy := range line.Busy {
				want -= float64(busy) / float64(line.Makespan) / float64(s.Ranks)
			}
			t.Logf("%-11s %3d ms a program: idle %.2f %%, the schedule says %.2f %%: off by %+.1f %%", name,
				unit.Milliseconds(), 100*got, 100*want, 100*(got/want-1))
			measured[name] = got
			if math.Abs(got/want-1) <= idleBound {
				break
			}
			if unit > 200*time.Millisecond {
				t.Errorf("%s: idle %.4f, the schedule says %.4f", name, got, want)
				break
			}
		}
	}
	for _, zero := range []string{"zb-h1", "zb-v"} {
		if measured[zero] >= measured["1f1b"] {
			t.Errorf("%s is idle for %.4f, 1f1b for %.4f", zero, measured[zero], measured["1f1b"])
		}
	}
}

func runSleeping(t *testing.T, e *engine.Engine, s *schedule.Schedule, unit time.Duration) {
	t.Helper()
	ranks := sleeping(t, e, s, unit)
	defer free(ranks)
	p, err := pipeline.New(pipeline.Config{Schedule: s, Ranks: ranks})
	if err != nil {
		t.Fatal(err)
	}
	out, err := p.Run(t.Context(), func(_ context.Context, _, _ int, m *program.Module, spec program.Array) (*engine.Array, error) {
		if spec.Name != "ids" {
			return nil, fmt.Errorf("%s is asked for", spec.Name)
		}
		return e.Place(m, spec, engine.Copied, func(int) ([]byte, error) { return encode(dtype.F32, make([]float64, 4)), nil })
	})
	if err != nil {
		t.Fatal(err)
	}
	out.Free()
}
