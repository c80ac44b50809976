package ir

import (
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/program"
)

// The inputs that stochastic rounding takes: seed and step of a run, and for each token its place
// in the batch of a step, so that the numbers drawn do not depend on who draws them.
const (
	// InputNoise is [seed, step] of a run; InputRows is, for each token, its position in the batch of
	// a step. Random numbers depend on both and not on sharding.
	InputNoise = "noise"
	InputRows  = "rows"
	// InputSlotNoise is [seed, draw] for the rows of experts, which are numbered by slots and not by
	// tokens: draw differs between the microbatches of a run. A slot's token depends on the plan.
	InputSlotNoise = "slot_noise"
)

// A QuantizedParam is a quantized copy of a weight, which a graph takes in the place of the
// parameter. Its quantization was moved out of the graph: it is done once per update, not once per
// microbatch.
type QuantizedParam struct {
	Param string      // the parameter's name
	Names []string    // of the inputs: codes, scales and for NVFP4 the largest magnitude
	Elem  dtype.DType // what the parameter is rounded to first
	Quantize
	Moved Reshard // of codes and scales, once they are made
}

// A Reshard says that what a dimension of a value is sharded along an axis becomes another's
// sharding, by an all-to-all. Its zero value leaves it.
type Reshard struct{ Axis, From, To string }

// Of moves the shards of a value.
func (r Reshard) Of(b *Builder, v *Value) *Value {
	if r.Axis == "" {
		return v
	}
	return b.AllToAll(v, r.Axis, r.From, r.To)
}

// outermost says how the copy of a parameter is sharded if a GEMM wants its gathered codes with the
// sharded dimension within others: by its first dimension instead, so that what a gather receives
// is in order. An update moves the shards once; each gather's result would have to be transposed.
// Packed codes and experts stay.
func outermost(op *Op, q Quantize) (r Reshard) {
	if !gathersParam(op) || q.Format != MXFP8 {
		return r
	}
	t, axis, dim := op.In[0].Type, op.Attrs.Text("axis"), op.Attrs.Text("dim")
	first := Without(t.Dims, append(slices.Clone(q.Along), Layer)...)
	if len(first) == 0 || first[0].Name == dim || t.Index(ExpertDim) >= 0 ||
		len(t.Place.Axes(first[0].Name)) > 0 {
		return r
	}
	return Reshard{axis, dim, first[0].Name}
}

// LowerQuantized lowers the GEMMs of linears that have a quantized format: operands are quantized,
// each once per orientation and from its unrounded source, and multiplied by block_dot.
//
// Operands are quantized before devices gather their shards where that gives the same codes, so
// that collectives carry quantized bytes. A parameter, or its shards, is not quantized here but
// requested as a [QuantizedParam], whose inputs are named by copyName(param). dataAxes are the axes
// of the mesh that shard the batch.
//
// Call it after Grad. It changes g; after an error g is unusable. It may report on what it rounds:
// results [StatScales], [StatAmax] and [StatErrors] come after the graph's own, and the returned
// list says what is where in them.
func LowerQuantized(g *Graph, copyName func(param string) string, dataAxes []string,
	report Report) ([]QuantizedParam, []Stat, error) {
	e := &quantLowering{Rewriter: Rewriter{ExtendGraph(g), map[*Value]*Value{}}, copyName: copyName,
		dataAxes: dataAxes, copies: &[]QuantizedParam{}, done: map[string][]*Value{}}
	if report != ReportNothing {
		e.stats = &statsCollector{what: report}
	}
	e.walk()
	var stats []Stat
	if e.stats != nil && e.err == nil {
		stats = e.report()
	}
	if e.err != nil {
		return nil, nil, e.err
	}
	g.prune()
	if err := g.Verify(); err != nil {
		return nil, nil, diag.From(err).Because("quantized GEMMs of %s were lowered", g.Name)
	}
	return *e.copies, stats, nil
}

// A quantLowering rewrites one graph or one body.
type quantLowering struct {
	Rewriter
	copyName func(string) string
	dataAxes []string
	copies   *[]QuantizedParam
	done     map[string][]*Value // what was quantized, by value and manner
	requests []request           // of a body: inputs that the loop must give it
	stats    *statsCollector     // nil if nothing is reported
	inside   bool
}

