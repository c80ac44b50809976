package autoplan

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/price"
	"github.com/deepwell/deepwell/schedule"
)

// A mesh is the sizes of the axes. data is dp times fsdp.
type mesh struct{ tp, cp, ep, pp, data int64 }

func (m mesh) compare(o mesh) int {
	return cmp.Or(cmp.Compare(m.pp, o.pp), cmp.Compare(m.tp, o.tp), cmp.Compare(m.cp, o.cp),
		cmp.Compare(m.ep, o.ep), cmp.Compare(m.data, o.data))
}

// A node is a mesh and the rows of a microbatch, on one number of devices.
type node struct {
	mesh
	count     int // index of the number of devices
	precision int // index of the precision
	micro     int64
	rows      int64 // of a step
	micros    int64
	bound     float64 // that no plan of the node can beat, in the unit of the goal
}

// A cut is how dp and fsdp share the data axis, and what fsdp cuts.
type cut struct {
	dp, fsdp int64
	zero     int
	gather   string
}

// An order is a schedule with its virtual stages.
type order struct {
	name    string
	virtual int64
}

// A layoutOption is the plans of a node that differ in what is recomputed and offloaded.
type layoutOption struct {
	cut
	order
}

// The words of a plan that a search chooses from.
var (
	gathers  = []string{"layer", "micro", "step"}
	offloads = []string{"activations", "optimizer"}
	tagNames = []string{"norm", "attn", "mlp", "router", "experts"}
)

// maxMicro is the most rows of a microbatch on a device: beyond some ten thousand tokens products
// are as large as they get.
const maxMicro = 16

// divisors lists the divisors of n up to most, in order.
func divisors(n, most int64) []int64 {
	var list []int64
	for d := int64(1); d*d <= n; d++ {
		if n%d != 0 {
			continue
		}
		list = append(list, d)
		if n/d != d {
			list = append(list, n/d)
		}
	}
	list = slices.DeleteFunc(list, func(d int64) bool { return d > most })
	slices.Sort(list)
	return list
}

// meshes lists the meshes of n devices. Tensor parallel ranks stay within an NVLink domain, pieces
// of a row have at least 512 tokens, and there are as many stages as layers at most.
func (j *Job) meshes(n int64) []mesh {
	c := j.Config
	var list []mesh
	domain := int64(max(j.Cluster.Card.NVLinkDomain, 1))
	for _, tp := range divisors(n, domain) {
		if !j.Fixed.allows("tp", tp) || !plan.FitsTP(j.facts(), tp) {
			continue
		}
		for _, cp := range divisors(n/tp, max(1, j.Seq/leastPiece)) {
			if !j.Fixed.allows("cp", cp) || j.Seq%(j.pieces(cp)*tp) != 0 {
				continue
			}
			for _, ep := range j.expertSizes(n / tp / cp) {
				for _, pp := range divisors(n/tp/cp/ep, c.Layers) {
					if j.Fixed.allows("pp", pp) {
						list = append(list, mesh{tp, cp, ep, pp, n / tp / cp / ep / pp})
					}
				}
			}
		}
	}
	return list
}

// leastPiece is the fewest tokens of a row that a device of cp should have: fewer make products
// that are all overhead.
const leastPiece = 512

func (j *Job) expertSizes(n int64) []int64 {
	if j.Config.MoE == nil {
		if j.Fixed.allows("ep", 1) {
			return []int64{1}
		}
		return nil
	}
	return lists.Filter(divisors(n, j.Config.MoE.Experts), func(ep int64) bool {
		return j.Config.MoE.Experts%ep == 0 && j.Fixed.allows("ep", ep)
	})
}

// batches lists the rows of a microbatch on a device of a mesh, and the rows of the step with it.
func (j *Job) batches(m mesh) (list [][2]int64) {
	ranks := m.rowRanks()
	for micro := int64(1); micro <= maxMicro; micro *= 2 {
		rows := j.Batch
		if rows == 0 {
			rows = j.MaxBatch / (ranks * micro) * ranks * micro
		}
		if rows > 0 && rows%(ranks*micro) == 0 && j.Fixed.allows("microbatch", micro) {
			list = append(list, [2]int64{micro, rows})
		}
	}
	return list
}

