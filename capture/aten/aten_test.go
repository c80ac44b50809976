package aten

import (
	"compress/gzip"
	"encoding/binary"
	"io"
	"math"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/safetensors"
)

// fixtures are the models of package pt2; dropout has PyTorch's masks.
var fixtures = []struct{ name string }{
	{"nanogpt"}, {"tied"}, {"parallel"}, {"postnorm"}, {"activation"}, {"dropout0"}, {"dropout"},
	{"inplace"}, {"einsum"}, {"alibi"}, {"llama"}, {"qwen3"}, {"mistral"}, {"gemma2"}, {"phi3"},
	{"gpt2"}, {"gptneox"}, {"olmo2"}, {"bert"}, {"vit"}, {"mixtral"}, {"qwen3_moe"},
	{"deepseek_v3"}, {"gpt_oss"},
}

// numbered are names of dimensions that have their number in them.
var numbered = regexp.MustCompile(`\bd(im)?\d+\b`)

// Models of transformers as torch.export alone gives them have masks that the program computes. They
// become the graphs of the same models with attention as one operator, which the other tests train
// and compare with PyTorch.
func TestPlainExports(t *testing.T) {
	for _, name := range []string{"llama", "gpt2", "qwen3", "bert", "mistral"} {
		t.Run(name, func(t *testing.T) {
			var text [2][]string
			for i, file := range []string{name, name + "_plain"} {
				archive, err := pt2.Parse(file, unpack(t, file+".pt2.gz"))
				if err != nil {
					t.Fatal(err)
				}
				m, err := New(archive)
				if err != nil {
					t.Fatal(err)
				}
				for _, s := range []model.Shape{{Batch: 2, Seq: 6}, {Batch: 3, Seq: 31, Documents: 4}} {
					s.Elem = m.elem
					g, err := m.Graph(s)
					if err != nil {
						t.Fatal(err)
					}
					text[i] = append(text[i], strings.Split(numbered.ReplaceAllString(g.String(), "dim"), "\n")...)
				}
			}
			if len(text[0]) != len(text[1]) {
				t.Fatalf("a graph of %d lines, not %d", len(text[1]), len(text[0]))
			}
			for i, want := range text[0] {
				if have := text[1][i]; have != want {
					t.Fatalf("another graph:\n%s\nnot\n%s", have, want)
				}
			}
		})
	}
}

func TestModelsAgreeWithPyTorch(t *testing.T) {
	for _, f := range fixtures {
		t.Run(f.name, func(t *testing.T) {
			m, want := load(t, f.name)
			feed, shape := want.feed(t, m)
			g, err := m.build(shape, m.logits)
			if err != nil {
				t.Fatal(err)
			}
			logits := distance(evaluate(t, g, feed)[0], want.floats(t, "logits"))
			g, err = m.Graph(shape)
			if err != nil {
				t.Fatal(err)
			}
			grad, err := ir.Grad(g, ir.GradPlan{})
			if err != nil {
				t.Fatal(err)
			}
			joint, err := grad.Joint()
			if err != nil {
				t.Fatal(err)
			}
			out := evaluate(t, joint, feed)
			loss := distance(out[0], want.floats(t, "loss"))
			worst, which := want.gradients(t, m, out[len(out)-len(m.Params()):]) // after loads of experts
			t.Logf("%-12s loss %.1e logits %.1e gradients %.1e (%s), %d operations, %d loops", f.name, loss,
				logits, worst, which, len(g.Ops), loops(g))
			// Two layers of these differ in turn, or have masks of their own: there is nothing to repeat.
			if want := !slices.Contains([]string{"gemma2", "gpt_oss", "dropout"}, f.name); (loops(g) == 1) != want {
				t.Errorf("%s has %d loops", f.name, loops(g))
			}
			if !(loss < 1e-5) || !(logits < 1e-5) || !(worst < 1e-4) {
				t.Errorf("%s does not agree with PyTorch", f.name)
			}
		})
	}
}

