package footprint

import (
	"slices"

	"github.com/deepwell/deepwell/cost"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
)

// A Rank is the memory of one device of a pipeline rank at the peak of a step, in bytes.
type Rank struct {
	program.Memory
	Largest string // the program that runs at the peak
	// Update is the temp of the programs at the end of a step, when no microbatch is live; 0 if
	// another point of the step needs more.
	Update int64
}

// A Footprint is the memory of a plan: ranks at their peak, and activations by virtual stage.
type Footprint struct {
	Ranks []Rank
	Loads []schedule.Load
}

// Peak returns the rank with the largest peak.
func (f *Footprint) Peak() *Rank {
	return &f.Ranks[lists.Most(f.Ranks, func(r Rank) int64 { return r.Sum() })]
}

// A Predictor predicts plans of one model on one kind of device. It caches results, so it is not
// safe for concurrent use.
type Predictor struct {
	config *model.Config
	facts  model.Facts
	arch   string // an argument of kernels.For
	set    *kernels.Selector
	cpu    bool
	params []model.Param
	// windowed reports that some layers have sliding-window attention. The other layers use cuDNN's
	// kernel where those do.
	windowed bool

	dense  int64 // first layers, without experts, if others have some; else 0
	slots  int64 // layers per loop iteration
	rounds int64
	quant  *quantLayers // layers by their formats; nil if all are equal

	book     *cost.Book
	layouts  map[shardKey][]param
	holdings map[holdingKey][]resident
	temps    map[programKey]int64
	sized    map[cost.Sharding]*sizes
	staged   map[programKey]*stage
	updates  map[updateKey]int64
	leans    map[lean]schedule.Load
	splits   map[*schedule.Walk]*layerSplit
	walks    *schedule.Walks
	place    place

	result Footprint // of the plan being predicted, with its parts
	list   stages
	space  space
}

// New returns a predictor for an architecture: "cpu", or a GPU's such as "sm_100".
func New(c *model.Config, arch string) (*Predictor, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	p := &Predictor{config: c, facts: c.Facts(), arch: arch, set: kernels.For(arch),
		cpu: arch == "cpu", windowed: slices.Contains(c.Windowed, true), params: c.Params(), slots: 1,
		rounds: c.Layers, book: cost.New(c, arch, nil), layouts: map[shardKey][]param{},
		holdings: map[holdingKey][]resident{},
		temps:    map[programKey]int64{}, sized: map[cost.Sharding]*sizes{},
		staged: map[programKey]*stage{}, updates: map[updateKey]int64{}, walks: &schedule.Walks{},
		splits: map[*schedule.Walk]*layerSplit{}, leans: map[lean]schedule.Load{}}
	if c.MoE != nil {
		p.dense = c.MoE.Dense
	}
	for i := range p.params {
		if q := &p.params[i]; q.Stacked() && q.Step > p.slots {
			p.slots, p.rounds = q.Step, q.Dims[0].Size
		}
	}
	return p, nil
}

// Share makes the predictor use cached schedules and graph costs of others. Walks are safe for
// concurrent use; a book (may be nil) is not.
func (p *Predictor) Share(w *schedule.Walks, b *cost.Book) {
	p.walks = w
	if b != nil {
		p.book = b
	}
}

// A shardKey is all that parameter layouts depend on.
type shardKey struct{ tp, fsdp, ep, block int64 }

func shardKeyOf(pl *plan.Plan) shardKey {
	return shardKey{max(pl.TP.Size, 1), max(pl.FSDP.Size, 1), max(pl.EP, 1), pl.Block()}
}

// once returns the cached value of a key, and creates it if needed.
func once[K comparable, V any](in map[K]V, key K, create func() V) V {
	v, ok := in[key]
	if !ok {
		v = create()
		in[key] = v
	}
	return v
}

// lay returns the layouts of all parameters, cached by shardKey.
func (p *Predictor) lay(pl *plan.Plan) []param {
	return once(p.layouts, shardKeyOf(pl), func() []param {
		return lists.Map(p.params, func(q model.Param) param {
			one := lay(&q, pl)
			if one.stack && q.First >= p.dense && p.dense > 0 {
				one.loop = 1
			}
			return one
		})
	})
}

// A part is the contents of one virtual stage: some loop iterations over layers, and perhaps
// embedding or head.
type part struct {
	from        int64 // first iteration, as far as layers differ; else 0
	rounds      int64
	first, last bool
	mix         int // number of a mix of quantized and other layers
}

