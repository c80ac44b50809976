package ir

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
)

// blockKinds are the operations of Transformer blocks that have kernels of their own on some
// target; others are composed of element-wise operations.
func blockKinds() map[string]Kind {
	return map[string]Kind{
		"rms_norm":       {1, inferNorm(1), rmsNormVJP, streams},
		"layer_norm":     {1, inferNorm(2), layerNormVJP, streams},
		"softmax":        {1, inferNorm(0), softmaxVJP, streams},
		"rope":           {1, takes(2, inferRope), ropeVJP, streams},
		"attention":      {2, inferAttention, attentionVJP, attentionWork},
		"attention_grad": {3, inferAttentionGrad, nil, attentionWork},
		"cross_entropy":  {2, takes(2, inferCrossEntropy), crossEntropyVJP, crossEntropyWork},
		"cross_entropy_grad": {1, func(_ *Graph, op *Op) ([]Type, error) {
			return []Type{op.In[0].Type}, arity(op, 4)
		}, nil, streams},
		"gather": {1, inferGather, func(d *Differ, op *Op, dy []*Value) []*Value {
			dim := op.Attrs.Text("dim")
			return []*Value{d.Scatter(dy[0], d.Use(op.In[1]), dim, op.In[0].Type.Size(dim)), nil}
		}, streams},
		"scatter": {1, inferScatter, func(d *Differ, op *Op, dy []*Value) []*Value {
			return []*Value{d.Gather(dy[0], d.Use(op.In[1]), op.Attrs.Text("dim")), nil}
		}, streams},
		"top_k": {2, takes(1, inferTopK), func(d *Differ, op *Op, dy []*Value) []*Value {
			dim := op.Attrs.Text("dim")
			return []*Value{d.Scatter(dy[0], d.Use(op.Out[1]), dim, op.In[0].Type.Size(dim))}
		}, streams},
	}
}

// inferNorm returns the shape rule of a norm over dim with n weight vectors: softmax 0, RMSNorm 1,
// LayerNorm 2. The dimension must not be sharded.
func inferNorm(weights int) func(*Graph, *Op) ([]Type, error) {
	return takes(1+weights, func(_ *Graph, op *Op) ([]Type, error) {
		x, dim := op.In[0].Type, op.Attrs.Text("dim")
		if x.Index(dim) < 0 {
			return nil, fmt.Errorf("%s has no %s", x, dim)
		}
		for _, w := range op.In[1:] {
			want := Type{Elem: x.Elem, Dims: []Dim{{dim, x.Size(dim)}}}
			if !w.Type.Equal(want) {
				return nil, fmt.Errorf("a weight is %s, not %s", w.Type, want)
			}
		}
		place, err := KeepPlacement(x, dim)
		return []Type{{x.Elem, x.Dims, place}}, err
	})
}

// rmsNormVJP: y = x r (w+s) with r = (mean x² + ε)^-½, so that with h = x r and g = dy (w+s):
// dx = r (g - h mean(g h)), dw = Σ dy h (Zhang and Sennrich, 2019).
func rmsNormVJP(d *Differ, op *Op, dy []*Value) []*Value {
	b, dim := d.Builder, op.Attrs.Text("dim")
	x, w, dout := d.wide(d.Use(op.In[0])), d.wide(d.Use(op.In[1])), d.wide(dy[0])
	n := float64(x.Type.Size(dim))
	r := b.Rsqrt(b.Shift(b.Scale(b.Sum(b.Mul(x, x), dim), 1/n), op.Attrs.Float("eps")))
	if s := op.Attrs.Float("shift"); s != 0 {
		w = b.Shift(w, s)
	}
	h, g := b.Mul(x, r), b.Mul(dout, w)
	dx := b.Mul(b.Sub(g, b.Mul(h, b.Scale(b.Sum(b.Mul(g, h), dim), 1/n))), r)
	return []*Value{d.roundLike(dx, op.In[0]),
		d.roundLike(d.Unbroadcast(b.Mul(dout, h), op.In[1]), op.In[1])}
}

