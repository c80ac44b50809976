package footprint

import (
	"slices"

	"github.com/deepwell/deepwell/cost"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/spmd"
)

// A param is the layout of one parameter, or a stack of them, under a plan. Sizes are elements of
// one layer.
type param struct {
	name   string
	stack  bool
	loop   int   // of a stack: 1 with the layers that have experts, behind others that have none
	slot   int   // of a stack: which layer of an iteration
	vector bool  // a norm or a bias, never sharded
	wide   bool  // computes in f32, whatever the model is in
	whole  int64 // elements after tp
	stored int64 // elements after tp and fsdp
	cut    bool  // sharded by fsdp
	first  int   // the dimension fsdp shards, which is moved to the front
	// ragged names that dimension if a shard of it is not whole scale blocks: then shards are
	// gathered in bf16 and quantized along it afterwards.
	ragged string
	// moves tells that copies in MXFP8 which GEMMs contract along that dimension are sharded by
	// another ([ir.QuantizedParam]).
	moves bool
}

// lay returns the layout of a parameter.
func lay(q *model.Param, p *plan.Plan) param {
	dims := q.Dims
	if q.Stacked() {
		dims = dims[1:]
	}
	l := spmd.LayoutOf(q.Name, ir.Type{Elem: dtype.F32, Dims: dims}, p)
	out := param{name: q.Name, stack: q.Stacked(), vector: len(q.Shape) < 2,
		wide: q.Tag == ir.Router, slot: int(q.First),
		stored: l.Stored.Shape().Elements()}
	out.whole = out.stored
	if len(l.Shards) > 0 {
		n := lists.Product(l.Shards, func(s ir.AxisSharding) int64 { return p.Size(s.Axis) })
		dim := l.Shards[0].Dim
		out.cut, out.whole = true, out.stored*n
		out.first = slices.IndexFunc(dims, func(d ir.Dim) bool { return d.Name == dim })
		block := p.Block()
		if last := dim != ir.Heads && dim != ir.KVHeads; last && block > 0 &&
			dims[out.first].Size/n%block != 0 {
			out.ragged = dim
		}
		if to := ir.Without(dims, dim); out.ragged == "" && len(to) > 0 &&
			l.Stored.Index(ir.ExpertDim) < 0 && len(l.Stored.Place.Axes(to[0].Name)) == 0 {
			out.moves = to[0].Size%p.Size(l.Shards[0].Axis) == 0
		}
	}
	return out
}

// sizes are the activations of a layer on one device, in bytes of a microbatch, from the cost of
// its graph.
type sizes struct {
	cost.Sharding
	bill *cost.Bill
	elem int64 // bytes of an element
	ids  int64 // bytes of one int32 per token
	// The residual stream between layers, the same after tp's gather, one MLP activation, the logits;
	// and the number of attention scores.
	flow, whole, mlp, logits, scores int64
	// The rows of a device's experts, and one activation of their MLPs; 0 without experts.
	rows, expert int64
	packed       int64 // workspace of attention that keeps documents apart
	queries      int64 // elements
	// parts are the results of a ring's moves, which XLA keeps side by side where the backward pass
	// computes the ring again: 5 bytes for each element of results and shard, chosen by llama3.1-8b at
	// 131,072 tokens (cp 2 to 16, compiled 72.4, 43.7, 36.1 and 45.6 GiB; predicted 69.8, 41.7, 35.7
	// and 46.0).
	parts     int64
	attention *ir.Op
	vocab     int64 // columns of the head on a device
	// Bytes that an iteration of each loop saves of a microbatch for backward.
	residualBytes []int64
}

// sizes returns the activation sizes of a plan, cached by its sharding.
func (p *Predictor) sizes(pl *plan.Plan) (*sizes, error) {
	cut := cost.ShardingOf(&p.facts, pl, true)
	if s := p.sized[cut]; s != nil {
		return s, nil
	}
	bill, err := p.book.Bill(cut)
	if err != nil {
		return nil, err
	}
	layer := &bill.Layers[0]
	s := &sizes{Sharding: cut, bill: bill, elem: 4, ids: 4 * cut.Rows * cut.Seq / cut.CP,
		flow: layer.Flow, whole: layer.Whole, logits: bill.Head.Logits}
	for i := range bill.Layers {
		l := &bill.Layers[i]
		s.mlp, s.rows, s.expert = max(s.mlp, l.MLP), max(s.rows, l.Rows), max(s.expert, l.Expert)
	}
	halves := int64(1)
	if cut.Overlap {
		halves = 2 // a layer's values are of one half batch
	}
	s.flow, s.whole, s.mlp = halves*s.flow, halves*s.whole, halves*s.mlp
	s.rows, s.expert = halves*s.rows, halves*s.expert
	if a := layer.Attention; a != nil {
		s.attention, s.scores = a.Op, halves*a.Batch*a.M*a.N
		if pl.CP.Ring() {
			s.scores /= pl.CP.Shards()
		}
		s.queries = halves * a.Op.In[0].Type.Shape().Elements()
		if documents := a.Op.Attrs.Int("documents"); documents > 0 {
			s.packed = p.set.PackedWorkspace(s.queries, a.Op.In[0].Type.Size(ir.Seq), documents)
			if heads := (kernels.Attention{Head: a.K, Value: a.V}); !heads.Offsets() {
				// Operands have gradients, and so has the output.
				rows := halves * 2 * lists.Sum(append(a.Op.In[:3:3], a.Op.Out[0]),
					func(v *ir.Value) int64 { return v.Type.Shape().Bytes() })
				s.packed += p.set.RowsWorkspace(rows, a.Op.In[0].Type.Size(ir.Seq), documents)
			}
		}
		if pl.CP.Ring() {
			s.parts = 5 * pl.CP.Shards() * halves * a.Op.Out[0].Type.Shape().Elements()
		}
	}
	if bill.Head.Head != nil {
		s.vocab = bill.Head.Head.N
	}
	if elem, _ := p.set.Types(cut.Params); elem != dtype.F32 {
		s.elem = int64(elem.Bits()) / 8
	}
	s.residualBytes = lists.Map(bill.Layers, func(l cost.Part) int64 { return sum(l.Residuals) })
	p.sized[cut] = s
	return s, nil
}

// residuals lists what a part saves of a microbatch for backward: each buffer is a stack over the
// part's iterations of one loop.
func (s *sizes) residuals(t part) (list []int64) {
	for i := range s.bill.Layers {
		list = s.residualsOf(list, t, i)
	}
	return list
}

// residualsOf appends what the iterations of one loop save.
func (s *sizes) residualsOf(list []int64, t part, loop int) []int64 {
	if rounds := s.rounds(t, loop); rounds > 0 {
		for _, n := range s.bill.Layers[loop].Residuals {
			list = append(list, n*rounds)
		}
	}
	return list
}

// data is the bytes of batch inputs (such as positions) that the layers of a part read.
func (s *sizes) data(t part) (n int64) {
	for i := range s.bill.Layers {
		if s.rounds(t, i) > 0 {
			n = max(n, s.bill.Layers[i].Data)
		}
	}
	return n
}

// rounds is the number of a part's iterations that belong to a loop of the graph.
func (s *sizes) rounds(t part, loop int) int64 {
	l := &s.bill.Layers[loop]
	return max(0, min(t.from+t.rounds, l.From+l.Rounds)-max(t.from, l.From))
}

// sum adds up the bytes of a list.
func sum(list []int64) int64 { return lists.Sum(list, func(n int64) int64 { return n }) }

// again reports whether a part of a block is recomputed.
func (s *sizes) again(tag ir.Tag) bool { return s.Again.Has(tag) }
