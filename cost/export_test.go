package cost

import (
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
)

// Built is the bill of a graph that was built for the very sizes of a sharding.
func Built(c *model.Config, cut Sharding) (*Bill, error) {
	b := New(c, "sm_100", nil)
	s, err := b.build(cut)
	if err != nil {
		return nil, err
	}
	return s.bill(cut, nil, [2]int64{1, 1}), nil
}

// List gives the tags of a set.
func (t Tags) List() []ir.Tag { return lists.Filter(tags, t.Has) }

// Of visits what one run of a graph does on one device, and how often.
func Of(g *ir.Graph, times int64, visit func(Item, int64)) {
	for _, e := range entries(g, g.Ops) {
		if item := e.item(g, nil); item.Class != ir.Fused {
			visit(item, times)
		}
	}
	for _, op := range g.Ops {
		if op.Body != nil {
			Of(op.Body, times*op.Loop().N, visit)
		}
	}
}
