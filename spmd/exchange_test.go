package spmd_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/spmd"
)

// An all-to-all gives each device the KV heads of its query heads, however many there are: shards,
// copies where cp does not divide them, copies of copies where tp does not either. Documents and
// windows stay as they are, and the operation is attention to a whole sequence.
func TestHeadsAreExchanged(t *testing.T) {
	sizes := [][2]int64{{1, 2}, {1, 3}, {1, 6}, {2, 3}, {3, 2}}
	for _, kv := range []int64{1, 2, 3, 6} {
		c := *shapes()["gemma2"]
		c.Heads, c.KVHeads, c.MLP, c.Hidden = 6, kv, 6, 6
		g, err := c.Graph(model.Shape{Batch: 2, Seq: 12, Elem: dtype.F32, Documents: 8})
		if err != nil {
			t.Fatal(err)
		}
		whole := fills(g, &c, 3)
		want, err := lossAndGradients(g, whole, ir.GradPlan{})
		if err != nil {
			t.Fatal(err)
		}
		for i, n := range sizes {
			p := newPlan(mesh{Apply: func(p *plan.Plan) {
				p.Batch, p.Seq = 2, 12
				p.TP = plan.TP{Size: n[0], Sequence: i%2 == 0, Overlap: i == 4}
				p.CP = plan.CP{Size: n[1], Kind: "a2a"}
				if i%3 == 0 {
					p.Order = []string{"pp", "tp", "cp", "ep", "fsdp", "dp"}
				}
			}})
			if !plan.FitsTP(factsOf(&c), n[0]) {
				continue
			}
			name := fmt.Sprintf("%d KV heads, tp %d, cp %d", kv, n[0], n[1])
			if i >= 3 { // groups in a ring, in the order of the sequence and zigzag
				p.CP.Kind, p.CP.Inner, p.CP.Size, p.CP.Balance = "a2a+ring", n[1], 2*n[1], i == 4
				p.Cluster = fmt.Sprintf("%dxcpu", p.Devices())
			}
			if err := p.Check(&c); err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			sh, err := spmd.Shard(g, p)
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			if text := sh.Graph.String(); strings.Contains(text, "placed=") != (i >= 3) || !strings.Contains(text, "all_to_all") {
				t.Errorf("%s: attention is not to a whole sequence\n%s", name, text)
			}
			got, err := lossAndGradients(sh.Graph, ordered(whole, p), ir.GradPlan{Recompute: []ir.Tag{ir.Gather}, Terms: i%2 == 0})
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			if d, where := differ(got, want); !(d <= exact) {
				t.Errorf("%s: %s is off by %g", name, where, d)
			}
		}
	}
}

func factsOf(c *model.Config) *model.Facts {
	f := c.Facts()
	return &f
}
