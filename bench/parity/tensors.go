package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/parity"
	"github.com/deepwell/deepwell/precision"
)

// A linear is what one linear layer of a trained model multiplies: x is [t, in], w [out, in] and dy
// [t, out].
type linear struct {
	name       string
	t, in, out int
	x, w, dy   []float32
}

// capture runs the model of a checkpoint on some rows and gives the arguments of every linear layer
// that formats apply to.
func capture(ctx context.Context, job parity.Job, at data.Position, rows int) ([]linear, error) {
	g, want, err := tapped(job, rows)
	if err != nil {
		return nil, err
	}
	stage, err := lower.Module("tap", g, lower.Options{Kernels: kernels.For("cpu")})
	if err != nil {
		return nil, err
	}
	x, err := job.Engine.Compile(ctx, stage)
	if err != nil {
		return nil, err
	}
	defer x.Free()
	loader, err := job.Rows(job.Recipe.Seed + 1)
	if err != nil {
		return nil, err
	}
	batch, _, err := loader.Take(ctx, at, rows, 0, 1)
	if err != nil {
		return nil, err
	}
	var args []*engine.Array
	for _, spec := range stage.Args {
		bytes, err := argument(spec.Name, job, batch)
		if err != nil {
			return nil, err
		}
		a, err := job.Engine.Place(stage, spec, engine.Copied,
			func(int) ([]byte, error) { return bytes, nil })
		if err != nil {
			return nil, err
		}
		defer a.Free()
		args = append(args, a)
	}
	run, err := x.Run(ctx, args...)
	if err != nil {
		return nil, err
	}
	defer run.Free()
	for i := range want {
		if err := want[i].read(ctx, job, run.Results[2*i:2*i+2]); err != nil {
			return nil, err
		}
	}
	list := make([]linear, len(want))
	for i := range want {
		list[i] = want[i].linear
	}
	return list, nil
}

// A tap is a linear layer on its way out of a graph.
type tap struct {
	linear
	over  []string // what the gradient of the weight sums over
	op    *ir.Op   // the gradient of the weight
	param *model.Param
}

// tapped builds the gradient of the model with the arguments of its weights' gradients as results.
func tapped(job parity.Job, rows int) (*ir.Graph, []tap, error) {
	shape := model.Shape{Batch: int64(rows), Seq: int64(job.Recipe.Seq), Documents: 8}
	shape.Elem, shape.MatmulType = kernels.For("cpu").Types(job.Recipe.Precision)
	g, err := job.Model.Graph(shape)
	if err != nil {
		return nil, nil, err
	}
	if g, err = ir.Unroll(g); err != nil {
		return nil, nil, err
	}
	gr, err := ir.Grad(g, ir.GradPlan{})
	if err != nil {
		return nil, nil, err
	}
	joint, err := gr.Joint()
	if err != nil {
		return nil, nil, err
	}
	quantized, err := precision.Default(job.Model, string(dtype.MXFP8))
	if err != nil {
		return nil, nil, err
	}
	var list []tap
	var out []*ir.Value
	for _, stack := range job.Model.Params() {
		for _, p := range stack.Layers() {
			i := slices.IndexFunc(gr.Wrt, func(v *ir.Value) bool { return v.Name == p.Name })
			if i < 0 || quantized.Of(0, p.Name, precision.Wgrad) == dtype.FormatBF16 {
				continue
			}
			op := joint.Results[1+i].Def()
			for op.Kind != "linear_dw" {
				op = op.In[0].Def()
			}
			list = append(list, tap{linear: linear{name: p.Name}, over: op.Attrs.List("over"), op: op,
				param: &p})
			out = append(out, op.In[0], op.In[1])
		}
	}
	b := ir.ExtendGraph(joint)
	seen := map[*ir.Value]bool{}
	for i, v := range out {
		if seen[v] { // a result has one name
			out[i] = b.Scale(v, 1)
		}
		seen[v] = true
	}
	g, err = b.Graph(out...)
	return g, list, err
}

// argument gives an input of the graph.
func argument(name string, job parity.Job, b *data.Batch) ([]byte, error) {
	ints := map[string][]int32{model.InputIDs: b.IDs, model.InputLabels: b.Labels,
		model.InputPositions: b.Positions, model.InputSegments: b.Segments}
	if list, ok := ints[name]; ok {
		return binary.Append(nil, binary.LittleEndian, list)
	}
	if name == model.InputShare {
		return binary.Append(nil, binary.LittleEndian, float32(1/float64(b.Count)))
	}
	return tensor(job.From, name)
}

// tensor reads one from a checkpoint.
func tensor(c *ckpt.Checkpoint, name string) ([]byte, error) {
	for _, t := range c.Tensors() {
		if t.Name == name {
			bytes := make([]byte, t.Bytes())
			return bytes, c.ReadSlice(name, t.Box(), bytes)
		}
	}
	return nil, fmt.Errorf("the checkpoint has no %s", name)
}

func floats(bytes []byte) []float32 {
	list := make([]float32, len(bytes)/4)
	for i := range list {
		list[i] = math.Float32frombits(binary.LittleEndian.Uint32(bytes[4*i:]))
	}
	return list
}

// read takes the arguments and the weight as matrices.
func (t *tap) read(ctx context.Context, job parity.Job, results []*engine.Array) error {
	for i, into := range []*[]float32{&t.x, &t.dy} {
		bytes, err := results[i].Read(ctx, 0)
		if err != nil {
			return err
		}
		*into = turn(floats(bytes), t.op.In[i].Type.Dims, t.over)
	}
	bytes, err := tensor(job.From, t.param.Name)
	if err != nil {
		return err
	}
	var outer []string // of the weight: what y has
	for _, d := range t.op.In[1].Type.Dims {
		if !slices.Contains(t.over, d.Name) {
			outer = append(outer, d.Name)
		}
	}
	t.w = turn(floats(bytes), t.param.Dims, outer)
	t.t = 1
	for _, name := range t.over {
		t.t *= int(t.op.In[0].Type.Size(name))
	}
	t.in, t.out = len(t.x)/t.t, len(t.dy)/t.t
	return nil
}

// turn puts the named dimensions first.
func turn(x []float32, dims []ir.Dim, first []string) []float32 {
	strides := make([]int, len(dims))
	n := 1
	for i, d := range slices.Backward(dims) {
		strides[i] = n
		n *= int(d.Size)
	}
	var order []int
	for pass := range 2 {
		for i, d := range dims {
			if slices.Contains(first, d.Name) == (pass == 0) {
				order = append(order, i)
			}
		}
	}
	out := make([]float32, 0, len(x))
	var walk func(depth, at int)
	walk = func(depth, at int) {
		if depth == len(order) {
			out = append(out, x[at])
			return
		}
		for i := range int(dims[order[depth]].Size) {
			walk(depth+1, at+i*strides[order[depth]])
		}
	}
	walk(0, 0)
	return out
}
