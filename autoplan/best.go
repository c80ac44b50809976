package autoplan

import (
	"math"
	"slices"
)

// best keeps the best plans that were found, and the best of each mesh.
type best struct {
	top    int
	found  []candidate
	meshes map[meshKey]float64
}

// A meshKey is what makes two plans different enough for both to be told.
type meshKey struct {
	mesh
	count, precision int
}

func (c candidate) key() meshKey { return meshKey{c.mesh, c.count, c.precision} }

func newBest(top int) *best { return &best{top: top, meshes: map[meshKey]float64{}} }

// limit is what a plan must not exceed to be of use: the best of the mesh that would be told last,
// and a margin.
func (b *best) limit() float64 {
	if len(b.meshes) < b.top {
		return math.Inf(1)
	}
	list := make([]float64, 0, len(b.meshes))
	for _, x := range b.meshes {
		list = append(list, x)
	}
	slices.Sort(list)
	return list[b.top-1] * Margin
}

func (b *best) add(list []candidate) {
	for _, c := range list {
		b.found = append(b.found, c)
		if x, ok := b.meshes[c.key()]; !ok || c.metric < x {
			b.meshes[c.key()] = c.metric
		}
	}
}

// list gives the best n.
func (b *best) list(n int) []candidate {
	slices.SortFunc(b.found, candidate.compare)
	return b.found[:min(n, len(b.found))]
}
