package eval

import (
	"math"
	"slices"
	"sort"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
)

// An Array is a value on one device, dense and row-major.
type Array struct {
	Type ir.Type
	Data []float64
}

// New makes zeros.
func New(t ir.Type) *Array { return &Array{t, make([]float64, t.Shape().Elements())} }

// Run runs a graph: inputs[name][device] are what each device of the mesh is given, the last axis
// fastest. The result is results[i][device].
func Run(g *ir.Graph, inputs map[string][]*Array) ([][]*Array, error) {
	g, err := ir.WriteOut(g, func(*ir.Row) bool { return true })
	if err != nil {
		return nil, err
	}
	m := &machine{mesh: g.Mesh, devices: int(ir.Devices(g.Mesh)), at: map[*ir.Value][]*Array{}}
	for _, v := range g.Inputs {
		list := inputs[v.Name]
		if len(list) != m.devices {
			return nil, diag.New(diag.BadInput, "input %s has %d shards for %d devices", v, len(list),
				m.devices).At("eval of graph %s", g.Name)
		}
		for i, a := range list {
			if a == nil {
				return nil, diag.New(diag.BadInput, "input %s is nil for device %d", v, i).
					At("eval of graph %s", g.Name)
			}
			if int64(len(a.Data)) != v.Type.Shape().Elements() {
				return nil, diag.New(diag.BadInput, "input %s has %d elements; its type is %s", v,
					len(a.Data), v.Type).At("eval of graph %s", g.Name)
			}
		}
		m.at[v] = list
	}
	for _, op := range g.Ops {
		if err := m.run(op); err != nil {
			return nil, err
		}
	}
	out := lists.Map(g.Results, func(v *ir.Value) []*Array { return m.at[v] })
	return out, nil
}

type machine struct {
	mesh    []ir.Axis
	devices int
	at      map[*ir.Value][]*Array
}

func (m *machine) run(op *ir.Op) error {
	switch f := collectives[op.Kind]; {
	case op.Kind == "repeat":
		return m.repeat(op)
	case op.Kind == "cross_entropy" && len(op.Axes()) > 0:
		m.crossEntropy(op)
		return nil
	case op.Attrs.Text("ring") != "":
		m.ring(op)
		return nil
	case f != nil:
		m.at[op.Out[0]] = f(m, op, m.at[op.In[0]])
		return nil
	}
	var f kernel
	for _, group := range []map[string]kernel{kernels, blockKernels, quantizeKernels,
		expertKernels} {
		if group[op.Kind] != nil {
			f = group[op.Kind]
		}
	}
	if f == nil {
		return diag.New(diag.GraphInvalid, "the interpreter does not know %s", op.Kind).
			Try("give its row a Lower")
	}
	for _, v := range op.Out {
		m.at[v] = make([]*Array, m.devices)
	}
	for d := range m.devices {
		in := lists.Map(op.In, func(v *ir.Value) *Array { return &Array{v.Type, m.at[v][d].Data} })
		m.localize(op, in, d)
		out := make([]*Array, len(op.Out))
		for i, v := range op.Out {
			out[i] = New(v.Type)
			m.at[v][d] = out[i]
		}
		f(op, in, out)
	}
	return nil
}

// repeat runs a body round by round.
func (m *machine) repeat(op *ir.Op) error {
	l, carries := op.Loop(), len(op.Loop().Carries)
	for _, v := range op.Out[carries:] {
		m.at[v] = m.each(func(int) *Array { return New(v.Type) })
	}
	state := make([][]*Array, carries)
	for i := range state {
		state[i] = m.at[op.In[i]]
	}
	for round := range l.N {
		layer := int(l.StackIndex(round))
		inputs := map[string][]*Array{}
		for i, v := range op.Body.Inputs {
			switch {
			case l.IsCarry(i):
				inputs[v.Name] = state[i]
			case l.IsStack(i):
				inputs[v.Name] = m.each(func(d int) *Array {
					return layerOf(m.at[op.In[i]][d], v.Type, layer)
				})
			default:
				inputs[v.Name] = m.at[op.In[i]]
			}
		}
		out, err := Run(op.Body, inputs)
		if err != nil {
			return err
		}
		copy(state, out[:carries])
		for i, list := range out[carries:] {
			for d, a := range list {
				copy(layerOf(m.at[op.Out[carries+i]][d], a.Type, layer).Data, a.Data)
			}
		}
	}
	for i := range state {
		m.at[op.Out[i]] = state[i]
	}
	return nil
}

// layerOf is the part of a stack that one round sees.
func layerOf(stack *Array, t ir.Type, layer int) *Array {
	n := int(t.Shape().Elements())
	return &Array{t, stack.Data[layer*n : (layer+1)*n]}
}