// layerNormVJP: the same with the mean taken off: dx = r (g - mean g - h mean(g h)) (Ba et al.,
// 2016).
func layerNormVJP(d *Differ, op *Op, dy []*Value) []*Value {
	b, dim := d.Builder, op.Attrs.Text("dim")
	x, w, dout := d.wide(d.Use(op.In[0])), d.wide(d.Use(op.In[1])), d.wide(dy[0])
	n := float64(x.Type.Size(dim))
	mean := func(v *Value) *Value { return b.Scale(b.Sum(v, dim), 1/n) }
	c := b.Sub(x, mean(x))
	r := b.Rsqrt(b.Shift(mean(b.Mul(c, c)), op.Attrs.Float("eps")))
	h, g := b.Mul(c, r), b.Mul(dout, w)
	dx := b.Mul(b.Sub(b.Sub(g, mean(g)), b.Mul(h, mean(b.Mul(g, h)))), r)
	return []*Value{d.roundLike(dx, op.In[0]),
		d.roundLike(d.Unbroadcast(b.Mul(dout, h), op.In[1]), op.In[1]),
		d.roundLike(d.Unbroadcast(dout, op.In[2]), op.In[2])}
}

// wide converts a value to f32: norms and their gradients are computed in f32 and rounded once, as
// PyTorch does. Residuals keep their own type.
func (d *Differ) wide(v *Value) *Value {
	if v.Type.Elem == dtype.F64 {
		return v
	}
	return d.Convert(v, dtype.F32)
}

// roundLike gives a gradient the element type of its value.
func (d *Differ) roundLike(g, like *Value) *Value { return d.Convert(g, like.Type.Elem) }

// softmaxVJP: with y = softmax(x), dx = y ∘ (dy − Σ dy ∘ y).
func softmaxVJP(d *Differ, op *Op, dy []*Value) []*Value {
	y := d.Use(op.Out[0])
	inner := d.Sum(d.Mul(dy[0], y), op.Attrs.Text("dim"))
	return []*Value{d.Mul(y, d.Sub(dy[0], inner))}
}

// The names of the dimensions that attention gives a meaning to. Queries have Seq and Heads, keys
// and values Keys and KVHeads; all end in HeadDim, of which values may have another size (latent
// attention), and other dimensions go side by side.
const (
	Seq     = "seq"
	Keys    = "keys"
	Heads   = "heads"
	KVHeads = "kv"
	HeadDim = "head"
)

// The names of other dimensions that models have and plans shard.
const (
	Batch    = "batch"
	Vocab    = "vocab"
	EmbedDim = "embed"
	MLPDim   = "mlp"
)

// The dimensions of latent attention's low ranks, which plans do not shard. Of keys and values it
// has the keys' rotated elements, too.
const (
	QueryRank = "q_rank"
	KeyRank   = "kv_rank"
)

// attentionArgs is the number of arguments of an attention, or its gradient, before those that its
// mask depends on.
func (op *Op) attentionArgs() int {
	n := 3
	if op.Kind == "attention_grad" {
		n = 6
	}
	return min(n, len(op.In))
}

// KeyLengths returns the index of the argument that says how many keys of each row are seen, from
// the first on; 0 if all are.
func (op *Op) KeyLengths() int {
	if n := op.attentionArgs(); op.Attrs.Bool("lengths") && n < len(op.In) {
		return n
	}
	return 0
}

// MaskArgs returns the arguments of an attention, or its gradient, that its mask depends on beside
// lengths: the document numbers and the positions in the sequence. Each list is empty or has two
// values, for queries and for keys.
func (op *Op) MaskArgs() (segments, places []*Value) {
	in := op.In
	if op.Attrs.Bool("sinks") && len(in) > 3 {
		in = in[:len(in)-1]
	}
	rest := in[op.attentionArgs():]
	if op.KeyLengths() > 0 {
		rest = rest[1:]
	}
	if op.Attrs.Bool("placed") && len(rest) >= 2 {
		return rest[:len(rest)-2], rest[len(rest)-2:]
	}
	return rest, nil
}

// Sinks returns the last argument of an attention with sinks, a score for each head [heads] that
// joins the sum of exponentials of each query without a value of its own, and the attention without
// it; nil and the attention itself if it has none.
func (op *Op) Sinks() (*Value, *Op) {
	if !op.Attrs.Bool("sinks") || len(op.In) < 4 {
		return nil, op
	}
	n := len(op.In) - 1
	plain := *op
	plain.In, plain.Attrs = op.In[:n:n], op.Attrs.With("sinks", false)
	return op.In[n], &plain
}

// Halo is how many keys of the chunk before its own a query sees at most, where devices have chunks
// of a sequence (context parallelism), if its window begins within that chunk: all that a device
// needs of others. It is 0 if the window begins earlier.
func Halo(window, chunk int64) int64 {
	if n := window - 1; n > 0 && n <= chunk {
		return n
	}
	return 0
}

