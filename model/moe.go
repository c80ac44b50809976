package model

import (
	"math"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/program"
)

// LoadPrefix begins the names of the results of a graph that say how busy experts were, one for
// each loop over layers with experts: [layer, router] in f32. Of each layer they have the number of
// choices of every expert, and behind these the numbers of [LoadOverflow] and so on.
const LoadPrefix = "stat.load."

// What a load has behind the choices of every expert, as sums over tokens. Overflow is how many
// choices had no slot: they are missing in the result, which must not be used. Dropped is how many
// were dropped by the capacity factor. Entropy is the router's, in nats.
const (
	LoadDropped = iota
	LoadEntropy
	LoadOverflow
	LoadExtras // how many there are
)

// A routing is the router's decision about tokens [B, S]: the experts of each and their weights,
// both [B, S, choice].
type routing struct {
	experts, weights *ir.Value
	logits, scores   *ir.Value // [B, S, router], in f32
}

// sparse is a mixture of experts: the router's choices of x [B, S, E], their experts' MLPs weighted
// and added up, and the shared experts. load is what the experts had to do.
func (m *maker) sparse(s slot, x, share *ir.Value) (y, load *ir.Value) {
	b, e := m.b, m.c.MoE
	var r routing
	var pos *ir.Value
	b.Tagged(ir.Router, func() {
		r = m.route(s, x)
		tokens := []string{ir.Batch, ir.Seq, ir.Choice}
		chosen := r.experts
		if m.experts.Capacity > 0 {
			r.experts = m.drop(chosen)
		}
		pos = b.ExpertPositions(r.experts, e.Experts, true, tokens...)
		load = m.load(r, chosen, pos)
		if loss := m.routerLoss(r, chosen, share); loss != nil {
			r.weights = b.AttachLoss(r.weights, loss)
		}
	})
	b.Tagged(ir.Experts, func() {
		slots := m.slots()
		to := func(v *ir.Value) *ir.Value {
			return b.Dispatch(v, r.experts, pos, e.Experts, slots, m.experts.Blocks)
		}
		rows, gates := to(x), b.Convert(to(r.weights), m.elem)
		y = b.Combine(m.expertMLP(s, rows, gates), r.experts, pos)
	})
	if e.Shared > 0 {
		b.Tagged(ir.MLP, func() { y = b.Add(y, m.mlp(s.name+".shared_", x)) })
	}
	return y, load
}

// Layer builds a mixture of experts with SiLU gates for tokens x [batch, seq, embed] in a graph of
// one's own: a drop-in for its MLP. Weights have the names and dimensions of the parameters of a
// model with experts, less the block's: router [embed, router] in f32; expert_gate, expert_up and
// expert_down [experts, embed, mlp]; router.correction [router], shared_gate and so on as the
// configuration has them. load is what graphs give as [LoadPrefix]: nobody may use y if its
// [LoadOverflow] is not 0. Losses of the router are left to the caller.
func (e *MoE) Layer(b *ir.Builder, x *ir.Value, weights map[string]*ir.Value, how ExpertShape) (
	y, load *ir.Value) {
	const name = "moe"
	m := &maker{c: &Config{MoE: e, Gated: true, Activation: SiLU}, b: b, elem: x.Type.Elem,
		at: map[string]*ir.Value{}, experts: how}
	if len(x.Type.Dims) == 3 { // else the router's operations report it
		m.rows = x.Type.Dims[:2]
	} else {
		m.rows = make([]ir.Dim, 2)
	}
	for key, v := range weights {
		m.at[name+"."+key] = v
	}
	return m.sparse(slot{name: name, experts: true}, x, nil)
}

