package aten

import (
	"strings"
	"testing"

	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
)

// A rule that fails is a bug with its code and its place, and no call that is not supported.
func TestBugsAreNoRefusals(t *testing.T) {
	m := &maker{}
	m.node = &node{Node: &pt2.Node{Target: "aten.odd.default", Source: "model.py:7"}, m: m}
	var list []int
	m.guard(func() { list[2]++ }, func(why string) { m.missing.add(m.node, why) })
	m.guard(func() { panic(refusal("a shape")) }, func(why string) { m.missing.add(m.node, why) })
	e := diag.From(m.refused())
	if e.Code != diag.Internal || !strings.Contains(e.What, "aten.odd.default at model.py:7") ||
		!strings.Contains(e.Fix, "report") || strings.Contains(e.What, "runtime error") {
		t.Errorf("a bug is said as\n%s", e.Format())
	}
	m.bug = nil
	if e := diag.From(m.refused()); e.Code != diag.NotSupported {
		t.Errorf("a refusal is said as\n%s", e.Format())
	}
}

// A program whose ids and labels were one tensor at the export reads labels alone; trained, it
// would learn to copy.
func TestOneTensorForIDsAndLabels(t *testing.T) {
	archive, err := pt2.Parse("nanogpt", unpack(t, "nanogpt.pt2.gz"))
	if err != nil {
		t.Fatal(err)
	}
	refs := map[string]pt2.Ref{}
	for _, s := range archive.Program.Inputs {
		refs[s.Name], _ = s.Arg.(pt2.Ref)
	}
	for _, n := range archive.Program.Graph.Nodes {
		for i, a := range n.Args {
			if a.Value == pt2.Argument(refs["input_ids"]) {
				n.Args[i].Value = refs["labels"]
			}
		}
	}
	_, err = New(archive)
	if err == nil || !strings.Contains(diag.From(err).Fix, "labels=ids.clone()") {
		t.Errorf("one tensor for ids and labels gives %v", err)
	}
}

// A rule that computes in f32 ends after an error too, when values have no type.
func TestRulesEndAfterAnError(t *testing.T) {
	for name, f := range map[string]func(b *ir.Builder, x, y *ir.Value) *ir.Value{
		"pow": powered, "atan2": angle} {
		b := ir.NewBuilder("test")
		x := b.Input("x", ir.Data, ir.Type{Elem: dtype.F32}, "")
		if f(b, b.Add(x, nil), x); b.Err() == nil {
			t.Errorf("%s lost the error", name)
		}
	}
}
