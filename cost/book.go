package cost

import (
	"slices"
	"sync"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/spmd"
)

// A Cut is how the graph of a microbatch is sharded: all that a device's bill depends on beside the
// model. Axes that only deal rows or pieces of parameters are not in it.
type Cut struct {
	Rows, Seq         int64 // rows of one device; Seq is the whole sequence
	TP, CP            int64
	Sequence, Overlap bool
	Ring, Balance     bool
	Params            dtype.DType
	Again             Tags
}

// Tags is a set of tags, for keys of maps.
type Tags uint16

var tags = []ir.Tag{ir.Embed, ir.Attn, ir.MLP, ir.Norm, ir.Router, ir.Experts, ir.Head}

// TagsOf is the set of a list.
func TagsOf(list []ir.Tag) (t Tags) {
	for _, tag := range list {
		if i := slices.Index(tags, tag); i >= 0 {
			t |= 1 << i
		}
	}
	return t
}

// Has tells whether a tag is in the set.
func (t Tags) Has(tag ir.Tag) bool { return t&(1<<slices.Index(tags, tag)) != 0 }

// CutOf is how a plan cuts a microbatch.
func CutOf(p *plan.Plan) Cut {
	c := Cut{Rows: max(1, p.Rows()/p.Ranks()), Seq: p.Seq, TP: max(p.TP.Size, 1),
		CP: max(p.CP.Size, 1), Sequence: p.TP.Sequence, Overlap: p.TP.Overlap && p.TP.Size > 1,
		Ring: p.CP.Kind == "ring", Balance: p.CP.Balance, Params: p.Types.Params,
		Again: TagsOf(p.Recompute)}
	if p.PP.Size <= 1 { // spmd.NewStep keeps the ends of the model, which are in no loop
		c.Again &^= TagsOf([]ir.Tag{ir.Embed, ir.Head})
	}
	return c
}

// A Part is the bill of one round of the layers' loop, or of an end of the model.
type Part struct {
	From, Rounds int64 // the rounds that are alike; 0 of an end
	// Bytes of each buffer that a microbatch keeps: from the forward to the gradient of the input, of
	// these those that the gradients of weights take, and what the gradient of the input leaves for
	// them.
	Residuals, Late, Made []int64
	// Cheap are those of Kept that fused operations make and fused operations take: a compiler that
	// sees both may rather compute them again.
	Cheap  []int64
	Data   int64 // bytes of the batch's own numbers that gradients take
	Params []Param
	// Bytes of what flows between layers, the same whole where tp cuts the sequence, one of the MLP's
	// values, and the head's result.
	Flow, Whole, MLP, Logits int64
	// Attention is that of the round, the first if there are several; nil in an end. Head is the last
	// product of an end.
	Attention, Head *Item

	part  *part
	x     *scaler
	items *items
}

// items are worked out once.
type items struct {
	once sync.Once
	list [passes][]Item
}

// A Param is a parameter of a part, in elements of one round, before data axes cut it. What both
// ends take is the embedding's.
type Param struct {
	Name     string
	Elements int64
}

// A Bill is what a microbatch asks of one device, without what parameters ask that the data axes
// share: their collectives follow from their layouts.
type Bill struct {
	Layers      []Part
	Embed, Head Part
}

// A Book has the bills of a model on one kind of device, in one policy. It may be shared.
type Book struct {
	model  model.Model
	set    *kernels.Selector
	policy *precision.Policy

	mu     sync.Mutex
	losses map[Cut]*ir.Graph // of what is computed again none
	sheets map[Cut]*sheet
	bills  map[Cut]*Bill
}

// New makes an empty book for an architecture ("cpu", or a card's); a nil policy is the model's own
// type everywhere.
func New(m model.Model, arch string, policy *precision.Policy) *Book {
	if policy != nil && !policy.Quantizes() {
		policy = nil
	}
	return &Book{model: m, set: kernels.For(arch), policy: policy, losses: map[Cut]*ir.Graph{},
		sheets: map[Cut]*sheet{}, bills: map[Cut]*Bill{}}
}

