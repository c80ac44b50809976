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
	"github.com/deepwell/deepwell/estimate"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/plan"
)

// A change is one thing that a person can do about a job that no plan serves.
type change struct {
	fix string
	job Job
}

// noFit is the error of a job that no plan serves, with the smallest change that helps.
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
			return e.Try("%s  → %s, %s a step", c.fix, event.Size(found.peak), step)
		}
	}
	return e.Try("a smaller model, or shorter rows")
}

// digits is how many a number has before its point, less one.
func digits(x float64) int { return int(math.Floor(math.Log10(max(x, 1e-9)))) }

// lean looks for the plan that needs least, which a search for time may have passed by: the fewest
// rows at a time, and all recomputed and offloaded that may be.
func (s *searcher) lean(ctx context.Context) {
	last := len(s.variants) - 1
	var wait sync.WaitGroup
	for k, w := range s.workers {
		wait.Go(func() {
			for i := k; i < len(s.nodes) && ctx.Err() == nil; i += len(s.workers) {
				n := s.nodes[i]
				if _, fixed := s.job.Fixed["microbatch"]; n.micro > 1 && !fixed {
					continue
				}
				for _, c := range s.job.cuts(n.mesh) {
					for _, o := range s.job.orders(n) {
						e, _, err := w.within(n, layoutOption{c, o}, s.variants[last], estimate.Limits{Peak: 1})
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

// misfit says which size that is fixed no plan can have, "" if it is not one size alone.
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
			return fmt.Sprintf("%d heads, %d key heads and an MLP of %d cannot be sharded over tp %d",
				c.Heads, c.KVHeads, c.MLP, n)
		case axis == "tp" && n > int64(max(j.Cluster.Card.NVLinkDomain, 1)):
			return fmt.Sprintf("tp %d is more than the %d devices of an NVLink domain", n,
				max(j.Cluster.Card.NVLinkDomain, 1))
		case axis == "cp" && j.Seq%j.pieces(n) != 0:
			return fmt.Sprintf("sequences of %d tokens cannot be split into %d", j.Seq, j.pieces(n))
		case axis == "cp" && n > max(1, j.Seq/leastPiece):
			return fmt.Sprintf("cp %d leaves shards of fewer than %d tokens", n, leastPiece)
		case axis == "ep" && n > 1 && (c.MoE == nil || c.MoE.Experts%n != 0):
			return fmt.Sprintf("the experts cannot be split evenly over ep %d", n)
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

// why says what kept every plan from being one.
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
		return what.Because("the plan with the lowest memory needs %s per device; %s of a %s is usable",
			event.Size(nearest), event.Size(j.Capacity), j.Cluster.Card.Title)
	case len(s.nodes) == 0 && s.misfit() != "":
		return what.Because("%s", s.misfit())
	case len(s.nodes) == 0 && j.Batch > 0:
		return what.Because("a batch of %d sequences does not divide over %d devices",
			j.Batch, s.counts[0])
	case len(s.nodes) == 0:
		return what.Because("no axis sizes multiply to %d devices", s.counts[0])
	case reason != nil:
		return what.Because("%s", diag.From(reason).What)
	}
	return what
}

// changes lists what may help, the smallest first: to let go of one thing that was fixed, to let
// the batch come out even, to take more devices of the same card, and at last a larger card.
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
		// A batch that all devices share as rows can be dealt in every way that theirs can.
		each, c := int64(j.Cluster.Count), j
		c.Batch = (j.Batch + each - 1) / each * each
		if c.Batch != j.Batch {
			list = append(list, change{fmt.Sprintf("--batch %d", c.Batch), c})
		}
	}
	on := func(n int, card string) {
		if c, err := j.on(n, card); err == nil {
			list = append(list, change{"--cluster " + c.Cluster.String(), c})
		}
	}
	for n := 2; n <= 64 && j.Cluster.Count*n <= 1_000_000; n *= 2 {
		on(j.Cluster.Count*n, j.Cluster.Card.Name)
	}
	cards := machine.Cards() // with more memory, the least first
	slices.SortStableFunc(cards, func(a, b machine.Card) int {
		return int((a.UsableBytes - b.UsableBytes) >> 20)
	})
	for _, card := range cards {
		if card.UsableBytes > j.Cluster.Card.UsableBytes {
			on(j.Cluster.Count, card.Name)
		}
	}
	return list
}

// on is the job on another cluster, of which it may use as large a share.
func (j Job) on(n int, card string) (Job, error) {
	cluster, err := machine.ParseCluster(fmt.Sprintf("%dx%s", n, card))
	if err != nil {
		return j, err
	}
	j.Capacity = int64(float64(j.Capacity) / float64(j.Cluster.Card.UsableBytes) *
		float64(cluster.Card.UsableBytes))
	if j.Devices > 0 {
		j.Devices = j.Devices * n / j.Cluster.Count
	}
	j.Cluster = cluster
	return j, nil
}

// try gives the best plan of a job in closed form, or nil.
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
