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

// In sets the precision policy of the programs to predict; nil means no quantized GEMMs. Call it
// before any prediction, and not for a CPU.
func (p *Predictor) In(policy *precision.Policy) {
	if policy == nil || !policy.Quantizes() {
		return
	}
	n := &quantLayers{of: make([]int, p.config.Layers), slots: int(p.slots), mixes: map[[2]int64]int{},
		counts: [][]int64{nil}}
	for _, s := range policy.Segments() {
		c := policy.Layer(s.From)
		for i := s.From; i < s.To && i < len(n.of); i++ {
			loop := 0
			if p.dense > 0 && int64(i) >= p.dense {
				loop = 1
			}
			at := 0
			for at < len(n.classes) && (n.loops[at] != loop || !maps.Equal(n.classes[at], c)) {
				at++
			}
			if at == len(n.classes) {
				n.classes, n.loops = append(n.classes, c), append(n.loops, loop)
			}
			n.of[i] = at
		}
	}
	if p.quant = n; !p.book.In(policy) {
		p.book = cost.New(p.config, p.arch, policy)
	}
}

// A class is the formats of equal layers.
type class = precision.Layer

// A quantLayers groups the layers of a model by class. Parts of a model with the same number of
// layers of each class need the same memory: each such mix has a number; 0 is a model without a
// policy.
type quantLayers struct {
	classes []class
	loops   []int // of each class: see param.loop
	of      []int // by layer
	slots   int   // layers per loop iteration
	mixes   map[[2]int64]int
	counts  [][]int64 // layers by slot in an iteration and class, for each mix
}

// part is rounds loop iterations over layers from from, and perhaps embedding or head.
func (p *Predictor) part(from, rounds int64, first, last bool) part {
	t := part{from: min(from, p.dense), rounds: rounds, first: first, last: last}
	if p.quant != nil {
		t.from = from
		t.mix = p.quant.mix(from*p.slots, (from+rounds)*p.slots)
	}
	return t
}

// mix numbers the composition of layers from up to to.
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

// each visits the classes of a mix.
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

// A quantWeight is the bytes per element of a weight, summed over the layers of a resident, in
// units of 1/32: of all stored copies, and of those that forward and backward read. mx and nv
// count the layers whose copies an update quantizes to MXFP8 and NVFP4; amaxes is the bytes of
// NVFP4's tensor scales.
type quantWeight struct {
	own, forward, backward int64
	shard                  int64 // copies made from a shard: own, except for ragged ones
	// mx or nv is the number of layers: of a format with power-of-two scales (MXFP8), or with a
	// tensor scale (NVFP4); each is the bytes of an element of that format, in units of 1/32.
	mx, nv, each int64
	amaxes       int64
}

// powerScaled tells formats whose scales are powers of two and need no amax of the tensor.
func powerScaled(f dtype.Format) bool { return f.Quantized() && !f.TensorScale() }

// bits is the bytes of an element in units of 1/32: 64 for bf16, 33 for MXFP8, 18 for NVFP4.
func bits(f dtype.Format) int64 {
	if f.Block() > 1 {
		return int64(32 * f.Bytes())
	}
	return 64
}

// segments appends the stacks that a policy splits a parameter's stack into, one for each class of
// layers ([precision.Policy.Apply]).
func (p *Predictor) segments(list []resident, q *param, mix int) []resident {
	n := p.quant
	for i := range n.classes {
		if n.loops[i] != q.loop {
			continue
		}
		// Layers behind the last whole turn (gemma3-1b: 26 of turns of 6) are stacks of their own.
		if layers := n.counts[mix][q.slot%n.slots*len(n.classes)+i]; layers > 0 {
			list = append(list, resident{q, layers, i, quantWeightOf(n.classes[i], q, layers)})
		}
	}
	return list
}

// fprop is the dimension that the forward GEMM of a linear layer sums over, if fsdp may shard it.
var fprop = map[string]string{"q": ir.EmbedDim, "k": ir.EmbedDim, "v": ir.EmbedDim,
	"gate": ir.EmbedDim, "up": ir.EmbedDim, "o": ir.Heads, "down": ir.MLPDim,
	"q_down": ir.EmbedDim, "q_up": ir.QueryRank, "kv_down": ir.EmbedDim, "kv_up": ir.KeyRank}

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
	switch along := fprop[linear]; { // a ragged shard makes the other orientation, if it can
	case q.ragged == "":
	case forward.TensorScale() || backward.TensorScale():
		f.shard = layers * bits(dtype.FormatBF16) // tiles serve both orientations, and have no amax yet
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

// layer is the bytes of one layer's weights, as each pass reads them; of layers that differ, the
// largest.
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
		if g.s.again(ir.Attn) || g.s.again(ir.MLP) { // recomputed GEMMs read rows
			add(1, h.class, rows)
		}
	}
	return slices.Max(append(each[0], 0)), slices.Max(append(each[1], 0))
}

