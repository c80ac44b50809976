package precision_test

import (
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/precision"
)

// Rows go to experts in MXFP8 where both GEMMs that read them are in it, forward and backward each
// for itself: a GEMM that has fallen back reads rows that were never rounded.
func TestPayload(t *testing.T) {
	c := *preset(t, "mixtral-8x7b")
	c.Layers = 1
	fall := func(linear, product string) func(*precision.Policy) *precision.Policy {
		return func(p *precision.Policy) *precision.Policy {
			return p.Fall(0, linear, product, dtype.FormatBF16, "For the test.")
		}
	}
	for _, row := range []struct {
		name, word string
		change     func(*precision.Policy) *precision.Policy
		rows, back bool
	}{
		{"bf16", "bf16", nil, false, false},
		{"mxfp8", "mxfp8", nil, true, true},
		{"nvfp4", "nvfp4", nil, false, false},
		{"kept wide", "mxfp8", func(p *precision.Policy) *precision.Policy {
			p.Payload = dtype.FormatBF16
			return p
		}, false, false},
		{"fprop of one", "mxfp8", fall("expert_gate", precision.Fprop), false, true},
		{"wgrad of one", "mxfp8", fall("expert_up", precision.Wgrad), false, true},
		{"dgrad of gates", "mxfp8", fall("expert_gate", precision.Dgrad), true, true},
		{"dgrad of down", "mxfp8", fall("expert_down", precision.Dgrad), true, false},
		{"wgrad of down", "mxfp8", fall("expert_down", precision.Wgrad), true, false},
		{"last steps", "mxfp8", (*precision.Policy).FinalBF16, false, true},
	} {
		p := policy(t, &c, row.word)
		if row.change != nil {
			p = row.change(p)
		}
		g, err := c.Graph(model.Shape{Batch: 1, Seq: 128, Elem: dtype.BF16,
			Experts: model.ExpertShape{Blocks: true}})
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Mark(g, c.Params()); err != nil {
			t.Fatal(err)
		}
		if err := g.Verify(); err != nil {
			t.Fatal(err)
		}
		got := map[string]string{}
		for _, op := range g.Ops {
			if op.Body == nil {
				continue
			}
			for _, op := range op.Body.Ops {
				if f := op.Attrs.Text(ir.Payload); f != "" {
					got[op.Kind] += f
				}
			}
		}
		want := func(is bool) string { // the gates' dispatch has none
			if is {
				return "mxfp8"
			}
			return ""
		}
		if got["dispatch"] != want(row.rows) || got["combine"] != want(row.back) {
			t.Errorf("%s: payloads are %v", row.name, got)
		}
	}
}
