package main

import (
	"io"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
)

// A layer sends rows three times to experts and twice back. A payload makes 33 bytes of 64, saved
// rows go once less and are kept as they came.
func TestWire(t *testing.T) {
	m, err := model.Find("deepseek-v3")
	if err != nil {
		t.Fatal(err)
	}
	cluster, err := machine.ParseCluster("256xgb200")
	if err != nil {
		t.Fatal(err)
	}
	p := plan.Default()
	p.Model, p.Cluster, p.Seq, p.Batch, p.Microbatches = m.Name, "256xgb200", 4096, 256, 1
	p.EP, p.FSDP = 16, plan.FSDP{Size: 16, Zero: 3, Gather: "layer"}
	p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
	p.Precision, p.Recompute = "mxfp8", []ir.Tag{ir.Norm, ir.Attn, ir.Experts}
	x := &exchange{out: io.Discard, plan: p, model: m.Config, arch: cluster.GPU.Arch}
	e := m.Config.MoE
	rows := p.Seq * e.TopK * 3 / 2 * m.Config.Hidden // of one sequence, in elements
	add := func(list []int64) int64 { return lists.Sum(list, func(n int64) int64 { return n }) }
	var kept [3]int64
	for i, row := range []struct {
		payload dtype.Format
		save    bool
		bytes   int64
	}{
		{dtype.FormatBF16, false, 5 * 2 * rows},
		{"", false, 3*rows*33/32 + 2*2*rows},
		{"", true, 2*rows*33/32 + 2*2*rows},
	} {
		sent, saved, err := x.layer(row.payload, row.save)
		if err != nil {
			t.Fatal(err)
		}
		if add(sent) != row.bytes {
			t.Errorf("payload %q, saved %v: %d bytes are sent, not %d", row.payload, row.save, add(sent),
				row.bytes)
		}
		kept[i] = saved
	}
	// Weights of rows are saved as they came, too, and not of tokens: a thousandth.
	if more := kept[2] - kept[1] - rows*33/32; kept[0] != kept[1] || max(more, -more) > rows/1000 {
		t.Errorf("%d bytes are saved, of %d elements of rows", kept, rows)
	}
}
