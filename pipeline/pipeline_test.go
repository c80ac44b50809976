package pipeline_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/pipeline"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
)

// isSplit tells whether a schedule takes gradients in two.
func isSplit(name string) bool { return name == "zb-h1" || name == "zb-v" }

func newSchedule(t testing.TB, name string, ranks, microbatches int) *schedule.Schedule {
	t.Helper()
	s, err := schedule.New(name, schedule.Shape{Ranks: ranks, Micros: microbatches})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// connect links all ranks of a process with each other.
func connect(t testing.TB, e *engine.Engine, ranks []pipeline.Rank, meets bool) {
	t.Helper()
	for i := range ranks {
		for k := range i {
			left, right := ranks[k].Stages[0].Forward.Module().Devices, ranks[i].Stages[0].Forward.Module().Devices
			a, b, err := e.Pipe(left, right, 2)
			if meets {
				a, b, err = e.Permute(left, right)
			}
			if err != nil {
				t.Fatal(err)
			}
			ranks[k].Links[ranks[i].Number], ranks[i].Links[ranks[k].Number] = a, b
		}
	}
}

func upTo(n int) []int {
	list := make([]int, n)
	for i := range list {
		list[i] = i
	}
	return list
}

// Every schedule gives the loss and the gradients of the uncut model, holds what it promises to
// hold, and leaves nothing behind.
func TestGradientsAreThoseOfTheUncutModel(t *testing.T) {
	e := cpu(t, 4)
	const microbatches = 8
	want := reference(t, e, microbatches)
	for _, name := range schedule.Names() {
		for _, n := range []int{2, 4} {
			for _, meets := range []bool{false, true} {
				if testing.Short() && (n == 4 || meets) {
					continue
				}
				t.Run(fmt.Sprintf("%s-%d-meets-%v", name, n, meets), func(t *testing.T) {
					s := newSchedule(t, name, n, microbatches)
					ranks, err := hosted(t.Context(), e, s, upTo(n), isSplit(name), func(r int) int { return r })
					if err != nil {
						t.Fatal(err)
					}
					connect(t, e, ranks, meets)
					before := fmt.Sprint(e.LiveBytes())
					p, err := pipeline.New(pipeline.Config{Schedule: s, Ranks: ranks})
					if err != nil {
						t.Fatal(err)
					}
					out, err := p.Run(t.Context(), feed(e))
					if err != nil {
						t.Fatal(err)
					}
					got, err := gathered(t.Context(), ranks, out)
					if err != nil {
						t.Fatal(err)
					}
					compare(t, got, want)
					if len(out.Results) != microbatches {
						t.Errorf("%d losses", len(out.Results))
					}
					holdsWhatItPromises(t, s, out)
					out.Free()
					if !meets { // runs let go of memory when their callbacks come
						waitFor(t, func() bool { return fmt.Sprint(e.LiveBytes()) == before })
					}
					free(ranks)
				})
			}
		}
	}
	waitFor(t, func() bool { return slices.Max(e.LiveBytes()) == 0 })
}

// holdsWhatItPromises holds microbatches in flight to the schedule's closed form.
func holdsWhatItPromises(t *testing.T, s *schedule.Schedule, out *pipeline.Outcome) {
	t.Helper()
	if len(out.Usage) != s.Stages() {
		t.Fatalf("usage of %d stages", len(out.Usage))
	}
	for rank := range s.Ranks {
		peak, err := s.Peak(rank, schedule.Hold{Forward: []int64{1}, Input: []int64{1}})
		if err != nil {
			t.Fatal(err)
		}
		var sum int
		var bytes int64
		for _, u := range out.Usage {
			if s.Rank(u.Stage) == rank {
				sum += u.Microbatches
				bytes += u.Bytes
			}
		}
		if s.Virtual == 1 && int64(sum) != peak.Total || int64(sum) < peak.Total {
			t.Errorf("rank %d held %d microbatches, the schedule says %d", rank, sum, peak.Total)
		}
		if high := out.HighWater[rank]; high > bytes || high == 0 {
			t.Errorf("rank %d held %d bytes, its stages %d", rank, high, bytes)
		}
	}
}

// A second step adds to the accumulators: the pipeline has no state of its own.
func TestStepsAddUp(t *testing.T) {
	e := cpu(t, 2)
	const microbatches = 2
	want := reference(t, e, microbatches)
	s := newSchedule(t, "1f1b", 2, microbatches)
	ranks, err := hosted(t.Context(), e, s, upTo(2), false, func(r int) int { return r })
	if err != nil {
		t.Fatal(err)
	}
	defer free(ranks)
	connect(t, e, ranks, false)
	p, err := pipeline.New(pipeline.Config{Schedule: s, Ranks: ranks})
	if err != nil {
		t.Fatal(err)
	}
	var got map[string][]float64
	for range 3 {
		out, err := p.Run(t.Context(), feed(e))
		if err != nil {
			t.Fatal(err)
		}
		if got, err = gathered(t.Context(), ranks, out); err != nil {
			t.Fatal(err)
		}
		out.Free()
	}
	delete(got, "loss")
	delete(want, "loss")
	for _, w := range want {
		for i := range w {
			w[i] *= 3
		}
	}
	compare(t, got, want)
}

// Errors and an end of the context end all ranks, and nothing stays behind.
func TestErrorsEndEverything(t *testing.T) {
	e := cpu(t, 2)
	s := newSchedule(t, "1f1b", 2, 8)
	ranks, err := hosted(t.Context(), e, s, upTo(2), false, func(r int) int { return r })
	if err != nil {
		t.Fatal(err)
	}
	defer free(ranks)
	before := fmt.Sprint(e.LiveBytes())
	var calls atomic.Int64
	failing := func(ctx context.Context, stage, microbatch int, ps *program.Module, spec program.Array) (*engine.Array, error) {
		if calls.Add(1) == 10 {
			return nil, diag.New(diag.DataEmpty, "no rows are left")
		}
		return feed(e)(ctx, stage, microbatch, ps, spec)
	}
	stuck := func(ctx context.Context, stage, microbatch int, ps *program.Module, spec program.Array) (*engine.Array, error) {
		if stage == 1 && microbatch == 2 {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return feed(e)(ctx, stage, microbatch, ps, spec)
	}
	nothing := func(context.Context, int, int, *program.Module, program.Array) (*engine.Array, error) {
		return nil, nil
	}
	for name, c := range map[string]struct {
		data pipeline.Data
		want diag.Code
	}{
		"data fails": {failing, diag.DataEmpty},
		"canceled":   {stuck, diag.Canceled},
		"no data":    {nil, diag.PipelineStage},
		"nil data":   {nothing, diag.PipelineStage},
	} {
		t.Run(name, func(t *testing.T) {
			connect(t, e, ranks, false)
			p, err := pipeline.New(pipeline.Config{Schedule: s, Ranks: ranks})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			if c.want != diag.Canceled {
				ctx = t.Context()
			}
			if _, err := p.Run(ctx, c.data); !errors.Is(err, c.want) {
				t.Errorf("%v, want %s", err, c.want)
			}
			for _, r := range ranks {
				for _, l := range r.Links {
					l.Close()
				}
			}
		})
	}
	waitFor(t, func() bool { return fmt.Sprint(e.LiveBytes()) == before })
}

// waitFor waits for runs that were abandoned.
func waitFor(t *testing.T, ok func() bool) {
	t.Helper()
	for range 2000 {
		if ok() {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Error("bytes stay live")
}

func TestMisfitsAreNamed(t *testing.T) {
	e := cpu(t, 2)
	s := newSchedule(t, "1f1b", 2, 2)
	for name, change := range map[string]func(c *pipeline.Config){
		"no link":        func(c *pipeline.Config) { delete(c.Ranks[0].Links, 1) },
		"no state":       func(c *pipeline.Config) { c.Ranks[1].State = nil },
		"rank twice":     func(c *pipeline.Config) { c.Ranks[1].Number = 0 },
		"no rank":        func(c *pipeline.Config) { c.Ranks[1].Number = 2 },
		"too few stages": func(c *pipeline.Config) { c.Ranks[1].Stages = nil },
		"kind":           func(c *pipeline.Config) { c.Schedule = newSchedule(t, "zb-h1", 2, 2) },
		"first inputs":   func(c *pipeline.Config) { c.Ranks[0].Stages[0].Inputs = []string{"ids"} },
		"last outputs":   func(c *pipeline.Config) { c.Ranks[1].Stages[0].Outputs = []string{"x"} },
		"no seeds":       func(c *pipeline.Config) { c.Ranks[0].Stages[0].OutputGrads = nil },
		"unknown input":  func(c *pipeline.Config) { c.Ranks[1].Stages[0].Inputs = []string{"y"} },
		"unknown result": func(c *pipeline.Config) { c.Ranks[1].Stages[0].Results = []string{"y"} },
		"unknown grad":   func(c *pipeline.Config) { c.Ranks[1].Stages[0].Gradients = []string{"y"} },
		"no gradient":    func(c *pipeline.Config) { c.Ranks[1].Stages[0].Gradients = []string{""} },
		"other shape":    func(c *pipeline.Config) { c.Ranks[1].Stages[0].Inputs = []string{"w1"} },
	} {
		t.Run(name, func(t *testing.T) {
			ranks, err := hosted(t.Context(), e, s, upTo(2), false, func(r int) int { return r })
			if err != nil {
				t.Fatal(err)
			}
			defer free(slices.Clone(ranks))
			connect(t, e, ranks, false)
			c := pipeline.Config{Schedule: s, Ranks: ranks}
			state := ranks[1].State
			stages := ranks[1].Stages
			change(&c)
			_, err = pipeline.New(c)
			if !errors.Is(err, diag.PipelineStage) {
				t.Errorf("%v", err)
			}
			ranks[1].State, ranks[1].Stages = state, stages
		})
	}
}
