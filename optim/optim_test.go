package optim_test

import (
	"context"
	"encoding/binary"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/program"
)

var params = []optim.Param{
	{Name: "w", Type: ir.Type{Elem: dtype.F32, Dims: []ir.Dim{{Name: "in", Size: 3}, {Name: "out", Size: 4}}}, Decay: true},
	{Name: "norm", Type: ir.Type{Elem: dtype.F32, Dims: []ir.Dim{{Name: "in", Size: 3}}}},
}

// The graph is held to the formulas written out for plain numbers, over some steps.
func TestAdamWAgainstItsFormulas(t *testing.T) {
	o := optim.AdamW{Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, ClipNorm: 1}
	g, err := o.Update(params)
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(1, 2))
	state := map[string][]float64{}
	for _, p := range params {
		n := p.Type.Shape().Elements()
		for _, name := range []string{p.Name, "m." + p.Name, "v." + p.Name} {
			state[name] = make([]float64, n)
		}
		for i := range state[p.Name] {
			state[p.Name][i] = r.NormFloat64()
		}
	}
	for step := 1; step <= 5; step++ {
		rate, norm := 0.01*float64(step), 0.0
		grads := map[string][]float64{}
		for _, p := range params {
			for range state[p.Name] {
				v := r.NormFloat64()
				grads[p.Name] = append(grads[p.Name], v)
				norm += v * v
			}
		}
		norm = math.Sqrt(norm)
		out := runEval(t, g, state, grads, rate, o, step, true)
		for i, p := range params {
			for k := range state[p.Name] {
				grad := grads[p.Name][k] * math.Min(1, o.ClipNorm/norm)
				m := o.Beta1*state["m."+p.Name][k] + (1-o.Beta1)*grad
				v := o.Beta2*state["v."+p.Name][k] + (1-o.Beta2)*grad*grad
				mh, vh := m/(1-math.Pow(o.Beta1, float64(step))), v/(1-math.Pow(o.Beta2, float64(step)))
				w := state[p.Name][k]
				decay := 0.0
				if p.Decay {
					decay = o.Decay * w
				}
				w -= rate * (mh/(math.Sqrt(vh)+o.Eps) + decay)
				for j, want := range []float64{w, m, v} {
					if got := out[3*i+j].Data[k]; math.Abs(got-want) > 1e-12*(1+math.Abs(want)) {
						t.Fatalf("step %d, %s[%d], part %d: %v, want %v", step, p.Name, k, j, got, want)
					}
				}
				state[p.Name][k], state["m."+p.Name][k], state["v."+p.Name][k] = w, m, v
			}
		}
		if got := out[len(out)-1].Data[0]; math.Abs(got-norm) > 1e-12*norm {
			t.Errorf("the norm is %v, want %v", got, norm)
		}
	}
}

func inputsOf(state, grads map[string][]float64, rate float64, o optim.AdamW, step int, commit bool) map[string][]float64 {
	in := map[string][]float64{optim.Rate: {rate}, optim.Commit: {0},
		optim.Fix1: {1 / (1 - math.Pow(o.Beta1, float64(step)))}, optim.Fix2: {1 / (1 - math.Pow(o.Beta2, float64(step)))}}
	if commit {
		in[optim.Commit] = []float64{1}
	}
	maps.Copy(in, state)
	for name, v := range grads {
		in["g."+name] = v
	}
	return in
}

func runEval(t *testing.T, g *ir.Graph, state, grads map[string][]float64, rate float64, o optim.AdamW, step int, commit bool) []*eval.Array {
	t.Helper()
	in := map[string][]*eval.Array{}
	data := inputsOf(state, grads, rate, o, step, commit)
	for _, v := range g.Inputs {
		in[v.Name] = []*eval.Array{{Type: v.Type, Data: data[v.Name]}}
	}
	out, err := eval.Run(g, in)
	if err != nil {
		t.Fatal(err)
	}
	list := make([]*eval.Array, len(out))
	for i := range out {
		list[i] = out[i][0]
	}
	return list
}

