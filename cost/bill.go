package cost

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
)

// An Item is the work of one kernel on one device.
type Item struct {
	ir.Work
	Kind string // of the operation; "fused" for several
	Tag  ir.Tag
	Op   *ir.Op // nil if fused
	// Computed is true of a quantize whose source is computed in the same kernel.
	Computed bool
}

// An entry is one operation, or several that are fused: then reads and writes are the kernel's
// inputs and outputs.
type entry struct {
	op            *ir.Op
	reads, writes []*ir.Value // of the fused kernel
	// sources are writes that are only quantized, and to which formats.
	sources    map[*ir.Value][]dtype.Format
	handed     []*ir.Value // passed along by earlier rings, so that a second gather is free
	computable bool        // a quantize of what is computed element by element
	ops        []*ir.Op    // of the fused kernel
}

// item returns the work of an entry on a target, in a graph with g's mesh.
func (e *entry) item(g *ir.Graph, target *kernels.Selector) Item {
	if e.reads == nil {
		w := lower.Work(target, g, e.op)
		w.Sends = slices.DeleteFunc(w.Sends, func(s ir.Send) bool {
			return s.Kind == ir.Permute && slices.Contains(e.handed, s.Of)
		})
		return Item{w, e.op.Kind, e.op.Tag, e.op, e.computable && target.ComputesSource(w.Format)}
	}
	w := ir.Work{Class: ir.Streaming}
	for _, v := range slices.Concat(e.reads, e.writes) {
		formats, quantized := e.sources[v]
		written := !quantized || slices.ContainsFunc(formats, func(f dtype.Format) bool {
			return !target.ComputesSource(f)
		})
		if len(v.Type.Dims) > 0 && written {
			w.Bytes += v.Type.Shape().Bytes()
		}
	}
	return Item{w, "fused", e.op.Tag, nil, false}
}

// computable tells whether a source is computed element by element, or by a norm, whose statistics
// another kernel gives.
func computable(g *ir.Graph, v *ir.Value) bool {
	op := v.Def()
	return op != nil && (g.Work(op).Class == ir.Fused && !slices.Contains(views, op.Kind) ||
		op.Kind == "rms_norm" || op.Kind == "layer_norm")
}

// views are kinds that only change how values are read, or make constants: they are no kernels of
// their own.
var views = []string{"rename", "transpose", "split", "merge", "broadcast", "slice", "fill", "iota",
	"stop_gradient", "shard_slice"}

// entries fuses elementwise operations that pass values to each other, as XLA does: one kernel
// reads its inputs once and writes its outputs once. Other operations stay alone.
func entries(g *ir.Graph, ops []*ir.Op) (list []entry) {
	root := map[*ir.Op]*ir.Op{} // union-find forest of fused operations
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
			list = append(list, entry{op: op, handed: handed,
				computable: g.Work(op).Class == ir.Quantizing && computable(g, op.In[0])})
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
	group := func(op *ir.Op) *ir.Op { // nil if not fused
		if root[op] == nil {
			return nil
		}
		return find(op)
	}
	made := map[*ir.Op]*entry{}
	var order []*entry
	for _, op := range ops {
		if at := group(op); at != nil && made[at] == nil && !slices.Contains(views, op.Kind) {
			made[at] = &entry{op: op, reads: []*ir.Value{}, sources: map[*ir.Value][]dtype.Format{}}
			order = append(order, made[at])
		}
	}
	outside := map[*ir.Value]bool{} // values read by another group, and results
	other := map[*ir.Value]bool{}   // of these, the ones that are not only quantized
	formats := map[*ir.Value][]dtype.Format{}
	for _, v := range g.Results {
		outside[v], other[v] = true, true
	}
	for _, op := range g.Ops {
		e := made[group(op)]
		if e != nil && group(op) != nil {
			e.ops = append(e.ops, op)
		}
		for _, v := range op.In {
			if from := group(v.Def()); from == nil || from != group(op) {
				outside[v] = true
				w := g.Work(op)
				other[v] = other[v] || w.Class != ir.Quantizing
				formats[v] = append(formats[v], w.Format)
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
				if !other[v] {
					e.sources[v] = formats[v]
				}
			}
		}
	}
	return append(list, lists.Map(order, func(e *entry) entry { return *e })...)
}
