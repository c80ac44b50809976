package rewrite

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/kernels/fused"
)

// Attributes of a [QuantizeOnce] to NVFP4 that rounds by random bits.
const (
	attrStochastic = "stochastic_ways" // the orientations, "along" and "across", that do
	attrTensors    = "tensors"         // two numbers for each source, of both orientations
)

// onceNVFP4 tells whether the kernel of NVFP4 has a quantization: columns are transformed and rows
// are not, or neither, in tiles of the matrix. The largest magnitude is one, or one for each layer
// of a stack. Random bits depend on places of the matrix's rows and columns.
func onceNVFP4(op *ir.Op) bool {
	x, dims := op.In[0].Type, op.Attrs.List("along")
	at, way := following(x, dims), orientation(op)
	tile, stochastic := op.Attrs.Bool("tile"), op.Attrs.Bool("stochastic")
	cols := at + len(dims)
	if way == 0 {
		cols = at
	}
	switch {
	case slices.Contains(dims, ir.Layer) || cols == 0 || x.Dims[cols-1].Name == ir.Layer:
		return false
	case tile && (stochastic || way == 0 && x.Dims[at-1].Name != x.TileDim(dims).Name ||
		way == 1 && x.Dims[len(x.Dims)-1].Name != x.TileDim(dims).Name):
		return false
	case !tile && op.Attrs.Bool("hadamard") != (way == 1):
		return false
	case !stochastic:
		return len(op.In) == 2
	}
	return len(op.In) == 5 && op.In[2].Type.Shape().Elements() == 3 && placed(op, cols)
}

// placed tells whether the places that random bits are hashed from are of a matrix whose columns
// begin with dimension cols.
func placed(op *ir.Op, cols int) bool {
	dims := op.In[0].Type.Dims
	return slices.Equal(op.In[3].Type.Dims, dims[:cols]) &&
		slices.Equal(op.In[4].Type.Dims, dims[cols:])
}

// A joiner makes one operation of the quantizations of a source, and one of the searches for their
// largest magnitudes.
type joiner struct {
	set  *kernels.Selector
	by   map[*ir.Value][]*ir.Op
	done map[*ir.Value]bool // results of operations that were visited
}

// now is what has taken the place of a value.
func now(r *ir.Rewriter, v *ir.Value) *ir.Value {
	if v := r.Replacement[v]; v != nil {
		return v
	}
	return v
}

// joins tells whether q can be computed where op is, by one kernel.
func (j *joiner) joins(r *ir.Rewriter, op, q *ir.Op) bool {
	if r.Replacement[q.Out[0]] != nil || q.Attrs.Text("format") != op.Attrs.Text("format") ||
		q.Attrs.Bool("tile") != op.Attrs.Bool("tile") {
		return false
	}
	for _, v := range q.In[1:] {
		if v.Def() != nil && !j.done[v] {
			return false
		}
	}
	in := lists.Map(q.In, func(v *ir.Value) *ir.Value { return now(r, v) })
	switch {
	case op.Attrs.Bool("tile"):
		return in[1] == op.In[1]
	case op.Attrs.Bool("stochastic") && q.Attrs.Bool("stochastic"):
		return slices.EqualFunc(in[2:], op.In[2:], same)
	case op.Attrs.Bool("stochastic") || q.Attrs.Bool("stochastic"):
		across, drawn := op, op
		if orientation(op) == 0 {
			across = q
		}
		if q.Attrs.Bool("stochastic") {
			drawn = q
		}
		dims := across.Attrs.List("along")
		return placed(drawn, following(op.In[0].Type, dims)+len(dims))
	}
	return true
}

