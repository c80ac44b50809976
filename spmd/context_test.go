package spmd_test

import (
	"fmt"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/spmd"
)

// Without documents context parallelism needs no masks by positions: chunks see their own keys
// under the causal mask, others all or by length, and a window the halo before its chunk. Layers
// with a window of less than a chunk, or of just one more, and layers without; on two and four
// devices, with tensor and data parallelism. Without a target every form is printed that cuDNN
// computes on GPUs.
func TestContextWithoutMasksOnTheEngine(t *testing.T) {
	slowtest.Only(t)
	e := openEngine(t)
	c := *shapes()["qwen3"]
	c.Layers, c.Windowed, c.LocalRope = 4, []bool{true, false, true, false}, c.Rope
	for i := range 9 {
		cp := plan.CP{Size: int64(2 + i&2), Kind: []string{"gather", "ring"}[i&1], Balance: i&4 > 0}
		if i == 8 {
			cp = plan.CP{Size: 4, Kind: "a2a+ring", Inner: 2, Balance: true}
		}
		c.Window = []int64{3, 5}[(i+i/4)&1]
		t.Run(fmt.Sprintf("%s %d balance %v window %d", cp.Kind, cp.Size, cp.Balance, c.Window),
			func(t *testing.T) {
				p := newPlan(mesh{Apply: func(p *plan.Plan) {
					p.CP, p.Seq = cp, 4*cp.Chunks()
					p.TP = plan.TP{Size: 4 / cp.Size, Sequence: true}
					p.FSDP.Size = 2
				}})
				g, err := c.Graph(model.Shape{Batch: batch, Seq: p.Seq, Elem: dtype.F32})
				if err != nil {
					t.Fatal(err)
				}
				whole := rounded(fills(g, &c, 3))
				want, err := lossAndGradients(g, whole, ir.GradPlan{})
				if err != nil {
					t.Fatal(err)
				}
				sh, err := spmd.Shard(g, p)
				if err != nil {
					t.Fatal(err)
				}
				got, err := lossAndGradientsBy(newDevice(t, e, nil).run, sh.Graph, ordered(whole, p),
					ir.GradPlan{Recompute: []ir.Tag{ir.Gather}, Terms: true})
				if err != nil {
					t.Fatal(err)
				}
				if d, where := frobenius(got, want); !(d <= gradBound) {
					t.Errorf("%s is off by %g", where, d)
				}
			})
	}
}
