package aten

import (
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/ir"
)

// productRules multiply matrices and sum.
var productRules = map[string]rule{
	"aten.linear.default": sole(func(m *maker, n *node) *tensor {
		return m.linear(n, n.value("input"), m.permuted(n.value("weight"), []int{1, 0}), "bias")
	}),
	"aten.addmm.default": sole(func(m *maker, n *node) *tensor {
		if n.float("alpha", 1) != 1 || n.float("beta", 1) != 1 {
			return m.addedTo(n, m.matmul(n.value("mat1"), n.value("mat2")))
		}
		return m.linear(n, n.value("mat1"), n.value("mat2"), "self")
	}),
	"aten.matmul.default": sole(func(m *maker, n *node) *tensor {
		return m.matmul(n.value("self"), n.value("other"))
	}),
	"aten.bmm.default": sole(func(m *maker, n *node) *tensor {
		return m.matmul(n.value("self"), n.value("mat2"))
	}),
	"aten.mm.default": sole(func(m *maker, n *node) *tensor {
		return m.matmul(n.value("self"), n.value("mat2"))
	}),
	"aten.embedding.default": sole(func(m *maker, n *node) *tensor {
		if n.bool("scale_grad_by_freq", false) || n.bool("sparse", false) {
			panic(refusal("an embedding with scale_grad_by_freq or sparse gradients"))
		}
		ids, table := n.value("indices"), m.whole(m.whole(n.value("weight"), 0), 1)
		if len(ids.axes) > 1 && ids.token {
			m.dims.wish(table.axes[0].dims[0], ir.Vocab)
		}
		m.dims.wish(table.axes[1].dims[0], ir.EmbedDim)
		rows, cols := table.axes[0].dims[0], table.axes[1].dims[0]
		v := m.b.Transpose(table.v, m.name(rows), m.name(cols))
		axes := append(slices.Clone(ids.axes), table.axes[1])
		out := m.b.Embedding(ids.v, v)
		if skip := n.int("padding_idx", -1); skip >= 0 { // a row that is not trained
			pad := m.b.Compare("eq", ids.v, m.b.Fill(ir.Type{Elem: ids.v.Type.Elem}, float64(skip)))
			out = m.b.Select(pad, m.b.StopGradient(out), out)
		}
		return m.tensor(out, ids.hidden, axes...)
	}),
	"aten.conv2d.default": sole(patches),
	"aten.sum.dim_IntList": sole(func(m *maker, n *node) *tensor {
		return m.reduced(n, false)
	}),
	"aten.mean.dim":     sole(func(m *maker, n *node) *tensor { return m.reduced(n, true) }),
	"aten.sum.default":  sole(func(m *maker, n *node) *tensor { return m.reduced(n, false) }),
	"aten.mean.default": sole(func(m *maker, n *node) *tensor { return m.reduced(n, true) }),
	"aten.softmax.int": sole(func(m *maker, n *node) *tensor {
		x := n.value("self")
		i := x.at(n.int("dim", -1))
		if to, ok := n.dtype("dtype"); ok {
			x = m.cast(x, to)
		}
		from, last := x, i == len(x.axes)-1
		x = m.whole(x, i)
		out := x.with(m.b.Softmax(x.v, m.name(x.axes[i].dims[0])))
		return out.step(from, func(s *scores) bool {
			ok := last && s.stage == multiplied
			s.stage = weighed
			return ok
		})
	}),
}

// linear multiplies x [..., in] by w [in, out] and adds a bias [out].
func (m *maker) linear(n *node, x, w *tensor, bias string) *tensor {
	last := len(x.axes) - 1
	x, w = m.match(x, w, last, 0)
	if m.tag(n.path()) == ir.MLP { // embed wins where the two are one
		m.wishes(w, ir.MLPDim, ir.MLPDim)
	}
	y := m.contract(x, w, [][2]int{{last, 0}}, nil, true)
	axes := append(slices.Clone(x.axes[:last]), y.second[1])
	out := m.tensor(y.v, x.hidden, axes...)
	if n.has(bias) {
		out = m.binary(out, n.value(bias), m.b.Add)
	}
	if m.tag(n.path()) == ir.Router {
		weight, _ := n.Arg("weight")
		ref, _ := weight.(pt2.Ref)
		m.router = router{out, m.inputs[ref].Name}
	}
	return out
}

// A contraction is the value of a product, and the axes of its operands as they are in it.
type contraction struct {
	v             *ir.Value
	first, second []axis
	hidden        []dim
}

// contract sums over pairs of axes whose dimensions were matched; axes of both that are not summed
// go side by side if they are paired in batch, and are kept apart otherwise.
func (m *maker) contract(x, y *tensor, over, batch [][2]int, weight bool) contraction {
	var summed, shared []dim
	for _, p := range over {
		summed = append(summed, x.axes[p[0]].dims...)
	}
	for _, p := range batch {
		shared = append(shared, x.axes[p[0]].dims...)
	}
	apart := false // tokens of one sequence meet each other
	for _, d := range y.dims() {
		if slices.Contains(summed, d) || slices.Contains(shared, d) ||
			!slices.Contains(x.dims(), d) && !slices.Contains(x.hidden, d) {
			continue
		}
		if m.segments != nil && m.dims.wanted(d) == ir.Seq {
			apart = true
		}
		y = m.swap(y, d, m.fresh("other"+m.dims.all[d].key, m.size(d), d))
	}
	if e, o := x.v.Type.Elem, y.v.Type.Elem; e != o {
		to := wider(e, o)
		x, y = x.with(m.b.Convert(x.v, to)), y.with(m.b.Convert(y.v, to))
	}
	c := contraction{first: x.axes, second: y.axes}
	c.hidden = append(slices.Clone(x.hidden), y.hidden...)
	switch {
	case len(summed) == 0:
		all, _ := union(x, y)
		if len(all) > len(x.v.Type.Dims) && len(all) > len(y.v.Type.Dims) {
			x = m.spread(x, all)
		}
		c.v = m.b.Mul(x.v, y.v)
	case weight:
		c.v = m.b.LinearIn(x.v, y.v, m.matmulType)
	default:
		c.v = m.b.Dot(x.v, y.v, m.names(summed)...)
	}
	if apart {
		m.mixed[c.v] = m.node
	}
	return c
}

