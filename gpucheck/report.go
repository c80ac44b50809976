package gpucheck

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/replay"
)

// A Status is what came of a check.
type Status string

// The states of a check: within its bound, beyond it, ended by an error, not run.
const (
	OK      Status = "ok"
	Beyond  Status = "beyond"
	Failed  Status = "failed"
	Skipped Status = "skipped"
)

// A Report is what was found on a host's GPUs. Its JSON is the file to attach to an issue.
type Report struct {
	Version int    `json:"version"`
	GPU     string `json:"gpu"` // as the driver names it
	Arch    string `json:"arch"`
	Count   int    `json:"gpus"`
	Memory  int64  `json:"memory_bytes"` // of the smallest
	Driver  string `json:"driver"`
	CUDA    string `json:"cuda_of_driver"`
	// Versions are the versions of plugin and libraries ([engine.Engine.Versions]).
	Versions map[string]string `json:"versions"`
	// WithoutCuDNN is why cuDNN does not open on the GPUs; "" if it does.
	WithoutCuDNN string `json:"without_cudnn,omitempty"`
	// Flags are the flags of every program, and variables that may change numbers.
	Flags       map[string]string `json:"flags"`
	Seed        uint64            `json:"seed"`
	Checks      []Check           `json:"checks"`
	Calls       []Call            `json:"custom_calls"`
	Conventions []Convention      `json:"conventions"`
	Times       []Time            `json:"times"`
	Timed       string            `json:"timed"` // the model whose step was timed
	Seconds     float64           `json:"seconds"`
}

// A Check is one comparison.
type Check struct {
	Group  string  `json:"group"`
	Name   string  `json:"name"`
	Status Status  `json:"status"`
	Apart  float64 `json:"apart"`           // as [replay.Difference].Relative, of the worst array
	Bound  float64 `json:"bound"`           // of Apart; 0 asks for equal bits
	Why    string  `json:"why,omitempty"`   // the bound is that wide
	Worst  string  `json:"worst,omitempty"` // the array that is farthest
	Arrays int     `json:"arrays,omitempty"`
	// Calls are the custom calls of the programs that ran.
	Calls []string `json:"calls,omitempty"`
	Note  string   `json:"note,omitempty"` // why it was skipped, or how it failed
}

// A Call is a custom call of our programs, and the check that covers it.
type Call struct {
	Target string `json:"target"`
	Status Status `json:"status"`
	By     string `json:"by,omitempty"`   // the first check that ran it
	Note   string `json:"note,omitempty"` // why none did
}

// A Convention is a reading of a library, and whether this GPU agrees.
type Convention struct {
	Name    string `json:"name"`
	Says    string `json:"says"`
	Verdict string `json:"verdict"` // confirmed, refuted or not tested
	By      string `json:"by"`      // checks, or why there was none
}

// A Time is the time of a training step, predicted and measured, in seconds.
type Time struct {
	Precision string  `json:"precision"`
	Predicted float64 `json:"predicted_seconds"`
	Measured  float64 `json:"measured_seconds"`
	Note      string  `json:"note,omitempty"` // why one of them is missing
}

// The verdicts on a convention.
const (
	confirmed = "confirmed"
	refuted   = "refuted"
	notTested = "not tested"
)

// JSON is the file to attach to an issue.
func (r *Report) JSON() ([]byte, error) {
	text, err := json.MarshalIndent(r, "", "  ")
	return append(text, '\n'), err
}

// Wrong lists the checks that are beyond their bounds or failed.
func (r *Report) Wrong() []Check {
	return lists.Filter(r.Checks, func(c Check) bool {
		return c.Status == Beyond || c.Status == Failed
	})
}

