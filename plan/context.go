package plan

import "slices"

// Kinds lists the words of cp.kind.
func (CP) Kinds() []string { return slices.Clone(contexts) }

// AllToAll is the number of devices that divide the heads of attention among them by an all-to-all
// (DeepSpeed Ulysses, Jacobs et al., 2023); 1 without one.
func (a CP) AllToAll() int64 {
	switch a.Kind {
	case "a2a":
		return max(a.Size, 1)
	case hierarchical:
		return min(max(a.Inner, 1), max(a.Size, 1))
	}
	return 1
}

// AllToAllAxis is the axis of the mesh along which heads are exchanged; "" without an all-to-all.
func (a CP) AllToAllAxis() string {
	switch {
	case a.AllToAll() == 1:
		return ""
	case a.Kind == hierarchical:
		return innerAxis
	}
	return ContextAxis
}

// Shards is the number of shards of a sequence that attention sees: each device along cp has one,
// but devices that exchange heads have one together.
func (a CP) Shards() int64 { return max(a.Size, 1) / a.AllToAll() }

// Ring reports whether keys and values travel around a ring.
func (a CP) Ring() bool { return a.Shards() > 1 && (a.Kind == "ring" || a.Kind == hierarchical) }

// Chunks is the number of chunks that a sequence is split into along cp, so that every device has
// whole ones: two per shard if Balance gives it one from the front and one from the back.
func (a CP) Chunks() int64 {
	if n := a.AllToAll(); a.Balance && n%2 != 0 {
		return 2 * max(a.Size, 1)
	}
	return max(a.Size, 1)
}

// Chunk is how many tokens of a sequence of seq, one after another, attention has on a device: a
// shard, or with balancing half of one.
func (a CP) Chunk(seq int64) int64 {
	if a.Balance {
		return seq / a.Shards() / 2
	}
	return seq / a.Shards()
}

// Fits reports whether a model's heads, of which a device under tp has a part, can be divided among
// the devices of an all-to-all. KV heads that do not divide are copied.
func (a CP) Fits(heads, tp int64) bool { return heads/max(tp, 1)%a.AllToAll() == 0 }

// Copies is how often an all-to-all copies each of a device's kv KV heads, so that every device has
// the KV heads that its query heads read.
func (a CP) Copies(kv int64) int64 {
	n, common := a.AllToAll(), kv
	for n > 0 {
		n, common = common%n, n
	}
	return a.AllToAll() / common
}
