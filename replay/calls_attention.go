package replay

import (
	"encoding/json"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
)

// An attentionConfig is CudnnfMHABackendConfig of XLA's backend_configs.proto.
type attentionConfig struct {
	Algorithm     json.RawMessage `json:"algorithm"`
	Scale         float64         `json:"fmha_scale"`
	Dropout       float64         `json:"dropout_rate"`
	Seed          json.RawMessage `json:"seed"`
	Mask          string          `json:"mask_type"`
	OldCausal     bool            `json:"is_causal_mask"`
	Flash         bool            `json:"is_flash_attention"`
	Deterministic bool            `json:"force_deterministic"`
	Window        number          `json:"sliding_window_length"`
	Segments      number          `json:"max_seg_per_batch"`
	Paged         bool            `json:"is_paged_attention"`
	Scores        struct {
		Dims []number `json:"dimensions"`
		attentionScores
	} `json:"intermediate_tensor_shape"`

	ScoresOf  dotConfig `json:"bmm1_dot_dimension_numbers"`            // Q · Kᵀ
	OutputOf  dotConfig `json:"bmm2_dot_dimension_numbers"`            // P · V
	KeyGrad   dotConfig `json:"bmm1_grad_gemm1_dot_dimension_numbers"` // dSᵀ · Q
	QueryGrad dotConfig `json:"bmm1_grad_gemm2_dot_dimension_numbers"` // dS · K
	ValueGrad dotConfig `json:"bmm2_grad_gemm1_dot_dimension_numbers"` // Pᵀ · dO
	ProbGrad  dotConfig `json:"bmm2_grad_gemm2_dot_dimension_numbers"` // dO · Vᵀ

	lengths []*value // of the queries and of the keys of each sequence, s32 [batch]; none without
}

// attentionScores is what the shape of the scores has beside its dimensions.
type attentionScores struct {
	Type    string          `json:"element_type"`
	Layout  json.RawMessage `json:"layout"`
	Tuple   json.RawMessage `json:"tuple_shapes"`
	Dynamic json.RawMessage `json:"is_dynamic_dimension"`
}

// readAttention reads the configuration of a call that must have this number of operands.
func (w *writer) readAttention(s *site, operands int) (g attentionConfig) {
	w.readConfig(s, "cudnn_fmha_backend_config", &g)
	packed, masks := g.Segments > 1, []string{"CAUSAL", "PADDING_CAUSAL", "NO_MASK", "PADDING"}
	more := 0 // operands of one dimension
	switch {
	case packed:
		more = 4 // lengths and offsets of the segments of queries and of keys
		masks = []string{"PADDING_CAUSAL", "PADDING"}
	case strings.HasPrefix(g.Mask, "PADDING"):
		more = 2 // lengths of queries and of keys
	}
	operands += more
	switch {
	case !slices.Contains(masks, g.Mask):
		w.refuse(diag.ReplayCall, "%s has the mask %s and %d segments", s.target, g.Mask, g.Segments)
	case g.Dropout != 0 || g.Paged || g.OldCausal:
		w.refuse(diag.ReplayCall, "%s has dropout, pages or an old mask", s.target)
	case g.Window < 0 || g.Window > 0 && !strings.HasSuffix(g.Mask, "CAUSAL"):
		w.refuse(diag.ReplayCall, "%s has a window of %d and the mask %s", s.target, g.Window, g.Mask)
	case len(s.values) != operands:
		w.refuse(diag.ReplayCall, "%s has %d operands, of which replay knows %d: bias, sequence "+
			"lengths and offsets have no rule", s.target, len(s.values), operands)
	}
	if more == 2 {
		g.lengths = w.lengths(s)
	}
	for i, v := range s.values {
		if n := len(v.shape.dims); n != 3 && n != 4 && (n != 1 || i < operands-more) {
			w.refuse(diag.ReplayCall, "%s has an operand of dimensions %v", s.target, v.shape.dims)
		}
	}
	return g
}

// lengths are the last two operands: how many queries, and how many keys, each sequence has.
func (w *writer) lengths(s *site) []*value {
	list := s.values[len(s.values)-2:]
	for _, v := range list {
		if v.shape.typ != typeS32 || !slices.Equal(v.shape.dims, s.values[0].shape.dims[:1]) {
			w.refuse(diag.ReplayCall, "%s has lengths %v of %d sequences", s.target, v.shape.dims,
				s.values[0].shape.dims[0])
		}
	}
	return list
}

// within tells where an index along a dimension is below the length of its sequence.
func (w *writer) within(length *value, dims []int64, along int64) *value {
	return w.compare("LT", w.iota(typeS32, dims, along), w.broadcast(length, dims, 0))
}

