package cost

import (
	"math"
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

// A Sharding is how the graph of a microbatch is sharded: all that a device's cost depends on
// besides the model. Axes that only split the batch or shard parameters are not in it; ep, which
// shards experts, is.
type Sharding struct {
	Rows, Seq         int64 // sequences on one device; tokens of a whole sequence
	TP, CP            int64
	EP                int64   // devices that share the experts; 0 and 1 mean each has all
	EPKind            string  // how rows go to experts (plan ep_kind); "" with one device
	Slots             float64 // rows that an expert has room for, in parts of its mean load
	Sequence, Overlap bool    // Overlap: layers work on two half batches (plan tp.overlap, ep_overlap)
	Kind              string  // of context parallelism (plan cp.kind); "" with one device
	Inner             int64   // devices that exchange heads within a ring (plan cp.inner)
	Balance           bool
	Plain             bool // attention
	Params            dtype.DType
	Again             Tags
	SaveRows          bool // of experts (plan ep_save)
	Joint             bool // forward and backward are one program: there is no pipeline
}

// Tags is a set of recompute tags that can be a map key.
type Tags uint16

// tags numbers the bits of Tags.
var tags = []ir.Tag{ir.Embed, ir.Attn, ir.MLP, ir.Norm, ir.Router, ir.Experts, ir.Head}

// TagsOf returns the set of a list.
func TagsOf(list []ir.Tag) (t Tags) {
	for _, tag := range list {
		if i := slices.Index(tags, tag); i >= 0 {
			t |= 1 << i
		}
	}
	return t
}

// Has reports whether a tag is in the set.
func (t Tags) Has(tag ir.Tag) bool { return t&(1<<slices.Index(tags, tag)) != 0 }

// ShardingOf returns how a plan shards a microbatch of a model, with the plan's first slots of
// experts, or its last, which memory is planned for.
func ShardingOf(m *model.Facts, p *plan.Plan, last bool) Sharding {
	c := Sharding{Rows: max(1, p.MicrobatchSequences()/p.DataParallelSize()), Seq: p.Seq,
		TP: max(p.TP.Size, 1), CP: max(p.CP.Size, 1), Sequence: p.TP.Sequence,
		Overlap: p.Halved(), Balance: p.CP.Balance,
		Params: p.Types.Params, Again: TagsOf(p.Recompute)}
	if c.CP > 1 {
		c.Kind, c.Inner = p.CP.Kind, p.CP.Inner
	}
	if m.MoE != nil {
		slots := p.ExpertSlots()
		c.SaveRows = p.EPSave
		if c.EP, c.Slots = max(p.EP, 1), slots[0]; last {
			c.Slots = slots[len(slots)-1]
		}
		if c.EP > 1 {
			c.EPKind = p.EPKind
		}
	}
	// spmd.NewStep does not recompute embedding and head, which are in no loop.
	if c.Joint = p.PP.Size <= 1; c.Joint {
		c.Again &^= TagsOf([]ir.Tag{ir.Embed, ir.Head})
	}
	return c
}

// A Part is the cost of one iteration of the loop over layers, or of embedding or head.
type Part struct {
	From, Rounds int64 // iterations that are equal; 0 for embedding and head
	// Bytes of each saved activation of a microbatch: Residuals live from forward to dgrad; Late is
	// the subset that wgrad reads; Made is what dgrad produces for wgrad.
	Residuals, Late, Made []int64
	// Cheap are residuals that are both produced and read by fused elementwise kernels: XLA may
	// recompute them instead of saving them.
	Cheap  []int64
	Data   int64 // bytes of batch inputs that backward reads
	Params []Param
	// Bytes of the residual stream between layers, the same after tp's gather of the sequence, one
	// MLP activation, and the logits.
	Flow, Whole, MLP, Logits int64
	Rows, Expert             int64 // bytes of the experts' rows, and of one activation of their MLPs
	// Attention is the iteration's (first) attention; nil for embedding and head. Head is the head's
	// GEMM.
	Attention, Head *Item

	part  *part
	x     *scaler
	items *items
}

// items are computed on first use.
type items struct {
	once sync.Once
	list [passes][]Item
}

// A Param is a parameter of a part: elements of one iteration, before dp and fsdp shard it. A tied
// table belongs to the embedding.
type Param struct {
	Name     string
	Elements int64
	Experts  bool // experts' own, which ep shards
}

// A Bill is the cost of a microbatch on one device, without the FSDP collectives of parameters and
// gradients, which follow from parameter layouts.
type Bill struct {
	Layers      []Part
	Embed, Head Part
}

// A Book caches the bills of a model on one kind of device under one policy. It is safe for
// concurrent use.
type Book struct {
	model  model.Model
	set    *kernels.Selector
	policy *precision.Policy

	mu     sync.Mutex
	losses map[Sharding]*ir.Graph // without recomputation
	sheets map[Sharding]*sheet
	bills  map[Sharding]*Bill
}

// New returns an empty book for an architecture ("cpu", or a GPU's); a nil policy quantizes
// nothing.
func New(m model.Model, arch string, policy *precision.Policy) *Book {
	if policy != nil && !policy.Quantizes() {
		policy = nil
	}
	return &Book{model: m, set: kernels.For(arch), policy: policy, losses: map[Sharding]*ir.Graph{},
		sheets: map[Sharding]*sheet{}, bills: map[Sharding]*Bill{}}
}

// In reports whether the book's bills are under a policy.
func (b *Book) In(policy *precision.Policy) bool { return b.policy == policy }

// Bill returns the bill of a sharding. It belongs to the book and must not be changed.
func (b *Book) Bill(c Sharding) (*Bill, error) {
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
	slots := [2]int64{1, 1} // as built, unless they are whole
	if to, whole := b.slots(c); whole {
		from, _ := b.slots(like)
		slots = [2]int64{from * like.CP, to * c.CP}
	}
	bill := s.bill(c, b.set, slots)
	b.bills[c] = bill
	return bill, nil
}

// like returns a representative sharding whose graph has the same operations with other sizes: a
// graph depends neither on the number of sequences nor on the number of devices that share a
// dimension evenly.
func (b *Book) like(c Sharding) Sharding {
	m := b.model.Facts()
	if c.EP > 1 && c.EP%2 == 0 && !c.experts().GathersTokens() {
		c.EP = 2
	}
	if _, whole := b.slots(c); !whole {
		return c // each size rounds slots up in its own way
	}
	if c.Rows = 1; m.MoE != nil {
		c.Slots = 1
	}
	if c.Overlap {
		c.Rows = 2
	}
	even := m.Heads%c.TP == 0 && m.KVHeads%c.TP == 0 && m.MLP%c.TP == 0 && m.Vocab%c.TP == 0
	if b.policy != nil { // chunks of whole scale blocks stay whole when they grow
		whole := []int64{m.Hidden, m.MLP / c.TP, m.Heads * m.HeadDim / c.TP, m.KVHeads * m.HeadDim / c.TP,
			c.Seq / (c.CP * c.TP)}
		if !even || slices.ContainsFunc(whole, func(n int64) bool { return n%64 != 0 }) {
			return c
		}
	}
	if c.context().Copies(max(m.KVHeads/c.TP, 1)) > 1 {
		return c // each size has its own number of copies of KV heads
	}
	if c.TP%2 == 0 && even {
		c.TP = 2
	}
	like := c
	switch {
	case c.Inner == 0 && c.CP%2 == 0:
		like.CP = 2
	case c.Inner > 0 && c.Inner%2 == 0 && c.CP/c.Inner%2 == 0:
		like.CP, like.Inner = 4, 2
	}
	if (b.halo(c) > 0) == (b.halo(like) > 0) { // else attention differs
		return like
	}
	return c
}

// slots is the number of slots that an expert has for a chunk of one sequence on a device; whole
// reports whether that and its mean load are whole numbers, so that other numbers of slots and of
// sequences have their multiples.
func (b *Book) slots(c Sharding) (n int64, whole bool) {
	e := b.model.Facts().MoE
	if e == nil {
		return 1, true
	}
	chunk := c.Seq / c.CP
	mean := float64(chunk*e.TopK) / float64(e.Experts)
	exact := min(c.Slots*mean, float64(chunk)) // a token chooses an expert once
	n, whole = int64(exact), c.Slots > 0 && mean == math.Trunc(mean) && exact == math.Trunc(exact) &&
		exact >= 1
	if b.policy != nil && whole { // of whole blocks, too
		fits := func(n int64) bool { return ir.WholeBlocks(n, max(c.EP, 1)) == n }
		rows := c.Rows
		if c.Overlap {
			rows /= 2
		}
		whole = fits(n*rows) && int64(mean)%128 == 0
	}
	return n, whole
}

// context is the plan's context parallelism.
func (c *Sharding) context() plan.CP {
	return plan.CP{Size: c.CP, Kind: c.Kind, Inner: c.Inner, Balance: c.Balance}
}

// experts is a plan with the sharding's expert parallelism alone.
func (c *Sharding) experts() *plan.Plan {
	return &plan.Plan{EP: max(c.EP, 1), EPKind: c.EPKind}
}

// meshed reports whether several devices share the graph.
func (c *Sharding) meshed() bool { return c.TP*c.CP*max(c.EP, 1) > 1 }

// halo is how many keys before its chunk a window needs.
func (b *Book) halo(c Sharding) int64 {
	return ir.Halo(b.model.Facts().Window, c.context().Chunk(c.Seq))
}

// loss builds the graph of a microbatch as training does, on a mesh without data axes.
func (b *Book) loss(c Sharding) (*ir.Graph, error) {
	c.Again, c.SaveRows, c.Joint = 0, false, false
	if g := b.losses[c]; g != nil {
		return g, nil
	}
	// Devices along ep have sequences of their own.
	shape := model.Shape{Batch: c.Rows * max(c.EP, 1), Seq: c.Seq, PlainAttention: c.Plain,
		Experts: model.ExpertShape{Slots: c.Slots, Blocks: b.policy != nil}}
	shape.Elem, shape.MatmulType = b.set.Types(c.Params)
	how := c.context()
	facts := b.model.Facts()
	shape.Documents, _ = b.set.Documents(0, kernels.Planned(facts, facts.Window > 0, c.Params, how,
		c.Seq, c.Plain))
	g, err := b.model.Graph(shape)
	if err == nil && b.policy != nil {
		g, _, err = b.policy.Apply(g, b.model.Params())
	}
	if err != nil {
		return nil, err
	}
	if c.meshed() {
		p := plan.Default()
		p.Seq, p.Batch, p.Microbatches = c.Seq, shape.Batch, 1
		p.EP, p.EPKind, p.EPOverlap = max(c.EP, 1), c.EPKind, c.Overlap
		p.FSDP.Zero = 1 // ep shards what parameters are stored as, not what a microbatch reads
		p.TP = plan.TP{Size: c.TP, Sequence: c.Sequence, Overlap: c.Overlap}
		p.CP = how
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

// build differentiates the graph of a microbatch and sorts its operations into a sheet.
func (b *Book) build(c Sharding) (*sheet, error) {
	g, err := b.loss(c)
	if err != nil {
		return nil, err
	}
	how := ir.GradPlan{Recompute: lists.Filter(tags, c.Again.Has), SaveRows: c.SaveRows,
		Requantize: c.Joint && b.set.Requantizes()}
	if c.meshed() {
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