// scales are the operands of a kernel beside its source, and the attributes that tell of them.
func scales(r *ir.Rewriter, a ir.Attrs, ops [2]*ir.Op) (ir.Attrs, []*ir.Value) {
	var in, places []*ir.Value
	var stochastic []string
	tensors := []string{"0", "0"}
	for k, q := range ops {
		if q == nil {
			continue
		}
		list := lists.Map(q.In, func(v *ir.Value) *ir.Value { return now(r, v) })
		if !a.Bool("tile") || len(in) == 0 {
			in = append(in, list[1])
		}
		if q.Attrs.Bool("stochastic") {
			stochastic, places = append(stochastic, []string{"along", attrAcross}[k]), list[2:]
			tensors[k] = strconv.FormatInt(q.Attrs.Int("tensor"), 10)
		}
	}
	a = a.With("hadamard", false).With("stochastic", false).With("tensor", nil)
	if len(stochastic) > 0 {
		a = a.With(attrStochastic, stochastic).With(attrTensors, tensors)
	}
	return a, append(in, places...)
}

// amax puts the searches for the largest magnitudes of one source, as it is and transformed, into
// one kernel, if kernels of our own quantize it.
func (j *joiner) amax(r *ir.Rewriter, op *ir.Op) (own []*ir.Value) {
	var ops [2][]*ir.Op // searches that find the same: as it is, and transformed
	var quantize [2]*ir.Op
	k := transformed(op)
	if quantize[k] = j.scaled(op, op.In[0]); quantize[k] == nil {
		return nil
	}
	ops[k] = []*ir.Op{op}
	for _, other := range j.by[op.In[0]] {
		if other.Kind != "amax" || other == op || r.Replacement[other.Out[0]] != nil {
			continue
		}
		q, to := j.scaled(other, op.In[0]), transformed(other)
		switch {
		case len(ops[to]) > 0 && slices.EqualFunc(other.Attrs, ops[to][0].Attrs, equalAttr):
			ops[to] = append(ops[to], other)
		case q != nil && quantize[to] == nil && orientation(q) == to && orientation(quantize[k]) == k &&
			fits(quantize, q):
			ops[to], quantize[to] = []*ir.Op{other}, q
		}
	}
	a := op.Attrs.With("hadamard", false).With("along", nil).With("format", string(ir.NVFP4))
	for k, q := range quantize {
		if q == nil {
			continue
		}
		dims := q.Attrs.List("along")
		if k == 0 && orientation(q) == 1 { // of a weight: any rows and columns do
			x := q.In[0].Type
			dims = ir.Names(x.Dims[following(x, dims)+len(dims):])
		}
		a = a.With([]string{"along", attrAcross}[k], dims)
	}
	out := r.ReplaceWith(op, AmaxOnce, a, op.In[0])
	for _, list := range ops {
		for _, other := range list {
			if other == op {
				own = out[:1]
				continue
			}
			r.Substitute(other.Out[0], out[0])
			j.done[other.Out[0]] = true
		}
		if len(list) > 0 {
			out = out[1:]
		}
	}
	return own
}

// transformed is 1 for the largest magnitude after a Hadamard transform.
func transformed(op *ir.Op) int {
	if op.Attrs.Bool("hadamard") {
		return 1
	}
	return 0
}

func equalAttr(a, b ir.Attr) bool { return a.Key == b.Key && reflect.DeepEqual(a.Value, b.Value) }

// same tells whether two values are one, or come from one by the same few operations, such as the
// places of columns.
func same(a, b *ir.Value) bool {
	x, y := a.Def(), b.Def()
	if a == b || x == nil || y == nil {
		return a == b
	}
	return x.Kind == y.Kind && len(x.Out) == 1 && x.Body == nil &&
		slices.EqualFunc(x.Attrs, y.Attrs, equalAttr) && slices.EqualFunc(x.In, y.In, same)
}

// scaled finds a quantization of a source by a kernel of our own that takes its largest magnitude
// from op.
func (j *joiner) scaled(op *ir.Op, source *ir.Value) *ir.Op {
	for _, q := range j.by[op.Out[0]] {
		if j.once(q) && q.In[0] == source && len(q.In) > 1 && q.In[1] == op.Out[0] &&
			q.Attrs.Bool("hadamard") == op.Attrs.Bool("hadamard") &&
			(!op.Attrs.Bool("hadamard") || slices.Equal(along(q), along(op))) {
			return q
		}
	}
	return nil
}

