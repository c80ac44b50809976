package kernels

import (
	"testing"

	"pgregory.net/rapid"
)

// However a sequence is split into documents, each level has room for the documents that are too
// long for the next one, and the last level for all others; and no level has a larger workspace
// than packedFactor documents as long as the sequence, or than PackedWorkspace says of lengths that
// packedFactor does not divide.
func TestPackedLevelsHaveRoom(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		seq := int64(4) << rapid.IntRange(2, 12).Draw(t, "log of seq")
		even := rapid.Bool().Draw(t, "even")
		if !even {
			seq = rapid.Int64Range(2, 9000).Draw(t, "seq")
		}
		var lengths []int64
		longest := rapid.Int64Range(1, seq).Draw(t, "longest")
		for left := seq; left > 0; left -= lengths[len(lengths)-1] {
			lengths = append(lengths, rapid.Int64Range(1, min(longest, left)).Draw(t, "length"))
		}
		most := int64(len(lengths)) + rapid.Int64Range(0, 3).Draw(t, "more")
		levels := PackedLevels(seq, most)
		for i, l := range levels {
			if l.Parts*l.Length != seq || l.Segments < 2 {
				t.Fatalf("%d tokens are %+v", seq, l)
			}
			room := l.Segments * l.Parts * l.Length
			if even && room > packedFactor*seq && l.Length > packedFactor {
				t.Fatalf("%+v of %d tokens has room for %d tokens", l, seq, room)
			}
			if said := For("sm_100").PackedWorkspace(seq, seq, most); 4*room > said {
				t.Fatalf("%+v of %d tokens takes %d bytes, not %d", l, seq, 4*room, said)
			}
			next := int64(0)
			if i+1 < len(levels) {
				next = levels[i+1].Length
			}
			n := int64(0)
			for _, length := range lengths {
				if next < length && length <= l.Length {
					n++
				}
			}
			if n > l.Parts*l.Segments {
				t.Fatalf("%d documents of %d, %v: %d do not fit into %+v", len(lengths), seq, levels, n, l)
			}
		}
	})
}