// A holdingKey identifies the parameters of a part under a layout.
type holdingKey struct {
	shardKey
	part
}

// residents returns the parameters of a part, each with its number of layers.
func (p *Predictor) residents(pl *plan.Plan, t part) []resident {
	key := holdingKey{shardKeyOf(pl), t}
	if list := p.holdings[key]; list != nil {
		return list
	}
	list := p.lay(pl)
	out := make([]resident, 0, len(list))
	for i := range list {
		h := resident{param: &list[i], layers: 1}
		switch {
		case list[i].stack && t.mix > 0:
			out = p.segments(out, h.param, t.mix)
			continue
		case list[i].stack:
			h.layers = t.rounds
			if p.dense > 0 {
				if h.layers, h.class = p.of(&list[i], t), list[i].loop; h.layers == 0 {
					continue
				}
			}
		case list[i].name == "embed":
			if !t.first && (!t.last || !p.config.Tied) {
				continue
			}
		case list[i].name == "position":
			if !t.first {
				continue
			}
		case !t.last:
			continue
		}
		out = append(out, h)
	}
	p.holdings[key] = out
	return out
}

// of is the number of a part's layers that have a parameter, in a model whose first layers have no
// experts.
func (p *Predictor) of(q *param, t part) int64 {
	dense := max(0, min(t.rounds, p.dense-t.from))
	if q.loop == 0 {
		return dense
	}
	return t.rounds - dense
}

// A resident is a parameter, or a stack of it over some layers, on one device.
type resident struct {
	*param
	layers int64
	class  int          // of its layers, if they differ
	quant  *quantWeight // quantized copies; nil without any
}

// whole and stored are elements over all layers: after tp, and after tp and fsdp.
func (h *resident) whole() int64  { return h.param.whole * h.layers }
func (h *resident) stored() int64 { return h.param.stored * h.layers }

// A way is how a plan shards and types parameters, gradients and optimizer state.
type way struct {
	alone           bool // one device, no mesh
	zero            int
	gather          string // lifetime of gathered parameters: layer, microbatch or step
	elem, grad, sum int64  // bytes per element of copies, of accumulated gradients, of sent gradients
	parts           int64  // microbatches
	spread          bool   // replicas along dp or cp all-reduce their gradients
	sharded         bool   // fsdp > 1
	fsdp            int64  // devices that shard parameters, along ep, too
	unrolled        bool   // layers are unrolled instead of looped
	offload, hosted bool   // activations, optimizer state offloaded to the host
	link            link
}

// way derives the treatment of state from a plan.
func (p *Predictor) way(pl *plan.Plan, s *sizes) way {
	fsdp := max(pl.FSDP.Size, 1) * max(pl.EP, 1) // ep shards parameters as fsdp does
	devices := s.TP * s.CP * fsdp * max(pl.DP, 1) * max(pl.PP.Size, 1)
	w := way{alone: devices == 1, zero: pl.FSDP.Zero, gather: pl.FSDP.Gather, elem: s.elem,
		grad: int64(pl.Types.Grads.Bits()) / 8, sum: int64(pl.Types.Collectives.Bits()) / 8,
		parts:  pl.Microbatches,
		spread: max(pl.DP, 1)*s.CP > 1, fsdp: fsdp,
		sharded: fsdp > 1, link: p.link(pl),
		offload: !p.cpu && pl.Offloads(plan.Activations),
		hosted:  !p.cpu && pl.Offloads(plan.OptimizerState)} // a CPU has nowhere to offload to
	w.unrolled, _ = p.set.Unrolled(p.config.Layers, pl, len(pl.Recompute) > 0)
	if w.zero < 3 {
		w.gather = "step"
	}
	if w.alone {
		w.grad = s.elem
		if w.parts > 1 {
			w.grad = 4
		}
	}
	return w
}

// copied reports whether the model reads a gathered copy of a parameter that lives for a whole
// step.
func (w *way) copied(q *param) bool { return q.cut && w.gather == "step" }

