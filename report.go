package deepwell

import (
	"context"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/report"
)

// A ReportJob is what to show of training runs.
type ReportJob struct {
	Runs   []string // folders
	Output string   // the HTML file to write
	// Listen is the address on which to serve the page while runs go on, instead of writing it, and
	// Opened is called with the address that a browser takes.
	Listen string
	Opened func(url string) `json:"-"`
}

// A ReportResult tells what runs have come to.
type ReportResult struct {
	Runs   []RunSummary `json:"runs"`
	Output string       `json:"output,omitempty"`
}

// A RunSummary is what one run has come to. Loss and Eval are the last ones.
type RunSummary struct {
	Folder   string        `json:"folder"`
	Step     int           `json:"step"`
	Steps    int           `json:"steps"`
	Loss     *event.Figure `json:"loss,omitempty"`
	Eval     *event.Figure `json:"eval,omitempty"`
	Tokens   int64         `json:"tokens"`
	Rejected int           `json:"rejected"`
	Resumed  int           `json:"resumed"`
}

// Report writes a page about training runs, or serves it until the context ends.
func (e *Env) Report(ctx context.Context, job ReportJob) (*ReportResult, error) {
	v := e.begin(ctx, "report")
	runs := get(v, "read the runs", func() (list []*report.Run, err error) {
		for _, folder := range job.Runs {
			r, err := report.Open(folder)
			if err != nil {
				return nil, err
			}
			list = append(list, r)
		}
		if len(list) == 0 {
			return nil, diag.New(diag.BadInput, "no run is named").Try("give the folder of a run")
		}
		return list, nil
	})
	if v.err != nil {
		return nil, v.err
	}
	done := &ReportResult{Output: job.Output}
	for _, r := range runs {
		done.Runs = append(done.Runs, summary(r))
	}
	if job.Listen != "" {
		v.pass("serve the page", func() error { return serveRuns(ctx, job, runs) })
		return done, v.err
	}
	v.pass("write the page", func() error {
		return unwritten(atomicfile.Write(job.Output, report.Page(runs), 0o666), "the report", job.Output)
	})
	return done, v.err
}

func serveRuns(ctx context.Context, job ReportJob, runs []*report.Run) error {
	s, err := report.Listen(job.Listen, runs)
	if err != nil {
		return err
	}
	if job.Opened != nil {
		job.Opened(s.URL())
	}
	return s.Serve(ctx)
}

func summary(r *report.Run) RunSummary {
	s := RunSummary{Folder: r.Name, Rejected: len(r.Rejected), Resumed: r.Resumes}
	if r.Run != nil {
		s.Steps = r.Run.Steps
	}
	if n := len(r.Steps); n > 0 {
		last := r.Steps[n-1]
		s.Step, s.Steps, s.Tokens, s.Loss = last.Step, last.Steps, last.Tokens, &last.Loss
	}
	if n := len(r.Evals); n > 0 {
		s.Eval = &r.Evals[n-1].Loss
	}
	return s
}
