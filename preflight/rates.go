package preflight

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/price"
	"github.com/deepwell/deepwell/program"
)

// chained GEMMs run one after the other in a program, so that its start does not count.
const chained = 16

// prices are what a plan assumes; nil without one.
func (o Options) prices() (*price.Prices, error) {
	c, err := machine.ParseCluster(o.Plan.Cluster)
	if err != nil {
		return nil, err
	}
	profile, err := price.Find(price.Own)
	if err != nil {
		return nil, err
	}
	return price.New(c, profile), nil
}

// rate times bf16 GEMMs on one GPU, if there is a plan.
func (r *Result) rate(ctx context.Context, o Options, gpu int) error {
	if o.Plan == nil || r.GPUs[gpu].GEMMSeconds == 0 {
		return nil
	}
	shape := dtype.Shape{Type: dtype.BF16, Dims: []int64{o.Size, o.Size}}
	var b strings.Builder
	fmt.Fprintf(&b, "module @rate {\nfunc.func @main(%%x: %[1]s) -> %[1]s {\n"+
		"%%s = stablehlo.constant dense<%[2]e> : %[1]s\n%%y0 = stablehlo.multiply %%x, %%x : %[1]s\n",
		shape.MLIR(), 1/float64(o.Size))
	for i := range chained {
		fmt.Fprintf(&b, "%%r%[2]d = stablehlo.dot_general %%y%[2]d, %%x, contracting_dims = [1] x [0] : "+
			"(%[1]s, %[1]s) -> %[1]s\n%%y%[3]d = stablehlo.multiply %%r%[2]d, %%s : %[1]s\n", shape.MLIR(),
			i, i+1)
	}
	fmt.Fprintf(&b, "return %%y%d : %s\n}\n}\n", chained, shape.MLIR())
	seconds, _, err := timed(ctx, o, &program.Module{Name: "rate",
		Devices: program.Devices{o.device(gpu)}, Text: b.String()}, shape)
	if err != nil {
		return r.failed(ctx, o, gpu, err)
	}
	seconds /= chained
	r.GPUs[gpu].RateSeconds = seconds
	p, err := o.prices()
	if err != nil {
		return err
	}
	n := float64(o.Size)
	one := Rate{Name: "bf16 GEMM", Size: o.Size, Predicted: p.GEMM(dtype.FormatBF16, n, n, n),
		Measured: seconds}
	if r.GEMM == nil || one.Measured > r.GEMM.Measured {
		r.GEMM = &one // the slowest of this process
	}
	if one.Share() < o.Slow {
		const fix = "look at its clocks, power and temperature; or plan with what this host reaches:" +
			" deepwell dryrun --calibrate"
		r.problem(o.Process, gpu, fix, "its bf16 GEMM reaches %.2g of the speed that the plan assumes",
			one.Share())
	}
	return nil
}

// meshOf lists all axes of a plan that have more than one device, the outermost first.
func meshOf(p *plan.Plan) (mesh []ir.Axis) {
	order := p.Order
	if len(order) == 0 {
		order = plan.Default().Order
	}
	for _, name := range order {
		if n := p.Size(name); n > 1 {
			mesh = append(mesh, ir.Axis{Name: name, Size: n})
		}
	}
	return mesh
}

// axes times an all-reduce along each axis of the plan, on all groups at the same time.
func (r *Result) axes(ctx context.Context, o Options) error {
	if o.Plan == nil {
		return nil
	}
	prices, err := o.prices()
	if err != nil {
		return err
	}
	mesh := meshOf(o.Plan)
	shape := dtype.Shape{Type: dtype.F32, Dims: []int64{o.Size, o.Size}}
	stride := int64(1)
	for _, axis := range slices.Backward(mesh) {
		m, err := axisSum(shape, mesh, axis.Name)
		if err != nil {
			return err
		}
		seconds, got, err := timed(ctx, o, m, shape)
		if err != nil {
			return r.failed(ctx, o, -1, err)
		}
		one := Rate{Name: axis.Name, Size: axis.Size, Bytes: shape.Bytes(), Measured: seconds,
			Predicted: prices.Collective(price.AllReduce, float64(shape.Bytes()),
				price.Group{Size: axis.Size, Stride: stride})}
		r.Axes = append(r.Axes, one)
		if got[0] != float64(axis.Size) {
			r.problem(o.Process, -1, "NCCL_DEBUG=INFO deepwell preflight", "a sum along %s gives %v, not %d",
				axis.Name, got[0], axis.Size)
		}
		if one.Share() < o.Slow {
			r.problem(o.Process, -1, "NCCL_DEBUG=INFO deepwell preflight shows which links it uses",
				"an all-reduce along %s reaches %.2g of the speed that the plan assumes", axis.Name,
				one.Share())
		}
		stride *= axis.Size
	}
	return nil
}

// axisSum adds up what the devices of each group of an axis have.
func axisSum(shape dtype.Shape, mesh []ir.Axis, axis string) (*program.Module, error) {
	t := ir.Type{Elem: shape.Type, Place: ir.Placement{{Axis: axis, Dim: ir.Partial}}}
	for i, n := range shape.Dims {
		t.Dims = append(t.Dims, ir.Dim{Name: fmt.Sprintf("d%d", i), Size: n})
	}
	b := ir.NewBuilder("sum", mesh...)
	g, err := b.Graph(b.AllReduce(b.Input("x", ir.Data, t, ""), axis))
	if err != nil {
		return nil, err
	}
	return lower.Module("sum_"+axis, g, lower.Options{})
}
