package estimate

import (
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/price"
)

// A phase is the seconds of one pass (forward, input gradient, weight gradient) over a block by
// cause.
type phase struct {
	gemm, attention, stream, quantize float64
	tensor, context, expert, data     float64
	offload                           float64
}

// add adds n times the seconds of another phase.
func (p *phase) add(q *phase, n float64) {
	p.gemm += n * q.gemm
	p.attention += n * q.attention
	p.stream += n * q.stream
	p.quantize += n * q.quantize
	p.tensor += n * q.tensor
	p.context += n * q.context
	p.expert += n * q.expert
	p.data += n * q.data
	p.offload += n * q.offload
}

func (p *phase) sum() float64 {
	return p.gemm + p.attention + p.stream + p.quantize + p.tensor + p.context + p.expert +
		p.data + p.offload
}

// A block is the cost of one layer, the embedding or the head, for one microbatch on one device.
type block struct {
	forward, input, weight     phase
	again                      phase      // recomputed in backward
	part                       phase      // of forward: the module that can be recomputed alone
	modules                    float64    // residual bytes saved by recomputing that module
	operations                 float64    // kernel launches, forward and backward
	residual                   float64    // bytes of activations saved for backward
	dropped                    float64    // bytes live only while the block is recomputed
	dense, experts             float64    // parameters on a device, before dp and fsdp shard them
	shapes                     float64    // bytes of one buffer per distinct weight shape
	quantWeights, quantExperts quantBytes // quantized weight copies, relative to bf16
	later                      float64    // seconds of forward.quantize that only wgrad needs
}

// add adds n equal blocks. Memory that is live only during recomputation is the maximum, not the
// sum: one block is recomputed at a time.
func (b *block) add(c *block, n float64) {
	b.forward.add(&c.forward, n)
	b.input.add(&c.input, n)
	b.weight.add(&c.weight, n)
	b.again.add(&c.again, n)
	b.operations += n * c.operations
	b.residual += n * c.residual
	b.dropped = max(b.dropped, c.dropped)
	b.dense += n * c.dense
	b.experts += n * c.experts
	b.quantWeights.add(&c.quantWeights, n)
	b.quantExperts.add(&c.quantExperts, n)
}

// A builder adds up a block in closed form: attention, MLP, experts, embedding and head. Sizes are
// per device: tp divides widths, cp and data parallelism divide tokens. Activations are bf16,
// hence the factors of 2 bytes.
type builder struct {
	e  *Estimator
	c  *sharding
	p  *price.Prices
	in precision.Layer // nil if one format holds for all layers
	block
	seen map[[2]float64]bool // weight shapes counted in block.shapes
}

// linear adds the three GEMMs of a layer: fprop [m,k]·[k,n], dgrad [m,n]·[n,k] and wgrad
// [n,m]·[m,k]. Input and output gradient are quantized once for each of the two GEMMs that read
// them.
func (b *builder) linear(prec dtype.Format, m, k, n float64) {
	b.forward.gemm += b.p.GEMM(prec, m, k, n)
	b.input.gemm += b.p.GEMM(prec, m, n, k)
	b.weight.gemm += b.p.GEMM(prec, n, m, k)
	b.forward.quantize += b.p.Quantize(prec, m*k, 2)
	b.input.quantize += b.p.Quantize(prec, m*n, 2)
	b.dense += k * n
	b.shape(k, n)
}

// shape counts a bf16 buffer for each distinct weight shape [k, n], once.
func (b *builder) shape(k, n float64) {
	if !b.seen[[2]float64{k, n}] {
		b.seen[[2]float64{k, n}] = true
		b.shapes += k * n * 2
	}
}

// stream adds memory-bound kernels by the bytes they move.
func (b *builder) stream(forward, backward float64) {
	b.forward.stream += b.p.Stream(forward)
	b.input.stream += b.p.Stream(backward)
}

// tensorEnds adds the tensor-parallel collectives around attention or MLP. With sequence
// parallelism, forward all-gathers the input and reduce-scatters the output, and backward does the
// reverse; Profile.Regather adds the all-gather of the input for wgrad (Korthikanti et al., 2022).
// Without it, each pass has one all-reduce. in and out name the linear layers at either end, whose
// formats decide the bytes of quantized gathers.
func (b *builder) tensorEnds(in, out []string) {
	if b.c.tensor == 1 {
		return
	}
	b.operations += 1.5
	values := b.c.tokens() * b.h()
	bytes := values * 2
	g, hide := b.c.tensorGroup(), b.p.Profile().HideTensor
	if b.c.overlap {
		hide = max(hide, overlapHides)
	}
	seen := 1 - hide
	if !b.c.sequence {
		t := seen * b.p.Collective(price.AllReduce, bytes, g)
		b.forward.tensor += t
		b.input.tensor += t
		return
	}
	gather := func(width float64) float64 {
		return seen * b.p.Collective(price.AllGather, values*width, g)
	}
	scatter := seen * b.p.Collective(price.ReduceScatter, bytes, g)
	b.forward.tensor += gather(b.sent(in, precision.Fprop)) + scatter
	b.input.tensor += gather(b.sent(out, precision.Dgrad, precision.Wgrad)) + scatter
	if b.p.Profile().Regather {
		b.input.tensor += gather(b.sent(in, precision.Wgrad))
	}
}

