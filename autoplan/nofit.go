package autoplan

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"sync"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/estimate"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/plan"
)

// A change is a modified job, and the command line option that makes the change.
type change struct {
	fix string
	job Job
}

// noFit returns the error of a job without a plan, with the smallest change that helps.
func (s *searcher) noFit(ctx context.Context) error {
	j := s.job
	s.lean(ctx)
	e := s.why()
	for _, c := range j.changes() {
		if ctx.Err() != nil {
			break
		}
		if found := c.job.try(ctx); found != nil {
			step := strconv.FormatFloat(found.step, 'f', max(0, 2-digits(found.step)), 64) + " s"
			return e.Try("%s  → %s, %s per step", c.fix, event.Size(found.peak), step)
		}
	}
	return e.Try("a smaller model, or shorter sequences")
}

// digits is the decimal exponent of x.
func digits(x float64) int { return int(math.Floor(math.Log10(max(x, 1e-9)))) }

// lean looks for the plan that needs least, which a search for time may have passed by: the fewest
// rows at a time, and all recomputed and offloaded that may be.
func (s *searcher) lean(ctx context.Context) {
	last := len(s.recomputes) - 1
	var wait sync.WaitGroup
	for k, w := range s.workers {
		wait.Go(func() {
			for i := k; i < len(s.meshOptions) && ctx.Err() == nil; i += len(s.workers) {
				n := s.meshOptions[i]
				if _, fixed := s.job.Fixed["microbatch"]; n.microbatch > 1 && !fixed {
					continue
				}
				for _, c := range s.job.shardOptions(n.mesh) {
					for _, o := range s.job.scheduleOptions(n) {
						e, _, err := w.within(n, layoutOption{c, o}, s.recomputes[last], estimate.Limits{Peak: 1})
						if err == nil {
							w.nearest = min(w.nearest, e.Peak)
						}
					}
				}
			}
		})
	}
	wait.Wait()
}

// misfit names the fixed size that no plan can have; "" if it is not a single size.
func (s *searcher) misfit() string {
	j := &s.job
	c, all := j.Config, int64(s.counts[0])
	product := int64(1)
	for _, axis := range []string{"tp", "cp", "ep", "pp", "dp", "fsdp"} {
		n, fixed := j.Fixed.size(axis)
		if !fixed {
			continue
		}
		product *= n
		switch {
		case axis == "tp" && !plan.FitsTP(j.facts(), n):
			return fmt.Sprintf("%d heads, %d KV heads and an MLP of %d cannot be sharded over tp %d",
				c.Heads, c.KVHeads, c.MLP, n)
		case axis == "tp" && n > int64(max(j.Cluster.GPU.NVLinkDomain, 1)):
			return fmt.Sprintf("tp %d is more than the %d devices of an NVLink domain", n,
				max(j.Cluster.GPU.NVLinkDomain, 1))
		case axis == "cp" && len(j.contexts(1, n)) == 0:
			return fmt.Sprintf("with cp.kind %s attention of %s would write its scores to memory",
				j.Fixed["cp.kind"], j.Model)
		case axis == "cp" && j.Seq%j.chunks(n) != 0:
			return fmt.Sprintf("sequences of %d tokens cannot be split into %d", j.Seq, j.chunks(n))
		case axis == "cp" && n > max(1, j.Seq/leastChunk):
			return fmt.Sprintf("cp %d leaves shards of fewer than %d tokens", n, leastChunk)
		case axis == "ep" && n > 1 && c.MoE == nil:
			return fmt.Sprintf("ep %d shards experts, and %s has none", n, j.Model)
		case axis == "ep" && n > 1 && c.MoE.Experts%n != 0:
			return fmt.Sprintf("%d experts cannot be sharded over ep %d", c.MoE.Experts, n)
		case axis == "pp" && n > c.Layers:
			return fmt.Sprintf("%d layers cannot be split into %d stages", c.Layers, n)
		case all%n != 0:
			return fmt.Sprintf("%s %d does not divide %d devices", axis, n, all)
		}
	}
	if all%product != 0 {
		return fmt.Sprintf("%s makes %d devices, which does not divide %d", j.Fixed, product, all)
	}
	return ""
}

// why returns the reason why no plan fits.
func (s *searcher) why() *diag.Error {
	j := s.job
	nearest, reason := s.workers[0].nearest, s.workers[0].reason
	for _, w := range s.workers[1:] {
		nearest = min(nearest, w.nearest)
		if reason == nil {
			reason = w.reason
		}
	}
	what := diag.New(diag.PlanNoFit, "no plan fits %s", j.Cluster)
	switch {
	case nearest < 1<<62:
		offload := "" // see recomputeOptions: it is searched only if asked for
		if j.Fixed["offload"] == "" && !j.Cluster.CPU() {
			offload = "; --fix offload=activations+optimizer was not searched"
		}
		return what.Because("the plan with the lowest memory needs %s per device; plans may use %s of a "+
			"%s%s", event.Size(nearest), event.Size(j.Capacity), j.Cluster.GPU.Title, offload)
	case len(s.meshOptions) == 0 && s.misfit() != "":
		return what.Because("%s", s.misfit())
	case len(s.meshOptions) == 0:
		return what.Because("%s", s.empty())
	case reason != nil:
		return what.Because("%s", diag.From(reason).What)
	}
	return what
}

