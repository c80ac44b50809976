package optim_test

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/optim"
)

func dims(list ...any) (d []ir.Dim) {
	for i := 0; i < len(list); i += 2 {
		d = append(d, ir.Dim{Name: list[i].(string), Size: int64(list[i+1].(int))})
	}
	return d
}

func f32(list ...any) ir.Type { return ir.Type{Elem: dtype.F32, Dims: dims(list...)} }

// params are one of each kind: a stack, one whose sides are made of heads, a table, a norm.
var params = []optim.Param{
	{Name: "embed", Tag: ir.Embed, Type: f32("vocab", 11, "embed", 6), Decay: true},
	{Name: "q", Tag: ir.Attn, Decay: true,
		Type: f32(ir.Layer, 2, "embed", 6, ir.Heads, 2, ir.HeadDim, 5)},
	{Name: "o", Tag: ir.Attn, Decay: true,
		Type: f32(ir.Layer, 2, ir.Heads, 2, ir.HeadDim, 5, "embed", 6)},
	{Name: "up", Tag: ir.MLP, Type: f32(ir.Layer, 2, "embed", 6, "mlp", 9), Decay: true},
	{Name: "norm", Tag: ir.Norm, Type: f32("embed", 6)},
}

var adamw = optim.AdamW{Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, ClipNorm: 1}

// Tolerances, each relative to the norm of the parameter.
const (
	// Both sides round to f32 some ten times in each of 20 steps; 2.3e-7 was seen.
	adamwBound = 1e-6
	// 15 f32 matmuls follow one another in a step; 1.2e-7 was seen.
	muonBound = 1e-6
	// The matmuls are rounded to bf16 (2^-9), and the quintic's slope at 0 is 3.4 in each of 5
	// rounds; a step is some hundredth of the parameter. 4.5e-4 was seen.
	muonBF16Bound = 2e-3
)

// unstacked gives the parameters of a program with an input for each layer.
func unstacked() (list []optim.Param) {
	for _, p := range params {
		if p.Type.Dims[0].Name != ir.Layer {
			list = append(list, p)
			continue
		}
		for i := range p.Type.Dims[0].Size {
			one := p
			one.Name = fmt.Sprintf("%s.%d", p.Name, i)
			one.Type.Dims = p.Type.Dims[1:]
			list = append(list, one)
		}
	}
	return list
}

// taken gives a parameter of a fixture; layers of a stack stand one after the other.
func taken(f map[string][]float64, prefix string, p optim.Param) []float64 {
	if p.Type.Dims[0].Name == ir.Layer {
		return slices.Concat(f[prefix+p.Name+".0"], f[prefix+p.Name+".1"])
	}
	return f[prefix+p.Name]
}

// On the engine, the parameters go where PyTorch's optimizers move them, step by step, whether
// layers are stacked or not.
func TestAgainstTorch(t *testing.T) {
	t.Parallel()
	r := enginetest.Open(t, engine.Options{Devices: 1})
	muon := optim.Muon{AdamW: adamw, Momentum: 0.95}
	bf16 := muon
	bf16.MatmulType = dtype.BF16
	for _, c := range []struct {
		fixture string
		o       optim.Optimizer
		params  []optim.Param
		bound   float64
	}{
		{"adamw", adamw, params, adamwBound},
		{"muon", muon, params, muonBound},
		{"muon", muon, unstacked(), muonBound},
		{"muon_bf16", bf16, params, muonBF16Bound},
	} {
		t.Run(fmt.Sprintf("%s/%d", c.fixture, len(c.params)), func(t *testing.T) {
			f := enginetest.Tensors(t, "testdata/"+c.fixture+".safetensors")
			g, err := c.o.Update(c.params)
			if err != nil {
				t.Fatal(err)
			}
			x := r.Compile(t, g, donated())
			var state engine.State
			defer state.Free()
			for _, p := range c.params {
				state.Put(x.Put(t, p.Name, taken(f, "0.", p)))
				for _, s := range c.o.State(p) {
					state.Put(x.Put(t, s.Name, make([]float64, s.Type.Shape().Elements())))
				}
			}
			worst, norms := 0.0, 0.0
			for i, rate := range f["rates"] {
				in := scalars(c.o, i+1, rate)
				for _, p := range c.params {
					in["g."+p.Name] = taken(f, fmt.Sprintf("g.%d.", i+1), p)
				}
				out := x.Step(t, &state, in)
				if out[optim.OK][0] != 1 {
					t.Fatalf("step %d was rejected", i+1)
				}
				norms = max(norms, enginetest.Distance(out[optim.Norm], f["norms"][i:i+1]))
				for _, p := range c.params {
					want := taken(f, fmt.Sprintf("%d.", i+1), p)
					worst = max(worst, enginetest.Distance(enginetest.Read(t, state.Get(p.Name), 0), want))
				}
			}
			t.Logf("parameters are off by at most %.1e, norms by %.1e", worst, norms)
			if !(worst <= c.bound) || !(norms <= 1e-6) {
				t.Errorf("parameters are off by %.2g, norms by %.2g", worst, norms)
			}
		})
	}
}

