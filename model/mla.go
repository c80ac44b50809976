package model

import (
	"math"

	"github.com/deepwell/deepwell/ir"
)

// An MLA is multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): queries and keys pass
// through projections of rank QRank and KVRank; a QRank of 0 leaves queries without. A head has
// NoPE elements without positions and Rope elements with rotary embeddings, which all key heads
// share; values have Value elements.
type MLA struct {
	QRank, KVRank, NoPE, Rope, Value int64
	// Interleaved: neighbours are the pairs that rotary embeddings rotate, not the halves.
	Interleaved bool
	// MScale is YaRN's mscale_all_dim, which AttnScale follows from; 0 for none.
	MScale float64
}

// latentEps is what DeepSeek's norms of low ranks add under the root, whatever rms_norm_eps is.
const latentEps = 1e-6

// check reports the first thing that makes latent attention of these heads impossible.
func (a *MLA) check(c *Config) error {
	switch {
	case a.KVRank < 1 || a.KVRank > maxSize || a.QRank < 0 || a.QRank > maxSize:
		return bad("latent attention has ranks of %d and %d", a.QRank, a.KVRank)
	case a.NoPE < 1 || a.Rope < 2 || a.Rope%2 != 0 || a.NoPE+a.Rope != c.HeadDim:
		return bad("a head of %d is not %d elements and an even number of rotated ones, %d", c.HeadDim,
			a.NoPE, a.Rope)
	case a.Value < 1 || a.Value > maxSize:
		return bad("a head has %d values", a.Value)
	case c.KVHeads != c.Heads:
		return bad("latent attention has %d heads and %d KV heads", c.Heads, c.KVHeads)
	case c.QKNorm || c.Learned || c.Windowed != nil || c.Sinks:
		return bad("latent attention has no norms of heads, learned positions, windows or sinks")
	}
	return nil
}

// latent appends the parameters of latent attention.
func (w *writer) latent(n names) {
	c, a := w.c, w.c.MLA
	at := func(name string) string { return n.layer + "self_attn." + name }
	size := func(name string, n int64) []ir.Dim { return []ir.Dim{{Name: name, Size: n}} }
	e, q, kv := []ir.Dim{c.embed()}, []ir.Dim{c.heads(), c.head()}, []ir.Dim{c.kv()}
	if a.QRank > 0 {
		rank := size(ir.QueryRank, a.QRank)
		w.linears(n, ir.Attn, c.QKVBias, part{"q_down", at("q_a_proj"), e, rank})
		w.add("q_norm", ir.Attn, at("q_a_layernorm.weight"), matrix(rank...))
		w.linears(n, ir.Attn, false, part{"q_up", at("q_b_proj"), rank, q})
	} else {
		w.linears(n, ir.Attn, false, part{"q", at("q_proj"), e, q})
	}
	rank := size(ir.KeyRank, a.KVRank)
	w.linears(n, ir.Attn, c.QKVBias,
		part{"kv_down", at("kv_a_proj_with_mqa"), e, size(ir.KeyRank, a.KVRank+a.Rope)})
	w.add("kv_norm", ir.Attn, at("kv_a_layernorm.weight"), matrix(rank...))
	w.linears(n, ir.Attn, false,
		part{"kv_up", at("kv_b_proj"), rank, append(kv, size(ir.HeadDim, a.NoPE+a.Value)...)})
	w.linears(n, ir.Attn, c.OutBias,
		part{"o", at("o_proj"), []ir.Dim{c.heads(), size(ir.HeadDim, a.Value)[0]}, e})
}

