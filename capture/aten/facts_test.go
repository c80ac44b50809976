package aten

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/golden"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
)

// Policies and recomputation choose by tags, kernels and plans by facts: testdata/facts.txt has them
// for all models.
func TestTagsAndFacts(t *testing.T) {
	var out strings.Builder
	for _, f := range fixtures {
		m, _ := load(t, f.name)
		if m == nil {
			t.Fatalf("%s is not supported", f.name)
		}
		facts := m.Facts()
		moe, latent := facts.MoE, facts.MLA
		facts.MoE, facts.MLA = nil, nil
		fmt.Fprintf(&out, "%s\n  %+v\n", f.name, facts)
		if moe != nil {
			fmt.Fprintf(&out, "  %d experts of %d, %d chosen, %d shared, %d dense layers\n", moe.Experts,
				moe.MLP, moe.TopK, moe.Shared, moe.Dense)
		}
		if latent != nil {
			fmt.Fprintf(&out, "  keys of %d, values of %d\n", latent.NoPE+latent.Rope, latent.Value)
		}
		params := map[string][]string{}
		for _, p := range m.Params() {
			var dims []string
			for _, d := range p.Dims {
				dims = append(dims, d.Name)
			}
			_, rest := placeOf(strings.ReplaceAll(p.Source, "{}", "0"))
			params[string(p.Tag)] = append(params[string(p.Tag)], fmt.Sprintf("%s[%s]",
				strings.TrimSuffix(rest, ".weight"), strings.Join(dims, " ")))
		}
		for _, tag := range slices.Sorted(maps.Keys(params)) {
			fmt.Fprintf(&out, "  %-8s %s\n", tag, strings.Join(params[tag], ", "))
		}
		g, err := m.Graph(model.Shape{Batch: 2, Seq: 6, Elem: dtype.F32})
		if err != nil {
			t.Fatal(err)
		}
		ops := map[ir.Tag][]string{}
		tagged(g, ops)
		for _, tag := range slices.Sorted(maps.Keys(ops)) {
			fmt.Fprintf(&out, "  @%-7s %s\n", tag, strings.Join(ops[tag], " "))
		}
	}
	golden.Compare(t, "testdata/facts.txt", []byte(out.String()))
}

// tagged lists the kinds of operations with each tag that are more than element by element.
func tagged(g *ir.Graph, ops map[ir.Tag][]string) {
	for _, op := range g.Ops {
		if op.Body != nil {
			tagged(op.Body, ops)
			continue
		}
		switch op.Kind {
		case "linear", "attention", "rms_norm", "layer_norm", "embedding", "cross_entropy", "top_k",
			"dispatch", "combine", "rope", "softmax":
			if !slices.Contains(ops[op.Tag], op.Kind) {
				ops[op.Tag] = append(ops[op.Tag], op.Kind)
			}
		}
	}
}
