package monitor_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/precision/monitor"
)

// trained are the options of a run that goes on from a trained state.
func trained() monitor.Options {
	o := monitor.Defaults()
	o.Settle = 0
	return o
}

// 2,000 clean steps from scratch raise nothing, every one of them monitored.
func TestCleanRunsRaiseNothing(t *testing.T) {
	seeds, steps := map[string]int{"mxfp8": 2, "nvfp4": 2, "bf16": 1}, 2000
	if testing.Short() {
		steps = 200
	}
	for _, format := range []string{"mxfp8", "nvfp4", "bf16"} {
		for seed := range seeds[format] {
			w, r := monitor.New(monitor.Defaults()), newRun(uint64(seed), 2, format)
			for range steps {
				for _, d := range w.Observe(r.next()) {
					t.Errorf("%s, seed %d: %s", format, seed, d)
				}
			}
		}
	}
}

// Short clean runs with any seed and any distance between monitored steps raise nothing either.
func TestCleanRunsOfManySeeds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := newRun(rapid.Uint64().Draw(t, "seed"), 1, rapid.SampledFrom([]string{"mxfp8", "nvfp4"}).Draw(t, "format"))
		every := rapid.IntRange(1, 25).Draw(t, "every")
		w := monitor.New(monitor.Defaults())
		for step := range 150 {
			s := r.next()
			if step%every != 0 {
				s.Linears = nil
			}
			if list := w.Observe(s); len(list) > 0 {
				t.Fatal(list)
			}
		}
	})
}

// A fault changes the samples of a run: k counts the steps since it began, at is the linear layer
// it happens to.
type fault struct {
	name, format string
	change       func(s *monitor.Sample, at *monitor.Linear, k int)
	gemms        string // that fall, in order; "" for none
	refused      bool
	within       int // steps until the first decision, where it is not 3: the level is reached later
}

func op(l *monitor.Linear, name string) *monitor.Operand {
	return &l.Operands[slices.IndexFunc(l.Operands, func(o monitor.Operand) bool { return o.Name == name })]
}

// outlier is a channel of x that grows by √10 in each step to 10,000 times: at 100 times amax is
// 5 to 6 times its median and the spread 2.4 more.
func outlier(_ *monitor.Sample, l *monitor.Linear, k int) {
	grown := max(1, min(math.Pow(10, float64(k)/2), 1e4)/18)
	op(l, "x").Amax *= grown
	op(l, "x").Spread += math.Log2(grown)
	op(l, "x").SNR += 4
	l.Norm *= grown
}

func shrink(by float64) func(*monitor.Sample, *monitor.Linear, int) {
	return func(_ *monitor.Sample, l *monitor.Linear, _ int) {
		l.Norm *= by
		op(l, "dy").Amax *= by
	}
}

// zeros is a gradient at the end of what f32 holds; underflow reads 0.
func zeros(_ *monitor.Sample, l *monitor.Linear, _ int) {
	l.Norm, l.Zeros = 0, l.Count
	op(l, "dy").Amax = 1e-38
	op(l, "dy").Underflow, op(l, "dyT").Underflow = 0, 0
}

func underflow(name string, levels ...float64) func(*monitor.Sample, *monitor.Linear, int) {
	return func(_ *monitor.Sample, l *monitor.Linear, k int) {
		op(l, name).Underflow = levels[min(k, len(levels)-1)]
	}
}

func snr(level float64, names ...string) func(*monitor.Sample, *monitor.Linear, int) {
	return func(_ *monitor.Sample, l *monitor.Linear, _ int) {
		for _, name := range names {
			op(l, name).SNR = level
		}
	}
}

// poisonForward is a NaN in an input: the linear layer and all after it have it, the loss, and
// every gradient.
func poisonForward(s *monitor.Sample, l *monitor.Linear, k int) {
	if k > 0 {
		return
	}
	s.Loss, s.GradNorm, s.Finite = math.NaN(), math.NaN(), false
	found := false
	for i := range s.Linears {
		one := &s.Linears[i]
		found = found || one == l
		one.Norm, one.NonFinite = math.NaN(), one.Count
		op(one, "dy").NonFinite = 512
		if found {
			op(one, "x").NonFinite, op(one, "x").SNR = 1, math.NaN()
		}
	}
}

