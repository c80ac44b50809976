package train

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"testing"

	"go.uber.org/goleak"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/dtype/block"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision/monitor"
)

// onlyDown leaves some layers, of which one linear is quantized: what compiles in the least time,
// and of one layer what TestReports compiled.
func (p *post) onlyDown(layers int) *post {
	p.config.Layers, p.policy.Layers, p.policy.Rules[0].To = int64(layers), layers, layers
	p.policy.Rules[0].Linears, p.sites = []string{"down"}, []string{"block.down.0"}
	return p
}

// An inspected step is an ordinary one, to the last bit: losses, parameters and moments are the
// same.
func TestInspectionChangesNothing(t *testing.T) {
	slowtest.Only(t)
	e := openCPU(t, 2)
	spread := plan.Default()
	spread.Seq, spread.Batch, spread.Cluster, spread.FSDP.Size = 32, 4, "2xcpu", 2
	spread.Types.Params = dtype.BF16
	for _, one := range []struct {
		name, format string
		set          []string
		plan         *plan.Plan
		sites        bool // of which faults are known
	}{
		{name: "one device", format: "mxfp8", sites: true},
		{name: "one device", format: "nvfp4"},
		{name: "two parts", format: "mxfp8", set: []string{"microbatch=2"}},
		{name: "loop", format: "mxfp8", set: []string{"recompute=full"}},
		{name: "loop", format: "nvfp4", set: []string{"recompute=full"}},
		{name: "fsdp", format: "mxfp8", plan: spread},
		{name: "fsdp", format: "nvfp4", plan: spread},
	} {
		if !*watchAll && (one.name != "loop" && one.format == "nvfp4" || one.name == "two parts") {
			continue // minutes of compiling: NVFP4 is inspected in a loop, the rest with -watch.all
		}
		t.Run(one.name+" "+one.format, func(t *testing.T) {
			var states [2]map[string][]byte
			var losses [2][]float64
			for k, every := range []int{0, 1} {
				p, l := newPost(t, e, one.format, "down"), &log{}
				if p.onlyDown(1); one.name == "loop" {
					p.onlyDown(2)
				}
				p.watch = &monitor.Options{Learn: 8, Hold: 12, Healthy: 4, Inspect: every}
				if !one.sites {
					p.sites = nil
				}
				if one.plan != nil {
					how := *one.plan
					how.Precision = one.format
					p.plan = &how
				}
				tr := p.start(t.TempDir(), chain{}, l, append(one.set, "steps=4", "optimizer.warmup=0")...)
				defer tr.Close()
				p.breaks(tr, nil)
				if err := tr.Run(t.Context()); err != nil {
					t.Fatal(err)
				}
				is, err := tr.inspected()
				if is != (every > 0) || err != nil {
					t.Errorf("every %d steps: the last one was inspected: %v; %v", every, is, err)
				}
				if states[k], err = tr.state(t.Context()); err != nil {
					t.Fatal(err)
				}
				losses[k] = l.losses()
			}
			if len(losses[0]) != 4 || fmt.Sprint(losses[0]) != fmt.Sprint(losses[1]) {
				t.Errorf("losses %v, inspected %v", losses[0], losses[1])
			}
			for name, b := range states[0] {
				if !bytes.Equal(b, states[1][name]) {
					t.Errorf("%s differs", name)
				}
			}
		})
	}
}

// What inspections tell of a run in which nothing is wrong lies where such runs lie, and raises no
// alarm.
func TestInspectionsOfCleanRuns(t *testing.T) {
	for _, format := range []string{"mxfp8", "nvfp4"} {
		if format == "nvfp4" && !slowtest.Enabled {
			continue
		}
		t.Run(format, func(t *testing.T) {
			p, l, steps := newPost(t, openCPU(t, 1), format, "q", "down"), &log{}, 64
			p.watch = &monitor.Options{Settle: 30, Learn: 8, Hold: 12, Healthy: 4, Inspect: 3}
			if slowtest.Enabled {
				steps = 202
			} else {
				p.onlyDown(1)
			}
			tr := p.start(t.TempDir(), chain{}, l, fmt.Sprintf("steps=%d", steps),
				"optimizer.schedule=cosine")
			defer tr.Close()
			p.breaks(tr, nil)
			if err := tr.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
			l.noAlarms(t)
			if is, err := tr.inspected(); !is || err != nil {
				t.Fatal("the last step was not inspected: ", err)
			}
			seen := 0
			for _, one := range tr.sample().Linears {
				if len(one.Operands) == 0 {
					continue
				}
				t.Logf("layer %d, %s: gradient to noise %.1f, %d of %d zero", one.Layer, one.Name,
					one.GradToNoise, one.Zeros, one.Count)
				if !(one.GradToNoise > map[string]float64{"mxfp8": 12, "nvfp4": 3}[format]) {
					t.Errorf("layer %d, %s: gradient to noise %v", one.Layer, one.Name, one.GradToNoise)
				}
				if one.Count != 64*64 && one.Count != 64*128 || one.Zeros > one.Count/1000 {
					t.Errorf("layer %d, %s: %d of %d zero", one.Layer, one.Name, one.Zeros, one.Count)
				}
				for _, o := range one.Operands {
					seen++
					t.Logf("%5s: SNR %.1f dB, saturated %.3f %%, underflow %.3f %%, range %.1f", o.Name, o.SNR,
						100*o.Saturated, 100*o.Underflow, o.Range)
					healthy := o.SNR > 29.5 && o.SNR < 33 && o.Saturated == 0 && o.Underflow < 0.03
					if format == "nvfp4" {
						healthy = o.SNR > 15 && o.SNR < 27 && o.Saturated < 0.08 && o.Underflow < 0.65
					}
					if !healthy || !(o.Range > 2 && o.Range < 16) {
						t.Errorf("layer %d, %s: %+v", one.Layer, one.Name, o)
					}
				}
			}
			if seen == 0 {
				t.Error("nothing was measured")
			}
		})
	}
}