// matmul multiplies the matrices of the last two axes; axes before them go side by side.
func (m *maker) matmul(x, y *tensor) *tensor {
	if len(x.axes) == 0 || len(y.axes) == 0 {
		panic(refusal("a matrix without axes"))
	}
	if len(x.axes) == 1 { // a row
		out := m.matmul(m.unsqueezed(x, 0), y)
		return m.withoutAxis(out, len(out.axes)-min(2, len(y.axes)))
	}
	if len(y.axes) == 1 { // a column
		out := m.matmul(x, m.unsqueezed(y, 1))
		return m.withoutAxis(out, len(out.axes)-1)
	}
	if y.param && len(y.axes) == 2 {
		last := len(x.axes) - 1
		x, y = m.match(x, y, last, 0)
		c := m.contract(x, y, [][2]int{{last, 0}}, nil, true)
		return m.tensor(c.v, c.hidden, append(slices.Clone(x.axes[:last]), c.second[1])...)
	}
	rank := max(len(x.axes), len(y.axes))
	letters := func(t *tensor, a, b byte) string {
		var s strings.Builder
		for i := rank - len(t.axes); i < rank-2; i++ {
			s.WriteByte('A' + byte(i))
		}
		return s.String() + string([]byte{a, b})
	}
	lead := letters(&tensor{axes: make([]axis, rank)}, 'i', 'k')
	return m.einsum(letters(x, 'i', 'j'), letters(y, 'j', 'k'), lead, x, y)
}

// reduced sums over axes, or takes their mean.
func (m *maker) reduced(n *node, mean bool) *tensor {
	x := n.number("self")
	if to, ok := n.dtype("dtype"); ok {
		x = m.cast(x, to)
	}
	over, factor := []dim{}, 1.0
	drop := map[int]bool{}
	list := n.ints("dim")
	for i := range x.axes {
		if len(n.ints("dim")) == 0 { // all of them
			list = append(list, int64(i))
		}
	}
	for _, d := range list {
		i := x.at(d)
		drop[i] = true
		over = append(over, x.axes[i].dims...)
		if repeated := len(x.axes[i].dims) == 0; repeated != mean {
			factor *= float64(x.axes[i].size)
		}
	}
	if mean {
		factor = 1 / factor
	}
	v := x.v
	if len(over) > 0 {
		v = m.b.Sum(v, m.names(over)...)
	}
	var axes []axis
	for i, a := range x.axes {
		switch {
		case !drop[i]:
			axes = append(axes, a)
		case n.bool("keepdim", false):
			axes = append(axes, axis{size: 1})
		}
	}
	out := m.scaled(m.tensor(v, x.hidden, axes...), factor)
	if last := len(x.axes) - 1; mean && len(drop) == 1 && drop[last] && n.bool("keepdim", false) {
		out = out.as(x.norm, squared, averaged)
	}
	return out
}

// patches is a convolution whose patches do not overlap: a linear of each patch.
func patches(m *maker, n *node) *tensor {
	x, w := n.value("input"), n.value("weight")
	stride, pad := n.ints("stride"), n.ints("padding")
	kernel := w.sizes()[2:]
	padded := slices.ContainsFunc(pad, func(p int64) bool { return p != 0 })
	if !slices.Equal(stride, kernel) || padded || n.int("groups", 1) != 1 {
		panic(refusal("a convolution of patches that overlap"))
	}
	s := x.sizes()
	out := n.out(0)
	if s[2] != out[2]*kernel[0] || s[3] != out[3]*kernel[1] {
		panic(refusal("a convolution of patches that do not fit the picture"))
	}
	x = m.viewed(x, []int64{s[0], s[1], out[2], kernel[0], out[3], kernel[1]})
	y := m.einsum("bcipjq", "ocpq", "boij", x, w)
	if n.has("bias") {
		bias := n.value("bias")
		y = m.binary(y, m.viewed(bias, []int64{bias.axes[0].size, 1, 1}), m.b.Add)
	}
	return y
}

// wishes names the dimension of an axis that is one dimension.
func (m *maker) wishes(t *tensor, names ...string) {
	for i, name := range names {
		if name != "" && len(t.axes[i].dims) == 1 {
			m.dims.wish(t.axes[i].dims[0], name)
		}
	}
}

// called gives the dimensions of a tensor names that an operation demands, and puts them in the
// order of the axes listed.
func (m *maker) called(t *tensor, order []int, names []string) *ir.Value {
	v := t.v
	var list []dim
	for _, i := range order {
		if len(t.axes[i].dims) != 1 {
			panic(refusal(fmt.Sprintf("axis %d is no single dimension", i)))
		}
		list = append(list, t.axes[i].dims[0])
	}
	v = m.b.Transpose(v, m.names(list)...)
	for k, d := range list {
		if names[k] != "" && m.name(d) != names[k] {
			v = m.b.Rename(v, m.name(d), names[k])
		}
	}
	return v
}
