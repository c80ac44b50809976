package ir

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
)

// A Format is how operands of a GEMM are quantized: block-scaled along the summed dimension.
type Format = dtype.Format

// The formats. A linear has the formats of its three GEMMs in attributes fprop, dgrad and wgrad;
// where one is absent the GEMM is not quantized.
const (
	MXFP8 = dtype.MXFP8
	NVFP4 = dtype.NVFP4
)

// quantizeKinds are the operations of quantized GEMMs. A linear's formats are lowered after its
// gradient was taken (LowerQuantized), so that only what the gradient saves needs an operation
// before.
func quantizeKinds() map[string]Kind {
	return map[string]Kind{
		"quantize":  {2, inferQuantize, nil, quantizeWork},
		"amax":      {1, takes(1, inferAmax), nil, amaxWork},
		"block_dot": {1, inferBlockDot, nil, blockWork("format")},
		"block_dw":  {1, inferBlockDW, nil, blockWork("wgrad")},
		// What reads it decodes as it reads.
		"dequantize": {1, inferDequantize, nil, nil},
		// Scales are bytes: their maximum, sum and number of nonzeros are reported.
		"scale_stats": {1, inferScaleStats, nil, streams},
		"join_stats":  {1, takes(1, inferJoinStats), nil, joinWork},
		// What rounding did to a source.
		"quantize_stats": {1, inferQuantizeStats, nil, streams},
	}
}

// A Quantize says how a value is quantized.
type Quantize struct {
	Format Format
	// Along lists the dimensions that the GEMM sums over. They come last in the codes, and blocks lie
	// along the last of them.
	Along []string
	// Tile gives one scale to 16 × 16 elements, so that a weight has the same codes in both
	// orientations.
	Tile bool
	// Hadamard transforms groups of 16 elements first, which spreads outliers.
	Hadamard bool
	// Amax is the largest magnitude of the tensor, f32[] or f32[layer], which formats with a tensor
	// scale need.
	Amax *Value
	// Noise, the seed and the step of a run, makes rounding stochastic; Tensor numbers what is
	// rounded, and Rows and Cols are the places of its elements in the whole: Rows has the dimensions
	// of the batch, Cols the others.
	Noise, Rows, Cols *Value
	Tensor            int64
}

// Quantize gives codes [..., along] and scales [..., along / block] of a value.
func (b *Builder) Quantize(x *Value, q Quantize) (codes, scales *Value) {
	in := []*Value{x}
	if q.Format.TensorScale() {
		in = append(in, q.Amax)
	}
	if q.Noise != nil {
		in = append(in, q.Noise, q.Rows, q.Cols)
	}
	a := q.attrs()
	if q.Noise != nil {
		a = a.With("stochastic", true).With("tensor", q.Tensor)
	}
	out := b.op("quantize", a, nil, in...)
	return out[0], out[1]
}

// attrs are the attributes of operations that quantize, or measure what that did.
func (q Quantize) attrs() Attrs {
	return attrs(map[string]any{"format": string(q.Format), "along": q.Along, "tile": q.Tile,
		"hadamard": q.Hadamard})
}

// quantizeOf reads them.
func quantizeOf(op *Op) Quantize {
	a := op.Attrs
	return Quantize{Format: Format(a.Text("format")), Along: a.List("along"), Tile: a.Bool("tile"),
		Hadamard: a.Bool("hadamard")}
}

// Amax gives the largest magnitude of a value over all devices, for each layer if it is a stack.
func (b *Builder) Amax(x *Value, along []string, hadamard bool) *Value {
	if b.err != nil || x == nil {
		return b.one("amax", nil, x)
	}
	axes := lists.Map(x.Type.Place, func(s AxisSharding) string { return s.Axis })
	a := map[string]any{"axes": axes, "hadamard": hadamard}
	if hadamard {
		a["along"] = along
	}
	return b.one("amax", attrs(a), x)
}

// BlockDot multiplies two quantized values (codes, scales and, if the format has a tensor scale,
// amax of each), summed over the named dimensions.
func (b *Builder) BlockDot(f Format, x, y []*Value, over []string, to dtype.DType) *Value {
	a := map[string]any{"format": string(f), "over": over, "to": to.String()}
	return b.one("block_dot", attrs(a), slices.Concat(x, y)...)
}

// formatOf reads the format of an operation, and the number of values that one argument takes.
func formatOf(op *Op, key string) (f Format, values int, err error) {
	switch f = Format(op.Attrs.Text(key)); {
	case !f.Quantized():
		return f, 0, fmt.Errorf("there is no format %q", f)
	case f.TensorScale():
		return f, 3, nil
	}
	return f, 2, nil
}

