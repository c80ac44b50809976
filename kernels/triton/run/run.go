package run

import (
	"fmt"

	"github.com/deepwell/deepwell/kernels/triton"
)

// maxSteps ends the loop of a text that has none.
const maxSteps = 1 << 20

// A machine executes one kernel.
type machine struct {
	place   [3]int64 // of the program
	program int32    // its number, from 1
	values  map[string]*block
	rules   map[string]rule
}

// Kernel runs all programs of a kernel on arrays, given as the bytes of its arguments in their
// order. Results are written in place; an error names the line and the program.
func Kernel(k *triton.Kernel, arrays [][]byte) error {
	pointers, body, err := parse(k.Text)
	if err != nil {
		return fmt.Errorf("kernel %s: %w", k.Name, err)
	}
	if len(pointers) != len(k.Args) || len(arrays) != len(k.Args) {
		return fmt.Errorf("kernel %s: %d pointers, %d arguments, %d arrays", k.Name, len(pointers),
			len(k.Args), len(arrays))
	}
	list := make([]*array, len(arrays))
	for i, a := range k.Args {
		list[i] = &array{name: a.Name, elem: string(a.Elem), data: arrays[i], result: a.Result}
		n := typ{shape: a.Shape}.count()
		if int64(n) != list[i].size() {
			return fmt.Errorf("kernel %s: %s has %d elements, of %v", k.Name, a.Name,
				list[i].size(), a.Shape)
		}
		if a.Result {
			list[i].writer = make([]int32, n)
		}
		if a.InPlace != "" {
			list[i].kept, list[i].reader = true, map[int64]int32{}
			for k, from := range k.Args {
				if from.Name == a.InPlace && !from.Result {
					copy(list[i].data, arrays[k])
				}
			}
		}
	}
	m := &machine{rules: table()}
	for z := range k.Grid[2] {
		for y := range k.Grid[1] {
			for x := range k.Grid[0] {
				m.place = [3]int64{int64(x), int64(y), int64(z)}
				m.program++
				m.values = map[string]*block{}
				for i, name := range pointers {
					m.values[name] = &block{typ: typ{elem: list[i].elem, kind: "ptr"}, ints: []int64{0},
						array: list[i]}
				}
				if _, err := m.run(body); err != nil {
					return fmt.Errorf("kernel %s: program %v: %w", k.Name, m.place, err)
				}
			}
		}
	}
	return unwritten(k, list)
}

// unwritten names a result that has elements which no program wrote.
func unwritten(k *triton.Kernel, list []*array) error {
	for _, a := range list {
		for i, w := range a.writer {
			if w == 0 && !a.kept {
				return fmt.Errorf("kernel %s: nobody writes element %d of %s", k.Name, i, a.name)
			}
		}
	}
	return nil
}

// run executes the operations of a region and gives what its last one yields.
func (m *machine) run(body []*op) (yields []*block, err error) {
	for _, o := range body {
		in := make([]*block, len(o.args))
		for i, name := range o.args {
			if in[i] = m.values[name]; in[i] == nil {
				return nil, fmt.Errorf("line %d: %s has no value", o.line, name)
			}
		}
		switch o.name {
		case "tt.return":
			return nil, nil
		case "scf.yield", "tt.reduce.return":
			return in, nil
		}
		rule := m.rules[o.name]
		if rule == nil {
			return nil, fmt.Errorf("line %d: unknown operation %s", o.line, o.name)
		}
		out, err := rule(m, o, in)
		if err != nil {
			return nil, fmt.Errorf("line %d, %s: %w", o.line, o.name, err)
		}
		if len(out) != len(o.results) {
			return nil, fmt.Errorf("line %d, %s: %d results of %d", o.line, o.name, len(out), len(o.results))
		}
		for i, v := range out {
			m.values[o.results[i]] = v
		}
	}
	return nil, nil
}

// loop is scf.for.
func (m *machine) loop(o *op, in []*block) ([]*block, error) {
	from, to, by := in[0].ints[0], in[1].ints[0], in[2].ints[0]
	carried := in[3:]
	if by <= 0 || (to-from)/by > maxSteps {
		return nil, fmt.Errorf("from %d to %d by %d", from, to, by)
	}
	for n := from; n < to; n += by {
		m.values[o.params[0]] = &block{typ: in[0].typ, ints: []int64{n}}
		for i, v := range carried {
			m.values[o.params[1+i]] = v
		}
		out, err := m.run(o.regions[0])
		if err != nil {
			return nil, err
		}
		if len(out) != len(carried) {
			return nil, fmt.Errorf("%d values are carried and %d given", len(carried), len(out))
		}
		carried = out
	}
	return carried, nil
}

// reduce combines the halves of an axis until one element is left.
func (m *machine) reduce(o *op, in []*block) ([]*block, error) {
	axis, ok := o.attr("axis")
	if !ok || axis >= len(in[0].shape) {
		return nil, fmt.Errorf("there is no axis %d", axis)
	}
	v := in[0]
	for v.shape[axis] > 1 {
		if v.shape[axis]%2 != 0 {
			return nil, fmt.Errorf("axis %d of %v is no power of two", axis, v.shape)
		}
		x, y := v.halves(axis)
		m.values[o.params[0]], m.values[o.params[1]] = x, y
		out, err := m.run(o.regions[0])
		if err != nil {
			return nil, err
		}
		v = out[0]
	}
	return []*block{v.reshape(o.out[0].shape)}, nil
}

// branch is scf.if.
func (m *machine) branch(o *op, in []*block) ([]*block, error) {
	switch {
	case in[0].ints[0] != 0:
		return m.run(o.regions[0])
	case len(o.regions) > 1:
		return m.run(o.regions[1])
	}
	return nil, nil
}