// overlapHides is the share of collectives of tensor and expert parallelism hidden by running two
// half batches in one layer body, if the computation of one half is longer than the collectives of
// the other (docs/parallel.md).
const overlapHides = 0.7

func (b *builder) h() float64 { return float64(b.e.config.Hidden) }

// attention adds the attention half of a layer: projections, rotary embedding, attention itself
// and its collectives. windowed layers attend to a sliding window of keys.
func (b *builder) attention(windowed bool) {
	c, tp := b.e.config, float64(b.c.tensor)
	tokens, heads, shard := b.c.tokens(), float64(c.Heads), b.c.seqShard()
	first := []string{"q", "k", "v"}
	score, value := float64(c.HeadDim), float64(c.HeadDim)
	kv := max(float64(c.KVHeads), tp)
	keys := 2 * kv * score // elements of K and V per token
	if a := c.MLA; a != nil {
		q, k := float64(a.QRank), float64(a.KVRank)
		score, value = float64(a.NoPE+a.Rope), float64(a.Value)
		keys = heads * (score + value)
		up := heads * float64(a.NoPE+a.Value)
		first = []string{"q_down", "kv_down"}
		b.join(tokens, source{b.h(), shard}, 1, tokens, out{"q_down", q})
		// The input is quantized already, for q_down.
		b.join(tokens, source{b.h(), 0}, 1, tokens, out{"kv_down", k + float64(a.Rope)})
		down := b.forward
		b.join(tokens, source{q, tokens}, tp, tokens, out{"q_up", heads * score})
		b.join(tokens, source{k, tokens}, tp, tokens, out{"kv_up", up})
		b.part.add(&b.forward, 1)
		b.part.add(&down, -1)
		b.stream(tokens*2*(2*heads*score+up+q)/tp, tokens*2*(4*heads*score+2*up+3*q)/tp)
		b.residual += tokens * (b.latent(q, k) + 2*(q+k+float64(a.Rope)) +
			(4*heads*score+4*heads*value+4*heads)/tp)
		b.modules += tokens * (4*heads*score + 2*heads*value) / tp
		b.operations += 45
	} else {
		q := heads * score
		b.join(tokens, source{b.h(), shard}, tp, tokens, out{"q", q}, out{"k", keys / 2},
			out{"v", keys / 2})
		// RoPE on queries and keys, and splitting the fused QKV result.
		b.stream(tokens*2*2*(2*q+1.5*keys)/tp, tokens*2*2*(2*q+1.5*keys)/tp)
		b.residual += tokens * (2*(q+keys) + 2*(q+keys/2) + 2*q + 4*heads) / tp
		b.operations += 25
	}
	b.join(tokens, source{heads * value / tp, tokens}, 1, shard, out{"o", b.h()})
	if n := b.wgradBytes(1, "o"); n != 2 { // attention saves its bf16 result anyway
		b.residual += tokens * heads * value / tp * n
	}
	b.scores(windowed, heads/tp, score, value)
	if c.MLA == nil {
		b.part.attention, b.modules = b.forward.attention, tokens*4*heads/tp
	}
	b.contextEnds(windowed, heads*value/tp, keys/tp)
	b.tensorEnds(first, []string{"o"})
}

// norms adds the two norms and residual additions of a layer. Each norm's output is saved for
// wgrad; the layer's input is saved by the layer. second names the linear layers that read the
// second norm.
func (b *builder) norms(second ...string) {
	shard := b.c.seqShard()
	b.stream(2*shard*b.h()*2*5, 2*shard*b.h()*2*7)
	first := []string{"q", "k", "v"}
	if b.e.config.MLA != nil {
		first = []string{"q_down", "kv_down"}
	}
	b.residual += shard * (b.wgradBytes(b.h(), first...) + b.wgradBytes(b.h(), second...))
	b.dense += 2 * b.h()
}