// A request is something that a body needs from its loop.
type request struct {
	from   *Value   // an input of the body, or nil
	how    Quantize // how it is quantized
	moved  Reshard  // and where its shards go
	values []*Value // the inputs that stand for it
	noise  string   // or one of the inputs of stochastic rounding
}

// walk goes through the operations in order; those that stay keep their names.
func (e *quantLowering) walk() {
	e.inPlace(func(op *Op) []*Value {
		switch {
		case op.Kind == "linear" && op.Attrs.Text("fprop") != "":
			return []*Value{e.gemm(op, "fprop", "x", "w")}
		case op.Kind == "linear_dx" && op.Attrs.Text("dgrad") != "":
			return []*Value{e.gemm(op, "dgrad", "dy", "wT")}
		case op.Kind == "block_dw":
			return []*Value{e.weightGrad(op)}
		case op.Attrs.Text(Payload) != "" && op.Kind == "dispatch":
			return []*Value{e.dispatch(op)}
		case op.Kind == "all_to_all" && decodes(op.In[0]):
			return []*Value{e.movedCodes(op, op.Attrs, op.In[0].def.In)}
		case op.Kind == "quantize":
			return e.codesAgain(op)
		case op.Kind == "repeat":
			e.loop(op)
		}
		return nil
	})
}

// gemm lowers fprop or dgrad of a linear; x and w are the names of its operands in reports.
func (e *quantLowering) gemm(op *Op, format, x, w string) (y *Value) {
	f, over := Format(op.Attrs.Text(format)), op.Attrs.List("over")
	e.Tagged(op.Tag, func() {
		how := Quantize{Format: f, Along: over}
		if format == "dgrad" {
			how = e.stochastic(op, how, 0)
		}
		a := e.quantize(op.In[0], how)
		b := e.quantize(op.In[1], Quantize{Format: f, Along: over, Tile: f.Tiles()})
		e.record(op, x, f, a, "")
		kept, name := e.local(b)
		e.record(op, w, f, kept, name)
		y = e.BlockDot(f, a, b, over, op.Out[0].Type.Elem)
	})
	return y
}

// weightGrad lowers wgrad: the input was quantized in the forward graph, the gradient is quantized
// here, along the dimensions of the batch.
func (e *quantLowering) weightGrad(op *Op) (dw *Value) {
	f, over := Format(op.Attrs.Text("wgrad")), op.Attrs.List("over")
	last := len(op.In) - 1
	e.Tagged(op.Tag, func() {
		how := e.stochastic(op, Quantize{Format: f, Along: over, Hadamard: f.Hadamard()}, 1)
		dy := e.quantize(op.In[last], how)
		x, y := op.In[:last], dy
		e.record(op, "xT", f, x, "")
		e.record(op, "dyT", f, y, "")
		if op.Attrs.Bool("swap") {
			x, y = y, x
		}
		dw = e.BlockDot(f, x, y, over, op.Out[0].Type.Elem)
	})
	return dw
}

// stochastic makes the rounding of a gradient stochastic where the format wants it. The quantized
// gradients of a layer are numbered in pairs: dgrad's and wgrad's.
func (e *quantLowering) stochastic(op *Op, q Quantize, which int64) Quantize {
	if !q.Format.Stochastic() {
		return q
	}
	from := InputNoise
	if op.In[len(op.In)-1].Type.Index(ExpertDim) >= 0 {
		from = InputSlotNoise
	}
	q.Noise = e.noise(from, op.Attrs.Int("layer"), op.Attrs.get("layer") != nil)
	q.Tensor = 2*op.Attrs.Int("slot") + which
	return q
}

// quantize gives a value's codes, scales and, if the format has a tensor scale, its amax: before
// shards are gathered if that gives the same, and a parameter as inputs of its own.
func (e *quantLowering) quantize(v *Value, q Quantize) []*Value {
	if e.err != nil {
		return nil
	}
	key := v.Name + " " + q.key()
	if list := e.done[key]; list != nil {
		return list
	}
	var list []*Value
	op := v.def
	switch {
	case op == nil && v.Role == Param:
		list = e.copyOf(v, q, Reshard{})
	case decodes(v) && q.key() == decodedBy(op).key():
		list = slices.Clone(op.In)
	case e.commutes(op, q) && e.divides(outermost(op, q), op):
		r := outermost(op, q)
		list = slices.Clone(e.copyOf(op.In[0], q, r))
		if e.err != nil {
			return nil
		}
		for i, shard := range list[:2] {
			a := movedAttrs(op, shard).With("dim", r.To)
			list[i] = e.CopyWith(op, a, nil, shard)[0]
		}
	case e.commutes(op, q):
		list = slices.Clone(e.quantize(op.In[0], q))
		if e.err != nil {
			return nil
		}
		for i, shard := range list[:2] {
			list[i] = e.CopyWith(op, movedAttrs(op, shard), nil, shard)[0]
		}
	default:
		if q.Noise != nil {
			q.Rows, q.Cols = e.positions(v.Type)
		}
		list = e.QuantizeAll(v, q)
	}
	e.done[key] = list
	return list
}

