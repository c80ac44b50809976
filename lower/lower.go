package lower

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/rewrite"
)

// Options say what the graph does not.
type Options struct {
	// Kernels chooses what operations become; nil takes what every target runs.
	Kernels *kernels.Selector
}

// StableHLO writes a graph as a StableHLO module whose main function takes the graph's inputs and
// gives its results, in order.
func StableHLO(g *ir.Graph, o Options) (string, error) {
	if err := g.Verify(); err != nil {
		return "", err
	}
	g, err := rewrite.Graph(g, o.Kernels)
	if err != nil {
		return "", err
	}
	w := &writer{mesh: g.Mesh, at: map[*ir.Value]string{}, rules: table(), table: kernelTable(),
		kernels: o.Kernels, known: map[string]val{}}
	w.line("module @%s attributes {mhlo.num_replicas = %d : i32} {", g.Name, ir.Devices(g.Mesh))
	w.indent++
	args, hosted, into := make([]string, len(g.Inputs)), g.Hosted(), g.Donations()
	for i, v := range g.Inputs {
		w.at[v] = fmt.Sprintf("%%arg%d", i)
		args[i] = fmt.Sprintf("%%arg%d: %s%s", i, tensor(v.Type),
			attributes(aliased(g, into[v.Name]), w.memory(hosted[v])))
	}
	results, types := make([]string, len(g.Results)), make([]string, len(g.Results))
	for i, v := range g.Results {
		types[i] = tensor(v.Type)
		results[i] = types[i] + attributes(w.memory(hosted[v]))
	}
	w.line("func.func @main(%s) -> (%s) {", strings.Join(args, ", "), strings.Join(results, ", "))
	w.indent++
	w.ops(g)
	names, _ := spelled(lists.Map(g.Results, w.use))
	w.line("return %s : %s", names, strings.Join(types, ", "))
	w.indent--
	w.line("}")
	w.holders()
	w.indent--
	w.line("}")
	if w.err != nil {
		return "", diag.New(diag.GraphInvalid, "graph %s cannot be lowered: %v", g.Name, w.err)
	}
	return w.aliases() + w.b.String(), nil
}

// attributes lists those of an argument or result that are not empty.
func attributes(list ...string) string {
	list = slices.DeleteFunc(list, func(a string) bool { return a == "" })
	if len(list) == 0 {
		return ""
	}
	return " {" + strings.Join(list, ", ") + "}"
}

// memory is the attribute of a value that lies on the host.
func (w *writer) memory(hosted bool) string {
	if !hosted || w.kernels.HostMemory() == "" {
		return ""
	}
	return fmt.Sprintf("mhlo.memory_kind = %q", w.kernels.HostMemory())
}

// aliased is the attribute of an argument whose place a result takes, "" if none does.
func aliased(g *ir.Graph, result string) string {
	at := slices.IndexFunc(g.Results, func(v *ir.Value) bool { return v.Name == result })
	if result == "" || at < 0 {
		return ""
	}
	return fmt.Sprintf("tf.aliasing_output = %d : i32", at)
}

// ops writes the operations of a graph whose inputs have names already.
func (w *writer) ops(g *ir.Graph) {
	for _, op := range g.Ops {
		if op.Kind == "repeat" {
			w.repeat(op)
		} else {
			w.op(op)
		}
	}
}

// op writes one operation.
func (w *writer) op(op *ir.Op) {
	rule := w.rule(op)
	if rule == nil {
		w.fail("there is no rule for %s", op.Kind)
		return
	}
	for i, v := range rule(w, op, lists.Map(op.In, w.use)) {
		if !v.t.Shape().Equal(op.Out[i].Type.Shape()) {
			w.fail("%s became %s, not %s", op.Kind, v.t, op.Out[i].Type)
		}
		w.at[op.Out[i]] = v.name
	}
}

// rule finds what writes an operation, by the kernel that is taken for it.
func (w *writer) rule(op *ir.Op) rule {
	if why := unwritten(op); why != "" {
		w.fail("%s", why)
		return nil
	}
	if k := pick(w.table, w.kernels, op); k != nil {
		return k.print
	}
	return w.rules[op.Kind]
}