// On the engine, with donated state: a step that does not count leaves every bit as it was, even
// with gradients that are not numbers, and the next step goes on from there.
func TestRejectedStepLeavesTheState(t *testing.T) {
	o := optim.AdamW{Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, ClipNorm: 1}
	g, err := o.Update(params)
	if err != nil {
		t.Fatal(err)
	}
	into := optim.Donations(g, params)
	text, err := lower.Module(g, lower.Options{Donate: into})
	if err != nil {
		t.Fatal(err)
	}
	e, err := engine.Open(context.Background(), "cpu", engine.Options{Devices: 1})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	defer e.Close()
	stage := &program.Stage{Name: "update", Devices: program.Range(0, 1), Text: text}
	at := map[string]string{}
	for name, result := range into {
		at[result] = name
	}
	for _, v := range g.Inputs {
		a := program.Array{Name: v.Name, Global: v.Type.Shape()}
		if into[v.Name] != "" {
			a.Into = v.Name
		}
		stage.Args = append(stage.Args, a)
	}
	for _, v := range g.Results {
		name := v.Name
		if at[name] != "" {
			name = at[name]
		}
		stage.Results = append(stage.Results, program.Array{Name: name, Global: v.Type.Shape()})
	}
	x, err := e.Compile(t.Context(), stage)
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	defer x.Free()
	var state engine.State
	defer state.Free()
	r := rand.New(rand.NewPCG(3, 4))
	put := func(spec program.Array, values func() float64) *engine.Array {
		a, err := e.Place(stage, spec, engine.Copied, func(int) ([]byte, error) {
			var b []byte
			for range spec.Global.Elements() {
				if v := values(); spec.Global.Type == dtype.Pred {
					b = append(b, byte(v))
				} else {
					b = binary.LittleEndian.AppendUint32(b, math.Float32bits(float32(v)))
				}
			}
			return b, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	for _, spec := range stage.Args {
		if spec.Into != "" {
			state.Put(put(spec, func() float64 { return math.Abs(r.NormFloat64()) }))
		}
	}
	step := func(commit, grad float64) {
		var inputs []*engine.Array
		for _, spec := range stage.Args {
			if spec.Into != "" {
				continue
			}
			value := map[string]float64{optim.Commit: commit, optim.Rate: 0.01, optim.Fix1: 10, optim.Fix2: 20}[spec.Name]
			if spec.Name[:2] == "g." {
				value = grad
			}
			inputs = append(inputs, put(spec, func() float64 { return value }))
		}
		run, err := x.Step(&state, inputs...)
		if err != nil {
			t.Fatal(err)
		}
		if err := run.Wait(context.Background()); err != nil {
			t.Fatal(err)
		}
		run.Free()
		for _, a := range inputs {
			a.Free()
		}
	}
	snapshot := func() (all []byte) {
		for _, name := range state.Names() {
			b, err := state.Get(name).Read(t.Context(), 0)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, b...)
		}
		return all
	}
	step(1, 0.5)
	before := snapshot()
	step(0, math.NaN())
	if !slices.Equal(before, snapshot()) {
		t.Error("a rejected step changed the state")
	}
	step(1, 0.25)
	if slices.Equal(before, snapshot()) {
		t.Error("the step after it changed nothing")
	}
}

func TestSchedules(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		steps := rapid.IntRange(10, 1000).Draw(t, "steps")
		warm := rapid.IntRange(1, steps/3).Draw(t, "warmup")
		for _, s := range []optim.Schedule{
			optim.WarmupCosine{Peak: 1, Floor: 0.1, Warmup: warm, Steps: steps},
			optim.WSD{Peak: 1, Floor: 0.1, Warmup: warm, Decay: steps / 3, Steps: steps},
		} {
			last := 0.0
			for i := range steps + 5 {
				rate := s.Rate(i)
				if rate < 0 || rate > 1+1e-12 || i < warm && rate < last || i > warm && rate > last+1e-12 {
					t.Fatalf("%+v: step %d has rate %v after %v", s, i, rate, last)
				}
				last = rate
			}
			if math.Abs(s.Rate(warm-1)-1) > 1e-12 || math.Abs(s.Rate(steps)-0.1) > 1e-12 {
				t.Fatalf("%+v peaks at %v and ends at %v", s, s.Rate(warm-1), s.Rate(steps))
			}
		}
	})
}
