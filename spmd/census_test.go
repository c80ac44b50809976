package spmd_test

import (
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/spmd"
)

// XLA:GPU takes rounds out of loops and finds that they gather the same. Of keys and values that
// context parallel devices gather it found one pair of two in llama3.1-70b.
func TestGathersMayBeFoundTheSame(t *testing.T) {
	group := hlo.Group{Count: 32, Size: 2, Stride: 1}
	list := spmd.Census{{Kind: hlo.AllGather, Group: group, Count: 320, Bytes: 320 << 20, Redundant: 2,
		RedundantBytes: 2 << 20}}
	for _, row := range []struct {
		count int64
		cpu   bool
		same  bool
	}{{320, false, true}, {319, false, true}, {318, false, true}, {317, false, false},
		{321, false, false}, {320, true, true}, {319, true, false}} {
		compiled := []hlo.Collective{{Kind: hlo.AllGather, Group: group, Count: row.count,
			OperandBytes: 1 << 19, ResultBytes: 1 << 20}}
		if off := list.Diff(compiled, row.cpu, dtype.F32); (off == nil) != row.same {
			t.Errorf("%d gathers, CPU %v: %v", row.count, row.cpu, off)
		}
	}
}
