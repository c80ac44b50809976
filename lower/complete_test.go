package lower_test

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	cpurules "github.com/deepwell/deepwell/lower/cpu"
	"github.com/deepwell/deepwell/lower/gpu"
	"github.com/deepwell/deepwell/lower/quantized"
	"github.com/deepwell/deepwell/lower/stablehlo"
)

// unprinted are the operations without a rule or kernel of their own, and why.
var unprinted = map[string]string{
	"repeat":   "the module printer writes loops",
	"block_dw": "ir.LowerQuantized replaces it before anything runs",
	"quantize": "package rewrite splits it into scales and codes",
}

// unprobed are the operations with a gradient but without a probe, and where they are tested.
var unprobed = map[string]string{
	"iota":           "it has no arguments",
	"stop_gradient":  "nothing flows through it",
	"expert_load":    "what flows to the bias is no gradient",
	"attach_loss":    "its loss is no part of the result",
	"repeat":         "the models of ir/grad_test.go",
	"all_gather":     "the meshes of spmd's parity tests",
	"all_to_all":     "the meshes of spmd's parity tests",
	"all_reduce":     "the meshes of spmd's parity tests",
	"reduce_scatter": "the meshes of spmd's parity tests",
	"shard_slice":    "the meshes of spmd's parity tests",
}

// Every operation of package ir has a function in the interpreter, a rule or kernel that prints it,
// and a probe, or a reason why not. A row alone passed all tests.
func TestOperationsAreComplete(t *testing.T) {
	printed := map[string]bool{}
	for _, rules := range []map[string]stablehlo.Rule{stablehlo.Rules(), quantized.Rules(), gpu.Rules()} {
		for kind := range rules {
			printed[kind] = true
		}
	}
	for _, k := range slices.Concat(stablehlo.Sharded(), gpu.Kernels(), cpurules.Kernels(),
		quantized.Kernels(), stablehlo.Plain()) {
		for _, kind := range k.Kinds {
			printed[kind] = true
		}
	}
	probed := map[string]bool{}
	for _, p := range irtest.Probes {
		r, b := rand.New(rand.NewPCG(1, 1)), ir.NewBuilder("probe")
		in := func(name string, typ ir.Type) *ir.Value { return b.Input(name, ir.Param, typ, "") }
		ids := func(name string, typ ir.Type, _ int64) *ir.Value { return in(name, typ) }
		g, err := b.Graph(p.Build(r, b, irtest.Maker{In: in, IDs: ids}))
		if err != nil {
			t.Fatalf("%s: %v", p.Name, err)
		}
		for _, op := range g.Ops {
			probed[op.Kind] = true
		}
	}
	table := ir.Operations()
	for _, kind := range slices.Sorted(maps.Keys(table)) {
		if !eval.Knows(kind) && kind != "block_dw" { // which is replaced before
			t.Errorf("%s has no function in ir/eval", kind)
		}
		if printed[kind] == (unprinted[kind] != "") {
			t.Errorf("%s: printed %v, reason %q", kind, printed[kind], unprinted[kind])
		}
		if has := table[kind].Gradient != nil; has && probed[kind] == (unprobed[kind] != "") {
			t.Errorf("%s: has a probe in internal/irtest %v, reason %q", kind, probed[kind],
				unprobed[kind])
		}
	}
	for kind := range maps.Keys(unprobed) {
		if table[kind] == nil {
			t.Errorf("there is no operation %s", kind)
		}
	}
}
