package spmd

import (
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
)

// quantizes reports whether a graph has quantized GEMMs, a linear layer with a format for fprop,
// dgrad or wgrad, or rows with the format of a payload.
func quantizes(g *ir.Graph) bool {
	return slices.ContainsFunc(g.Ops, func(op *ir.Op) bool {
		if op.Body != nil && quantizes(op.Body) {
			return true
		}
		keys := []string{"fprop", "dgrad", "wgrad", ir.Payload}
		return slices.ContainsFunc(keys, func(key string) bool {
			return op.Attrs.Text(key) != ""
		})
	})
}

// QuantizedCopies collects what graphs take in place of the master parameters: quantized copies,
// and compute copies in the model's type. Expand adds to it; the update reads it.
type QuantizedCopies struct {
	Copies    []ir.QuantizedParam
	plain     map[string]dtype.DType // parameters that some graph takes unquantized, and their types
	quantized bool
	// Monitor adds statistics of the scales to the update, and builds Quantize even if no copy is
	// quantized, so that a policy can be changed during a run.
	Monitor bool
}

// Expand lowers a graph's quantized GEMMs to quantize and block_dot operations, in place, and
// records the copies that it takes. Its parameters must still have their own names.
func (w *QuantizedCopies) Expand(g *ir.Graph, report ir.Report) (stats []ir.Stat, err error) {
	if quantizes(g) {
		var copies []ir.QuantizedParam
		copies, stats, err = ir.LowerQuantized(g, program.Copy.Of, plan.DataAxes(), report)
		if err != nil {
			return nil, err
		}
		w.quantized = true
		for _, c := range copies {
			same := func(d ir.QuantizedParam) bool { return d.Names[0] == c.Names[0] }
			if !slices.ContainsFunc(w.Copies, same) {
				w.Copies = append(w.Copies, c)
			}
		}
	}
	if w.plain == nil {
		w.plain = map[string]dtype.DType{}
	}
	for _, v := range g.Params() {
		if !slices.ContainsFunc(w.Copies, func(c ir.QuantizedParam) bool {
			return slices.Contains(c.Names, v.Name)
		}) {
			w.plain[v.Name] = v.Type.Elem
		}
	}
	return stats, nil
}

// unused reports whether a result of an update is an unquantized copy that no graph takes.
func (w *QuantizedCopies) unused(is program.Meaning) bool {
	return w != nil && w.quantized && is.Role == program.Copy && !w.plain[is.Param].Valid()
}

// make quantizes the copies of a parameter from a device's shard of the master. Where the loss
// takes the gathered parameter, shards are quantized before the gather if blocks do not cross them:
// the gather then moves quantized bytes.
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
			switch {
			case join && i < 2:
				v = l.gather(b, v)
			case i < 2:
				v = c.Moved.Of(b, v)
			}
			if slices.ContainsFunc(out, func(r result) bool { return r.v == v }) {
				v = b.Scale(v, 1) // a result has one name
			}
			out = append(out, result{v, c.Names[i], program.Copy.For(param)})
		}
	}
	return out
}

// rounded quantizes a device's shard of a parameter. It returns the source of the rounding, the
// codes and scales, and whether these are still to be gathered. NVFP4's tensor amax is shared by
// all copies of a weight, in both orientations.
func rounded(b *ir.Builder, c *ir.QuantizedParam, kept *ir.Value, l *Layout,
	amax **ir.Value) (x *ir.Value, list []*ir.Value, join bool) {
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

// CopyErrors is the result of Inspect with the quantization errors of the copies.
const CopyErrors = "stat.copies"

// An ErrorSpan locates the errors of one copy in [CopyErrors]: from index At, [ir.ErrorSums] rows
// of Layers values. Elements is the size of one layer on all devices.
type ErrorSpan struct{ At, Layers, Elements int64 }

// inspection builds the graph that quantizes the masters like the copies and measures the errors.
// It also returns their spans, by the names of the copies' scales; nil if no copy is quantized.
func (w *QuantizedCopies) inspection(mesh []ir.Axis, params []RankParam) (*ir.Graph,
	map[string]ErrorSpan, error) {
	b, at, spans := ir.NewBuilder("copies", mesh...), int64(0), map[string]ErrorSpan{}
	var sums []*ir.Value
	for i := range params {
		name, l := params[i].Name, &params[i].Layout
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
			m := ErrorSpan{at, layers, ir.Devices(mesh) * x.Type.Shape().Elements() / layers}
			spans[c.Names[1]] = m
			at += ir.ErrorSums * m.Layers
		}
	}
	if len(sums) == 0 || b.Err() != nil {
		return nil, nil, b.Err()
	}
	all := b.JoinSums(b.ConcatAny(sums[0].Type.Dims[0].Name, sums))
	g, err := named(b, []result{{all, CopyErrors, program.Stat.For("")}})
	return g, spans, err
}

// CopyStats is the result in which an update reports statistics of the scales of the copies that it
// makes, in the order of [RankUpdate.CopyStats].
const CopyStats = "stat.made"

// withStats adds the statistics of the copies, if they are monitored.
func (w *QuantizedCopies) withStats(b *ir.Builder, out []result) []result {
	if w == nil || !w.Monitor {
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
	return append(out, result{b.JoinStats(b.ScaleStats(scales...)), CopyStats, program.Stat.For("")})
}

// scales lists the names of the copies' scales, in order.
func (w *QuantizedCopies) scales() (list []string) {
	return lists.Map(w.Copies, func(c ir.QuantizedParam) string { return c.Names[1] })
}

// graph builds the program that makes all copies from the masters: at the start of a run, and when
// other programs take over. It is nil if no copy is quantized and nothing is monitored.
func (w *QuantizedCopies) graph(mesh []ir.Axis, params []RankParam) (*ir.Graph, error) {
	if w == nil || len(w.Copies) == 0 && !w.Monitor {
		return nil, nil
	}
	b := ir.NewBuilder("copies", mesh...)
	var out []result
	for i := range params {
		name, l := params[i].Name, &params[i].Layout
		elem := w.plain[name]
		plain := elem.Valid() && (elem != dtype.F32 || l.copied())
		isCopy := func(c ir.QuantizedParam) bool { return c.Param == name }
		if !plain && !slices.ContainsFunc(w.Copies, isCopy) {
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
