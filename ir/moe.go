package ir

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
)

// The names of the dimensions of a mixture of experts. A router scores all experts for every token
// [batch, seq, router] and chooses some, [batch, seq, choice] of expert numbers. Rows of tokens are
// copied to the slots of their experts, [experts, slots, embed], so that one batched GEMM computes
// all experts. Scores and experts have names of their own, since expert parallelism shards experts
// and not scores.
const (
	RouterDim = "router"
	Choice    = "choice"
	ExpertDim = "experts"
	Slots     = "slots"
)

// expertKinds are the operations that bring tokens to experts and back. Choices below 0 are
// dropped: they have no slot. A slot is an expert and a position in its list; positions from the
// capacity on have no slot either, and whoever chose the capacity counts them.
func expertKinds() map[string]Kind {
	return map[string]Kind{
		"expert_positions": {1, takes(1, inferPositions), nil, positionsWork},
		"expert_counts":    {1, takes(1, inferCounts), nil, nil},
		"expert_overflow":  {1, takes(1, inferOverflow), nil, nil},
		"expert_load":      {1, takes(3, inferLoad), loadVJP, nil},
		"attach_loss": {1, takes(2, inferAttach), func(d *Differ, op *Op, dy []*Value) []*Value {
			return []*Value{dy[0], d.Fill(dual(op.In[1].Type), 1)}
		}, nil},
		// Both are each other's transpose, and linear but for what a payload rounds, which gradients
		// pass by: they are the gradients of the rounded rows (straight through).
		"dispatch": {1, takes(3, inferDispatch), func(d *Differ, op *Op, dy []*Value) []*Value {
			a := attrs(map[string]any{"axis": op.Attrs.Text("axis"), "apart": op.apart()})
			return []*Value{d.one("combine", a, dy[0], d.Use(op.In[1]), d.Use(op.In[2])), nil, nil}
		}, dispatchWork},
		"combine": {1, takes(3, inferCombine), func(d *Differ, op *Op, dy []*Value) []*Value {
			t := op.In[0].Type
			a := attrs(map[string]any{"axis": op.Attrs.Text("axis"), "experts": t.Dims[0].Size,
				"capacity": t.Dims[1].Size, Payload: op.Attrs.Text(Payload)})
			return []*Value{d.one("dispatch", a, dy[0], d.Use(op.In[1]), d.Use(op.In[2])), nil, nil}
		}, dispatchWork},
	}
}

// choices checks that an argument is a list of expert numbers for every token.
func choices(v *Value) (t Type, err error) {
	t = v.Type
	if n := len(t.Dims); n == 0 || t.Dims[n-1].Name != Choice || t.Elem != dtype.S32 {
		return t, fmt.Errorf("%s is not a list of choices, s32 [..., %s]", t, Choice)
	}
	_, err = KeepPlacement(t, Choice)
	return t, err
}

// inferPositions counts, for each choice, the choices of the same expert before it. over are the
// last dimensions, in the order of memory; local counts within a device's shard.
func inferPositions(_ *Graph, op *Op) ([]Type, error) {
	t, err := choices(op.In[0])
	if err != nil {
		return nil, err
	}
	over := op.Attrs.List("over")
	if n := len(t.Dims) - len(over); n < 0 || !slices.Equal(Names(t.Dims[n:]), over) ||
		op.Attrs.Int("experts") < 1 {
		return nil, fmt.Errorf("[%s] are not the last dimensions of %s", joined(over), t)
	}
	if !op.Attrs.Bool("local") {
		if _, err := KeepPlacement(t, over...); err != nil {
			return nil, err
		}
	}
	return []Type{t}, nil
}

// inferCounts replaces the dimensions over which choices are counted by one of all experts.
func inferCounts(_ *Graph, op *Op) ([]Type, error) {
	t, err := choices(op.In[0])
	if err != nil {
		return nil, err
	}
	over, n := op.Attrs.List("over"), op.Attrs.Int("experts")
	if !slices.Contains(over, Choice) || n < 1 {
		return nil, fmt.Errorf("choices of %d experts are not counted over [%s]", n, joined(over))
	}
	out := Type{Elem: dtype.F32, Dims: append(Without(t.Dims, over...), Dim{RouterDim, n})}
	for _, s := range t.Place {
		how := s.Dim
		if slices.Contains(over, how) {
			how = Partial
		}
		out.Place = out.Place.With(s.Axis, how)
	}
	return []Type{out}, nil
}

// inferOverflow counts the positions from the capacity on, in f32.
func inferOverflow(_ *Graph, op *Op) ([]Type, error) {
	t, err := choices(op.In[0])
	out := Type{Elem: dtype.F32}
	for _, s := range t.Place {
		out.Place = out.Place.With(s.Axis, Partial)
	}
	return []Type{out}, err
}

