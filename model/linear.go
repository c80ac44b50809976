package model

import (
	"strings"

	"github.com/deepwell/deepwell/ir"
)

// A Linear is the linear layers of a model that share a name and a shape.
type Linear struct {
	Name    string
	Tag     ir.Tag
	In, Out int64
	Head    int64 // elements of a head, where one side is made of heads
	// Copies is how many there are in a layer, which are experts, and Times how many of them a token
	// passes through.
	Copies, Times int64
	Layers        []int // none where it stands outside of layers
}

// Linears lists the linear layers of a model, given its parameters, with the output layer and the
// router.
func (c *Facts) Linears(params []Param) []Linear {
	list := c.uncommon()
	for _, p := range params {
		if !p.Stacked() || p.Vector() {
			continue
		}
		b := p.box()
		l := Linear{Name: p.Name[strings.LastIndexByte(p.Name, '.')+1:], Tag: p.Tag, Out: b.rows,
			In: b.width, Copies: 1, Times: 1}
		if p.Axis == 1 {
			l.In, l.Out = b.rows, b.width
		}
		switch p.Tag {
		case ir.Attn:
			l.Head = c.HeadDim
		case ir.Experts:
			l.Copies, l.Times = c.MoE.Experts, c.MoE.TopK
		}
		for i := range p.Dims[0].Size {
			l.Layers = append(l.Layers, int(p.First+i*p.Step))
		}
		list = append(list, l)
	}
	return append(list, Linear{Name: "head", Tag: ir.Head, In: c.Hidden, Out: c.Vocab, Copies: 1,
		Times: 1})
}

// uncommon lists the linear layers of models that have no list of parameters yet.
func (c *Facts) uncommon() (list []Linear) {
	if c.MLA == nil {
		return nil
	}
	moe := MoE{Dense: c.Layers}
	if c.MoE != nil {
		moe = *c.MoE
	}
	add := func(tag ir.Tag, from, to, copies, times int64, rows ...Linear) {
		for _, l := range rows {
			l.Tag, l.Copies, l.Times = tag, copies, times
			for i := from; i < to; i++ {
				l.Layers = append(l.Layers, int(i))
			}
			if l.In > 0 && l.Out > 0 && from < to {
				list = append(list, l)
			}
		}
	}
	q, kv := c.Heads*c.HeadDim, c.KVHeads*c.HeadDim
	attn := []Linear{{Name: "q", In: c.Hidden, Out: q}, {Name: "k", In: c.Hidden, Out: kv},
		{Name: "v", In: c.Hidden, Out: kv}, {Name: "o", In: q, Out: c.Hidden}}
	if a := c.MLA; a != nil {
		attn = []Linear{{Name: "q_down", In: c.Hidden, Out: a.QRank},
			{Name: "q_up", In: a.QRank, Out: c.Heads * (a.NoPE + a.Rope)},
			{Name: "kv_down", In: c.Hidden, Out: a.KVRank + a.Rope},
			{Name: "kv_up", In: a.KVRank, Out: c.Heads * (a.NoPE + a.Value)},
			{Name: "o", In: c.Heads * a.Value, Out: c.Hidden}}
	}
	gated := func(prefix string, size int64) []Linear {
		rows := []Linear{{Name: prefix + "gate", In: c.Hidden, Out: size},
			{Name: prefix + "up", In: c.Hidden, Out: size}, {Name: prefix + "down", In: size, Out: c.Hidden}}
		if !c.Gated {
			return rows[1:]
		}
		return rows
	}
	add(ir.Attn, 0, c.Layers, 1, 1, attn...)
	add(ir.MLP, 0, moe.Dense, 1, 1, gated("", c.MLP)...)
	add(ir.MLP, moe.Dense, c.Layers, 1, 1, gated("shared_", moe.Shared)...)
	add(ir.Experts, moe.Dense, c.Layers, moe.Experts, moe.TopK, gated("expert_", moe.MLP)...)
	add(ir.Router, moe.Dense, c.Layers, 1, 1, Linear{Name: "router", In: c.Hidden, Out: moe.Experts})
	return list
}
