package footprint

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
)

// The dimensions that tensor parallelism cuts beside those that attention names.
const dimMLP, dimVocab = "mlp", "vocab"

// A param is one parameter, or stack of them, as it lies under a plan, in elements of one layer.
type param struct {
	name   string
	stack  bool
	vector bool  // a norm or a bias: not worth cutting
	whole  int64 // after tp
	stored int64 // after fsdp, too
	cut    bool  // by fsdp
	first  int   // dimension that fsdp cuts, for what is moved to the front
	tensor bool  // cut by tp
	each   bool  // of heads that tp deals: each device has its own terms of the gradient
	shared int64 // devices of tp that share a key head; 0 if none do
}

// lay says how a parameter lies: as spmd does it (layout.go there).
func lay(p *model.Param, tp, fsdp int64) param {
	dims := p.Dims
	out := param{name: p.Name, stack: p.Stacked(), whole: 1}
	if out.stack {
		dims = dims[1:]
	}
	sides, first := 0, -1
	for i, d := range dims {
		n, cut := d.Size, false
		if tp > 1 && slices.Contains([]string{ir.Heads, ir.KVHeads, dimMLP, dimVocab}, d.Name) {
			if d.Name == dimVocab {
				n = (n + tp - 1) / tp * tp
			}
			if n%tp == 0 {
				n, cut = n/tp, true
			}
			if !cut && d.Name == ir.KVHeads { // fewer key heads than devices
				out.shared = tp / d.Size
			}
		}
		out.tensor = out.tensor || cut
		out.whole *= n
		if d.Name == ir.HeadDim && i > 0 && (dims[i-1].Name == ir.Heads || dims[i-1].Name == ir.KVHeads) {
			continue
		}
		sides++
		if !cut && first < 0 && fsdp > 1 && n%fsdp == 0 {
			first = i
		}
	}
	out.stored, out.vector = out.whole, sides < 2
	if len(dims) == 1 && dims[0].Name == ir.HeadDim { // a norm of each head
		out.each = true
	}
	if first >= 0 && sides >= 2 {
		out.cut, out.first = true, first
		out.stored /= fsdp
	}
	return out
}

// sizes are those of what flows through a layer on one device, in elements of a microbatch, and of
// types in bytes.
type sizes struct {
	tp, cp, fsdp     int64 // devices
	tokens, piece    int64 // of a microbatch; of what lies between layers
	embed            int64 // width
	mlp, heads       int64 // widths after tp: all heads together
	keys             int64
	count            int64 // heads after tp
	vocab            int64 // after tp
	elem             int64 // bytes of a value
	rows             int64 // of a microbatch on the device
	seq              int64 // of a row on the device
	layers           int64 // that a round of the loop has
	ups              int64 // matrices into the MLP
	qknorm, postnorm bool
}

func (p *Predictor) sizes(pl *plan.Plan) sizes {
	c := p.config
	tp, cp := max(pl.TP.Size, 1), max(pl.CP.Size, 1)
	fsdp := max(pl.FSDP.Size, 1)
	ranks := max(pl.DP, 1) * fsdp
	s := sizes{tp: tp, cp: cp, fsdp: fsdp, rows: max(1, pl.Rows()/ranks), seq: pl.Seq / cp,
		embed: c.Hidden, mlp: c.MLP / tp, heads: c.Heads * c.HeadDim / tp,
		keys: max(c.KVHeads, tp) * c.HeadDim / tp, count: c.Heads / tp,
		vocab: (c.Vocab + tp - 1) / tp, elem: 4, layers: p.slots, ups: 1, qknorm: c.QKNorm,
		postnorm: c.PostNorms}
	if c.Gated {
		s.ups = 2
	}
	s.tokens = s.rows * s.seq
	s.piece = s.tokens
	if pl.TP.Sequence {
		s.piece /= tp
	}
	if !p.cpu && pl.Types.Params != dtype.F32 {
		s.elem = int64(pl.Types.Params.Bits()) / 8
	}
	return s
}

// values are bytes of something as long as tokens.
func (s *sizes) values(tokens, width int64) int64 { return tokens * width * s.elem }

// A values is some that one layer keeps for its backward pass: bytes of one, and how many there are
// of that size.
type values struct {
	bytes, count int64
}

// again tells which parts are computed again.
type again struct{ norm, attn, mlp, head bool }

func againOf(list []ir.Tag) again {
	has := func(t ir.Tag) bool { return slices.Contains(list, t) }
	return again{has(ir.Norm), has(ir.Attn), has(ir.MLP), has(ir.Head)}
}

// kept lists what a layer keeps: what goes into each half of it, results of norms, and of what is
// not computed again the arguments of products and of functions that are not linear.
func (s *sizes) kept(a again) []values {
	flow := int64(2)
	if !a.norm {
		flow = 4
		if s.postnorm {
			flow = 6
		}
	}
	list := []values{{s.values(s.piece, s.embed), flow}}
	if !a.mlp {
		list = append(list, values{s.values(s.tokens, s.mlp), s.ups + 3})
	}
	if !a.attn {
		n := int64(2)
		if s.qknorm {
			n = 3
		}
		list = append(list, values{s.values(s.tokens, s.heads), n}, values{s.values(s.tokens, s.keys), n},
			values{s.tokens * s.count * 4, 1})
	}
	return list
}

// sum adds up the bytes of a list.
func sum(list []values) (n int64) {
	for _, k := range list {
		n += k.bytes * k.count
	}
	return n
}
