package model_test

import (
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/safetensors"
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

// tensors reads all numbers of a file.
func tensors(t *testing.T, path string) map[string][]float64 {
	t.Helper()
	set, err := safetensors.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = set.Close() }()
	all := map[string][]float64{}
	for _, name := range set.Names() {
		x, err := set.Tensor(name)
		if err != nil {
			t.Fatal(err)
		}
		b, err := x.Bytes()
		if err != nil {
			t.Fatal(err)
		}
		data := make([]float64, x.Shape().Elements())
		for i := range data {
			switch x.Shape().Type {
			case dtype.F32:
				data[i] = float64(math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:])))
			case dtype.F64:
				data[i] = math.Float64frombits(binary.LittleEndian.Uint64(b[8*i:]))
			case dtype.S32:
				data[i] = float64(int32(binary.LittleEndian.Uint32(b[4*i:])))
			default:
				t.Fatalf("%s is %s", name, x.Shape())
			}
		}
		all[name] = data
	}
	return all
}

// load fills the inputs of a graph from the tensors of a checkpoint.
func load(t *testing.T, c *model.Config, g *ir.Graph, weights, data map[string][]float64) map[string][]*eval.Array {
	t.Helper()
	inputs := map[string][]*eval.Array{}
	for _, v := range g.Inputs {
		a := eval.New(v.Type)
		inputs[v.Name] = []*eval.Array{a}
		switch v.Name {
		case model.InputIDs, model.InputLabels:
			copy(a.Data, data[v.Name])
		case model.InputPositions:
			for i := range a.Data {
				a.Data[i] = float64(i % int(v.Type.Size(ir.Seq)))
			}
		case model.InputShare:
			a.Data[0] = share(data[model.InputLabels])
		}
	}
	for _, p := range c.Params() {
		for k, name := range p.Tensors() {
			if err := model.Take(&p, k, inputs[p.Name][0].Data, weights[name]); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
	}
	return inputs
}

// share is that of one label: transformers gives the mean over labels that count.
func share(labels []float64) float64 {
	n := 0.0
	for _, label := range labels {
		if label >= 0 {
			n++
		}
	}
	return 1 / max(1, n)
}

// distance is the Frobenius norm of a - b relative to that of b.
func distance(a, b []float64) float64 {
	var d, n float64
	for i := range b {
		d += (a[i] - b[i]) * (a[i] - b[i])
		n += b[i] * b[i]
	}
	return math.Sqrt(d / n)
}

// Logits, loss and the gradient of every weight are those of transformers.
func TestAgainstTransformers(t *testing.T) {
	for _, dir := range fixtures(t) {
		t.Run(filepath.Base(dir), func(t *testing.T) {
			t.Parallel()
			c := parseFile(t, filepath.Join(dir, "config.json"))
			weights := tensors(t, filepath.Join(dir, "model.safetensors"))
			want := tensors(t, filepath.Join(dir, "expected.safetensors"))
			const batch, seq = 2, 11
			scores, err := c.Logits(model.Shape{Batch: batch, Seq: seq, Elem: dtype.F32})
			if err != nil {
				t.Fatal(err)
			}
			out, err := eval.Run(scores, load(t, c, scores, weights, want))
			if err != nil {
				t.Fatal(err)
			}
			logits := distance(out[0][0].Data, want["logits"])
			if !(logits < logitBound) {
				t.Errorf("logits are off by %.2g", logits)
			}
			loss, worst, where := gradients(t, c, weights, want)
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

// gradients compares the loss, and gradients exported tensor by tensor, with what is wanted.
func gradients(t *testing.T, c *model.Config, weights, want map[string][]float64) (loss, worst float64, where string) {
	t.Helper()
	g, err := c.Graph(model.Shape{Batch: 2, Seq: 11, Elem: dtype.F32})
	if err != nil {
		t.Fatal(err)
	}
	grad, err := ir.Grad(g, ir.GradPlan{})
	if err != nil {
		t.Fatal(err)
	}
	inputs := load(t, c, g, weights, want)
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
	exported := map[string][]float64{}
	for i, p := range c.Params() {
		for k, name := range p.Tensors() {
			if exported[name] == nil {
				exported[name] = make([]float64, len(weights[name]))
			}
			if err := model.Put(&p, k, exported[name], out[i][0].Data); err != nil {
				t.Fatal(err)
			}
		}
	}
	if len(exported) != len(weights) {
		t.Errorf("%d tensors are exported, %d were read", len(exported), len(weights))
	}
	for name, w := range weights {
		if len(exported[name]) != len(w) {
			t.Errorf("%s is not exported", name)
			continue
		}
		if d := distance(exported[name], want["grad."+name]); !(d <= worst) {
			worst, where = d, name
		}
	}
	return math.Abs(kept[0][0].Data[0]-want["loss"][0]) / want["loss"][0], worst, where
}
