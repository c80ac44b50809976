package deepwell

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"

	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/quantize"
	"github.com/deepwell/deepwell/safetensors"
)

// An ExportJob is what to write as a Hugging Face folder.
type ExportJob struct {
	// Source is the folder of a run, of its checkpoints, or of one step; or a model with weights, as
	// capture takes it.
	Source string
	Output string // a new folder
	// Type is the element type of the weights: F32, BF16 or F16. Invalid, the zero value, is the type
	// that the model came with, or F32 if that is unknown.
	Type dtype.DType
	// Tokenizer is the folder that the tokenizer is copied from; "" is the run's or the model's own.
	Tokenizer string
	// Quantize says what the weights are quantized to; nil for weights of the type above.
	Quantize *quantize.Options
	Getenv   func(string) string
}

// An ExportResult tells what was written.
type ExportResult struct {
	Name       string `json:"name"`
	Step       int64  `json:"step,omitempty"` // of a checkpoint
	Parameters int64  `json:"parameters"`
	Type       string `json:"type"`
	Files      int    `json:"files"`
	Bytes      int64  `json:"bytes"`
	Output     string `json:"output"`
	// Quantized tells what became of the weights, where they were quantized.
	Quantized *quantize.Report `json:"quantized,omitempty"`
}

// Export writes the newest checkpoint of a run, or another source of weights, as a folder that
// transformers loads.
func (e *Env) Export(ctx context.Context, job ExportJob) (*ExportResult, error) {
	v := e.begin(ctx, "export")
	done := &ExportResult{Output: filepath.ToSlash(job.Output)}
	x := get(v, "open the weights and check them", func() (*exporter, error) {
		return e.openExport(ctx, job)
	})
	if v.err != nil {
		return nil, v.err
	}
	defer x.close()
	if job.Type == dtype.Invalid {
		job.Type = cmp.Or(x.dtype, dtype.F32)
	}
	done.Type = job.Type.String()
	folder := job.Output
	if job.Quantize != nil && x.program != nil {
		return nil, diag.New(diag.NotSupported, "weights of a captured program are not quantized").
			At("%s", job.Source).
			Because("loaders of quantized weights know models by their configuration").
			Try("leave --to out")
	}
	if job.Quantize != nil {
		folder = get(v, "make the folder ready", func() (string, error) {
			return beforeQuantizing(job.Output)
		})
	}
	v.pass("write the folder", func() error {
		files := cmp.Or(job.Tokenizer, x.files)
		list, err := x.write(folder, capture.ExportOptions{Type: job.Type, Files: files,
			Config: x.source})
		for _, f := range list {
			done.Files, done.Bytes = done.Files+1, done.Bytes+f.Bytes
		}
		return err
	})
	if job.Quantize != nil {
		v.pass("quantize its weights", func() error { return e.quantizeExport(ctx, job, folder, done) })
	}
	if v.err != nil {
		return nil, v.err
	}
	done.Name, done.Step, done.Parameters = x.name, x.step, x.parameters
	return done, nil
}

// An exporter is a source of weights.
type exporter struct {
	name   string
	step   int64
	config *model.Config // or
	// program is what torch.export saved.
	program    *capture.Program
	parameters int64
	files      string // folder of the tokenizer
	source     []byte // config.json that the model came with; nil where it is not known
	dtype      dtype.DType
	read       capture.Reader
	close      func()
}

// write writes the weights as the model has them.
func (x *exporter) write(folder string, o capture.ExportOptions) ([]safetensors.File, error) {
	if x.program != nil {
		return x.program.Export(folder, o, x.read)
	}
	return capture.Export(folder, x.config, o, x.read)
}

