package estimate

import (
	"fmt"
	"maps"
	"math"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/cost"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/price"
	"github.com/deepwell/deepwell/spmd"
)

// What tensor parallelism is charged for is what our programs send: as many gathers, scatters and
// sums as the graph of a step has, each at the price of its size. The head's input is charged for
// twice, as stages gather it, where one program has it gathered from the way forward.
func TestTensorCollectivesAreTheGraphs(t *testing.T) {
	prof, err := price.Find(price.Own)
	if err != nil {
		t.Fatal(err)
	}
	prof = prof.Clone()
	prof.HideTensor = 0
	for _, name := range []string{"llama3.1-8b", "qwen3-8b", "gpt2"} {
		for _, tp := range []plan.TP{{Size: 2}, {Size: 4}, {Size: 2, Sequence: true},
			{Size: 4, Sequence: true}} {
			p := plan.Default()
			p.Seq, p.Batch, p.Microbatches, p.TP = 1024, 1, 1, tp
			p.Cluster = fmt.Sprintf("%dxb200", tp.Size)
			p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
			e := estimator(t, name, p.Cluster, price.Own).Under(prof)
			if err := p.Check(e.config); err != nil {
				t.Fatal(err)
			}
			each := float64(p.Seq*p.Batch*e.config.Hidden) * 2
			group := price.Group{Size: tp.Size, Stride: 1}
			kinds := map[string]price.Kind{"all-gather": price.AllGather,
				"reduce-scatter": price.ReduceScatter, "all-reduce": price.AllReduce}
			want := 0.0
			for _, row := range censusOf(t, e.config, p) {
				count := math.Round(float64(row.Bytes) / each)
				want += count * e.prices.Collective(kinds[string(row.Kind)], each, group)
				if quantized := float64(row.Count) - count; quantized > 0 { // sums of the loss
					bytes := (float64(row.Bytes) - count*each) / quantized
					want += quantized * e.prices.Collective(kinds[string(row.Kind)], bytes, group)
				}
			}
			got, once := mustPrice(t, e, p).Parts.Tensor, 0.0
			if tp.Sequence {
				once = e.prices.Collective(price.AllGather, each, group)
			}
			if got < want*(1-rounded) || got > (want+once)*(1+rounded) {
				t.Errorf("%s %+v: priced %.6g s, the graph sends %.6g s", name, tp, got, want)
			}
		}
	}
}

// rounded is what the sizes of a few small sums make of a step, as they are taken to be equal.
const rounded = 5e-5

// censusOf counts what the gradient of a plan sends along tp.
func censusOf(t *testing.T, c *model.Config, p *plan.Plan) (list []spmd.Traffic) {
	t.Helper()
	g, err := c.Graph(model.Shape{Batch: p.MicrobatchSequences(), Seq: p.Seq, Elem: p.Types.Params,
		Experts: model.ExpertShape{Slots: p.ExpertSlots()[0]}})
	if err != nil {
		t.Fatal(err)
	}
	sh, err := spmd.Shard(g, p)
	if err != nil {
		t.Fatal(err)
	}
	step, err := spmd.NewStep(sh.Graph, spmd.Options{Sharding: sh, Recompute: p.Recompute, Microbatches: 1},
		&spmd.QuantizedCopies{})
	if err != nil {
		t.Fatal(err)
	}
	return spmd.CensusOf(step.Gradient)
}

// Gathers of parameters along fsdp and ep are priced as the graph has them: the outer axis gathers
// shards of what the inner one gathers in full.
func TestGathersAlongTwoAxesAreTheGraphs(t *testing.T) {
	inner := plan.Default().Order // ep inside fsdp
	outer := []string{plan.PipelineAxis, plan.DataAxis, plan.ExpertAxis, plan.FSDPAxis,
		plan.ContextAxis, plan.TensorAxis}
	for _, order := range [][]string{inner, outer} {
		p := plan.Default()
		p.Seq, p.Batch, p.Microbatches, p.FSDP.Size, p.EP, p.Order = 1024, 8, 1, 2, 4, order
		p.Cluster = "8xb200"
		p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
		e := estimator(t, "mixtral-8x7b", p.Cluster, price.Own)
		l, err := e.read(p)
		if err != nil {
			t.Fatal(err)
		}
		blocks, err := e.blockCost(&l.sharding)
		if err != nil {
			t.Fatal(err)
		}
		along, over := nested(l.fsdpGroup(), l.expertGroup())
		want := map[string]float64{}
		for _, b := range []block{blocks.embed, blocks.head, blocks.layers[0]} {
			times := 2.0 // bytes of an element; layers are gathered again in the backward pass
			if b.experts > 0 {
				times *= 2 * float64(e.config.Layers)
			}
			want[plan.FSDPAxis] += times * (b.dense*along + b.experts)
			want[plan.ExpertAxis] += times * b.dense * over
		}
		for _, row := range censusOf(t, e.config, p) {
			axis := row.Axes[0]
			if got := float64(row.Bytes) / want[axis]; row.Kind == hlo.AllGather &&
				math.Abs(got-1) > 1e-3 { // routers gather f32
				t.Errorf("order %v: %s gathers %d bytes, priced as %.0f", order, axis, row.Bytes, want[axis])
			}
		}
	}
}

// What is on its way to experts and back is priced as the graph has it, for every ep_kind and in
// half batches.
func TestExchangesAreTheGraphs(t *testing.T) {
	for _, kind := range []string{"a2a", "gather"} {
		for _, halves := range []bool{false, true} {
			p := plan.Default()
			p.Seq, p.Batch, p.Microbatches, p.EP, p.FSDP.Zero = 1024, 16, 1, 4, 1
			p.EPKind, p.EPOverlap, p.Cluster = kind, halves, "4xb200"
			p.Recompute = []ir.Tag{ir.Experts}
			p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
			e := estimator(t, "mixtral-8x7b", p.Cluster, price.Own)
			facts := e.config.Facts()
			bill, err := e.book.Bill(cost.ShardingOf(&facts, p, false))
			if err != nil {
				t.Fatal(err)
			}
			got, want := map[string]int64{}, map[string]int64{} // bytes by kind
			for _, items := range bill.Layers[0].Items() {
				for _, item := range items {
					for _, s := range item.Sends {
						got[strings.ReplaceAll(s.Kind, "_", "-")] += bill.Layers[0].Rounds * s.Bytes * s.Count
					}
				}
			}
			for _, row := range censusOf(t, e.config, p) {
				if row.Kind != hlo.AllReduce { // of statistics
					want[string(row.Kind)] += row.Bytes
				}
			}
			delete(got, string(hlo.AllReduce))
			if !maps.Equal(got, want) || len(got) == 0 {
				t.Errorf("%s, halves %v: priced are %v bytes, the graph sends %v", kind, halves, got, want)
			}
		}
	}
}
