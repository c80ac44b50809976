package autoplan

import (
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/estimate"
)

// A run moves predictions towards what it measured, never past it, and the interval shrinks, to no
// less than what plans of one model differ by.
func TestCalibrationNarrows(t *testing.T) {
	j := jobFor(t, "llama3.1-8b", "8xb200", 8192, 1<<20)
	if c := (*Calibration)(nil).For(&j); c != (Correction{}) {
		t.Errorf("without measurements: %v", c)
	}
	rapid.Check(t, func(t *rapid.T) {
		sigma := rapid.Float64Range(0.01, 0.3).Draw(t, "sigma")
		ratio := rapid.Float64Range(0.5, 2).Draw(t, "ratio")
		runs := rapid.IntRange(1, 5).Draw(t, "runs")
		e := estimate.Estimate{Step: 1, Tail: 0.1, Low: math.Exp(-ninety * sigma), High: math.Exp(ninety * sigma),
			Stages: []estimate.Stage{{Forward: 0.3, Input: 0.3, Weight: 0.3}}}
		e.Parts.Compute = 1
		c := &Calibration{}
		for range runs {
			c.Runs = append(c.Runs, Measurement{Model: j.Model, GPU: "b200", Stack: "deepwell", Predicted: 2, Measured: 2 * ratio, Noise: 0.01})
		}
		c.Runs = append(c.Runs, Measurement{Model: "another", GPU: "b200", Stack: "deepwell", Predicted: 1, Measured: 9})
		was := e.High / e.Step
		c.For(&j).Apply(&e)
		if low, high := min(1, ratio), max(1, ratio); e.Step < low-1e-9 || e.Step > high+1e-9 {
			t.Fatalf("%v became %v", ratio, e.Step)
		}
		is := e.High / e.Step
		if is > was+1e-9 || is < math.Exp(ninety*min(sigma, betweenPlans))-1e-9 {
			t.Fatalf("an interval of %v became %v", was, is)
		}
		if math.Abs(e.Parts.Compute-e.Step) > 1e-9 || math.Abs(e.Tail-0.1*e.Step) > 1e-9 {
			t.Fatalf("parts do not follow: %+v", e)
		}
	})
}

func TestMeasurement(t *testing.T) {
	m, ok := NewMeasurement([]float64{9, 5, 1, 1.1, 1, 1.2, 1})
	if !ok || m.Measured != 1 || m.Steps != 5 || m.Noise <= 0 {
		t.Errorf("%+v", m)
	}
	if _, ok := NewMeasurement([]float64{1, 2}); ok {
		t.Error("two steps only warm up")
	}
}

func FuzzParseCalibration(f *testing.F) {
	f.Add([]byte(`{"version":1,"runs":[{"model":"a","card":"cpu","stack":"deepwell","predicted":1,"measured":2,"noise":0,"steps":3}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := ParseCalibration(text, "calibration.json")
		if err != nil {
			return
		}
		out, err := c.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		if again, err := ParseCalibration(out, "again.json"); err != nil || len(again.Runs) != len(c.Runs) {
			t.Fatalf("%s: %v", out, err)
		}
	})
}
