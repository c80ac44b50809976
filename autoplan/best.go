package autoplan

import (
	"maps"
	"math"
	"slices"
)

// best collects the candidates found, and the best one of each mesh.
type best struct {
	top    int
	found  []candidate
	meshes map[meshKey]candidate
}

// A meshKey identifies plans of which only the best is listed.
type meshKey struct {
	mesh
	count, precision int
}

// key identifies the mesh whose best plan is listed.
func (c candidate) key() meshKey { return meshKey{c.mesh, c.count, c.precision} }

// A labelKey identifies plans that are equivalent in work per device: k sequences split over k cp
// ranks are as many tokens per device as one sequence for each of k data-parallel ranks.
type labelKey struct {
	tp, ep, pp, ranks, micros int64
	count, precision          int
}

// label identifies equivalent plans, of which the simplest is listed.
func (c candidate) label() labelKey {
	return labelKey{c.tp, c.ep, c.pp, c.cp * c.data, c.micros, c.count, c.precision}
}

// limit is the largest metric a plan may have to be of use: the metric of the last mesh that would
// be listed, times Margin.
func (b *best) limit() float64 {
	if len(b.meshes) < b.top {
		return math.Inf(1)
	}
	seen := map[labelKey]bool{}
	for _, c := range slices.SortedFunc(maps.Values(b.meshes), candidate.compare) {
		if seen[c.label()] = true; len(seen) == b.top {
			return c.metric * Margin
		}
	}
	return math.Inf(1)
}

// add records candidates, and the best of each mesh.
func (b *best) add(list []candidate) {
	for _, c := range list {
		b.found = append(b.found, c)
		if x, ok := b.meshes[c.key()]; !ok || c.compare(x) < 0 {
			b.meshes[c.key()] = c
		}
	}
}