// poisonBackward is a NaN in a gradient: the loss is as it was.
func poisonBackward(s *monitor.Sample, l *monitor.Linear, k int) {
	if k > 0 {
		return
	}
	s.GradNorm, s.Finite = math.NaN(), false
	for i := range s.Linears {
		one := &s.Linears[i]
		one.Norm, one.NonFinite = math.NaN(), one.Count
		op(one, "dy").NonFinite, op(one, "dy").SNR = 512, math.NaN()
		if one == l {
			op(one, "dy").NonFinite = 1
			return
		}
	}
}

// poisonWeight is a NaN in the gradient of one weight, and nowhere else.
func poisonWeight(s *monitor.Sample, l *monitor.Linear, k int) {
	if k == 0 {
		s.GradNorm, s.Finite = math.NaN(), false
		l.Norm, l.NonFinite = math.NaN(), 3
	}
}

// poisonBatch is a batch of noise, twice: the whole model reacts.
func poisonBatch(s *monitor.Sample, _ *monitor.Linear, k int) {
	if k > 1 {
		return
	}
	s.Loss, s.GradNorm = 2.3*s.Loss, 30*s.GradNorm
	for i := range s.Linears {
		s.Linears[i].Norm *= 30
		op(&s.Linears[i], "dy").Amax *= 30
		op(&s.Linears[i], "x").Amax *= 5
	}
}

func flip(name string) func(*monitor.Sample, *monitor.Linear, int) {
	return func(_ *monitor.Sample, l *monitor.Linear, k int) {
		if k == 0 {
			op(l, name).Used ^= 1 << 9
		}
	}
}

// Faults at the levels at which they were seen in runs, and parts of the recipes switched off.
var faults = []fault{
	{"a growing channel of x", "mxfp8", outlier, "fprop wgrad", false, 6},
	{"a growing channel of x", "nvfp4", outlier, "fprop wgrad", false, 6},
	{"a gradient of a thousandth", "mxfp8", shrink(1e-3), "dgrad wgrad", false, 0},
	{"a gradient of a thousandth", "nvfp4", shrink(1e-3), "dgrad wgrad", false, 0},
	{"a gradient of 1e-20", "nvfp4", shrink(1e-20), "dgrad wgrad", false, 0},
	{"a gradient at the end of f32", "mxfp8", zeros, "dgrad wgrad", false, 0},
	{"a gradient at the end of f32", "nvfp4", zeros, "dgrad wgrad", false, 0},
	{"a growing channel in each block of dy", "nvfp4", underflow("dy", .07, .14, .27, .38, .50), "dgrad", false, 4},
	{"a growing channel in each block of dy", "mxfp8", underflow("dy", .00003, .0023, .0075, .018), "dgrad", false, 4},
	{"a NaN in x", "mxfp8", poisonForward, "fprop wgrad", true, 0},
	{"a NaN in x", "nvfp4", poisonForward, "fprop wgrad", true, 0},
	{"a NaN in dy", "mxfp8", poisonBackward, "dgrad wgrad", true, 0},
	{"a NaN in dy", "nvfp4", poisonBackward, "dgrad wgrad", true, 0},
	{"a NaN in dw", "mxfp8", poisonWeight, "wgrad", true, 0},
	{"a scale of w twice", "mxfp8", snr(29.5, "w"), "fprop", false, 0},
	{"a scale of w four times", "mxfp8", snr(23.5, "w"), "fprop", false, 0},
	{"a scale of w four times", "nvfp4", snr(18.4, "w"), "fprop", false, 0},
	{"a scale of w 16 times", "nvfp4", snr(13.3, "wT"), "dgrad", false, 0},
	{"a scale of w 256 times", "mxfp8", snr(-14, "w"), "fprop", false, 0},
	{"a scale of w 256 times", "nvfp4", snr(-10, "w"), "fprop", false, 0},
	{"a scale of w 2^64 times, for a step", "mxfp8", func(s *monitor.Sample, l *monitor.Linear, k int) {
		if k == 0 {
			s.Loss *= 2
			op(l, "w").SNR, l.FpropError = -350, math.Inf(1)
		}
	}, "fprop", true, 0},
	{"a scale of w half", "mxfp8", flip("w"), "fprop", true, 0},
	{"a scale of w half", "nvfp4", flip("w"), "fprop", true, 0},
	{"a scale of dyᵀ half", "nvfp4", flip("dyT"), "wgrad", true, 0},
	{"a poisoned batch", "mxfp8", poisonBatch, "", true, 0},
	{"a poisoned batch", "nvfp4", poisonBatch, "", true, 0},
	{"scales rounded down", "mxfp8", func(_ *monitor.Sample, l *monitor.Linear, _ int) {
		op(l, "x").Saturated, op(l, "xT").Saturated = 0.007, 0.008
	}, "fprop wgrad", false, 0},
	{"gradients in E5M2", "mxfp8", snr(25.6, "dy", "dyT"), "dgrad wgrad", false, 0},
	{"no Hadamard transform", "nvfp4", underflow("dyT", .23), "wgrad", false, 0},
	{"gradients that are noise", "nvfp4", func(_ *monitor.Sample, l *monitor.Linear, _ int) { l.GradToNoise = 1.6 }, "wgrad", false, 0},
	{"a wrong forward product", "mxfp8", func(_ *monitor.Sample, l *monitor.Linear, _ int) { l.FpropError = 0.09 }, "fprop", false, 0},
	{"a weight that runs away", "nvfp4", func(_ *monitor.Sample, l *monitor.Linear, _ int) { op(l, "w").Amax *= 2 }, "fprop dgrad", false, 0},
	{"zeros of a tenth in dw", "nvfp4", func(_ *monitor.Sample, l *monitor.Linear, _ int) { l.Zeros = l.Count / 10 }, "wgrad", false, 0},
}

