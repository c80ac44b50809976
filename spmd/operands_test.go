package spmd_test

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/spmd"
)

// product is a linear layer alone, from one dimension to another; the gradient of its result is an
// input, so that every plan quantizes the same numbers.
func product(from, to ir.Dim, s plantest.Size, f string) (*ir.Graph, error) {
	b := ir.NewBuilder("product")
	t := ir.Type{Elem: dtype.F32, Dims: []ir.Dim{{Name: "batch", Size: s.Batch}, {Name: ir.Seq, Size: s.Seq}, from}}
	x := b.Input("x", ir.Data, t, "")
	w := b.Input("w", ir.Param, ir.Type{Elem: dtype.F32, Dims: []ir.Dim{from, to}}, "")
	y := b.Linear(x, w)
	c := b.Input("c", ir.Data, y.Type, "")
	loss := b.Sum(b.Mul(y, c), "batch", ir.Seq, to.Name)
	for _, product := range []string{"fprop", "dgrad", "wgrad"} {
		y.Def().Attrs = y.Def().Attrs.With(product, f)
	}
	y.Def().Attrs = y.Def().Attrs.With("slot", int64(4)).With("layer", int64(3))
	return b.Graph(loss)
}

// operands gives a graph of a product's gradients that also gives all that it quantizes, in the
// order of the names.
func operands(g *ir.Graph, p *plan.Plan) (joint *ir.Graph, names []string, err error) {
	how := ir.GradPlan{Wrt: []string{"x", "w"}}
	if p != nil {
		sh, err := spmd.Shard(g, p)
		if err != nil {
			return nil, nil, err
		}
		g, how.Terms, how.Recompute = sh.Graph, true, []ir.Tag{ir.Gather}
	}
	gr, err := ir.Grad(g, how)
	if err != nil {
		return nil, nil, err
	}
	if joint, err = gr.Joint(); err != nil {
		return nil, nil, err
	}
	if _, err := new(spmd.QuantizedCopies).Expand(joint, ir.ReportNothing); err != nil {
		return nil, nil, err
	}
	for _, op := range joint.Ops {
		if op.Kind != "quantize" {
			continue
		}
		name := fmt.Sprint(op.Attrs.Bool("hadamard"), op.Attrs.Int("tensor"))
		for _, d := range op.Out[0].Type.Dims {
			name += " " + d.Name
		}
		joint.Results = append(joint.Results, op.Out...)
		names = append(names, name, name+" scales")
	}
	joint.Results = joint.Results[len(joint.Results)-len(names):]
	return joint, names, joint.Verify()
}

