package eval

import (
	"math"
	"slices"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// blockKernels compute the operations of Transformer blocks by their definitions, in float64.
var blockKernels = map[string]kernel{
	"rms_norm": func(op *ir.Op, in, out []*Array) {
		rows(op, in[0], out[0], func(_ int, x, y []float64) {
			square := lists.Sum(x, func(v float64) float64 { return v * v })
			r := 1 / math.Sqrt(square/float64(len(x))+op.Attrs.Float("eps"))
			for i, v := range x {
				y[i] = v * r * (in[1].Data[i] + op.Attrs.Float("shift"))
			}
		})
	},
	"layer_norm": func(op *ir.Op, in, out []*Array) {
		rows(op, in[0], out[0], func(_ int, x, y []float64) {
			mean, square := 0.0, 0.0
			for _, v := range x {
				mean += v / float64(len(x))
			}
			for _, v := range x {
				square += (v - mean) * (v - mean)
			}
			r := 1 / math.Sqrt(square/float64(len(x))+op.Attrs.Float("eps"))
			for i, v := range x {
				y[i] = (v-mean)*r*in[1].Data[i] + in[2].Data[i]
			}
		})
	},
	"softmax": func(op *ir.Op, in, out []*Array) {
		rows(op, in[0], out[0], func(_ int, x, y []float64) {
			lse := logSumExp(x)
			for i, v := range x {
				y[i] = math.Exp(v - lse)
			}
		})
	},
	"rope":               rope,
	"attention":          attention,
	"attention_grad":     attentionGrad,
	"cross_entropy":      crossEntropy,
	"cross_entropy_grad": crossEntropyGrad,
}

// rows hands out each line of x along the operation's dimension, and takes the line of y.
func rows(op *ir.Op, x, y *Array, f func(row int, x, y []float64)) {
	k := x.Type.Index(op.Attrs.Text("dim"))
	stride := int64(1)
	for _, d := range x.Type.Dims[k+1:] {
		stride *= d.Size
	}
	n := x.Type.Dims[k].Size
	line, result, row := make([]float64, n), make([]float64, n), 0
	for first := range int64(len(x.Data)) {
		if first/stride%n != 0 {
			continue
		}
		for i := range n {
			line[i] = x.Data[first+i*stride]
		}
		f(row, line, result)
		row++
		for i := range n {
			y.Data[first+i*stride] = result[i]
		}
	}
}

func logSumExp(x []float64) float64 {
	top, total := slices.Max(x), 0.0
	if math.IsInf(top, -1) {
		return top
	}
	for _, v := range x {
		total += math.Exp(v - top)
	}
	return top + math.Log(total)
}

func rope(op *ir.Op, in, out []*Array) {
	freqs, t := ir.RopeFrequencies(op), in[0].Type
	half := int64(len(freqs))
	walk(t, func(at []int64, i int) {
		k := at[len(at)-1]
		if k >= half {
			return
		}
		angle := pick(in[1], t, at) * freqs[k]
		sin, cos := math.Sincos(angle)
		sin, cos = sin*ir.RopeMagnitude(op), cos*ir.RopeMagnitude(op)
		if op.Attrs.Bool("back") {
			sin = -sin
		}
		a, b := in[0].Data[i], in[0].Data[int64(i)+half]
		out[0].Data[i], out[0].Data[int64(i)+half] = a*cos-b*sin, b*cos+a*sin
	})
}

// A head walks over the rows of attention: for every query of every head, the scores of its keys.
type head struct {
	op       *ir.Op
	q, k, v  *Array
	lengths  *Array   // of keys, by row, or nil
	segments []*Array // of queries and of keys, or none
	places   []*Array // likewise
	sinks    *Array   // of heads, or nil
}

func newHead(op *ir.Op, in []*Array) head {
	h := head{op: op, q: in[0], k: in[1], v: in[2]}
	if at := op.KeyLengths(); at > 0 {
		h.lengths = in[at]
	}
	if sinks, _ := op.Sinks(); sinks != nil {
		h.sinks, in = in[len(in)-1], in[:len(in)-1]
	}
	segments, places := op.MaskArgs()
	rest := in[len(in)-len(segments)-len(places):]
	h.segments, h.places = rest[:len(segments)], rest[len(segments):]
	return h
}

// unseen tells whether a query does not see a key for their places.
func (h head) unseen(query, key int64) bool {
	if len(h.places) > 0 {
		query, key = int64(h.places[0].Data[query]), int64(h.places[1].Data[key])
	}
	window := h.op.Attrs.Int("window")
	return h.op.Attrs.Bool("causal") && key > query || window > 0 && key <= query-window
}

// apart tells whether a key is beyond the length of its row, or in another document than a query.
func (h head) apart(at []int64, rows ir.Type, key int64) bool {
	if h.lengths != nil && key >= int64(pick(h.lengths, rows, at)) {
		return true
	}
	if len(h.segments) == 0 {
		return false
	}
	place := slices.Clone(at)
	own := pick(h.segments[0], rows, place)
	place[rows.Index(ir.Seq)] = key
	keys := ir.Type{Dims: slices.Clone(rows.Dims)}
	keys.Dims[rows.Index(ir.Seq)].Name = ir.Keys
	return own != pick(h.segments[1], keys, place)
}

// eachQuery gives, for each query, where it is, the offset of each key, and the scores before and
// after the cap, with -Inf for keys that it does not see.
func (h head) eachQuery(visit func(at []int64, keys []int64, raw, score []float64)) {
	qt, kt := h.q.Type, h.k.Type
	share := qt.Size(ir.Heads) / kt.Size(ir.KVHeads)
	n := kt.Size(ir.Keys)
	rows := ir.Type{Dims: qt.Dims[:len(qt.Dims)-1]}
	walk(rows, func(at []int64, _ int) {
		keys, raw, score := make([]int64, n), make([]float64, n), make([]float64, n)
		seq, headAt := at[rows.Index(ir.Seq)], at[rows.Index(ir.Heads)]
		for j := range n {
			off := int64(0)
			for _, d := range kt.Dims {
				switch d.Name {
				case ir.Keys:
					off = off*d.Size + j
				case ir.KVHeads:
					off = off*d.Size + headAt/share
				case ir.HeadDim:
					off *= d.Size
				default:
					off = off*d.Size + at[rows.Index(d.Name)]
				}
			}
			keys[j] = off
			raw[j] = h.product(at, off) * h.op.Attrs.Float("scale")
			score[j] = raw[j]
			if soft := h.op.Attrs.Float("softcap"); soft > 0 {
				score[j] = soft * math.Tanh(raw[j]/soft)
			}
			if h.unseen(seq, j) || h.apart(at, rows, j) {
				score[j] = math.Inf(-1)
			}
		}
		visit(at, keys, raw, score)
	})
}

func (h head) product(at []int64, key int64) float64 {
	n := h.q.Type.Size(ir.HeadDim)
	from := offset(h.q.Type, append(append([]int64{}, at...), 0))
	total := 0.0
	for d := range n {
		total += h.q.Data[from+d] * h.k.Data[key+d]
	}
	return total
}

// value is the offset of a key's value, whose head may have another size.
func (h head) value(key int64) int64 {
	return key / h.k.Type.Size(ir.HeadDim) * h.v.Type.Size(ir.HeadDim)
}

func attention(op *ir.Op, in, out []*Array) {
	h := newHead(op, in)
	n, row := in[2].Type.Size(ir.HeadDim), 0
	h.eachQuery(func(at, keys []int64, _, score []float64) {
		all := score
		if h.sinks != nil {
			all = append(slices.Clone(score), h.sinks.Data[at[out[1].Type.Index(ir.Heads)]])
		}
		lse := logSumExp(all)
		out[1].Data[row] = lse
		to := offset(out[0].Type, append(append([]int64{}, at...), 0))
		for j, s := range score {
			if p := math.Exp(s - lse); p > 0 {
				value := h.value(keys[j])
				for d := range n {
					out[0].Data[to+d] += p * in[2].Data[value+d]
				}
			}
		}
		row++
	})
}

// attentionGrad is the gradient of Dao et al. (2022): with D = Σ do·o, ds = p (do·v - D).
func attentionGrad(op *ir.Op, in, out []*Array) {
	h := newHead(op, in)
	o, stat, do := in[3], in[4], in[5]
	n, values, row := in[0].Type.Size(ir.HeadDim), in[2].Type.Size(ir.HeadDim), 0
	h.eachQuery(func(at, keys []int64, raw, score []float64) {
		first := append(append([]int64{}, at...), 0)
		from, result := offset(in[0].Type, first), offset(o.Type, first)
		inner := 0.0
		for d := range values {
			inner += do.Data[result+d] * o.Data[result+d]
		}
		for j, s := range score {
			p := math.Exp(s - stat.Data[row])
			dp, value := 0.0, h.value(keys[j])
			for d := range values {
				dp += do.Data[result+d] * in[2].Data[value+d]
				out[2].Data[value+d] += p * do.Data[result+d]
			}
			ds := p * (dp - inner) * op.Attrs.Float("scale")
			if soft := op.Attrs.Float("softcap"); soft > 0 {
				t := math.Tanh(raw[j] / soft)
				ds *= 1 - t*t
			}
			for d := range n {
				out[0].Data[from+d] += ds * in[1].Data[keys[j]+d]
				out[1].Data[keys[j]+d] += ds * in[0].Data[from+d]
			}
		}
		row++
	})
}

func crossEntropy(op *ir.Op, in, out []*Array) {
	rows(op, in[0], New(in[0].Type), func(row int, logits, _ []float64) {
		lse := logSumExp(logits)
		out[1].Data[row] = lse
		if label := int(in[1].Data[row]); label >= 0 {
			out[0].Data[row] = lse - logits[label]
		}
	})
}

func crossEntropyGrad(op *ir.Op, in, out []*Array) {
	rows(op, in[0], out[0], func(row int, logits, dlogits []float64) {
		label := int(in[1].Data[row])
		for i, v := range logits {
			g := math.Exp(v - in[2].Data[row])
			if i == label {
				g--
			}
			if label < 0 {
				g = 0
			}
			dlogits[i] = g * in[3].Data[row]
		}
	})
}