// nvfp4 decides how the source of a search for largest magnitudes is computed. They must be known
// before the source is quantized, so that either the search writes the source and the quantization
// reads it, or both compute it: whichever moves fewer bytes. A source that others read, too, is
// written by the search.
func (f *fuser) nvfp4(op *ir.Op, rest []*ir.Op) *fusion {
	once := f.fusion(nil, op)
	twice := f.widest(f.quantized, op, lists.Filter(rest, func(other *ir.Op) bool {
		return f.quantized(other) != nil && drawnAlike(f.quantized(op), f.quantized(other))
	}))
	if twice == nil || len(twice.twice) == 0 || twice.keep || len(twice.quantize) > mostParts {
		return once
	}
	// In matrices that are moved: written by the search, each source is written and read once.
	written := 0
	for _, one := range twice.quantize {
		if alone := f.fusion(nil, one); alone != nil {
			written += alone.expr.Matrices() + 2
		}
	}
	if 2*twice.expr.Matrices() < written {
		return twice
	}
	return once
}

// mostParts is how many sources one kernel of NVFP4 computes and quantizes: with more, registers
// spill.
const mostParts = 2

// quantized lists the quantization that takes all its largest magnitudes from a search of the same
// source, if there is just one.
func (f *fuser) quantized(op *ir.Op) (list []*ir.Op) {
	for _, q := range f.by[op.In[0]] {
		if q.Kind == QuantizeOnce && q.In[0] == op.In[0] && !q.Attrs.Bool("tile") && alike(op, q) &&
			q.In[0].Type.StackDepth() <= 1 && slices.Equal(q.In[1:1+len(op.Out)], op.Out) {
			list = append(list, q)
		}
	}
	if len(list) != 1 {
		return nil
	}
	return list
}

// drawnAlike tells whether random bits of two quantizations come from the same places.
func drawnAlike(a, b []*ir.Op) bool {
	if len(a) != 1 || len(b) != 1 || len(a[0].In) != len(b[0].In) {
		return false
	}
	n := len(a[0].In) - stochasticOperands(a[0])
	return slices.Equal(a[0].Attrs.List(attrStochastic), b[0].Attrs.List(attrStochastic)) &&
		slices.EqualFunc(a[0].In[n:], b[0].In[n:], same)
}

// stochasticOperands counts the operands that random bits come from.
func stochasticOperands(op *ir.Op) int {
	if len(op.Attrs.List(attrStochastic)) == 0 {
		return 0
	}
	return 3
}

// writeAgain adds the quantization of sources that it computes, as the search for their largest
// magnitudes did before.
func (u *fusion) writeAgain(r *ir.Rewriter) []*ir.Value {
	first := u.twice[0]
	in := slices.Clone(u.operands)
	var tensors []string
	for _, q := range u.twice {
		in = append(in, q.In[1:len(q.In)-stochasticOperands(q)]...)
		tensors = append(tensors, q.Attrs.List(attrTensors)...)
	}
	in = append(in, first.In[len(first.In)-stochasticOperands(first):]...)
	in = lists.Map(in, func(v *ir.Value) *ir.Value { return now(r, v) })
	out := r.ReplaceWith(first, QuantizeOnce, u.attrs(first).With(attrTensors, tensors), in...)
	handOut(r, u.twice[1:], out[len(first.Out):])
	return out[:len(first.Out)]
}