// divides tells whether a parameter has shards to move, and as many as the axis has devices.
func (e *quantLowering) divides(r Reshard, op *Op) bool {
	return r.Axis != "" && op.In[0].Type.Size(r.To)%e.g.AxisSize(r.Axis) == 0
}

// key tells ways to quantize apart.
func (q Quantize) key() string {
	words := append([]string{string(q.Format)}, q.Along...)
	if q.Tile {
		words = append(words, "tile")
	}
	if q.Hadamard {
		words = append(words, "hadamard")
	}
	if q.Noise != nil {
		words = append(words, "noise", strconv.FormatInt(q.Tensor, 10))
	}
	return strings.Join(words, " ")
}

// commutes tells whether quantization may come before an operation: a gather of shards, or what
// repeats key heads for the devices that need them.
func (e *quantLowering) commutes(op *Op, q Quantize) bool {
	if op == nil || op.Tag != Gather && !gathersParam(op) {
		return false
	}
	from := op.In[0].Type
	switch op.Kind {
	case "all_gather":
		return q.Within(from)
	case "shard_slice":
		return q.Within(op.Out[0].Type)
	case "broadcast": // of whole blocks and tiles
		return q.Within(from)
	case "merge": // copies with what they are copies of
		def := op.In[0].def
		return def != nil && def.Kind == "broadcast" && e.commutes(def, q)
	}
	return false
}

// gathersParam tells whether an operation gathers the shards of a parameter.
func gathersParam(op *Op) bool { return op.Kind == "all_gather" && op.In[0].Role == Param }

// Within tells whether whole blocks and tiles lie within a device's shard of type t, so that
// quantizing before or after the gather gives the same codes.
func (q Quantize) Within(t Type) bool {
	if last := q.Along[len(q.Along)-1]; t.Size(last) == 0 || t.Size(last)%q.Format.Block() != 0 {
		return false
	}
	side := t.TileDim(q.Along).Size
	return !q.Tile || side > 0 && side%q.Format.Block() == 0
}

// movedAttrs gives the attributes of a move for codes or scales, whose dimensions are in another
// order. The move of codes has no gradient.
func movedAttrs(op *Op, shard *Value) Attrs {
	switch op.Kind {
	case "all_gather":
		return op.Attrs.With("sum", "")
	case "broadcast": // copies stand behind what they are copies of
		before := op.Out[0].Type.Dims[op.Attrs.Int("at")-1].Name
		return op.Attrs.With("at", int64(shard.Type.Index(before)+1))
	}
	return op.Attrs
}

// copyOf gives the inputs that stand for a quantized parameter.
func (e *quantLowering) copyOf(v *Value, q Quantize, r Reshard) []*Value {
	key := v.Name + " " + q.key() + " " + r.To
	if list := e.done[key]; list != nil {
		return list
	}
	types, err := quantized(e.g, v, q)
	if err != nil {
		e.fail(err)
		return nil
	}
	if n := e.g.AxisSize(r.Axis); r.Axis != "" {
		for i, t := range types {
			types[i] = resharded(resharded(t, r.Axis, r.From, "", n, 1), r.Axis, r.To, r.To, 1, n)
		}
	}
	base := v.Name
	if !e.inside {
		base = e.copyName(v.Name)
	}
	base += "." + string(q.Format) + "." + strings.Join(q.Along, "_")
	if r.To != "" {
		base += ".by_" + r.To
	}
	w := request{from: v, how: q, moved: r}
	for i, suffix := range []string{"", ".scale", ".amax"}[:len(types)] {
		w.values = append(w.values, &Value{Name: base + suffix, Type: types[i], Role: Param,
			Source: v.Source, Means: program.Copy.For(v.Name)})
		e.names.used[base+suffix] = true
	}
	e.done[key] = w.values
	if e.inside {
		e.requests = append(e.requests, w)
		return w.values
	}
	e.g.Inputs = append(e.g.Inputs, w.values...)
	c := QuantizedParam{Param: v.Name, Elem: v.Type.Elem, Quantize: q, Moved: r}
	c.Names = lists.Map(w.values, func(x *Value) string { return x.Name })
	*e.copies = append(*e.copies, c)
	return w.values
}