// inferLoad gives the weights of choices as they are.
func inferLoad(_ *Graph, op *Op) ([]Type, error) {
	w, bias := op.In[0].Type, op.In[2].Type
	idx, err := choices(op.In[1])
	if err != nil {
		return nil, err
	}
	if err := sameDims(w, idx); err != nil {
		return nil, err
	}
	if !w.Place.Equal(idx.Place) || len(bias.Dims) != 1 || bias.Dims[0].Name != RouterDim ||
		len(bias.Place) > 0 {
		return nil, fmt.Errorf("%s, %s and %s are not weights, choices and a bias", w, idx, bias)
	}
	return []Type{w}, nil
}

// loadVJP gives the bias what is more than its share of the load, in place of a gradient: the
// number of choices of each expert less the mean. Microbatches and devices add up, exactly if the
// number of experts is a power of two; the rule of the bias reads the sign alone (Wang et al.,
// 2024, arXiv 2408.15664).
func loadVJP(d *Differ, op *Op, dy []*Value) []*Value {
	idx, bias := d.Use(op.In[1]), op.In[2].Type
	n := bias.Dims[0].Size
	counts := d.ExpertCounts(idx, n, Names(idx.Type.Dims)...)
	over := d.Sub(counts, d.Scale(d.Sum(counts, RouterDim), 1/float64(n)))
	return []*Value{dy[0], nil, d.Convert(over, bias.Elem)}
}

// inferAttach gives the first argument as it is; the second is a number.
func inferAttach(_ *Graph, op *Op) ([]Type, error) {
	if t := op.In[1].Type; len(t.Dims) > 0 || t.Elem.Kind() != dtype.Float {
		return nil, fmt.Errorf("%s is not a loss", t)
	}
	_, err := KeepPlacement(op.In[0].Type)
	return []Type{op.In[0].Type}, err
}

// apart tells whether the choices of a token are kept apart: x [..., choice, ...], not added up.
func (op *Op) apart() bool {
	if op.Kind == "combine" {
		return op.Attrs.Bool("apart")
	}
	return op.In[0].Type.Index(Choice) >= 0
}

// routed checks the choices and positions of a dispatch or combine.
func routed(op *Op) (Type, error) {
	idx, err := choices(op.In[1])
	if err == nil && !op.In[2].Type.Equal(idx) {
		err = fmt.Errorf("choices %s and positions %s differ", idx, op.In[2].Type)
	}
	return idx, err
}

// inferDispatch gives [experts, slots, ...] of x [..., ...]: the dimensions of the tokens become
// slots, and so do shards of them. Along axis, devices have different experts of the same tokens.
func inferDispatch(_ *Graph, op *Op) ([]Type, error) {
	x := op.In[0].Type
	idx, err := routed(op)
	if err != nil {
		return nil, err
	}
	tokens := len(idx.Dims)
	if !op.apart() {
		tokens--
	}
	n, c := op.Attrs.Int("experts"), op.Attrs.Int("capacity")
	if len(x.Dims) < tokens || !slices.Equal(x.Dims[:tokens], idx.Dims[:tokens]) || n < 1 || c < 1 {
		return nil, fmt.Errorf("%s are not rows of %s for %d slots of %d experts", x, idx, c, n)
	}
	if err := checkPayload(op, x, tokens); err != nil {
		return nil, err
	}
	out := Type{Elem: x.Elem, Dims: append([]Dim{{ExpertDim, n}, {Slots, c}}, x.Dims[tokens:]...)}
	axis := op.Attrs.Text("axis")
	if axis != "" && x.Place.On(axis)+idx.Place.On(axis) != "" {
		return nil, fmt.Errorf("%s and %s are sharded along %s, which shards experts", x, idx, axis)
	}
	for _, a := range axesOf(x, idx) {
		how, token := x.Place.On(a), idx.Place.On(a)
		switch {
		case how == token:
			how = Slots
		case token != "" || slices.Contains(Names(x.Dims[:tokens]), how):
			return nil, fmt.Errorf("along %s rows %s and choices %s are placed differently", a, x, idx)
		}
		out.Place = out.Place.With(a, how)
	}
	if axis != "" {
		out.Place = out.Place.With(axis, ExpertDim)
	}
	return []Type{out}, nil
}

// inferCombine gives every token what its slots hold, added up or apart; along axis, where devices
// have different experts, terms of it.
func inferCombine(_ *Graph, op *Op) ([]Type, error) {
	y, axis := op.In[0].Type, op.Attrs.Text("axis")
	idx, err := routed(op)
	if err != nil {
		return nil, err
	}
	if len(y.Dims) < 2 || y.Dims[0].Name != ExpertDim || y.Dims[1].Name != Slots {
		return nil, fmt.Errorf("%s has no slots of experts", y)
	}
	tokens := idx.Dims
	if !op.apart() {
		tokens = tokens[:len(tokens)-1]
	}
	out := Type{Elem: y.Elem, Dims: slices.Concat(tokens, y.Dims[2:])}
	for _, a := range axesOf(y, idx) {
		how, token := y.Place.On(a), idx.Place.On(a)
		switch {
		case a == axis && how == ExpertDim && token == "":
			how = Partial
		case how == Slots && token != "":
			how = token
		case token != "" || how == Slots || how == ExpertDim:
			return nil, fmt.Errorf("along %s slots %s and choices %s are placed differently", a, y, idx)
		}
		out.Place = out.Place.With(a, how)
	}
	return []Type{out}, nil
}

