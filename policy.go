package deepwell

import (
	"context"

	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/precision"
)

// A PolicyJob is a policy of precision to write, or to check.
type PolicyJob struct {
	Source    string // a model, as capture takes it
	Precision string // bf16, mxfp8, nvfp4, or the file of a policy
	Output    string // the file to write; "" is for none
}

// Policy tells what a word for a precision, or a policy's file, means for a model, with the share
// of each format of the work of linear layers, and writes it as a file that a person edits and that
// train, plan, dryrun, compile, parity and quantize take.
func (e *Env) Policy(ctx context.Context, job PolicyJob) (p *precision.Policy,
	share map[dtype.Format]float64, err error) {
	v := e.begin(ctx, "policy")
	v.pass("check the file's name", func() error {
		if job.Output == "" || precision.IsFile(job.Output) {
			return nil
		}
		return diag.New(diag.BadUsage, "%s would be taken for a word, not for a policy", job.Output).
			Try("-o %s.json", job.Output)
	})
	m := get(v, "find the model", func() (*capture.Model, error) {
		return capture.Open(job.Source, capture.Options{})
	})
	if v.err != nil {
		return nil, nil, v.err
	}
	defer func() { _ = m.Close() }()
	config := m.Trained()
	p = get(v, "read the policy", func() (*precision.Policy, error) {
		return precision.Load(config, job.Precision)
	})
	v.pass("add up the work", func() error {
		share = p.Share(config)
		return nil
	})
	if job.Output != "" {
		v.pass("write the file", func() error {
			text, err := p.Marshal()
			if err == nil {
				err = unwritten(atomicfile.Write(job.Output, text, 0o666), "the policy", job.Output)
			}
			return err
		})
	}
	return p, share, v.err
}