// quantized gives the types of a quantized value: codes, scales and, if the format has a tensor
// scale, amax.
func quantized(g *Graph, v *Value, q Quantize) ([]Type, error) {
	q.Hadamard = false
	op := &Op{Kind: "quantize", In: []*Value{v}, Attrs: q.attrs()}
	if q.Format.TensorScale() {
		op.In = append(op.In, &Value{Type: Type{Elem: dtype.F32}})
	}
	types, err := inferQuantize(g, op)
	if err != nil || !q.Format.TensorScale() {
		return types, err
	}
	largest := Type{Elem: dtype.F32}
	if len(v.Type.Dims) > 0 && v.Type.Dims[0].Name == Layer {
		largest.Dims = v.Type.Dims[:1]
	}
	return append(types, largest), nil
}

// loop lowers a body, and gives it the inputs that it requests.
func (e *quantLowering) loop(op *Op) {
	inner := &quantLowering{Rewriter: Rewriter{ExtendGraph(op.Body), map[*Value]*Value{}},
		copyName: e.copyName, dataAxes: e.dataAxes, copies: e.copies, done: map[string][]*Value{},
		inside: true}
	if e.stats != nil {
		inner.stats = &statsCollector{}
	}
	inner.walk()
	if inner.err != nil {
		e.err = inner.err
		return
	}
	for _, w := range inner.requests {
		var given []*Value
		l, stack := op.Loop(), true
		switch {
		case w.noise == InputNoise || w.noise == InputSlotNoise:
			given = []*Value{e.noises(w.noise, l)}
		case w.noise != "":
			given, stack = []*Value{e.input(w.noise, w.values[0].Type)}, false
		default:
			i := slices.Index(op.Body.Inputs, w.from)
			stack = l.IsStack(i)
			given = e.moved(op.In[i], w.how, w.moved)
		}
		if e.err != nil {
			return
		}
		at := len(op.In)
		if stack {
			at -= len(l.Invariants)
			op.Attrs = op.Attrs.With("stacked", len(l.Stacks)+len(given))
		}
		op.In = slices.Insert(op.In, at, given...)
		op.Body.Inputs = slices.Insert(op.Body.Inputs, at, w.values...)
	}
	if e.stats != nil && e.err == nil {
		e.listen(op, inner)
	}
}

// moved quantizes a value and moves its shards; the copy of a parameter comes moved.
func (e *quantLowering) moved(v *Value, q Quantize, r Reshard) []*Value {
	if v.def == nil && v.Role == Param && r.Axis != "" {
		return e.copyOf(v, q, r)
	}
	list := slices.Clone(e.quantize(v, q))
	for i := range list[:min(2, len(list))] {
		list[i] = r.Of(e.Builder, list[i])
	}
	return list
}

// noise gives [seed, step, layer] of an input. In a body the layer differs in every round.
func (e *quantLowering) noise(from string, layer int64, known bool) *Value {
	dim := func(n int64) Type {
		return Type{Elem: dtype.S32, Dims: []Dim{{InputNoise, n}}}
	}
	if e.inside && !known {
		return e.bodyInput(from, dim(3))
	}
	key := from + " " + strconv.FormatInt(layer, 10)
	if list := e.done[key]; list != nil {
		return list[0]
	}
	v := e.Concat(InputNoise, e.input(from, dim(2)), e.Fill(dim(1), float64(layer)))
	e.done[key] = []*Value{v}
	return v
}

// noises stacks [seed, step, layer] for the rounds of a loop: [layer, 3].
func (e *quantLowering) noises(from string, l Loop) *Value {
	n, first := l.N, l.First
	layers := Type{Elem: dtype.S32, Dims: []Dim{{Layer, n}, {InputNoise, 1}}}
	both := e.Broadcast(e.input(from, Type{Elem: dtype.S32, Dims: []Dim{{InputNoise, 2}}}), 0,
		Dim{Layer, n})
	count := e.Add(e.Iota(layers, Layer), e.Fill(layers, float64(first)))
	return e.Concat(InputNoise, both, count)
}