// group lists, for each device, the devices along the axes of an operation that it belongs with,
// itself included, in order.
func (m *machine) group(op *ir.Op, device int) []int {
	list := []int{device}
	for _, axis := range op.Axes() {
		var wider []int
		for _, d := range list {
			wider = append(wider, m.along(axis, d)...)
		}
		list = wider
	}
	return list
}

// along is group for one axis.
func (m *machine) along(axis string, device int) []int {
	size, stride := ir.Along(m.mesh, axis)
	list, step := make([]int, size), int(stride)
	first := device - device/step%len(list)*step
	for i := range list {
		list[i] = first + i*step
	}
	return list
}

var collectives = map[string]func(m *machine, op *ir.Op, in []*Array) []*Array{
	"amax":       (*machine).amax,
	"join_stats": (*machine).joinStats,
	"all_reduce": func(m *machine, op *ir.Op, in []*Array) []*Array {
		return m.each(func(d int) *Array {
			return sum(in, m.group(op, d), op.Out[0].Type)
		})
	},
	"all_gather": func(m *machine, op *ir.Op, in []*Array) []*Array {
		return m.each(func(d int) *Array {
			return gathered(op.In[0], in, m.group(op, d), op.Attrs.Text("dim"))
		})
	},
	"reduce_scatter": func(m *machine, op *ir.Op, in []*Array) []*Array {
		return m.each(func(d int) *Array {
			group := m.group(op, d)
			return shardOf(sum(in, group, op.In[0].Type), op, slices.Index(group, d))
		})
	},
	"all_to_all": func(m *machine, op *ir.Op, in []*Array) []*Array {
		return m.each(func(d int) *Array {
			group := m.group(op, d)
			whole := gathered(op.In[0], in, group, op.Attrs.Text("from"))
			return own(whole, op.Out[0].Type, op.Attrs.Text("to"), slices.Index(group, d))
		})
	},
	"shard_slice": func(m *machine, op *ir.Op, in []*Array) []*Array {
		return m.each(func(d int) *Array {
			group := m.group(op, d)
			return shardOf(&Array{op.In[0].Type, in[d].Data}, op, slices.Index(group, d))
		})
	},
}

func (m *machine) each(f func(d int) *Array) []*Array {
	out := make([]*Array, m.devices)
	for d := range out {
		out[d] = f(d)
	}
	return out
}

func sum(in []*Array, group []int, t ir.Type) *Array {
	total := New(t)
	for _, d := range group {
		for i, v := range in[d].Data {
			total.Data[i] += v
		}
	}
	return total
}

// shardOf is the n-th shard of what an operation splits.
func shardOf(x *Array, op *ir.Op, n int) *Array {
	return own(x, op.Out[0].Type, op.Attrs.Text("dim"), n)
}

// own takes the n-th shard of type t along a dimension.
func own(x *Array, t ir.Type, dim string, n int) *Array {
	out := New(t)
	size := out.Type.Size(dim)
	walk(out.Type, func(at []int64, i int) {
		from := slices.Clone(at)
		from[out.Type.Index(dim)] += int64(n) * size
		out.Data[i] = x.Data[offset(x.Type, from)]
	})
	return out
}

// paste puts part into out along a dimension from a place on, and gives the place after it.
func paste(out, part *Array, dim string, at int64) int64 {
	k := out.Type.Index(dim)
	walk(part.Type, func(from []int64, i int) {
		to := slices.Clone(from)
		to[k] += at
		out.Data[offset(out.Type, to)] = part.Data[i]
	})
	return at + part.Type.Size(dim)
}

// gathered concatenates the shards of a value that a group of devices has.
func gathered(v *ir.Value, shards []*Array, group []int, dim string) *Array {
	t, at := ir.Type{Elem: v.Type.Elem, Dims: slices.Clone(v.Type.Dims)}, int64(0)
	t.Dims[t.Index(dim)].Size *= int64(len(group))
	whole := New(t)
	for _, from := range group {
		at = paste(whole, &Array{v.Type, shards[from].Data}, dim, at)
	}
	return whole
}

// walk visits every place of a type, in memory order.
func walk(t ir.Type, visit func(at []int64, i int)) {
	at := make([]int64, len(t.Dims))
	for i := range int(t.Shape().Elements()) {
		visit(at, i)
		for k := len(at) - 1; k >= 0; k-- {
			if at[k]++; at[k] < t.Dims[k].Size {
				break
			}
			at[k] = 0
		}
	}
}

func offset(t ir.Type, at []int64) int64 {
	n := int64(0)
	for k, d := range t.Dims {
		n = n*d.Size + at[k]
	}
	return n
}

// pick reads x at a place of another type, by the names of the dimensions; those x lacks are
// ignored.
func pick(x *Array, t ir.Type, at []int64) float64 { return x.Data[pickOffset(x.Type, t, at)] }

