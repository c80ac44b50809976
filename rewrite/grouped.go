package rewrite

import (
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/kernels/fused"
)

// grouped begins the kinds of GEMMs of experts that a kernel of our own computes, which skips tiles
// of rows without a token. Their last argument tells which have one: it is zero in empty slots.
const grouped = "grouped_"

// groupedKinds are the GEMMs that experts have.
var groupedKinds = []string{"block_dot", "linear", "linear_dx", "linear_dw"}

// GroupedKinds lists the kinds of grouped GEMMs.
func GroupedKinds() []string {
	return lists.Map(groupedKinds, func(kind string) string { return grouped + kind })
}

// Attributes of grouped GEMMs.
const (
	// attrFilled is how many rows are expected in tiles with a token.
	attrFilled = "filled"
	// attrFirst names the dimension of the weights that FSDP gathers or reduces along, which has the
	// largest stride in memory; "" is the experts.
	attrFirst = "first"
	attrWhy   = "why" // the selector's reason
	// attrShards is the number of shards of the weights that stay apart.
	attrShards = "shards"
)

// An Experts is a GEMM of experts.
type Experts struct {
	kernels.Grouping
	// Rows tells tiles without a token: rows, or their scales, that are zero in empty slots.
	Rows  *ir.Value
	First string // see attrFirst
	// gather is of weights whose shards stay apart ([kernels.Grouping.Shards]).
	gather *ir.Op
	// Kept and Summed name the dimensions of weights; of a gradient, Kept is of the first argument and
	// Summed of the second.
	Kept, Summed string
	Why          string // it is grouped
}

// groupExperts lets kernels of our own compute GEMMs of experts where the selector says so.
func groupExperts(s *kernels.Selector) func(*ir.Graph) error {
	return func(g *ir.Graph) error {
		by := readers(g)
		return rows().Edit(g, func(r *ir.Rewriter, op *ir.Op) []*ir.Value {
			e, ok := expertsOf(op, by, typeOf)
			if !ok {
				return nil
			}
			why, ok := s.Groups(e.Grouping)
			if !ok {
				kernel := kernels.Plain
				if e.Format != "" {
					kernel = kernels.CuDNN
				}
				s.Note(kernels.Choice{Kind: op.Kind, Kernel: kernel, Why: why})
				return nil
			}
			a := op.Attrs.With(attrFilled, e.Filled()).With(attrFirst, e.First).With(attrWhy, why).
				With(attrShards, e.Shards)
			if e.gather != nil {
				e.gather.Attrs = e.gather.Attrs.With("apart", true)
			}
			return r.ReplaceWith(op, grouped+op.Kind, a, append(slices.Clone(op.In), e.Rows)...)
		})
	}
}

// GroupedOf reads a grouped GEMM, and how many rows are expected in tiles with a token.
func GroupedOf(op *ir.Op) (e Experts, filled int64, ok bool) {
	if !strings.HasPrefix(op.Kind, grouped) {
		return e, 0, false
	}
	one := *op
	one.Kind, one.In = strings.TrimPrefix(op.Kind, grouped), op.In[:len(op.In)-1]
	e, ok = shapeOf(&one, func(v *ir.Value) ir.Type { return unpacked(op, v) })
	e.Shards = op.Attrs.Int(attrShards)
	e.Rows, e.First = op.In[len(op.In)-1], op.Attrs.Text(attrFirst)
	e.Why = op.Attrs.Text(attrWhy)
	return e, op.Attrs.Int(attrFilled), ok
}

// shapeOf reads the sizes of a GEMM of experts: one dimension is kept of the weights, one is summed
// over, and rows are slots. Values have the types that typed gives.
func shapeOf(op *ir.Op, typed func(*ir.Value) ir.Type) (e Experts, ok bool) {
	if !slices.Contains(groupedKinds, op.Kind) {
		return e, false
	}
	n, over := len(op.In)/2, op.Attrs.List("over")
	x, w := typed(op.In[0]), typed(op.In[n])
	if len(over) != 1 || len(x.Dims) != 3 || len(w.Dims) != 3 || x.Index(ir.ExpertDim) < 0 ||
		w.Index(ir.ExpertDim) < 0 || x.Index(ir.Slots) < 0 {
		return e, false
	}
	kept := func(t ir.Type) ir.Dim {
		return append(ir.Without(t.Dims, ir.ExpertDim, over[0]), ir.Dim{})[0]
	}
	e.Experts, e.Slots = x.Size(ir.ExpertDim), x.Size(ir.Slots)
	e.Format, e.Elem = ir.Format(op.Attrs.Text("format")), x.Elem
	e.Grad = over[0] == ir.Slots
	a, b := kept(w), ir.Dim{Name: over[0], Size: x.Size(over[0])}
	if e.Grad {
		a, b = kept(x), kept(w)
	}
	e.Kept, e.Out, e.Summed, e.In = a.Name, a.Size, b.Name, b.Size
	e.Wide = op.Out[0].Type.Elem.Bits() > 16
	rounded := !slices.Contains([]string{"", x.Elem.String()}, op.Attrs.Text("in"))
	return e, a.Name != "" && b.Name != "" && !rounded &&
		(e.Grad || w.Index(ir.Slots) < 0 && !e.Wide)
}

// unpacked is the type of a value of a GEMM's operands in numbers, also where two are in a byte.
func unpacked(op *ir.Op, v *ir.Value) ir.Type {
	t, f := v.Type, ir.Format(op.Attrs.Text("format"))
	if n := len(t.Dims); f != "" && f.Codes().Bits() == 4 && t.Elem == dtype.U8 && n > 0 {
		t.Dims = slices.Clone(t.Dims)
		t.Dims[n-1].Size *= 2
	}
	return t
}

