package stablehlo

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
)

// Print writes a graph that package rewrite has prepared for a target as a module. Its main
// function takes the graph's inputs and returns its results, in order.
func Print(g *ir.Graph, t Table, target *kernels.Selector) (string, error) {
	w := &Writer{mesh: g.Mesh, at: map[*ir.Value]string{}, table: t, Target: target,
		cse: map[string]Val{}, slices: map[string]Slice{}}
	w.Line("module @%s attributes {mhlo.num_replicas = %d : i32} {", g.Name, ir.Devices(g.Mesh))
	w.indent++
	args, hosted, into := make([]string, len(g.Inputs)), g.Hosted(), g.Donations()
	for i, v := range g.Inputs {
		w.at[v] = fmt.Sprintf("%%arg%d", i)
		args[i] = fmt.Sprintf("%%arg%d: %s%s", i, Tensor(v.Type),
			attributes(aliased(g, into[v.Name]), w.memory(hosted[v])))
	}
	results, types := make([]string, len(g.Results)), make([]string, len(g.Results))
	for i, v := range g.Results {
		types[i] = Tensor(v.Type)
		results[i] = types[i] + attributes(w.memory(hosted[v]))
	}
	w.Line("func.func @main(%s) -> (%s) {", strings.Join(args, ", "), strings.Join(results, ", "))
	w.indent++
	w.ops(g)
	names, _ := Spell(lists.Map(g.Results, w.Use))
	w.Line("return %s : %s", names, strings.Join(types, ", "))
	w.indent--
	w.Line("}")
	w.identities()
	w.indent--
	w.Line("}")
	if w.err != nil {
		return "", diag.New(diag.GraphInvalid, "graph %s cannot be lowered: %v", g.Name, w.err)
	}
	return w.aliases() + w.b.String(), nil
}

// attributes lists the attributes of an argument or result, without the empty ones.
func attributes(list ...string) string {
	list = slices.DeleteFunc(list, func(a string) bool { return a == "" })
	if len(list) == 0 {
		return ""
	}
	return " {" + strings.Join(list, ", ") + "}"
}

// memory is the attribute of a value in the host's memory.
func (w *Writer) memory(hosted bool) string {
	if !hosted || w.Target.HostMemory() == "" {
		return ""
	}
	return fmt.Sprintf("mhlo.memory_kind = %q", w.Target.HostMemory())
}

// aliased is the attribute of a donated argument, whose buffer a result takes; "" if none does.
func aliased(g *ir.Graph, result string) string {
	at := slices.IndexFunc(g.Results, func(v *ir.Value) bool { return v.Name == result })
	if result == "" || at < 0 {
		return ""
	}
	return fmt.Sprintf("tf.aliasing_output = %d : i32", at)
}

// ops prints the operations of a graph whose inputs have names already.
func (w *Writer) ops(g *ir.Graph) {
	for _, op := range g.Ops {
		if op.Kind == "repeat" {
			w.repeat(op)
		} else {
			w.op(op)
		}
	}
}

// op prints one operation.
func (w *Writer) op(op *ir.Op) {
	rule := w.rule(op)
	if rule == nil {
		w.Fail("there is no rule for %s", op.Kind)
		return
	}
	if w.Target.Named() {
		w.name = Name{op.Tag, op.Kind, ir.Names(op.Out[0].Type.Dims)}.String()
		defer func() { w.name = "" }()
	}
	for i, v := range rule(w, op, lists.Map(op.In, w.Use)) {
		if !v.Type.Shape().Equal(op.Out[i].Type.Shape()) {
			w.Fail("%s became %s, not %s", op.Kind, v.Type, op.Out[i].Type)
		}
		w.at[op.Out[i]] = v.Name
	}
}

// rule finds what prints an operation: the kernel that applies, or the plain rule.
func (w *Writer) rule(op *ir.Op) Rule {
	if why := unlowered(op); why != "" {
		w.Fail("%s", why)
		return nil
	}
	if k := w.table.Pick(w.Target, op); k != nil {
		return k.Print
	}
	return w.table.Rules[op.Kind]
}