func pickOffset(x, t ir.Type, at []int64) int64 {
	n := int64(0)
	for _, d := range x.Dims {
		n = n*d.Size + at[t.Index(d.Name)]
	}
	return n
}

// A kernel computes the results of an operation on one device.
type kernel func(op *ir.Op, in, out []*Array)

var kernels = map[string]kernel{
	"add":           binary(func(a, b float64) float64 { return a + b }),
	"sub":           binary(func(a, b float64) float64 { return a - b }),
	"mul":           binary(func(a, b float64) float64 { return a * b }),
	"div":           divide,
	"neg":           unary(func(x float64) float64 { return -x }),
	"exp":           unary(math.Exp),
	"log":           unary(math.Log),
	"sqrt":          unary(math.Sqrt),
	"sin":           unary(math.Sin),
	"cos":           unary(math.Cos),
	"tanh":          unary(math.Tanh),
	"relu":          unary(func(x float64) float64 { return math.Max(x, 0) }),
	"rsqrt":         unary(func(x float64) float64 { return 1 / math.Sqrt(x) }),
	"sigmoid":       unary(func(x float64) float64 { return 1 / (1 + math.Exp(-x)) }),
	"convert":       convert,
	"stop_gradient": unary(func(x float64) float64 { return x }),
	"to_host":       unary(func(x float64) float64 { return x }),
	"to_device":     unary(func(x float64) float64 { return x }),
	"split":         func(_ *ir.Op, in, out []*Array) { copy(out[0].Data, in[0].Data) },
	"merge":         func(_ *ir.Op, in, out []*Array) { copy(out[0].Data, in[0].Data) },
	"rename":        func(_ *ir.Op, in, out []*Array) { copy(out[0].Data, in[0].Data) },
	"scale": func(op *ir.Op, in, out []*Array) {
		for i, x := range in[0].Data {
			out[0].Data[i] = x * op.Attrs.Float("by")
		}
	},
	"shift": func(op *ir.Op, in, out []*Array) {
		for i, x := range in[0].Data {
			out[0].Data[i] = x + op.Attrs.Float("by")
		}
	},
	"fill": func(op *ir.Op, _, out []*Array) {
		for i := range out[0].Data {
			out[0].Data[i] = op.Attrs.Float("value")
		}
	},
	"iota": func(op *ir.Op, _, out []*Array) {
		k := out[0].Type.Index(op.Attrs.Text("dim"))
		walk(out[0].Type, func(at []int64, i int) { out[0].Data[i] = float64(at[k]) })
	},
	"compare":      compare,
	"select":       selectKernel,
	"transpose":    named,
	"broadcast":    named,
	"slice":        slice,
	"pad":          pad,
	"concat":       concat,
	"sum":          reduce(0, func(a, b float64) float64 { return a + b }),
	"max":          reduce(math.Inf(-1), func(a, b float64) float64 { return max(a, b) }), // NaN wins
	"dot":          dot,
	"linear":       dot,
	"linear_dx":    dot,
	"linear_dw":    dot,
	"embedding":    embedding,
	"embedding_dw": embeddingDW,
	"gather":       gather,
	"scatter":      scatter,
	"top_k":        topK,
}

func unary(f func(float64) float64) kernel {
	return func(_ *ir.Op, in, out []*Array) {
		for i, x := range in[0].Data {
			out[0].Data[i] = f(x)
		}
	}
}

func binary(f func(a, b float64) float64) kernel {
	return func(_ *ir.Op, in, out []*Array) {
		t := out[0].Type
		walk(t, func(at []int64, i int) { out[0].Data[i] = f(pick(in[0], t, at), pick(in[1], t, at)) })
	}
}

var comparisons = map[string]func(a, b float64) bool{
	"eq": func(a, b float64) bool { return a == b },
	"ne": func(a, b float64) bool { return a != b },
	"lt": func(a, b float64) bool { return a < b },
	"le": func(a, b float64) bool { return a <= b },
	"gt": func(a, b float64) bool { return a > b },
	"ge": func(a, b float64) bool { return a >= b },
}

func compare(op *ir.Op, in, out []*Array) {
	t := out[0].Type
	walk(t, func(at []int64, i int) {
		if comparisons[op.Attrs.Text("how")](pick(in[0], t, at), pick(in[1], t, at)) {
			out[0].Data[i] = 1
		}
	})
}

func selectKernel(_ *ir.Op, in, out []*Array) {
	t := out[0].Type
	walk(t, func(at []int64, i int) {
		if pick(in[0], t, at) != 0 {
			out[0].Data[i] = pick(in[1], t, at)
		} else {
			out[0].Data[i] = pick(in[2], t, at)
		}
	})
}

