package model_test

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/model"
)

// The bounds of issue 4: Frobenius norms of differences, relative.
const (
	logitBound = 1e-5
	lossBound  = 1e-6
	gradBound  = 1e-4
)

// fixtures lists the folders that testdata/make.py wrote.
func fixtures(t *testing.T) []string {
	t.Helper()
	list, err := filepath.Glob("testdata/*/config.json")
	if err != nil || len(list) == 0 {
		t.Fatal("no fixtures", err)
	}
	for i, path := range list {
		list[i] = filepath.Dir(path)
	}
	return list
}

func parseFile(t *testing.T, path string) *model.Config {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	c, err := model.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// A fixture is what a folder of testdata has.
type fixture struct {
	c             *model.Config
	weights, want map[string][]float64
}

func readFixture(t *testing.T, dir string) *fixture {
	t.Helper()
	return &fixture{parseFile(t, filepath.Join(dir, "config.json")),
		enginetest.Tensors(t, filepath.Join(dir, "model.safetensors")),
		enginetest.Tensors(t, filepath.Join(dir, "expected.safetensors"))}
}

// load fills the inputs of a graph with the weights and the batch.
func (f *fixture) load(t *testing.T, g *ir.Graph) map[string][]*eval.Array {
	t.Helper()
	inputs := map[string][]*eval.Array{}
	for _, v := range g.Inputs {
		a := eval.New(v.Type)
		inputs[v.Name] = []*eval.Array{a}
		switch v.Name {
		case model.InputIDs, model.InputLabels:
			copy(a.Data, f.want[v.Name])
		case model.InputPositions:
			for i := range a.Data {
				a.Data[i] = float64(i % int(v.Type.Size(ir.Seq)))
			}
		case model.InputShare:
			a.Data[0] = share(f.want[model.InputLabels])
		}
	}
	for _, p := range f.c.Params() {
		for k, name := range p.Tensors() {
			if err := model.Take(&p, k, inputs[p.Name][0].Data, f.weights[name]); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
	}
	return inputs
}

// share is the weight of one label: transformers gives the mean over labels that count.
func share(labels []float64) float64 {
	n := 0.0
	for _, label := range labels {
		if label >= 0 {
			n++
		}
	}
	return 1 / max(1, n)
}

// Logits, loss and the gradient of every weight equal transformers'.
func TestAgainstTransformers(t *testing.T) {
	for _, dir := range fixtures(t) {
		t.Run(filepath.Base(dir), func(t *testing.T) {
			t.Parallel()
			f := readFixture(t, dir)
			const batch, seq = 2, 11
			scores, err := f.c.Logits(model.Shape{Batch: batch, Seq: seq, Elem: dtype.F32})
			if err != nil {
				t.Fatal(err)
			}
			out, err := eval.Run(scores, f.load(t, scores))
			if err != nil {
				t.Fatal(err)
			}
			logits := enginetest.Distance(out[0][0].Data, f.want["logits"])
			if !(logits < logitBound) {
				t.Errorf("logits are off by %.2g", logits)
			}
			loss, worst, where := f.gradients(t)
			if !(loss < lossBound) {
				t.Errorf("the loss is off by %.2g", loss)
			}
			if !(worst < gradBound) {
				t.Errorf("the gradient of %s is off by %.2g", where, worst)
			}
			t.Logf("logits %.1e, loss %.1e, gradients at most %.1e (%s)", logits, loss, worst, where)
		})
	}
}

// Every token goes to the experts that transformers sends it to.
func TestRoutingAgainstTransformers(t *testing.T) {
	n := 0
	for _, dir := range fixtures(t) {
		f := readFixture(t, dir)
		if f.c.MoE == nil {
			continue
		}
		n++
		choices := f.routing(t)
		if int64(len(choices)) != f.c.Layers-f.c.MoE.Dense {
			t.Errorf("%s: %d layers choose experts", dir, len(choices))
		}
		for layer, got := range choices {
			want := f.want[fmt.Sprintf("routing.%d", layer)]
			k := int(f.c.MoE.TopK)
			if len(want) == 0 || len(got) != len(want) {
				t.Fatalf("%s: layer %d has %d choices, not %d", dir, layer, len(got), len(want))
			}
			for at := 0; at < len(got); at += k {
				slices.Sort(got[at : at+k])
				if !slices.Equal(got[at:at+k], want[at:at+k]) {
					t.Errorf("%s: token %d goes to %v in layer %d, not to %v", dir, at/k, got[at:at+k], layer,
						want[at:at+k])
				}
			}
		}
	}
	if n < 3 {
		t.Errorf("%d fixtures have experts", n)
	}
}

// routing computes the choices [batch, seq, choice] of each layer with experts: loops give them as
// one more result.
func (f *fixture) routing(t *testing.T) map[int64][]float64 {
	t.Helper()
	shape := model.Shape{Batch: 2, Seq: 11, Elem: dtype.F32}
	g, err := f.c.Logits(shape)
	if err != nil {
		t.Fatal(err)
	}
	same, err := f.c.Logits(shape) // whose bodies change
	if err != nil {
		t.Fatal(err)
	}
	inputs := f.load(t, g)
	b := ir.ExtendGraph(g)
	var stacks []*ir.Value
	for i, op := range slices.Clone(g.Ops) {
		if op.Body == nil {
			continue
		}
		n := len(op.Body.Results)
		body := same.Ops[i].Body
		var chosen []*ir.Value
		for _, in := range body.Ops {
			if in.Kind == "expert_positions" {
				chosen = append(chosen, in.In[0])
			}
		}
		if body, err = ir.ExtendGraph(body).Graph(slices.Concat(body.Results, chosen)...); err != nil {
			t.Fatal(err)
		}
		l := op.Loop()
		out := b.Repeat(l.N, body, l.Carries, l.Stacks, l.Invariants)
		stacks = append(stacks, out[n:]...)
	}
	if g, err = b.Graph(stacks...); err != nil {
		t.Fatal(err)
	}
	out, err := eval.Run(g, inputs)
	if err != nil {
		t.Fatal(err)
	}
	choices := map[int64][]float64{}
	for k, a := range out { // each fixture has one loop over layers with experts, in turns of len(out)
		n := int(g.Results[k].Type.Dims[0].Size)
		each := len(a[0].Data) / n
		for i := range n {
			choices[f.c.MoE.Dense+int64(i*len(out)+k)] = a[0].Data[i*each:][:each]
		}
	}
	return choices
}

// exported gives gradients by the names of the tensors of a checkpoint.
func (f *fixture) exported(t *testing.T, grads [][]*eval.Array) map[string][]float64 {
	t.Helper()
	all := map[string][]float64{}
	for i, p := range f.c.Params() {
		for k, name := range p.Tensors() {
			if p.Buffer { // its gradient is what balances the experts
				continue
			}
			if all[name] == nil {
				all[name] = make([]float64, len(f.weights[name]))
			}
			if err := model.Put(&p, k, all[name], grads[i][0].Data); err != nil {
				t.Fatal(err)
			}
		}
	}
	return all
}

// gradients compares the loss, and gradients exported tensor by tensor, with what is wanted.
func (f *fixture) gradients(t *testing.T) (loss, worst float64, where string) {
	t.Helper()
	g, err := f.c.Graph(model.Shape{Batch: 2, Seq: 11, Elem: dtype.F32})
	if err != nil {
		t.Fatal(err)
	}
	grad, err := ir.Grad(g, ir.GradPlan{})
	if err != nil {
		t.Fatal(err)
	}
	inputs := f.load(t, g)
	kept, err := eval.Run(grad.Forward, inputs)
	if err != nil {
		t.Fatal(err)
	}
	for i, v := range grad.Forward.Results {
		inputs[v.Name] = kept[i]
	}
	one := eval.New(ir.Type{Elem: dtype.F32})
	one.Data[0] = 1
	inputs[grad.Seeds[0]] = []*eval.Array{one}
	out, err := eval.Run(grad.Backward, inputs)
	if err != nil {
		t.Fatal(err)
	}
	exported := f.exported(t, out)
	for name, w := range f.weights {
		if f.want["grad."+name] == nil && strings.HasSuffix(name, "correction_bias") {
			continue
		}
		if len(exported[name]) != len(w) {
			t.Errorf("%s is not exported", name)
			continue
		}
		if d := enginetest.Distance(exported[name], f.want["grad."+name]); !(d <= worst) {
			worst, where = d, name
		}
	}
	return math.Abs(kept[0][0].Data[0]-f.want["loss"][0]) / f.want["loss"][0], worst, where
}