// latent gives queries [B, S, H, N+R], keys [B, S, H, N+R] and values [B, S, H, V] of x [B, S, E].
// The rotated elements of keys are the same for all heads: they are added to zeros, so that plans
// may shard heads.
func (m *maker) latent(s slot, x *ir.Value, at tokenInfo) (q, k, v *ir.Value) {
	b, a := m.b, m.c.MLA
	normed := func(x *ir.Value, name, dim string) *ir.Value {
		return b.RMSNorm(x, m.at[s.name+name], dim, latentEps, 0)
	}
	if a.QRank > 0 {
		q = normed(m.linear(x, s.name+".q_down"), ".q_norm", ir.QueryRank)
		q = m.linear(q, s.name+".q_up")
	} else {
		q = m.linear(x, s.name+".q")
	}
	size := a.NoPE + a.Rope
	q = b.Concat(ir.HeadDim, b.Slice(q, ir.HeadDim, 0, a.NoPE),
		m.rotated(b.Slice(q, ir.HeadDim, a.NoPE, size), at))
	low := m.linear(x, s.name+".kv_down") // [B, S, rank + R]
	shared := b.Rename(b.Slice(low, ir.KeyRank, a.KVRank, a.KVRank+a.Rope), ir.KeyRank, ir.HeadDim)
	up := m.linear(normed(b.Slice(low, ir.KeyRank, 0, a.KVRank), ".kv_norm", ir.KeyRank),
		s.name+".kv_up") // [B, S, H, N+V]
	k = b.Add(b.Pad(b.Slice(up, ir.HeadDim, 0, a.NoPE), ir.HeadDim, 0, a.Rope),
		b.Pad(m.rotated(shared, at), ir.HeadDim, a.NoPE, 0))
	return q, k, b.Slice(up, ir.HeadDim, a.NoPE, a.NoPE+a.Value)
}

// rotated rotates all elements of x by position.
func (m *maker) rotated(x *ir.Value, at tokenInfo) *ir.Value {
	if m.c.MLA.Interleaved {
		x = m.b.Interleaved(x)
	}
	return m.b.Rope(x, at.positions, m.c.Rope)
}

// latent reads DeepSeek-V3's attention.
func (r *reader) latent() {
	c := r.c
	r.biases()
	c.MLA = &MLA{QRank: or(unlessNull[int64](r, 1536, "q_lora_rank"), 0),
		KVRank: get(r, int64(512), "kv_lora_rank"), NoPE: get(r, int64(128), "qk_nope_head_dim"),
		Rope: get(r, int64(64), "qk_rope_head_dim"), Value: get(r, int64(128), "v_head_dim"),
		Interleaved: get(r, true, "rope_interleave")}
	c.HeadDim = c.MLA.NoPE + c.MLA.Rope
	r.rope(10000)
	c.Rotary = c.MLA.Rope
	c.AttnScale = 1 / math.Sqrt(float64(c.HeadDim))
	if s := r.scaling(); c.Rope.Fast != 0 && s.MScaleAll != nil {
		c.MLA.MScale = *s.MScaleAll
		m := mscale(c.Rope.Factor, c.MLA.MScale)
		c.AttnScale *= m * m
	}
}

// mscale is YaRN's magnitude of attention for stretched positions.
func mscale(factor, by float64) float64 {
	if factor <= 1 {
		return 1
	}
	return 0.1*by*math.Log(factor) + 1
}

// writeLatent writes the keys of latent attention.
func (c *Config) writeLatent(m map[string]any) {
	a := c.MLA
	if a == nil {
		return
	}
	m["q_lora_rank"], m["kv_lora_rank"] = nil, a.KVRank
	if a.QRank > 0 {
		m["q_lora_rank"] = a.QRank
	}
	m["qk_nope_head_dim"], m["qk_rope_head_dim"], m["v_head_dim"] = a.NoPE, a.Rope, a.Value
	m["head_dim"], m["rope_interleave"] = a.Rope, a.Interleaved // head_dim as transformers has it
	if c.MoE == nil {
		m["first_k_dense_replace"] = c.Layers
	}
	if s, ok := m["rope_scaling"].(map[string]any); ok && a.MScale != 0 {
		s["mscale_all_dim"] = number(a.MScale)
		if c.Rope.Magnitude == 1 { // readers that do not know attention_factor take the quotient
			s["mscale"] = number(a.MScale)
		}
	}
}
