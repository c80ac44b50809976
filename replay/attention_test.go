package replay

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// An attentionCase is attention of one batch: [seq, heads, head] by [keys, key heads, head] and
// values [keys, key heads, value].
type attentionCase struct {
	name                              string
	batch, seq, keys, heads, kv, head int
	value                             int // 0 is head
	window                            int
	causal                            bool
	segments                          []segment // packed sequences, if there are any
	lengths                           []float64 // of keys, by sequence; nil means all
}

// A segment is the tokens from start on, in all sequences of a batch one after another.
type segment struct{ start, length int }

// sees tells whether query i sees key j, both counted through the batch.
func (c attentionCase) sees(i, j int) bool {
	row := i / c.seq
	if c.segments == nil {
		if row != j/c.keys {
			return false
		}
		i, j = i%c.seq, j%c.keys
	}
	in := func(s segment, at int) bool { return s.start <= at && at < s.start+s.length }
	if c.segments != nil && !slices.ContainsFunc(c.segments, func(s segment) bool {
		return in(s, i) && in(s, j)
	}) {
		return false
	}
	if c.lengths != nil && j >= int(c.lengths[row]) {
		return false
	}
	return !c.causal || j <= i && (c.window == 0 || j > i-c.window)
}

const attentionScale = 0.4

func (c attentionCase) config(grad bool) string {
	mask := "NO_MASK"
	if c.causal {
		mask = "CAUSAL"
	}
	if c.segments != nil {
		mask = "PADDING_" + mask
	} else if c.lengths != nil {
		mask = map[bool]string{false: "PADDING", true: "PADDING_CAUSAL"}[c.causal]
	}
	dims := func(name, lc, rc, lb, rb string) string {
		return fmt.Sprintf(`"%s_dot_dimension_numbers":{"lhs_contracting_dimensions":["%s"],`+
			`"rhs_contracting_dimensions":["%s"],"lhs_batch_dimensions":["0","%s"],`+
			`"rhs_batch_dimensions":["0","%s"]},`, name, lc, rc, lb, rb)
	}
	gemms := dims("bmm1", "3", "3", "2", "2") + dims("bmm2", "3", "1", "1", "2")
	if grad {
		gemms = dims("bmm1_grad_gemm1", "2", "1", "1", "2") + dims("bmm1_grad_gemm2", "3", "1", "1", "2") +
			dims("bmm2_grad_gemm1", "2", "1", "1", "2") + dims("bmm2_grad_gemm2", "3", "3", "2", "2")
	}
	return fmt.Sprintf(`{"cudnn_fmha_backend_config":{"algorithm":{"algo_id":"0"},%s"fmha_scale":%g,`+
		`"intermediate_tensor_shape":{"dimensions":["%d","%d","%d","%d"],"element_type":"BF16"},`+
		`"is_flash_attention":true,"mask_type":"%s","max_seg_per_batch":%d,"seed":42,`+
		`"sliding_window_length":%d}}`, gemms, attentionScale, c.batch, c.heads, c.seq, c.keys, mask,
		max(len(c.segments)/c.batch, 1), c.window)
}

// forward gives O [batch, heads, seq, head] and the log-sum-exp [batch, heads, seq], one row after
// the other.
func (c attentionCase) forward(q, k, v []float64) (o, lse []float64) {
	for b := range c.batch {
		for h := range c.heads {
			for i := range c.seq {
				row, sum, out := make([]float64, c.batch*c.keys), 0.0, make([]float64, c.value)
				kh := h * c.kv / c.heads
				for j := range row {
					if !c.sees(b*c.seq+i, j) {
						continue
					}
					for d := range c.head {
						row[j] += q[((b*c.seq+i)*c.heads+h)*c.head+d] * k[(j*c.kv+kh)*c.head+d]
					}
					row[j] = math.Exp(attentionScale * row[j])
					sum += row[j]
				}
				for j := range row {
					for d := range c.value {
						out[d] += row[j] / sum * v[(j*c.kv+kh)*c.value+d]
					}
				}
				o, lse = append(o, out...), append(lse, math.Log(sum))
			}
		}
	}
	return o, lse
}