// Halo is the halo of an attention of seq queries on one device; 0 where packed documents are
// masked from each other.
func (a Attrs) Halo(seq int64, documents bool) int64 {
	if documents || !a.Bool("causal") {
		return 0
	}
	if a.Bool("balanced") {
		seq /= 2
	}
	return Halo(a.Int("window"), seq)
}

// Halo is [Attrs.Halo] of a ring: an attention, or its gradient, that asks others for nothing else.
func (op *Op) Halo() int64 {
	if op.Attrs.Text("ring") == "" {
		return 0
	}
	segments, _ := op.MaskArgs()
	return op.Attrs.Halo(op.In[0].Type.Size(Seq), len(segments) > 0)
}

// allKeys is the type of all keys that queries see. In a ring each device holds a shard [keys/n]
// and passes it on until all devices have seen all; documents and positions of keys are replicated.
func allKeys(g *Graph, op *Op) Type {
	k := op.In[1].Type
	if ring := op.Attrs.Text("ring"); ring != "" && k.Place.On(ring) == Keys {
		return resharded(k, ring, Keys, "", g.AxisSize(ring), 1)
	}
	return k
}

// inferAttention takes queries [..., seq, heads, head], keys and values [..., keys, kv, head] and,
// optionally, pairs of document numbers and positions, and sinks [heads]. It returns the output, of
// the queries' type with the values' size of a head, and the log-sum-exp f32[..., seq, heads] for
// the gradient.
func inferAttention(g *Graph, op *Op) ([]Type, error) {
	segments, places := op.MaskArgs()
	pairs := len(segments) == 0 || len(segments) == 2
	if len(op.In) < 3 || !pairs || op.Attrs.Bool("placed") != (places != nil) ||
		op.Attrs.Bool("lengths") != (op.KeyLengths() > 0) {
		return nil, fmt.Errorf("takes queries, keys, values and pairs, got %d arguments", len(op.In))
	}
	if at := op.KeyLengths(); at > 0 {
		k, have := op.In[1].Type, op.In[at].Type
		want := Type{Elem: dtype.S32, Dims: Without(k.Dims, Keys, KVHeads, HeadDim)}
		want.Place = lists.Filter(k.Place, func(s AxisSharding) bool { return want.Index(s.Dim) >= 0 })
		if !have.Equal(want) {
			return nil, fmt.Errorf("the lengths of %s are %s, not %s", k, have, want)
		}
	}
	if err := inferBeside(g, op, "segments", segments, func(x Type, i int) []Dim {
		return Without(x.Dims, []string{Heads, KVHeads}[i], HeadDim)
	}); err != nil {
		return nil, err
	}
	if err := inferBeside(g, op, "places", places, func(x Type, i int) []Dim {
		name := []string{Seq, Keys}[i]
		return []Dim{{name, x.Size(name)}}
	}); err != nil {
		return nil, err
	}
	if err := inferSinks(op); err != nil {
		return nil, err
	}
	q, k, v := op.In[0].Type, op.In[1].Type, op.In[2].Type
	if v.Index(HeadDim) != len(v.Dims)-1 || k.Index(HeadDim) != len(k.Dims)-1 ||
		!slices.Equal(Without(k.Dims, HeadDim), Without(v.Dims, HeadDim)) {
		return nil, fmt.Errorf("%s are no values of keys %s", v, k)
	}
	if q.Elem != k.Elem || k.Elem != v.Elem {
		return nil, fmt.Errorf("%s, %s and %s differ in element type", q, k, v)
	}
	kv, heads := k.Size(KVHeads), q.Size(Heads)
	if kv == 0 || heads%kv != 0 || q.Index(HeadDim) != len(q.Dims)-1 ||
		q.Size(HeadDim) != k.Size(HeadDim) || q.Index(Seq) < 0 || k.Index(Keys) < 0 {
		return nil, fmt.Errorf("%s cannot attend to %s", q, k)
	}
	rows := Without(q.Dims, HeadDim)
	if !slices.Equal(Without(q.Dims, Seq, Heads, HeadDim), Without(k.Dims, Keys, KVHeads, HeadDim)) {
		return nil, fmt.Errorf("%s and %s differ in their other dimensions", q, k)
	}
	for _, axis := range axesOf(q, k, v) {
		s, t, u := q.Place.On(axis), k.Place.On(axis), v.Place.On(axis)
		byHeads := s == Heads && t == KVHeads && u == KVHeads
		byPlace := s == Seq && t == "" && u == "" && places != nil
		if axis == op.Attrs.Text("ring") {
			byPlace = s == Seq && t == Keys && u == Keys && places != nil
		}
		split := s == Partial || s == HeadDim || s == Seq || s == Keys
		if !byHeads && !byPlace && (s != t || t != u || split) {
			return nil, fmt.Errorf("along %s queries are placed %q, keys %q, values %q", axis, s, t, u)
		}
	}
	out := append(slices.Clone(rows), Dim{HeadDim, v.Size(HeadDim)})
	return []Type{{q.Elem, out, q.Place}, {dtype.F32, rows, q.Place}}, nil
}