// route scores all experts in f32 and chooses some.
func (m *maker) route(s slot, x *ir.Value) routing {
	b, e := m.b, m.c.MoE
	r := routing{logits: b.Linear(b.Convert(x, dtype.F32), m.at[s.name+".router"])}
	if bias := m.at[s.name+".router.bias"]; bias != nil {
		r.logits = b.Add(r.logits, bias)
	}
	switch {
	case e.OverChosen:
		r.scores = r.logits
	case e.Score == sigmoid:
		r.scores = b.Sigmoid(r.logits)
	default:
		r.scores = b.Softmax(r.logits, ir.RouterDim)
	}
	by, correction := r.scores, m.at[s.name+".router.correction"]
	if correction != nil {
		by = b.Add(by, correction)
	}
	if e.Groups > 1 {
		by = m.groups(by)
	}
	_, chosen := b.TopK(by, ir.RouterDim, e.TopK)
	weights := b.Rename(b.Gather(r.scores, chosen, ir.RouterDim), ir.RouterDim, ir.Choice)
	r.experts = b.Rename(chosen, ir.RouterDim, ir.Choice)
	switch {
	case e.OverChosen:
		weights = b.Softmax(weights, ir.Choice)
	case e.Normalize && e.Score == sigmoid: // as transformers bounds it: scores may all be 0
		weights = b.Div(weights, b.Shift(b.Sum(weights, ir.Choice), 1e-20))
	case e.Normalize:
		weights = b.Div(weights, b.Sum(weights, ir.Choice))
	}
	if e.Scale != 0 && e.Scale != 1 {
		weights = b.Scale(weights, e.Scale)
	}
	if correction != nil {
		weights = b.ExpertLoad(weights, r.experts, correction)
	}
	r.weights = weights
	return r
}

// groups sets the scores of groups that are not among the best below all others, which corrections
// may bring below 0: a group is as good as its two best experts together (DeepSeek-V3, arXiv
// 2412.19437, section 2.1.2).
func (m *maker) groups(scores *ir.Value) *ir.Value {
	const group, member = "group", "member"
	b, e := m.b, m.c.MoE
	each := e.Experts / e.Groups
	split := b.Split(scores, ir.RouterDim, group, member, each)
	two, _ := b.TopK(split, member, min(2, each))
	_, best := b.TopK(b.Sum(two, member), group, e.TopGroups)
	one := b.Shift(b.Scale(b.Convert(best, dtype.F32), 0), 1)
	chosen := b.Scatter(one, best, group, e.Groups)
	in := b.Compare("gt", chosen, b.Fill(ir.Type{Elem: dtype.F32}, 0))
	out := b.Fill(ir.Type{Elem: dtype.F32}, -1e30)
	return b.Merge(b.Select(in, split, out), ir.RouterDim, group, member)
}

// drop lets go of the choices of an expert behind its capacity in a sequence, in the order of
// tokens: Capacity times its mean load.
func (m *maker) drop(chosen *ir.Value) *ir.Value {
	b, e := m.b, m.c.MoE
	room := math.Ceil(m.experts.Capacity * float64(m.rows[1].Size*e.TopK) / float64(e.Experts))
	place := b.ExpertPositions(chosen, e.Experts, false, ir.Seq, ir.Choice)
	t := ir.Type{Elem: chosen.Type.Elem}
	return b.Select(b.Compare("lt", place, b.Fill(t, room)), chosen, b.Fill(t, -1))
}

// slots is how many an expert has for the tokens of the batch.
func (m *maker) slots() int64 {
	return m.experts.Room(m.rows[0].Size*m.rows[1].Size, m.c.MoE.TopK, m.c.MoE.Experts)
}

// Room is how many slots an expert has for tokens that choose some experts each: Slots times its
// mean load, and no more than there are tokens, which choose an expert once.
func (s ExpertShape) Room(tokens, choices, experts int64) int64 {
	if s.Slots <= 0 {
		return tokens
	}
	mean := float64(tokens*choices) / float64(experts)
	n := max(1, int64(math.Ceil(s.Slots*mean)))
	if s.Blocks {
		n = ir.WholeBlocks(n, 1)
	}
	return min(tokens, n)
}

// expertMLP computes the MLPs of all experts on their rows [experts, slots, E]. Rows are weighted
// before the down projection, which is linear: then the gradient of a weight needs neither the
// result nor a second combine.
func (m *maker) expertMLP(s slot, rows, gates *ir.Value) *ir.Value {
	b, name := m.b, s.name+".expert_"
	h := m.linear(rows, name+"up")
	switch gate, e := m.at[name+"gate"], m.c.MoE; {
	case gate == nil:
		h = m.activate(h)
	case e.Limit > 0:
		h = m.bounded(m.linear(rows, name+"gate"), h)
	default:
		h = b.Mul(m.activate(m.linear(rows, name+"gate")), h)
	}
	y := b.LinearIn(b.Mul(h, gates), m.at[name+"down"], m.matmulType)
	if bias := m.at[name+"down.bias"]; bias != nil {
		y = b.Add(y, b.Mul(b.Broadcast(bias, 1, gates.Type.Dims[1]), gates))
	}
	return y
}

