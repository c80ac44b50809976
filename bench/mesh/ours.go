package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/abtest"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/step"
	"github.com/deepwell/deepwell/train"
)

// A trainer is Deepwell's side: a run as the command makes it, that waits for its turn in its data
// and tells its losses in its events.
type trainer struct {
	t    *train.Trainer
	out  string
	seq  int
	rows *abtest.Weights

	begin chan bool // a step may begin; closed to end the run
	loss  chan float64
	done  chan error // what the run ended with; closed after it
}

func newTrainer(ctx context.Context, e *engine.Engine, s abtest.Size, w *abtest.Weights,
	p *plan.Plan) (*trainer, error) {
	r := recipe.Default()
	r.Steps, r.Batch, r.Microbatch, r.Seq = 1<<30, int(s.Batch), int(s.Batch), int(s.Seq)
	r.Precision = dtype.F32
	if s.DType == "bf16" {
		r.Precision = dtype.BF16
	}
	r.Optimizer = recipe.Optimizer{Name: "adamw", LR: abtest.Rate, MinLR: abtest.Rate,
		Schedule: "constant", WeightDecay: abtest.Decay, Beta1: abtest.Beta1, Beta2: abtest.Beta2,
		MaxGradNorm: abtest.Clip, Moments: dtype.F32}
	r.Save.Every, r.Eval.Every = 0, 0
	c := abtest.Config(s)
	programs, err := step.Build(step.Spec{Model: c, Recipe: r, Arch: "cpu", Plan: p})
	if err != nil {
		return nil, err
	}
	if r.Out, err = os.MkdirTemp("", "deepwell-mesh-"); err != nil {
		return nil, err
	}
	t := &trainer{out: r.Out, seq: int(s.Seq), rows: w, begin: make(chan bool),
		loss: make(chan float64), done: make(chan error, 1)}
	t.t, err = train.New(ctx, train.Options{Engine: e, Model: c, Recipe: r, Programs: programs,
		Data: t, Events: t, Now: time.Now, Init: func(p *model.Param, dst []float32) error {
			value, ok := w.Param(p.Name, p.Dims)
			if !ok || copy(dst, value) != len(dst) {
				return fmt.Errorf("there are no %d values of %s", len(dst), p.Name)
			}
			return nil
		}})
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(t.out))
	}
	go func() {
		defer close(t.done)
		t.done <- t.t.Run(ctx)
	}()
	return t, nil
}

var errStopped = errors.New("the run was stopped")

// Take implements train.Dataset: it gives the same batch for every step, when the step may begin.
func (t *trainer) Take(_ context.Context, at data.Position, rows, _, _ int) (*data.Batch,
	data.Position, error) {
	if !<-t.begin {
		return nil, nil, errStopped
	}
	n := len(t.rows.IDs)
	b := &data.Batch{IDs: t.rows.IDs, Labels: t.rows.Labels, Positions: make([]int32, n),
		Segments: make([]int32, n), Sequences: rows, Seq: t.seq, Count: int64(n), Total: int64(n)}
	for i := range b.Positions {
		b.Positions[i] = int32(i % t.seq)
	}
	return b, at, nil
}

// Emit implements event.Sink.
func (t *trainer) Emit(e event.Event) {
	if s, ok := e.(event.Step); ok {
		t.loss <- float64(s.Loss)
	}
}

// Turn implements abtest.Side.
func (t *trainer) Turn(steps int) (abtest.Turn, error) { return abtest.Take(steps, t.step) }

func (t *trainer) step() (float64, error) {
	select {
	case t.begin <- true:
	case err := <-t.done:
		return 0, errors.Join(errors.New("the run ended"), err)
	}
	select {
	case loss := <-t.loss:
		return loss, nil
	case err := <-t.done:
		return 0, errors.Join(errors.New("the run ended"), err)
	}
}

// Stop implements abtest.Side.
func (t *trainer) Stop() {
	close(t.begin)
	<-t.done
	t.t.Close()
	_ = os.RemoveAll(t.out)
}