// donated lowers an update for the CPU, in place.
func donated() lower.Options {
	return lower.Options{Kernels: kernels.For("cpu")}
}

// scalars are the inputs of a step that counts.
func scalars(o optim.Optimizer, update int, rate float64) map[string][]float64 {
	in := map[string][]float64{optim.Commit: {1}, optim.LR: {rate}, optim.MaxNorm: {math.Inf(1)}}
	for name, v := range o.Scalars(update) {
		in[name] = []float64{v}
	}
	return in
}

// The graph is held to the formulas written out for plain numbers, over some steps.
func TestAdamWAgainstItsFormulas(t *testing.T) {
	o, params := adamw, []optim.Param{params[3], params[4]}
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
		in := map[string][]float64{optim.Commit: {1}, optim.LR: {rate}, optim.MaxNorm: {math.Inf(1)}}
		for _, p := range params {
			for range state[p.Name] {
				v := r.NormFloat64()
				in["g."+p.Name] = append(in["g."+p.Name], v)
				norm += v * v
			}
		}
		norm = math.Sqrt(norm)
		for name, v := range o.Scalars(step) {
			in[name] = []float64{v}
		}
		maps.Copy(in, state)
		out := runEval(t, g, in)
		for _, p := range params {
			for k := range state[p.Name] {
				grad := in["g."+p.Name][k] * math.Min(1, o.ClipNorm/(norm+1e-6))
				m := o.Beta1*state["m."+p.Name][k] + (1-o.Beta1)*grad
				v := o.Beta2*state["v."+p.Name][k] + (1-o.Beta2)*grad*grad
				mh, vh := m/(1-math.Pow(o.Beta1, float64(step))), v/(1-math.Pow(o.Beta2, float64(step)))
				w := state[p.Name][k]
				decay := 0.0
				if p.Decay {
					decay = o.Decay * w
				}
				w -= rate * (mh/(math.Sqrt(vh)+o.Eps) + decay)
				for name, want := range map[string]float64{p.Name: w, "m." + p.Name: m, "v." + p.Name: v} {
					if got := out["next."+name][k]; math.Abs(got-want) > 1e-12*(1+math.Abs(want)) {
						t.Fatalf("step %d, %s[%d]: %v, want %v", step, name, k, got, want)
					}
					state[name][k] = want
				}
			}
		}
		if got := out[optim.Norm][0]; math.Abs(got-norm) > 1e-12*norm {
			t.Errorf("the norm is %v, want %v", got, norm)
		}
	}
}

// runEval runs a graph in f64 and gives its results by name.
func runEval(t *testing.T, g *ir.Graph, data map[string][]float64) map[string][]float64 {
	t.Helper()
	in := map[string][]*eval.Array{}
	for _, v := range g.Inputs {
		in[v.Name] = []*eval.Array{{Type: v.Type, Data: data[v.Name]}}
	}
	out, err := eval.Run(g, in)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string][]float64{}
	for i, v := range g.Results {
		all[v.Name] = out[i][0].Data
	}
	return all
}

// Muon makes singular values nearly one, whatever they were: for a matrix with orthogonal rows of
// very different lengths, all rows come out with about the same.
func TestMuonEvensOut(t *testing.T) {
	p := []optim.Param{{Name: "w", Tag: ir.MLP, Type: f32("embed", 2, "mlp", 3)}}
	o := optim.Muon{Momentum: 0}
	g, err := o.Update(p)
	if err != nil {
		t.Fatal(err)
	}
	out := runEval(t, g, map[string][]float64{optim.Commit: {1}, optim.LR: {1},
		optim.MaxNorm: {math.Inf(1)}, optim.BiasCorrection1: {1}, optim.BiasCorrection2: {1},
		"w": make([]float64, 6), "m.w": make([]float64, 6), "g.w": {100, 0, 0, 0, 0, -3}})
	// 0.2·√3 is the step of a singular value of 1; the quintic leaves between 0.7 and 1.2.
	for i, want := range []float64{-1, 0, 0, 0, 0, 1} {
		if got := out["next.w"][i] / (0.2 * math.Sqrt(3)); math.Abs(got-want) > 0.35 {
			t.Errorf("element %d moved by %.3f, want about %v", i, got, want)
		}
	}
}