// Gradients of which one element of each block, either way, keeps its size while the others vanish
// beside it are found by an inspection, and by nothing else: scales are what they were, and norms
// nearly so.
func TestInspectionFindsUnderflow(t *testing.T) {
	e := openCPU(t, 1)
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	const site, steps, bad = "block.down.0", 61, 56
	for _, every := range []int{0, 3} {
		p, l := newPost(t, e, "mxfp8", "down").onlyDown(1), &log{}
		p.watch = &monitor.Options{Settle: 30, Learn: 8, Hold: 12, Healthy: 4, Inspect: every}
		tr := p.start(t.TempDir(), chain{}, l, fmt.Sprintf("steps=%d", steps))
		defer tr.Close()
		tr.intercept(func(step int) error {
			if step != bad {
				return nil
			}
			return tr.change(faultDY+site, func(b []byte) {
				for i := 0; i < len(b); i += 4 {
					if token, channel := i/4/64, i/4%64; (token+channel)%32 != 5 {
						repeat(b[i:i+4], 1e-3) // applied twice
					}
				}
			})
		}, func(int) error { return nil })
		if err := tr.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		falls := map[string]bool{}
		for _, one := range l.list {
			d, ok := one.(event.Precision)
			if !ok {
				continue
			}
			t.Log(d.Text)
			if d.What != "fall" || d.Linear != "down" || d.Step > bad+soon {
				t.Errorf("that is late, or something else")
			}
			falls[d.Product] = true
		}
		if want := map[string]bool{"dgrad": true, "wgrad": true}; every == 0 && len(falls) > 0 ||
			every > 0 && !maps.Equal(falls, want) {
			t.Errorf("inspected every %d steps: %v fell", every, falls)
		}
	}
}

// The error that is expected of a weight's gradient is about the one that it has.
func TestNoiseIsThatOfTheProduct(t *testing.T) {
	const tokens, in, out = 512, 64, 96
	r := rand.New(rand.NewPCG(7, 9))
	argument := func(n int) (x, off []float64, sums rounding) {
		src := make([]float32, n*tokens) // tokens last
		for i := range src {
			src[i] = float32(r.NormFloat64() * math.Exp(r.NormFloat64()))
		}
		codes, scales, back := make([]byte, len(src)), make([]byte, len(src)/32), make([]float32, len(src))
		if err := block.MXFP8(codes, scales, src); err != nil {
			t.Fatal(err)
		}
		if err := block.FromMXFP8(back, codes, scales); err != nil {
			t.Fatal(err)
		}
		for i, v := range src {
			d := float64(back[i]) - float64(v)
			x, off = append(x, float64(v)), append(off, d)
			sums.power, sums.noise = sums.power+float64(v)*float64(v), sums.noise+d*d
		}
		sums.length = tokens
		return x, off, sums
	}
	x, dx, xs := argument(in)
	y, dy, ys := argument(out)
	square := 0.0
	for i := range in {
		for o := range out {
			sum := 0.0
			for k := range tokens {
				a, b := i*tokens+k, o*tokens+k
				sum += (x[a]+dx[a])*(y[b]+dy[b]) - x[a]*y[b]
			}
			square += sum * sum
		}
	}
	if got, want := noise(&xs, &ys), math.Sqrt(square); math.Abs(got/want-1) > 0.05 {
		t.Errorf("%v are expected, and it is %v", got, want)
	}
}