// swapHeads turns [batch, a, b, head] into [batch, b, a, head].
func swapHeads(x []float64, batch, a, b, head int) []float64 {
	out := make([]float64, 0, len(x))
	for n := range batch {
		for j := range b {
			for i := range a {
				at := ((n*a+i)*b + j) * head
				out = append(out, x[at:at+head]...)
			}
		}
	}
	return out
}

// attentionExamples are the masks and head counts that Deepwell's calls have, forward and backward.
func attentionExamples() (list []example) {
	for _, c := range []attentionCase{
		{name: "causal", batch: 2, seq: 6, keys: 6, heads: 4, kv: 2, head: 8, causal: true},
		{name: "no mask", batch: 1, seq: 4, keys: 6, heads: 2, kv: 2, head: 8},
		{name: "window", batch: 1, seq: 7, keys: 7, heads: 2, kv: 1, head: 8, causal: true, window: 3},
		{name: "lengths", batch: 2, seq: 4, keys: 6, heads: 2, kv: 1, head: 8, lengths: []float64{2, 5}},
		{name: "causal lengths", batch: 2, seq: 6, keys: 6, heads: 4, kv: 2, head: 8, causal: true, window: 4,
			lengths: []float64{6, 3}},
		{name: "packed", batch: 2, seq: 6, keys: 6, heads: 4, kv: 2, head: 8, causal: true,
			segments: []segment{{0, 3}, {8, 4}, {3, 5}, {12, 0}}},
		{name: "packed window", batch: 1, seq: 7, keys: 7, heads: 2, kv: 1, head: 8, causal: true,
			window: 3, segments: []segment{{0, 2}, {2, 5}}},
		{name: "latent", batch: 2, seq: 6, keys: 6, heads: 4, kv: 4, head: 12, value: 8, causal: true},
	} {
		c.value = cmp.Or(c.value, c.head)
		q := randoms(21, int64(c.batch*c.seq*c.heads*c.head))
		k := randoms(22, int64(c.batch*c.keys*c.kv*c.head))
		v := randoms(23, int64(c.batch*c.keys*c.kv*c.value))
		list = append(list, c.forwardExample(q, k, v), c.backwardExample(q, k, v))
	}
	return list
}

// shapes of an operand [batch, seq, heads, head] and of a result with heads before the sequence.
func (c attentionCase) operand(t elemType, seq, heads, head int) *shape {
	return arr(t, []int64{int64(c.batch), int64(seq), int64(heads), int64(head)})
}

func (c attentionCase) result(t elemType, seq, heads, head int) *shape {
	return arr(t, []int64{int64(c.batch), int64(heads), int64(seq), int64(head)}, 3, 1, 2, 0)
}

func (c attentionCase) forwardExample(q, k, v []float64) example {
	b := newBuilder("attention, " + c.name)
	list := []int64{b.param(0, c.operand(typeBF16, c.seq, c.heads, c.head)),
		b.param(1, c.operand(typeBF16, c.keys, c.kv, c.head)),
		b.param(2, c.operand(typeBF16, c.keys, c.kv, c.value))}
	params, packing := c.packing(b, 3)
	x := b.call("__cudnn$fmhaSoftmax", c.config(false), withWorkspace(typeU8,
		c.result(typeBF16, c.seq, c.heads, c.value), c.stats()), append(list, params...)...)
	o, lse := c.forward(q, k, v)
	return example{name: b.name, code: b.returns(b.element(x, 0), b.element(x, 1)),
		args: append(one(q, k, v), packing...), want: one(o, c.placed(lse)), bound: 1e-2}
}

// stats is the shape of the log-sum-exp.
func (c attentionCase) stats() *shape {
	return arr(typeF32, []int64{int64(max(len(c.segments), c.batch)), int64(c.heads), int64(c.seq)})
}