// inferSinks checks that there is a sink for each head, sharded like the heads.
func inferSinks(op *Op) error {
	sinks, _ := op.Sinks()
	if !op.Attrs.Bool("sinks") {
		return nil
	}
	q := op.In[0].Type
	want := Type{Elem: q.Elem, Dims: []Dim{{Heads, q.Size(Heads)}}}
	want.Place = lists.Filter(q.Place, func(s AxisSharding) bool { return s.Dim == Heads })
	if sinks == nil || !sinks.Type.Equal(want) {
		return fmt.Errorf("the last argument is not the sinks %s of %s", want, q)
	}
	return nil
}

// inferBeside checks what accompanies queries and keys, with some of their dimensions and sharded
// like them: document numbers, and positions in the sequence, which order queries and keys where a
// device does not have all queries.
func inferBeside(g *Graph, op *Op, what string, pair []*Value, dims func(Type, int) []Dim) error {
	for i, v := range pair {
		x := op.In[i].Type
		if i == 1 {
			x = allKeys(g, op)
		}
		want := Type{Elem: dtype.S32, Dims: dims(x, i)}
		want.Place = lists.Filter(x.Place, func(s AxisSharding) bool { return want.Index(s.Dim) >= 0 })
		if !v.Type.Equal(want) {
			return fmt.Errorf("the %s of %s are %s, not %s", what, x, v.Type, want)
		}
	}
	return nil
}

// inferAttentionGrad gives the types of queries, keys and values; where devices have different
// queries of the same keys, each has a term of the keys' gradient.
func inferAttentionGrad(_ *Graph, op *Op) ([]Type, error) {
	if segments, _ := op.MaskArgs(); len(op.In) < 6 || len(segments) != 0 && len(segments) != 2 {
		return nil, fmt.Errorf("takes six arguments and pairs, got %d", len(op.In))
	}
	q, k, v := op.In[0].Type, op.In[1].Type, op.In[2].Type
	for _, s := range q.Place {
		if s.Dim == Seq && s.Axis != op.Attrs.Text("ring") {
			k.Place, v.Place = k.Place.With(s.Axis, Partial), v.Place.With(s.Axis, Partial)
		}
	}
	return []Type{q, k, v}, nil
}

// attentionVJP reads queries, keys, values, the output and the log-sum-exp; scores are recomputed.
// With sinks counted in the output and the log-sum-exp, the gradient is the same as without.
func attentionVJP(d *Differ, op *Op, dy []*Value) []*Value {
	if dy[0] == nil {
		return nil
	}
	sinks, plain := op.Sinks()
	in := lists.Map(slices.Concat(op.In[:3], op.Out), d.Use)
	extras := lists.Map(plain.In[3:], d.Use)
	grads := d.op("attention_grad", plain.Attrs, nil, slices.Concat(in, dy[:1], extras)...)
	if sinks == nil {
		return grads
	}
	grads = append(grads, make([]*Value, len(op.In)-3)...)
	grads[len(op.In)-1] = d.sinksGrad(d.Use(sinks), in[3], in[4], dy[0])
	return grads
}

// sinksGrad is the gradient of sinks from the output o and the log-sum-exp, which both count them:
// a sink's probability is p = exp(sink − lse) and its value 0, so that dsink = −Σ p rowsum(do·o).
func (d *Differ) sinksGrad(sinks, o, lse, do *Value) *Value {
	inner := d.Sum(d.Mul(d.wide(do), d.wide(o)), HeadDim)
	p := d.Exp(d.Neg(d.Sub(lse, d.wide(sinks))))
	return d.roundLike(d.Unbroadcast(d.Neg(d.Mul(p, inner)), sinks), sinks)
}