// transposedCopies adds copies of weights that fsdp shards along the dimension a GEMM contracts,
// which is last: they are transposed for all layers at once to the order that is sent. These are
// the rows of weights that read the hidden size, and the columns of weights that write it, unless
// an update has moved their shards.
func (g *gradient) transposedCopies(m *space) {
	add := func(bytes int64, from, to int) {
		m.list = append(m.list, buffer{bytes, from, to, true})
	}
	for i := range g.params {
		h := &g.params[i]
		if h.quant == nil || !h.cut {
			continue
		}
		in32nds := h.quant.nv * h.quant.each
		if !h.moves {
			in32nds += h.quant.mx * h.quant.each
		}
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
		if again && g.backward { // recomputation reads the rows again
			to = atBackward
		}
		if g.forward || again {
			add(bytes, atEmbed, to)
		}
	}
}

// oneWay is the bytes of one orientation of a gathered weight in MXFP8.
func (h *resident) oneWay() int64 { return h.param.whole * h.quant.mx * h.quant.each / 32 }

// made is the additional temp of an update that quantizes weights.
func (p *Predictor) made(w *way, list []resident) int64 {
	mx, nv := p.quantized(w, list)
	return mx + nv
}

// quantized is the additional temp of an update that quantizes weights, by format. With MXFP8 the
// new weights of one stack wait in f32 until a kernel of ours has read them, and shards that are
// moved wait until they are sent; where fsdp gathers
// copies for a whole step, one is in flight, and a third of the next, in the mean of bench/memory's
// seen plans. With NVFP4 the rounded weights wait (2.1 bytes), except from 2 GiB on. On the CPU it
// is the size of one orientation.
func (p *Predictor) quantized(w *way, list []resident) (mx, nv int64) {
	var largest, copied, moved int64 // bytes in f32, of one orientation of the whole, of moved shards
	for i := range list {
		switch h := &list[i]; {
		case h.quant == nil:
		case p.cpu:
			mx += h.param.stored * (h.quant.mx + 5*h.quant.nv/4)
		default:
			if h.quant.mx > 0 {
				largest = max(largest, h.stored()*4)
				copied = max(copied, h.oneWay())
			}
			if h.moves && w.gather != "step" {
				moved += h.param.stored * h.quant.mx * h.quant.each / 32
			}
			if h.stored()*4 < 1<<31 {
				nv += h.param.stored * 17 * h.quant.nv / 8
			}
		}
	}
	if !p.cpu {
		mx = largest + moved
	}
	if !p.cpu && w.gather == "step" && w.sharded {
		mx += copied * 4 / 3
	}
	return mx, nv
}

// squares is the temp of the program that adds up squared gradients under a policy, which monitors
// the gradients of each layer ([optim.Param]): XLA:CPU writes the squares of stacks, and a mask of
// zero elements, both in f32, before it adds them up.
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

// requantized tells whether the backward pass quantizes the input of an MLP's last wgrad itself.
func (g *gradient) requantized(c class) bool {
	return g.s.Joint && g.p.set.Requantizes() && powerScaled(c.Of("down", precision.Wgrad))
}

// quantized adds the buffers of quantized GEMMs, as the buffer assignments of llama3.1-8b and 70b
// show them. Saved wgrad inputs are transposed between the loops, one stack after another. In
// backward, a layer has gradients in both orientations, and for NVFP4 its largest value once more,
// since its amax is found before it is quantized; seven times if a program has both passes and
// saves it, which fits both models.
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
		switch {
		case g.s.again(ir.MLP):
		case !g.requantized(c):
			largest = max(largest, mlp/g.s.elem/32*bits(c.Of("down", precision.Wgrad))*layers)
		case g.s.TP > 1 && g.s.Sequence: // norms are saved as tp gathers them
			largest = max(largest, g.s.whole/g.s.elem/32*bits(c.Of("up", precision.Wgrad))*layers)
		}
		each := int64(1)
		if slices.ContainsFunc(dtype.Formats(), func(f dtype.Format) bool {
			return f.TensorScale() && c.Has(f)
		}) {
			if each = 2; g.forward && !g.s.again(ir.MLP) {
				each = 7
			}
		}
		most = max(most, each*mlp)
	})
	if g.forward && g.backward {
		m.add(largest, atTable, atTable)
	}
	if g.backward && g.half != ofWeights {
		m.add(most+g.doubled(), atBackward, atBackward)
	}
}

// doubled is the second buffers of a layer's gathered weights and of its gradients, where a round
// of the compiled loop is two of the program's ([kernels.Selector.Doubled]). Results that are not
// accumulated in place have room for them until they are written.
func (g *gradient) doubled() (bytes int64) {
	if !g.forward || !g.backward || g.w.parts < 2 || !g.p.doubles(g.w) {
		return 0
	}
	seen := ""
	for i := range g.params {
		if h := &g.params[i]; h.stack && h.cut && h.quant != nil && h.name != seen {
			seen = h.name
			bytes += h.param.whole * (h.quant.each + 32*g.w.sum) / 32
		}
	}
	return bytes
}

// doubles tells whether a program of both passes is compiled so, as package step asks for it.
func (p *Predictor) doubles(w *way) bool {
	var formats []dtype.Format
	for _, f := range dtype.Formats() {
		if slices.ContainsFunc(p.quant.classes, func(c class) bool { return c.Has(f) }) {
			formats = append(formats, f)
		}
	}
	return w.gather == "layer" && w.sharded && !w.offload && p.facts.MoE == nil &&
		len(p.set.Doubled(nil, true, formats)) > 0
}