func (e *Env) openExport(ctx context.Context, job ExportJob) (*exporter, error) {
	c, err := openCheckpoint(ctx, job.Source, e)
	if err != nil {
		return nil, err
	}
	if c != nil {
		x, err := fromCheckpoint(c)
		if err != nil {
			_ = c.Close()
		}
		return x, err
	}
	m, err := capture.Open(job.Source, capture.Options{Getenv: job.Getenv})
	if err != nil {
		return nil, err
	}
	x := &exporter{name: m.Name, config: m.Config, program: m.Program,
		parameters: m.Parameters(), files: m.Folder, read: m.Read,
		close: func() { _ = m.Close() }}
	x.source, x.dtype = m.Source()
	if err = m.Lack(); err == nil {
		err = m.Check()
	}
	if err != nil {
		x.close()
		return nil, err
	}
	return x, nil
}

// openCheckpoint opens a folder that a run wrote: one step, or the newest of several, every byte
// hashed. It is nil for any other source.
func openCheckpoint(ctx context.Context, path string, e *Env) (*ckpt.Checkpoint, error) {
	there := func(name string) bool {
		_, err := os.Stat(filepath.Join(path, name))
		return err == nil
	}
	steps, _ := filepath.Glob(filepath.Join(path, "step-*"))
	switch {
	case there("checkpoints"):
		return ckpt.Latest(ctx, filepath.Join(path, "checkpoints"), e.Events)
	case len(steps) > 0:
		return ckpt.Latest(ctx, path, e.Events)
	case !there("manifest.json"):
		return nil, nil
	}
	c, err := ckpt.Open(path)
	if err != nil {
		return nil, err
	}
	if err := c.Verify(ctx); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// fromCheckpoint reads the f32 master weights of a checkpoint, which are stored by parameter name,
// layer by layer, in the model's own layout.
func fromCheckpoint(c *ckpt.Checkpoint) (*exporter, error) {
	run := filepath.Dir(filepath.Dir(filepath.Clean(c.Path())))
	x := &exporter{name: filepath.Base(run), step: c.Step, files: run, read: masters(c),
		close: func() { _ = c.Close() }}
	program, err := capture.ProgramOf(c.Model, run)
	if err != nil {
		return nil, err
	}
	if program != nil {
		x.program, x.parameters, x.dtype = program, program.Parameters(), program.Type()
		x.close = func() { _ = errors.Join(program.Close(), c.Close()) }
		return x, nil
	}
	if x.config, err = model.Parse(c.Model); err != nil {
		return nil, diag.New(diag.CheckpointDamaged, "the checkpoint does not say what model it is of").
			At("%s", c.Path()).Wrap(err)
	}
	x.parameters = x.config.Count().Total
	// An older run, or a checkpoint that was moved, has none: it is written as our own.
	if source, err := os.ReadFile(filepath.Join(run, capture.SourceConfig)); err == nil {
		x.source, x.dtype = source, capture.DTypeOf(source)
	}
	return x, nil
}

// masters reads the f32 weights of a checkpoint.
func masters(c *ckpt.Checkpoint) capture.Reader {
	tensors := map[string]ckpt.Tensor{}
	for _, t := range c.Tensors() {
		tensors[t.Name] = t
	}
	return func(p *model.Param, dst []float32) error {
		shape := lists.Map(p.Dims, func(d ir.Dim) int64 { return d.Size })
		t, ok := tensors[p.Name]
		if !ok || t.DType != dtype.F32 || !slices.Equal(t.Shape, shape) {
			return diag.New(diag.CheckpointTensor, "the checkpoint has no %s of f32%v", p.Name, shape).
				At("%s", c.Path())
		}
		buf := make([]byte, t.Bytes())
		if err := c.ReadSlice(p.Name, t.Box(), buf); err != nil {
			return err
		}
		if n := dtype.F32.NotFinite(buf); n > 0 {
			return diag.New(diag.WeightNotFinite, "%d numbers of %s are not finite", n, p.Name).
				At("%s", c.Path()).Try("export an earlier checkpoint; deepwell ckpt list %s lists them",
				filepath.Dir(c.Path()))
		}
		dtype.F32.Decode(dst, buf)
		return nil
	}
}
