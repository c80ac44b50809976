package footprint

import (
	"slices"
	"strings"

	"github.com/deepwell/deepwell/cost"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/precision"
)

// In has the predictor foresee the programs of a policy: those of products in few bits. nil is the
// model's own type everywhere. It must be called before anything is predicted, and not for a CPU.
func (p *Predictor) In(policy *precision.Policy) {
	if policy == nil || !policy.Quantizes() {
		return
	}
	n := &narrow{of: make([]int, p.config.Layers), mixes: map[[2]int64]int{}, counts: [][]int64{nil}}
	for _, s := range policy.Segments() {
		c := classOf(policy, s.From)
		at := slices.Index(n.classes, c)
		if at < 0 {
			at = len(n.classes)
			n.classes = append(n.classes, c)
		}
		for i := s.From; i < s.To && i < len(n.of); i++ {
			n.of[i] = at
		}
	}
	if p.narrow = n; !p.book.In(policy) {
		p.book = cost.New(p.config, p.arch, policy)
	}
}

// The linear layers of a block, and their products, as places in a class.
var (
	blockLinears  = []string{"q", "k", "v", "o", "gate", "up", "down"}
	blockProducts = []string{precision.Fprop, precision.Dgrad, precision.Wgrad}
)

const (
	fprop = iota
	dgrad
	wgrad
)

// A class is the formats of a layer, by linear layer and product; what is in the model's own type
// is empty.
type class [7][3]precision.Format

func classOf(p *precision.Policy, layer int) (c class) {
	for i, linear := range blockLinears {
		for j, product := range blockProducts {
			if f := p.Of(layer, linear, product); f != precision.BF16 {
				c[i][j] = f
			}
		}
	}
	return c
}

// of gives the format of a product of a parameter, which is named as the model names it.
func (c *class) of(linear string, product int) precision.Format {
	if i := slices.Index(blockLinears, linear); i >= 0 {
		return c[i][product]
	}
	return ""
}

// narrows tells whether any of the products of a layer is in few bits.
func (c *class) narrows() bool { return *c != class{} }

// A narrow is the layers of a model by class. Parts of a model that have as many of each class need
// the same: each such mix has a number, and 0 is that of a model without a policy.
type narrow struct {
	classes []class
	of      []int // by layer
	mixes   map[[2]int64]int
	counts  [][]int64 // of layers by class, for each mix
}

// part is some rounds of the layers, from one on, and perhaps the ends.
func (p *Predictor) part(from, rounds int64, first, last bool) part {
	t := part{rounds: rounds, first: first, last: last}
	if p.narrow != nil {
		t.from, t.mix = from, p.narrow.mix(from*p.slots, (from+rounds)*p.slots)
	}
	return t
}

