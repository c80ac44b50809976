package run

import (
	"fmt"
	"slices"
	"strings"
)

// shapeRules move elements, or read and write memory.
var shapeRules = map[string]rule{
	"tt.get_program_id": func(m *machine, o *op, _ []*block) ([]*block, error) {
		axis := strings.Index("xyz", strings.TrimSpace(o.text)[:1])
		return []*block{{typ: typ{elem: "i32"}, ints: []int64{m.place[axis]}}}, nil
	},
	"tt.make_range": func(_ *machine, o *op, _ []*block) ([]*block, error) {
		start, _ := o.attr("start")
		out := o.out[0].block()
		for i := range out.ints {
			out.ints[i] = int64(start + i)
		}
		return []*block{out}, nil
	},
	"tt.splat":       func(_ *machine, o *op, in []*block) ([]*block, error) { return spread(o, in) },
	"tt.broadcast":   func(_ *machine, o *op, in []*block) ([]*block, error) { return spread(o, in) },
	"tt.expand_dims": reshaped,
	"tt.reshape":     reshaped,
	"tt.trans": func(_ *machine, o *op, in []*block) ([]*block, error) {
		order := o.list("order")
		if len(order) != len(in[0].shape) {
			return nil, fmt.Errorf("order %v of %v", order, in[0].shape)
		}
		return []*block{in[0].trans(order)}, nil
	},
	"tt.split": func(_ *machine, _ *op, in []*block) ([]*block, error) {
		n := len(in[0].shape) - 1
		half := func(k int) *block {
			return in[0].take(in[0].shape[:n], func(i int) int { return 2*i + k })
		}
		return []*block{half(0), half(1)}, nil
	},
	"tt.join": func(_ *machine, o *op, in []*block) ([]*block, error) {
		out := o.out[0].block()
		for i := range out.count() {
			out.decode(i, in[i%2].encode(i/2))
		}
		return []*block{out}, nil
	},
	"tt.addptr": func(_ *machine, _ *op, in []*block) ([]*block, error) {
		out := in[0].take(in[0].shape, func(i int) int { return i })
		for i, by := range in[1].ints {
			out.ints[i] += by
		}
		return []*block{out}, nil
	},
	"tt.load": func(m *machine, _ *op, in []*block) ([]*block, error) {
		in = append(in, nil, nil)
		out, err := m.load(in[0], in[1], in[2], typ{in[0].elem, "", in[0].shape})
		return []*block{out}, err
	},
	"tt.make_tensor_descriptor": describe,
	"tt.descriptor_load": func(m *machine, o *op, in []*block) ([]*block, error) {
		out, d := o.out[0].block(), in[0].desc
		err := d.places(in[1:], out.shape, func(i int, at int64, inside bool) error {
			if !inside {
				return nil
			}
			u, err := in[0].array.read(at, m.program)
			out.decode(i, u)
			return err
		})
		return []*block{out}, err
	},
	"tt.descriptor_store": func(m *machine, _ *op, in []*block) ([]*block, error) {
		v := in[len(in)-1]
		return nil, in[0].desc.places(in[1:len(in)-1], v.shape, func(i int, at int64, inside bool) error {
			if !inside {
				return nil
			}
			return in[0].array.write(at, v.encode(i), m.program)
		})
	},
	"tt.store": func(m *machine, _ *op, in []*block) ([]*block, error) {
		in = append(in, nil)
		return nil, m.store(in[0], in[1], in[2])
	},
}

func spread(o *op, in []*block) ([]*block, error) {
	shape := o.out[0].shape
	for d, n := range in[0].shape {
		if len(shape) != len(in[0].shape) || n != 1 && n != shape[d] {
			return nil, fmt.Errorf("%v does not become %v", in[0].shape, shape)
		}
	}
	return []*block{in[0].broadcast(shape)}, nil
}

func reshaped(_ *machine, o *op, in []*block) ([]*block, error) {
	if o.out[0].count() != in[0].count() {
		return nil, fmt.Errorf("%v does not become %v", in[0].shape, o.out[0].shape)
	}
	return []*block{in[0].reshape(slices.Clone(o.out[0].shape))}, nil
}

// describe makes a descriptor of pointer, sizes and strides.
func describe(_ *machine, _ *op, in []*block) ([]*block, error) {
	n := len(in) / 2
	d := &descriptor{at: in[0].ints[0]}
	for i := range n {
		d.sizes = append(d.sizes, in[1+i].ints[0])
		d.strides = append(d.strides, in[1+n+i].ints[0])
	}
	return []*block{{typ: typ{elem: in[0].elem, kind: "desc"}, array: in[0].array, desc: d}}, nil
}