// Every fault is found within three steps of its level, in the right place and nowhere else.
func TestFaults(t *testing.T) {
	for _, f := range faults {
		t.Run(f.format+" "+f.name, func(t *testing.T) {
			w, r := monitor.New(trained()), newRun(11, 4, f.format)
			r.step = 1000
			for range 40 {
				r.apply(w.Observe(r.next()))
			}
			within := max(f.within, 3)
			var fell []string
			refused := false
			for k := range within + 6 {
				s := r.next()
				at := &s.Linears[2*len(linears)+2] // block.down of layer 2
				f.change(s, at, k)
				list := w.Observe(s)
				for _, d := range list {
					t.Log(d)
					wellFormed(t, d)
					late := k >= within && len(fell) == 0
					wrong := d.Linear != "" && (d.Layer != 2 || d.Linear != "block.down")
					if late || wrong || d.Kind == monitor.Warn || d.Kind == monitor.Return {
						t.Errorf("step %d of the fault: %s", k, d)
					}
					refused = refused || d.Kind == monitor.Refuse
					if d.Kind == monitor.Fall && !slices.Contains(fell, d.GEMM) {
						fell = append(fell, d.GEMM)
					}
				}
				r.apply(list)
			}
			slices.Sort(fell)
			want := strings.Fields(f.gemms)
			slices.Sort(want)
			if !slices.Equal(fell, want) || refused != f.refused {
				t.Errorf("fell %v, refused %v", fell, refused)
			}
		})
	}
}

// wellFormed checks that a decision has its numbers, that JSON can carry it, and that it is one line.
func wellFormed(t interface{ Errorf(string, ...any) }, d monitor.Decision) {
	none := d.Value == 0 && d.Bound == 0 && d.Usual == 0 && d.Kind != monitor.Return // to what is 0 in health
	if d.Signal == "" || none || strings.Contains(d.String(), "\n") ||
		!strings.Contains(d.String(), d.Signal) {
		t.Errorf("a decision without numbers: %+v", d)
	}
	if _, err := json.Marshal(d); err != nil {
		t.Errorf("%+v: %v", d, err)
	}
	moves := d.Kind == monitor.Fall || d.Kind == monitor.Return
	if moves != (d.GEMM != "" && d.From != "" && d.To != "" && d.From != d.To) {
		t.Errorf("a decision that moves nothing: %+v", d)
	}
}

// settled is a watch that has seen clean steps of a run in MXFP8, and the run.
func settled() (*monitor.Monitor, *run) {
	w, r := monitor.New(trained()), newRun(11, 4, "mxfp8")
	r.step = 1000
	for range 40 {
		r.apply(w.Observe(r.next()))
	}
	return w, r
}

