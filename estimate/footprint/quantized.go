package footprint

import (
	"maps"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/cost"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/precision"
)

// In has the predictor foresee the programs of a policy: those of products in few bits. nil is the
// model's own type everywhere. It must be called before anything is predicted, and not for a CPU.
func (p *Predictor) In(policy *precision.Policy) {
	if policy == nil || !policy.Quantizes() {
		return
	}
	n := &quantLayers{of: make([]int, p.config.Layers), slots: int(p.slots), mixes: map[[2]int64]int{},
		counts: [][]int64{nil}}
	for _, s := range policy.Segments() {
		c := policy.Layer(s.From)
		at := slices.IndexFunc(n.classes, func(o class) bool { return maps.Equal(o, c) })
		if at < 0 {
			at = len(n.classes)
			n.classes = append(n.classes, c)
		}
		for i := s.From; i < s.To && i < len(n.of); i++ {
			n.of[i] = at
		}
	}
	if p.quant = n; !p.book.In(policy) {
		p.book = cost.New(p.config, p.arch, policy)
	}
}

// A class is the formats of layers that are alike.
type class = precision.Layer

// A quantLayers is the layers of a model by class. Parts of a model that have as many of each class
// need the same: each such mix has a number, and 0 is that of a model without a policy.
type quantLayers struct {
	classes []class
	of      []int // by layer
	slots   int   // layers of a round
	mixes   map[[2]int64]int
	counts  [][]int64 // of layers by place in a round and class, for each mix
}

// part is some rounds of the layers, from one on, and perhaps the ends.
func (p *Predictor) part(from, rounds int64, first, last bool) part {
	t := part{rounds: rounds, first: first, last: last}
	if p.quant != nil {
		t.from, t.mix = from, p.quant.mix(from*p.slots, (from+rounds)*p.slots)
	}
	return t
}

// mix numbers what layers from one to another are made of.
func (n *quantLayers) mix(from, to int64) int {
	key := [2]int64{from, to}
	if at, ok := n.mixes[key]; ok {
		return at
	}
	counts := make([]int64, n.slots*len(n.classes))
	for i, c := range n.of[from:min(to, int64(len(n.of)))] {
		counts[i%n.slots*len(n.classes)+c]++
	}
	at := slices.IndexFunc(n.counts, func(x []int64) bool { return slices.Equal(x, counts) })
	if at < 0 {
		at = len(n.counts)
		n.counts = append(n.counts, counts)
	}
	n.mixes[key] = at
	return at
}

// each goes through the classes of a mix.
func (n *quantLayers) each(mix int, visit func(c class, layers int64)) {
	counts := n.counts[mix]
	for i := range n.classes {
		layers := int64(0)
		for at := i; at < len(counts); at += len(n.classes) {
			layers += counts[at]
		}
		if layers > 0 {
			visit(n.classes[i], layers)
		}
	}
}

// A quantWeight is the bytes of an element of a weight, summed over the layers of a holding, in
// 32nds: of all copies that are kept, and of those that the forward and the backward pass take. Mx
// and nv are, of the layers, those that an update writes in MXFP8 and in NVFP4; amaxes the bytes of
// what NVFP4 scales whole layers by.
type quantWeight struct {
	own, forward, backward int64
	shard                  int64 // of copies that are made of a shard: own, but for ragged ones
	// mx or nv is the number of layers: of a format with power-of-two scales (MXFP8), or with a tensor
	// scale (NVFP4); each is the bytes of an element of that format, in 32nds.
	mx, nv, each int64
	amaxes       int64
}

// powerScaled tells formats whose scales are powers of two and need no amax of the tensor.
func powerScaled(f dtype.Format) bool { return f.Quantized() && !f.TensorScale() }

// bits is the bytes of an element in a format, in 32nds.
func bits(f dtype.Format) int64 {
	if f.Block() > 1 {
		return int64(32 * f.Bytes())
	}
	return 64
}

// segments adds the stacks that a policy cuts a parameter's into, one for each class of layers
// ([precision.Policy.Apply]).
func (p *Predictor) segments(list []resident, q *param, mix int) []resident {
	n := p.quant
	for i := range n.classes {
		if layers := n.counts[mix][q.slot*len(n.classes)+i]; layers > 0 {
			list = append(list, resident{q, layers, i, quantWeightOf(n.classes[i], q, layers)})
		}
	}
	return list
}

