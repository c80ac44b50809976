package irtest

import (
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
)

const (
	rows, embed, mlp = 4, 6, 8

	// LayoutDevices is the number of devices of every layout.
	LayoutDevices = 2
)

// place shards a type by an axis of the mesh: the size becomes one device's.
func place(t ir.Type, axis, dimName string) ir.Type {
	out := ir.Type{Elem: t.Elem, Place: t.Place.With(axis, dimName)}
	for _, d := range t.Dims {
		if d.Name == dimName {
			d.Size /= LayoutDevices
		}
		out.Dims = append(out.Dims, d)
	}
	return out
}

// A Layout is one way to run the same two linears on two devices.
type Layout struct {
	Name     string
	axis     string
	x        string    // the sharded dimension of the input, if any
	w        [2]string // and of the two weights
	forward  func(b *ir.Builder, x, w1, w2 *ir.Value) *ir.Value
	Backward []string // collectives of the backward graph, in order
}

// Layouts has tensor, sequence, fully sharded and plain data parallelism, and one that turns shards
// of rows into shards of columns.
var Layouts = []Layout{
	{"tensor parallel", "tp", "", [2]string{"mlp", "mlp"},
		func(b *ir.Builder, x, w1, w2 *ir.Value) *ir.Value {
			return b.AllReduce(b.Linear(b.Silu(b.Linear(x, w1)), w2), "tp")
		}, []string{"all_reduce"}},
	{"sequence parallel", "tp", "rows", [2]string{"mlp", "mlp"},
		func(b *ir.Builder, x, w1, w2 *ir.Value) *ir.Value {
			h := b.Linear(b.Silu(b.Linear(b.AllGather(x, "tp", "rows"), w1)), w2)
			return b.ReduceScatter(h, "tp", "rows")
		}, []string{"all_gather", "reduce_scatter"}},
	{"fsdp", "fsdp", "rows", [2]string{"embed", "mlp"},
		func(b *ir.Builder, x, w1, w2 *ir.Value) *ir.Value {
			h := b.Silu(b.Linear(x, b.AllGather(w1, "fsdp", "embed")))
			return b.Linear(h, b.AllGather(w2, "fsdp", "mlp"))
		}, []string{"reduce_scatter", "reduce_scatter"}},
	{"all-to-all", "cp", "rows", [2]string{"", "mlp"},
		func(b *ir.Builder, x, w1, w2 *ir.Value) *ir.Value {
			h := b.AllToAll(b.Silu(b.Linear(x, w1)), "cp", "rows", "mlp")
			return b.ReduceScatter(b.Linear(h, w2), "cp", "rows")
		}, []string{"all_gather", "all_to_all", "all_reduce"}},
	{"data parallel", "dp", "rows", [2]string{"", ""},
		func(b *ir.Builder, x, w1, w2 *ir.Value) *ir.Value {
			return b.Linear(b.Silu(b.Linear(x, w1)), w2)
		},
		[]string{"all_reduce", "all_reduce"}},
}

// xType, w1Type and w2Type are the whole input and weights.
func xType() ir.Type  { return F32(D("rows", rows), D("embed", embed)) }
func w1Type() ir.Type { return F32(D("embed", embed), D("mlp", mlp)) }
func w2Type() ir.Type { return F32(D("mlp", mlp), D("embed", embed)) }

// Graph builds the layout's graph of a loss, or a single device's if l is nil.
func (l *Layout) Graph() (*ir.Graph, error) {
	b := ir.NewBuilder("mlp")
	tx, t1, t2 := xType(), w1Type(), w2Type()
	if l != nil {
		b = ir.NewBuilder("mlp", ir.Axis{Name: l.axis, Size: LayoutDevices})
		if l.x != "" {
			tx = place(tx, l.axis, l.x)
		}
		for i, t := range []*ir.Type{&t1, &t2} {
			if l.w[i] != "" {
				*t = place(*t, l.axis, l.w[i])
			}
		}
	}
	x := b.Input("x", ir.Param, tx, "")
	w1, w2 := b.Input("w1", ir.Param, t1, ""), b.Input("w2", ir.Param, t2, "")
	var y *ir.Value
	if l != nil {
		y = l.forward(b, x, w1, w2)
	} else {
		y = b.Linear(b.Silu(b.Linear(x, w1)), w2)
	}
	loss := b.Sum(b.Mul(y, y), "rows", "embed")
	if l != nil && len(y.Type.Place) > 0 {
		loss = b.AllReduce(loss, l.axis)
	}
	return b.Graph(loss)
}

// Wholes are the types of the uncut inputs of every layout.
func Wholes() map[string]ir.Type {
	return map[string]ir.Type{"x": xType(), "w1": w1Type(), "w2": w2Type()}
}

// Spread splits a whole array into the devices' shards.
func Spread(whole *eval.Array, t ir.Type) []*eval.Array {
	shards := make([]*eval.Array, LayoutDevices)
	for d := range shards {
		shards[d] = eval.New(t)
		at := make([]int64, len(t.Dims))
		for i := range shards[d].Data {
			n := int64(0)
			for k, dm := range whole.Type.Dims {
				from := at[k]
				if t.Dims[k].Size != dm.Size {
					from += int64(d) * t.Dims[k].Size
				}
				n = n*dm.Size + from
			}
			shards[d].Data[i] = whole.Data[n]
			for k := len(at) - 1; k >= 0; k-- {
				if at[k]++; at[k] < t.Dims[k].Size {
					break
				}
				at[k] = 0
			}
		}
	}
	return shards
}