// inferQuantize gives codes with the summed dimensions last, and one scale per block.
func inferQuantize(_ *Graph, op *Op) ([]Type, error) {
	f, values, err := formatOf(op, "format")
	if err != nil {
		return nil, err
	}
	n := values - 1
	if op.Attrs.Bool("stochastic") {
		n += 3
	}
	if err := arity(op, n); err != nil {
		return nil, err
	}
	x, along := op.In[0].Type, op.Attrs.List("along")
	if _, err := KeepPlacement(x); err != nil {
		return nil, err
	}
	if !slices.Contains([]dtype.DType{dtype.F32, dtype.BF16}, x.Elem) || len(along) == 0 {
		return nil, fmt.Errorf("%s cannot be quantized along %v", x, along)
	}
	if op.Attrs.Bool("hadamard") && (!f.Hadamard() || op.Attrs.Bool("tile")) {
		return nil, fmt.Errorf("%s cannot be transformed before it is quantized to %s or in tiles", x, f)
	}
	dims := Without(x.Dims, along...)
	if op.Attrs.Bool("tile") && (x.TileDim(along).Size == 0 || x.TileDim(along).Size%f.Block() != 0) {
		return nil, fmt.Errorf("%s has no tiles of %d along %v", x, f.Block(), along)
	}
	for _, name := range along {
		if x.Index(name) < 0 {
			return nil, fmt.Errorf("%s has no %s", x, name)
		}
		dims = append(dims, Dim{name, x.Size(name)})
	}
	last := len(dims) - 1
	if dims[last].Size%f.Block() != 0 {
		return nil, fmt.Errorf("%s has no blocks of %d along %s", x, f.Block(), dims[last].Name)
	}
	scales := slices.Clone(dims)
	scales[last].Size /= f.Block()
	return []Type{{f.Codes(), dims, x.Place}, {f.Scales(), scales, x.Place}}, nil
}

// TileDim is the other side of the tiles of a weight that is quantized along some dimensions: the
// innermost of the others, in the order of the weight. Experts each have tiles of their own. Its
// size is 0 where all are summed over.
func (t Type) TileDim(along []string) Dim {
	kept := Without(t.Dims, append(slices.Clone(along), ExpertDim)...)
	if len(kept) == 0 {
		return Dim{}
	}
	return kept[len(kept)-1]
}

// inferAmax gives one number per tensor, or per layer of a stack; all axes that shard the tensor
// must be reduced over.
func inferAmax(_ *Graph, op *Op) ([]Type, error) {
	x := op.In[0].Type
	if _, err := KeepPlacement(x); err != nil {
		return nil, err
	}
	for _, s := range x.Place {
		if !slices.Contains(op.Axes(), s.Axis) {
			return nil, fmt.Errorf("%s is sharded along %s, which is left out", x, s.Axis)
		}
	}
	t := Type{Elem: dtype.F32}
	if len(x.Dims) > 0 && x.Dims[0].Name == Layer {
		t.Dims = x.Dims[:1]
	}
	return []Type{t}, nil
}

// inferBlockDot is inferDot of the codes, which have the summed dimensions last.
func inferBlockDot(g *Graph, op *Op) ([]Type, error) {
	f, values, err := formatOf(op, "format")
	if err != nil {
		return nil, err
	}
	if err := arity(op, 2*values); err != nil {
		return nil, err
	}
	over := op.Attrs.List("over")
	var sides []*Value
	for i := range 2 {
		codes, scales := op.In[i*values].Type, op.In[i*values+1].Type
		if codes.Elem != f.Codes() || scales.Elem != f.Scales() || len(codes.Dims) < len(over) {
			return nil, fmt.Errorf("%s and %s are not %s", codes, scales, f)
		}
		tail := Names(codes.Dims[len(codes.Dims)-len(over):])
		if !slices.Equal(tail, over) {
			return nil, fmt.Errorf("%s does not have %v last", codes, over)
		}
		want := slices.Clone(codes.Dims)
		want[len(want)-1].Size /= f.Block()
		if !slices.Equal(want, scales.Dims) || !scales.Place.Equal(codes.Place) {
			return nil, fmt.Errorf("%s are not the scales of %s", scales, codes)
		}
		sides = append(sides, op.In[i*values])
	}
	return inferDot(g, &Op{Kind: "dot", In: sides, Attrs: op.Attrs})
}

// inferBlockDW is wgrad from the quantized input that the forward pass saved.
func inferBlockDW(g *Graph, op *Op) ([]Type, error) {
	_, values, err := formatOf(op, "wgrad")
	if err != nil {
		return nil, err
	}
	if err := arity(op, values+1); err != nil {
		return nil, err
	}
	dy := op.In[values]
	x := &Value{Type: Type{dy.Type.Elem, op.In[0].Type.Dims, op.In[0].Type.Place}}
	in := []*Value{x, dy}
	if op.Attrs.Bool("swap") {
		slices.Reverse(in)
	}
	return inferDot(g, &Op{Kind: "dot", In: in, Attrs: op.Attrs})
}

// weightGrad is the gradient of a linear's weight. A quantized wgrad reads only the quantized
// input, so that nothing wider is saved for it.
func (d *Differ) weightGrad(op *Op, dy *Value) *Value {
	rows := Names(Without(op.In[0].Type.Dims, Names(op.In[1].Type.Dims)...))
	a := op.Attrs.With("over", rows)
	f := Format(a.Text("wgrad"))
	if f == "" {
		return d.one("linear_dw", a, d.Use(op.In[0]), dy)
	}
	// The result comes out in the order of the weight, or it would have to be transposed.
	first := Without(op.In[1].Type.Dims, ExpertDim)[0].Name
	a = a.With("swap", slices.Contains(outOf(op), first))
	in := lists.Map(d.saveQuantized(op.In[0], f, rows), d.Use)
	return d.one("block_dw", a, append(in, dy)...)
}

