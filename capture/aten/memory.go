package aten

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/dtype"
)

// A variable is what a name of the program stands for: a tensor with memory of its own, or a view
// of another variable, whose memory it shares. A change through one of them is seen by all: it is
// put back into what the view was taken of, and other views are taken again when they are read.
type variable struct {
	now    *tensor
	seen   int // the version of the memory that now shows
	memory *memory
	of     *variable // what it is a view of; nil where the memory is its own
	how    *node     // the view
	which  int       // output of how
	key    string    // of the node how
}

// A memory is what variables share.
type memory struct {
	version int    // counts changes
	fixed   string // why it cannot be changed
	unsure  string // why it cannot be read
	region  int    // without gradients, where it was made; 0 outside of them
	// Lender is what this may be a view of or a copy, as its version lent was: strides decide, which
	// depend on how the exporter ran. Nothing may read one of them after a change of the other.
	lender *memory
	lent   int
}

// A lending says whether a result shares the memory of an argument.
type lending int

const (
	copies lending = iota
	lends          // always
	mayLend
)

// backs are the operators whose result always shares the memory of an argument, and how a part that
// was changed gets back into the whole; nil for no way back.
var backs map[string]func(m *maker, n *node, which int, whole, part *tensor) *tensor

func init() {
	type back = func(m *maker, n *node, which int, whole, part *tensor) *tensor
	itself := func(_ *maker, _ *node, _ int, _, part *tensor) *tensor { return part }
	regroup := func(m *maker, _ *node, _ int, whole, part *tensor) *tensor {
		return m.viewed(part, whole.sizes())
	}
	reorder := func(m *maker, n *node, _ int, whole, part *tensor) *tensor {
		order := n.order(whole)
		undo := make([]int, len(order))
		for i, j := range order {
			undo[j] = i
		}
		return m.permuted(part, undo)
	}
	chunked := func(m *maker, n *node, which int, whole, part *tensor) *tensor {
		i, from := whole.at(n.int("dim", 0)), int64(0)
		for k := range which {
			from += n.out(k)[i]
		}
		return m.put(whole, part, i, from, from+n.out(which)[i], 1)
	}
	backs = map[string]back{
		"aten.view.default": regroup, "aten._unsafe_view.default": regroup,
		"aten.unsqueeze.default": regroup, "aten.squeeze.dim": regroup, "aten.unflatten.int": regroup,
		"aten.squeeze.default": regroup, "aten.squeeze.dims": regroup, "aten.view_as.default": regroup,
		"aten.mT.default": reorder, "aten.mH.default": reorder, "aten.adjoint.default": reorder,
		"aten.numpy_T.default": reorder, "aten.swapaxes.default": reorder,
		"aten.swapdims.default": reorder, "aten.movedim.int": reorder, "aten.movedim.intlist": reorder,
		"aten.tensor_split.sections": chunked, "aten.tensor_split.indices": chunked,
		"aten.split.sizes": chunked, "aten.unsafe_chunk.default": chunked,
		"aten.unsafe_split.Tensor": chunked, "aten.unsafe_split_with_sizes.default": chunked,
		"aten.unbind.int": func(m *maker, n *node, which int, whole, part *tensor) *tensor {
			i, at := whole.at(n.int("dim", 0)), int64(which)
			return m.put(whole, m.unsqueezed(part, i), i, at, at+1, 1)
		},
		"aten.transpose.int": reorder, "aten.t.default": reorder, "aten.permute.default": reorder,
		"aten.chunk.default": chunked, "aten.split.Tensor": chunked,
		"aten.split_with_sizes.default": chunked,
		"aten.slice.Tensor": func(m *maker, n *node, _ int, whole, part *tensor) *tensor {
			i := whole.at(n.int("dim", 0))
			from, to := bounds(n, whole.axes[i].size)
			return m.put(whole, part, i, from, to, n.int("step", 1))
		},
		"aten.narrow.default": func(m *maker, n *node, _ int, whole, part *tensor) *tensor {
			i, from, to := n.taken(whole)
			return m.put(whole, part, i, from, to, 1)
		},
		"aten.select.int": func(m *maker, n *node, _ int, whole, part *tensor) *tensor {
			i, at := n.selected(whole)
			part = m.unsqueezed(part, i)
			return m.put(whole, part, i, at, at+1, 1)
		},
		"aten.positive.default": itself,
		"aten.alias.default":    itself, "aten.to.dtype": itself, "aten.to.dtype_layout": itself,
		"aten.to.device": itself, "aten.type_as.default": itself, "aten.float.default": itself,
		"aten.dropout.default": itself,
		"aten.expand.default":  nil, "aten.detach.default": nil, "aten.expand_as.default": nil,
		"aten.broadcast_to.default": nil, "aten.diagonal.default": nil,
	}
}

// lending tells what a node does with the memory of its first tensor.
func lendingOf(g *pt2.Graph, n *pt2.Node) lending {
	switch name, _, _ := strings.Cut(strings.TrimPrefix(n.Target, "aten."), "."); name {
	case "reshape", "flatten", "contiguous", "reshape_as", "ravel":
		return mayLend
	case "to", "type_as", "float": // give what is of the type already
		self, _ := selfOf(n)
		copied, _ := n.Arg("copy")
		if len(n.Outputs) != 1 || copied == true ||
			g.Values[string(self)].Type != g.Values[string(n.Outputs[0])].Type {
			return copies
		}
		return lends
	case "dropout":
		p, _ := n.Arg("p")
		if train, given := n.Arg("train"); p == 0.0 || p == int64(0) || given && train == false {
			return lends
		}
		return copies
	}
	if _, ok := backs[n.Target]; ok {
		return lends
	}
	return copies
}