// What was strange before the gradient leapt is why it did: in a run of a small model an outlier
// was refused as a poisoned batch when it should have fallen.
func TestStrangeBeforeASpike(t *testing.T) {
	w, r := settled()
	var kinds []monitor.Kind
	for k := range 2 {
		s := r.next()
		op(&s.Linears[2], "x").Amax *= 10
		if k == 1 {
			s.GradNorm *= 50
		}
		for _, d := range w.Observe(s) {
			t.Log(d)
			kinds = append(kinds, d.Kind)
		}
	}
	if !slices.Equal(kinds, []monitor.Kind{monitor.Refuse, monitor.Fall, monitor.Fall}) {
		t.Errorf("decisions %q", kinds)
	}
}

// A gradient that grew for a while, and then is what it was, is no fault: its growth is not learned
// as fast as a mean would.
func TestGradientsComeBack(t *testing.T) {
	w, r := settled()
	for k := range 24 {
		s := r.next()
		if k < 6 {
			s.Linears[2].Norm *= math.Pow(10, float64(k)/4)
		}
		for _, d := range w.Observe(s) {
			if k > 7 {
				t.Errorf("step %d: %s", k, d)
			}
		}
	}
}

// The largest of what the gradient of a weight reads is another number in another format.
func TestLargestOfOtherFormats(t *testing.T) {
	w, r := settled()
	for k := range 60 {
		s := r.next()
		l := &s.Linears[2]
		if op(l, "xT").Amax = 0.7; k >= 30 {
			l.Wgrad, op(l, "xT").Amax = "nvfp4", 3.5
		}
		for _, d := range w.Observe(s) {
			if d.Signal == "xT amax" {
				t.Errorf("step %d: %s", k, d)
			}
		}
	}
}

// In the first steps of a run, which move fast, only what is proof by itself is acted on.
func TestSettling(t *testing.T) {
	w, r := monitor.New(monitor.Defaults()), newRun(3, 1, "mxfp8")
	for range 20 {
		s := r.next()
		op(&s.Linears[0], "x").Amax *= float64(s.Step * s.Step)
		op(&s.Linears[0], "w").SNR = 12
		if list := w.Observe(s); len(list) > 0 {
			t.Fatal(list)
		}
	}
	s := r.next()
	op(&s.Linears[0], "x").Saturated = 0.001
	if list := w.Observe(s); len(list) != 1 || list[0].GEMM != "fprop" || list[0].To != "bf16" {
		t.Fatal(list)
	}
	s = r.next()
	s.GradNorm = math.Inf(1)
	if list := w.Observe(s); len(list) != 1 || list[0].Kind != monitor.Refuse {
		t.Fatal(list)
	}
}

// A product goes down the ladder, stays for its time, comes back up rung by rung, and waits twice
// as long after a relapse.
func TestHysteresis(t *testing.T) {
	o := trained()
	w, r := monitor.New(o), newRun(5, 1, "nvfp4")
	run := func(steps int, x float64) (moves []string) {
		for range steps {
			s := r.next()
			op(&s.Linears[0], "x").Amax *= x
			list := w.Observe(s)
			r.apply(list)
			for _, d := range list {
				wellFormed(t, d)
				if d.GEMM == "fprop" {
					moves = append(moves, fmt.Sprintf("%d %s %s", d.Step, d.Kind, d.To))
				}
			}
		}
		return moves
	}
	expect := func(got []string, want ...string) {
		t.Helper()
		if !slices.Equal(got, want) {
			t.Errorf("%q, not %q", got, want)
		}
	}
	expect(run(50, 1))
	expect(run(5, 9), "52 fall mxfp8")    // more than 4 times: one rung
	expect(run(5, 100), "56 fall bf16")   // and 16 times: the next; it has been strange for long
	expect(run(95, 1))                    // steps 61 to 155
	expect(run(1, 1), "156 return mxfp8") // 100 after the fall
	expect(run(99, 1))
	expect(run(1, 1), "256 return nvfp4")
	expect(run(4, 9), "258 fall mxfp8") // a relapse: 200 steps
	expect(run(197, 1))
	expect(run(1, 1), "458 return nvfp4")
	if n := len(w.Fallen()); n != 0 {
		// wgrad reads x too, and did the same
		t.Errorf("%d GEMMs are still down: %v", n, w.Fallen())
	}
}

