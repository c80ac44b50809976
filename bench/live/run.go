package main

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
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

// A runner is one plan at work: a run as the command makes it, whose data end after each turn.
type runner struct {
	trainer *train.Trainer
	out     string
	left    int // batches that this turn may still take
	ids     []int32

	used      float64 // processor seconds when the last step ended
	wall, cpu float64 // the least of all steps so far
	loss      float64 // of the first step
}

// weights is the seed of the first weights; they are the same for every plan.
const weights = 7

func newRunner(ctx context.Context, e *engine.Engine, c *model.Config, p *plan.Plan) (*runner,
	error) {
	r := recipe.Default()
	r.Steps, r.Batch, r.Microbatch, r.Seq = 1<<30, batch, int(p.MicrobatchSequences()), seq
	r.Precision, r.Recompute = dtype.F32, p.Recompute
	r.Optimizer.Schedule, r.Optimizer.Warmup = "constant", 0
	r.Save.Every, r.Eval.Every = 0, 0
	programs, err := step.Build(step.Spec{Model: c, Recipe: r, Arch: "cpu", Plan: p})
	if err != nil {
		return nil, err
	}
	if r.Out, err = os.MkdirTemp("", "deepwell-live-"); err != nil {
		return nil, err
	}
	n := &runner{out: r.Out, wall: math.Inf(1), cpu: math.Inf(1)}
	random := rand.New(rand.NewPCG(weights, 0))
	for range batch * seq {
		n.ids = append(n.ids, int32(random.Int64N(c.Vocab)))
	}
	n.trainer, err = train.New(ctx, train.Options{Engine: e, Model: c, Recipe: r,
		Programs: programs, Data: n, Events: n, Now: time.Now,
		Init: func(p *model.Param, dst []float32) error { return c.Init(p, weights, dst) }})
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(n.out))
	}
	return n, nil
}

var errTurn = errors.New("the turn is over")

// turn makes some steps.
func (n *runner) turn(ctx context.Context, steps int) error {
	n.left = steps
	n.used = 0
	if err := n.trainer.Run(ctx); !errors.Is(err, errTurn) {
		return errors.Join(errors.New("the run ended"), err)
	}
	return nil
}

// Take implements train.Dataset: it gives the same batch for every step.
func (n *runner) Take(_ context.Context, at data.Position, rows, _, _ int) (*data.Batch,
	data.Position, error) {
	if n.left--; n.left < 0 {
		return nil, nil, errTurn
	}
	count := len(n.ids)
	b := &data.Batch{IDs: n.ids, Labels: n.ids, Positions: make([]int32, count),
		Segments: make([]int32, count), Sequences: rows, Seq: seq, Count: int64(count),
		Total: int64(count)}
	for i := range b.Positions {
		b.Positions[i] = int32(i % seq)
	}
	return b, at, nil
}

// Emit implements event.Sink. The first step of a turn warms up.
func (n *runner) Emit(e event.Event) {
	s, ok := e.(event.Step)
	if !ok {
		return
	}
	if n.loss == 0 {
		n.loss = float64(s.Loss)
	}
	used := abtest.CPUSeconds()
	if n.used > 0 {
		n.wall, n.cpu = min(n.wall, s.Seconds), min(n.cpu, used-n.used)
	}
	n.used = used
}

func (n *runner) stop() {
	n.trainer.Close()
	_ = os.RemoveAll(n.out)
}
