package aten

import (
	"slices"
	"strings"
)

// einsumRules multiply vectors, matrices and more.
var einsumRules = map[string]rule{
	"aten.einsum.default": sole(einsum),
	"aten.dot.default":    letters("self", "tensor", "i", "i", ""),
	"aten.vdot.default":   letters("self", "other", "i", "i", ""),
	"aten.mv.default":     letters("self", "vec", "ij", "j", "i"),
	"aten.outer.default":  letters("self", "vec2", "i", "j", "ij"),
	"aten.ger.default":    letters("self", "vec2", "i", "j", "ij"),
	"aten.baddbmm.default": sole(func(m *maker, n *node) *tensor {
		return m.addedTo(n, m.matmul(n.value("batch1"), n.value("batch2")))
	}),
	"aten.addbmm.default": sole(func(m *maker, n *node) *tensor {
		y := m.einsum("bij", "bjk", "ik", n.value("batch1"), n.value("batch2"))
		return m.addedTo(n, y)
	}),
	"aten.addmv.default": sole(func(m *maker, n *node) *tensor {
		return m.addedTo(n, m.matmul(n.value("mat"), n.value("vec")))
	}),
	"aten.addr.default": sole(func(m *maker, n *node) *tensor {
		return m.addedTo(n, m.einsum("i", "j", "ij", n.value("vec1"), n.value("vec2")))
	}),
}

// letters is a rule for a product of two tensors whose axes are letters.
func letters(first, second, a, b, out string) rule {
	return sole(func(m *maker, n *node) *tensor {
		return m.einsum(a, b, out, n.value(first), n.value(second))
	})
}

// addedTo is beta·self + alpha·y.
func (m *maker) addedTo(n *node, y *tensor) *tensor {
	y = m.scaled(y, n.float("alpha", 1))
	beta := n.float("beta", 1)
	if beta == 0 {
		return m.expanded(y, n.out(0))
	}
	return m.binary(m.scaled(n.value("self"), beta), y, m.b.Add)
}

// withoutAxis takes away axis i, of size 1.
func (m *maker) withoutAxis(x *tensor, i int) *tensor {
	x = m.squeezed(x, i)
	return m.tensor(x.v, x.hidden, slices.Delete(slices.Clone(x.axes), i, i+1)...)
}

// einsum takes the equation of any number of operands, from the left.
func einsum(m *maker, n *node) *tensor {
	equation := strings.ReplaceAll(n.text("equation", ""), " ", "")
	list := n.tensors("tensors")
	in, out, given := strings.Cut(equation, "->")
	parts := strings.Split(in, ",")
	if len(parts) != len(list) {
		panic(refusal("einsum " + equation))
	}
	for k := range list {
		list[k] = m.real(list[k])
	}
	out = unfold(parts, out, given, list)
	for k, p := range parts {
		if len(p) != len(list[k].axes) {
			panic(refusal("einsum " + equation))
		}
	}
	for len(list) > 1 {
		later := out + strings.Join(parts[2:], "")
		x, a := m.alone(list[0], parts[0], parts[1]+later)
		y, b := m.alone(list[1], parts[1], parts[0]+later)
		to := out
		if len(list) > 2 { // what later operands or the result have
			to = ""
			for _, c := range a + b {
				if strings.ContainsRune(later, c) && !strings.ContainsRune(to, c) {
					to += string(c)
				}
			}
		}
		outer := m.key
		if len(list) > 2 {
			m.key += to + ":"
		}
		list[1], parts[1] = m.einsum(a, b, to, x, y), to
		m.key = outer
		list, parts = list[1:], parts[1:]
	}
	if parts[0] == out {
		return list[0]
	}
	x, a := m.alone(list[0], parts[0], out)
	order := make([]int, len(out))
	for k := range out {
		order[k] = strings.IndexByte(a, out[k])
	}
	return m.permuted(x, order)
}