// named moves elements by the names of dimensions: a transpose, a broadcast.
func named(_ *ir.Op, in, out []*Array) {
	t := out[0].Type
	walk(t, func(at []int64, i int) { out[0].Data[i] = pick(in[0], t, at) })
}

func slice(op *ir.Op, in, out []*Array) {
	k := in[0].Type.Index(op.Attrs.Text("dim"))
	walk(out[0].Type, func(at []int64, i int) {
		from := slices.Clone(at)
		from[k] += op.Attrs.Int("from")
		out[0].Data[i] = in[0].Data[offset(in[0].Type, from)]
	})
}

func pad(op *ir.Op, in, out []*Array) {
	paste(out[0], in[0], op.Attrs.Text("dim"), op.Attrs.Int("low"))
}

func concat(op *ir.Op, in, out []*Array) {
	at := int64(0)
	for _, x := range in {
		at = paste(out[0], x, op.Attrs.Text("dim"), at)
	}
}

func reduce(start float64, f func(a, b float64) float64) kernel {
	return func(_ *ir.Op, in, out []*Array) {
		for i := range out[0].Data {
			out[0].Data[i] = start
		}
		walk(in[0].Type, func(at []int64, i int) {
			to := pickOffset(out[0].Type, in[0].Type, at)
			out[0].Data[to] = f(out[0].Data[to], in[0].Data[i])
		})
	}
}

// dot sums products over the named dimensions: it walks over all dimensions of both.
func dot(op *ir.Op, in, out []*Array) {
	all := ir.Type{Dims: slices.Clone(out[0].Type.Dims)}
	for _, name := range op.Attrs.List("over") {
		all.Dims = append(all.Dims, ir.Dim{Name: name, Size: in[0].Type.Size(name)})
	}
	walk(all, func(at []int64, _ int) {
		out[0].Data[pickOffset(out[0].Type, all, at)] += pick(in[0], all, at) * pick(in[1], all, at)
	})
}

func embedding(_ *ir.Op, in, out []*Array) {
	width := in[1].Type.Dims[1].Size
	for i, id := range in[0].Data {
		if id >= 0 { // else the row is another device's
			copy(out[0].Data[int64(i)*width:], in[1].Data[int64(id)*width:int64(id+1)*width])
		}
	}
}

func embeddingDW(_ *ir.Op, in, out []*Array) {
	width := out[0].Type.Dims[1].Size
	for i, id := range in[0].Data {
		if id < 0 {
			continue
		}
		for k := range width {
			out[0].Data[int64(id)*width+k] += in[1].Data[int64(i)*width+k]
		}
	}
}

func gather(_ *ir.Op, in, out []*Array) {
	n, k := last(in[0].Type), last(out[0].Type)
	for i, at := range in[1].Data {
		out[0].Data[i] = in[0].Data[int64(i)/k*n+int64(at)]
	}
}

func scatter(_ *ir.Op, in, out []*Array) {
	n, k := last(out[0].Type), last(in[0].Type)
	for i, at := range in[1].Data {
		out[0].Data[int64(i)/k*n+int64(at)] += in[0].Data[i]
	}
}

func last(t ir.Type) int64 { return t.Dims[len(t.Dims)-1].Size }

func topK(op *ir.Op, in, out []*Array) {
	n, k := last(in[0].Type), op.Attrs.Int("k")
	for row := range int64(len(in[0].Data)) / n {
		x := in[0].Data[row*n : (row+1)*n]
		order := make([]int, n)
		for i := range order {
			order[i] = i
		}
		sort.SliceStable(order, func(a, b int) bool { return x[order[a]] > x[order[b]] })
		for i := range k {
			out[0].Data[row*k+i], out[1].Data[row*k+i] = x[order[i]], float64(order[i])
		}
	}
}

// Knows reports whether the interpreter computes an operation of package ir itself.
func Knows(kind string) bool {
	return kind == "repeat" || collectives[kind] != nil || kernels[kind] != nil ||
		blockKernels[kind] != nil || quantizeKernels[kind] != nil || expertKernels[kind] != nil
}

// convert drops the fraction where the result is a whole number, and asks for other than 0 where it
// is a mask.
func convert(_ *ir.Op, in, out []*Array) {
	for i, x := range in[0].Data {
		switch elem := out[0].Type.Elem; {
		case elem == dtype.Pred && x != 0:
			x = 1
		case elem.Kind() != dtype.Float:
			x = math.Trunc(x)
		}
		out[0].Data[i] = x
	}
}

// divide drops the fraction where the result is a whole number.
func divide(op *ir.Op, in, out []*Array) {
	binary(func(a, b float64) float64 { return a / b })(op, in, out)
	if out[0].Type.Elem.Kind() != dtype.Float {
		for i, x := range out[0].Data {
			out[0].Data[i] = math.Trunc(x)
		}
	}
}