func typeOf(v *ir.Value) ir.Type { return v.Type }

// GroupingOf reads a GEMM of experts in a graph before rewriting, for prices: values have the types
// that typed gives. Along which dimension a gradient is reduced is left open.
func GroupingOf(op *ir.Op, typed func(*ir.Value) ir.Type) (kernels.Grouping, bool) {
	e, ok := expertsOf(op, nil, typed)
	return e.Grouping, ok
}

// expertsOf finds what a GEMM of experts depends on beside its sizes. by are the readers of
// values.
func expertsOf(op *ir.Op, by map[*ir.Value][]*ir.Op, typed func(*ir.Value) ir.Type) (e Experts,
	ok bool) {
	if e, ok = shapeOf(op, typed); !ok {
		return e, false
	}
	n := len(op.In) / 2
	from := op.In[:n]
	if e.Grad {
		from = op.In // either tells
	}
	root, dispatch := tokens(from, map[*ir.Value]bool{})
	if dispatch == nil || dispatch.Attrs.Text("axis") != "" {
		return e, false
	}
	if t := typed(root); t.Size(ir.ExpertDim) != e.Experts || t.Size(ir.Slots) != e.Slots {
		return e, false // rows that are not where their experts are
	}
	e.Rows = root
	if e.Format != "" && !e.Grad {
		e.Rows = op.In[1] // scales are a byte for 32 numbers
	}
	slots := typed(dispatch.Out[0])
	e.Parts = e.Slots / slots.Size(ir.Slots)
	choices := lists.Product(typed(dispatch.In[1]).Dims, func(d ir.Dim) int64 { return d.Size })
	e.Tokens = min(choices, slots.Size(ir.ExpertDim)*slots.Size(ir.Slots))
	if e.Grad {
		e.First = reducedAlong(op.Out[0], by)
	} else {
		e.First = gatheredAlong(op.In[n])
	}
	if e.First == ir.ExpertDim {
		e.First = ""
	}
	if e.Format == ir.NVFP4 && e.First == e.Summed && !e.Grad {
		e.First = "" // bytes hold two numbers along it
		e.gather, e.Shards = shardsOf(op.In[n], e.Grouping, typed)
	}
	e.Moved = e.First != "" || e.Shards > 0
	return e, true
}

// shardsOf gives the gather of packed weights along what is summed over and its number of shards,
// if the grouped kernel reads them one behind the other; else nil.
func shardsOf(v *ir.Value, g kernels.Grouping, typed func(*ir.Value) ir.Type) (*ir.Op, int64) {
	op := v.Def()
	if op == nil || op.Kind != "all_gather" {
		return nil, 0
	}
	dim := op.Attrs.Text("dim")
	n := typed(v).Size(dim) / max(typed(op.In[0]).Size(dim), 1)
	if n < 2 || !(fused.Group{In: int(g.In), Format: g.Format}).TakesShards(int(n)) {
		return nil, 0
	}
	return op, n
}

// tokens finds the dispatched rows, or their codes or scales, that values with slots are computed
// from, where their experts are, and the dispatch.
func tokens(list []*ir.Value, seen map[*ir.Value]bool) (root *ir.Value, dispatch *ir.Op) {
	for _, v := range slices.Backward(list) { // scales come behind codes
		op := v.Def()
		if op == nil || seen[v] || v.Type.Index(ir.ExpertDim) < 0 || v.Type.Index(ir.Slots) < 0 ||
			len(v.Type.Dims) < 3 {
			continue
		}
		seen[v] = true
		if op.Kind == "dispatch" {
			return v, op
		}
		in := op.In[0].Def()
		if op.Kind == "all_to_all" && in != nil && in.Kind == "dispatch" {
			return v, in
		}
		if root, dispatch = tokens(op.In, seen); dispatch != nil {
			return root, dispatch
		}
	}
	return nil, nil
}

// gatheredAlong names the dimension along which a weight's shards are gathered, "" if they are not.
func gatheredAlong(v *ir.Value) string {
	for v.Def() != nil {
		switch op := v.Def(); op.Kind {
		case "all_gather":
			return op.Attrs.Text("dim")
		case "convert", "transpose":
			v = op.In[0]
		default:
			return ""
		}
	}
	return ""
}

// reducedAlong names the dimension along which a gradient is reduced and scattered, "" if it is
// not.
func reducedAlong(v *ir.Value, by map[*ir.Value][]*ir.Op) string {
	for len(by[v]) == 1 {
		switch op := by[v][0]; op.Kind {
		case "reduce_scatter":
			return op.Attrs.Text("dim")
		case "convert", "transpose":
			v = op.Out[0]
		default:
			return ""
		}
	}
	return ""
}

// groupedRow is the row of a grouped GEMM, which means what the GEMM means without its last
// argument.
func groupedRow(kind string) *ir.Row {
	return &ir.Row{
		Kind: ir.Kind{Results: 1, Infer: func(g *ir.Graph, op *ir.Op) ([]ir.Type, error) {
			return inferAs(kind, g, op, op.In[:max(len(op.In)-1, 0)]...)
		}},
		Lower: func(b *ir.Builder, op *ir.Op) []*ir.Value {
			constants := map[string]any{}
			for _, a := range op.Attrs {
				if !slices.Contains([]string{attrFilled, attrFirst, attrWhy, attrShards}, a.Key) {
					constants[a.Key] = a.Value
				}
			}
			return b.Op(kind, constants, op.In[:len(op.In)-1]...)
		},
	}
}