// tests are the checks that confirm a convention, by the beginning of their names, and the
// convention without which they say nothing about it.
var tests = map[string]struct {
	checks []string
	after  string
}{
	"gemm":           {[]string{"GEMM", "batched GEMM"}, ""},
	"workspace":      {[]string{"GEMM", "attention", "mxfp8 GEMM", "nvfp4 GEMM"}, ""},
	"block-dot":      {[]string{"mxfp8 GEMM, equal", "nvfp4 GEMM, equal"}, ""},
	"element-codes":  {[]string{"mxfp8 GEMM, equal", "nvfp4 GEMM, equal"}, ""},
	"scale-tiles":    {[]string{"mxfp8 GEMM, own", "nvfp4 GEMM, own"}, "block-dot"},
	"triton":         {[]string{"mxfp8 quantize"}, ""},
	"attention":      {[]string{"attention, no mask"}, ""},
	"attention-mask": {[]string{"attention, causal", "attention, window"}, "attention"},
	"log-sum-exp":    {[]string{"log-sum-exp", "merged pair"}, "attention-mask"},
	"attention-grad": {[]string{"attention gradient"}, "attention-mask"},

	"stochastic-rounding": {[]string{"nvfp4 quantize, random"}, "triton"},

	"attention-lengths":  {[]string{"attention, lengths"}, "attention"},
	"attention-segments": {[]string{"documents"}, "attention-mask"},
}

// conclude judges conventions and custom calls by the checks.
func (r *Report) conclude() {
	verdicts := map[string]string{}
	for _, c := range replay.Conventions() {
		one := Convention{Name: c.Name, Says: c.Says}
		one.Verdict, one.By = r.judge(c.Name, verdicts)
		verdicts[c.Name] = one.Verdict
		r.Conventions = append(r.Conventions, one)
	}
	seen := map[string]bool{}
	for _, c := range replay.Conventions() {
		for _, target := range c.Targets {
			if !seen[target] {
				seen[target] = true
				r.Calls = append(r.Calls, r.covered(target))
			}
		}
	}
	lists.Sort(r.Calls, func(a, b Call) int { return strings.Compare(a.Target, b.Target) })
}

// judge gives the verdict on a convention and what it rests on.
func (r *Report) judge(name string, verdicts map[string]string) (verdict, by string) {
	test, ok := tests[name]
	if !ok {
		return notTested, "any contents, or order, agree with it, so that no run can refute it"
	}
	if v := verdicts[test.after]; test.after != "" && v != confirmed {
		return notTested, test.after + " is " + v
	}
	var good, bad []string
	note := "no check of it"
	for _, c := range r.Checks {
		begins := func(prefix string) bool { return strings.HasPrefix(c.Name, prefix) }
		if !slices.ContainsFunc(test.checks, begins) {
			continue
		}
		switch c.Status {
		case OK:
			good = append(good, c.Name)
		case Beyond:
			bad = append(bad, c.Name)
		default:
			note = c.Name + ": " + c.Note
		}
	}
	switch {
	case len(bad) > 0:
		return refuted, strings.Join(bad, "; ")
	case len(good) > 0:
		return confirmed, strings.Join(good, "; ")
	}
	return notTested, note
}

// covered is what is known of a custom call.
func (r *Report) covered(target string) Call {
	call := Call{Target: target, Status: Skipped, Note: "XLA made no program of these checks call it"}
	for _, c := range r.Checks {
		if c.Status != Skipped && slices.Contains(c.Calls, target) {
			if call.Status == Skipped || c.Status != OK {
				call = Call{Target: target, Status: c.Status, By: c.Name}
			}
		}
	}
	if call.Status == Skipped && strings.HasPrefix(target, "__cudnn$") && r.WithoutCuDNN != "" {
		call.Note = noCuDNN
	}
	return call
}

var folders = regexp.MustCompile(`(/[\w.+@-]+)+/`)

// scrub takes folders and the host's name out of a text.
func scrub(text string) string {
	text = folders.ReplaceAllString(text, "")
	if host, err := os.Hostname(); err == nil && host != "" {
		text = strings.ReplaceAll(text, host, "HOST")
	}
	return text
}

// scrubAll takes them out of the report's texts that this package did not write.
func (r *Report) scrubAll() {
	for i := range r.Checks {
		r.Checks[i].Note = scrub(r.Checks[i].Note)
	}
	for i := range r.Times {
		r.Times[i].Note = scrub(r.Times[i].Note)
	}
	r.WithoutCuDNN = scrub(r.WithoutCuDNN)
	for name, value := range r.Flags {
		r.Flags[name] = scrub(value)
	}
}