// fprop is the dimension that the forward GEMM of a linear layer sums over, if fsdp may shard it.
var fprop = map[string]string{"q": ir.EmbedDim, "k": ir.EmbedDim, "v": ir.EmbedDim,
	"gate": ir.EmbedDim, "up": ir.EmbedDim, "o": ir.Heads, "down": ir.MLPDim}

// quantWeightOf adds up the copies of a parameter of some layers; nil if none is quantized.
func quantWeightOf(c class, q *param, layers int64) *quantWeight {
	linear := q.name[strings.LastIndexByte(q.name, '.')+1:]
	forward, backward := c.Of(linear, precision.Fprop), c.Of(linear, precision.Dgrad)
	if q.vector || forward == dtype.FormatBF16 && backward == dtype.FormatBF16 {
		return nil
	}
	f := quantWeight{forward: layers * bits(forward), backward: layers * bits(backward)}
	if forward == dtype.FormatBF16 || backward == dtype.FormatBF16 {
		f.own = layers * bits(dtype.FormatBF16)
	}
	for _, one := range []dtype.Format{forward, backward} {
		if one != dtype.FormatBF16 {
			f.own += layers * bits(one)
		}
		if one.TensorScale() {
			f.amaxes += 4 * layers
		}
	}
	f.shard = f.own
	switch along := fprop[linear]; { // of a ragged shard the other orientation is made, if it can be
	case q.ragged == "":
	case forward.TensorScale() || backward.TensorScale():
		f.shard = layers * bits(dtype.FormatBF16) // tiles go both ways, and have no amax yet
	case q.ragged == along:
		f.shard = layers * (bits(dtype.FormatBF16) + bits(backward))
	default:
		f.shard = layers * (bits(dtype.FormatBF16) + bits(forward))
	}
	f.nv = layers
	for _, one := range []dtype.Format{forward, backward} {
		if powerScaled(one) {
			f.mx, f.nv, f.each = layers, 0, bits(one)
		} else if one.TensorScale() && f.mx == 0 {
			f.each = bits(one)
		}
	}
	return &f
}

// layer is the bytes of the weights of one layer, as each pass takes them; of layers that differ
// those that have most.
func (g *gradient) layer() (forward, backward int64) {
	var each [2][]int64 // by class
	add := func(pass, class int, bytes int64) {
		for len(each[pass]) <= class {
			each[pass] = append(each[pass], 0)
		}
		each[pass][class] += bytes
	}
	for i := range g.params {
		h := &g.params[i]
		if !h.stack || h.vector {
			continue
		}
		if h.quant == nil {
			add(0, h.class, h.param.whole*g.w.elem)
			add(1, h.class, h.param.whole*g.w.elem)
			continue
		}
		rows := h.param.whole * h.quant.forward / (32 * h.layers)
		add(0, h.class, rows)
		add(1, h.class, h.param.whole*h.quant.backward/(32*h.layers))
		if g.s.again(ir.Attn) || g.s.again(ir.MLP) { // what is computed again takes rows
			add(1, h.class, rows)
		}
	}
	return slices.Max(append(each[0], 0)), slices.Max(append(each[1], 0))
}

// transposedCopies adds copies of weights that fsdp cut along what a product sums over, which
// stands last: for all layers at once they are brought into the order that is sent. They are the
// rows of what takes the width of the model, and the columns of what gives it.
func (g *gradient) transposedCopies(m *space) {
	add := func(bytes int64, from, to int) {
		m.list = append(m.list, buffer{bytes, from, to, true})
	}
	for i := range g.params {
		h := &g.params[i]
		if h.quant == nil || !h.cut {
			continue
		}
		in32nds := (h.quant.mx + h.quant.nv) * h.quant.each
		bytes := h.param.stored * in32nds / 32
		linear, again := h.name[strings.LastIndexByte(h.name, '.')+1:], g.s.again(ir.Attn)
		switch linear {
		case "o", "down":
			if g.backward {
				add(bytes, atTable, atBackward)
			}
			continue
		case "gate", "up":
			again = g.s.again(ir.MLP)
		}
		to := atForward
		if again && g.backward { // the rows are taken once more
			to = atBackward
		}
		if g.forward || again {
			add(bytes, atEmbed, to)
		}
	}
}

