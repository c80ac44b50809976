package footprint

import (
	"slices"
	"strings"

	"github.com/deepwell/deepwell/internal/hlo"
	"github.com/deepwell/deepwell/plan"
)

// A Meeting is a kind of collective and the axes along which devices meet, in the order of the
// alphabet.
type Meeting struct {
	Kind hlo.Kind
	Axes string
}

// A Volume is how many tensors one device sends, and their bytes, each as a group sees the whole
// of it: as spmd.Census counts them.
type Volume struct{ Count, Bytes int64 }

// A Traffic is what the collectives of one run of a program send.
type Traffic map[Meeting]Volume

// add counts tensors of so many bytes each.
func (t Traffic) add(kind hlo.Kind, count, bytes int64, axes ...string) {
	if count == 0 || len(axes) == 0 {
		return
	}
	slices.Sort(axes)
	m := Meeting{kind, strings.Join(axes, " ")}
	t[m] = Volume{t[m].Count + count, t[m].Bytes + count*bytes}
}

// Traffic gives what the gradient and the update of a plan send, where the plan has no stages and
// layers are a loop: closed forms that the graphs, and with them the compiled programs, are held
// to.
func (p *Predictor) Traffic(pl *plan.Plan) (gradient, update Traffic) {
	s := p.sizes(pl)
	w := p.way(pl, &s)
	gradient, update = Traffic{}, Traffic{}
	gradient.add(hlo.AllReduce, 1, 4, batchAxes(pl)...)
	t := p.part(0, p.rounds, true, true)
	for _, h := range p.held(&s, t) {
		p.parameter(pl, &s, &w, &h, gradient, update)
	}
	p.tensor(pl, &s, gradient)
	p.context(pl, &s, gradient)
	for _, axes := range p.groups(&s, p.held(&s, t)) {
		update.add(hlo.AllReduce, 1, 4, axes...) // the sum of squares of what these axes cut
	}
	return gradient, update
}

// batchAxes are those that deal tokens.
func batchAxes(pl *plan.Plan) (axes []string) {
	for _, axis := range []string{plan.DataAxis, plan.FSDPAxis, plan.ContextAxis} {
		if pl.Size(axis) > 1 {
			axes = append(axes, axis)
		}
	}
	return axes
}

// parameter adds what a parameter's own collectives send: those of fsdp, and the sums of what is
// whole on several devices.
func (p *Predictor) parameter(pl *plan.Plan, s *sizes, w *way, h *holding, gradient,
	update Traffic) {
	fsdp := plan.FSDPAxis
	one, rounds := h.whole(), int64(1) // elements of a tensor, and how many there are
	if h.stack && w.gather == "layer" {
		one, rounds = h.param.whole, h.layers
	}
	if h.cut {
		switch {
		case w.gather == "step":
			update.add(hlo.AllGather, 1, h.whole()*w.elem, fsdp)
		case h.stack && w.gather == "layer": // once more on the way back
			gradient.add(hlo.AllGather, 2*rounds, one*w.elem, fsdp)
		default:
			gradient.add(hlo.AllGather, 1, one*w.elem, fsdp)
		}
		if w.zero < 2 {
			update.add(hlo.ReduceScatter, 1, h.whole()*w.sum, fsdp)
		} else {
			gradient.add(hlo.ReduceScatter, rounds, one*w.sum, fsdp)
		}
	}
	var axes []string
	for _, axis := range batchAxes(pl) {
		if axis != fsdp || !h.cut {
			axes = append(axes, axis)
		}
	}
	if h.shared > 0 { // each has the gradient of its own head
		gradient.add(hlo.AllGather, h.layers, h.shared*h.param.whole*w.elem, plan.TensorAxis)
	}
	own := pl.TP.Sequence && h.name != "position" || h.each // terms of its own tokens, or heads
	if s.tp > 1 && !h.tensor && h.shared == 0 && own {
		axes = append(axes, plan.TensorAxis)
	}
	update.add(hlo.AllReduce, 1, h.stored()*w.sum, axes...)
}

// tensor adds what goes between the halves of layers that tp cuts: each half sums its results and,
// on the way back, gradients of what came in. With a cut sequence a sum leaves pieces, and pieces
// are gathered before the products, for their gradients once more.
func (p *Predictor) tensor(pl *plan.Plan, s *sizes, t Traffic) {
	if s.tp == 1 {
		return
	}
	axis, layers := plan.TensorAxis, p.config.Layers
	values, halves := s.values(s.tokens, s.embed), int64(1)
	if pl.TP.Overlap {
		halves = 2
	}
	if pl.TP.Sequence {
		t.add(hlo.AllGather, 6*layers*halves, values/halves, axis)
		t.add(hlo.ReduceScatter, 4*layers*halves, values/halves, axis)
		t.add(hlo.AllGather, 2, values, axis) // before the head, and for the table's gradient
		t.add(hlo.ReduceScatter, 2, values, axis)
		if p.config.Learned { // the table of positions sees all tokens
			t.add(hlo.AllGather, 1, values, axis)
		}
	} else {
		t.add(hlo.AllReduce, 4*layers*halves, values/halves, axis)
		t.add(hlo.AllReduce, 2, values, axis)
	}
	t.add(hlo.AllReduce, 1, s.tokens*4, axis)   // the largest logit of each place
	t.add(hlo.AllReduce, 1, 2*s.tokens*4, axis) // the sum, and the label's
}

// context adds what keys and values of the whole sequence cost.
func (p *Predictor) context(pl *plan.Plan, s *sizes, t Traffic) {
	n, axis, layers := s.cp, plan.ContextAxis, p.config.Layers
	if n == 1 {
		return
	}
	halves := int64(1)
	if pl.TP.Overlap && s.tp > 1 {
		halves = 2
	}
	layers *= halves
	keys := s.tokens / halves * s.keys
	if pl.CP.Kind != "ring" {
		t.add(hlo.AllGather, 4*layers, n*keys*s.elem, axis)
		t.add(hlo.ReduceScatter, 2*layers, n*keys*s.elem, axis)
		return
	}
	t.add(hlo.CollectivePermute, (4*(n-1)+4)*layers, keys*s.elem, axis)
	t.add(hlo.CollectivePermute, 2*(n-2)*layers, keys*4, axis) // sums on their way, in f32
}

// groups lists the sets of axes that cut parameters.
func (p *Predictor) groups(s *sizes, list []holding) (groups [][]string) {
	for i := range list {
		var axes []string
		if list[i].cut {
			axes = append(axes, plan.FSDPAxis)
		}
		if list[i].tensor {
			axes = append(axes, plan.TensorAxis)
		}
		if len(axes) > 0 && !slices.ContainsFunc(groups, func(g []string) bool {
			return slices.Equal(g, axes)
		}) {
			groups = append(groups, axes)
		}
	}
	return groups
}