// divides reports whether a device's piece of what products sum over is whole blocks of a
// precision, as our own programs want it ([plan.Plan.Check]); other stacks pad.
func (j *Job) divides(m mesh, prec dtype.Format) bool {
	n := (&plan.Plan{Precision: precisionName(prec)}).Block()
	if p := j.Policies[prec]; p != nil && p.Has(dtype.MXFP8) {
		n = max(n, dtype.MXFP8.Block())
	}
	if n == 0 || j.Profile.Name != price.Own || j.Config.MoE != nil {
		return true
	}
	return plan.WholeScaleBlocks(j.facts(), n, j.Seq, j.pieces(m.cp), m.tp)
}

// context is how a plan cuts sequences. Our own programs hand keys round in the order of the
// sequence where cuDNN then attends to each piece: that is nearly twice the work under a causal
// mask, but where devices have pieces from the front and the back, or all keys at once, attention
// writes its scores, which costs more ([kernels.Set.Attention]).
func (j *Job) context(cp int64) plan.CP {
	c := plan.CP{Size: cp, Kind: "gather", Balance: cp > 1}
	if j.can().ring {
		c.Kind = "ring"
	}
	if j.Profile.Name == price.Own && cp > 1 {
		elem, ring := dtype.BF16, plan.CP{Size: cp, Kind: "ring"}
		if slices.Equal(j.Precisions, []dtype.Format{dtype.FormatF32}) {
			elem = dtype.F32
		}
		a := kernels.Planned(*j.facts(), slices.Contains(j.Config.Windowed, true), elem, ring)
		if kernel, _ := kernels.For(j.Cluster.Arch()).Attention(a); kernel == kernels.CuDNN {
			return ring
		}
	}
	return c
}

// pieces is how many a sequence is cut into.
func (j *Job) pieces(cp int64) int64 { return j.context(cp).Pieces() }

// rowRanks is how many devices get rows of their own. Those of ep do: outside the experts they are
// data parallel.
func (m mesh) rowRanks() int64 { return m.data * m.ep }

// cuts lists the ways to share and cut the data axis. Where fsdp has not all of it, it has an
// NVLink domain or a power of two from 8 on, within which gathers are cheap. Parameters that are
// cut and then kept whole for a microbatch or a step are left out unless they are asked for: Zero 2
// keeps them whole as well, without the pieces and without gathering as often.
func (j *Job) cuts(m mesh) []cut {
	var list []cut
	domain := int64(j.Cluster.Card.NVLinkDomain)
	for _, fsdp := range divisors(m.data, m.data) {
		round := fsdp >= 8 && fsdp <= 512 && fsdp&(fsdp-1) == 0
		if fsdp != 1 && fsdp != m.data && fsdp != domain && !round {
			continue
		}
		dp := m.data / fsdp
		if !j.Fixed.allows("fsdp", fsdp) || !j.Fixed.allows("dp", dp) {
			continue
		}
		if fsdp == 1 {
			list = append(list, cut{dp, 1, 3, "layer"})
			continue
		}
		for _, c := range []cut{{dp, fsdp, 1, "step"}, {dp, fsdp, 2, "step"}, {dp, fsdp, 3, "layer"},
			{dp, fsdp, 3, "micro"}, {dp, fsdp, 3, "step"}} {
			if !j.can().zero[c.zero] {
				continue
			}
			asked := c.zero < 3 || c.gather == "layer" || j.Fixed["gather"] == c.gather
			if asked && j.Fixed.allows("zero", int64(c.zero)) &&
				(c.zero < 3 || j.Fixed.allowsWord("gather", c.gather)) {
				list = append(list, c)
			}
		}
	}
	return list
}

// orders lists the schedules that a node can have. GPipe is left out: 1F1B takes the same time and
// holds less.
func (j *Job) orders(n node) []order {
	if n.pp == 1 {
		return []order{{"1f1b", 0}}
	}
	var list []order
	stages := j.Config.Layers // that a model can be cut into: one for each, and for ends that count
	if j.Profile.Ends {
		stages += 2
	}
	for _, name := range schedule.Names() {
		can := j.can().schedules
		if can != nil && !slices.Contains(can, name) || !j.Fixed.allowsWord("schedule", name) ||
			name == "gpipe" && can == nil && j.Fixed["schedule"] != name {
			continue
		}
		for _, v := range []int64{1, 2, 3, 4, 5, 6, 8} { // virtual stages on a rank
			shape := schedule.Shape{Ranks: int(n.pp), Virtual: int(v), Micros: int(n.micros)}
			if most := int64(j.can().virtual); n.pp*v <= stages && (most == 0 || v <= most) &&
				j.Fixed.allows("virtual", v) && schedule.Fits(name, shape) == nil {
				list = append(list, order{name, v})
			}
		}
	}
	return list
}

