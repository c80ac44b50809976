package cost

import (
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
)

// An Item is work that a device does.
type Item struct {
	ir.Work
	Kind string // of the operation; "fused" for several that are one kernel
	Tag  ir.Tag
	Op   *ir.Op // nil if it is fused
}

// An entry is an operation of its own, or several that are fused: what the kernel reads and writes.
type entry struct {
	op            *ir.Op
	reads, writes []*ir.Value // of what is fused
	handed        []*ir.Value // by rings before: who asks again has it
	ops           []*ir.Op    // of what is fused
}

// item is the work of an entry in a graph whose mesh is g's, on a target.
func (e *entry) item(g *ir.Graph, target *kernels.Selector) Item {
	if e.reads == nil {
		w := lower.Work(target, g, e.op)
		w.Sends = slices.DeleteFunc(w.Sends, func(s ir.Send) bool {
			return s.Kind == ir.Permute && slices.Contains(e.handed, s.Of)
		})
		return Item{w, e.op.Kind, e.op.Tag, e.op}
	}
	w := ir.Work{Class: ir.Streaming}
	for _, v := range slices.Concat(e.reads, e.writes) {
		if len(v.Type.Dims) > 0 {
			w.Bytes += v.Type.Shape().Bytes()
		}
	}
	return Item{w, "fused", e.op.Tag, nil}
}

// views only say how values are to be read, or are constants: by themselves they are no kernel.
var views = []string{"rename", "transpose", "split", "merge", "broadcast", "slice", "fill", "iota",
	"stop_gradient", "shard_slice"}

// entries joins fused operations that hand values to each other, of some operations of a graph: a
// compiler makes one kernel of them that reads what comes in once and writes what goes out once.
func entries(g *ir.Graph, ops []*ir.Op) (list []entry) {
	root := map[*ir.Op]*ir.Op{} // of fused operations, in trees of those that are joined
	find := func(op *ir.Op) *ir.Op {
		for root[op] != nil && root[op] != op {
			op = root[op]
		}
		return op
	}
	var handed []*ir.Value
	for _, op := range ops {
		switch {
		case op.Body != nil:
		case g.Work(op).Class != ir.Fused:
			list = append(list, entry{op: op, handed: handed})
			if op.Attrs.Text("ring") != "" {
				handed = append(slices.Clip(handed), op.In[1:3]...)
			}
		default:
			root[op] = op
			for _, v := range op.In {
				if root[v.Def()] != nil {
					root[find(v.Def())] = op
				}
			}
		}
	}
	group := func(op *ir.Op) *ir.Op { // nil if it is not fused
		if root[op] == nil {
			return nil
		}
		return find(op)
	}
	made := map[*ir.Op]*entry{}
	var order []*entry
	for _, op := range ops {
		if at := group(op); at != nil && made[at] == nil && !slices.Contains(views, op.Kind) {
			made[at] = &entry{op: op, reads: []*ir.Value{}}
			order = append(order, made[at])
		}
	}
	outside := map[*ir.Value]bool{} // who is read by another group, or is a result
	for _, v := range g.Results {
		outside[v] = true
	}
	for _, op := range g.Ops {
		e := made[group(op)]
		if e != nil && group(op) != nil {
			e.ops = append(e.ops, op)
		}
		for _, v := range op.In {
			if from := group(v.Def()); from == nil || from != group(op) {
				outside[v] = true
				if e != nil && group(op) != nil && !slices.Contains(e.reads, v) {
					e.reads = append(e.reads, v)
				}
			}
		}
	}
	for _, op := range ops {
		for _, v := range op.Out {
			if e := made[group(op)]; e != nil && group(op) != nil && outside[v] {
				e.writes = append(e.writes, v)
			}
		}
	}
	return append(list, lists.Map(order, func(e *entry) entry { return *e })...)
}