// scores adds attention proper: QKᵀ, softmax and the product with V, of [tokens, heads, score] and
// [keys, heads, value] on one device.
func (b *builder) scores(windowed bool, heads, score, value float64) {
	tokens, kernel := b.c.tokens(), b.e.kernel(b.c, windowed)
	if kernel == kernels.Plain && !b.e.cluster.CPU() {
		b.written(windowed, heads, score, value)
		return
	}
	window := float64(b.c.seq)
	if windowed {
		window = float64(b.e.config.Window)
	}
	seen := ir.MeanKeys(float64(b.c.seq), window)
	cp := b.c.cp()
	switch shard := float64(b.c.seq) / float64(cp.Shards()); {
	case cp.Shards() == 1:
	case kernel == kernels.CuDNN && windowed: // all but the first chunk have all keys of the window
		seen = window
	case kernel == kernels.CuDNN && !b.c.balance:
		// In the order of the sequence (lower/stablehlo) each rank of a ring computes its own chunk
		// under the causal mask and all other chunks in full, whether its queries see them or not; of
		// gathered keys, the last rank computes as much, and others wait for it. Balanced ranks compute
		// what is seen.
		seen = ir.MeanKeys(shard, shard) + float64(b.c.seq) - shard
	case kernel == "" && !b.c.balance:
		seen = lastKeys(float64(b.c.seq), window, shard)
	}
	if n := float64(cp.AllToAll()); n > 1 { // more of each sequence, fewer heads
		tokens, heads = tokens*n, heads/n
	}
	if !b.e.options.Plain {
		forward, backward := 1.0, 1.0
		if kernel == kernels.Triton {
			forward, backward = b.e.set.Slower(int(score), int(value))
		}
		b.forward.attention += forward * b.p.Attention(tokens, seen, heads, score, value, false)
		b.input.attention += backward * b.p.Attention(tokens, seen, heads, score, value, true)
		return
	}
	// Unfused attention: the [queries, keys] scores are written, then read by softmax and by the
	// product with values. Masking and scaling is one pass over them, dropout another.
	seq := float64(b.c.seq)
	square := tokens * seq * heads
	batch := heads * tokens / seq
	gemms := batch * (b.p.GEMM(dtype.FormatBF16, seq, score, seq) +
		b.p.GEMM(dtype.FormatBF16, seq, seq, value))
	b.forward.attention += gemms + b.p.Stream(square*2*5.5)
	b.input.attention += 2*gemms + b.p.Stream(square*2*7)
	kept := square * 5 // scores, dropout mask, and dropped-out probabilities
	if b.e.options.Core {
		b.again.attention += gemms/2 + b.p.Stream(square*2*5.5)
		b.dropped += kept
		return
	}
	b.residual += kept
}

// written adds attention of our own programs without a cuDNN kernel: every query meets every key,
// masked or not, and the backward pass recomputes the scores. A ring does the same in smaller
// chunks; where a window needs a halo, queries meet the keys of their chunk and, the first of them,
// the halo. The bytes of these kernels were counted, so the profile's factor on streams, which is
// for uncounted kernels, is divided out.
func (b *builder) written(windowed bool, heads, score, value float64) {
	tokens, seq := b.c.tokens(), float64(b.c.seq)
	cp := b.c.cp()
	batch := heads * float64(b.c.rows) / float64(cp.AllToAll())
	queries := seq / float64(cp.Shards())
	if h := b.halo(windowed); h > 0 {
		seq = float64(cp.Chunk(b.c.seq)) * (1 + h*h)
	}
	prec, elem := dtype.FormatBF16, 2.0
	if b.c.params.Bits() == 32 {
		prec, elem = dtype.FormatF32, 4
	}
	square := tokens * seq * heads
	stream := func(bytes float64) float64 {
		return b.p.Stream(square*bytes) / b.p.Profile().Stream
	}
	forward, backward := b.e.set.Written(elem)
	scores := batch * b.p.GEMM(prec, queries, score, seq)
	values := batch * b.p.GEMM(prec, queries, seq, value)
	b.forward.attention += scores + values + stream(forward)
	b.input.attention += 3*scores + 2*values + stream(backward)
	b.dropped += 2 * square * 4
}

// kernel names the attention kernel of our own programs; "" for other stacks, which use
// FlashAttention unless an option says otherwise.
func (e *Estimator) kernel(c *sharding, windowed bool) string {
	if e.profile.Name != price.Own {
		return ""
	}
	kernel, _ := e.set.Attention(kernels.Planned(e.config.Facts(), windowed, c.params, c.cp(),
		c.seq, c.plain))
	return kernel
}

// halo is the share of its chunk that a window needs of the chunk before, in our own programs; 0
// where it needs more, or where packed documents are masked.
func (b *builder) halo(windowed bool) float64 {
	cp := b.c.cp()
	documents, _ := b.e.set.Documents(0, kernels.Planned(b.e.config.Facts(), windowed, b.c.params,
		cp, b.c.seq, b.c.plain))
	if !windowed || cp.Shards() == 1 || documents > 0 || b.e.profile.Name != price.Own {
		return 0
	}
	chunk := cp.Chunk(b.c.seq)
	return float64(ir.Halo(b.e.config.Window, chunk)) / float64(chunk)
}

