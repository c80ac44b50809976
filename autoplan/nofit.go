package autoplan

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/machine"
)

// A change is one thing that a person can do about a job that no plan serves.
type change struct {
	fix string
	job Job
}

// noFit is the error of a job that no plan serves, with the smallest change that helps.
func (s *searcher) noFit(ctx context.Context) error {
	j := s.job
	e := s.why()
	for _, c := range j.changes() {
		if ctx.Err() != nil {
			break
		}
		if found := c.job.try(ctx); found != nil {
			step := fmt.Sprintf("%.3g s", found.step)
			return e.Try("%s  → %s, %s a step", c.fix, event.Size(found.peak), step)
		}
	}
	return e.Try("a smaller model, or shorter rows")
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
		return what.Because("the leanest plan that was priced needs %s on a device; "+
			"of a %s %s can be used", event.Size(nearest), j.Cluster.Card.Title, event.Size(j.Capacity))
	case len(s.nodes) == 0 && j.Batch > 0:
		return what.Because("%d rows cannot be dealt to %d devices with these sizes", j.Batch,
			s.counts[0])
	case len(s.nodes) == 0:
		return what.Because("no sizes of the axes multiply to %d devices", s.counts[0])
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
		each := int64(j.Cluster.Count)
		for _, rows := range []int64{(j.Batch + each - 1) / each * each} {
			if rows != j.Batch {
				c := j
				c.Batch = rows
				list = append(list, change{fmt.Sprintf("--batch %d", rows), c})
			}
		}
	}
	for n := 2; n <= 64 && j.Cluster.Count*n <= 1_000_000; n *= 2 {
		if c, err := j.on(j.Cluster.Count*n, j.Cluster.Card.Name); err == nil {
			list = append(list, change{"--cluster " + c.Cluster.String(), c})
		}
	}
	return append(list, j.cards()...)
}

// cards are the same number of devices with more memory, the least first.
func (j Job) cards() []change {
	cards := machine.Cards()
	slices.SortStableFunc(cards, func(a, b machine.Card) int {
		return int((a.UsableBytes - b.UsableBytes) >> 20)
	})
	var list []change
	for _, card := range cards {
		if card.UsableBytes <= j.Cluster.Card.UsableBytes {
			continue
		}
		if c, err := j.on(j.Cluster.Count, card.Name); err == nil {
			list = append(list, change{"--cluster " + c.Cluster.String(), c})
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
