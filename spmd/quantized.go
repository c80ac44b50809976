package spmd

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
)

// Quantizes tells whether a graph asks for products in few bits.
func Quantizes(g *ir.Graph) bool {
	return slices.ContainsFunc(g.Ops, func(op *ir.Op) bool {
		if op.Body != nil && Quantizes(op.Body) {
			return true
		}
		return slices.ContainsFunc([]string{"fprop", "dgrad", "wgrad"}, func(product string) bool {
			return op.Attrs.Text(product) != ""
		})
	})
}

// QuantizedCopies are what graphs take in the place of parameters: copies in blocks, and parameters
// as they are.
type QuantizedCopies struct {
	Copies    []ir.Copy
	plain     map[string]dtype.DType // parameters that some graph takes as they are
	quantized bool
	// Watch has the copies reported on, and made even if none is quantized.
	Watch bool
}

// Expand writes quantized GEMMs out, if a graph asks for any, and remembers what it takes. Its
// parameters must still have their own names.
func (w *QuantizedCopies) Expand(g *ir.Graph, tell ir.Report) (stats []ir.Stat, err error) {
	if Quantizes(g) {
		var copies []ir.Copy
		if copies, stats, err = ir.LowerQuantized(g, program.Copy.Of, plan.DataAxes(), tell); err != nil {
			return nil, err
		}
		w.quantized = true
		for _, c := range copies {
			if !slices.ContainsFunc(w.Copies, func(d ir.Copy) bool { return d.Names[0] == c.Names[0] }) {
				w.Copies = append(w.Copies, c)
			}
		}
	}
	if w.plain == nil {
		w.plain = map[string]dtype.DType{}
	}
	for _, v := range g.Params() {
		if !slices.ContainsFunc(w.Copies, func(c ir.Copy) bool {
			return slices.Contains(c.Names, v.Name)
		}) {
			w.plain[v.Name] = v.Type.Elem
		}
	}
	return stats, nil
}

// unused tells whether a result of an update is a copy of a whole parameter that nobody takes.
func (w *QuantizedCopies) unused(is program.Meaning) bool {
	return w != nil && w.quantized && is.Role == program.Copy && !w.plain[is.Param].Valid()
}

// make makes the copies of a parameter in blocks from what a device keeps of it. Where the loss
// takes more than that, pieces are quantized before they are joined if that makes no difference.
func (w *QuantizedCopies) make(b *ir.Builder, param string, kept *ir.Value,
	l *Layout) (out []result) {
	if w == nil {
		return nil
	}
	var amax *ir.Value
	for _, c := range w.Copies {
		if c.Param != param {
			continue
		}
		_, list, join := rounded(b, &c, kept, l, &amax)
		for i, v := range list {
			if join && i < 2 {
				v = l.gather(b, v)
			}
			if slices.ContainsFunc(out, func(r result) bool { return r.v == v }) {
				v = b.Scale(v, 1) // a result has one name
			}
			out = append(out, result{v, c.Names[i], program.Copy.For(param)})
		}
	}
	return out
}

// rounded makes a copy of what a device has of a parameter, and gives what was rounded as well, and
// whether its shards are to be gathered yet. The largest magnitude of NVFP4 is one for
// all copies of a weight, in whatever orientation.
func rounded(b *ir.Builder, c *ir.Copy, kept *ir.Value, l *Layout, amax **ir.Value) (x *ir.Value,
	list []*ir.Value, join bool) {
	x, join = b.Convert(kept, c.Elem), l.copied()
	if join && !c.Within(x.Type) {
		x, join = l.gather(b, x), false
	}
	how := c.Quantize
	if how.Format.TensorScale() {
		if *amax == nil {
			*amax = b.Amax(x, how.Along, false)
		}
		how.Amax = *amax
	}
	return x, b.QuantizeAll(x, how), join
}

// CopyErrors is the result in which the graph that inspects copies tells the errors of rounding.
const CopyErrors = "stat.copies"

// A Measured says where the errors of a copy stand in [CopyErrors]: each of the [ir.ErrorSums] for
// all its Layers, from At on. Elements are those of one layer, on all devices.
type Measured struct{ At, Layers, Elements int64 }

// inspection gives the graph that rounds the masters as copies are and tells the errors, and where
// these stand, by the names of the copies' scales; nil if there are none in blocks.
func (w *QuantizedCopies) inspection(mesh []ir.Axis, held []RankParam) (*ir.Graph,
	map[string]Measured, error) {
	b, at, places := ir.NewBuilder("copies", mesh...), int64(0), map[string]Measured{}
	var sums []*ir.Value
	for i := range held {
		name, l := held[i].Name, &held[i].Layout
		t := l.Stored
		t.Elem = dtype.F32
		var master, amax *ir.Value
		for _, c := range w.Copies {
			if c.Param != name {
				continue
			}
			if master == nil {
				master = b.Input(name, ir.Param, t, "")
			}
			x, list, _ := rounded(b, &c, master, l, &amax)
			sums = append(sums, b.QuantizeStats(x, c.Quantize, list...))
			layers := x.Type.StackDepth()
			m := Measured{at, layers, ir.Devices(mesh) * x.Type.Shape().Elements() / layers}
			places[c.Names[1]] = m
			at += ir.ErrorSums * m.Layers
		}
	}
	if len(sums) == 0 || b.Err() != nil {
		return nil, nil, b.Err()
	}
	all := b.JoinSums(b.Together(sums[0].Type.Dims[0].Name, sums))
	g, err := named(b, []result{{all, CopyErrors, program.Stat.For("")}})
	return g, places, err
}

// Made is the result in which an update reports on the scales of the copies that it makes, in the
// order of [Part.Made].
const Made = "stat.made"

// withStats adds the report on copies that were made.
func (w *QuantizedCopies) withStats(b *ir.Builder, out []result) []result {
	if w == nil || !w.Watch {
		return out
	}
	var scales []*ir.Value
	for _, name := range w.scales() {
		if i := slices.IndexFunc(out, func(r result) bool { return r.name == name }); i >= 0 {
			scales = append(scales, out[i].v)
		}
	}
	if len(scales) == 0 {
		return out
	}
	return append(out, result{b.JoinStats(b.ScaleStats(scales...)), Made, program.Stat.For("")})
}

// scales names those of the copies, in order.
func (w *QuantizedCopies) scales() (list []string) {
	return lists.Map(w.Copies, func(c ir.Copy) string { return c.Names[1] })
}

// graph gives that which makes all copies of the masters alone, for the beginning of a run and for
// other programs that take its place; nil if there are none in blocks and nobody watches.
func (w *QuantizedCopies) graph(mesh []ir.Axis, held []RankParam) (*ir.Graph, error) {
	if w == nil || len(w.Copies) == 0 && !w.Watch {
		return nil, nil
	}
	b := ir.NewBuilder("copies", mesh...)
	var out []result
	for i := range held {
		name, l := held[i].Name, &held[i].Layout
		elem := w.plain[name]
		plain := elem.Valid() && (elem != dtype.F32 || l.copied())
		if !plain && !slices.ContainsFunc(w.Copies, func(c ir.Copy) bool { return c.Param == name }) {
			continue
		}
		t := l.Stored
		t.Elem = dtype.F32
		master := b.Input(name, ir.Param, t, "")
		out = append(out, w.make(b, name, master, l)...)
		if plain {
			x := b.Convert(master, elem)
			if l.copied() {
				x = l.gather(b, x)
			}
			out = append(out, result{x, program.Copy.Of(name), program.Copy.For(name)})
		}
	}
	if len(out) == 0 {
		return nil, nil
	}
	return named(b, w.withStats(b, out))
}