// written leaves what a call with lengths writes, of a result [batch, heads, tokens, ...] that has
// queries (side 0) or keys (1): beyond the length of a sequence, or of queries without a key,
// memory holds anything.
func (w *writer) written(x *value, g attentionConfig, side int) *value {
	if len(g.lengths) == 0 {
		return x
	}
	dims := x.shape.dims
	keys := w.broadcast(g.lengths[1], dims, 0)
	known := w.elementwise("and", w.within(g.lengths[side], dims, 2),
		w.compare("GT", keys, w.fullInt(typeS32, dims, 0)))
	return w.choose(known, x, w.uninitialized(x.shape))
}

// A place says where the dimensions batch, heads, sequence and head size of an operand are.
type place [4]int64

// placeOf finds the places from one side of a product, which contracts the head size or
// the sequence.
func (w *writer) placeOf(s *site, d dotConfig, side int, contractsHead bool) place {
	dims := d.dims()
	batch, contracting := dims.batch[side], dims.contracting[side]
	if len(batch) != 2 || len(contracting) != 1 {
		w.refuse(diag.ReplayCall, "%s has batch dimensions %v and contracting dimensions %v", s.target,
			batch, contracting)
	}
	free := int64(-1)
	for i := range int64(4) {
		if !slices.Contains(batch, i) && i != contracting[0] {
			free = i
		}
	}
	if contractsHead {
		return place{batch[0], batch[1], free, contracting[0]}
	}
	return place{batch[0], batch[1], contracting[0], free}
}

// headFirst transposes an operand to [batch, heads, seq, head].
func (w *writer) headFirst(x *value, at place) *value { return w.transpose(x, at[:]...) }

// repeated repeats key heads for grouped queries: query head h reads key head h·K/H.
func (w *writer) repeated(s *site, x *value, heads int64) *value {
	d := x.shape.dims
	if d[1] == heads {
		return x
	}
	if d[1] == 0 || heads%d[1] != 0 {
		w.refuse(diag.ReplayCall, "%s has %d heads of queries and %d of keys", s.target, heads, d[1])
	}
	each := heads / d[1]
	return w.reshape(w.broadcast(x, []int64{d[0], d[1], each, d[2], d[3]}, 0, 1, 3, 4), d[0], heads,
		d[2], d[3])
}

// folded adds the gradients of the query heads that read one key head.
func (w *writer) folded(x *value, heads int64) *value {
	d := x.shape.dims
	if d[1] == heads {
		return x
	}
	return w.reduce(w.reshape(x, d[0], heads, d[1]/heads, d[2], d[3]), "add", 0, 2)
}

// perHead is a product for each batch and head, with the contracting dimensions of either side.
func (w *writer) perHead(a, b *value, contractA, contractB int64) *value {
	return w.dot(a, b, dotDims{contracting: [2][]int64{{contractA}, {contractB}},
		batch: [2][]int64{{0, 1}, {0, 1}}})
}

// masked is the score of a key that a query does not see.
const masked = -1e30

// scores are scale · Q · Kᵀ [batch, heads, seq, keys] in float32, masked.
func (w *writer) scores(s *site, q, k *value, g attentionConfig) *value {
	x := w.perHead(q, k, 3, 3)
	dims := x.shape.dims
	if !slices.Equal(ints(g.Scores.Dims), dims) {
		w.refuse(diag.ReplayConfig, "%s has scores %v; its configuration says %v", s.target, dims,
			ints(g.Scores.Dims))
	}
	x = w.elementwise("multiply", x, w.full(typeF32, dims, g.Scale))
	if g.lengths != nil {
		seen := w.elementwise("and", w.within(g.lengths[0], dims, 2), w.within(g.lengths[1], dims, 3))
		x = w.choose(seen, x, w.full(typeF32, dims, masked))
	}
	if !strings.HasSuffix(g.Mask, "CAUSAL") {
		return x
	}
	if dims[2] != dims[3] {
		w.refuse(diag.ReplayCall, "%s masks scores of %d queries and %d keys", s.target, dims[2],
			dims[3])
	}
	query, key := w.iota(typeS32, dims, 2), w.iota(typeS32, dims, 3)
	seen := w.compare("LE", key, query)
	if g.Window > 0 {
		first := w.elementwise("subtract", query, w.fullInt(typeS32, dims, int64(g.Window)))
		seen = w.elementwise("and", seen, w.compare("GT", key, first))
	}
	return w.choose(seen, x, w.full(typeF32, dims, masked))
}