// bodyInput requests an input of a body, once.
func (e *quantLowering) bodyInput(name string, t Type) *Value {
	for _, w := range e.requests {
		if w.noise == name {
			return w.values[0]
		}
	}
	v := &Value{Name: name, Type: t, Role: Data}
	e.names.used[name] = true
	e.requests = append(e.requests, request{noise: name, values: []*Value{v}})
	return v
}

// input finds an input that is no parameter, or adds it.
func (e *quantLowering) input(name string, t Type) *Value {
	if v := e.g.Find(name); v != nil {
		return v
	}
	if e.inside {
		return e.bodyInput(name, t)
	}
	return e.Input(name, Data, t, "")
}

// positions gives the rows and columns of a gradient's elements in the whole tensor: rows number
// the tokens of a step's batch, or the slots of experts, columns the features, offset by the
// device's shard.
func (e *quantLowering) positions(t Type) (rows, cols *Value) {
	if t.Index(ExpertDim) >= 0 {
		return e.counted(t, ExpertDim, Slots),
			e.counted(t, Names(Without(t.Dims, ExpertDim, Slots))...)
	}
	batch := []string{Batch, Seq}
	r := Type{Elem: dtype.S32}
	for _, name := range batch {
		d := Dim{name, t.Size(name)}
		for _, s := range t.Place {
			switch {
			case s.Dim != name:
			case slices.Contains(e.dataAxes, s.Axis):
				r.Place = r.Place.With(s.Axis, name)
			default:
				d.Size *= e.g.AxisSize(s.Axis)
			}
		}
		r.Dims = append(r.Dims, d)
	}
	rows = e.input(InputRows, r)
	cols = e.counted(t, Names(Without(t.Dims, batch...))...)
	for _, a := range e.g.Mesh { // the first axis is outermost
		if how := t.Place.On(a.Name); slices.Contains(batch, how) && r.Place.On(a.Name) == "" {
			rows = e.ShardSlice(rows, a.Name, how)
		}
	}
	return rows, cols
}

// counted numbers the elements of some dimensions of a tensor, of which a device has a shard.
func (e *quantLowering) counted(t Type, dims ...string) *Value {
	c, n := Type{Elem: dtype.S32}, int64(1)
	for _, name := range dims {
		d := Dim{name, t.Size(name)}
		for _, s := range t.Place {
			if s.Dim == name {
				d.Size *= e.g.AxisSize(s.Axis)
			}
		}
		c.Dims = append(c.Dims, d)
		n *= d.Size
	}
	v := e.Iota(Type{Elem: dtype.S32, Dims: []Dim{{dims[0], n}}}, dims[0])
	for i, d := range c.Dims[1:] {
		n /= c.Dims[i].Size
		v = e.Split(v, c.Dims[i].Name, c.Dims[i].Name, d.Name, n)
	}
	for _, d := range c.Dims {
		for _, a := range t.Place.Nested(e.g.Mesh, d.Name) {
			v = e.ShardSlice(v, a.Name, d.Name)
		}
	}
	return v
}

// prune drops operations whose results nobody reads, and inputs of loops and parameters of graphs
// that nobody takes.
func (g *Graph) prune() {
	read := lists.Set(g.Results)
	for i, op := range slices.Backward(g.Ops) {
		if !slices.ContainsFunc(op.Out, func(v *Value) bool { return read[v] }) {
			g.Ops[i] = nil
			continue
		}
		if op.Kind == "repeat" {
			op.pruneLoop()
		}
		for _, v := range op.In {
			read[v] = true
		}
	}
	g.Ops = slices.DeleteFunc(g.Ops, func(op *Op) bool { return op == nil })
	g.Inputs = slices.DeleteFunc(g.Inputs, func(v *Value) bool { return v.Role == Param && !read[v] })
}

// pruneLoop drops what a body does not read of what every round, or one round, is given.
func (op *Op) pruneLoop() {
	inputs := slices.Clone(op.Body.Inputs)
	op.Body.prune() // drops parameters
	l := op.Loop()
	left := len(l.Stacks)
	var in []*Value
	for i, v := range inputs {
		if slices.Contains(op.Body.Inputs, v) {
			in = append(in, op.In[i])
		} else if l.IsStack(i) {
			left--
		}
	}
	op.In, op.Attrs = in, op.Attrs.With("stacked", left)
}
