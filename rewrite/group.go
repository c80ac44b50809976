package rewrite

import (
	"slices"

	"github.com/deepwell/deepwell/ir"
)

// groupQuantizations moves the quantizations of one source next to each other, in a graph and in
// the bodies of its loops: a GPU then reads the source once for all of them, and every target can
// free it early.
func groupQuantizations(g *ir.Graph) error {
	for _, op := range g.Ops {
		if op.Body != nil {
			_ = groupQuantizations(op.Body) // it never fails
		}
	}
	g.Ops = adjoin(g.Ops)
	return nil
}

// adjoin gives operations in an order in which quantizations of one source follow one another, and
// what they wait for comes before the first of them.
func adjoin(ops []*ir.Op) []*ir.Op {
	var out []*ir.Op
	done := map[*ir.Op]bool{}
	put := func(list ...*ir.Op) {
		for _, op := range list {
			if !done[op] {
				done[op], out = true, append(out, op)
			}
		}
	}
	for i, op := range ops {
		if op.Kind != "quantize" || done[op] {
			put(op)
			continue
		}
		list := []*ir.Op{op}
		for _, other := range ops[i+1:] {
			if other.Kind != "quantize" || done[other] || other.In[0] != op.In[0] {
				continue
			}
			if first, ok := before(other, done); ok {
				put(first...)
				list = append(list, other)
			}
		}
		put(list...)
	}
	return out
}

// before lists what an operation waits for, in order, if all of it is there already or costs next
// to nothing to compute.
func before(op *ir.Op, done map[*ir.Op]bool) (list []*ir.Op, ok bool) {
	for _, v := range op.In {
		def := v.Def()
		if def == nil || done[def] || slices.Contains(list, def) {
			continue
		}
		if !slices.Contains([]string{"amax", "iota", "split", "shard_slice", "concat", "fill"},
			def.Kind) {
			return nil, false
		}
		first, ok := before(def, done)
		if !ok {
			return nil, false
		}
		list = append(append(list, first...), def)
	}
	return list, true
}