// In tells whether the book is that of a policy.
func (b *Book) In(policy *precision.Policy) bool { return b.policy == policy }

// Bill gives the bill of a cut. It belongs to the book.
func (b *Book) Bill(c Cut) (*Bill, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if bill := b.bills[c]; bill != nil {
		return bill, nil
	}
	like := b.like(c)
	s := b.sheets[like]
	if s == nil {
		var err error
		if s, err = b.build(like); err != nil {
			return nil, err
		}
		b.sheets[like] = s
	}
	bill := s.bill(c, b.set)
	b.bills[c] = bill
	return bill, nil
}

// like is the cut whose graph has the same operations, with other sizes: a graph does not depend on
// how many rows there are, nor on how many devices share evenly what they share.
func (b *Book) like(c Cut) Cut {
	m := b.model.Facts()
	c.Rows = 1
	if c.Overlap {
		c.Rows = 2
	}
	even := m.Heads%c.TP == 0 && m.KVHeads%c.TP == 0 && m.MLP%c.TP == 0 && m.Vocab%c.TP == 0
	if b.policy != nil { // pieces of whole blocks stay so where they are larger
		whole := []int64{m.Hidden, m.MLP / c.TP, m.Heads * m.HeadDim / c.TP, m.KVHeads * m.HeadDim / c.TP,
			c.Seq / (c.CP * c.TP)}
		if !even || slices.ContainsFunc(whole, func(n int64) bool { return n%64 != 0 }) {
			return c
		}
	}
	if c.TP%2 == 0 && even {
		c.TP = 2
	}
	if c.CP%2 == 0 {
		c.CP = 2
	}
	return c
}

// loss makes the graph of a microbatch as training does, on a mesh without data axes.
func (b *Book) loss(c Cut) (*ir.Graph, error) {
	c.Again = 0
	if g := b.losses[c]; g != nil {
		return g, nil
	}
	shape := model.Shape{Batch: c.Rows, Seq: c.Seq}
	shape.Elem, shape.MatmulType = b.set.Types(c.Params)
	shape.Documents, _ = b.set.Documents()
	g, err := b.model.Graph(shape)
	if err == nil && b.policy != nil {
		g, _, err = b.policy.Apply(g, b.model.Params())
	}
	if err != nil {
		return nil, err
	}
	if c.TP*c.CP > 1 {
		p := plan.Default()
		p.Seq, p.Batch, p.Microbatches = c.Seq, c.Rows, 1
		p.TP = plan.TP{Size: c.TP, Sequence: c.Sequence, Overlap: c.Overlap}
		p.CP = plan.CP{Size: c.CP, Kind: "gather", Balance: c.Balance}
		if c.Ring {
			p.CP.Kind = "ring"
		}
		p.Types.Params = c.Params
		sh, err := spmd.Shard(g, p)
		if err != nil {
			return nil, err
		}
		g = sh.Graph
	}
	b.losses[c] = g
	return g, nil
}

// build takes the gradient of a microbatch and takes it apart.
func (b *Book) build(c Cut) (*sheet, error) {
	g, err := b.loss(c)
	if err != nil {
		return nil, err
	}
	how := ir.GradPlan{Recompute: lists.Filter(tags, c.Again.Has)}
	if c.TP*c.CP > 1 {
		how.Terms, how.Recompute = true, append(how.Recompute, ir.Gather)
	}
	gr, err := ir.Grad(g, how)
	if err != nil {
		return nil, err
	}
	if b.policy != nil {
		var blocks spmd.QuantizedCopies
		for _, g := range []*ir.Graph{gr.Forward, gr.Backward} {
			if _, err := blocks.Expand(g, ir.ReportNothing); err != nil {
				return nil, err
			}
		}
	}
	s := newSheet(g, gr)
	s.rows = c.Rows
	return s, nil
}