// Moments in bf16 are the nearest to what those in f32 would be.
func TestMomentsAreRoundedToNearestEven(t *testing.T) {
	o := adamw
	o.Moments, o.Compute, o.ClipNorm = dtype.BF16, dtype.BF16, 0
	o.Beta1 = 0.5 // so that halves are exact
	g, err := o.Update([]optim.Param{{Name: "w", Type: f32("embed", 4)}})
	if err != nil {
		t.Fatal(err)
	}
	x := enginetest.Open(t, engine.Options{Devices: 1}).Compile(t, g, donated())
	var state engine.State
	defer state.Free()
	for _, name := range []string{"w", "m.w", "v.w"} {
		state.Put(x.Put(t, name, make([]float64, 4)))
	}
	in := scalars(o, 1, 0.5)
	// The moment is half of these: between two neighbours, the first or the second of which is even,
	// and a bit to either side.
	in["g.w"] = []float64{2 + 2/256., 2 + 6/256., 2 + 2/256. + 1e-5, 2 + 6/256. - 1e-5}
	out := x.Step(t, &state, in)
	want := []float64{1, 1 + 4/256., 1 + 2/256., 1 + 2/256.}
	if got := enginetest.Read(t, state.Get("m.w"), 0); !slices.Equal(got, want) {
		t.Errorf("the moment is %v, want %v", got, want)
	}
	if want := []float64{-0.5, -0.5, -0.5, -0.5}; !slices.Equal(out["c.w"], want) {
		t.Errorf("the model's copy is %v for %v", out["c.w"], enginetest.Read(t, state.Get("w"), 0))
	}
}

// optimizers are all there are, in several types.
func optimizers() map[string]optim.Optimizer {
	bf16 := adamw
	bf16.Moments, bf16.Compute = dtype.BF16, dtype.BF16
	return map[string]optim.Optimizer{"adamw": adamw, "bf16": bf16,
		"muon": optim.Muon{AdamW: adamw, Momentum: 0.95}, "sgd": optim.SGD{Decay: 0.1, ClipNorm: 1}}
}

// On the engine, with donated state of any bits: a step that the host does not want, or with a
// gradient that is not finite anywhere, or with a norm above the limit, leaves every bit as it was
// and says so; any other changes the state.
func TestRejectedStepLeavesEveryBit(t *testing.T) {
	t.Parallel()
	r := enginetest.Open(t, engine.Options{Devices: 1})
	for name, o := range optimizers() {
		t.Run(name, func(t *testing.T) {
			g, err := o.Update(params)
			if err != nil {
				t.Fatal(err)
			}
			x := r.Compile(t, g, donated())
			rapid.Check(t, func(t *rapid.T) { rejects(t, x, o) })
		})
	}
}

func rejects(t *rapid.T, x *enginetest.Program, o optim.Optimizer) {
	rnd := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
	var state engine.State
	defer state.Free()
	before := map[string][]byte{}
	for _, a := range x.Module().Args {
		if a.Into == "" {
			continue
		}
		var list []float64
		for range a.Global.Elements() {
			v := math.Ldexp(rnd.NormFloat64(), -rnd.IntN(160)) // down to what f32 cannot write in full
			if strings.HasPrefix(a.Name, "v.") {
				v = math.Abs(v)
			}
			list = append(list, v)
		}
		before[a.Name] = a.Global.Type.Append(nil, list...)
		state.Put(x.Put(t, a.Name, list))
	}
	in := scalars(o, 3, 0.01)
	square := 0.0
	grads := map[string][]float64{}
	for _, p := range params {
		for range p.Type.Shape().Elements() {
			v := rnd.NormFloat64()
			square += v * v
			grads[p.Name] = append(grads[p.Name], v)
		}
	}
	why := rapid.SampledFrom([]string{"fine", "host", "poison", "spike", "within"}).Draw(t, "why")
	switch why {
	case "host":
		in[optim.Commit] = []float64{0}
	case "poison":
		at := grads[params[rapid.IntRange(0, len(params)-1).Draw(t, "parameter")].Name]
		at[rapid.IntRange(0, len(at)-1).Draw(t, "element")] = rapid.SampledFrom([]float64{math.NaN(),
			math.Inf(1), math.Inf(-1), 1e30}).Draw(t, "poison") // the square of 1e30 is infinite in f32
	case "spike":
		in[optim.MaxNorm] = []float64{0.999 * math.Sqrt(square)}
	case "within":
		in[optim.MaxNorm] = []float64{1.001 * math.Sqrt(square)}
	}
	for name, list := range grads {
		in["g."+name] = list
	}
	out := x.Step(t, &state, in)
	want := why == "fine" || why == "within"
	if got := out[optim.OK][0] == 1; got != want {
		t.Fatalf("%s: the step counts: %v, norm %v", why, got, out[optim.Norm])
	}
	same := true
	for name, b := range before {
		same = same && slices.Equal(b, enginetest.Bytes(t, state.Get(name), 0))
	}
	if same == want {
		t.Fatalf("%s: the state is the same: %v", why, same)
	}
}

func TestNothingToTrain(t *testing.T) {
	for name, o := range optimizers() {
		if _, err := o.Update(nil); err == nil {
			t.Errorf("%s: no parameters, no error", name)
		}
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
				rate := s.LR(i)
				if rate < 0 || rate > 1+1e-12 || i < warm && rate < last || i > warm && rate > last+1e-12 {
					t.Fatalf("%+v: step %d has rate %v after %v", s, i, rate, last)
				}
				last = rate
			}
			if math.Abs(s.LR(warm-1)-1) > 1e-12 || math.Abs(s.LR(steps)-0.1) > 1e-12 {
				t.Fatalf("%+v peaks at %v and ends at %v", s, s.LR(warm-1), s.LR(steps))
			}
		}
	})
}