// NVFP4Of is the form of NVFP4 of a [QuantizeOnce] or an [AmaxOnce].
func NVFP4Of(op *ir.Op) (f fused.NVFP4Form, err error) {
	m, err := MatricesOf(op)
	if err != nil {
		return f, err
	}
	f.Form = fused.Form{Along: m.Along, Across: m.Across, Keep: m.Keep}
	for _, text := range op.Attrs.List(attrColumns) {
		part, err := strconv.Atoi(text)
		if err != nil {
			return f, fmt.Errorf("part %q: %w", text, err)
		}
		f.Columns = append(f.Columns, part)
	}
	if op.Kind == AmaxOnce {
		return f, nil
	}
	f.Tile = op.Attrs.Bool("tile")
	if source, err := sourceOf(op); err == nil && source.StackDepth() > 1 {
		f.Layers = int(source.StackDepth())
	}
	for _, name := range op.Attrs.List(attrStochastic) {
		f.Stochastic[map[string]int{"along": 0, attrAcross: 1}[name]] = true
	}
	list := op.Attrs.List(attrTensors)
	for i := 0; i+1 < len(list); i += 2 {
		var pair [2]int
		for k := range pair {
			if pair[k], err = strconv.Atoi(list[i+k]); err != nil {
				return f, fmt.Errorf("tensor %q: %w", list[i+k], err)
			}
		}
		f.Tensors = append(f.Tensors, pair)
	}
	return f, nil
}

// beside counts the operands of a [QuantizeOnce] that are not its expression's: of each part the
// largest magnitudes, and where random bits come from.
func beside(op *ir.Op, parts int) (n int) {
	if op.Kind == AmaxOnce || !ir.Format(op.Attrs.Text("format")).TensorScale() {
		return 0
	}
	for _, name := range []string{"along", attrAcross} {
		if len(op.Attrs.List(name)) > 0 {
			n++
		}
	}
	if op.Attrs.Bool("tile") {
		n = 1
	}
	n *= parts
	if len(op.Attrs.List(attrStochastic)) > 0 {
		n += 3
	}
	return n
}

// inferAmaxOnce gives for each source its own type, if it is kept, and the types of one amax after
// the other.
func inferAmaxOnce(g *ir.Graph, op *ir.Op) (types []ir.Type, err error) {
	e, source, err := sources(op)
	if err != nil {
		return nil, err
	}
	if op.Attrs.Bool(attrKeep) {
		types = append(types, source)
	}
	for _, name := range []string{"along", attrAcross} {
		if len(op.Attrs.List(name)) > 0 {
			list, err := inferAs("amax", g, op, &ir.Value{Type: source})
			if err != nil {
				return nil, err
			}
			types = append(types, list...)
		}
	}
	if len(types) == 0 {
		return nil, fmt.Errorf("has no orientation")
	}
	return slices.Repeat(types, len(e.Out)), nil
}

// writtenAmax is what an [AmaxOnce] means to the interpreter.
func writtenAmax(b *ir.Builder, op *ir.Op) (out []*ir.Value) {
	for _, y := range writtenSources(b, op) {
		if op.Attrs.Bool(attrKeep) {
			out = append(out, y)
		}
		for k, name := range []string{"along", attrAcross} {
			if dims := op.Attrs.List(name); len(dims) > 0 {
				out = append(out, b.Amax(y, dims, k == 1))
			}
		}
	}
	return out
}

// orientedBy is one orientation of one part of a [QuantizeOnce], with what random bits need.
func orientedBy(op *ir.Op, part, parts, way int, dims []string) ir.Quantize {
	q := ir.Quantize{Format: ir.Format(op.Attrs.Text("format")), Along: dims}
	if !q.Format.TensorScale() {
		return q
	}
	n := len(op.In) - beside(op, parts)
	stochastic := op.Attrs.List(attrStochastic)
	each := len(op.In) - n
	if len(stochastic) > 0 {
		each -= 3
	}
	each /= parts
	q.Tile = op.Attrs.Bool("tile")
	q.Hadamard = way == 1 && !q.Tile
	q.Amax = op.In[n+part*each+min(way, each-1)]
	if slices.Contains(stochastic, []string{"along", attrAcross}[way]) {
		last := op.In[len(op.In)-3:]
		q.Noise, q.Rows, q.Cols = last[0], last[1], last[2]
		q.Tensor, _ = strconv.ParseInt(op.Attrs.List(attrTensors)[2*part+way], 10, 64)
	}
	return q
}
