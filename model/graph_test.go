package model_test

import (
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/golden"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/model"
)

// The graphs of a plain model and of the one with most in it are committed, to be read.
func TestGraphText(t *testing.T) {
	for _, name := range []string{"llama3", "gemma3"} {
		c := parseFile(t, filepath.Join("testdata", name, "config.json"))
		g, err := c.Graph(model.Shape{Batch: 2, Seq: 11, Elem: dtype.BF16})
		if err != nil {
			t.Fatal(err)
		}
		golden.Compare(t, filepath.Join("testdata", name, "graph.txt"), []byte(g.String()))
		back, err := ir.Parse(g.String())
		if err != nil || back.String() != g.String() {
			t.Errorf("the graph of %s does not come back: %v", name, err)
		}
	}
}

// The size of a graph does not depend on depth, and its parameters are the list's.
func TestGraphOfPresets(t *testing.T) {
	lines := map[string]int{}
	for _, name := range []string{"llama3.1-8b", "llama3.1-70b", "llama3.1-405b"} {
		p, err := model.Find(name)
		if err != nil {
			t.Fatal(err)
		}
		g, err := p.Config.Graph(model.Shape{Batch: 1, Seq: 8192, Elem: dtype.BF16})
		if err != nil {
			t.Fatal(err)
		}
		lines[name] = strings.Count(g.String(), "\n")
		params := p.Config.Params()
		for i, v := range g.Params() {
			if v.Name != params[i].Name || v.Source != params[i].Source {
				t.Errorf("%s: parameter %d is %s from %s, not %s", name, i, v, v.Source, params[i].Name)
			}
		}
		if _, err := ir.Grad(g, ir.GradPlan{Recompute: []ir.Tag{ir.Norm, ir.Attn, ir.MLP}}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if lines["llama3.1-8b"] != lines["llama3.1-405b"] {
		t.Errorf("lines of graphs: %v", lines)
	}
}

// Gemma 3 has five layers with a window, then one without; 26 layers are four turns and two more.
func TestTurns(t *testing.T) {
	p, err := model.Find("gemma3-1b")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range p.Config.Params() {
		if strings.HasSuffix(p.Name, ".q") {
			got = append(got, fmt.Sprintf("%s %d+%d×%d", p.Name, p.First, p.Step, p.Dims[0].Size))
		}
	}
	want := "block0.q 0+6×4, block1.q 1+6×4, block2.q 2+6×4, block3.q 3+6×4, block4.q 4+6×4, " +
		"block5.q 5+6×4, block6.q 24+1×2"
	if text := strings.Join(got, ", "); text != want {
		t.Errorf("stacks are %s", text)
	}
}

func TestGraphRefuses(t *testing.T) {
	p, err := model.Find("gpt2")
	if err != nil {
		t.Fatal(err)
	}
	var unknown *model.Config
	for _, c := range []struct {
		c          *model.Config
		batch, seq int64
		elem       dtype.DType
		code       diag.Code
	}{
		{p.Config, 0, 8, dtype.F32, diag.BadInput},
		{p.Config, 1, 0, dtype.F32, diag.BadInput},
		{p.Config, 1 << 40, 1 << 40, dtype.F32, diag.BadInput},
		{p.Config, 1, 1025, dtype.F32, diag.BadInput}, // more than the learned positions
		{p.Config, 1, 8, dtype.S32, diag.BadInput},
		{&model.Config{}, 1, 8, dtype.F32, diag.BadInput},
		{unknown, 1, 8, dtype.F32, diag.NotSupported},
	} {
		if _, err := c.c.Graph(model.Shape{Batch: c.batch, Seq: c.seq, Elem: c.elem}); err == nil || diag.From(err).Code != c.code {
			t.Errorf("%d×%d of %s: %v", c.batch, c.seq, c.elem, err)
		}
	}
}

// Gemma's embeddings grow by √hidden as the element type holds it.
func TestScaleOfEmbeddings(t *testing.T) {
	p, err := model.Find("gemma2-9b")
	if err != nil {
		t.Fatal(err)
	}
	for elem, want := range map[dtype.DType]float64{
		dtype.BF16: 59.75, dtype.F16: 59.875, dtype.F32: float64(float32(math.Sqrt(3584))),
		dtype.F64: math.Sqrt(3584),
	} {
		g, err := p.Config.Logits(model.Shape{Batch: 1, Seq: 8, Elem: elem})
		if err != nil {
			t.Fatal(err)
		}
		if got := g.Ops[1].Attrs.Float("by"); g.Ops[1].Kind != "scale" || got != want {
			t.Errorf("in %s, %s by %v, want %v", elem, g.Ops[1].Kind, got, want)
		}
	}
}

// Without a label the loss is zero, not NaN.
func TestLossOfNothing(t *testing.T) {
	f := readFixture(t, filepath.Join("testdata", "gpt2"))
	f.want = nil
	g, err := f.c.Graph(model.Shape{Batch: 2, Seq: 11, Elem: dtype.F32})
	if err != nil {
		t.Fatal(err)
	}
	inputs := f.load(t, g)
	for i := range inputs[model.InputLabels][0].Data {
		inputs[model.InputLabels][0].Data[i] = -100
	}
	out, err := eval.Run(g, inputs)
	if err != nil || out[0][0].Data[0] != 0 {
		t.Errorf("the loss is %v, %v", out, err)
	}
}

// The fixtures would notice if any switch of a configuration were not obeyed.
func TestFixturesSeeEverySwitch(t *testing.T) {
	switches := map[string]map[string]func(*model.Config){
		"llama3": {
			"theta":    func(c *model.Config) { c.Rope.Theta *= 1.1 },
			"factor":   func(c *model.Config) { c.Rope.Factor = 7 },
			"low":      func(c *model.Config) { c.Rope.Low = 1.2 },
			"high":     func(c *model.Config) { c.Rope.High = 6 },
			"original": func(c *model.Config) { c.Rope.Original = 20 },
			"eps":      func(c *model.Config) { c.Norm.Eps = 1e-3 },
			"act":      func(c *model.Config) { c.Activation = model.GELU },
		},
		"llama_linear": {"factor": func(c *model.Config) { c.Rope.Factor = 0 }},
		"mistral":      {"window": func(c *model.Config) { c.Window++ }},
		"qwen2":        {"windows": func(c *model.Config) { c.Windowed = []bool{true, true, true} }},
		"qwen3":        {"qk norm": func(c *model.Config) { c.QKNorm = false }},
		"gemma2": {
			"scores": func(c *model.Config) { c.AttnCap = 0 },
			"logits": func(c *model.Config) { c.LogitCap = 0 },
			"scale":  func(c *model.Config) { c.AttnScale *= 1.05 },
			"embed":  func(c *model.Config) { c.ScaledEmbed = false },
			"turn":   func(c *model.Config) { c.Windowed = []bool{false, true, false, true} },
			"shift":  func(c *model.Config) { c.Norm.Shift = 0 },
		},
		"gemma3": {
			"local":  func(c *model.Config) { c.LocalRope = c.Rope },
			"global": func(c *model.Config) { c.Rope.Factor = 0 },
		},
		"phi3_partial": {"rotary": func(c *model.Config) { c.Rotary = 4 }},
		"nemotron":     {"rotary": func(c *model.Config) { c.Rotary = 8 }},
	}
	for name, list := range switches {
		dir := filepath.Join("testdata", name)
		f := readFixture(t, dir)
		for what, turn := range list {
			f.c = parseFile(t, filepath.Join(dir, "config.json"))
			turn(f.c)
			g, err := f.c.Logits(model.Shape{Batch: 2, Seq: 11, Elem: dtype.F32})
			if err != nil {
				t.Fatal(err)
			}
			out, err := eval.Run(g, f.load(t, g))
			if err != nil {
				t.Fatal(err)
			}
			if d := enginetest.Distance(out[0][0].Data, f.want["logits"]); d < 10*logitBound {
				t.Errorf("%s does not notice %s: %.1g", name, what, d)
			}
		}
	}
}

func ExampleConfig_Count() {
	p, err := model.Find("meta-llama/Llama-3.1-8B")
	if err != nil {
		fmt.Println(err)
		return
	}
	n, f := p.Config.Count(), p.Config.Forward(8192).Training()
	fmt.Printf("%.2fB parameters, %.1f GFLOP per token to train, %.0f%% of it attention\n",
		float64(n.Total)/1e9, f.Sum()/1e9, 100*f.Attention/f.Sum())
	// Output: 8.03B parameters, 51.5 GFLOP per token to train, 13% of it attention
}
