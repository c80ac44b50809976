package ir

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/program"
)

// A Stat locates the statistics of one operand among the numbers that a graph reports of its
// quantized GEMMs.
type Stat struct {
	// Layer is the first layer, of Layers that follow each other in a loop.
	Layer, Layers int64
	Slot          int64 // the number of the linear in its block
	// Operand names what was quantized: x and w of fprop, dy and wT of dgrad, xT and dyT of wgrad.
	Operand string
	Format  Format
	// Top, Sum and Some are indices into the result [StatScales], for the first layer: the largest
	// scale byte, the sum of all, and the number that are not zero, over all devices. The next layer's
	// are Stride further. Amax is the index of the largest magnitude in [StatAmax]; -1 if the format
	// has no tensor scale.
	Top, Sum, Some, Amax int64
	Stride, AmaxStride   int64
	Copy                 string // the input that holds the scales of a weight
	// Errors is the index of the first of its [ErrorSums] in [StatErrors], -1 if errors are not
	// measured; the next layer's is ErrorStride further. Elements were rounded on all devices
	// together, each by Copies devices; the GEMM sums over Length of them.
	Errors, ErrorStride      int64
	Elements, Copies, Length int64
}

// The results that report.
const (
	StatScales = "stat.scales"
	StatAmax   = "stat.amax"
	StatErrors = "stat.errors"
)

// A Report is what a graph reports of its quantized GEMMs.
type Report int

// Reports of scales read a 32nd or a 16th of the bytes; reports of errors read all codes and the
// source.
const (
	ReportNothing Report = iota
	ReportScales
	ReportErrors // and scales
)

// inferScaleStats gives for each argument the largest byte, behind these the sums of bytes, and
// behind these how many are not zero, of what one device has.
func inferScaleStats(_ *Graph, op *Op) ([]Type, error) {
	n := int64(0)
	for _, v := range op.In {
		if b := v.Type.Elem.Bits(); b != 8 {
			return nil, fmt.Errorf("%s is not made of bytes", v.Type)
		}
		n += v.Type.StackDepth()
	}
	if n == 0 {
		return nil, fmt.Errorf("takes scales")
	}
	return []Type{{Elem: dtype.S32, Dims: []Dim{{dimStat, 3 * n}}}}, nil
}

// StackDepth is the number of stacked layers of a type, or 1; statistics keep layers apart.
func (t Type) StackDepth() int64 {
	if len(t.Dims) > 0 && t.Dims[0].Name == Layer {
		return t.Dims[0].Size
	}
	return 1
}

// inferJoinStats gives the largest of all devices, then the sum of all.
func inferJoinStats(g *Graph, op *Op) ([]Type, error) {
	t, elem := op.In[0].Type, dtype.S32
	if op.Attrs.Bool("sum") {
		elem = dtype.F64
	}
	if t.Elem != elem || len(t.Dims) != 1 || len(op.Axes()) != len(g.Mesh) {
		return nil, fmt.Errorf("takes a list of %s numbers, along all axes of the mesh", elem)
	}
	if elem == dtype.F64 {
		return []Type{t}, nil
	}
	return []Type{{Elem: t.Elem, Dims: []Dim{{dimStat, 2 * t.Dims[0].Size}}}}, nil
}

// dimStat is the dimension that statistics are listed along.
const dimStat = "stat"

// ScaleStats reports on the scales that a device has: the largest byte of each argument, then the
// sum of each, which wraps around, then the number that are not zero. Of a stack it tells these
// layer by layer.
func (b *Builder) ScaleStats(scales ...*Value) *Value {
	return b.one("scale_stats", nil, scales...)
}

// JoinStats all-reduces what the devices of the mesh report: of every number the maximum, then of
// every number the sum. Replicated operands are counted once per replica. Reports of many GEMMs are
// joined at once: the messages are small, and latency counts.
func (b *Builder) JoinStats(stats *Value) *Value {
	return b.one("join_stats", attrs(map[string]any{"axes": b.axes()}), stats)
}

// axes lists the axes of the mesh.
func (b *Builder) axes() (list []string) {
	return lists.Map(b.g.Mesh, func(a Axis) string { return a.Name })
}

// A statsCollector collects what a graph reports.
type statsCollector struct {
	what   Report
	stats  []Stat
	codes  []*Value // of stats
	scales []*Value // of this graph or body, each once
	amaxes []*Value
	inner  []collected // of loops
}

// collected is what one loop reports.
type collected struct {
	scales, amaxes *Value // stacked; amaxes may be nil
	stats          []Stat
	codes          []*Value // in the body
	loop           *Op
}

