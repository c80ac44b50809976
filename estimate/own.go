package estimate

import (
	"slices"
	"strings"

	"github.com/deepwell/deepwell/cost"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/price"
)

// billed reports whether our own programs are priced: then the cost of a microbatch comes from the
// model's graph (package cost). Other stacks, and options that our programs do not have, use the
// closed forms of [builder].
func (e *Estimator) billed() bool {
	o := e.options
	return e.profile.Name == price.Own && !o.Plain && o.Predict == 0 && o.ExpertRanks == 0
}

// noBill are tags without recomputed operations in a graph's cost; of models without experts, also
// sparse.
var noBill, sparse = cost.TagsOf([]ir.Tag{ir.Embed}), cost.TagsOf([]ir.Tag{ir.Router, ir.Experts})

// bill prices the blocks of a sharding from their graph. If a loop iteration has several layers,
// each costs their mean: no stage has a fraction of an iteration.
func (e *Estimator) bill(c *sharding, p *priced) error {
	cut := cost.Sharding{Rows: c.rows, Seq: c.seq, TP: c.tensor, CP: c.context,
		Kind: c.kind, Inner: c.inner, Balance: c.balance, Sequence: c.sequence,
		Overlap: c.overlap, Plain: c.plain, Params: c.params, Again: c.again &^ noBill, Joint: c.joint}
	if e.config.MoE != nil {
		cut.EP, cut.EPKind, cut.Slots = c.expert, c.exchange, c.slots
		cut.SaveRows = c.saveRows
	} else {
		cut.Again &^= sparse
	}
	b, err := e.book.Bill(cut)
	if err != nil {
		return err
	}
	// Loops of a model differ in the layers of an iteration: those behind its last whole turn are a
	// loop of their own. A kind of layers has the price of the first loop that has any of it.
	first, priced := int64(0), make([]bool, len(e.kinds))
	for i := range b.Layers {
		l := &b.Layers[i]
		slots := layersOf(l, c)
		for k, below := range e.below {
			if below[first+slots] > below[first] && !priced[k] {
				priced[k], p.layers[k] = true, e.part(c, l, e.kinds[k].in, float64(slots))
			}
		}
		first += l.Rounds * slots
	}
	p.embed, p.head = e.part(c, &b.Embed, nil, 1), e.part(c, &b.Head, nil, 1)
	p.logits = float64(b.Head.Logits)
	return nil
}

// A pricer adds up the items of one part of the model.
type pricer struct {
	*builder
	pass cost.Pass
	// Collected over a pass and priced at its end, because XLA merges them.
	gemms         []joint
	quantized     []joint
	agree         []*ir.Value // tensors whose amax is all-reduced
	gathers, sums float64     // bytes of all-gathers and reduce-scatters along cp
	exchanged     float64     // seconds of rows on their way to experts and back
}

// A joint is GEMMs that share an operand, or quantized copies of one tensor.
type joint struct {
	of    *ir.Value
	kind  string
	into  *phase
	work  ir.Work
	sides float64
	// computed is true if the kernel computes what it quantizes.
	computed bool
}

// joins finds the joint of an item, or starts one.
func joins(list *[]joint, item *cost.Item, into *phase) *joint {
	for i := range *list {
		j := &(*list)[i]
		if j.of == item.Op.In[0] && j.kind == item.Kind && j.work.Format == item.Format {
			return j
		}
	}
	work := item.Work
	work.N = 0
	*list = append(*list, joint{of: item.Op.In[0], kind: item.Kind, into: into, work: work})
	return &(*list)[len(*list)-1]
}

// part prices one of the slots layers of a loop iteration, or an end of the model.
func (e *Estimator) part(c *sharding, l *cost.Part, in precision.Layer, slots float64) block {
	b := &pricer{builder: e.builder(c)}
	b.in = in
	for pass, list := range l.Items() {
		b.pass = cost.Pass(pass)
		into := []*phase{&b.forward, &b.input, &b.weight}[pass]
		for i := range list {
			b.item(&list[i], into)
		}
		b.settle(into)
		b.operations += float64(len(list))
	}
	for _, n := range l.Residuals {
		b.residual += float64(n)
	}
	for _, q := range l.Params {
		if q.Experts {
			b.block.experts += float64(q.Elements)
		} else {
			b.dense += float64(q.Elements)
		}
		for name := range strings.SplitSeq(q.Name, ".") { // block.q, or block.q.from4
			if slices.ContainsFunc(gemms, func(p string) bool { return in[[2]string{name, p}] != "" }) {
				b.weights(name, float64(q.Elements), q.Experts)
			}
		}
	}
	var one block
	one.add(&b.block, 1/slots)
	return one
}

// computedAgain lists forward kinds: in a backward pass they are recomputation.
var computedAgain = []string{"linear", "attention", "rms_norm", "layer_norm", "embedding",
	"cross_entropy"}