// bytesOf runs a graph of operands on the engine and joins what devices give.
func bytesOf(t *testing.T, e *engine.Engine, g *ir.Graph, names []string, p *plan.Plan,
	whole map[string]*eval.Array) map[string][]byte {
	t.Helper()
	s, err := lower.Module(g.Name, g, lower.Options{Kernels: kernels.For("cpu")})
	if err != nil {
		t.Fatal(err)
	}
	s.Flags = kernels.For("cpu").Exact(nil)
	if !slowtest.Enabled {
		s.Flags["xla_backend_optimization_level"] = int64(0) // compiles in half of the time
	}
	x, err := e.Compile(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Free()
	if p != nil {
		whole = ordered(whole, p)
	}
	var args []*engine.Array
	for i, v := range g.Inputs {
		a, err := e.Place(s, s.Args[i], engine.Copied, func(d int) ([]byte, error) {
			if w := whole[v.Name]; w != nil {
				return encode(v.Type.Elem, spmd.TakeShard(g.Mesh, w.Type.Dims, w.Data, v.Type, d)), nil
			}
			local, err := s.Local(s.Args[i]) // a copy of the weight, which no other operand depends on
			return make([]byte, local.Bytes()), err
		})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Free()
		args = append(args, a)
	}
	run, err := x.Run(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	defer run.Free()
	out := map[string][]byte{}
	for i, v := range g.Results {
		out[names[i]] = joinedBytes(t, g.Mesh, v.Type, run.Results[i])
	}
	return out
}

// joinedBytes puts codes or scales together.
func joinedBytes(t *testing.T, mesh []ir.Axis, part ir.Type, a *engine.Array) []byte {
	t.Helper()
	part.Dims = slices.Clone(part.Dims)
	if last := len(part.Dims) - 1; part.Elem == dtype.F4E2M1FN {
		part.Dims[last].Size /= 2
	}
	part.Elem = dtype.U8
	dims, n := slices.Clone(part.Dims), int64(1)
	for i, d := range dims {
		for _, s := range part.Place {
			for _, axis := range mesh {
				if s.Dim == d.Name && axis.Name == s.Axis {
					dims[i].Size *= axis.Size
				}
			}
		}
		n *= dims[i].Size
	}
	all := make([]byte, n)
	for d := range devices(mesh) {
		b, err := a.Read(context.Background(), d)
		if err != nil {
			t.Fatal(err)
		}
		spmd.PutShard(mesh, dims, all, part, d, b)
	}
	for d := range devices(mesh) {
		b, err := a.Read(context.Background(), d)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(b, spmd.TakeShard(mesh, dims, all, part, d)) {
			t.Errorf("device %d has another copy", d)
		}
	}
	return all
}

// Given the same numbers, the operands of fprop, dgrad and wgrad have the bytes that they have on one
// device, however they are sharded: with scales of blocks and tensors, spread and rounded by chance.
func TestQuantizedOperandsAreTheSameBytes(t *testing.T) {
	e := openEngine(t)
	size := plantest.Size{Batch: 2, Micros: 1, Seq: 128}
	rows := []mesh{{Name: "zero3 sp ring", Apply: func(p *plan.Plan) {
		p.FSDP = plan.FSDP{Size: 2, Zero: 3, Gather: "layer"}
		p.TP, p.CP = plan.TP{Size: 2, Sequence: true}, plan.CP{Size: 2, Kind: "ring"}
	}}}
	if slowtest.Enabled {
		size.Batch, rows = 4, append(combine(2), rows...)
	}
	embed, mlp := ir.Dim{Name: "embed", Size: 64}, ir.Dim{Name: "mlp", Size: 128}
	for k, format := range quantizedFormats {
		for i, sides := range [][2]ir.Dim{{embed, mlp}, {mlp, embed}} {
			if !slowtest.Enabled && i != k {
				continue
			}
			g, err := product(sides[0], sides[1], size, format)
			if err != nil {
				t.Fatal(err)
			}
			whole := uneven(g)
			one, names, err := operands(g, nil)
			if err != nil {
				t.Fatal(err)
			}
			want := bytesOf(t, e, one, names, nil, whole)
			if len(want) != 8 {
				t.Fatalf("%s: %d operands", format, len(want))
			}
			for i, m := range rows {
				p := quantizedPlan(m, format, size)
				if p.Check(blocky(64, 1)) != nil || p.CP.Balance || !*all && i%5 != len(rows)%5 && len(rows) > 1 {
					continue
				}
				cut, names, err := operands(g, p)
				if err != nil {
					t.Errorf("%s %s: %v", format, m.Name, err)
					continue
				}
				got := bytesOf(t, e, cut, names, p, whole)
				for _, name := range names {
					if !bytes.Equal(got[name], want[name]) {
						t.Errorf("%s %s, from %s: operand %s differs", format, m.Name, sides[0].Name, name)
					}
				}
			}
		}
	}
}

// uneven fills the inputs of a product with numbers of very different sizes.
func uneven(g *ir.Graph) map[string]*eval.Array {
	r := rand.New(rand.NewPCG(5, 6))
	whole := map[string]*eval.Array{}
	for _, v := range g.Inputs {
		a := eval.New(v.Type)
		for i := range a.Data {
			a.Data[i] = float64(float32(r.NormFloat64() * math.Exp2(float64(r.IntN(20)-10))))
		}
		whole[v.Name] = a
	}
	whole[ir.InputNoise] = &eval.Array{Type: ir.Type{Dims: []ir.Dim{{Name: ir.InputNoise, Size: 2}}},
		Data: []float64{7, 9}}
	rows := eval.New(ir.Type{Dims: g.Find("x").Type.Dims[:2]})
	for i := range rows.Data {
		rows.Data[i] = float64(1000 + i)
	}
	whole[ir.InputRows] = rows
	return whole
}