// gradients finds the gradient that is farthest from PyTorch's, by its norm or a thousandth of the
// largest: a bias of keys has the gradient 0, and in f32 noise in its place.
func (r reference) gradients(t *testing.T, m *Model, have [][]float64) (float64, string) {
	t.Helper()
	largest := 0.0
	for _, name := range r.Names() {
		if strings.HasPrefix(name, "grad.") {
			largest = math.Max(largest, length(r.floats(t, name)))
		}
	}
	worst, which := 0.0, ""
	for i, p := range m.Params() {
		for k, name := range p.Tensors() {
			if !slices.Contains(r.Names(), "grad."+name) { // a buffer
				continue
			}
			want := r.floats(t, "grad."+name)
			got := make([]float64, len(want))
			if err := model.Put(&p, k, got, have[i]); err != nil {
				t.Fatal(err)
			}
			d := distance(got, want)
			if n := length(want); n < largest/1000 {
				d *= n / (largest / 1000)
			}
			if !(d <= worst) {
				worst, which = d, name
			}
		}
	}
	return worst, which
}

func loops(g *ir.Graph) (n int) {
	for _, op := range g.Ops {
		if op.Kind == "repeat" {
			n++
		}
	}
	return n
}

func length(x []float64) float64 {
	sum := 0.0
	for _, v := range x {
		sum += v * v
	}
	return math.Sqrt(sum)
}

type reference struct{ *safetensors.Set }

// load opens a fixture; the model is nil if it is not supported.
func load(t *testing.T, name string) (*Model, reference) {
	t.Helper()
	archive, err := pt2.Parse(name, unpack(t, name+".pt2.gz"))
	if err != nil {
		t.Fatal(err)
	}
	set, err := safetensors.Parse(name, unpack(t, name+".safetensors.gz"))
	if err != nil {
		t.Fatal(err)
	}
	open := New
	if name == "dropout" {
		open = NewMasked
	}
	m, err := open(archive)
	if err != nil {
		t.Log(err)
	}
	return m, reference{set}
}

func unpack(t *testing.T, name string) []byte {
	t.Helper()
	f, err := os.Open("../pt2/testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	data, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// floats gives the numbers of a tensor.
func (r reference) floats(t *testing.T, name string) []float64 {
	t.Helper()
	x, err := r.Tensor(name)
	if err != nil {
		t.Fatal(err)
	}
	data, err := x.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	shape, err := r.Shape(name)
	if err != nil {
		t.Fatal(err)
	}
	out := make([]float64, shape.Elements())
	for i := range out {
		switch shape.Type {
		case dtype.F32:
			out[i] = float64(math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:])))
		case dtype.BF16:
			out[i] = float64(dtype.F32FromBF16(binary.LittleEndian.Uint16(data[2*i:])))
		case dtype.Pred:
			out[i] = float64(data[i])
		case dtype.S64:
			out[i] = float64(int64(binary.LittleEndian.Uint64(data[8*i:])))
		default:
			t.Fatalf("%s is %s", name, shape.Type)
		}
	}
	return out
}

