package deepwell

import (
	"cmp"
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/safedir"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/quantize"
)

// A QuantizeJob is a checkpoint to write with quantized weights.
type QuantizeJob struct {
	Source  string // a folder that transformers loads, or what capture finds one by
	Output  string // a new folder, or one that the same job was stopped in
	Options quantize.Options
	// Policy is a training policy file: a layer whose fprop it keeps in BF16 stays in BF16, and no
	// layer gets fewer bits than it had in training. "" means no policy.
	Policy string
	Getenv func(string) string
}

// Quantize writes a checkpoint with quantized weights, under the names that loaders expect. A job
// that was stopped resumes.
func (e *Env) Quantize(ctx context.Context, job QuantizeJob) (*quantize.Report, error) {
	v := e.begin(ctx, "quantize")
	folder := get(v, "find the checkpoint", func() (string, error) { return quantizeFrom(job) })
	if job.Policy != "" {
		job.Options.Policy = get(v, "read the policy", func() (quantize.Policy, error) {
			return policyOf(job.Policy, job.Options.To)
		})
	}
	report := get(v, "quantize its weights", func() (*quantize.Report, error) {
		o := job.Options
		o.Events = e.Events
		return quantize.Quantize(ctx, folder, job.Output, o)
	})
	return report, v.err
}

// quantizeFrom finds the folder of a source. A folder need not hold a model that Deepwell can
// build.
func quantizeFrom(job QuantizeJob) (string, error) {
	if info, err := os.Stat(job.Source); err == nil && info.IsDir() {
		return job.Source, nil
	}
	m, err := capture.Open(job.Source, capture.Options{Getenv: job.Getenv})
	if err != nil {
		return "", err
	}
	defer func() { _ = m.Close() }()
	if m.Program != nil {
		return "", diag.New(diag.NotSupported, "%s is a program; quantize takes a Hugging Face folder",
			job.Source).Try("deepwell export %s -o FOLDER writes its weights as they are", job.Source)
	}
	return m.Folder, m.Check()
}

// beforeQuantizing returns the folder for an export that is quantized next: below the output
// folder, where it is removed with the rest of unfinished work. It starts empty.
func beforeQuantizing(output string) (string, error) {
	state := filepath.Join(output, quantize.StateName)
	entries, err := os.ReadDir(output)
	if _, begun := os.Stat(state); err == nil && len(entries) > 0 && begun != nil {
		return "", diag.New(diag.FolderForeign, "the folder holds %s already", entries[0].Name()).
			At("%s", output).Try("name a new folder")
	}
	folder := filepath.Join(state, "source")
	if err := os.RemoveAll(folder); err != nil {
		return "", diag.New(diag.FileError, "cannot remove %s", folder).Wrap(err)
	}
	return folder, nil
}

// quantizeExport quantizes what an export wrote.
func (e *Env) quantizeExport(ctx context.Context, job ExportJob, folder string,
	done *ExportResult) error {
	o := *job.Quantize
	o.Events = e.Events
	r, err := quantize.Quantize(ctx, folder, job.Output, o)
	if err != nil {
		return err
	}
	done.Quantized, done.Files, done.Bytes = r, len(r.Files), r.BytesOut
	return nil
}

// policyOf reads a policy of training as one for a checkpoint.
func policyOf(path string, to dtype.Format) (quantize.Policy, error) {
	text, err := safedir.ReadPlain(path, maxText)
	if err != nil {
		return nil, diag.New(diag.FileError, "cannot read %s", path).Wrap(err)
	}
	p, err := precision.Parse(text, path)
	if err != nil {
		return nil, err
	}
	return func(module string, _, _ int64) (dtype.Format, string) {
		layer, linear := layerOf(module)
		switch p.Of(layer, linear, precision.Fprop) {
		case dtype.NVFP4:
			return to, ""
		case dtype.MXFP8:
			return dtype.MXFP8, ""
		}
		return quantize.None, cmp.Or(p.Why(layer, linear, precision.Fprop), "the policy does not name it")
	}, nil
}

// linearNames are the names of linear layers in checkpoints that differ from a policy's by more
// than an ending. Where a checkpoint has several in one, the first decides.
var linearNames = map[string]string{"w1": "gate", "w3": "up", "w2": "down", "qkv": "q",
	"gate_up": "gate",
	"q_a":     "q_down", "q_b": "q_up", "kv_a_proj_with_mqa": "kv_down", "kv_b": "kv_up", "dense": "o"}

// layerOf gives the number of the layer that a module is in, -1 for none, and a policy's word for
// it.
func layerOf(module string) (layer int, linear string) {
	parts := strings.Split(module, ".")
	layer = -1
	for _, part := range parts {
		if n, err := strconv.Atoi(part); err == nil {
			layer = n
			break
		}
	}
	linear = strings.TrimSuffix(parts[len(parts)-1], "_proj")
	if w, ok := linearNames[linear]; ok {
		linear = w
	}
	switch {
	case strings.Contains(module, ".experts."):
		linear = "expert_" + linear
	case strings.Contains(module, ".shared_expert"):
		linear = "shared_" + linear
	}
	return layer, linear
}