// selfOf finds the tensor that a node views or changes.
func selfOf(n *pt2.Node) (pt2.Ref, bool) {
	name := "self"
	if n.Target == "aten.dropout.default" {
		name = "input"
	}
	a, _ := n.Arg(name)
	r, ok := a.(pt2.Ref)
	return r, ok
}

// inPlace reports whether an operator changes its argument: its name ends in an underscore.
func inPlace(target string) bool {
	parts := strings.Split(target, ".")
	return len(parts) == 3 && strings.HasSuffix(parts[1], "_") && !strings.HasSuffix(parts[1], "__")
}

// owned is a variable with memory of its own.
func (m *maker) owned(t *tensor) *variable {
	return &variable{now: t, memory: &memory{region: m.region}}
}

// bound gives the variable of an output of a node.
func (m *maker) bound(n *node, which int, t *tensor) *variable {
	self, ok := selfOf(n.Node)
	from := m.env[n.graph][self]
	if !ok || from == nil {
		return m.owned(t)
	}
	switch lendingOf(n.graph, n.Node) {
	case lends:
		return &variable{now: t, seen: from.memory.version, memory: from.memory, of: from, how: n,
			which: which, key: m.key}
	case mayLend:
		return m.borrowed(t, from.memory)
	}
	return m.owned(t)
}

// borrowed is a variable that may be a view of what has a memory, or a copy.
func (m *maker) borrowed(t *tensor, from *memory) *variable {
	v := m.owned(t)
	v.memory.lender, v.memory.lent = from, from.version
	return v
}

// current is what a variable holds now.
func (m *maker) current(v *variable) *tensor {
	for l := v.memory; l != nil; l = l.lender {
		if l.unsure != "" {
			panic(refusal(l.unsure))
		}
		if l.lender != nil && l.lender.version != l.lent {
			panic(refusal("a tensor that may be a copy or a view of what was changed since"))
		}
	}
	if v.seen == v.memory.version {
		return v.now
	}
	key := m.key
	defer func() { m.key = key }()
	m.key += fmt.Sprintf("again %s%d:", v.key, v.which)
	v.now, v.seen = m.rule(v.how.Target)(m, v.how)[v.which], v.memory.version
	return v.now
}

// assign changes what a variable holds, and all that it is a part of.
func (m *maker) assign(n *node, v *variable, to *tensor) {
	old := m.current(v)
	self, _ := selfOf(n.Node)
	switch t := n.graph.Values[string(self)].Type; {
	case v.memory.fixed != "":
		panic(refusal("a change of " + v.memory.fixed))
	case t.Kind() == dtype.Float && m.region != v.memory.region:
		panic(refusal("a change without gradients of what may have them"))
	case !slices.Equal(to.sizes(), old.sizes()):
		panic(refusal("a change of the shape"))
	default:
		to = m.cast(to, t)
	}
	key := m.key
	defer func() { m.key = key }()
	chain, values := []*variable{v}, []*tensor{to}
	for v.of != nil {
		back := backs[v.how.Target]
		if back == nil {
			panic(refusal("a change of what " + v.how.Target + " gives"))
		}
		m.key = fmt.Sprintf("%sinto %d:", key, len(chain))
		to = back(m, v.how, v.which, m.current(v.of), to)
		v = v.of
		chain, values = append(chain, v), append(values, to)
	}
	v.memory.version++
	for i, v := range chain {
		v.now, v.seen = values[i], v.memory.version
	}
	for l := v.memory.lender; l != nil; l = l.lender {
		l.unsure = "a tensor of which a copy or a view was changed"
	}
	v.memory.lender = nil
}

// put replaces a range of an axis.
func (m *maker) put(whole, part *tensor, i int, from, to, step int64) *tensor {
	n := whole.axes[i].size
	if from >= to {
		return whole
	}
	if step > 1 {
		if n%step != 0 || from >= step || (to-from+step-1)/step != n/step {
			panic(refusal("a slice whose step does not divide the size"))
		}
		rows := slices.Insert(whole.sizes(), i+1, step)
		rows[i] = n / step
		part = m.unsqueezed(part, i+1)
		return m.viewed(m.put(m.viewed(whole, rows), part, i+1, from, from+1, 1), whole.sizes())
	}
	var parts []*tensor
	if from > 0 {
		parts = append(parts, m.sliced(whole, i, 0, from, 1, "before"))
	}
	parts = append(parts, part)
	if to < n {
		parts = append(parts, m.sliced(whole, i, to, n, 1, "after"))
	}
	return m.joined(parts, i)
}

// cast gives a tensor the element type that the program knows by a name.
func (m *maker) cast(t *tensor, to dtype.DType) *tensor {
	if t.known == nil {
		if t.v.Type.Elem == m.elem(to) {
			return t
		}
		out := t.with(m.b.Convert(t.v, m.elem(to)))
		if t.twin != nil {
			out.twin = func() *tensor { return m.cast(t.twin(), to) }
		}
		return out.step(t, func(*scores) bool { return to.Kind() == dtype.Float })
	}
	out := &tensor{known: t.known, elem: to, axes: t.axes}
	switch {
	case to == dtype.Pred && t.elem != to:
		out.known = make([]float64, len(t.known))
		for i, x := range t.known {
			if x != 0 {
				out.known[i] = 1
			}
		}
	case to.Kind() != dtype.Float && t.elem.Kind() == dtype.Float:
		out.known = make([]float64, len(t.known))
		for i, x := range t.known {
			out.known[i] = math.Trunc(x)
		}
	}
	return out
}