// What stays strange is what is usual after a time, and the product returns.
func TestNewLevelIsLearned(t *testing.T) {
	w, r := monitor.New(trained()), newRun(6, 1, "mxfp8")
	var returned int
	for step := range 400 {
		s := r.next()
		if step >= 50 {
			op(&s.Linears[0], "x").Amax *= 15
		}
		list := w.Observe(s)
		r.apply(list)
		for _, d := range list {
			if d.Kind == monitor.Return && returned == 0 {
				returned = d.Step
			}
		}
	}
	// It fell at 52, became usual at 252, and then had to be learned and healthy.
	if returned < 252 || returned > 270 || len(w.Fallen()) != 0 {
		t.Errorf("returned at %d, %v", returned, w.Fallen())
	}
}

// A run that takes some steps to switch gets no second decision, and one that never does gets another
// when the time of the fall is over.
func TestSlowSwitch(t *testing.T) {
	w, r := monitor.New(trained()), newRun(8, 1, "nvfp4")
	decisions := 0
	for step := range 180 {
		s := r.next()
		if step >= 40 {
			op(&s.Linears[1], "dy").Underflow = 0.9
			op(&s.Linears[1], "dyT").Underflow = 0.05
		}
		for _, d := range w.Observe(s) {
			if d.Kind != monitor.Fall || d.GEMM != "dgrad" {
				t.Error(d)
			}
			decisions++
		}
	}
	if decisions != 2 {
		t.Errorf("%d decisions", decisions)
	}
}

// Where there is nothing to fall back from, there is a warning, once.
func TestWarnsInBF16(t *testing.T) {
	w, r := monitor.New(trained()), newRun(9, 1, "bf16")
	var list []monitor.Decision
	for step := range 80 {
		s := r.next()
		if step >= 40 {
			s.Linears[0].Norm *= 100
		}
		list = append(list, w.Observe(s)...)
	}
	if len(list) != 1 || list[0].Kind != monitor.Warn || list[0].Signal != "dw norm" {
		t.Error(list)
	}
}

// The limits are what a step is refused by.
func TestLimits(t *testing.T) {
	w, r := monitor.New(trained()), newRun(10, 1, "mxfp8")
	if loss, norm := w.Limits(); !math.IsInf(loss, 1) || !math.IsInf(norm, 1) {
		t.Error(loss, norm)
	}
	for range 60 {
		w.Observe(r.next())
	}
	loss, norm := w.Limits()
	for _, row := range []struct {
		loss, norm float64
		refused    bool
	}{{loss * 0.999, 1, false}, {loss * 1.001, 1, true}, {2, norm * 0.999, false}, {2, norm * 1.001, true}} {
		s := r.next()
		s.Loss, s.GradNorm, s.Linears = row.loss, row.norm, nil
		blob, err := json.Marshal(w)
		if err != nil {
			t.Fatal(err)
		}
		again := monitor.New(trained())
		if err := json.Unmarshal(blob, again); err != nil {
			t.Fatal(err)
		}
		if got := again.Observe(s); (len(got) > 0) != row.refused {
			t.Errorf("%+v: %v (limits %g, %g)", row, got, loss, norm)
		}
	}
}