// saveQuantized adds to the forward graph the quantized input of a linear that wgrad reads. Where
// shards were gathered the shards are saved, and gathered again.
func (d *Differ) saveQuantized(x *Value, f Format, rows []string) []*Value {
	how := Quantize{Format: f, Along: rows, Hadamard: f.Hadamard()}
	key := string(f) + " " + x.Name
	if list := d.quantized[key]; list != nil {
		return list
	}
	b := ExtendGraph(d.fwd)
	b.names = d.names // what is kept is an input of the backward graph by the same name
	var list []*Value
	if op := x.def; op != nil && op.Kind == "all_gather" && op.Tag == Gather &&
		how.Within(op.In[0].Type) {
		axis, dim := op.Attrs.Text("axis"), op.Attrs.Text("dim")
		list = slices.Clone(d.saveQuantized(op.In[0], f, rows))
		b.Tagged(Gather, func() {
			for i, v := range list[:2] {
				list[i] = b.AllGather(v, axis, dim)
			}
		})
	} else {
		tag := Tag("")
		if op != nil {
			tag = op.Tag
		}
		b.Tagged(tag, func() { list = b.QuantizeAll(x, how) })
	}
	if b.err != nil && d.err == nil {
		d.err = b.err
	}
	if d.quantized == nil {
		d.quantized = map[string][]*Value{}
	}
	d.quantized[key] = list
	return list
}

// again tells whether an operation quantizes a value that the backward graph has anyway: a result
// of attention, which its gradient reads, a product of which the gradient reads both factors, such
// as SwiGLU, or an RMS norm. Rows of experts are others': the gradient of a router reads them as
// they are.
func (d *Differ) again(op *Op) bool {
	if !d.requant || op.Kind != "quantize" || len(op.In) > 1 || op.In[0].Type.Index(ExpertDim) >= 0 {
		return false
	}
	from := op.In[0].def
	return from != nil && (from.Kind == "attention" || d.isProduct(from) || d.isNorm(from))
}

// isNorm tells an RMS norm along its last dimension whose gradient reads what it normalizes: with
// the statistics of its rows, a number each, it follows element by element.
func (d *Differ) isNorm(op *Op) bool {
	x := op.In[0]
	return op.Kind == "rms_norm" && d.needs[x] &&
		x.Type.Index(op.Attrs.Text("dim")) == len(x.Type.Dims)-1
}

// normAgain computes a norm from what it normalizes and the statistics of its rows, which are
// saved, with the roundings of the forward pass.
func (d *Differ) normAgain(op *Op) {
	b := ExtendGraph(d.fwd)
	b.names = d.names
	wide := func(b *Builder, v *Value) *Value { return b.Convert(v, dtype.F32) }
	dim := op.Attrs.Text("dim")
	var r *Value
	b.Tagged(op.Tag, func() {
		x := wide(b, op.In[0])
		mean := b.Scale(b.Sum(b.Mul(x, x), dim), 1/float64(x.Type.Size(dim)))
		r = b.Rsqrt(b.Shift(mean, op.Attrs.Float("eps")))
	})
	if b.err != nil {
		d.fail(b.err)
		return
	}
	d.Tagged(op.Tag, func() {
		w := wide(d.Builder, d.Use(op.In[1]))
		if s := op.Attrs.Float("shift"); s != 0 {
			w = d.Shift(w, s)
		}
		y := d.Mul(d.Mul(wide(d.Builder, d.Use(op.In[0])), d.residual(r)), w)
		d.used[op.Out[0]] = d.Convert(y, op.Out[0].Type.Elem)
	})
}

// isProduct tells a product whose gradient reads both factors.
func (d *Differ) isProduct(op *Op) bool {
	return op.Kind == "mul" && op.In[0].Type.Equal(op.In[1].Type) &&
		!slices.ContainsFunc(op.In, func(v *Value) bool { return !d.needs[v] })
}

// QuantizeAll quantizes a value and gives all operands of a GEMM: codes, scales and, if the format
// has a tensor scale, amax.
func (b *Builder) QuantizeAll(x *Value, q Quantize) []*Value {
	if q.Format.TensorScale() && q.Amax == nil {
		q.Amax = b.Amax(x, q.Along, q.Hadamard)
	}
	codes, scales := b.Quantize(x, q)
	if q.Format.TensorScale() {
		return []*Value{codes, scales, q.Amax}
	}
	return []*Value{codes, scales}
}

// Count gives how many times operations of a kind run, loops multiplied out.
func (g *Graph) Count(kind string) (n int64) {
	for _, op := range g.Ops {
		switch {
		case op.Kind == kind:
			n++
		case op.Body != nil:
			n += op.Loop().N * op.Body.Count(kind)
		}
	}
	return n
}
