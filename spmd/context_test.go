package spmd_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/spmd"
)

// attentive gives a model whose attention context parallelism must keep: documents, with
// fewer KV heads than tp has devices; layers with a window and without, and
// sinks; documents within a window; and
// latent attention.
// All have 16 heads, so that all-to-alls over 8 devices have some under tp, and two layers for stages.
func attentive(what string, window int64) (*model.Config, model.Shape) {
	c, s := *shapes()["qwen3"], model.Shape{Batch: 2, Elem: dtype.F32, Documents: 4}
	c.Heads, c.Window, c.Windowed, c.LocalRope = 16, window, []bool{true, true}, c.Rope
	switch what {
	case "documents":
		c.KVHeads, c.Window, c.Windowed = 1, 0, nil
	case "windows":
		c.Windowed, c.Sinks, s.Documents = []bool{true, false}, true, 0
	case "latent": // documents, and values of another size than keys
		c = *shapes()["deepseek_v3"]
		c.Heads, c.KVHeads = 16, 16
	}
	return &c, s
}

// chunk is the number of tokens of a chunk of a sequence.
const chunk = 4

// Every kind of context parallelism on 2, 4 and 8 devices, alone and with tensor, data
// and pipeline parallelism, gives one device's loss and gradients: by the interpreter, and some of them
// on the engine. Without a target every form is printed that cuDNN computes on GPUs: without documents no
// masks by positions, since chunks see their own keys under the causal mask, others all or by length,
// and a window the halo before its chunk.
func TestContextsAgreeWithOneDevice(t *testing.T) {
	e := enginetest.Open(t, engine.Options{Devices: 16}).Engine
	known := map[string]map[string][]float64{}
	for i, m := range plantest.Contexts() {
		window := chunk - 1 + 2*int64(i%2) // less than a chunk, or just one more
		for k, what := range []string{"documents", "windows", "both", "latent"} {
			if !slowtest.Enabled && (i+k)%18 > 0 {
				continue
			}
			run, bound, wants := evalRunner, exact, known
			t.Run(m.Name+" "+what, func(t *testing.T) {
				if (i+k)%6 == 0 && !slices.Contains(m.Axes, "pp") { // train runs stages on it
					d := newDevice(t, e, nil)
					d.hasty = true
					run, bound, wants = d.run, gradBound, map[string]map[string][]float64{}
				}
				d, where, err := contextDiffers(m, what, window, run, wants)
				if err != nil || !(d <= bound) {
					t.Errorf("%s is off by %g, %v", where, d, err)
				}
			})
		}
	}
}

// contextDiffers gives by how much results of a plan differ from one device's, by Frobenius norm. It
// adds the latter to wants, or takes them from there.
func contextDiffers(m mesh, what string, window int64, run runner,
	wants map[string]map[string][]float64) (float64, string, error) {
	p := newPlan(m)
	p.Seq = chunk * p.CP.Chunks()
	c, s := attentive(what, window)
	p.Batch, s.Seq = s.Batch, p.Seq
	if err := p.Check(c); err != nil {
		return 0, "", err
	}
	g, err := c.Graph(s)
	if err != nil {
		return 0, "", err
	}
	whole := rounded(fills(g, c, 3))
	key := fmt.Sprint(what, window, p.Seq)
	if wants[key] == nil {
		if wants[key], err = lossAndGradientsBy(run, g, whole, ir.GradPlan{}); err != nil {
			return 0, "", err
		}
	}
	var got map[string][]float64
	if p.PP.Size > 1 {
		var stages []*spmd.Stage
		if stages, err = spmd.Stages(g, []int64{1, 1}); err == nil {
			got, err = runStages(stages, p, ordered(whole, p))
		}
	} else {
		var sh *spmd.Sharding
		if sh, err = spmd.Shard(g, p); err == nil {
			got, err = lossAndGradientsBy(run, sh.Graph, ordered(whole, p),
				ir.GradPlan{Recompute: []ir.Tag{ir.Gather}, Terms: true})
		}
	}
	d, where := frobenius(got, wants[key])
	return d, where, err
}
