package lower

import (
	"maps"
	"slices"
	"sync"

	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower/cpu"
	"github.com/deepwell/deepwell/lower/gpu"
	"github.com/deepwell/deepwell/lower/quantized"
	"github.com/deepwell/deepwell/lower/stablehlo"
	"github.com/deepwell/deepwell/rewrite"
)

// Options are the choices of a target: the graph says what is computed, the options how.
type Options struct {
	// Kernels chooses what operations become; nil takes what every target runs. It records its
	// choices: use it again for other modules of the same program, but in one goroutine at a time.
	Kernels *kernels.Selector
}

// StableHLO writes a graph as a StableHLO module whose main function takes the graph's inputs and
// returns its results, in order.
func StableHLO(g *ir.Graph, o Options) (string, error) {
	if err := g.Verify(); err != nil {
		return "", err
	}
	hasKernel := func(op *ir.Op) bool { return table().Find(o.Kernels, op) != nil }
	g, err := rewrite.Apply(g, o.Kernels, hasKernel)
	if err != nil {
		return "", err
	}
	return stablehlo.Print(g, table(), o.Kernels)
}

// table joins the rules and kernels of all targets. Of the kernels for an operation the first that
// applies prints it: those that leave the rest to others and those for sharded dimensions come
// first, those that only say why an operation stays plain last.
var table = sync.OnceValue(func() stablehlo.Table {
	t := stablehlo.Table{Rules: stablehlo.Rules()}
	maps.Copy(t.Rules, quantized.Rules())
	maps.Copy(t.Rules, gpu.Rules())
	t.Kernels = slices.Concat(stablehlo.Sinks(), stablehlo.Sharded(), gpu.Kernels(), cpu.Kernels(),
		quantized.Kernels(), stablehlo.Plain())
	return t
})

// Work tells what an operation of a graph asks of a device, by the kernel that prints it on a
// target. Package cost prices plans by it.
func Work(s *kernels.Selector, g *ir.Graph, op *ir.Op) ir.Work { return table().Work(s, g, op) }
