package autoplan

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/estimate/footprint"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/price"
	"github.com/deepwell/deepwell/schedule"
)

// A mesh is the sizes of the parallel axes, and the kind of context parallelism (plan cp.kind).
// data is dp·fsdp; tp·cp·ep·pp·data is the number of devices.
type mesh struct {
	tp, cp, ep, pp, data int64
	kind                 string
}

// compare orders meshes, for results that do not depend on concurrency.
func (m mesh) compare(o mesh) int {
	return cmp.Or(cmp.Compare(m.pp, o.pp), cmp.Compare(m.tp, o.tp), cmp.Compare(m.cp, o.cp),
		cmp.Compare(m.ep, o.ep), cmp.Compare(m.data, o.data), cmp.Compare(m.kind, o.kind))
}

// A meshOption is a mesh on one number of devices with one format and one microbatch size. It
// groups the plans that share a lower bound.
type meshOption struct {
	mesh
	count      int // index into searcher.counts
	precision  int // index into Job.Precisions
	microbatch int64
	rows       int64 // sequences of a global batch
	micros     int64
	exchange   exchange
	bound      float64 // lower bound on the metric of its plans
}

// A shardOption splits the data axis into dp and fsdp, and sets the ZeRO stage (1 optimizer state,
// 2 also gradients, 3 also parameters) and how long gathered parameters live.
type shardOption struct {
	dp, fsdp int64
	zero     int
	gather   string
}

// A scheduleOption is a pipeline schedule with its virtual stages per rank.
type scheduleOption struct {
	name    string
	virtual int64
}

// A layoutOption is everything about a plan of a meshOption but recomputation and offload.
type layoutOption struct {
	shardOption
	scheduleOption
}

// The words of a plan that a search chooses from. tagNames are the parts of a block that can be
// recomputed.
var (
	gathers  = []string{"layer", "microbatch", "step"}
	offloads = []string{"activations", "optimizer"}
	tagNames = []string{"norm", "attn", "mlp", "router", "experts"}
)

// maxMicrobatch is the most sequences of a microbatch on a device. Beyond some ten thousand
// tokens, larger GEMMs are no faster per token.
const maxMicrobatch = 16

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

// meshes lists the meshes of n devices. Tensor-parallel groups stay within an NVLink domain,
// context-parallel chunks have at least 512 tokens, and there are at most as many stages as
// layers.
func (j *Job) meshes(n int64) []mesh {
	c := j.Config
	var list []mesh
	domain := int64(max(j.Cluster.GPU.NVLinkDomain, 1))
	for _, tp := range divisors(n, domain) {
		if !j.Fixed.allows("tp", tp) || !plan.FitsTP(j.facts(), tp) || j.thin(tp) {
			continue
		}
		for _, cp := range divisors(n/tp, max(1, j.Seq/leastChunk)) {
			kinds := lists.Filter(j.contexts(tp, cp), func(a plan.CP) bool {
				return j.Fixed.allows("cp", cp) && j.Seq%(a.Chunks()*tp) == 0
			})
			if len(kinds) == 0 {
				continue
			}
			for _, ep := range j.expertSizes(n / tp / cp) {
				for _, pp := range divisors(n/tp/cp/ep, c.Layers) {
					if !j.Fixed.allows("pp", pp) {
						continue
					}
					for _, a := range kinds {
						list = append(list, mesh{tp, cp, ep, pp, n / tp / cp / ep / pp, a.Kind})
					}
				}
			}
		}
	}
	return list
}

// thin reports whether tp leaves GEMMs of our own experts too few columns to search: they are then
// bound by memory, and ep shards experts as well. Other stacks may shard experts differently.
func (j *Job) thin(tp int64) bool {
	_, fixed := j.Fixed["tp"]
	return j.Config.MoE != nil && j.Profile.Name == price.Own && tp > 1 && !fixed &&
		j.Config.MoE.MLP/tp < 256
}

// leastChunk is the fewest tokens of a sequence that a cp rank should hold; GEMMs of fewer rows
// are dominated by overhead.
const leastChunk = 512

// expertSizes lists the ep sizes among n devices: divisors of the number of experts; 1 for dense
// models.
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