// item adds one operation to a phase.
func (b *pricer) item(item *cost.Item, into *phase) {
	if b.pass != cost.Forward && slices.Contains(computedAgain, item.Kind) {
		into = &b.again
	}
	switch item.Class {
	case ir.Matmul:
		switch {
		case item.Tag == ir.Experts: // one batched GEMM
			into.gemm += b.p.Grouped(b.formatOf(item.Work), float64(item.Batch), float64(item.M),
				float64(item.K), float64(item.N), item.Kind == "linear_dw")
		case item.Tag == ir.Router: // in f32, whatever the model is in
			into.gemm += b.p.GEMM(dtype.FormatF32, float64(item.M), float64(item.K), float64(item.N))
		case item.Format == "" && item.Batch == 1: // XLA merges GEMMs that share an operand
			joins(&b.gemms, item, into).work.N += item.N
		default:
			into.gemm += float64(item.Batch) * b.timed(item.Work)
		}
	case ir.Attend:
		b.attends(item, into)
	case ir.Streaming: // counted bytes: without the profile's factor for uncounted kernels
		into.stream += b.p.Stream(float64(item.Bytes)) / b.p.Profile().Stream
	case ir.Quantizing:
		if item.Kind == "quantize" {
			j := joins(&b.quantized, item, into)
			j.sides, j.computed = j.sides+1, item.Computed
		} else if !slices.Contains(b.agree, item.Op.In[0]) {
			b.agree = append(b.agree, item.Op.In[0])
		}
	}
	for _, s := range item.Sends {
		bytes := float64(s.Bytes * s.Count)
		switch {
		case s.Axes[0] == plan.TensorAxis:
			hide := b.p.Profile().HideTensor
			if b.c.overlap {
				hide = max(hide, overlapHides)
			}
			into.tensor += (1 - hide) * b.p.Collective(sentAs[s.Kind], bytes, b.c.tensorGroup())
		case s.Axes[0] == plan.ExpertAxis:
			b.exchanged += b.p.Collective(sentAs[s.Kind], bytes, b.c.expertGroup())
		case s.Kind == "all_to_all":
			into.context += b.p.Collective(price.AllToAll, bytes, b.c.headsGroup())
			into.stream += b.p.Stream(b.c.sorted()*bytes) / b.p.Profile().Stream
		case s.Kind == "reduce_scatter":
			b.sums += bytes
		case s.Kind == ir.Permute: // priced as a gather of as many bytes
			n := float64(b.c.cp().Shards())
			b.gathers += bytes * n / (n - 1)
		default:
			b.gathers += bytes
		}
	}
}

// sentAs maps the kinds of collectives in a graph to the cost model's.
var sentAs = map[string]price.Kind{"all_gather": price.AllGather, "all_reduce": price.AllReduce,
	"reduce_scatter": price.ReduceScatter, "all_to_all": price.AllToAll}

// timed is the seconds of one GEMM.
func (b *pricer) timed(w ir.Work) float64 {
	return b.p.GEMM(b.formatOf(w), float64(w.M), float64(w.K), float64(w.N))
}

// formatOf is the format of a GEMM's operands.
func (b *pricer) formatOf(w ir.Work) dtype.Format {
	if w.Format == "" {
		return b.e.precision(b.c)
	}
	return w.Format
}

// layersOf is the number of layers of an iteration: each has an attention, or two for half batches.
func layersOf(l *cost.Part, c *sharding) int64 {
	n := int64(0)
	for _, item := range l.Items()[cost.Forward] {
		if item.Kind == "attention" {
			n++
		}
	}
	if c.overlap {
		n /= 2
	}
	return max(n, 1)
}

// attends adds an attention and its gradient, priced by its kernel.
func (b *pricer) attends(item *cost.Item, into *phase) {
	q := item.Op.In[0].Type
	heads := float64(q.Size(ir.Heads))
	// Two half batches per layer body have two attentions.
	part := float64(item.Batch) / heads / float64(b.c.rows)
	if item.Kind == "attention_grad" {
		return // priced together with its forward pass
	}
	one := b.e.builder(b.c)
	cp := b.c.cp() // scores has the heads before an all-to-all
	one.scores(item.Op.Attrs.Int("window") > 0, heads*float64(cp.AllToAll()), float64(item.K),
		float64(item.V))
	into.attention += part * one.forward.attention
	if b.pass == cost.Forward {
		b.input.attention += part * one.input.attention
	}
	b.dropped += part * one.dropped
	if cp.Shards() > 1 {
		count := part * float64(cp.AllToAll())
		keys := float64(item.Op.In[1].Type.Size(ir.KVHeads)) * float64(item.K+item.V)
		b.joins(item.Op.Attrs.Int("window") > 0, count*heads*float64(item.V), count*keys)
	}
}

// agreed is the number of amax all-reduces in one pass of a layer after XLA has combined those
// that are ready together (llama3.1-8b compiled for 8 B200).
const agreed = 4

// settle prices what was collected over a pass.
func (b *pricer) settle(into *phase) {
	for i := range b.gemms {
		j := &b.gemms[i]
		j.into.gemm += b.timed(j.work)
	}
	for i := range b.quantized {
		if b.pass == cost.Input {
			break // wgrads share other operands
		}
		j := &b.quantized[i]
		elem := float64(j.of.Type.Elem.Bits()) / 8
		prec := j.work.Format
		j.into.quantize += b.builder.quantized(prec, float64(j.work.Bytes)/elem, elem, j.sides,
			j.computed)
	}
	into.data += float64(min(len(b.agree), agreed)) * b.p.Agree(b.c.everyone())
	if b.gathers+b.sums > 0 {
		g, hide := b.c.contextGroup(), b.p.Profile().HideContext
		if b.c.cp().Ring() { // chunks travel while the previous one is computed
			hide = max(hide, 0.8)
		}
		t := b.p.Collective(price.AllGather, b.gathers, g)
		if b.sums > 0 {
			t += b.p.Collective(price.ReduceScatter, b.sums, g)
		}
		into.context += max((1-hide)*t, t-into.attention)
	}
	hide := b.p.Profile().HideExpert
	if b.c.overlap { // behind what the other half computes
		hide = max(hide, overlapHides)
	}
	into.expert += max((1-hide)*b.exchanged, b.exchanged-into.gemm-into.attention)
	if b.pass != cost.Input {
		b.quantized = b.quantized[:0]
	}
	b.gemms, b.agree, b.gathers, b.sums, b.exchanged = b.gemms[:0], b.agree[:0], 0, 0, 0
}
