package spmd_test

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/spmd"
)

var planFile = flag.String("plans.file", "", "compile the plan in this file for its cluster, too")

// The programs of a plan, compiled for Blackwell, send what their graphs say: the same kinds,
// groups, tensors and bytes. XLA:GPU may join the arguments of sums, so those are held to their
// bytes alone. Attention is cuDNN's in every kind of context parallelism, with a window and
// without.
func TestCensusOnBlackwell(t *testing.T) {
	slowtest.Only(t)
	c := enginetest.GPUCompiler(t, false)
	small := *shapes()["llama"]
	small.Hidden, small.Heads, small.KVHeads, small.HeadDim, small.MLP = 256, 8, 2, 64, 512
	small.Vocab, small.Rotary, small.Layers = 1001, 64, 4
	small.Window, small.Windowed, small.LocalRope = 65, []bool{true, false, true, false}, small.Rope
	p := plan.Default()
	p.Seq, p.Batch, p.Cluster, p.Recompute = 512, 8, "16xb200", []ir.Tag{ir.Norm, ir.Attn, ir.MLP}
	p.FSDP = plan.FSDP{Size: 2, Zero: 3, Gather: "layer"}
	p.TP, p.DP = plan.TP{Size: 2, Sequence: true}, 2
	p.CP = plan.CP{Size: 2, Kind: "gather", Balance: true}
	p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
	t.Run("small", func(t *testing.T) { censusOnBlackwell(t, c, &small, p) })
	ring := *p
	ring.CP.Kind, ring.DP, ring.Cluster, ring.Batch = "ring", 1, "8xb200", 4
	t.Run("ring", func(t *testing.T) { censusOnBlackwell(t, c, &small, &ring) })
	whole := ring
	whole.CP = plan.CP{Size: 2, Kind: "a2a"}
	t.Run("a2a", func(t *testing.T) { censusOnBlackwell(t, c, &small, &whole) })
	both := whole
	both.CP, both.TP = plan.CP{Size: 4, Kind: "a2a+ring", Inner: 2, Balance: true}, plan.TP{Size: 1}
	t.Run("a2a and ring", func(t *testing.T) { censusOnBlackwell(t, c, &small, &both) })
	if *planFile == "" {
		return
	}
	text, err := os.ReadFile(*planFile)
	if err != nil {
		t.Fatal(err)
	}
	if p, err = plan.Parse(text, *planFile); err != nil {
		t.Fatal(err)
	}
	preset, err := model.Find(p.Model)
	if err != nil {
		t.Fatal(err)
	}
	t.Run(p.Model, func(t *testing.T) { censusOnBlackwell(t, c, preset.Config, p) })
}

func censusOnBlackwell(t *testing.T, c *engine.Compiler, m *model.Config, p *plan.Plan) {
	if err := p.Check(m); err != nil {
		t.Fatal(err)
	}
	g, err := m.Graph(model.Shape{Batch: p.MicrobatchSequences(), Seq: p.Seq, Elem: p.Types.Params})
	if err != nil {
		t.Fatal(err)
	}
	sh, err := spmd.Shard(g, p)
	if err != nil {
		t.Fatal(err)
	}
	o := optim.AdamW{Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, ClipNorm: 1, Compute: p.Types.Params}
	s, err := build(sh.Graph, spmd.Options{Optimizer: o, Sharding: sh, Recompute: p.Recompute})
	if err != nil {
		t.Fatal(err)
	}
	cluster, err := machine.ParseCluster(p.Cluster)
	if err != nil {
		t.Fatal(err)
	}
	graphs := []*ir.Graph{s.Gradient, s.Reduce, s.Square, s.Update}
	if p.CP.Kind != "gather" {
		graphs = graphs[:1] // the update has no attention
	}
	for _, g := range graphs {
		if g == nil {
			continue // nothing to reduce
		}
		set := kernels.For(cluster.GPU.Arch)
		stage, err := lower.Module(g.Name, g, lower.Options{Kernels: set})
		if err != nil {
			t.Fatal(err)
		}
		for _, chosen := range set.Choices() {
			if strings.HasPrefix(chosen.Kind, "attention") && chosen.Kernel != kernels.CuDNN {
				t.Errorf("%s: %+v", g.Name, chosen)
			}
		}
		stage.Flags = map[string]any{ // as engine/compiler.go sets them
			"xla_gpu_pipeline_all_gather":          "COLLECTIVE_PIPELINING_MODE_EXPLICIT",
			"xla_gpu_collective_domain_assignment": "scale_up_fabric",
			"xla_gpu_enable_triton_gemm":           false,
		}
		r, err := c.Compile(t.Context(), stage, cluster)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s\n%s", g.Name, r)
		if r.Recomputed > 0 {
			t.Errorf("%s: XLA computes %d instructions again on its own", g.Name, r.Recomputed)
		}
		if off := spmd.CensusOf(g).Diff(r.Collectives, false, p.Types.Collectives); off != nil {
			t.Errorf("%s: %s", g.Name, off)
		}
	}
}