// unfold gives the axes of an ellipsis letters, in parts and in the result, and writes the result
// out that is not given: the letters that stand once, in their order.
func unfold(parts []string, out string, given bool, list []*tensor) string {
	const spare = "\x01\x02\x03\x04\x05\x06\x07\x08"
	most := 0
	for k, p := range parts {
		if strings.Contains(p, "...") {
			most = max(most, len(list[k].axes)-len(p)+3)
		}
	}
	if most > len(spare) {
		panic(refusal("einsum of too many axes"))
	}
	var once strings.Builder
	all := strings.ReplaceAll(strings.Join(parts, ""), "...", "")
	for _, c := range all {
		if strings.Count(all, string(c)) == 1 {
			once.WriteRune(c)
		}
	}
	for k, p := range parts {
		if n := len(list[k].axes) - len(p) + 3; strings.Contains(p, "...") && n >= 0 {
			parts[k] = strings.Replace(p, "...", spare[most-n:most], 1)
		}
	}
	if !given {
		sorted := []byte(once.String())
		slices.Sort(sorted)
		return spare[:most] + string(sorted)
	}
	return strings.Replace(out, "...", spare[:most], 1)
}

// alone sums over the axes of an operand that no other and no result has.
func (m *maker) alone(x *tensor, letters, others string) (*tensor, string) {
	var list []int
	var left strings.Builder
	for i, c := range letters {
		if strings.IndexByte(letters, letters[i]) != i {
			panic(refusal("einsum of a diagonal"))
		}
		if strings.ContainsRune(others, c) {
			left.WriteRune(c)
		} else {
			list = append(list, i)
		}
	}
	if len(list) == 0 {
		return x, letters
	}
	return m.summed(x, list, false), left.String()
}

// einsum multiplies tensors whose axes are letters, and sums over those that out does not have.
func (m *maker) einsum(a, b, out string, x, y *tensor) *tensor {
	if t := m.weighted(a, b, out, x, y); t != nil {
		return t
	}
	for i, c := range b {
		if letterOf(a, c) < 0 && letterOf(out, c) < 0 {
			panic(refusal("einsum that sums over an axis of one operand"))
		}
		if letterOf(b, c) != i {
			panic(refusal("einsum of a diagonal"))
		}
	}
	first, second := x, y
	var over, batch [][2]int
	for i := range a {
		if strings.IndexByte(a, a[i]) != i {
			panic(refusal("einsum of a diagonal"))
		}
		j := strings.IndexByte(b, a[i])
		if j < 0 {
			if strings.IndexByte(out, a[i]) < 0 {
				panic(refusal("einsum that sums over an axis of one operand"))
			}
			continue
		}
		if x.axes[i].size == 1 && y.axes[j].size > 1 {
			x = m.squeezed(x, i)
		}
		if y.axes[j].size == 1 && x.axes[i].size > 1 {
			y = m.squeezed(y, j)
		}
		if len(x.axes[i].dims) > 0 && len(y.axes[j].dims) > 0 {
			x, y = m.match(x, y, i, j)
		}
		if strings.IndexByte(out, a[i]) >= 0 {
			batch = append(batch, [2]int{i, j})
			continue
		}
		if len(x.axes[i].dims) == 0 && x.axes[i].size > 1 || len(y.axes[j].dims) == 0 &&
			y.axes[j].size > 1 {
			x, y = m.match(m.whole(x, i), m.whole(y, j), i, j)
		}
		over = append(over, [2]int{i, j})
	}
	c := m.contract(x, y, over, batch, false)
	axes := make([]axis, len(out))
	for k := range out {
		if i := strings.IndexByte(a, out[k]); i >= 0 {
			axes[k] = c.first[i]
		}
		if j := strings.IndexByte(b, out[k]); j >= 0 && len(axes[k].dims) == 0 {
			if s := c.second[j]; len(s.dims) > 0 || s.size > axes[k].size {
				axes[k] = s
			}
		}
	}
	t := m.tensor(c.v, c.hidden, axes...)
	m.product(t, a, b, out, first, second)
	return t
}