// copies is the bytes of the copies that the model reads instead of the master.
func (w *way) copies(h *resident) int64 {
	elem := w.elem
	if h.wide {
		elem = 4
	}
	switch {
	case h.quant != nil && w.copied(h.param):
		return h.param.whole*h.quant.own/32 + h.quant.amaxes
	case h.quant != nil && h.quant.shard == h.quant.own:
		return h.param.stored*h.quant.own/32 + h.quant.amaxes
	case h.quant != nil:
		return h.param.stored * h.quant.shard / 32
	case w.copied(h.param):
		return h.whole() * elem
	case elem != 4:
		return h.stored() * elem
	}
	return 0
}

// grads is the bytes of an accumulated gradient.
func (w *way) grads(h *resident) int64 {
	if w.zero >= 2 {
		return h.stored() * w.grad
	}
	return h.whole() * w.grad
}

// Predict returns the memory of each rank and virtual stage. The plan must pass [plan.Plan.Check].
// The result belongs to the predictor and is overwritten by the next call.
func (p *Predictor) Predict(pl *plan.Plan) (Footprint, error) {
	if pl.PP.Size > 1 {
		return p.pipeline(pl)
	}
	return p.single(pl)
}

// Worst is Predict for the peak alone: it returns only ranks that can be the worst, and no loads
// of a pipeline's stages. If most is not 0 and a rank of a pipeline exceeds most bytes, only that
// rank is returned, computed as far as needed to know.
func (p *Predictor) Worst(pl *plan.Plan, most int64) (Footprint, error) {
	if pl.PP.Size > 1 {
		return p.leads(pl, most)
	}
	return p.single(pl)
}

// single predicts a plan without pipeline stages.
func (p *Predictor) single(pl *plan.Plan) (Footprint, error) {
	s, err := p.sizes(pl)
	if err != nil {
		return Footprint{}, err
	}
	w := p.way(pl, s)
	t := p.part(0, p.rounds, true, true)
	list := p.residents(pl, t)
	r := Rank{Memory: w.resident(list)}
	for _, n := range p.gradients(pl, s, &w, t, list) {
		if n.temp > r.Temp || r.Largest == "" {
			r.Temp, r.Largest = n.temp, n.name
		}
	}
	// Loss and gradients are one program, so saved activations are part of its temp.
	g := gradient{p: p, s: s, w: &w, part: t, params: list, forward: true, backward: true}
	r.Activations = min(r.Temp, g.residuals())
	r.Temp -= r.Activations
	l := schedule.Load{Residuals: r.Activations}
	l.Passing[schedule.Forward] = r.Activations
	l.Temp[schedule.Forward], l.Temp[schedule.Backward] = r.Temp, r.Temp
	for _, n := range p.ending("", s, &w, list) {
		r.end(n)
	}
	return Footprint{[]Rank{r}, []schedule.Load{l}}, nil
}

// resident adds up the state that lives from step to step.
func (w *way) resident(list []resident) (m program.Memory) {
	for i := range list {
		h := &list[i]
		params, optimizer, host := w.state(h)
		m.Params += params
		m.Optimizer += optimizer
		m.Host += host
		m.Grads += w.grads(h)
	}
	return m
}

// state returns the bytes of what the model reads, and of what only the update reads: Adam's two
// moments, and the f32 master if there is a copy. The latter may be offloaded to the host, except
// for masters that quantized copies are made from.
func (w *way) state(h *resident) (params, optimizer, host int64) {
	n := h.stored() * 4 // in f32
	if params, optimizer = w.copies(h), 3*n; params == 0 {
		params, optimizer = n, 2*n
	}
	if !w.hosted {
		return params, optimizer, 0
	}
	stays := int64(0)
	if h.quant != nil && (h.ragged == "" || w.copied(h.param)) {
		stays = h.param.stored * (h.quant.mx + h.quant.nv) * 4
	}
	return params, stays, optimizer - stays
}

// A need is what a program allocates while it runs: XLA's temp, and outputs that do not alias an
// input.
type need struct {
	name    string
	temp    int64
	results int64
}

// end accounts for a program that runs when no microbatch is live.
func (r *Rank) end(n need) {
	added := n.temp + n.results
	r.Update = max(r.Update, added)
	if added > r.Activations+r.Temp {
		r.Activations, r.Temp, r.Largest = 0, added, n.name
	}
}

// gradients lists the program of a plan without stages that computes loss and gradients.
func (p *Predictor) gradients(pl *plan.Plan, s *sizes, w *way, t part, list []resident) []need {
	g := gradient{p: p, s: s, w: w, part: t, params: list, plan: pl, forward: true, backward: true,
		onto: w.parts > 1}
	return []need{{"gradient", g.temp(), 0}}
}