// inferCrossEntropy gives the loss of each row and its log-sum-exp, which is all that the gradient
// needs beside the logits. A negative label has no loss.
//
// If the operation names an axis, each device has a shard of every row's logits (the vocabulary is
// sharded). Devices exchange three numbers per row: the largest logit, the sum of exponentials and
// the label's logit. Attribute "valid" is the size of the vocabulary without padding; zero means no
// padding.
func inferCrossEntropy(_ *Graph, op *Op) ([]Type, error) {
	x, labels, dim := op.In[0].Type, op.In[1].Type, op.Attrs.Text("dim")
	rows := Type{Elem: labels.Elem, Dims: Without(x.Dims, dim)}
	if x.Index(dim) < 0 || labels.Elem.Kind() != dtype.Signed ||
		!slices.Equal(rows.Dims, labels.Dims) {
		return nil, fmt.Errorf("%s are not labels of %s over %s", labels, x, dim)
	}
	if axis := op.Attrs.Text("axis"); axis != "" {
		if x.Place.On(axis) != dim {
			return nil, fmt.Errorf("along %s the scores %s are not sharded by %s", axis, x, dim)
		}
		x.Place = x.Place.With(axis, "")
	}
	place, err := KeepPlacement(x, dim)
	if err == nil && !place.Equal(labels.Place) {
		err = fmt.Errorf("%s and labels %s are placed differently", x, labels)
	}
	t := Type{dtype.F32, rows.Dims, place}
	return []Type{t, t}, err
}

// crossEntropyVJP reads logits, labels and the log-sum-exp.
func crossEntropyVJP(d *Differ, op *Op, dy []*Value) []*Value {
	if dy[0] == nil {
		return make([]*Value, 2)
	}
	in := []*Value{d.Use(op.In[0]), d.Use(op.In[1]), d.Use(op.Out[1]), dy[0]}
	return []*Value{d.op("cross_entropy_grad", op.Attrs, nil, in...)[0], nil}
}

// indexed checks a value and whole numbers that pick along its last dimension.
func indexed(op *Op) (x, idx Type, dim string, err error) {
	if err := arity(op, 2); err != nil {
		return x, idx, "", err
	}
	x, idx, dim = op.In[0].Type, op.In[1].Type, op.Attrs.Text("dim")
	last := len(x.Dims) - 1
	if last < 0 || x.Dims[last].Name != dim || len(idx.Dims) != len(x.Dims) ||
		!slices.Equal(x.Dims[:last], idx.Dims[:last]) || idx.Dims[last].Name != dim ||
		idx.Elem.Kind() != dtype.Signed {
		return x, idx, dim, fmt.Errorf("%s do not pick from %s along %s", idx, x, dim)
	}
	if _, err := KeepPlacement(x, dim); err != nil {
		return x, idx, dim, err
	}
	if !x.Place.Equal(idx.Place) {
		return x, idx, dim, fmt.Errorf("%s and %s are placed differently", x, idx)
	}
	return x, idx, dim, nil
}

// inferGather picks elements along the last dimension, which must not be sharded.
func inferGather(_ *Graph, op *Op) ([]Type, error) {
	x, idx, _, err := indexed(op)
	return []Type{{x.Elem, idx.Dims, x.Place}}, err
}

// inferScatter adds elements into zeros along the last dimension.
func inferScatter(_ *Graph, op *Op) ([]Type, error) {
	x, idx, dim, err := indexed(op)
	if err != nil {
		return nil, err
	}
	if err := sameDims(Type{Dims: x.Dims}, Type{Dims: idx.Dims}); err != nil {
		return nil, err
	}
	return resized(x, dim, op.Attrs.Int("size"), false)
}

// inferTopK gives the k largest along a dimension and their indices.
func inferTopK(_ *Graph, op *Op) ([]Type, error) {
	x, dim, k := op.In[0].Type, op.Attrs.Text("dim"), op.Attrs.Int("k")
	last := len(x.Dims) - 1
	if last < 0 || x.Dims[last].Name != dim || k < 1 || k > x.Dims[last].Size {
		return nil, fmt.Errorf("%s does not end in %s of at least %d", x, dim, k)
	}
	if _, err := KeepPlacement(x, dim); err != nil {
		return nil, err
	}
	values, err := resized(x, dim, k, false)
	if err != nil {
		return nil, err
	}
	index := values[0]
	index.Elem = dtype.S32
	return []Type{values[0], index}, nil
}

// RMSNorm divides x by its root mean square along a dimension and multiplies by w + shift.
func (b *Builder) RMSNorm(x, w *Value, dim string, eps, shift float64) *Value {
	a := map[string]any{"dim": dim, "eps": eps, "shift": some(shift)}
	return b.one("rms_norm", attrs(a), x, w)
}

