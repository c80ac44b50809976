package aten

import (
	"strings"
	"testing"

	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
)

// Functions compute what the program returns from what the caller gives: outputs and gradients are
// PyTorch's, labels are not moved by the caller, and the loss is a mean.
func TestFunctionsAgreeWithPyTorch(t *testing.T) {
	for _, fix := range fixtures {
		t.Run(fix.name, func(t *testing.T) {
			archive, err := pt2.Parse(fix.name, unpack(t, fix.name+".pt2.gz"))
			if err != nil {
				t.Fatal(err)
			}
			_, want := load(t, fix.name)
			f, err := NewFunction(archive)
			if err != nil {
				t.Fatal(err)
			}
			feed, sizes := map[string][]float64{}, [][]int64{}
			for i, name := range f.Inputs() {
				feed[InputName(i)] = want.floats(t, name)
				shape, err := want.Shape(name)
				if err != nil {
					t.Fatal(err)
				}
				sizes = append(sizes, shape.Dims)
			}
			r, err := f.Read(sizes, nil)
			if err != nil {
				t.Fatal(err)
			}
			f.feed(t, r.Params, feed)
			for _, d := range r.Draws {
				feed[d.Name] = want.floats(t, strings.Replace(d.Name, "mask.x", "mask.", 1))
			}
			if (len(r.Draws) == 7) != (fix.name == "dropout") {
				t.Errorf("%s draws %d masks", fix.name, len(r.Draws))
			}
			gr, err := ir.Grad(r.Graph, ir.GradPlan{})
			if err != nil {
				t.Fatal(err)
			}
			out := evaluate(t, gr.Forward, feed)
			for i, v := range gr.Forward.Results {
				feed[v.Name] = out[i]
			}
			var losses, logits float64
			for i, s := range archive.Program.Outputs {
				o := r.Outputs[i]
				if o.Result < 0 {
					t.Errorf("%s is no tensor", s.Name)
					continue
				}
				have, seed := out[o.Result], make([]float64, len(out[o.Result]))
				switch s.Name[strings.LastIndexByte(s.Name, '.')+1:] {
				case "loss":
					losses, seed[0] = distance(have, want.floats(t, "loss")), 1
				case "logits":
					logits = distance(have, want.floats(t, "logits"))
				}
				feed[gr.Seeds[o.Result]] = seed
			}
			m := f.model
			m.params = r.Params
			worst, which := want.gradients(t, m, evaluate(t, gr.Backward, feed))
			t.Logf("%-12s loss %.1e logits %.1e gradients %.1e (%s), %d loops, %d parts", fix.name, losses,
				logits, worst, which, loops(r.Graph), len(r.Parts))
			if !(losses < 1e-5) || !(logits < 1e-5) || !(worst < 1e-4) {
				t.Errorf("%s does not agree with PyTorch", fix.name)
			}
		})
	}
}

// feed adds parameters by the names of a graph.
func (f *Function) feed(t *testing.T, params []model.Param, feed map[string][]float64) {
	t.Helper()
	for _, p := range params {
		single := make([]float32, p.Size())
		if err := f.model.Init(&p, 0, single); err != nil {
			t.Fatal(err)
		}
		for _, x := range single {
			feed[p.Name] = append(feed[p.Name], float64(x))
		}
	}
}

// Sizes that the export does not have are refused, by the name of the input.
func TestFunctionSizesAreChecked(t *testing.T) {
	archive, err := pt2.Parse("nanogpt", unpack(t, "nanogpt.pt2.gz"))
	if err != nil {
		t.Fatal(err)
	}
	f, err := NewFunction(archive)
	if err != nil {
		t.Fatal(err)
	}
	for want, sizes := range map[string][][]int64{
		"takes 2 tensors, not 1":         {{2, 6}},
		"has 2 dimensions, not 1":        {{2, 6}, {2}},
		"has a size of 6 where":          {{2, 6}, {2, 7}},
		"outside the export's range, 2 ": {{2, 600}, {2, 600}},
	} {
		if _, err := f.Read(sizes, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: no %q in %v", sizes, want, err)
		}
	}
}
