package autoplan

import (
	"maps"
	"math"
	"slices"
)

// best keeps the best plans that were found, and the best of each mesh.
type best struct {
	top    int
	found  []candidate
	meshes map[meshKey]candidate
}

// A meshKey is what makes two plans different enough for both to be told.
type meshKey struct {
	mesh
	count, precision int
}

func (c candidate) key() meshKey { return meshKey{c.mesh, c.count, c.precision} }

// A labelKey is what plans share that are one plan in several spellings: k rows of which each of k
// devices has a piece are as many tokens for a device as a row for each.
type labelKey struct {
	tp, ep, pp, ranks, micros int64
	count, precision          int
}

func (c candidate) label() labelKey {
	return labelKey{c.tp, c.ep, c.pp, c.cp * c.data, c.micros, c.count, c.precision}
}

// limit is what a plan must not exceed to be of use: the best of the mesh that would be told last,
// and a margin.
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

func (b *best) add(list []candidate) {
	for _, c := range list {
		b.found = append(b.found, c)
		if x, ok := b.meshes[c.key()]; !ok || c.compare(x) < 0 {
			b.meshes[c.key()] = c
		}
	}
}
