package deepwell

import (
	"context"
	"path/filepath"
	"time"

	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/recipe"
)

// describe says what is trained on what.
func (r *runner) describe() event.Run {
	c := r.recipe
	e := event.Run{Model: c.Model, Steps: c.Steps, Seq: c.Seq, Batch: c.Batch,
		Microbatch: c.Microbatch, Precision: c.Precision.String(), Devices: 1, Device: "CPU",
		Folder:     filepath.ToSlash(c.Out),
		Parameters: lists.Sum(r.model.Trained().Params(), func(p model.Param) int64 { return p.Size() }),
		Data:       lists.Map(c.Data.Sources, func(s recipe.Source) string { return s.Path })}
	if c.GEMMs != "" {
		e.Precision = filepath.Base(c.GEMMs)
	}
	if r.plan != nil {
		e.Plan, e.Devices = r.plan.Label(), int(r.plan.Devices())
	}
	if len(r.devices.gpus) > 0 {
		e.Device = r.devices.gpus[0].Name
	}
	if r.rows != nil {
		e.DataTokens, e.DataSequences = r.rows.Tokens(), r.rows.Sequences()
		if e.DataSequences > 0 {
			e.Epochs = float64(c.Steps) * float64(c.Batch) / float64(e.DataSequences)
		}
	}
	return e
}

// run trains, and says at the end what came of it and what can be done with it.
func (r *runner) run(ctx context.Context) error {
	before, began := r.trainer.Result().Step, time.Now()
	err := r.trainer.Run(ctx)
	done := r.trainer.Result()
	if err != nil || done.Step == before || !r.processes.Leads() {
		return err
	}
	e := event.Finished{Step: done.Step, Steps: done.Steps, Loss: event.Figure(done.Loss),
		Tokens:  int64(done.Step-before) * int64(r.recipe.Batch) * int64(r.recipe.Seq),
		Seconds: time.Since(began).Seconds()}
	if done.Eval != 0 {
		eval := event.Figure(done.Eval)
		e.Eval = &eval
	}
	out := filepath.ToSlash(r.recipe.Out)
	e.Next = []string{"deepwell export " + out + " -o DIR", "deepwell report " + out}
	r.events.Emit(e)
	return nil
}