// unlowered says why an operation cannot be printed: quantized matmuls are lowered to quantize and
// block_dot first.
func unlowered(op *ir.Op) string {
	if op.Kind == "block_dw" {
		return "block_dw is not lowered: call ir.LowerQuantized first, which makes a block_dot of it"
	}
	key := map[string]string{"linear": "fprop", "linear_dx": "dgrad", "linear_dw": "wgrad",
		"dispatch": ir.Payload}[op.Kind]
	if f := op.Attrs.Text(key); key != "" && f != "" {
		return op.Kind + " asks for " + f + " and is not lowered: call ir.LowerQuantized first"
	}
	return ""
}

// repeat prints a loop. XLA wants loops closed, so that everything the body reads is part of the
// loop's state: the round, carries, stacks, invariants, stacked results.
func (w *Writer) repeat(op *ir.Op) {
	l, carries := op.Loop(), len(op.Loop().Carries)
	index := ir.Type{Elem: indexType}
	state := []Val{w.Constant(index, 0)}
	state = append(state, lists.Map(op.In, w.Use)...)
	for i, v := range op.Out[carries:] {
		state = append(state, w.unwritten(l, v.Type, i, state[1:1+carries]))
	}
	// The loop's region has names of its own for its state.
	inner, heads := make([]Val, len(state)), make([]string, len(state))
	for i, s := range state {
		inner[i] = &Value{w.Fresh(), s.Type}
		heads[i] = inner[i].Name + " = " + s.Name
	}
	loop := w.Fresh()
	_, types := Spell(state)
	w.Line("%s:%d = stablehlo.while(%s) : %s", loop, len(state), List(heads), types)
	w.indent++
	w.Line("cond {")
	w.indent++
	limit := w.Constant(index, float64(l.N))
	w.Line("stablehlo.return %s : tensor<i1>", w.Compare("LT", inner[0], limit).Name)
	w.indent--
	w.Line("} do {")
	w.indent++
	at := inner[0]
	if l.Reverse {
		at = w.Elementwise("subtract", w.Constant(index, float64(l.N-1)), at)
	}
	w.Line("stablehlo.return %s : %s", List(w.body(l, inner, at)), types)
	w.indent--
	w.Line("}")
	w.indent--
	// Results are the last carries and the stacked results: arguments between them stay unused.
	for i, v := range op.Out {
		k := 1 + i
		if i >= carries {
			k += len(op.In) - carries
		}
		w.at[v] = fmt.Sprintf("%s#%d", loop, k)
	}
}

// unwritten is what the nth stack holds before the first round. Each round reads the stacks of the
// loop's arguments only and writes the whole slice of its own index, and there are as many rounds
// as slices: after the loop nothing of it is left.
//
// Its operands, what the loop begins with, are not read: they keep XLA from allocating the stack
// long before the loop, while other things still need memory, such as the gathered embedding (a
// forward stage of llama3.2-3b on RTX PRO 6000 had 1.02 GB of temp instead of 0.70). The number
// keeps calls of one shape from becoming one, of which the loop would need copies.
//
// What a backward loop stacks, gradients, begins as zeros everywhere. Uninitialized, without such
// operands, they cost a step of mistral-7b (8 B200, fsdp with zero 1, all recomputed) 10.57 GB of
// temp instead of 6.88.
func (w *Writer) unwritten(l ir.Loop, t ir.Type, n int, carries []Val) Val {
	if l.Reverse || !w.Target.UninitializedStacks() {
		return w.Constant(t, 0)
	}
	numbered := fmt.Sprintf(") {api_version = 1 : i32, backend_config = \"%d\"}", n)
	return w.Apply(t, "stablehlo.custom_call @AllocateBuffer(", numbered, carries...)
}