// batches lists [sequences of a microbatch on a device, sequences of a global batch] for a mesh.
func (j *Job) batches(m mesh) (list [][2]int64) {
	ranks := m.rowRanks()
	for microbatch := int64(1); microbatch <= maxMicrobatch; microbatch *= 2 {
		rows := j.Batch
		if rows == 0 {
			rows = j.MaxBatch / (ranks * microbatch) * ranks * microbatch
		}
		if rows > 0 && rows%(ranks*microbatch) == 0 && j.Fixed.allows("microbatch", microbatch) &&
			!j.crowded(microbatch*j.Seq/m.cp) {
			list = append(list, [2]int64{microbatch, rows})
		}
	}
	return list
}

// crowded reports whether the experts of our own programs need more than an eighth of a device's
// memory to work on a device's tokens of a microbatch, in bf16. XLA's rematerialization counts such
// buffers more than once and recomputes on its own long before the device is full: mixtral-8x7b on
// 64 GB200 in microbatches of 8 sequences at 123 of 184 GiB.
func (j *Job) crowded(tokens int64) bool {
	e := j.Config.MoE
	if e == nil || j.Profile.Name != price.Own || j.Fixed["microbatch"] != "" {
		return false
	}
	slots := (&plan.Plan{Slots: j.Fixed.slots()}).ExpertSlots()
	most := min(slots[len(slots)-1], float64(e.Experts)/float64(e.TopK))
	rows := int64(2 * float64(tokens*e.TopK) * most) // bytes of one element of each
	return footprint.ExpertSet(rows*e.MLP, rows*j.Config.Hidden) > j.Capacity/8
}

// divides reports whether every contracted dimension is whole scale blocks on each device, as our
// own programs require ([plan.Plan.Check]); other stacks pad.
func (j *Job) divides(m mesh, prec dtype.Format) bool {
	n := (&plan.Plan{Precision: precisionName(prec)}).Block()
	for _, f := range dtype.Formats() {
		if p := j.Policies[prec]; p != nil && p.Has(f) {
			n = max(n, f.Block())
		}
	}
	if n == 0 || j.Profile.Name != price.Own {
		return true
	}
	chunks := j.contextOf(m.kind, m.tp, m.cp).Chunks()
	return plan.WholeScaleBlocks(j.facts(), n, j.Seq, chunks, m.tp)
}

// contextOf is context parallelism of a kind over cp ranks, under tp. Chunks are zigzag (each rank
// has one from the front and one from the back), unless ranks have whole sequences of their heads.
func (j *Job) contextOf(kind string, tp, cp int64) plan.CP {
	a := plan.CP{Size: cp, Kind: kind, Balance: cp > 1 && kind != "a2a"}
	if kind == "a2a+ring" {
		a.Inner = j.inner(tp, cp)
	}
	return a
}

// inner is the size of groups that exchange heads within an NVLink domain, if cp ranks are in
// several; 0 if there are no such groups. The largest is taken, but one that copies no KV heads if
// there is any.
func (j *Job) inner(tp, cp int64) (best int64) {
	domain := int64(max(j.Cluster.GPU.NVLinkDomain, 1))
	if tp*cp <= domain {
		return 0
	}
	copied := true
	for _, n := range divisors(cp, cp/2) {
		a := plan.CP{Size: cp, Kind: "a2a+ring", Inner: n}
		if n == 1 || domain%(tp*n) != 0 || !a.Fits(j.Config.Heads, tp) {
			continue
		}
		copies := j.Config.MLA == nil && a.Copies(max(j.Config.KVHeads/tp, 1)) > 1
		if copied || !copies {
			best, copied = n, copies
		}
	}
	return best
}

