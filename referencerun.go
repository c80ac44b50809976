package deepwell

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"io"
	"path/filepath"

	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/step"
)

// referenceRun is run.json: what another program needs to make the same run, beside weights and
// batches. bench/curve/torch_run.py reads it.
type referenceRun struct {
	Steps int       `json:"steps"`
	Batch int       `json:"batch"`
	Seq   int       `json:"seq"`
	Rates []float64 `json:"rates"`
	Beta1 float64   `json:"beta1"`
	Beta2 float64   `json:"beta2"`
	Eps   float64   `json:"eps"`
	Decay float64   `json:"decay"`
	Clip  float64   `json:"clip"`
}

// writeReferenceRun writes init, a Hugging Face folder; run.json; and batches.bin: for each step
// ids, labels, positions and segments, each [B, S] as little-endian i32.
func (r *runner) writeReferenceRun(ctx context.Context) error {
	if r.recipe.Optimizer.Name != "adamw" {
		return diag.New(diag.NotSupported, "only a run with AdamW can be written as a reference run").
			At("%s: optimizer.name", r.job.Path)
	}
	if r.model.Program != nil {
		return diag.New(diag.NotSupported, "a captured program has no reference run").
			At("%s: model", r.job.Path).
			Because("the module in PyTorch, which it was captured from, is the reference")
	}
	dir := r.job.ReferenceRun
	_, err := capture.Export(filepath.Join(dir, "init"), r.model.Config,
		capture.ExportOptions{Type: dtype.F32}, r.init)
	if err != nil {
		return err
	}
	o := r.recipe.Optimizer
	run := referenceRun{Steps: r.recipe.Steps, Batch: r.recipe.Batch, Seq: r.recipe.Seq,
		Beta1: o.Beta1, Beta2: o.Beta2, Eps: step.AdamEps, Decay: o.WeightDecay, Clip: o.MaxGradNorm}
	for n := range run.Steps {
		run.Rates = append(run.Rates, step.Rates(r.recipe).LR(n))
	}
	text, err := json.Marshal(run)
	if err == nil {
		err = atomicfile.Write(filepath.Join(dir, "run.json"), text, 0o666)
	}
	if err == nil {
		err = atomicfile.WriteFunc(filepath.Join(dir, "batches.bin"), 0o666, func(w io.Writer) error {
			return r.writeBatches(ctx, w)
		})
	}
	return unwritten(err, "the reference run", dir)
}

// writeBatches writes the batches of all steps.
func (r *runner) writeBatches(ctx context.Context, w io.Writer) error {
	out := bufio.NewWriter(w)
	at := data.Position{}
	for range r.recipe.Steps {
		b, after, err := r.dataset().Take(ctx, at, r.recipe.Batch, 0, 1)
		if err != nil {
			return err
		}
		at = after
		for _, list := range [][]int32{b.IDs, b.Labels, b.Positions, b.Segments} {
			if err := binary.Write(out, binary.LittleEndian, list); err != nil {
				return err
			}
		}
	}
	return out.Flush()
}