// empty says which constraint leaves a search without any plan, in the order in which
// [searcher.expand] applies them. It judges all devices in use, not the smaller counts.
func (s *searcher) empty() string {
	j, n := &s.job, int64(s.counts[0])
	meshes := j.meshes(n)
	if len(meshes) == 0 {
		return fmt.Sprintf("no mesh of %d devices has %s", n, j.Fixed.only("tp", "cp", "ep", "pp"))
	}
	meshes = lists.Filter(meshes, func(m mesh) bool { return len(j.shardOptions(m)) > 0 })
	if len(meshes) == 0 {
		text := j.Fixed.only("tp", "cp", "ep", "pp", "dp", "fsdp", "zero", "gather")
		return fmt.Sprintf("no mesh of %d devices that %s can shard has %s", n, j.Profile.Name, text)
	}
	var fit []meshOption
	for _, m := range meshes {
		for _, b := range j.batches(m) {
			fit = append(fit, meshOption{mesh: m, microbatch: b[0], rows: b[1],
				micros: b[1] / b[0] / m.rowRanks()})
		}
	}
	if len(fit) == 0 {
		text := fmt.Sprintf("a batch of %d sequences does not divide over ", max(j.Batch, j.MaxBatch))
		ranks := lists.Map(meshes, func(m mesh) int64 { return m.rowRanks() })
		if low := slices.Min(ranks); low < slices.Max(ranks) {
			text += fmt.Sprintf("any of the %d to %d", low, slices.Max(ranks))
		} else {
			text += strconv.FormatInt(low, 10)
		}
		text += " data-parallel ranks"
		if fixed := j.Fixed.only("microbatch"); fixed != "" {
			text += " in microbatches of " + j.Fixed["microbatch"]
		}
		return text
	}
	fit = lists.Filter(fit, func(o meshOption) bool {
		return slices.ContainsFunc(j.Precisions, func(p dtype.Format) bool {
			return j.divides(o.mesh, p)
		})
	})
	if len(fit) == 0 {
		return "no mesh leaves every device whole scale blocks of its weights and activations"
	}
	if fixed := j.Fixed.only("ep_kind", "ep_overlap"); fixed != "" && !slices.ContainsFunc(fit,
		func(o meshOption) bool { return len(j.exchanges(o, j.Cluster.Domain())) > 0 }) {
		o := max(0, slices.IndexFunc(fit, func(o meshOption) bool {
			return o.ep > 1 && o.microbatch%2 == 0
		}))
		return "no mesh and precision can have " + fixed + ": " + j.halfBatches(fit[o])
	}
	return "no pipeline schedule has " + j.Fixed.only("pp", "schedule", "virtual", "microbatch")
}

// changes lists what may help, the smallest change first: dropping one --fix, a batch that divides
// evenly, more of the same GPUs, and at last GPUs with more memory.
func (j Job) changes() []change {
	var list []change
	for _, k := range keys {
		if _, fixed := j.Fixed[k.name]; fixed {
			c := j
			c.Fixed = maps.Clone(j.Fixed)
			delete(c.Fixed, k.name)
			list = append(list, change{"without --fix " + k.name + "=" + j.Fixed[k.name], c})
		}
	}
	if len(j.Fixed) > 1 {
		c := j
		c.Fixed = nil
		list = append(list, change{"without --fix", c})
	}
	if j.Batch > 0 {
		// A batch that is a multiple of the number of devices divides in every way the devices do.
		each, c := int64(j.Cluster.Count), j
		c.Batch = (j.Batch + each - 1) / each * each
		if c.Batch != j.Batch {
			list = append(list, change{fmt.Sprintf("--batch %d", c.Batch), c})
		}
	}
	on := func(n int, gpu string) {
		if c, err := j.on(n, gpu); err == nil {
			list = append(list, change{"--cluster " + c.Cluster.String(), c})
		}
	}
	for n := 2; n <= 64 && j.Cluster.Count*n <= 1_000_000; n *= 2 {
		on(j.Cluster.Count*n, j.Cluster.GPU.Name)
	}
	gpus := machine.GPUModels() // with more memory, the smallest first
	lists.Sort(gpus, func(a, b machine.GPUModel) int {
		return int((a.UsableBytes - b.UsableBytes) >> 20)
	})
	for _, gpu := range gpus {
		if gpu.UsableBytes > j.Cluster.GPU.UsableBytes {
			on(j.Cluster.Count, gpu.Name)
		}
	}
	return list
}

// on returns the job on another cluster, with the same share of its memory.
func (j Job) on(n int, gpu string) (Job, error) {
	cluster, err := machine.ParseCluster(fmt.Sprintf("%dx%s", n, gpu))
	if err != nil {
		return j, err
	}
	j.Capacity = int64(float64(j.Capacity) / float64(j.Cluster.GPU.UsableBytes) *
		float64(cluster.GPU.UsableBytes))
	if j.Devices > 0 {
		j.Devices = j.Devices * n / j.Cluster.Count
	}
	j.Cluster = cluster
	return j, nil
}

// try returns the best plan of a job in closed form, or nil.
func (j Job) try(ctx context.Context) *candidate {
	j.Top = 1
	s, err := newSearcher(j)
	if err != nil {
		return nil
	}
	found, err := s.run(ctx)
	if err != nil || len(found) == 0 {
		return nil
	}
	return &found[0]
}
