package monitor_test

import (
	"math"
	"math/rand/v2"
	"strings"

	"github.com/deepwell/deepwell/precision/monitor"
)

// A run is a synthetic one: what it reports moves as clean runs do. Each number is a level, a walk that is pulled back to it, and noise of its own in each step,
// with the spreads below.
type run struct {
	rand    *rand.Rand
	layers  int
	formats map[string]string // layer/linear/product → format
	walks   map[string]*float64
	step    int
	names   []string
}

var linears = []string{"block.q", "block.gate", "block.down"}

func newRun(seed uint64, layers int, format string) *run {
	r := &run{rand: rand.New(rand.NewPCG(seed, 7)), layers: layers, names: linears,
		formats: map[string]string{}, walks: map[string]*float64{}}
	for layer := range layers {
		for _, name := range linears {
			for _, p := range []string{"fprop", "dgrad", "wgrad"} {
				r.formats[key(layer, name, p)] = format
			}
		}
	}
	return r
}

func key(layer int, name, product string) string {
	return strings.Join([]string{string(rune('0' + layer)), name, product}, "/")
}

// around is a number about 0 with a standard deviation: half of its variance is a walk whose memory
// is some 20 steps, half is new in each step.
func (r *run) around(name string, sd float64) float64 {
	w := r.walks[name]
	if w == nil {
		w = new(float64)
		*w = r.rand.NormFloat64()
		r.walks[name] = w
	}
	const stays = 0.95
	*w = stays**w + math.Sqrt(1-stays*stays)*r.rand.NormFloat64()
	return sd * math.Sqrt(0.5) * (*w + r.rand.NormFloat64())
}

// next is the sample of the next step.
func (r *run) next() *monitor.Sample {
	r.step++
	fall := math.Exp(-float64(r.step) / 80)
	s := &monitor.Sample{Step: r.step, Finite: true,
		Loss:     (2.5 + 3*fall) * math.Exp(r.around("loss", 0.03)), // noise of batches 6–8 % at most
		GradNorm: (0.5 + 3*fall) * math.Exp(r.around("norm", 0.25))}
	for layer := range r.layers {
		for _, name := range r.names {
			s.Linears = append(s.Linears, r.linear(layer, name))
		}
	}
	return s
}

func (r *run) linear(layer int, name string) monitor.Linear {
	l := monitor.Unmeasured(layer, name, "x", "w", "dy", "xT", "wT", "dyT")
	at := key(layer, name, "")
	l.Fprop, l.Dgrad, l.Wgrad = r.formats[at+"fprop"], r.formats[at+"dgrad"], r.formats[at+"wgrad"]
	early := math.Exp(-float64(r.step) / 20) // the first steps move fast
	l.Norm = 0.1 * (1 + 30*early) * math.Exp(r.around(at+"norm", 0.4))
	l.Count = 1 << 16
	if l.Wgrad == "nvfp4" {
		l.Zeros = r.rand.Int64N(5)                                                                     // ≤ 0.006 %
		l.GradToNoise = (6.2 + 16*math.Exp(-float64(r.step)/150)) * math.Exp(r.around(at+"g2n", 0.06)) // 5.4–7.2 at last
	} else {
		l.GradToNoise = 40 * math.Exp(r.around(at+"g2n", 0.15)) // 23.5 … 142
	}
	if l.Fprop != "bf16" {
		base := map[string]float64{"mxfp8": 0.025, "nvfp4": 0.1}
		l.FpropError = base[l.Fprop] * math.Exp(r.around(at+"f", 0.1))
		l.DgradError = base[l.Dgrad] * math.Exp(r.around(at+"d", 0.1))
		l.WgradError = base[l.Wgrad] * math.Exp(r.around(at+"w", 0.1))
	}
	for i := range l.Operands {
		r.operand(&l, &l.Operands[i], at, early)
	}
	return l
}

func (r *run) operand(l *monitor.Linear, o *monitor.Operand, at string, early float64) {
	base := strings.TrimSuffix(o.Name, "T")
	format := map[string]string{"x": l.Fprop, "w": l.Fprop, "dy": l.Dgrad, "xT": l.Wgrad, "wT": l.Dgrad,
		"dyT": l.Wgrad}[o.Name]
	at += base
	if o.Name != base {
		o.Amax, o.Spread = math.NaN(), math.NaN() // the other copy has the tensor's
	} else {
		// Largest of clean runs over the median: 1.6, 1.14, 3.8, taken as three standard deviations.
		sd := map[string]float64{"x": 0.16, "w": 0.02, "dy": 0.45}[base]
		o.Amax = (1 + 4*early) * math.Exp(r.around(at+"amax", sd))
		if base == "w" {
			o.Amax *= 1 + 0.0003*float64(r.step) // 14 % in 450 steps
		}
		sd = map[string]float64{"x": 0.6, "w": 0.1, "dy": 0.8}[base] // 1.9, 0.35, 2.6
		o.Spread = 5 + r.around(at+"spread", sd)
	}
	if format == "bf16" {
		return
	}
	at += o.Name
	o.Range = 8 + r.around(at+"range", 0.5)
	wide := l.Name == "block.down" && o.Name == "x" || l.Name == "block.gate" && o.Name == "dy"
	switch {
	case format == "mxfp8":
		o.Saturated, o.SNR = 0, 31.5+r.around(at+"snr", 0.12)
		o.Underflow = 0.0002 * math.Exp(r.around(at+"under", 0.5))
		if base == "w" {
			o.SNR = 31.55 + r.around(at+"snr", 0.04)
		}
	case base == "w":
		o.Saturated, o.SNR = 0.0025+r.around(at+"sat", 0.0002), 19.05+r.around(at+"snr", 0.04)
		o.Underflow = 0.065 + r.around(at+"under", 0.004)
	default:
		o.Saturated, o.SNR = 0.043+r.around(at+"sat", 0.004), 21+r.around(at+"snr", 0.3)
		if base == "dy" {
			o.SNR = 17.2 + r.around(at+"snr", 0.12)
		}
		o.Underflow = 0.065 + r.around(at+"under", 0.005)
		if wide {
			o.Underflow = 0.33 + r.around(at+"under", 0.06) // 29 … 53
		}
	}
	o.Made = r.rand.Uint64()
	o.Used = o.Made
}

// apply does what decisions say.
func (r *run) apply(list []monitor.Decision) {
	for _, d := range list {
		if d.Kind == monitor.Fall || d.Kind == monitor.Return {
			r.formats[key(d.Layer, d.Linear, d.GEMM)] = d.To
		}
	}
}