// contexts lists the ways to shard sequences over cp ranks, under tp. Our own programs gather keys,
// use a ring, or an all-to-all where the heads divide, or an all-to-all in an NVLink domain and
// rings between domains, if cuDNN can then attend: attention that writes its scores to memory
// costs more ([kernels.Selector.Attention]).
func (j *Job) contexts(tp, cp int64) (list []plan.CP) {
	other := j.contextOf("gather", tp, cp)
	if j.can().ring {
		other.Kind = "ring"
	}
	fixed := j.Fixed["cp.kind"]
	if j.Profile.Name != price.Own && fixed != "" {
		other = j.contextOf(fixed, tp, cp)
	}
	if j.Profile.Name != price.Own || cp == 1 {
		return []plan.CP{other}
	}
	elem := dtype.BF16
	if slices.Equal(j.Precisions, []dtype.Format{dtype.FormatF32}) {
		elem = dtype.F32
	}
	for _, kind := range (plan.CP{}).Kinds() {
		if !j.Fixed.allowsWord("cp.kind", kind) {
			continue
		}
		how := j.contextOf(kind, tp, cp)
		a := kernels.Planned(*j.facts(), slices.Contains(j.Config.Windowed, true), elem, how, j.Seq,
			false)
		kernel, _ := kernels.For(j.Cluster.Arch()).Attention(a)
		if kernels.Flash(kernel) && how.Fits(j.Config.Heads, tp) &&
			(kind != "a2a+ring" || how.Inner > 0) {
			list = append(list, how)
		}
	}
	if len(list) == 0 && fixed == "" {
		return []plan.CP{other}
	}
	return list
}

// chunks is the least number of chunks that a sequence is split into over cp ranks.
func (j *Job) chunks(cp int64) int64 {
	all := lists.Map(j.contexts(1, cp), plan.CP.Chunks)
	return slices.Min(all)
}

// rowRanks is the number of data-parallel ranks, each of which has its own sequences. The ep axis
// counts: outside the experts it is data parallel.
func (m mesh) rowRanks() int64 { return m.data * m.ep }

// shardOptions lists the ways to split the data axis and to shard state over it. An fsdp axis that
// is smaller than the data axis is an NVLink domain, or a power of two from 8 to 512, within which
// gathers are cheap; with dp or fsdp fixed it is any that matches. ZeRO 3 that keeps gathered
// parameters for a microbatch or a step is searched only if asked for: ZeRO 2 holds as many
// parameters and gathers less often.
func (j *Job) shardOptions(m mesh) []shardOption {
	var list []shardOption
	domain := int64(j.Cluster.GPU.NVLinkDomain)
	asked := j.Fixed["dp"] != "" || j.Fixed["fsdp"] != ""
	for _, fsdp := range divisors(m.data, m.data) {
		round := fsdp >= 8 && fsdp <= 512 && fsdp&(fsdp-1) == 0
		if fsdp != 1 && fsdp != m.data && fsdp != domain && !round && !asked {
			continue
		}
		dp := m.data / fsdp
		if !j.Fixed.allows("fsdp", fsdp) || !j.Fixed.allows("dp", dp) {
			continue
		}
		if fsdp == 1 && (j.Profile.Name != price.Own || m.ep == 1) { // our ep shards parameters, too
			list = append(list, shardOption{dp, 1, 3, "layer"})
			continue
		}
		for _, c := range []shardOption{{dp, fsdp, 1, "step"}, {dp, fsdp, 2, "step"},
			{dp, fsdp, 3, "layer"}, {dp, fsdp, 3, "microbatch"}, {dp, fsdp, 3, "step"}} {
			if !j.can().zero[c.zero] {
				continue
			}
			searched := c.zero < 3 || c.gather == "layer" || j.Fixed["gather"] == c.gather
			if searched && j.Fixed.allows("zero", int64(c.zero)) &&
				j.Fixed.allowsWord("gather", c.gather) {
				list = append(list, c)
			}
		}
	}
	return list
}

// scheduleOptions lists the schedules of a meshOption. GPipe is left out unless it is fixed or the
// stack has nothing else: 1F1B takes the same time and holds fewer activations.
func (j *Job) scheduleOptions(n meshOption) []scheduleOption {
	if n.pp == 1 {
		return []scheduleOption{{"1f1b", 0}}
	}
	var list []scheduleOption
	stages := j.Config.Layers // at most one stage per layer, and per end that counts as one
	if j.Profile.Ends {
		stages += 2
	}
	for _, name := range schedule.Names() {
		can := j.can().schedules
		if can != nil && !slices.Contains(can, name) || !j.Fixed.allowsWord("schedule", name) ||
			name == "gpipe" && can == nil && j.Fixed["schedule"] != name {
			continue
		}
		for _, v := range []int64{1, 2, 3, 4, 5, 6, 8} { // virtual stages per rank
			shape := schedule.Shape{Ranks: int(n.pp), Virtual: int(v), Micros: int(n.micros)}
			if most := int64(j.can().virtual); n.pp*v <= stages && (most == 0 || v <= most) &&
				j.Fixed.allows("virtual", v) && schedule.Fits(name, shape) == nil {
				list = append(list, scheduleOption{name, v})
			}
		}
	}
	return list
}

