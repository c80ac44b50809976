package aten

import (
	"fmt"
	"maps"

	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/dtype"
)

// A rule writes one node: it gives the tensors that are its outputs, as many as it has.
type rule func(m *maker, n *node) []*tensor

// rules are the operators that are known, by name and overload. Operators in place have the rule of
// the same operator without the underscore.
var rules map[string]rule

func init() {
	rules = map[string]rule{}
	for _, g := range groups() {
		maps.Copy(rules, g.rules)
	}
}

// A group is a part of the rules.
type group struct {
	name  string
	rules map[string]rule
}

func groups() []group {
	return []group{{"element-wise", elementRules}, {"functions", mathRules},
		{"activations", activationRules}, {"of two tensors", pairRules}, {"shapes", shapeRules},
		{"order and parts", arrangeRules}, {"by numbers", indexRules}, {"new tensors", makerRules},
		{"sums and matrices", productRules}, {"einsum and vectors", einsumRules},
		{"reductions", reduceRules}, {"Transformer blocks", blockRules}, {"norms", normRules},
		{"attention", attentionRules}, {"losses", lossRules}, {"distances", marginRules},
		{"experts", expertRules}, {"composed", moreRules}, {"second names", aliasRules()}}
}

// sole makes a rule of a function with one result.
func sole(f func(m *maker, n *node) *tensor) rule {
	return func(m *maker, n *node) []*tensor { return []*tensor{f(m, n)} }
}

// A node is a call in the program, with its arguments bound to this reading.
type node struct {
	*pt2.Node
	graph *pt2.Graph
	m     *maker
}

// has reports whether an argument is given and not None.
func (n *node) has(name string) bool {
	a, ok := n.Arg(name)
	return ok && a != nil
}

// tensor gives a tensor argument.
func (n *node) tensor(name string) *tensor {
	a, _ := n.Arg(name)
	ref, ok := a.(pt2.Ref)
	if !ok {
		panic(refusal("argument " + name + " is no tensor"))
	}
	t := n.cast(n.m.value(n.graph, ref))
	if t.buffer {
		out := t.with(n.m.b.StopGradient(t.v))
		out.twin = t.twin
		return out
	}
	return t
}

// cast converts an argument under autocast, where a program does not say it: to the type of the
// result, be it lower or higher.
func (n *node) cast(t *tensor) *tensor {
	to := n.graph.Values[string(n.Outputs[0])].Type
	if !n.m.autocast || t.v == nil || to.Kind() != dtype.Float ||
		t.v.Type.Elem.Kind() != dtype.Float {
		return t
	}
	return n.m.cast(t, to)
}

// value gives a tensor argument whose numbers the graph has.
func (n *node) value(name string) *tensor { return n.m.real(n.tensor(name)) }

// promoted gives a tensor argument of an operator that computes in the type of its result, as torch
// promotes whole numbers and masks: to a fraction beside one, and to whole numbers.
func (n *node) promoted(name string) *tensor {
	t := n.tensor(name)
	have, to := t.elem, n.graph.Values[string(n.Outputs[0])].Type
	if t.v != nil {
		have = t.v.Type.Elem
	}
	if have.Kind() == dtype.Float || n.m.elem(have) == n.m.elem(to) {
		return t
	}
	return n.m.cast(t, to)
}

// number is promoted with numbers that the graph has.
func (n *node) number(name string) *tensor { return n.m.real(n.promoted(name)) }

// tensors gives a list of tensors.
func (n *node) tensors(name string) []*tensor {
	a, _ := n.Arg(name)
	refs, ok := a.([]pt2.Ref)
	if !ok {
		panic(refusal("argument " + name + " is no list of tensors"))
	}
	list := make([]*tensor, len(refs))
	for i, ref := range refs {
		list[i] = n.cast(n.m.value(n.graph, ref))
	}
	return list
}

// int gives a whole number, or what it is if absent.
func (n *node) int(name string, absent int64) int64 {
	switch a, _ := n.Arg(name); a := a.(type) {
	case int64:
		return a
	case pt2.Expr:
		return n.m.eval(a)
	case bool:
		if a {
			return 1
		}
		return 0
	case float64:
		return int64(a)
	}
	return absent
}

// float gives a number, or what it is if absent.
func (n *node) float(name string, absent float64) float64 {
	switch a, _ := n.Arg(name); a := a.(type) {
	case float64:
		return a
	case int64, pt2.Expr, bool:
		return float64(n.int(name, 0))
	}
	return absent
}

// scalar gives a number that stands where a tensor may stand.
func (n *node) scalar(name string) (float64, bool) {
	switch a, _ := n.Arg(name); a.(type) {
	case float64, int64, pt2.Expr, bool:
		return n.float(name, 0), true
	}
	return 0, false
}

// ints gives a list of whole numbers.
func (n *node) ints(name string) []int64 {
	switch a, _ := n.Arg(name); a := a.(type) {
	case []int64:
		return a
	case []pt2.Expr:
		list := make([]int64, len(a))
		for i, e := range a {
			list[i] = n.m.eval(e)
		}
		return list
	case int64:
		return []int64{a}
	}
	return nil
}

func (n *node) bool(name string, absent bool) bool {
	if a, ok := n.Arg(name); ok {
		if v, ok := a.(bool); ok {
			return v
		}
	}
	return absent
}

func (n *node) text(name, absent string) string {
	if a, ok := n.Arg(name); ok {
		if v, ok := a.(string); ok {
			return v
		}
	}
	return absent
}

func (n *node) dtype(name string) (dtype.DType, bool) {
	a, _ := n.Arg(name)
	t, ok := a.(dtype.DType)
	return t, ok
}

// out gives the sizes of an output.
func (n *node) out(i int) []int64 {
	dims := n.graph.Values[string(n.Outputs[i])].Dims
	list := make([]int64, len(dims))
	for k, e := range dims {
		if list[k] = n.m.eval(e); list[k] < 0 {
			panic(refusal(fmt.Sprintf("a result of size %d", list[k])))
		}
	}
	return list
}

// path is the innermost module of a node.
func (n *node) path() string {
	if len(n.Modules) == 0 {
		return ""
	}
	return n.Modules[len(n.Modules)-1].Path
}
