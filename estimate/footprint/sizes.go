package footprint

import (
	"slices"

	"github.com/deepwell/deepwell/cost"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/spmd"
)

// A param is one parameter, or stack of them, as it lies under a plan, in elements of one layer.
type param struct {
	name   string
	stack  bool
	slot   int   // of a stack, which of a round's layers it has
	vector bool  // a norm or a bias: not worth cutting
	whole  int64 // after tp
	stored int64 // after fsdp, too
	cut    bool  // by fsdp
	first  int   // dimension that fsdp cuts, for what is moved to the front
	// ragged is the name of that dimension if a shard of it has no whole blocks of the format: then
	// shards are gathered in bf16, and quantized along it when they are whole.
	ragged string
}

// lay says how a parameter lies.
func lay(q *model.Param, p *plan.Plan) param {
	dims := q.Dims
	if q.Stacked() {
		dims = dims[1:]
	}
	l := spmd.LayoutOf(q.Name, ir.Type{Elem: dtype.F32, Dims: dims}, p)
	out := param{name: q.Name, stack: q.Stacked(), vector: len(q.Shape) < 2, slot: int(q.First),
		stored: l.Stored.Shape().Elements()}
	out.whole = out.stored
	if dim := l.Stored.Place.On(plan.FSDPAxis); dim != "" {
		out.cut, out.whole = true, out.stored*p.FSDP.Size
		out.first = slices.IndexFunc(dims, func(d ir.Dim) bool { return d.Name == dim })
		block := p.Block()
		if last := dim != ir.Heads && dim != ir.KVHeads; last && block > 0 &&
			dims[out.first].Size/p.FSDP.Size%block != 0 {
			out.ragged = dim
		}
	}
	return out
}

// sizes are those of what flows through a layer on one device, in bytes of a microbatch, from the
// bill of its graph.
type sizes struct {
	cost.Cut
	bill *cost.Bill
	elem int64 // bytes of a value
	ids  int64 // of one number for each token
	// What lies between layers, the same where tp gathered it, one of the MLP's values, the head's
	// result; and how many scores attention has.
	flow, whole, mlp, logits, scores int64
	attention                        *ir.Op
	vocab                            int64 // columns of the head
	// What a round of each loop keeps of a microbatch for its backward pass.
	residualBytes []int64
}

func (p *Predictor) sizes(pl *plan.Plan) (*sizes, error) {
	cut := cost.CutOf(pl)
	if s := p.sized[cut]; s != nil {
		return s, nil
	}
	bill, err := p.book.Bill(cut)
	if err != nil {
		return nil, err
	}
	layer := &bill.Layers[0]
	s := &sizes{Cut: cut, bill: bill, elem: 4, ids: 4 * cut.Rows * cut.Seq / cut.CP, flow: layer.Flow,
		whole: layer.Whole, mlp: layer.MLP, logits: bill.Head.Logits}
	halves := int64(1)
	if cut.Overlap {
		halves = 2 // the values of a layer are those of one half
	}
	s.flow, s.whole, s.mlp = halves*s.flow, halves*s.whole, halves*s.mlp
	if a := layer.Attention; a != nil {
		s.attention, s.scores = a.Op, halves*a.Batch*a.M*a.N
		if cut.Ring && cut.CP > 1 {
			s.scores /= cut.CP
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

// residuals lists what a part keeps of a microbatch for its backward pass: each buffer is a stack
// of the part's rounds of one loop.
func (s *sizes) residuals(t part) (list []int64) {
	for i := range s.bill.Layers {
		list = s.residualsOf(list, t, i)
	}
	return list
}

// residualsOf adds what the rounds of one loop keep.
func (s *sizes) residualsOf(list []int64, t part, loop int) []int64 {
	if rounds := s.rounds(t, loop); rounds > 0 {
		for _, n := range s.bill.Layers[loop].Residuals {
			list = append(list, n*rounds)
		}
	}
	return list
}

// data is the bytes of the batch's own numbers that the layers of a part take.
func (s *sizes) data(t part) (n int64) {
	for i := range s.bill.Layers {
		if s.rounds(t, i) > 0 {
			n = max(n, s.bill.Layers[i].Data)
		}
	}
	return n
}

// rounds is how many of a part's rounds are those of a loop of the bill.
func (s *sizes) rounds(t part, loop int) int64 {
	l := &s.bill.Layers[loop]
	return max(0, min(t.from+t.rounds, l.From+l.Rounds)-max(t.from, l.From))
}

// sum adds up the bytes of a list.
func sum(list []int64) int64 { return lists.Sum(list, func(n int64) int64 { return n }) }

// has tells whether parts of a block are computed again.
func (s *sizes) again(tag ir.Tag) bool { return s.Again.Has(tag) }