// positionsWork is a pass over the choices by experts, as one-hot counts of 4 bytes are made.
func positionsWork(_ *Graph, op *Op) Work {
	return Work{Class: Streaming, Bytes: 2 * bytesOf(op.In[0]) * op.Attrs.Int("experts")}
}

// dispatchWork copies the rows of slots: a dispatch reads as many as it writes, a combine reads one
// for each choice.
func dispatchWork(_ *Graph, op *Op) Work {
	x, rows := op.In[0], op.Out[0]
	if op.Kind == "dispatch" {
		return Work{Class: Streaming, Bytes: 2 * bytesOf(rows)}
	}
	one := x.Type.Shape()
	one.Dims = one.Dims[2:]
	return Work{Class: Streaming,
		Bytes: one.Bytes()*op.In[1].Type.Shape().Elements() + bytesOf(rows)}
}

// ExpertPositions gives for each choice [..., choice] the number of choices of the same expert
// before it, in the order of memory over the last dimensions; -1 for a dropped choice. local counts
// what a device has, where these dimensions are sharded.
func (b *Builder) ExpertPositions(idx *Value, experts int64, local bool, over ...string) *Value {
	a := map[string]any{"experts": experts, "over": over, "local": local}
	return b.one("expert_positions", attrs(a), idx)
}

// ExpertCounts counts the choices of each expert over dimensions: [..., router] in f32.
func (b *Builder) ExpertCounts(idx *Value, experts int64, over ...string) *Value {
	return b.one("expert_counts", attrs(map[string]any{"experts": experts, "over": over}), idx)
}

// ExpertOverflow counts the choices that a dispatch with this capacity has no slot for.
func (b *Builder) ExpertOverflow(pos *Value, capacity int64, blocks bool) *Value {
	return b.one("expert_overflow", attrs(map[string]any{"capacity": capacity, "blocks": blocks}), pos)
}

// WholeBlocks rounds up the slots of an expert on one of n devices, whose rows meet where the
// expert is, so that these are whole blocks of every format: wgrad quantizes along them. Tensor
// cores take 128 rows at a time, and from 1024 on all of them are tokens' slots; fewer are padded
// by the kernel, since slots cost wire as well.
func WholeBlocks(slots, n int64) int64 {
	const block, tile, many = 32, 128, 1024
	unit := int64(block)
	if slots*n >= many {
		unit = tile
	}
	for m := n; unit > 1 && m%2 == 0; m /= 2 {
		unit /= 2
	}
	return (slots + unit - 1) / unit * unit
}

// ExpertLoad gives the weights of choices, and lets a bias of the scores [router] have the load of
// the experts as its gradient: see loadVJP.
func (b *Builder) ExpertLoad(weights, idx, bias *Value) *Value {
	return b.one("expert_load", nil, weights, idx, bias)
}

// AttachLoss gives x, and lets a loss have the gradient 1 wherever a gradient flows through x: a
// term of the loss that no later layer needs to carry to the end (Megatron-Core's
// MoEAuxLossAutoScaler). The loss that a graph returns is without it.
func (b *Builder) AttachLoss(x, loss *Value) *Value { return b.one("attach_loss", nil, x, loss) }

// DetachLosses lets go of attached losses in a graph whose gradient has been taken: nobody reads
// their values, and what computes them is dropped, collectives included. It changes the graph.
func (g *Graph) DetachLosses() {
	if !g.detach() {
		return
	}
	inputs := g.Inputs
	g.prune()
	g.Inputs = inputs // programs take them by name
}

// detach makes attached losses what is left of them; it tells whether there were any.
func (g *Graph) detach() (any bool) {
	for _, op := range g.Ops {
		switch {
		case op.Kind == "attach_loss":
			op.Kind, op.In, any = "stop_gradient", op.In[:1], true
		case op.Body != nil:
			any = op.Body.detach() || any
		}
	}
	return any
}

// Dispatch copies rows of tokens x [..., embed] to slots [experts, capacity, embed], by choice and
// position; or numbers of choices x [..., choice] to [experts, capacity]. Slots that nobody has are
// zero. blocks keeps them [WholeBlocks] where devices have parts of the tokens.
func (b *Builder) Dispatch(x, idx, pos *Value, experts, capacity int64, blocks bool) *Value {
	a := map[string]any{"experts": experts, "capacity": capacity, "blocks": blocks}
	return b.one("dispatch", attrs(a), x, idx, pos)
}

// Combine adds up for every token what its slots hold.
func (b *Builder) Combine(y, idx, pos *Value) *Value { return b.one("combine", nil, y, idx, pos) }
