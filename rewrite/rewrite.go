package rewrite

import (
	"fmt"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
)

// A Pass is one rewrite. Run changes the graph that it is given: [Graph] hands it a copy.
type Pass struct {
	Name string
	Run  func(g *ir.Graph) error
}

// For lists the passes of a target, in the order in which they run. A nil selector stands for
// programs that every target runs. Operations of which whole is true have a kernel of their own and
// are not split into others; nil means no operation has.
func For(s *kernels.Selector, whole func(*ir.Op) bool) []Pass {
	if whole == nil {
		whole = func(*ir.Op) bool { return false }
	}
	list := []Pass{{"expand-custom", expand}}
	if s.HostMemory() == "" {
		list = append(list, Pass{"drop-host-copies", dropMoves})
	}
	list = append(list, Pass{"group-quantizations", groupQuantizations})
	switch {
	case s == nil:
		list = append(list, Pass{"fold-transposes", foldInto("block_dot")},
			Pass{"keep-block-layout", keepBlockLayout(whole)})
	case s.FusesOneOutput():
		list = append(list,
			Pass{"fold-transposes", foldInto("dot", "linear", "linear_dx", "linear_dw", "block_dot")},
			Pass{"update-in-place", updateInPlace},
			Pass{"save-softmax", saveSoftmax(s.Arch())},
			Pass{"keep-block-layout", keepBlockLayout(whole)})
	default:
		if !s.Blocks() {
			list = append(list, Pass{"fold-transposes", foldInto("block_dot")})
		}
		list = append(list, Pass{"share-block-scales", shareBlockScales(whole)})
	}
	return append(list, Pass{"pack-bytes", pack})
}

// Graph runs the passes of a target on a copy of a graph. Inputs and results keep their names,
// their order and their meanings. Every pass but the last leaves a graph that verifies; the last
// packs quantized values into bytes, so a result with quantized values no longer verifies.
func Graph(g *ir.Graph, s *kernels.Selector, whole func(*ir.Op) bool) (*ir.Graph, error) {
	g = g.Clone()
	for _, pass := range For(s, whole) {
		if err := pass.Run(g); err != nil {
			return nil, fmt.Errorf("rewrite %s: %w", pass.Name, err)
		}
	}
	return g, nil
}

// expand writes custom operations out in the operations that package ir has.
func expand(g *ir.Graph) error {
	out, err := ir.WriteOut(g, func(*ir.Row) bool { return true })
	if err == nil {
		*g = *out
	}
	return err
}

// readers lists the operations that read a value, over a graph and the bodies of its loops. An
// operation is listed once per argument; the end of a graph reads its results.
func readers(g *ir.Graph) map[*ir.Value][]*ir.Op {
	by := map[*ir.Value][]*ir.Op{}
	var add func(g *ir.Graph)
	add = func(g *ir.Graph) {
		for _, op := range g.Ops {
			for _, v := range op.In {
				by[v] = append(by[v], op)
			}
			if op.Body != nil {
				add(op.Body)
			}
		}
		end := &ir.Op{Kind: "return", In: g.Results}
		for _, v := range g.Results {
			by[v] = append(by[v], end)
		}
	}
	add(g)
	return by
}