// ending lists the programs of a rank at the end of a step. The program that adds up squared
// gradients needs next to nothing, except with a policy on the CPU.
func (p *Predictor) ending(rank string, s *sizes, w *way, list []resident) (needs []need) {
	if w.reduces(list) {
		needs = append(needs, p.reduce(rank+"reduce", w, s, list))
	}
	if n := p.squares(list); n > 0 {
		needs = append(needs, need{rank + "square", n, 0})
	}
	return append(needs, p.update(rank+"adamw", w, s, list))
}

// update is the optimizer's program.
func (p *Predictor) update(name string, w *way, s *sizes, list []resident) need {
	n := need{name: name}
	for i := range list {
		n.results += w.copies(&list[i])
	}
	switch temp := p.updateTemp(w, s, list); {
	case w.hosted:
		n.temp = p.fetched(w, list)
	case p.cpu || w.gather != "step":
		n.temp = temp + p.made(w, list)
	default: // gathered bf16 copies wait while others are quantized, but not all of both at once
		mx, nv := p.quantized(w, list)
		n.temp = max(temp+nv/2, mx)
	}
	if w.alone { // squares are added up in the same program
		n.temp = max(n.temp, p.squares(list)-n.results)
	}
	return n
}

// fetched is the temp of an update whose optimizer state is on the host: the state of the current
// parameter and of the next one, which is being fetched; for a parameter that is gathered four
// times its shard in f32, and the result. Beside them weights wait to be quantized: for NVFP4 the
// largest parameter in f32, of all layers, or as many as without offload if only tp shards them;
// for MXFP8 2.5 times the largest stack, more if the rank has several stages; if copies are
// gathered, the stack and two thirds of one orientation of the whole. The factors were read from
// the compiled updates of bench/memory's seen plans.
func (p *Predictor) fetched(w *way, list []resident) int64 {
	var plain, quantized, mx, copied, stages int64
	var whole, largest int64 // of a parameter's layers in all formats, if some are NVFP4
	scaled := false
	for i := range list {
		h := &list[i]
		_, _, host := w.state(h)
		shard := h.stored() * 4
		if i == 0 || h.param != list[i-1].param {
			whole, scaled = 0, false
		}
		whole, scaled = whole+shard, scaled || h.quant != nil && h.quant.nv > 0
		if scaled {
			largest = max(largest, whole)
		}
		switch {
		case h.quant != nil:
			quantized = max(quantized, 2*host)
		case w.copied(h.param):
			plain = max(plain, 4*shard+h.whole()*w.elem)
		default:
			plain = max(plain, 2*host)
		}
		switch {
		case h.quant == nil || h.quant.mx == 0 || shard < mx:
		case shard > mx:
			mx, stages, copied = shard, 1, h.oneWay()
		default:
			stages++
		}
	}
	_, nv := p.quantized(w, list)
	if largest > 0 && (w.sharded || w.alone) {
		return max(plain, 5*largest)
	}
	switch {
	case w.gather == "step" && w.sharded:
		mx += copied * 2 / 3
	case stages > alike:
		mx *= 5
	default:
		mx = mx * 5 / 2
	}
	return max(plain, quantized+max(mx, nv))
}

// alike is the number of a layer's weights that share the largest size: gate, up and down.
const alike = 3

// Needs lists temp and unaliased outputs of each program of a plan by name. Tests compare it with
// a compiler.
func (p *Predictor) Needs(pl *plan.Plan) (map[string][2]int64, error) {
	out := map[string][2]int64{}
	s, err := p.sizes(pl)
	if err != nil {
		return nil, err
	}
	w := p.way(pl, s)
	t := p.part(0, p.rounds, true, true)
	list := p.residents(pl, t)
	all := append(p.gradients(pl, s, &w, t, list), p.ending("", s, &w, list)...)
	if pl.PP.Size > 1 {
		e, err := p.walk(pl)
		if err != nil {
			return nil, err
		}
		all = p.stageNeeds(pl, s, &w, e)
	}
	for _, n := range all {
		out[n.name] = [2]int64{n.temp, n.results}
	}
	return out, nil
}

// rounded reports whether GEMMs read a smaller type than flows between operations.
func (p *Predictor) rounded(pl *plan.Plan) bool {
	return p.cpu && pl.Types.Params != dtype.F32
}
