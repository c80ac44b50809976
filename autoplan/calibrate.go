package autoplan

import (
	"math"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/estimate"
	"github.com/deepwell/deepwell/internal/strictjson"
)

// A Measurement is how long the steps of a run took that was predicted.
type Measurement struct {
	Model     string  `json:"model"`
	Card      string  `json:"card"`
	Stack     string  `json:"stack"`
	Precision string  `json:"precision,omitempty"` // if not that of the parameters
	Predicted float64 `json:"predicted"`           // seconds of a step
	Measured  float64 `json:"measured"`            // the median
	Noise     float64 `json:"noise"`               // deviation of the median's logarithm
	Steps     int     `json:"steps"`
}

// A Calibration is measurements to correct predictions by.
type Calibration struct {
	Version int           `json:"version"`
	Runs    []Measurement `json:"runs"`
}

// calibrationVersion is that of the JSON form.
const calibrationVersion = 1

// NewMeasurement takes the seconds of a run's steps. The first tenth, and two at least, warm up.
func NewMeasurement(seconds []float64) (m Measurement, ok bool) {
	list := slices.Clone(seconds[min(len(seconds), max(2, len(seconds)/10)):])
	slices.Sort(list)
	n := len(list)
	if n == 0 || !(list[0] > 0) || math.IsInf(list[n-1], 0) {
		return m, false
	}
	// The quartiles of a normal distribution are 1.349 deviations apart, and a median of n varies
	// by 1.253 of them over the root of n.
	spread := math.Log(list[n*3/4]/list[n/4]) / 1.349
	return Measurement{Measured: list[n/2], Noise: 1.253 * spread / math.Sqrt(float64(n)), Steps: n},
		true
}

// ParseCalibration reads what [Calibration.Marshal] writes.
func ParseCalibration(text []byte, path string) (*Calibration, error) {
	c := &Calibration{}
	err := strictjson.Decode(text, c)
	wrong := slices.ContainsFunc(c.Runs, func(m Measurement) bool {
		return !(m.Predicted > 0) || !(m.Measured > 0) || !(m.Noise >= 0)
	})
	if err != nil || c.Version != calibrationVersion || wrong {
		return nil, diag.New(diag.BadInput, "this is not a calibration of version %d",
			calibrationVersion).At("%s", path).Wrap(err).Try("deepwell plan --calibrate RUN writes one")
	}
	return c, nil
}

// Marshal writes the calibration as JSON.
func (c *Calibration) Marshal() ([]byte, error) {
	c.Version = calibrationVersion
	return strictjson.Encode(c)
}

// A Correction is what measurements say of predictions: these are to be multiplied by Factor, and
// Runs is how many it rests on. The zero value corrects nothing.
type Correction struct {
	Factor float64
	Runs   int
	noise  float64 // variance of the mean of the runs' logarithms, of measuring alone
}

// For gives the correction of a job: from runs of the same model on the same card with the same
// stack.
func (c *Calibration) For(j *Job) Correction {
	if c == nil {
		return Correction{}
	}
	sum, noise, n := 0.0, 0.0, 0
	for _, m := range c.Runs {
		if m.Model == j.Model && m.Card == j.Cluster.Card.Name && m.Stack == j.Profile.Name {
			sum += math.Log(m.Measured / m.Predicted)
			noise += m.Noise * m.Noise
			n++
		}
	}
	if n == 0 {
		return Correction{}
	}
	return Correction{Factor: math.Exp(sum / float64(n)), Runs: n, noise: noise / float64(n*n)}
}

// betweenPlans is the deviation of measured over predicted between plans of one model, with
// constants fitted to the stack: 2.5 % over SimuMax's 43 runs (docs/accuracy.md).
const betweenPlans = 0.0251

// Apply corrects an estimate. Its error has two parts: one that all plans of the model share, c,
// and one of each plan, p, with s² = c² + p² and p of 2.5 % or all of s if that is less. The mean
// of n runs shows c with a variance of e = p²/n and what measuring adds, so that of its logarithm r
// the share w = c²/(c²+e) is taken: times are multiplied by exp(w·r), and the variance that is left
// is (1-w)·c² + p².
func (c Correction) Apply(e *estimate.Estimate) {
	if c.Runs == 0 || e.Step <= 0 || e.High <= e.Step {
		return
	}
	s := math.Log(e.High/e.Step) / ninety
	own := min(s, betweenPlans)
	common := s*s - own*own
	w := 0.0
	if common > 0 {
		w = common / (common + own*own/float64(c.Runs) + c.noise)
	}
	f := math.Exp(w * math.Log(c.Factor))
	left := math.Exp(ninety * math.Sqrt((1-w)*common+own*own))
	for i := range e.Stages {
		t := &e.Stages[i]
		t.Forward, t.Input, t.Weight, t.Send = f*t.Forward, f*t.Input, f*t.Weight, f*t.Send
	}
	p := &e.Parts
	for _, x := range []*float64{&e.Step, &e.Tail, &p.Compute, &p.Attention, &p.Memory, &p.Recompute,
		&p.Quantize, &p.Launch, &p.Tensor, &p.Context, &p.Expert, &p.Pipeline, &p.Bubble, &p.Data,
		&p.Offload, &p.Optimizer, &p.Host} {
		*x *= f
	}
	e.Low, e.High = e.Step/left, e.Step*left
}

// ninety is how many deviations to either side hold nine in ten.
const ninety = 1.645
