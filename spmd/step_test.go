package spmd_test

import (
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/spmd"
)

func step(t *testing.T, shape model.Shape, parts int, unroll bool) *graphs {
	t.Helper()
	text, err := os.ReadFile("../model/testdata/llama3/config.json")
	if err != nil {
		t.Fatal(err)
	}
	c, err := model.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	g, err := c.Graph(shape)
	if err != nil {
		t.Fatal(err)
	}
	if unroll {
		if g, err = ir.Unroll(g); err != nil {
			t.Fatal(err)
		}
	}
	s, err := build(g, spmd.Options{Optimizer: optim.SGD{Compute: shape.Elem}, Microbatches: parts})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Gradients of the parts of a batch add up to the gradient of the batch.
func TestPartsAddUp(t *testing.T) {
	const rows, seq = 3, 5
	for _, unroll := range []bool{false, true} {
		whole := step(t, model.Shape{Batch: rows, Seq: seq, Elem: dtype.F32, Documents: 8}, 1, unroll)
		parts := step(t, model.Shape{Batch: 1, Seq: seq, Elem: dtype.F32, Documents: 8}, rows, unroll)
		r := rand.New(rand.NewPCG(1, 2))
		params, rest := map[string][]*eval.Array{}, map[string][]*eval.Array{}
		for _, v := range whole.Gradient.Inputs {
			a := eval.New(v.Type)
			for i := range a.Data {
				switch v.Name {
				case model.InputIDs, model.InputLabels:
					a.Data[i] = float64(r.IntN(20))
				case model.InputPositions:
					a.Data[i] = float64(i % seq)
				case model.InputSegments:
					a.Data[i] = float64(i % seq / 3)
				case model.InputShare:
					a.Data[i] = 1.0 / (rows * seq)
				default:
					a.Data[i] = 0.3 * r.NormFloat64()
				}
			}
			if v.Role == ir.Param {
				params[v.Name] = []*eval.Array{a}
			} else {
				rest[v.Name] = []*eval.Array{a}
			}
		}
		want := run(t, whole.Gradient, params, rest)
		got := map[string][]*eval.Array{}
		for i, a := range run(t, parts.Zero) {
			got[program.Gradient.Of(parts.Params[i].Name)] = a
		}
		loss := 0.0
		for row := range rows {
			inputs := map[string][]*eval.Array{}
			for name, a := range rest {
				if name == model.InputShare {
					inputs[name] = a
					continue
				}
				one := eval.New(ir.Type{Elem: dtype.S32,
					Dims: []ir.Dim{{Name: "batch", Size: 1}, {Name: ir.Seq, Size: seq}}})
				copy(one.Data, a[0].Data[row*seq:])
				inputs[name] = []*eval.Array{one}
			}
			out := run(t, parts.Gradient, params, inputs, got)
			loss += out[0][0].Data[0]
			for i, p := range parts.Params {
				got[program.Gradient.Of(p.Name)] = out[1+i]
			}
		}
		if d := math.Abs(loss - want[0][0].Data[0]); d > 1e-12 {
			t.Errorf("the loss is off by %g", d)
		}
		for i, p := range whole.Params {
			for k, x := range want[1+i][0].Data {
				if d := math.Abs(got[program.Gradient.Of(p.Name)][0].Data[k] - x); d > 1e-12 {
					t.Fatalf("the gradient of %s is off by %g", p.Name, d)
				}
			}
		}
	}
}

// What only the update takes lies on the host, and what the gradient takes does not: masters of a
// model in f32 stay. The numbers stay the same.
func TestOffloadedUpdate(t *testing.T) {
	c, err := irtest.Tiny(2)
	if err != nil {
		t.Fatal(err)
	}
	for _, compute := range []dtype.DType{dtype.F32, dtype.BF16} {
		o := spmd.Options{Optimizer: optim.AdamW{Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1,
			ClipNorm: 1, Compute: compute}}
		plain, err := build(c, o)
		if err != nil {
			t.Fatal(err)
		}
		o.OffloadState = true
		moved, err := build(c, o)
		if err != nil {
			t.Fatal(err)
		}
		hosted := moved.Update.Hosted()
		for from, to := range moved.Update.Donations() {
			master := moved.Update.Find(program.Gradient.Of(from)) != nil
			want := !master || compute == dtype.BF16
			if a, b := moved.Update.Find(from), moved.Update.Find(to); hosted[a] != want || hosted[b] != want {
				t.Errorf("%s: %s and %s lie on the host: %v, %v", compute, from, to, hosted[a], hosted[b])
			}
		}
		r := rand.New(rand.NewPCG(5, 6))
		inputs := map[string][]*eval.Array{}
		for _, v := range plain.Update.Inputs {
			a := eval.New(v.Type)
			for i := range a.Data {
				a.Data[i] = math.Abs(r.NormFloat64()) + 1
			}
			inputs[v.Name] = []*eval.Array{a}
		}
		want, got := run(t, plain.Update, inputs), run(t, moved.Update, inputs)
		for i, v := range plain.Update.Results {
			if moved.Update.Results[i].Name != v.Name {
				t.Fatalf("result %d is %s, want %s", i, moved.Update.Results[i], v)
			}
			for k, x := range want[i][0].Data {
				if got[i][0].Data[k] != x {
					t.Fatalf("%s: %s[%d] is %v, want %v", compute, v, k, got[i][0].Data[k], x)
				}
			}
		}
	}
}

func run(t *testing.T, g *ir.Graph, inputs ...map[string][]*eval.Array) [][]*eval.Array {
	t.Helper()
	all := map[string][]*eval.Array{}
	for _, m := range inputs {
		maps.Copy(all, m)
	}
	out, err := eval.Run(g, all)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// What the update needs is what the gradients give, by name and type; donated arguments have
// results of their type.
func TestStepsMeet(t *testing.T) {
	for _, elem := range []dtype.DType{dtype.F32, dtype.BF16} {
		for _, parts := range []int{1, 2} {
			s := step(t, model.Shape{Batch: 1, Seq: 4, Elem: elem}, parts, false)
			for i, p := range s.Params {
				name := program.Gradient.Of(p.Name)
				in := s.Update.Find(name)
				if in == nil || !in.Type.Equal(s.Gradient.Results[1+i].Type) {
					t.Errorf("%s %d: gradient %s goes into the update as %v", elem, parts, name, in)
				}
				if copied := s.Gradient.Find(program.Copy.Of(p.Name)) != nil; copied != (elem != dtype.F32) {
					t.Errorf("%s: parameter %s has a copy: %v", elem, p.Name, copied)
				}
			}
			for _, g := range []*ir.Graph{s.Gradient, s.Update, s.Evaluate} {
				if g == nil {
					continue
				}
				into := g.Donations()
				for _, v := range g.Results {
					if from := v.Means.Replaces; from != "" && into[from] != v.Name {
						t.Errorf("%s: %s does not take the place of %s", g.Name, v, from)
					}
				}
				if donates := g == s.Update || parts > 1 && g == s.Gradient; donates != (len(into) > 0) {
					t.Errorf("%s: donated are %v", g.Name, into)
				}
			}
		}
	}
}