// mix numbers what layers from one to another are made of.
func (n *narrow) mix(from, to int64) int {
	key := [2]int64{from, to}
	if at, ok := n.mixes[key]; ok {
		return at
	}
	counts := make([]int64, len(n.classes))
	for _, c := range n.of[from:min(to, int64(len(n.of)))] {
		counts[c]++
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
func (n *narrow) each(mix int, visit func(c *class, layers int64)) {
	for i, layers := range n.counts[mix] {
		if layers > 0 {
			visit(&n.classes[i], layers)
		}
	}
}

// A few is the bytes of an element of a weight, summed over the layers of a holding, in 32nds: of
// all copies that are kept, and of those that the forward and the backward pass take. Made is, of
// the layers, those that an update writes in MXFP8, and in NVFP4.
type few struct {
	own, forward, backward int64
	mx, nv                 int64
}

// bits is the bytes of an element in a format, in 32nds.
func bits(f precision.Format) int64 {
	if f.Block() > 1 {
		return int64(32 * f.Bytes())
	}
	return 64
}

// fewOf adds up the copies of a parameter; nil if none is in few bits.
func (p *Predictor) fewOf(q *param, mix int) *few {
	linear := q.name[strings.LastIndexByte(q.name, '.')+1:]
	if q.vector || !slices.Contains(blockLinears, linear) {
		return nil
	}
	var f few
	some, slots := false, p.slots
	p.narrow.each(mix, func(c *class, layers int64) {
		forward, backward := c.of(linear, fprop), c.of(linear, dgrad)
		own := int64(0)
		if forward == "" || backward == "" {
			own = bits("")
		}
		for _, one := range []precision.Format{forward, backward} {
			if one != "" {
				own += bits(one)
				some = true
			}
		}
		f.own += layers * own
		f.forward += layers * bits(forward)
		f.backward += layers * bits(backward)
		switch {
		case forward == precision.MXFP8 || backward == precision.MXFP8:
			f.mx += layers
		case forward != "" || backward != "":
			f.nv += layers
		}
	})
	if !some {
		return nil
	}
	// A parameter is one of a round's layers, where rounds have several.
	return &few{f.own / slots, f.forward / slots, f.backward / slots, f.mx / slots, f.nv / slots}
}

// layer is the bytes of the weights of one layer, as each pass takes them; of layers that differ
// those that have most.
func (g *gradient) layer() (forward, backward int64) {
	for i := range g.params {
		q := g.params[i].param
		if !q.stack || q.vector {
			continue
		}
		few, layers := g.params[i].few, g.params[i].layers
		if few == nil || few.mx+few.nv < layers {
			forward += q.whole * g.w.elem
			backward += q.whole * g.w.elem
			continue
		}
		rows := q.whole * few.forward / (32 * layers)
		forward += rows
		backward += q.whole * few.backward / (32 * layers)
		if g.s.again(ir.Attn) || g.s.again(ir.MLP) { // what is computed again takes rows
			backward += rows
		}
	}
	return forward, backward
}

// turned adds copies of weights that fsdp cut along what a product sums over, which stands last:
// for all layers at once they are brought into the order that is sent. They are the rows of what
// takes the width of the model, and the columns of what gives it.
func (g *gradient) turned(m *space) {
	add := func(bytes int64, from, to int) {
		m.list = append(m.list, buffer{bytes, from, to, true})
	}
	for i := range g.params {
		h := &g.params[i]
		if h.few == nil || !h.cut {
			continue
		}
		bytes := h.param.stored * (h.few.mx*bits(precision.MXFP8) + h.few.nv*bits(precision.NVFP4)) / 32
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

// made is what an update has besides that writes weights in few bits: of MXFP8 new masters wait in
// f32 until all scales are there, and perhaps a moment (4.1 bytes for an element of 70b over 32
// devices, 7.7 of 8b over 8); of NVFP4 the rounded weights (2.1 of 8b).
func made(list []holding) (bytes int64) {
	for i := range list {
		if h := &list[i]; h.few != nil {
			bytes += h.param.stored * (6*h.few.mx + 17*h.few.nv/8)
		}
	}
	return bytes
}

// blocks adds what products in few bits have besides, as buffer assignments of 8b and 70b show it:
// what was kept for the gradients of weights is turned between the loops, one stack after another;
// and on its way back a layer has gradients in both orientations, and of NVFP4 what seven of the
// largest values take, which fits both (they were transformed gradients and the numbers that
// rounding draws, until these stayed in registers; the peak remained).
func (g *gradient) blocks(m *space) {
	if g.w.gather == "layer" && g.sharded() {
		g.turned(m)
	}
	var largest, most int64
	mlp := g.s.mlp
	g.p.narrow.each(g.part.mix, func(c *class, layers int64) {
		if !c.narrows() {
			return
		}
		if !g.s.again(ir.MLP) {
			largest = max(largest, mlp/g.s.elem/32*bits(c.of("down", wgrad))*layers)
		}
		each := int64(1)
		if slices.ContainsFunc(c[:], func(list [3]precision.Format) bool {
			return slices.Contains(list[:], precision.NVFP4)
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
