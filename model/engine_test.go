package model_test

import (
	"context"
	"encoding/binary"
	"math"
	"path/filepath"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/program"
)

// The whole way on the real engine: config.json and weights in, the graph lowered to StableHLO and run
// by XLA in f32, logits, loss and gradients out. They are those of transformers.
func TestEngineAgainstTransformers(t *testing.T) {
	e, err := engine.Open(context.Background(), "cpu", engine.Options{Devices: 1})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	defer e.Close()
	for _, dir := range fixtures(t) {
		t.Run(filepath.Base(dir), func(t *testing.T) {
			c := parseFile(t, filepath.Join(dir, "config.json"))
			weights := tensors(t, filepath.Join(dir, "model.safetensors"))
			want := tensors(t, filepath.Join(dir, "expected.safetensors"))
			scores, err := c.Logits(model.Shape{Batch: 2, Seq: 11, Elem: dtype.F32})
			if err != nil {
				t.Fatal(err)
			}
			logits := distance(runOn(t, e, scores, load(t, c, scores, weights, want))[0], want["logits"])
			g, err := c.Graph(model.Shape{Batch: 2, Seq: 11, Elem: dtype.F32})
			if err != nil {
				t.Fatal(err)
			}
			gr, err := ir.Grad(g, ir.GradPlan{})
			if err != nil {
				t.Fatal(err)
			}
			joint, err := gr.Joint()
			if err != nil {
				t.Fatal(err)
			}
			out := runOn(t, e, joint, load(t, c, g, weights, want))
			loss := distance(out[0], want["loss"])
			exported := map[string][]float64{}
			for i, p := range c.Params() {
				for k, name := range p.Tensors() {
					if exported[name] == nil {
						exported[name] = make([]float64, len(weights[name]))
					}
					if err := model.Put(&p, k, exported[name], out[1+i]); err != nil {
						t.Fatal(err)
					}
				}
			}
			worst, where := 0.0, ""
			for name := range weights {
				if d := distance(exported[name], want["grad."+name]); d > worst {
					worst, where = d, name
				}
			}
			t.Logf("logits %.1e, loss %.1e, gradients at most %.1e (%s)", logits, loss, worst, where)
			if logits > logitBound || loss > 1e-5 || worst > gradBound || math.IsNaN(logits+loss+worst) {
				t.Errorf("logits are off by %.2g, the loss by %.2g, the gradient of %s by %.2g", logits, loss, where, worst)
			}
		})
	}
}

func runOn(t *testing.T, e *engine.Engine, g *ir.Graph, inputs map[string][]*eval.Array) [][]float64 {
	t.Helper()
	text, err := lower.Module(g, lower.Options{})
	if err != nil {
		t.Fatal(err)
	}
	x, err := e.Compile(t.Context(), &program.FromText("step", text, 1).Stages[0])
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	defer x.Free()
	var args []*engine.Array
	for i, v := range g.Inputs {
		a, err := e.Place(x.Stage(), x.Stage().Args[i], engine.Copied, func(int) ([]byte, error) {
			var b []byte
			for _, n := range inputs[v.Name][0].Data {
				bits := math.Float32bits(float32(n))
				if v.Type.Elem == dtype.S32 {
					bits = uint32(int32(n))
				}
				b = binary.LittleEndian.AppendUint32(b, bits)
			}
			return b, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Free()
		args = append(args, a)
	}
	run, err := x.Run(args...)
	if err != nil {
		t.Fatal(err)
	}
	defer run.Free()
	out := make([][]float64, len(g.Results))
	for i := range g.Results {
		b, err := run.Results[i].Read(t.Context(), 0)
		if err != nil {
			t.Fatal(err)
		}
		for ; len(b) > 0; b = b[4:] {
			out[i] = append(out[i], float64(math.Float32frombits(binary.LittleEndian.Uint32(b))))
		}
	}
	return out
}