// unwritten says why an operation cannot be lowered: products with few bits are first written out
// as quantize and block_dot.
func unwritten(op *ir.Op) string {
	if op.Kind == "block_dw" {
		return "block_dw is not written out: package precision makes a block_dot of it"
	}
	key := map[string]string{"linear": "fprop", "linear_dx": "dgrad", "linear_dw": "wgrad"}[op.Kind]
	if f := op.Attrs.Text(key); key != "" && f != "" {
		return op.Kind + " asks for " + f + " and is not written out: package precision makes a " +
			"block_dot of it"
	}
	return ""
}

// repeat writes a loop. Everything that the body sees goes round with it: XLA wants loops closed.
func (w *writer) repeat(op *ir.Op) {
	l, carries := op.Loop(), len(op.Loop().Carries)
	index := ir.Type{Elem: indexType}
	state := []val{w.constant(index, 0)}
	state = append(state, lists.Map(op.In, w.use)...)
	for _, v := range op.Out[carries:] {
		state = append(state, w.constant(v.Type, 0))
	}
	inner, heads := make([]val, len(state)), make([]string, len(state))
	for i, s := range state {
		inner[i] = val{w.fresh(), s.t}
		heads[i] = inner[i].name + " = " + s.name
	}
	loop := w.fresh()
	_, types := spelled(state)
	w.line("%s:%d = stablehlo.while(%s) : %s", loop, len(state), list(heads), types)
	w.indent++
	w.line("cond {")
	w.indent++
	limit := w.constant(index, float64(l.N))
	w.line("stablehlo.return %s : tensor<i1>", w.compare("LT", inner[0], limit).name)
	w.indent--
	w.line("} do {")
	w.indent++
	at := inner[0]
	if l.Reverse {
		at = w.elementwise("subtract", w.constant(index, float64(l.N-1)), at)
	}
	w.line("stablehlo.return %s : %s", list(w.round(l, inner, at)), types)
	w.indent--
	w.line("}")
	w.indent--
	for i, v := range op.Out {
		k := 1 + i
		if i >= carries {
			k += len(op.In) - carries
		}
		w.at[v] = fmt.Sprintf("%s#%d", loop, k)
	}
}

// round writes one round of a loop: slices of the stacks, the body, and what it stacks up.
func (w *writer) round(l ir.Loop, inner []val, at val) []string {
	carries := len(l.Carries)
	for i, v := range l.Body.Inputs {
		s := inner[1+i]
		if l.IsStack(i) {
			s = w.reshape(w.dynamicSlice(s, s.t.Dims[0].Name, at, 1), v.Type)
		}
		w.at[v] = s.name
	}
	outer := w.known
	w.known = map[string]val{}
	w.ops(l.Body)
	w.known = outer
	one := w.constant(at.t, 1)
	next := []string{w.elementwise("add", inner[0], one).name}
	for _, v := range l.Body.Results[:carries] {
		next = append(next, w.use(v).name)
	}
	for _, s := range inner[1+carries : 1+len(l.In)] {
		next = append(next, s.name)
	}
	for i, v := range l.Body.Results[carries:] {
		stack := inner[1+len(l.In)+i]
		next = append(next, w.lay(stack, w.use(v), at).name)
	}
	return next
}

// lay puts one round's value into its place of a stack.
func (w *writer) lay(stack, v, at val) val {
	starts := w.starts(stack.t, stack.t.Dims[0].Name, at)
	one := w.reshape(v, ir.Type{Dims: append([]ir.Dim{{Name: ir.Layer, Size: 1}}, v.t.Dims...)})
	in := append([]val{stack, one}, starts...)
	return w.apply(stack.t, "stablehlo.dynamic_update_slice ", "", in...)
}

// starts is where a slice along one dimension begins, in each dimension.
func (w *writer) starts(t ir.Type, dim string, at val) []val {
	starts := slices.Repeat([]val{w.constant(at.t, 0)}, len(t.Dims))
	starts[t.Index(dim)] = at
	return starts
}

// dynamicSlice takes some of a dimension from a place on that the program finds out.
func (w *writer) dynamicSlice(x val, dim string, at val, size int64) val {
	t := ir.Type{Elem: x.t.Elem, Dims: slices.Clone(x.t.Dims)}
	t.Dims[t.Index(dim)].Size = size
	sizes := ", sizes = [" + list(t.Shape().Dims) + "]"
	return w.apply(t, "stablehlo.dynamic_slice ", sizes, append([]val{x}, w.starts(t, dim, at)...)...)
}