// An ability is the subset of plans that a stack can run.
type ability struct {
	zero      [4]bool  // by ZeRO stage
	schedules []string // nil means all
	virtual   int      // most virtual stages of an interleaved schedule; 0 means any
	ring      bool     // ring attention along cp
}

// can returns the ability of the job's stack. Megatron's distributed optimizer is ZeRO 1, with
// Megatron-Bridge also FSDP (ZeRO 3); torchtitan's FSDP keeps gradients sharded; MaxText always
// gathers parameters for each layer. Only our own programs have zb-h1.
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

// A recomputeOption is what a plan recomputes and offloads.
type recomputeOption struct {
	tags    []ir.Tag
	offload []string
	set     uint8 // both as a bit set: a superset takes longer
}

// recomputeOptions lists the options that are not excluded by --fix. The first recomputes and
// offloads least, the last most.
func (j *Job) recomputeOptions() []recomputeOption {
	tags := [][]string{{}, {"norm"}, {"attn"}, {"mlp"}, {"norm", "attn"}, {"norm", "mlp"},
		{"attn", "mlp"}, {"norm", "attn", "mlp"}}
	switch e := j.Config.MoE; {
	case e == nil:
	case j.Profile.Name == price.Own && j.Fixed["recompute"] == "":
		// Activations of experts are the largest, and memory is planned for the plan's last slots: other
		// parts are recomputed only where they are.
		tags = [][]string{{}, {"experts"}, {"norm", "experts"}, {"norm", "attn", "experts"}}
		if e.Dense > 0 || e.Shared > 0 {
			tags = append(tags, []string{"norm", "attn", "mlp", "experts"})
		}
	default:
		for _, t := range slices.Clone(tags) {
			tags = append(tags, append(slices.Clone(t), "experts"))
		}
	}
	fixed := maps.Clone(j.Fixed)
	if fixed["recompute"] == "full" {
		tags := lists.Map(everything(*j), func(t ir.Tag) string { return string(t) })
		fixed["recompute"] = strings.Join(tags, "+")
	}
	var list []recomputeOption
	// Offload is searched only if asked for: the cost of host copies is a prior, not fitted to any
	// run.
	for _, off := range [][]string{nil, {"activations"}, {"optimizer"}, {"activations", "optimizer"}} {
		if len(off) > 0 && j.Fixed["offload"] == "" {
			continue
		}
		for _, t := range tags {
			if !fixed.allowsList("recompute", t) || !fixed.allowsList("offload", off) {
				continue
			}
			v := recomputeOption{offload: off}
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

// fill writes a plan into p. Workers reuse p for every plan they price.
func (j *Job) fill(p *plan.Plan, n meshOption, f layoutOption, v recomputeOption) {
	p.Seq, p.Batch, p.Microbatches = j.Seq, n.rows, n.micros
	p.DP, p.EP, p.EPKind, p.EPOverlap = f.dp, n.ep, n.exchange.kind, n.exchange.overlap
	p.FSDP = plan.FSDP{Size: f.fsdp, Zero: f.zero, Gather: f.gather}
	p.TP = plan.TP{Size: n.tp, Sequence: n.tp > 1}
	p.CP = j.contextOf(n.kind, n.tp, n.cp)
	p.PP = plan.PP{Size: n.pp, Virtual: f.virtual, Schedule: f.name}
	p.Recompute, p.Offload = v.tags, v.offload
}

// blank returns a plan of the job without sizes, for fill to complete.
func (j *Job) blank(cluster string) *plan.Plan {
	p := plan.Default()
	p.Model, p.Cluster, p.Order = j.Model, cluster, nil
	if j.Profile.Name == price.Own {
		p.Slots = j.Fixed.slots()
	}
	p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
	if slices.Equal(j.Precisions, []dtype.Format{dtype.FormatF32}) {
		p.Types = plan.Types{Params: dtype.F32, Grads: dtype.F32, Collectives: dtype.F32}
	}
	return p
}