// body prints one round: slices of the stacks, the body, and updates of the stacked results.
func (w *Writer) body(l ir.Loop, inner []Val, at Val) []string {
	carries := len(l.Carries)
	for i, v := range l.Body.Inputs {
		s := inner[1+i]
		if l.IsStack(i) {
			stack := s
			s = w.Reshape(w.dynamicSlice(s, s.Type.Dims[0].Name, at, 1), v.Type)
			w.slices[s.Name] = Slice{stack, at}
		}
		w.at[v] = s.Name
	}
	outside := w.places
	w.places = placesOf(l, inner[1+len(l.In):], at)
	// What Once printed outside is not visible to a while body, and the other way round.
	outer := w.cse
	w.cse = map[string]Val{}
	w.ops(l.Body)
	w.cse = outer
	made := w.places
	w.places = outside
	one := w.Constant(at.Type, 1)
	next := []string{w.Elementwise("add", inner[0], one).Name}
	for _, v := range l.Body.Results[:carries] {
		next = append(next, w.Use(v).Name)
	}
	for _, s := range inner[1+carries : 1+len(l.In)] {
		next = append(next, s.Name)
	}
	for i, v := range l.Body.Results[carries:] {
		stack := inner[1+len(l.In)+i]
		if slot := made[v]; slot != nil && slot.After != nil {
			next = append(next, slot.After.Name)
			continue
		}
		next = append(next, w.updateSlice(stack, w.Use(v), at).Name)
	}
	return next
}

// placesOf are the places of a body's results in their stacks, of results that go into one stack.
func placesOf(l ir.Loop, stacks []Val, at Val) map[*ir.Value]*Slot {
	list, seen, results := map[*ir.Value]*Slot{}, map[*ir.Value]bool{}, l.Body.Results
	for i, v := range results[len(l.Carries):] {
		if delete(list, v); !seen[v] {
			list[v] = &Slot{Slice: Slice{stacks[i], at}, Alone: true, Fused: true}
		}
		seen[v] = true
	}
	for _, v := range results[:len(l.Carries)] {
		if list[v] != nil {
			list[v].Alone, list[v].Fused = false, false
		}
	}
	for _, op := range l.Body.Ops {
		for _, v := range op.In {
			if list[v] != nil {
				list[v].Alone, list[v].Fused = false, list[v].Fused && op.Elementwise()
			}
		}
	}
	return list
}

// updateSlice writes one round's value [...] into a stack [layer, ...].
func (w *Writer) updateSlice(stack, v, at Val) Val {
	starts := w.starts(stack.Type, stack.Type.Dims[0].Name, at)
	one := w.Reshape(v, ir.Type{Dims: append([]ir.Dim{{Name: ir.Layer, Size: 1}}, v.Type.Dims...)})
	in := append([]Val{stack, one}, starts...)
	return w.Apply(stack.Type, "stablehlo.dynamic_update_slice ", "", in...)
}

// starts are the start indices of a slice along one dimension.
func (w *Writer) starts(t ir.Type, dim string, at Val) []Val {
	starts := slices.Repeat([]Val{w.Constant(at.Type, 0)}, len(t.Dims))
	starts[t.Index(dim)] = at
	return starts
}

// dynamicSlice takes size elements of a dimension from an index that the program computes.
func (w *Writer) dynamicSlice(x Val, dim string, at Val, size int64) Val {
	t := ir.Type{Elem: x.Type.Elem, Dims: slices.Clone(x.Type.Dims)}
	t.Dims[t.Index(dim)].Size = size
	sizes := ", sizes = [" + List(t.Shape().Dims) + "]"
	return w.Apply(t, "stablehlo.dynamic_slice ", sizes, append([]Val{x}, w.starts(t, dim, at)...)...)
}

// A Name says of which operation an instruction is. The compiler keeps names, as XLA's op_name.
type Name struct {
	Tag  ir.Tag
	Kind string
	Dims []string // of the operation's first result
}

// String writes the name as tag/kind/dims.
func (n Name) String() string {
	return strings.Join([]string{string(n.Tag), n.Kind, strings.Join(n.Dims, ",")}, "/")
}

// ParseName reads the name of a compiled instruction, which may be behind names of loops; false if
// it has no name.
func ParseName(text string) (n Name, ok bool) {
	parts := strings.Split(text, "/")
	if len(parts) < 3 {
		return n, false
	}
	parts = parts[len(parts)-3:]
	return Name{ir.Tag(parts[0]), parts[1], strings.Split(parts[2], ",")}, true
}
