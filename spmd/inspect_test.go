package spmd_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/spmd"
)

// inspected runs the gradients of a plan, nil for one device, with inspections, and gives what they
// measured: for each operand of each linear the sums, then elements and devices that have the same,
// and for each copy of a weight the sums over the elements.
func inspected(g *ir.Graph, p *plan.Plan, whole map[string]*eval.Array, recompute ...ir.Tag) (
	map[string][]float64, error) {
	r, err := newRig(g.Clone(), p, optim.SGD{}, 1, whole, evalRunner)
	if err != nil {
		return nil, err
	}
	loss := g
	if p != nil {
		loss = r.sharding.Graph
	}
	r.step, err = build(loss.Clone(), spmd.Options{Optimizer: optim.SGD{}, Microbatches: 1, Monitor: true,
		Inspect: true, Sharding: r.sharding, Params: map[string]optim.Param{}, Recompute: recompute})
	if err != nil {
		return nil, err
	}
	if err := r.copies(); err != nil {
		return nil, err
	}
	all := map[string][]float64{}
	out, err := r.run(r.step.Inspect, r.feed(r.step.Inspect, nil))
	if err != nil {
		return nil, err
	}
	for name, m := range r.step.CopyErrors {
		var list []float64
		for _, x := range out[0][0].Data[m.At:][:ir.ErrorSums*m.Layers] {
			list = append(list, x/float64(m.Elements))
		}
		all[name] = list
	}
	if out, err = r.run(r.step.Gradient, r.feed(r.step.Gradient, whole)); err != nil {
		return nil, err
	}
	last := out[len(out)-1]
	for d := range last {
		if fmt.Sprint(last[d].Data) != fmt.Sprint(last[0].Data) {
			return nil, fmt.Errorf("devices 0 and %d tell different sums", d)
		}
	}
	for _, s := range r.step.Stats {
		for k := range s.Layers {
			if s.Errors < 0 {
				continue
			}
			at := s.Errors + k*s.ErrorStride
			var list []float64
			for _, x := range last[0].Data[at:][:ir.ErrorSums] {
				list = append(list, x/float64(s.Copies))
			}
			list = append(list, float64(s.Elements/s.Copies), float64(s.Length))
			all[fmt.Sprintf("%s of linear %d, layer %d", s.Operand, s.Slot, s.Layer+k)] = list
		}
	}
	return all, nil
}

// Inspections measure the same in a loop, which stacks its numbers up, with activation checkpointing,
// without loops and on many devices, which add theirs up: each operand of every product once.
func TestInspectionsAgree(t *testing.T) {
	slowtest.Only(t)
	c, size := blocky(32, 2), plantest.Size{Batch: 2, Micros: 1, Seq: 64}
	for _, format := range quantizedFormats {
		row := mesh{Apply: func(p *plan.Plan) {
			p.FSDP = plan.FSDP{Size: 2, Zero: 3, Gather: "layer"}
			p.TP = plan.TP{Size: 2, Sequence: true}
		}}
		one, spread := quantizedPlan(mesh{Apply: func(*plan.Plan) {}}, format, size), quantizedPlan(row, format, size)
		g, err := marked(c, one, dtype.F32, false)
		if err != nil {
			t.Fatal(err)
		}
		whole := quantizedBatch(g, c)
		want, err := inspected(g, nil, whole)
		if err != nil {
			t.Fatal(err)
		}
		if n := 2 * 7 * 4; len(want) != n+14 { // layers, linears, operands; copies of stacks
			t.Errorf("%s: %d operands were measured", format, len(want))
		}
		for name, how := range map[string]struct {
			plan      *plan.Plan
			recompute []ir.Tag
		}{"again": {nil, []ir.Tag{ir.Attn, ir.MLP, ir.Norm}}, "devices": {spread, nil}} {
			got, err := inspected(g, how.plan, whole, how.recompute...)
			if err != nil {
				t.Errorf("%s, %s: %v", format, name, err)
				continue
			}
			for operand, list := range want {
				if how.plan != nil && got[operand] == nil && strings.HasPrefix(operand, "c.") {
					continue // shards of this side are no whole blocks: they are gathered, then quantized
				}
				if len(got[operand]) != len(list) {
					t.Errorf("%s, %s: %s has %d numbers, want %d", format, name, operand, len(got[operand]), len(list))
					continue
				}
				for i, w := range list {
					if x := got[operand][i]; !(math.Abs(x-w) <= exact*math.Abs(w)) {
						t.Errorf("%s, %s: number %d of %s is %v, want %v", format, name, i, operand, x, w)
					}
				}
			}
		}
	}
}
