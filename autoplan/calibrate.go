package autoplan

import (
	"math"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/estimate"
	"github.com/deepwell/deepwell/internal/strictjson"
)

// A Measurement is the predicted and the measured step time of one run.
type Measurement struct {
	Model     string  `json:"model"`
	GPU       string  `json:"card"`
	Stack     string  `json:"stack"`
	Precision string  `json:"precision,omitempty"` // if it differs from the parameters' type
	Predicted float64 `json:"predicted"`           // seconds of a step
	Measured  float64 `json:"measured"`            // median seconds of a step
	Noise     float64 `json:"noise"`               // standard error of ln(Measured)
	Steps     int     `json:"steps"`
}

// A Calibration is a list of measurements that correct predictions. Its JSON form is
// calibration.json in a run's folder.
type Calibration struct {
	Version int           `json:"version"`
	Runs    []Measurement `json:"runs"`
}

// calibrationVersion is the version of the JSON form.
const calibrationVersion = 1

// NewMeasurement summarizes the seconds of a run's steps. The first tenth, at least two steps, is
// warm-up and dropped. ok is false if too few steps remain.
func NewMeasurement(seconds []float64) (m Measurement, ok bool) {
	list := slices.Clone(seconds[min(len(seconds), max(2, len(seconds)/10)):])
	slices.Sort(list)
	n := len(list)
	if n == 0 || !(list[0] > 0) || math.IsInf(list[n-1], 0) {
		return m, false
	}
	// The quartiles of a normal distribution are 1.349 standard deviations apart, and the median of n
	// samples has a standard error of 1.253 σ/√n.
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

// A Correction multiplies predicted times by Factor, which rests on Runs measurements. The zero
// value corrects nothing.
type Correction struct {
	Factor float64
	Runs   int
	noise  float64 // variance of the mean log ratio due to measurement alone
}

// For returns the correction for a job, from runs of the same model on the same GPU with the same
// stack.
func (c *Calibration) For(j *Job) Correction {
	if c == nil {
		return Correction{}
	}
	sum, noise, n := 0.0, 0.0, 0
	for _, m := range c.Runs {
		if m.Model == j.Model && m.GPU == j.Cluster.GPU.Name && m.Stack == j.Profile.Name {
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

// betweenPlans is the standard deviation of ln(measured/predicted) between plans of one model,
// once constants are fitted to the stack: 2.5 % over SimuMax's 43 runs (docs/accuracy.md).
const betweenPlans = 0.0251

// Apply corrects an estimate. The log error of a prediction has a component c shared by all plans
// of the model and a component p of each plan: s² = c² + p², p being 2.5 %, or s if less.
// The mean log ratio r of n runs estimates c with variance e = p²/n plus measurement noise. The
// shrunk estimate uses the share w = c²/(c²+e) of r: times are multiplied by exp(w·r), and the
// remaining variance is (1-w)·c² + p².
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

// ninety is the number of standard deviations to either side that hold 90 % of a normal
// distribution.
const ninety = 1.645