// LayerNorm computes (x - mean) / sqrt(variance + eps) · w + bias, with the mean and the variance
// taken along dim. w and bias are [dim].
func (b *Builder) LayerNorm(x, w, bias *Value, dim string, eps float64) *Value {
	return b.one("layer_norm", attrs(map[string]any{"dim": dim, "eps": eps}), x, w, bias)
}

// Softmax makes x positive with sum 1 along a dimension.
func (b *Builder) Softmax(x *Value, dim string) *Value {
	return b.one("softmax", attrs(map[string]any{"dim": dim}), x)
}

// An Attention is how queries see keys. Window is how many keys back a query sees, itself included;
// SoftCap bounds scores by tanh; 0 turns either off.
type Attention struct {
	Scale   float64
	Causal  bool
	Window  int64
	SoftCap float64
	// Segments and KeySegments number the documents that queries and keys belong to; a query sees the
	// keys of its own document only. Both or neither are given.
	Segments, KeySegments *Value
	// Documents is how many a sequence has at most, for kernels with tables of documents; 0 if that
	// is not known.
	Documents int64
	// Places and KeyPlaces are the places of queries and keys in the sequence. Without them the first
	// query and the first key stand at the same place, and the others follow. Both or neither are
	// given.
	Places, KeyPlaces *Value
	// KeyLengths is how many keys of each row are seen, from the first on, at least one; nil means
	// all.
	KeyLengths *Value
	// OperandType is the element type that q, k, v and the probabilities are rounded to before each
	// matmul; Invalid means no rounding.
	OperandType dtype.DType
	// Sinks is a learned score for each head [heads] that joins the scores of each query, with a value
	// of 0 (gpt-oss); nil for none.
	Sinks *Value
	// Plain asks for no kernel of its own where a target has one.
	Plain bool
}

// Attend gives softmax(scale q·k) v for each query. Several query heads may share a key head.
func (b *Builder) Attend(q, k, v *Value, how Attention) *Value {
	a := map[string]any{"scale": how.Scale, "causal": how.Causal, "in": spelled(how.OperandType),
		"window": some(max(how.Window, 0)), "softcap": some(max(how.SoftCap, 0)),
		"placed": how.Places != nil, "plain": how.Plain, "documents": some(how.Documents),
		"lengths": how.KeyLengths != nil, "sinks": how.Sinks != nil}
	in := []*Value{q, k, v}
	if how.KeyLengths != nil {
		in = append(in, how.KeyLengths)
	}
	if how.Segments != nil {
		in = append(in, how.Segments, how.KeySegments)
	}
	if how.Places != nil {
		in = append(in, how.Places, how.KeyPlaces)
	}
	if how.Sinks != nil {
		in = append(in, how.Sinks)
	}
	return b.op("attention", attrs(a), nil, in...)[0]
}

// CrossEntropy gives the loss of each row of logits against its label.
func (b *Builder) CrossEntropy(logits, labels *Value, dim string) *Value {
	return b.op("cross_entropy", attrs(map[string]any{"dim": dim}), nil, logits, labels)[0]
}

// Gather picks along the last dimension of x.
func (b *Builder) Gather(x, idx *Value, dim string) *Value {
	return b.one("gather", attrs(map[string]any{"dim": dim}), x, idx)
}

// Scatter adds the elements of x into size places along the last dimension.
func (b *Builder) Scatter(x, idx *Value, dim string, size int64) *Value {
	return b.one("scatter", attrs(map[string]any{"dim": dim, "size": size}), x, idx)
}

// TopK gives the k largest along the last dimension, the largest first, and where they were.
func (b *Builder) TopK(x *Value, dim string, k int64) (values, places *Value) {
	out := b.op("top_k", attrs(map[string]any{"dim": dim, "k": k}), nil, x)
	return out[0], out[1]
}

// Silu gives x·sigmoid(x).
func (b *Builder) Silu(x *Value) *Value { return b.Mul(x, b.Sigmoid(x)) }

// Gelu gives x·sigmoid(2·0.79788(x + 0.044715x³)), the tanh form of Hendrycks and Gimpel (2016).
func (b *Builder) Gelu(x *Value) *Value {
	const c = 1.5957691216057308 // 2·√(2/π)
	inner := b.Mul(x, b.Shift(b.Scale(b.Mul(x, x), 0.044715), 1))
	return b.Mul(x, b.Sigmoid(b.Scale(inner, c)))
}