// joins adds joining the parts of attention in our own programs. out and keys are the elements per
// token of the result, and of keys and values.
func (b *builder) joins(windowed bool, out, keys float64) {
	halo, cp := b.halo(windowed), b.c.cp()
	if cp.Shards() == 1 ||
		halo == 0 && !cp.Ring() && b.e.kernel(b.c, windowed) != kernels.CuDNN {
		return // one attention, with a mask
	}
	tokens, j := b.c.tokens(), b.c.joins(halo)
	b.stream(tokens*(j.results[0]*out+j.keys[0]*keys), tokens*(j.results[1]*out+j.keys[1]*keys))
}

// contextEnds adds the context-parallel collectives around attention. out and keys are the
// elements per token of the result, and of keys and values.
func (b *builder) contextEnds(windowed bool, out, keys float64) {
	if b.c.context == 1 {
		return
	}
	tokens, cp := b.c.tokens(), b.c.cp()
	if g := b.c.headsGroup(); g.Size > 1 {
		// All-to-all from tokens to heads for Q, K and V, back for the result, and the same for
		// gradients. Each all-to-all also transposes its data in memory.
		if b.e.config.MLA == nil {
			keys *= float64(cp.Copies(max(b.e.config.KVHeads/b.c.tensor, 1)))
		}
		all := tokens * 2 * (out + keys)
		back := tokens * 2 * out
		t := b.p.Collective(price.AllToAll, all, g) + b.p.Collective(price.AllToAll, back, g)
		b.forward.context += t
		b.input.context += t
		b.stream((all+back)*2, (all+back)*2)
		if cp.Shards() == 1 {
			return
		}
	}
	g := b.c.contextGroup()
	whole := tokens * float64(g.Size) * 2 * keys
	if h := b.halo(windowed); h > 0 { // as many bytes are sent as in a gather of such shards
		whole *= h / float64(g.Size-1)
	}
	gather := b.p.Collective(price.AllGather, whole, g)
	reduce := b.p.Collective(price.ReduceScatter, whole, g)
	hide := b.p.Profile().HideContext
	if cp.Ring() { // chunks travel while the previous one is computed
		hide = max(hide, 0.8)
	}
	if b.e.profile.Name == price.Own {
		b.joins(windowed, out, keys)
	}
	b.forward.context += max((1-hide)*gather, gather-b.forward.attention)
	back := gather + reduce
	b.input.context += max((1-hide)*back, back-b.input.attention)
}

// mlp adds the MLP half of a dense layer.
func (b *builder) mlp(size float64) {
	b.gated("", b.c.tokens(), size/float64(b.c.tensor), true)
	b.operations += 20
	b.tensorEnds(b.ups(""), []string{"down"})
}

// gated adds the linear layers of a (gated) MLP and the activation between them. prefix selects
// the names of shared or routed experts in a policy. keep saves the activations for backward.
func (b *builder) gated(prefix string, tokens, size float64, keep bool) {
	ups, read, back, shard := 1.0, 2.0, 3.0, b.c.seqShard()
	outs := []out{{prefix + "up", size}}
	if b.e.config.Gated {
		ups, read, back = 2, 3, 5
		outs = append(outs, out{prefix + "gate", size})
	}
	b.join(tokens, source{b.h(), shard}, 1, tokens, outs...)
	b.join(tokens, source{size, tokens}, 1, shard, out{prefix + "down", b.h()})
	b.stream(tokens*size*2*read, tokens*size*2*back)
	if keep {
		b.residual += tokens * (2*ups*size + b.wgradBytes(size, prefix+"down"))
	}
}

// residualBytes is the bytes of n saved inputs of linear layers, for stacks with one format.
func (b *builder) residualBytes(n float64) float64 {
	if !b.p.Profile().QuantizedInputs {
		return 2 * n
	}
	if prec := b.e.precision(b.c); prec == dtype.FormatFP8 || prec.Quantized() {
		return n * prec.Bytes()
	}
	return 2 * n
}

// precision is the format of linear layers without a policy.
func (e *Estimator) precision(c *sharding) dtype.Format {
	if e.word != "" {
		return e.word
	}
	if c.params.Bits() == 32 {
		return dtype.FormatF32
	}
	return dtype.FormatBF16
}

// lastKeys is the mean number of keys seen by queries of a sequence's last chunk. If ranks have
// chunks in sequence order, all wait for the last; under a causal mask it has 2-1/cp times the
// mean work.
func lastKeys(seq, window, shard float64) float64 {
	return (seq*ir.MeanKeys(seq, window) - (seq-shard)*ir.MeanKeys(seq-shard, window)) / shard
}
