package replay

import (
	"slices"
)

// groupLists and groupIota give the same devices: 0 and 2, 1 and 3.
func groupLists() msg {
	return msg(nil).Bytes(87, msg(nil).Bytes(1, msg(nil).Packed(1, 0, 2)).
		Bytes(1, msg(nil).Packed(1, 1, 3)))
}

func groupIota() msg {
	return msg(nil).Bytes(92, msg(nil).Int(1, 2).Int(2, 2).Packed(3, 2, 2).Packed(4, 1, 0))
}

func groupOld() msg {
	return msg(nil).Bytes(49, msg(nil).Packed(1, 0, 2)).Bytes(49, msg(nil).Packed(1, 1, 3))
}

// partner is the other device of a group.
func partner(device int) int { return device ^ 2 }

// onDevices gives a matrix to each of four devices.
func onDevices(seed int, n int64) (list [][]float64) {
	for d := range 4 {
		values := counts(n)
		for i := range values {
			values[i] += float64(100*seed + 10*d)
		}
		list = append(list, values)
	}
	return list
}

// columns joins [rows, n] of the members of each device's group along dimension 1.
func columns(x [][]float64, n int) (out [][]float64) {
	for d := range x {
		a, b := x[min(d, partner(d))], x[max(d, partner(d))]
		var joint []float64
		for i := 0; i < len(a); i += n {
			joint = slices.Concat(joint, a[i:i+n], b[i:i+n])
		}
		out = append(out, joint)
	}
	return out
}

// sums adds the values of the members of each device's group.
func sums(x [][]float64) (out [][]float64) {
	for d := range x {
		sum := slices.Clone(x[d])
		for i := range sum {
			sum[i] += x[partner(d)][i]
		}
		out = append(out, sum)
	}
	return out
}

func (b *builder) adder(t elemType) int64 {
	c := b.computation("sum")
	s := arr(t, nil)
	return c.done(c.op("add", s, nil, c.param(0, s), c.param(1, s)))
}

// collectiveExamples exchange numbers of four devices in two groups.
func collectiveExamples() (list []example) {
	x, y := onDevices(1, 6), onDevices(2, 8)
	for name, groups := range map[string]msg{"lists": groupLists(), "iota": groupIota(),
		"old lists": groupOld()} {
		// Of two operands along dimension 1, in the layout that XLA:CPU gets wrong.
		b := newBuilder("gather, " + name)
		outs := tup(arr(typeF32, []int64{2, 6}, 0, 1), arr(typeF32, []int64{4, 4}))
		g := b.op("all-gather", outs, groups.Packed(14, 1).Int(26, 7), b.param(0, arr(typeF32,
			[]int64{2, 3}, 0, 1)), b.param(1, arr(typeF32, []int64{4, 2})))
		list = append(list, example{name: b.name, devices: 4, args: [][][]float64{x, y},
			code: b.returns(b.element(g, 0), b.element(g, 1)),
			want: [][][]float64{columns(x, 3), columns(y, 2)}})
	}
	slices.SortFunc(list, func(a, b example) int { return len(a.name) - len(b.name) })
	return append(list, scatterExample(x, y), reduceExample(x, y), startExample(x), permuteExample(x),
		exchangeExample(y))
}

// scatterExample is a reduce-scatter of two operands along dimension 1.
func scatterExample(x, y [][]float64) example {
	b := newBuilder("scatter")
	outs := tup(arr(typeF32, []int64{3, 1}), arr(typeF32, []int64{2, 2}, 0, 1))
	add := b.adder(typeF32)
	g := b.op("reduce-scatter", outs, groupLists().Packed(14, 1).Packed(38, add), b.param(0,
		arr(typeF32, []int64{3, 2})), b.param(1, arr(typeF32, []int64{2, 4}, 0, 1)))
	half := func(x [][]float64, n int) (out [][]float64) { // columns of [rows, n]
		for d, s := range sums(x) {
			var part []float64
			for i := 0; i < len(s); i += n {
				from := i + d/2*n/2
				part = append(part, s[from:from+n/2]...)
			}
			out = append(out, part)
		}
		return out
	}
	return example{name: b.name, devices: 4, code: b.returns(b.element(g, 0), b.element(g, 1)),
		args: [][][]float64{x, y}, want: [][][]float64{half(x, 2), half(y, 4)}}
}

// reduceExample is an all-reduce of two operands.
func reduceExample(x, y [][]float64) example {
	b := newBuilder("reduce")
	outs := tup(arr(typeF32, []int64{6}), arr(typeF32, []int64{2, 4}))
	add := b.adder(typeF32)
	g := b.op("all-reduce", outs, groupLists().Packed(38, add), b.param(0, outs.elems[0]),
		b.param(1, outs.elems[1]))
	return example{name: b.name, devices: 4, code: b.returns(b.element(g, 0), b.element(g, 1)),
		args: [][][]float64{x, y}, want: [][][]float64{sums(x), sums(y)}}
}

// startExample is the older asynchronous form of a gather and of a sum.
func startExample(x [][]float64) example {
	b := newBuilder("start and done")
	in, out := arr(typeF32, []int64{2, 3}), arr(typeF32, []int64{2, 6})
	p := b.param(0, in)
	gather := b.op("all-gather-start", tup(in, out), groupLists().Packed(14, 1), p)
	add := b.adder(typeF32)
	sum := b.op("all-reduce-start", in, groupLists().Packed(38, add), p)
	return example{name: b.name, devices: 4, args: [][][]float64{x},
		code: b.returns(b.op("all-gather-done", out, nil, gather), b.op("all-reduce-done", in, nil, sum)),
		want: [][][]float64{columns(x, 3), sums(x)}}
}

// permuteExample passes numbers around a ring.
func permuteExample(x [][]float64) example {
	b := newBuilder("permute")
	s := arr(typeF32, []int64{2, 3})
	var pairs msg
	for d := range int64(4) {
		pairs = pairs.Bytes(52, msg(nil).Int(1, d).Int(2, (d+1)%4))
	}
	v := b.op("collective-permute", s, pairs, b.param(0, s))
	return example{name: b.name, devices: 4, code: b.returns(v), args: [][][]float64{x},
		want: [][][]float64{{x[3], x[0], x[1], x[2]}}}
}

// exchangeExample is an all-to-all along dimension 1.
func exchangeExample(y [][]float64) example {
	b := newBuilder("exchange")
	s := arr(typeF32, []int64{2, 4})
	v := b.op("all-to-all", s, groupLists().Packed(14, 1), b.param(0, s))
	var want [][]float64
	for d := range y {
		low, high, at := y[min(d, partner(d))], y[max(d, partner(d))], d/2*2
		var out []float64
		for i := 0; i < 8; i += 4 {
			out = slices.Concat(out, low[i+at:i+at+2], high[i+at:i+at+2])
		}
		want = append(want, out)
	}
	return example{name: b.name, devices: 4, code: b.returns(v), args: [][][]float64{y},
		want: [][][]float64{want}}
}