// placed puts a log-sum-exp [batch, heads, seq] where cuDNN has it: [segment, heads, seq], with NaN
// behind the end of a segment.
func (c attentionCase) placed(lse []float64) (list []float64) {
	for _, s := range c.segments {
		for h := range c.heads {
			for i := range c.seq {
				x := math.NaN()
				if at := s.start + i; i < s.length {
					x = lse[(at/c.seq*c.heads+h)*c.seq+at%c.seq]
				}
				list = append(list, x)
			}
		}
	}
	if list == nil {
		return lse
	}
	return list
}

// packing are the operands of packed sequences, from a parameter on, and their values: lengths of
// queries and keys, offsets of queries and keys.
func (c attentionCase) packing(b *builder, from int64) (params []int64, values [][][]float64) {
	if c.lengths != nil { // all queries are within their lengths
		queries := slices.Repeat([]float64{float64(c.seq)}, c.batch)
		s := arr(typeS32, []int64{int64(c.batch)})
		return []int64{b.param(from, s), b.param(from+1, s)}, one(queries, c.lengths)
	}
	if c.segments == nil {
		return nil, nil
	}
	lists := make([][]float64, 4)
	for _, s := range append(c.segments, segment{start: c.batch * c.seq}) {
		for i, heads := range []int{c.heads, c.kv} {
			lists[i] = append(lists[i], float64(s.length))
			lists[2+i] = append(lists[2+i], float64(s.start*heads*c.head))
		}
	}
	for i, list := range lists {
		list = list[:len(c.segments)+i/2]
		params = append(params, b.param(from+int64(i), arr(typeS32, []int64{int64(len(list))})))
		values = append(values, [][]float64{list})
	}
	return params, values
}

// backwardExample has the gradients of the sum of O · dO by finite differences.
func (c attentionCase) backwardExample(q, k, v []float64) example {
	b := newBuilder("attention gradient, " + c.name)
	queries, keys := c.operand(typeF32, c.seq, c.heads, c.head), c.operand(typeF32, c.keys, c.kv, c.head)
	values, out := c.operand(typeF32, c.keys, c.kv, c.value), c.operand(typeF32, c.seq, c.heads, c.value)
	list := []int64{b.param(0, queries), b.param(1, keys), b.param(2, values), b.param(3, c.stats()),
		b.param(4, out), b.param(5, out)}
	params, packing := c.packing(b, 6)
	x := b.call("__cudnn$fmhaSoftmaxBackward", c.config(true), withWorkspace(typeU8,
		c.result(typeF32, c.seq, c.heads, c.head), c.result(typeF32, c.keys, c.kv, c.head),
		c.result(typeF32, c.keys, c.kv, c.value)), append(list, params...)...)
	o, lse := c.forward(q, k, v)
	do := randoms(24, int64(len(o))) // in the order of O
	var grads [][]float64
	for _, over := range [][]float64{q, k, v} {
		grad := make([]float64, len(over))
		for i := range over {
			var side [2]float64
			for s, step := range []float64{1e-4, -1e-4} {
				kept := over[i]
				over[i] += step
				moved, _ := c.forward(q, k, v)
				over[i] = kept
				for j := range moved {
					side[s] += moved[j] * do[j]
				}
			}
			grad[i] = (side[0] - side[1]) / 2e-4
		}
		grads = append(grads, grad)
	}
	want := one(swapHeads(grads[0], c.batch, c.seq, c.heads, c.head),
		swapHeads(grads[1], c.batch, c.keys, c.kv, c.head),
		swapHeads(grads[2], c.batch, c.keys, c.kv, c.value))
	back := func(x []float64) []float64 { return swapHeads(x, c.batch, c.heads, c.seq, c.value) }
	return example{name: b.name, bound: 1e-4, want: want,
		args: append(one(slices.Clone(q), k, v, c.placed(lse), back(do), back(o)), packing...),
		code: b.returns(b.element(x, 0), b.element(x, 1), b.element(x, 2))}
}