// attention rewrites cuDNN's attention of Q, K and V. Its results are O [batch, heads, seq, head]
// and, if there is one more beside the workspace, the log-sum-exp [batch, heads, seq] in float32.
func (w *writer) attention(s *site) []*value {
	g := w.readAttention(s, 3)
	q := w.headFirst(s.values[0], w.placeOf(s, g.ScoresOf, 0, true))
	k := w.headFirst(s.values[1], w.placeOf(s, g.ScoresOf, 1, true))
	v := w.headFirst(s.values[2], w.placeOf(s, g.OutputOf, 1, false))
	o, lse := (*value)(nil), (*value)(nil)
	if g.Segments > 1 {
		p := w.packing(s, g, q, k, v)
		o, lse = w.softmaxed(s, p.flat(q), p.flat(v), p.scores(s, p.flat(q), p.flat(k)))
		o, lse = p.unflat(o, 0), p.statistics(lse)
	} else {
		o, lse = w.softmaxed(s, q, v, w.scores(s, q, w.repeated(s, k, q.shape.dims[1]), g))
	}
	out := []*value{w.written(w.convert(o, s.shape.results()[0].typ), g, 0)}
	if len(s.shape.results()) > 2 {
		out = append(out, w.written(lse, g, 0))
	}
	return out
}

// softmaxed is O and the log-sum-exp of masked scores.
func (w *writer) softmaxed(s *site, q, v, x *value) (o, lse *value) {
	dims := x.shape.dims
	top := w.reduce(x, "maximum", -3e38, 3)
	e := w.elementwise("exponential", w.elementwise("subtract", x, w.broadcast(top, dims, 0, 1, 2)))
	sum := w.reduce(e, "add", 0, 3)
	p := w.elementwise("divide", e, w.broadcast(sum, dims, 0, 1, 2))
	o = w.perHead(w.convert(p, q.shape.typ), w.repeated(s, v, q.shape.dims[1]), 3, 2)
	return o, w.elementwise("add", top, w.elementwise("log", sum))
}

// attentionGrad rewrites the gradient: dQ, dK and dV from Q, K, V, the log-sum-exp, dO and O.
func (w *writer) attentionGrad(s *site) []*value {
	g := w.readAttention(s, 6)
	q := w.headFirst(s.values[0], w.placeOf(s, g.KeyGrad, 1, false))
	k := w.headFirst(s.values[1], w.placeOf(s, g.QueryGrad, 1, false))
	v := w.headFirst(s.values[2], w.placeOf(s, g.ProbGrad, 1, true))
	outPlace := w.placeOf(s, g.ProbGrad, 0, true)
	if outPlace != w.placeOf(s, g.ValueGrad, 1, false) {
		w.refuse(diag.ReplayConfig, "%s reads dO in two ways", s.target)
	}
	do, o := w.headFirst(s.values[4], outPlace), w.headFirst(s.values[5], outPlace)
	var grads []*value
	if g.Segments > 1 {
		p := w.packing(s, g, q, k, v)
		x := p.scores(s, p.flat(q), p.flat(k))
		grads = w.gradients(s, g, []*value{p.flat(q), p.flat(k), p.flat(v), p.flat(do), p.flat(o)}, x,
			p.perToken(s, s.values[3]))
		for i := range grads {
			grads[i] = p.unflat(grads[i], min(i, 1))
		}
	} else {
		x := w.scores(s, q, w.repeated(s, k, q.shape.dims[1]), g)
		if !slices.Equal(s.values[3].shape.dims, x.shape.dims[:3]) {
			w.refuse(diag.ReplayCall, "%s has a log-sum-exp %v", s.target, s.values[3].shape.dims)
		}
		grads = w.gradients(s, g, []*value{q, k, v, do, o}, x, s.values[3])
	}
	for i, x := range grads {
		if i < len(s.shape.results()) {
			grads[i] = w.written(w.convert(x, s.shape.results()[i].typ), g, min(i, 1))
		}
	}
	return grads
}

// gradients are dQ, dK and dV from Q, K, V, dO and O, masked scores and their log-sum-exp.
func (w *writer) gradients(s *site, g attentionConfig, in []*value, x, lse *value) []*value {
	q, k, v, do, o := in[0], in[1], in[2], in[3], in[4]
	heads, keyHeads, typ := q.shape.dims[1], k.shape.dims[1], q.shape.typ
	kAll, vAll := w.repeated(s, k, heads), w.repeated(s, v, heads)
	dims := x.shape.dims
	p := w.elementwise("exponential", w.elementwise("subtract", x, w.broadcast(lse, dims, 0, 1, 2)))
	dp := w.perHead(do, vAll, 3, 3)
	inner := w.reduce(w.elementwise("multiply", w.convert(do, typeF32), w.convert(o, typeF32)), "add",
		0, 3)
	ds := w.elementwise("multiply", p, w.elementwise("subtract", dp,
		w.broadcast(inner, dims, 0, 1, 2)))
	ds = w.convert(w.elementwise("multiply", ds, w.full(typeF32, dims, g.Scale)), typ)
	return []*value{w.perHead(ds, kAll, 3, 2),
		w.folded(w.perHead(ds, q, 2, 2), keyHeads),
		w.folded(w.perHead(w.convert(p, typ), do, 2, 2), v.shape.dims[1])}
}