// record notes that a product reads an operand.
func (e *quantLowering) record(op *Op, operand string, f Format, list []*Value, copied string) {
	if e.stats == nil || e.err != nil {
		return
	}
	s := Stat{Layer: op.Attrs.Int("layer"), Layers: 1, Slot: op.Attrs.Int("slot"), Operand: operand,
		Format: f, Amax: -1, Copy: copied, Errors: -1}
	place := func(all *[]*Value, v *Value) int64 {
		if i := slices.Index(*all, v); i >= 0 {
			return int64(i)
		}
		*all = append(*all, v)
		return int64(len(*all) - 1)
	}
	s.Top = place(&e.stats.scales, list[1])
	if len(list) > 2 {
		s.Amax = place(&e.stats.amaxes, list[2])
	}
	e.stats.stats, e.stats.codes = append(e.stats.stats, s), append(e.stats.codes, list[0])
}

// local gives the scales of a weight as the device holds them before shards are gathered, and the
// input that they are.
func (e *quantLowering) local(list []*Value) ([]*Value, string) {
	if e.err != nil { // quantize gave nothing
		return list, ""
	}
	v := list[1]
	for v.def != nil && v.def.Kind != "quantize" {
		v = v.def.In[0]
	}
	list = slices.Clone(list)
	list[1] = v
	if v.def == nil {
		return list, v.Name
	}
	return list, ""
}

// numbers gives the reports of one graph or body as two lists of numbers; nil where there is
// nothing to report.
func (e *quantLowering) numbers() (scales, amaxes *Value) {
	t := e.stats
	if len(t.scales) > 0 {
		scales = e.ScaleStats(t.scales...)
	}
	for i := range t.stats {
		t.stats[i].Sum = t.stats[i].Top + int64(len(t.scales))
		t.stats[i].Some = t.stats[i].Sum + int64(len(t.scales))
	}
	parts := lists.Map(t.amaxes, func(v *Value) *Value { return e.Broadcast(v, 0, Dim{dimStat, 1}) })
	return scales, e.ConcatAny(dimStat, parts)
}

// report ends a graph: what loops and the graph itself tell becomes results.
func (e *quantLowering) report() []Stat {
	t := e.stats
	scales, amaxes := e.numbers()
	var all []Stat
	var both [2][]*Value
	var at [2]int64
	add := func(k int, v *Value) (from int64) {
		from = at[k]
		if v == nil {
			return from
		}
		if len(v.Type.Dims) == 2 { // of a loop
			v = e.Merge(v, dimStat, Layer, dimStat)
		}
		both[k], at[k] = append(both[k], v), at[k]+v.Type.Dims[0].Size
		return from
	}
	list := append([]collected{{scales, amaxes, t.stats, t.codes, nil}}, t.inner...)
	var sources []source
	for _, one := range list {
		from, amaxFrom := add(0, one.scales), add(1, one.amaxes)
		for i, s := range one.stats {
			sources = append(sources, source{one.codes[i], one.loop})
			s.Top, s.Sum, s.Some = s.Top+from, s.Sum+from, s.Some+from
			if s.Amax >= 0 {
				s.Amax += amaxFrom
			}
			all = append(all, s)
		}
	}
	for k, name := range []string{StatScales, StatAmax} {
		if len(both[k]) == 0 {
			continue
		}
		v := e.ConcatAny(dimStat, both[k])
		if v.def == nil || slices.Contains(e.g.Results, v) {
			v = e.Add(v, e.Fill(v.Type, 0))
		}
		if name == StatScales {
			v = e.JoinStats(v)
			for i := range all { // sums stand in the second half
				all[i].Sum, all[i].Some = all[i].Sum+at[0], all[i].Some+at[0]
			}
		}
		if e.err != nil {
			return nil
		}
		v.Name, v.Means = name, program.Stat.For("")
		e.g.Results = append(e.g.Results, v)
	}
	if t.what == ReportErrors {
		e.measure(all, sources)
	}
	return all
}

// listen lets a loop stack up what its body tells.
func (e *quantLowering) listen(op *Op, inner *quantLowering) {
	scales, amaxes := inner.numbers()
	if e.err = inner.err; e.err != nil {
		return
	}
	l := op.Loop()
	one := collected{stats: inner.stats.stats, codes: inner.stats.codes, loop: op}
	if scales != nil {
		one.scales = e.stacked(op, scales)
	}
	if amaxes != nil {
		one.amaxes = e.stacked(op, amaxes)
	}
	for i := range one.stats {
		s := &one.stats[i]
		s.Copy = op.outside(s.Copy)
		s.Layer, s.Layers = l.First, l.N
		s.Stride, s.AmaxStride = int64(3*len(inner.stats.scales)), int64(len(inner.stats.amaxes))
	}
	e.stats.inner = append(e.stats.inner, one)
}

// outside gives the name outside of a loop of what an input of its body is a layer of, or "" if it
// is no input there.
func (op *Op) outside(inside string) string {
	for i, v := range op.Body.Inputs {
		if v.Name == inside && op.In[i].def == nil {
			return op.In[i].Name
		}
	}
	return ""
}
