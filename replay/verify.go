package replay

import (
	"cmp"
	"context"
	"encoding/json"
	"math"
	"slices"
	"time"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

// An Outcome is what one program's replay showed.
type Outcome struct {
	Kind    step.Kind `json:"kind"`
	Program string    `json:"program"`
	Twins   []string  `json:"twins,omitempty"` // programs with the same text
	Devices int       `json:"devices"`
	// Wide says that bf16 was held as f32 in both programs.
	Wide bool `json:"wide"`
	// Worst is the result array that is farthest from the reference, and Apart how far, as
	// [Difference].Relative; [math.MaxFloat64] if an element is NaN. Bound is how far it may be, and
	// Beyond are the arrays that are farther, the worst first.
	Worst  string       `json:"worst,omitempty"`
	Apart  float64      `json:"apart"`
	Bound  float64      `json:"bound"`
	Why    string       `json:"why"` // it is that far
	Beyond []Difference `json:"beyond,omitempty"`
	Arrays int          `json:"arrays"`
	Exact  int          `json:"exact"` // arrays of equal bits
	// Zeros are arrays that are zero in both programs, and show nothing.
	Zeros []string `json:"zeros,omitempty"`
	// Noise are gradients that are zero but for rounding, compared with the size of others.
	Noise       []string `json:"noise,omitempty"`
	Conventions []string `json:"conventions"`     // that the replay trusted
	Compile     float64  `json:"compile_seconds"` // for the GPU
	Cached      bool     `json:"compile_cached"`  // the cache had the program
	Replay      float64  `json:"replay_seconds"`  // all the rest
	Census      Census   `json:"-"`
	// Calls are the custom calls of a program that ran on a GPU.
	Calls []string `json:"calls,omitempty"`
}

// MarshalJSON writes what a reader of [Outcome].Beyond needs. JSON has no infinity.
func (d Difference) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Name     string  `json:"name"`
		Apart    float64 `json:"apart"`
		Unequal  int64   `json:"unequal_elements"`
		Elements int64   `json:"elements"`
	}{d.Name, min(d.Relative, math.MaxFloat64), d.Elements - d.Equal, d.Elements})
}

// Verify compiles a pair's program for its cluster and compares its replay with the reference, in
// the mode that shows most. Memory that the program allocates holds NaN at first.
func (r *Runner) Verify(ctx context.Context, p Pair) (*Outcome, error) {
	start := time.Now()
	report, format, code, err := r.Optimized(ctx, p.GPU, p.Cluster)
	if err != nil {
		return nil, err
	}
	out := &Outcome{Kind: p.Kind, Program: p.GPU.Name, Devices: len(p.GPU.Devices), Wide: p.Wide(),
		Compile: time.Since(start).Seconds(), Cached: report.Cached}
	start = time.Now()
	if out.Census, err = CensusOf(format, code, p.GPU.Mesh); err != nil {
		return nil, err
	}
	m, err := Rewrite(format, code, Options{Wide: out.Wide, Fill: NaNs})
	if err != nil {
		return nil, err
	}
	results, err := r.Run(ctx, p, out.Wide, m)
	if err != nil {
		return nil, err
	}
	out.Replay = time.Since(start).Seconds()
	out.Conventions = append([]string{}, m.Conventions...) // JSON has a list, be it empty
	out.judge(p, p.Bound(out.Wide), results[0])
	return out, nil
}

// judge compares a result with a bound.
func (o *Outcome) judge(p Pair, bound Bound, r *Result) {
	far := r.Beyond(bound)
	worst := r.Worst()
	if worst.Relative == 0 && len(far) > 0 { // the same numbers, not the same bits
		worst = far[0]
	}
	if o.Apart = min(worst.Relative, math.MaxFloat64); o.Apart > 0 || len(far) > 0 {
		o.Worst = worst.Name
	}
	o.Bound, o.Why = bound.Limit, bound.Why
	o.Arrays, o.Exact = len(r.Arrays), r.Exact()
	lists.Sort(far, func(a, b Difference) int {
		return cmp.Or(cmp.Compare(b.Relative, a.Relative), cmp.Compare(a.Equal, b.Equal))
	})
	o.Beyond = far
	for i, a := range p.Reference.Results {
		if r.Arrays[i].Norm == 0 && p.Kind != step.Zero && a.Role != program.Stat {
			o.Zeros = append(o.Zeros, a.Name)
		}
		if r.Arrays[i].Against > 0 && r.Arrays[i].Norm > 0 {
			o.Noise = append(o.Noise, a.Name)
		}
	}
	slices.Sort(o.Zeros)
	slices.Sort(o.Noise)
}
