package estimate

import (
	"math"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/price"
)

// experts adds a mixture-of-experts MLP: the router, all-to-all to the experts' devices, the
// experts' grouped GEMMs, all-to-all back, and shared experts.
func (b *builder) experts() {
	m := b.e.config.MoE
	own := b.c.tokens() / float64(b.c.tensor) // tokens sent by this device
	count, top := float64(m.Experts), float64(m.TopK)
	ranks, etp := float64(b.c.expert), float64(b.c.etp)
	local := count / ranks
	imbalance := max(b.e.options.Imbalance, 1)
	each := own * top / count // tokens from one device for one expert
	if f := b.e.options.Capacity; f > 0 {
		each, imbalance = math.Ceil(each*f), 1
	}
	sent := each * count // token copies sent, top-k per token
	rows := each * ranks * etp * imbalance
	size := float64(m.MLP) / etp
	ups := 1.0
	if b.e.config.Gated {
		ups = 2
	}
	for _, l := range []struct {
		name string
		k, n float64
	}{{"expert_up", b.h(), ups * size}, {"expert_down", size, b.h()}} {
		b.expert(l.name, local, rows, l.k, l.n)
	}
	got := local * rows
	b.stream(got*size*2*(ups+1), got*size*2*(2*ups+1))
	b.part.stream = b.p.Stream(got * size * 2 * (ups + 1))
	b.part.quantize = b.p.Quantize(b.e.precision(b.c), got*size, 2)
	b.modules = got * b.wgradBytes(size, "expert_down")
	b.stream(sent*b.h()*2*4, sent*b.h()*2*4)   // permute to expert order and back
	tokens := b.wgradBytes(b.h(), "expert_up") // bytes of one token, as saved for wgrad
	if !b.p.Profile().Permuted {
		tokens += 2 * b.h()
	}
	b.residual += got*(tokens+2*ups*size+b.wgradBytes(size, "expert_down")) + own*count*8
	b.expertEnds(sent*b.h()*2, imbalance)
	b.router(own, count)
	if m.Shared > 0 {
		b.gated("shared_", b.c.tokens(), float64(m.Shared)/float64(b.c.tensor), true)
	}
	// A grouped GEMM launches one kernel per expert, each a fifth of a framework operation's host
	// time, for two linear layers in three passes.
	b.operations += b.p.Profile().Experts + 6*0.2*local
	if m.Shared > 0 { // shared experts, sharded by tp
		b.tensorEnds(b.ups("shared_"), []string{"shared_down"})
	}
}

// expert adds a linear layer [rows,k]·[k,n] of each of the device's local experts.
func (b *builder) expert(name string, local, rows, k, n float64) {
	prec := b.e.precision(b.c)
	each := func(product string) dtype.Format {
		if b.in != nil {
			return b.format(name, product)
		}
		return prec
	}
	if b.in != nil {
		tokens := local * rows
		b.quantizeCost(source{k, tokens}, 1, tokens, []out{{name, n}})
		s := b.stocked(name, local*k*n)
		b.quantExperts.add(&s, 1)
	} else {
		b.forward.quantize += b.p.Quantize(prec, local*rows*k, 2)
		b.input.quantize += b.p.Quantize(prec, local*rows*n, 2)
	}
	b.forward.gemm += b.p.Grouped(each(precision.Fprop), local, rows, k, n, false)
	b.input.gemm += b.p.Grouped(each(precision.Dgrad), local, rows, n, k, false)
	b.weight.gemm += b.p.Grouped(each(precision.Wgrad), local, k, rows, n, true)
	b.block.experts += local * k * n
	b.shape(k, n)
}

// router adds the router's GEMM, [tokens, hidden]·[hidden, experts] in f32, and small kernels over
// its scores.
func (b *builder) router(tokens, count float64) {
	t := b.p.GEMM(dtype.FormatF32, tokens, b.h(), count)
	b.forward.gemm += t
	b.input.gemm += t
	b.weight.gemm += t
	b.stream(tokens*count*4*4, tokens*count*4*4)
	b.dense += b.h() * count
}

// expertEnds adds the two all-to-alls of each pass: a token is sent once for each expert that it
// chooses, also to experts that share a device or an NVLink domain.
func (b *builder) expertEnds(bytes, imbalance float64) {
	if b.c.expert == 1 {
		return
	}
	t := 2 * imbalance * b.p.Collective(price.AllToAll, bytes, b.c.expertGroup())
	seen := 1 - b.p.Profile().HideExpert
	b.forward.expert += seen * t
	b.input.expert += seen * t
}
