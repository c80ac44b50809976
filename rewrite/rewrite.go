package rewrite

import (
	"fmt"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
)

// A pass is one rewrite. Run changes the graph that it is given: [Apply] hands it a copy. Errors of
// a pass have its name.
type pass struct {
	Name string
	Run  func(g *ir.Graph) error
}

// passes lists the passes of a target, in the order in which they run. Parameters are as in
// [Apply].
func passes(s *kernels.Selector, hasKernel func(*ir.Op) bool) []pass {
	if hasKernel == nil {
		hasKernel = func(*ir.Op) bool { return false }
	}
	list := []pass{{"expand-custom", expand}}
	if s.HostMemory() == "" {
		list = append(list, pass{"drop-host-copies", dropMoves})
	}
	list = append(list, pass{"group-quantizations", groupQuantizations})
	switch {
	case s == nil:
		list = append(list, pass{"fold-transposes", foldInto("block_dot")},
			pass{"keep-block-layout", keepBlockLayout(hasKernel)})
	case s.FusesOneOutput():
		list = append(list,
			pass{"fold-transposes", foldInto("dot", "linear", "linear_dx", "linear_dw", "block_dot")},
			pass{"update-in-place", updateInPlace},
			pass{"save-softmax", saveSoftmax(s.Arch())},
			pass{"keep-block-layout", keepBlockLayout(hasKernel)})
	default:
		if s.Own() {
			list = append(list, pass{"loss-in-place", lossInPlace(s)},
				pass{"quantize-once", quantizeOnce(s)},
				pass{"norm-codes", normCodes(s)}, pass{"write-norms", writeNorms},
				pass{"norm-rows", normRows(s)}, pass{"norm-gradients", normGradients(s)},
				pass{"fuse-sources", fuseSources(s)})
		} else {
			list = append(list, pass{"fold-transposes", foldInto("block_dot")})
		}
		list = append(list, pass{"share-block-scales", shareBlockScales(hasKernel)},
			pass{"part-shared-experts", partShared})
		if s.Own() {
			list = append(list, pass{"group-experts", groupExperts(s)})
		}
	}
	return append(list, pass{"pack-bytes", pack})
}

// Apply runs the passes of a target on a copy of a graph. Inputs and results keep their names,
// their order and their meanings. Every pass but the last leaves a graph that verifies; the last
// packs quantized values into bytes, so a result with quantized values no longer verifies.
//
// A nil selector stands for programs that every target runs. Operations of which hasKernel is true
// have a kernel of their own and are not split into others; nil means no operation has.
func Apply(g *ir.Graph, s *kernels.Selector, hasKernel func(*ir.Op) bool) (*ir.Graph, error) {
	g = g.Clone()
	for _, pass := range passes(s, hasKernel) {
		before := size(g)
		if err := pass.Run(g); err != nil {
			return nil, fmt.Errorf("rewrite %s: %w", pass.Name, err)
		}
		s.Passed(kernels.Pass{Name: pass.Name, Before: before, After: size(g)})
	}
	return g, nil
}

// size counts the operations of a graph and of the bodies of its loops.
func size(g *ir.Graph) (n int) {
	for _, op := range g.Ops {
		if n++; op.Body != nil {
			n += size(op.Body)
		}
	}
	return n
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