// transposedFactors is what the half of weights has of the factors of products in MXFP8, whose
// blocks go along tokens: XLA turns stacks of all layers before the loop. They are the gradients of
// the residual stream behind attention and MLP, of queries, keys and values, and of gate and up;
// what attention gave, gate and up themselves, if they are recomputed; else the bytes that were
// kept.
func (g *gradient) transposedFactors() (bytes int64) {
	if g.part.mix == 0 || g.part.first {
		return 0
	}
	mx := false
	g.p.quant.each(g.part.mix, func(c class, _ int64) {
		mx = mx || powerScaled(c.Of("down", precision.Wgrad))
	})
	if !mx {
		return 0
	}
	c, s := g.p.config, g.s
	head := c.HeadDim * s.whole / c.Hidden / s.TP
	round := 2*s.whole + 2*s.mlp + (c.Heads+2*c.KVHeads)*head
	if s.again(ir.MLP) {
		round += 2 * s.mlp
	}
	if s.again(ir.Attn) {
		round += c.Heads * head
	}
	if !s.again(ir.Norm) {
		round += s.flow
	}
	for i := range s.bill.Layers {
		bytes += s.rounds(g.part, i) * round
	}
	return bytes
}

// made is what an update has besides that quantizes weights.
func (p *Predictor) made(w *way, list []resident) int64 {
	mx, nv := p.quantized(w, list)
	return mx + nv
}

// quantized is what an update has besides that quantizes weights, by format. Of MXFP8 new masters
// and moments wait in f32 until the old ones are read by all, since a fusion that transposes
// weights does not write in place: 7.4 to 11.3 bytes for an element in the plans of bench/memory,
// more where what was gathered is transposed as well. On one device only one stack waits, and two
// where fsdp does not shard them on sm_100, or where they have 2 GiB and more, which XLA fuses
// otherwise. Of NVFP4 the rounded weights wait (2.1), but for those of 2 GiB and more. On the CPU
// it is what one orientation takes.
func (p *Predictor) quantized(w *way, list []resident) (mx, nv int64) {
	each := int64(8)
	if w.gather == "step" && w.sharded {
		each = 10
	}
	var largest int64 // in f32
	for i := range list {
		switch h := &list[i]; {
		case h.quant == nil:
		case p.cpu:
			mx += h.param.stored * (h.quant.mx + 5*h.quant.nv/4)
		default:
			if mx += h.param.stored * each * h.quant.mx; h.quant.mx > 0 {
				largest = max(largest, h.stored()*4)
			}
			if h.stored()*4 < 1<<31 {
				nv += h.param.stored * 17 * h.quant.nv / 8
			}
		}
	}
	switch {
	case p.cpu:
	case w.alone:
		mx = largest
	case w.gather == "step" && w.sharded:
	case largest >= 1<<31 || !w.sharded && p.arch != "sm_120":
		mx = min(mx, largest*13/6)
	}
	return mx, nv
}

// squares is what the program that adds up the squares of gradients has under a policy, which
// watches the gradients of each layer ([optim.Param]): XLA:CPU writes the squares of stacks, and
// which of their elements are zero, both in f32, before it adds them up.
func (p *Predictor) squares(list []resident) (bytes int64) {
	if p.quant == nil || !p.cpu {
		return 0
	}
	for i := range list {
		if h := &list[i]; h.stack {
			bytes += 8 * h.stored()
		}
	}
	return bytes
}

// quantized adds what products in few bits have besides, as buffer assignments of 8b and 70b show
// it: what was kept for the gradients of weights is turned between the loops, one stack after
// another; and on its way back a layer has gradients in both orientations, and of NVFP4 what seven
// of the largest values take, which fits both (they were transformed gradients and the numbers that
// rounding draws, until these stayed in registers; the peak remained).
func (g *gradient) quantized(m *space) {
	if g.w.gather == "layer" && g.sharded() {
		g.transposedCopies(m)
	}
	var largest, most int64
	mlp := g.s.mlp
	g.p.quant.each(g.part.mix, func(c class, layers int64) {
		if len(c) == 0 {
			return
		}
		if !g.s.again(ir.MLP) {
			largest = max(largest, mlp/g.s.elem/32*bits(c.Of("down", precision.Wgrad))*layers)
		}
		each := int64(1)
		if slices.ContainsFunc(dtype.Formats(), func(f dtype.Format) bool {
			return f.TensorScale() && c.Has(f)
		}) {
			each = 7
		}
		most = max(most, each*mlp)
	})
	if g.forward && g.backward {
		m.add(largest, atTable, atTable)
	}
	if g.backward && g.half != ofWeights {
		m.add(most, atBackward, atBackward)
	}
}