// bounded is gpt-oss's gate: the gate bounded from above, up on both sides, and up + 1.
func (m *maker) bounded(gate, up *ir.Value) *ir.Value {
	b, e := m.b, m.c.MoE
	gate, up = m.below(gate, e.Limit), m.clamp(up, e.Limit)
	return b.Mul(b.Mul(gate, b.Sigmoid(b.Scale(gate, e.Alpha))), b.Shift(up, 1))
}

// load counts what the experts of a layer were chosen for, and what went wrong.
func (m *maker) load(r routing, chosen, pos *ir.Value) *ir.Value {
	b, e := m.b, m.c.MoE
	tokens := []string{ir.Batch, ir.Seq, ir.Choice}
	count := func(mask *ir.Value) *ir.Value { return b.Sum(b.Convert(mask, dtype.F32), tokens...) }
	t := ir.Type{Elem: pos.Type.Elem}
	logits := b.StopGradient(r.logits)
	p := b.Softmax(logits, ir.RouterDim)
	// -Σ p log p, where p log p is 0 for p 0.
	tiny := b.Fill(ir.Type{Elem: dtype.F32}, 1e-30)
	entropy := b.Neg(b.Sum(b.Mul(p, b.Log(b.Add(p, tiny))), ir.Batch, ir.Seq, ir.RouterDim))
	one := func(v *ir.Value) *ir.Value {
		return b.Broadcast(v, 0, ir.Dim{Name: ir.RouterDim, Size: 1})
	}
	dropped := count(b.Compare("lt", r.experts, b.Fill(t, 0)))
	// What devices count of the same tokens stands together, so that one collective adds it up.
	seen := b.Concat(ir.RouterDim, b.ExpertCounts(chosen, e.Experts, tokens...), one(dropped),
		one(entropy))
	return b.Concat(ir.RouterDim, seen, one(b.ExpertOverflow(pos, m.slots(), m.experts.Blocks)))
}

// routerLoss is what the router's losses add to the loss of the step; nil without any.
//
// The load-balancing loss of a sequence is experts·Σ f·P over the experts, with f the part of the
// choices that an expert has, before any is dropped, and P its mean score (Fedus et al., 2021,
// equations 4 to 6; of sequences, as in DeepSeek-V3, so that it does not depend on microbatches or
// devices). The z loss of a token is the square of the logits' log-sum-exp (Zoph et al., 2022).
// Both are means over the tokens of the step.
func (m *maker) routerLoss(r routing, chosen, share *ir.Value) *ir.Value {
	b, e := m.b, m.c.MoE
	aux, zLoss := m.experts.losses(e)
	if share == nil || aux == 0 && zLoss == 0 {
		return nil
	}
	var loss *ir.Value
	if aux != 0 {
		p := r.scores
		switch {
		case e.OverChosen:
			p = b.Softmax(r.logits, ir.RouterDim)
		case e.Score == sigmoid:
			p = b.Div(p, b.Shift(b.Sum(p, ir.RouterDim), 1e-20))
		}
		f := b.ExpertCounts(chosen, e.Experts, ir.Seq, ir.Choice)
		each := b.Mul(f, b.Sum(p, ir.Seq))
		tokens := float64(m.rows[1].Size)
		loss = b.Scale(b.Sum(each, ir.Batch, ir.RouterDim),
			aux*float64(e.Experts)/(float64(e.TopK)*tokens))
	}
	if zLoss != 0 {
		top := b.StopGradient(b.Max(r.logits, ir.RouterDim))
		z := b.Add(b.Log(b.Sum(b.Exp(b.Sub(r.logits, top)), ir.RouterDim)), top)
		z = b.Scale(b.Sum(b.Mul(z, z), ir.Batch, ir.Seq), zLoss)
		if loss != nil {
			z = b.Add(loss, z)
		}
		loss = z
	}
	return b.Mul(loss, share)
}

// AsLoad makes a result of a graph the load of a slot of layers, or of the layers of a router's
// parameter.
func AsLoad(v *ir.Value, slot string) *ir.Value {
	v.Name = LoadPrefix + slot
	return v.As(program.Stat.For(""))
}