// feed gives the inputs and parameters of a model by the names of its graph.
func (r reference) feed(t *testing.T, m *Model) (map[string][]float64, model.Shape) {
	t.Helper()
	if m == nil {
		t.Fatal("not supported")
	}
	shape := model.Shape{Batch: 2, Seq: 6, Elem: dtype.F32}
	feed := map[string][]float64{}
	labels := r.floats(t, "labels")
	if m.shifted {
		for i := range labels {
			if labels[i] = -100; int64(i)%shape.Seq < shape.Seq-1 {
				labels[i] = r.floats(t, "labels")[i+1]
			}
		}
	}
	count := 0.0
	for _, l := range labels {
		if l >= 0 {
			count++
		}
	}
	feed[model.InputLabels], feed[model.InputShare] = labels, []float64{1 / count}
	for i := range shape.Batch * shape.Seq {
		feed[model.InputPositions] = append(feed[model.InputPositions], float64(i%shape.Seq))
	}
	for _, name := range r.Names() {
		switch name {
		case "input_ids":
			feed[model.InputIDs] = r.floats(t, name)
		case "pixel_values":
			feed[name] = r.floats(t, name)
		}
		if strings.HasPrefix(name, "mask.") {
			feed[name] = r.floats(t, name)
		}
	}
	for _, p := range m.Params() {
		param := make([]float64, p.Size())
		for i, name := range p.Tensors() {
			x, err := m.archive.Tensor(name)
			if err != nil {
				t.Fatal(err)
			}
			single := make([]float32, x.Shape().Elements())
			if err := x.Read(single); err != nil {
				t.Fatal(err)
			}
			wide := make([]float64, len(single))
			for i, v := range single {
				wide[i] = float64(v)
			}
			if err := model.Take(&p, i, param, wide); err != nil {
				t.Fatal(err)
			}
		}
		feed[p.Name] = param
	}
	return feed, shape
}

func evaluate(t *testing.T, g *ir.Graph, feed map[string][]float64) [][]float64 {
	t.Helper()
	in := map[string][]*eval.Array{}
	for _, v := range g.Inputs {
		in[v.Name] = []*eval.Array{{Type: v.Type, Data: feed[v.Name]}}
	}
	out, err := eval.Run(g, in)
	if err != nil {
		t.Fatal(err)
	}
	var list [][]float64
	for _, o := range out {
		list = append(list, o[0].Data)
	}
	return list
}

// distance is the norm of a difference by the norm of what is wanted.
func distance(have, want []float64) float64 {
	if len(have) != len(want) {
		return math.Inf(1)
	}
	diff := make([]float64, len(want))
	for i := range want {
		diff[i] = have[i] - want[i]
	}
	return length(diff) / math.Max(length(want), 1e-6)
}

func TestUnsupportedIsListedAtOnce(t *testing.T) {
	archive, err := pt2.Parse("dropout", unpack(t, "dropout.pt2.gz"))
	if err != nil {
		t.Fatal(err)
	}
	_, err = New(archive)
	if err == nil {
		t.Fatal("dropout is trained without masks")
	}
	for _, want := range []string{"aten.dropout.default (dropout of 0.25: export", " in h.1.drop at models.py:", "in h.0.attn.drop at models.py:"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in %v", want, err)
		}
	}
}

// Under autocast GEMMs are computed in bf16 and norms and the loss in f32, though the program does
// not say so.
func TestAutocast(t *testing.T) {
	m, want := load(t, "autocast")
	feed, shape := want.feed(t, m)
	g, err := m.build(shape, m.logits)
	if err != nil {
		t.Fatal(err)
	}
	logits := distance(evaluate(t, g, feed)[0], want.floats(t, "logits"))
	if g, err = m.Graph(shape); err != nil {
		t.Fatal(err)
	}
	grad, err := ir.Grad(g, ir.GradPlan{})
	if err != nil {
		t.Fatal(err)
	}
	joint, err := grad.Joint()
	if err != nil {
		t.Fatal(err)
	}
	out := evaluate(t, joint, feed)
	loss := distance(out[0], want.floats(t, "loss"))
	worst, which := want.gradients(t, m, out[1:])
	t.Logf("loss %.1e logits %.1e gradients %.1e (%s), %d loops", loss, logits, worst, which, loops(g))
	if !(loss < 2e-3) || !(logits < 1e-2) || !(worst < 5e-2) || loops(g) != 1 {
		t.Error("autocast does not agree with PyTorch")
	}
	visit(g, func(op *ir.Op) {
		if to := map[string]dtype.DType{"linear": dtype.BF16, "attention": dtype.BF16,
			"layer_norm": dtype.F32, "cross_entropy": dtype.F32}[op.Kind]; to.Valid() &&
			op.Out[0].Type.Elem != to {
			t.Errorf("%s gives %s", op.Kind, op.Out[0].Type)
		}
	})
}