// A watch that went through a checkpoint decides as the one that did not, whatever happens to the
// run, and the same watch is the same bytes. No decision is without numbers.
func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		format := rapid.SampledFrom([]string{"mxfp8", "nvfp4"}).Draw(t, "format")
		o := monitor.Options{Settle: 3, Learn: 4, Hold: 6, Healthy: 3}
		w, r := monitor.New(o), newRun(rapid.Uint64().Draw(t, "seed"), 1, format)
		from := rapid.IntRange(5, 40).Draw(t, "from")
		f := faults[rapid.IntRange(0, len(faults)-1).Draw(t, "fault")]
		for step := range 60 {
			s := r.next()
			if step >= from && step < from+10 {
				f.change(s, &s.Linears[rapid.IntRange(0, len(s.Linears)-1).Draw(t, "at")], step-from)
			}
			var again *monitor.Monitor
			if step%9 == 0 {
				blob, err := json.Marshal(w)
				if err != nil {
					t.Fatal(err)
				}
				again = monitor.New(o)
				if err := json.Unmarshal(blob, again); err != nil {
					t.Fatalf("%v\n%s", err, blob)
				}
				second, err := json.Marshal(again)
				if err != nil || !bytes.Equal(blob, second) {
					t.Fatalf("%s became %s: %v", blob, second, err)
				}
			}
			list := w.Observe(s)
			if again != nil && !slices.Equal(again.Observe(s), list) {
				t.Fatalf("decided %v", list)
			}
			for _, d := range list {
				wellFormed(t, d)
			}
			r.apply(list)
		}
		want := map[string]string{}
		for _, d := range w.Fallen() {
			want[key(d.Layer, d.Linear, d.GEMM)] = d.To
		}
		for at, f := range r.formats { // the run has the falls in effect
			if now := want[at]; now != "" && now != f || now == "" && f != format {
				t.Fatalf("%s is in %s; %v", at, f, w.Fallen())
			}
		}
	})
}

// A change that most layers share becomes what is usual, with one warning.
func TestSharedChange(t *testing.T) {
	w, r := monitor.New(trained()), newRun(12, 4, "nvfp4")
	r.step = 1000
	var list []monitor.Decision
	for step := range 200 {
		s := r.next()
		for i := range s.Linears {
			if step >= 60 { // as if gradients were no longer divided by the number of ranks
				s.Linears[i].Norm *= 100
				op(&s.Linears[i], "dy").Amax *= 100
			}
		}
		list = append(list, w.Observe(s)...)
	}
	if len(list) != 1 || list[0].Kind != monitor.Warn {
		t.Error(list)
	}
}

func FuzzUnmarshal(f *testing.F) {
	w, r := monitor.New(trained()), newRun(1, 1, "nvfp4")
	for step := range 12 {
		s := r.next()
		if step > 9 {
			op(&s.Linears[0], "x").Amax *= 10
		}
		w.Observe(s)
	}
	blob, err := json.Marshal(w)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(blob)
	f.Add([]byte(`{"version": 2}`))
	f.Add([]byte(`{"version": 1, "sites": [{"layer": 0, "name": "a", "products": {"fprop": {"wait": 1, "since": 9}}}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		w := monitor.New(trained())
		if json.Unmarshal(text, w) != nil {
			return
		}
		blob, err := json.Marshal(w)
		if err != nil {
			t.Fatal(err)
		}
		again := monitor.New(trained())
		if err := json.Unmarshal(blob, again); err != nil {
			t.Fatal(err)
		}
		if second, _ := json.Marshal(again); !bytes.Equal(blob, second) {
			t.Errorf("%s became %s", blob, second)
		}
		r := newRun(1, 1, "nvfp4")
		for range 3 {
			for _, d := range w.Observe(r.next()) {
				wellFormed(t, d)
			}
		}
	})
}

func Example() {
	w := monitor.New(monitor.Options{Learn: 8, Hold: 100, Healthy: 8})
	for step := 1; step <= 20; step++ {
		down := monitor.Unmeasured(2, "block.down", "x")
		down.Fprop, down.Dgrad, down.Wgrad = "mxfp8", "mxfp8", "mxfp8"
		down.Operands[0].Amax = 40
		if step > 15 { // a channel of the input has grown
			down.Operands[0].Amax = 220
		}
		s := &monitor.Sample{Step: step, Loss: 2.5, GradNorm: 0.4, Finite: true, Linears: []monitor.Linear{down}}
		for _, d := range w.Observe(s) {
			fmt.Println(d)
		}
	}
	// Output:
	// step 17: fprop of block.down, layer 2 falls from mxfp8 to bf16: x amax is 220, usual 40, bound 160
	// step 17: wgrad of block.down, layer 2 falls from mxfp8 to bf16: x amax is 220, usual 40, bound 160
}

func BenchmarkObserve(b *testing.B) {
	w, r := monitor.New(trained()), newRun(1, 8, "nvfp4")
	var samples []*monitor.Sample
	for range 32 {
		samples = append(samples, r.next())
	}
	for i := 0; b.Loop(); i++ {
		w.Observe(samples[i%len(samples)])
	}
}
