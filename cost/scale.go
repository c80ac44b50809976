package cost

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/rewrite"
)

// A scaler rescales values to the sizes they have under another sharding of the same operations.
type scaler struct {
	graph ir.Graph // only its mesh, scaled
	from  []ir.Axis
	rows  [2]int64 // sequences before, after
	slots [2]int64 // of an expert for a sequence, before and after
	made  map[*ir.Value]*ir.Value
	// Devices along ep before and after; 0 without such an axis.
	experts [2]int64
	room    []ir.Value // allocated ahead
	dims    []ir.Dim   // allocated ahead

	target *kernels.Selector // selects the kernels
}

// atOnce is the number of values a scaler allocates at a time.
const atOnce = 64

// typed scales the dimensions of a type: sequences, and the experts' slots for their tokens, by the
// number of sequences; sharded dimensions by the sizes of their axes.
func (x *scaler) typed(t ir.Type) ir.Type {
	n := len(t.Dims)
	if len(x.dims) < n {
		x.dims = make([]ir.Dim, 4*atOnce+n)
	}
	copy(x.dims, t.Dims)
	t.Dims, x.dims = x.dims[:n:n], x.dims[n:]
	for i := range t.Dims {
		d := &t.Dims[i]
		if d.Name == ir.Slots && x.experts[1] > 0 && t.Place.On(plan.ExpertAxis) == ir.ExpertDim {
			d.Size = d.Size / x.experts[0] * x.experts[1] // at experts: from every device along ep
		}
		for _, s := range t.Place {
			if s.Axis == plan.ExpertAxis && s.Dim != ir.ExpertDim {
				continue // its devices have sequences of their own, and slots for these
			}
			if s.Dim == d.Name {
				at := slices.IndexFunc(x.from, func(a ir.Axis) bool { return a.Name == s.Axis })
				d.Size = d.Size * x.from[at].Size / x.graph.Mesh[at].Size
			}
		}
		if d.Name == ir.Slots {
			d.Size = d.Size * x.slots[1] / x.slots[0]
		}
		if d.Name == ir.Batch || d.Name == ir.Slots {
			d.Size = d.Size * x.rows[1] / x.rows[0]
		}
	}
	return t
}

// value returns the scaled copy of a value, cached.
func (x *scaler) value(v *ir.Value) *ir.Value {
	if found := x.made[v]; found != nil {
		return found
	}
	if len(x.room) == 0 {
		x.room = make([]ir.Value, atOnce)
	}
	to := &x.room[0]
	x.room = x.room[1:]
	to.Name, to.Type, to.Role = v.Name, x.typed(v.Type), v.Role
	x.made[v] = to
	return to
}

func (x *scaler) values(list []*ir.Value) []*ir.Value { return lists.Map(list, x.value) }

// bytes returns the sizes of scaled values.
func (x *scaler) bytes(list []*ir.Value) []int64 {
	return lists.Map(list, func(v *ir.Value) int64 { return x.value(v).Type.Shape().Bytes() })
}

// bill scales a sheet to the sizes of a sharding.
// slots are an expert's for a whole sequence, before and after.
func (s *sheet) bill(c Sharding, target *kernels.Selector, slots [2]int64) *Bill {
	x := &scaler{target: target, from: s.mesh, rows: [2]int64{s.rows, c.Rows}, slots: slots,
		made: map[*ir.Value]*ir.Value{}}
	for _, a := range s.mesh {
		switch a.Name {
		case plan.ExpertAxis:
			x.experts = [2]int64{a.Size, c.EP}
			a.Size = c.EP
		case plan.TensorAxis:
			a.Size = c.TP
		case plan.ContextAxis:
			a.Size = c.CP / max(c.Inner, 1)
		case c.context().AllToAllAxis(): // within a ring
			a.Size = c.Inner
		}
		x.graph.Mesh = append(x.graph.Mesh, a)
	}
	b := &Bill{Embed: s.embed.bill(x), Head: s.head.bill(x)}
	b.Layers = lists.Map(s.layers, func(p *part) Part { return p.bill(x) })
	x.made, x.room, x.dims = nil, nil, nil // the bill is cached, its scratch is not
	return b
}

// bill scales a part.
func (p *part) bill(x *scaler) Part {
	out := Part{From: p.from, Rounds: p.rounds, Residuals: x.bytes(p.residuals), Late: x.bytes(p.late),
		Made: x.bytes(p.made), Cheap: x.bytes(p.cheap), part: p, x: x, items: &items{}}
	out.Data = lists.Sum(x.bytes(p.data), func(n int64) int64 { return n })
	out.Params = lists.Map(p.params, func(v *ir.Value) Param {
		return Param{v.Name, x.value(v).Type.Shape().Elements(), v.Type.Index(ir.ExpertDim) >= 0}
	})
	for _, one := range []struct {
		v    *ir.Value
		into *int64
	}{{p.flow, &out.Flow}, {p.whole, &out.Whole}, {p.mlp, &out.MLP}, {p.logits, &out.Logits},
		{p.rows, &out.Rows}, {p.expert, &out.Expert}} {
		if one.v != nil {
			*one.into = x.value(one.v).Type.Shape().Bytes()
		}
	}
	for _, e := range p.work[Forward] {
		if e.op.Kind == "attention" && out.Attention == nil {
			item := x.item(e)
			out.Attention = &item
		}
		if e.op.Kind == "linear" && p.rounds == 0 {
			item := x.item(e)
			out.Head = &item
		}
	}
	return out
}

// Items returns the work of a part by pass, computed on first use.
func (p *Part) Items() [passes][]Item {
	p.items.once.Do(func() { p.items.list = p.work() })
	return p.items.list
}

// work computes the items of a part, pass by pass.
func (p *Part) work() (list [passes][]Item) {
	x := *p.x
	entries := 0
	for _, list := range p.part.work {
		entries += len(list)
	}
	x.made = make(map[*ir.Value]*ir.Value, 2*entries) // most give one value, and some read inputs
	for pass := range list {
		list[pass] = make([]Item, 0, len(p.part.work[pass]))
		for _, e := range p.part.work[pass] {
			if item := x.item(e); item.Class != ir.Fused {
				list[pass] = append(list[pass], item)
			}
		}
	}
	return list
}

// item is the work of an entry in the scaled sizes.
func (x *scaler) item(e entry) Item {
	whole, op := e.op, *e.op
	op.In, op.Out = x.values(op.In), x.values(op.Out)
	e.op, e.handed = &op, x.values(e.handed)
	if e.reads != nil {
		e.reads, e.writes = x.values(e.reads), x.values(e.writes)
		sources := map[*ir.Value][]dtype.Format{}
		for v, formats := range e.sources {
			sources[x.value(v)] = formats
		}
		e.sources = sources
	}
	item := e.item(&x.graph, x.target)
	if item.Class == ir.Matmul && item.Tag == ir.Experts {
		x.group(whole, &item.Work)
	}
	return item
}

// group gives a GEMM of experts that is a grouped kernel the rows that a library computes in the
// same time: prices are a library's.
func (x *scaler) group(op *ir.Op, w *ir.Work) {
	g, ok := rewrite.GroupingOf(op, func(v *ir.Value) ir.Type { return x.value(v).Type })
	if !ok {
		return
	}
	if w.Format != "" {
		g.Format = w.Format
	}
	if _, ok = x.target.Groups(g); !ok {
		return
	}
	if g.Grad {
		w.K = g.Equal()
	} else {
		w.M = g.Equal()
	}
}
