package train

import (
	"context"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
)

// quantizedExperts is Mixtral's routing with sizes that blocks divide, and a shared expert. Of the
// linear layers one is quantized that an expert takes its rows to, and one that it gives them by;
// and one of the shared expert.
func quantizedExperts(e *engine.Engine, format ir.Format) *parity {
	p := quantizedParity(sparse(e)["mixtral"], format, quantizedOnce)
	c, m := *p.config, *p.config.MoE
	m.MLP, m.Shared = 64, 64
	c.MoE = &m
	p.config, p.hasty, p.wide = &c, true, true
	p.linears = []string{"expert_up", "expert_down", "shared_down"}
	return p
}

// Three steps of quantized experts end where one device ends. Devices have other tokens in the
// blocks along which wgrad is quantized, whose scales are powers of two in MXFP8 and round all but
// the smallest elements alike; in NVFP4 not, whose gradients are rounded by slots besides.
func TestQuantizedExpertPlansEndAlike(t *testing.T) {
	slowtest.Only(t) // compiles programs for four devices
	e, err := engine.Open(context.Background(), "cpu", engine.Options{Devices: 4, Cache: cache})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	zero3 := func(p *plan.Plan) {
		p.EP, p.FSDP = 2, plan.FSDP{Size: 2, Zero: 3, Gather: "layer"}
		p.Slots = []float64{4} // one size, to compile in less time
	}
	for _, format := range []ir.Format{ir.MXFP8, ir.NVFP4} {
		t.Run(string(format), func(t *testing.T) {
			p := quantizedExperts(e, format)
			if _, err := p.hold(t, plantest.Row{Name: "ep2 zero3", Apply: zero3}); err != nil {
				t.Error(err)
			}
		})
	}
}

// The monitors see all experts of a layer as one operand, whichever device has them, and scales are
// used as they were made.
func TestReportsOfExperts(t *testing.T) {
	slowtest.Only(t)
	p := newPost(t, openCPU(t, 2), "mxfp8", "expert_up", "expert_down")
	p.config.Arch, p.sites = "mixtral", nil
	p.config.MoE = &model.MoE{Experts: 4, TopK: 2, MLP: 64, Score: "softmax", Normalize: true, Scale: 1}
	p.plan = plan.Default()
	p.plan.Seq, p.plan.Batch, p.plan.EP, p.plan.Cluster = 32, 4, 2, "2xcpu"
	p.plan.Precision, p.plan.Types.Params = "mxfp8", dtype.BF16
	tr := p.start(t.TempDir(), chain{}, &log{}, "steps=2", "optimizer.warmup=0")
	t.Cleanup(tr.Close)
	if err := tr.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, one := range tr.sample().Linears {
		if !slices.Contains([]string{"expert_up", "expert_down"}, one.Name) {
			continue
		}
		if seen++; len(one.Operands) != 6 || one.Wgrad != "mxfp8" || !(one.Norm > 0) {
			t.Errorf("layer %d, %s: %+v", one.Layer, one.Name, one)
		}
		for _, o := range one.Operands {
			if w := o.Name[0] == 'w'; w != (o.Made > 0) || o.Made != o.Used {
				t.Errorf("layer %d, %s: %+v", one.Layer, one.Name, o)
			}
		}
	}
	if seen != 4 {
		t.Errorf("%d linear layers of experts report", seen)
	}
}