// An ability is what a stack can do of all that a plan can say.
type ability struct {
	zero      [4]bool  // by the number that follows zero
	schedules []string // nil is all
	virtual   int      // most virtual stages of an interleaved schedule; 0 is any
	ring      bool     // keys go round along cp
}

// can is what the job's stack can do: Megatron's distributed optimizer cuts its state alone, which
// with Megatron-Bridge may be all of FSDP, torchtitan's FSDP keeps gradients cut, and MaxText's
// parameters are always gathered as they are used. Nobody but us has zb-h1.
func (j *Job) can() ability {
	name := j.Profile.Name
	switch {
	case name == "megatron" || name == "megatron-2022":
		return ability{[4]bool{1: true}, []string{"1f1b", "interleaved"}, 0, false}
	case strings.HasPrefix(name, "megatron-"):
		return ability{[4]bool{1: true, 3: true}, []string{"1f1b", "interleaved"}, 0, true}
	case name == "torchtitan":
		return ability{[4]bool{2: true, 3: true}, []string{"1f1b", "interleaved", "zb-v"}, 2, false}
	case name == "maxtext":
		return ability{[4]bool{3: true}, []string{"gpipe", "interleaved"}, 0, false}
	}
	return ability{zero: [4]bool{1: true, 2: true, 3: true}}
}

// A variant is what a plan of a family recomputes and offloads.
type variant struct {
	tags    []ir.Tag
	offload []string
	set     uint8 // both as bits: a variant with more of them takes longer
}

// variants lists those of a model: the first recomputes and offloads least, the last most, as far
// as they are not fixed.
func (j *Job) variants() []variant {
	tags := [][]string{{}, {"norm"}, {"attn"}, {"mlp"}, {"norm", "attn"}, {"norm", "mlp"},
		{"attn", "mlp"}, {"norm", "attn", "mlp"}}
	if j.Config.MoE != nil {
		for _, t := range slices.Clone(tags) {
			tags = append(tags, append(slices.Clone(t), "experts"))
		}
	}
	fixed := maps.Clone(j.Fixed)
	if fixed["recompute"] == "full" {
		tags := lists.Map(everything(*j), func(t ir.Tag) string { return string(t) })
		fixed["recompute"] = strings.Join(tags, "+")
	}
	var list []variant
	// Offload is searched only if it is asked for: what the copies to and from the host take is
	// priced with no program's figures behind it.
	for _, off := range [][]string{nil, {"activations"}, {"optimizer"}, {"activations", "optimizer"}} {
		if len(off) > 0 && j.Fixed["offload"] == "" {
			continue
		}
		for _, t := range tags {
			if !fixed.allowsList("recompute", t) || !fixed.allowsList("offload", off) {
				continue
			}
			v := variant{offload: off}
			for _, name := range t {
				v.tags = append(v.tags, ir.Tag(name))
				v.set |= 1 << slices.Index(tagNames, name)
			}
			for _, name := range off {
				v.set |= 1 << (len(tagNames) + slices.Index(offloads, name))
			}
			list = append(list, v)
		}
	}
	return list
}

// fill writes a plan of a node into p, which is used again and again.
func (j *Job) fill(p *plan.Plan, n node, f layoutOption, v variant) {
	p.Seq, p.Batch, p.Microbatches = j.Seq, n.rows, n.micros
	p.DP, p.EP = f.dp, n.ep
	p.FSDP = plan.FSDP{Size: f.fsdp, Zero: f.zero, Gather: f.gather}
	p.TP = plan.TP{Size: n.tp, Sequence: n.tp > 1}
	p.CP = j.context(n.cp)
	p.PP = plan.PP{Size: n.pp, Virtual: f.virtual, Schedule: f.name}
	p.Recompute, p.Offload = v.tags, v.offload
}

// blank is a plan of the job that fill completes.
func (j *Job) blank(cluster string) *plan.Plan {
	p := plan.Default()
	p.Model, p.Cluster, p.Order = j.Model, cluster, nil
	p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
	if slices.Equal(j.Precisions, []dtype.Format{dtype.FormatF32}) {
		p.Types = plan.Types{Params: dtype.F32, Grads: dtype.F32, Collectives: dtype.F32}
	}
	return p
}
