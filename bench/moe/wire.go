package main

import (
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/deepwell/deepwell/cost"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/price"
)

// wire prints what the all-to-alls of one layer with experts send in a microbatch, forward and
// backward, and what that costs: in the plan's own form and without what shortens it. Nothing is
// run or compiled.
func wire(out io.Writer, path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	p, err := plan.Parse(text, path)
	if err != nil {
		return err
	}
	m, err := model.Find(p.Model)
	if err != nil {
		return err
	}
	cluster, err := machine.ParseCluster(p.Cluster)
	if err != nil {
		return err
	}
	profile, err := price.Find(price.Own)
	if err != nil {
		return err
	}
	x := exchange{out: out, prices: price.New(cluster, profile), plan: p, model: m.Config,
		arch: cluster.GPU.Arch}
	x.group.Size, x.group.Stride = ir.Along(p.Mesh(), plan.ExpertAxis)
	fmt.Fprintf(out, "%s, ep %d: a layer and microbatch of a device, rows\n", path, p.EP)
	fmt.Fprintf(out, "%-44s %8s %8s %9s %9s\n", "", "tensors", "GB", "ms", "saved GB")
	return x.table()
}

// An exchange is how rows go to experts and back under a plan.
type exchange struct {
	out    io.Writer
	prices *price.Prices
	group  price.Group
	plan   *plan.Plan
	model  *model.Config
	arch   string
}

// table prints the forms, each with one change more.
func (x *exchange) table() error {
	for i, row := range []struct {
		name    string
		payload dtype.Format
		save    bool
	}{
		{"rows in bf16, weighted before down", dtype.FormatBF16, false},
		{"rows in FP8", "", false},
		{"rows in FP8, saved (ep_save)", "", true},
	} {
		sent, saved, err := x.layer(row.payload, row.save)
		if err != nil {
			return err
		}
		if i == 0 {
			// To weight results behind the combine, the gradient of a weight needs them there once more:
			// as many bytes as rows in bf16, of either half batch. We do not build it.
			more := slices.Concat(sent, sent[:1])
			if x.plan.Halved() {
				more = append(more, sent[0])
			}
			x.row("rows in bf16, weighted behind combine, counted", more, saved)
		}
		x.row(row.name, sent, saved)
	}
	return nil
}

// row prints one form; an all-to-all is a tensor of bytes.
func (x *exchange) row(name string, sent []int64, saved int64) {
	bytes, seconds := int64(0), 0.0
	for _, n := range sent {
		bytes += n
		seconds += x.prices.Collective(price.AllToAll, float64(n), x.group)
	}
	fmt.Fprintf(x.out, "%-44s %8d %8.2f %9.2f %9.2f\n", name, len(sent), float64(bytes)/1e9,
		seconds*1e3, float64(saved)/1e9)
}

// layer gives the bytes of each tensor that is sent for rows, and of all that is saved for the
// backward pass.
func (x *exchange) layer(payload dtype.Format, save bool) (sent []int64, saved int64, err error) {
	policy, err := precision.Default(x.model, x.plan.Precision)
	if err != nil {
		return nil, 0, err
	}
	policy.Payload = payload
	facts := x.model.Facts()
	c := cost.ShardingOf(&facts, x.plan, false)
	c.SaveRows = save
	bill, err := cost.New(x.model, x.arch, policy).Bill(c)
	if err != nil {
		return nil, 0, err
	}
	part := bill.Layers[len(bill.Layers)-1] // dense layers come first
	for _, pass := range part.Items() {
		for _, item := range pass {
			for _, s := range item.Sends {
				// Weights of rows are a thousandth of the rows.
				if s.Kind == "all_to_all" && item.Op.In[0].Type.Index(ir.EmbedDim) >= 0 {
					sent = append(sent, s.Bytes*s.Count)
				}
			}
		}
	}
	for _, n := range part.Residuals {
		saved += n
	}
	return sent, saved, nil
}
